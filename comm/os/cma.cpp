#include "comm/os/cma.h"

#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>

namespace rz {

int cma_read_process(pid_t process, std::uint64_t address, std::span<std::byte> into) noexcept {
  while (!into.empty()) {
    const iovec to{into.data(), into.size()};
    const iovec from{reinterpret_cast<void*>(address), into.size()};
    const ssize_t n = process_vm_readv(process, &to, 1, &from, 1, 0);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return n < 0 ? errno : EFAULT;
    into = into.subspan(static_cast<std::size_t>(n));  // short read: unmapped memory follows
    address += static_cast<std::uint64_t>(n);
  }
  return 0;
}

bool cma_readable(std::span<const std::byte> memory) noexcept {
  if (memory.empty()) return true;
  std::byte ends[2];
  const iovec to{ends, sizeof ends};
  const auto at = [](const std::byte& b) { return iovec{const_cast<std::byte*>(&b), 1}; };
  const iovec from[] = {at(memory.front()), at(memory.back())};
  return process_vm_readv(getpid(), &to, 1, from, 2, 0) == sizeof ends;
}

}  // namespace rz
