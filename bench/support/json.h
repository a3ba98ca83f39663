#pragma once
/// The JSON of the bench programs.

#include <nlohmann/json.hpp>

namespace rz::bench {

/// Keeps keys in the order of insertion.
using Json = nlohmann::ordered_json;

}  // namespace rz::bench
