#pragma once
/// What all ranks must agree on before anything long starts.

#include <functional>

#include "comm/communicator.h"

namespace rz::train_gpt {

/// Runs `check` here and on every other rank. If it throws rz::Error anywhere, throws the first such rank's
/// error on every rank (named unless it is rank 0), so that no rank goes on alone. Collective.
void check_on_all_ranks(Communicator&, const std::function<void()>& check);

/// Threads for this rank: the processors it may run on, divided by the ranks of this host that may run on
/// exactly the same ones, but no more than its part of what control groups let this host's ranks keep busy
/// (cpu.max); at least 1. So ranks that a launcher bound to cores of their own use them all. Collective.
int fair_threads(Communicator&);

}  // namespace rz::train_gpt
