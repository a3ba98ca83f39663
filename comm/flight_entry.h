#pragma once
/// A call that the flight recorder has (comm/os/flight_recorder.h).

#include <cstddef>
#include <cstdint>
#include <optional>

#include "collective.h"

namespace rz::flight {

struct Call;

struct CallEntry {
  CollectiveCall call;  ///< kind, counts, types, operation, root, and the order of its origin
  std::uint32_t number = 0;
  std::size_t site = 0;  ///< index into File::site and 1 more; 0: none
};

/// Nothing if these are no numbers of a call.
std::optional<CallEntry> entry_of(const Call&);

}  // namespace rz::flight
