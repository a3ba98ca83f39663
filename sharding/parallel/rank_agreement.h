#pragma once
/// What ranks exchange: texts, errors of checks, and the number of threads.

#include <functional>
#include <string>
#include <vector>

#include "../../comm/communicator.h"

namespace rz {

/// The texts of all ranks, in the order of ranks, on every rank. Collective.
std::vector<std::string> all_gather_text(Communicator&, const std::string& own);
/// The same at the root; empty elsewhere. Collective.
std::vector<std::string> gather_text(Communicator&, const std::string& own, int root);
/// The root's text on every rank. Collective.
std::string broadcast_text(Communicator&, const std::string& text, int root);

/// Runs `check` on every rank. If any rank throws rz::Error, all ranks throw the error of the lowest such
/// rank, prefixed with its number unless it is rank 0, so that no rank continues alone. Collective.
void check_on_all_ranks(Communicator&, const std::function<void()>& check);

/// Number of threads for this rank, at least 1: the processors it may run on, divided by the number of ranks
/// of this node with exactly the same set. It is limited by this rank's share of the cgroup quota of the node
/// (cpu.max). Ranks that a launcher bound to cores of their own thus use all of them. Collective.
int fair_threads(Communicator&);

}  // namespace rz
