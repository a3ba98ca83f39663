#pragma once
/// Fields by name, in messages.

#include <span>
#include <string>
#include <string_view>

#include "comm/core/error.h"
#include "sharding/data/field.h"

namespace rz {

/// Errc::invalid_argument lists the fields there are.
[[noreturn]] inline void fail_unknown_field(std::string_view name, std::span<const Field> fields) {
  std::string names;
  for (const Field& f : fields) names += concat(names.empty() ? "" : ", ", f.name);
  fail(Errc::invalid_argument, "there is no field \"", name, "\"; the samples have ", names);
}

}  // namespace rz
