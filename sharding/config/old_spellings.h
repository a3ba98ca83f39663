#pragma once
/// Older spellings of keys.

#include <map>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "sharding/config/settings.h"

namespace rz::ds {

/// Rewrites a configuration to today's keys, with a warning for each old one; keys of stage 3 get their
/// prefix without a warning. Returns today's path → its origin, "file, as OLD.PATH". It is an error if both
/// are given.
std::map<std::string, std::string> rename_old_spellings(nlohmann::json& document, const std::string& file,
                                                        std::vector<std::string>& warnings, ConfigErrors&);

}  // namespace rz::ds
