#pragma once
/// A rank's memory of the kind that -R of the programs names.

#include <memory>

#include "comm/communicator.h"

namespace rz::bench {

struct Memory {
  std::shared_ptr<std::byte> data;
  Registration registration{};  ///< ends before the memory does
};

/// `registered`: 0 ordinary memory of the communicator's device, 1 of allocate(), 2 of allocate_symmetric(),
/// which every rank calls together, 3 ordinary memory that is then registered. Zeroed in the stream's order,
/// so that every page is there. Errc::unsupported where 3 finds nothing that could be registered.
Memory memory_of(Communicator&, int registered, std::size_t bytes, const Stream& = {});

}  // namespace rz::bench
