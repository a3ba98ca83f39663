#pragma once
/// Exchange of texts between ranks.

#include <string>
#include <vector>

#include "comm/communicator.h"

namespace rz {

/// The texts of all ranks, in the order of ranks, on every rank. Collective.
std::vector<std::string> all_gather_text(Communicator&, const std::string& own);
/// The same at the root; empty elsewhere. Collective.
std::vector<std::string> gather_text(Communicator&, const std::string& own, int root);
/// The root's text on every rank. Collective.
std::string broadcast_text(Communicator&, const std::string& text, int root);

}  // namespace rz
