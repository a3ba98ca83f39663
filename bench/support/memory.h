#pragma once
/// Memory of a rank, of the kind selected by -R.

#include <memory>

#include "comm/communicator.h"

namespace rz::bench {

struct Memory {
  std::shared_ptr<std::byte> data;
  Registration registration{};  ///< ends before the memory is freed
};

/// `registered`: 0: ordinary memory on the device of the communicator; 1: from allocate(); 2: from
/// allocate_symmetric(), which is collective; 3: ordinary memory that is then registered. The memory is
/// zeroed in the order of the stream, so that all pages exist. Errc::unsupported if 3 cannot register the
/// memory.
Memory memory_of(Communicator&, int registered, std::size_t bytes, const Stream& = {});

}  // namespace rz::bench
