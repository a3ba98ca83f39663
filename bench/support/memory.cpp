#include "bench/support/memory.h"

#include <algorithm>

#include "comm/core/error.h"
#include "comm/device/memory.h"

namespace rz::bench {
namespace {

// So large that malloc uses mmap: registered memory must not share its pages.
constexpr std::size_t min_bytes_to_register = 256 << 10;

}  // namespace

Memory memory_of(Communicator& comm, int registered, std::size_t bytes, const Stream& stream) {
  if (registered == 3) bytes = std::max(bytes, min_bytes_to_register);
  Memory m{registered == 2   ? comm.allocate_symmetric(bytes)
           : registered == 1 ? comm.allocate(bytes)
                             : allocate_on(comm.options().device, bytes)};
  memset_async(m.data.get(), 0, bytes, stream);
  stream.synchronize();
  if (registered != 3) return m;
  m.registration = comm.register_buffer(m.data.get(), bytes);
  require(m.registration.zero_copy() || comm.size() == 1, Errc::unsupported, "-R 3 on rank ", comm.rank(),
          ": ", m.registration.reason());
  return m;
}

}  // namespace rz::bench
