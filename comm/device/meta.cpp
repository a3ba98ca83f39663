#include "comm/device/meta.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "comm/core/error.h"

namespace rz {

namespace {

constexpr std::size_t page = 4096;  // smaller blocks are ordinary memory, of which a pass has few

std::shared_ptr<std::byte> zeros(std::size_t bytes) {
  auto memory = allocate_host(bytes);
  std::memset(memory.get(), 0, bytes);
  return memory;
}

}  // namespace

std::shared_ptr<std::byte> allocate_meta(std::size_t bytes) {
  if (bytes < page) return zeros(bytes);
  void* const at = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED)
    fail(Errc::system, "cannot reserve addresses for ", human_bytes(bytes), ": ", std::strerror(errno));
  return {static_cast<std::byte*>(at), [bytes](std::byte* p) { ::munmap(p, bytes); }};
}

}  // namespace rz
