#pragma once
/// A program's own values in a checkpoint.

#include <cstdint>
#include <map>
#include <string>
#include <variant>

namespace rz {

using ClientValue = std::variant<bool, std::int64_t, double, std::string>;
/// As client_state of DeepSpeed: {{"epoch", 3}, {"best_loss", 0.5}, {"dataset", "wiki"}}. Numbers come back
/// with the same bits.
using ClientState = std::map<std::string, ClientValue>;

}  // namespace rz
