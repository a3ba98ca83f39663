#include "comm/transports/shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>

#include "comm/core/error.h"

namespace rz {

namespace {

constexpr std::size_t huge = std::size_t{2} << 20;
#ifdef MADV_COLLAPSE
constexpr int collapse = MADV_COLLAPSE;
#else
constexpr int collapse = 25;  // from Linux 6.1 on; EINVAL before
#endif

/// Address space that begins where a huge page can; null: there is none.
void* aligned_space(std::size_t bytes) {
  const std::size_t all = bytes + huge;
  void* const from = mmap(nullptr, all, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (from == MAP_FAILED) return nullptr;
  auto* const begin = static_cast<std::byte*>(from);
  const std::size_t before = (huge - reinterpret_cast<std::uintptr_t>(from) % huge) % huge;
  if (before) munmap(begin, before);
  munmap(begin + before + bytes, all - before - bytes);
  return begin + before;
}

std::byte* map_fd(int fd, std::size_t bytes, int protection) {
  void* const place = bytes >= huge ? aligned_space((bytes + 4095) / 4096 * 4096) : nullptr;
  void* const at = mmap(place, bytes, protection, MAP_SHARED | (place ? MAP_FIXED : 0), fd, 0);
  if (at == MAP_FAILED) fail_errno("mmap", str("of ", human_bytes(bytes), " of shared memory"));
  return static_cast<std::byte*>(at);
}

/// Huge pages for all that has room for one, as far as the system has them now; the rest stays empty. Each
/// needs a page to begin with. The kernel does so for who asks, unless it is told to deny them to all.
void take_huge_pages(int fd, std::byte* at, std::size_t bytes) {
  const std::size_t whole = bytes / huge * huge;
  for (std::size_t offset = 0; offset < whole; offset += huge)
    if (fallocate(fd, 0, static_cast<off_t>(offset), 1) != 0) return;  // who fills the rest finds out
  (void)madvise(at, whole, collapse);                                  // without, small pages do
}

unsigned long long number_in(const char* file) {
  std::ifstream in(file);
  unsigned long long value = 0;
  return in >> value ? value : ~0ull;
}

[[noreturn]] void no_memory(std::size_t bytes, int error) {
  fail(Errc::system, "posix_fallocate of shared memory: need ", human_bytes(bytes), ", have about ",
       human_bytes(available_memory()), ": ", std::strerror(error), " (errno ", error,
       "); use smaller buffers or fewer ranks on this host, or raise the container's memory limit");
}

}  // namespace

unsigned long long available_memory() {
  unsigned long long available = ~0ull;
  std::ifstream in("/proc/meminfo");
  for (std::string key, unit; in >> key;) {
    unsigned long long kib = 0;
    in >> kib;
    if (key == "MemAvailable:") available = kib * 1024;
    std::getline(in, unit);
  }
  const auto left = [](unsigned long long limit, unsigned long long used) {
    return limit == ~0ull || used == ~0ull || limit < used ? ~0ull : limit - used;
  };
  available = std::min(
      available, left(number_in("/sys/fs/cgroup/memory.max"), number_in("/sys/fs/cgroup/memory.current")));
  return std::min(available, left(number_in("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
                                  number_in("/sys/fs/cgroup/memory/memory.usage_in_bytes")));
}

SharedMemory SharedMemory::create(std::size_t bytes) {
  SharedMemory m;
  m.fd_ = Descriptor(memfd_create("ringzero", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!m.fd_) fail_errno("memfd_create");
  // Beyond a cgroup's limit the kernel kills rather than refuses: ask first where it matters.
  if (bytes >= (64u << 20) && bytes > available_memory()) no_memory(bytes, ENOMEM);
  int error = EFBIG;
  if (bytes >= huge && bytes <= static_cast<std::size_t>(PTRDIFF_MAX)) {
    if (ftruncate(m.fd_.get(), static_cast<off_t>(bytes)) != 0) no_memory(bytes, errno);
    m.data_ = map_fd(m.fd_.get(), bytes, PROT_READ | PROT_WRITE);
    m.size_ = bytes;
    take_huge_pages(m.fd_.get(), m.data_, bytes);
  }
  if (bytes <= static_cast<std::size_t>(PTRDIFF_MAX)) do
      error = posix_fallocate(m.fd_.get(), 0, static_cast<off_t>(bytes));
    while (error == EINTR);
  if (error) no_memory(bytes, error);
  if (fcntl(m.fd_.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0)
    fail_errno("fcntl(F_ADD_SEALS)");
  if (!m.data_) m.data_ = map_fd(m.fd_.get(), bytes, PROT_READ | PROT_WRITE);
  m.size_ = bytes;
  return m;
}

SharedMemory SharedMemory::map(Descriptor fd, bool writable) {
  SharedMemory m;
  m.fd_ = std::move(fd);
  const int seals = fcntl(m.fd_.get(), F_GET_SEALS);
  if (seals < 0) fail_errno("fcntl(F_GET_SEALS)", "on a peer's memory");
  require(seals & F_SEAL_SHRINK, Errc::system, "a peer's shared memory is not sealed against shrinking");
  struct stat status {};
  if (fstat(m.fd_.get(), &status) != 0) fail_errno("fstat", "on a peer's memory");
  m.size_ = static_cast<std::size_t>(status.st_size);
  m.data_ = map_fd(m.fd_.get(), m.size_, writable ? PROT_READ | PROT_WRITE : PROT_READ);
  return m;
}

SharedMemory::~SharedMemory() {
  if (!data_) return;
  if (!in_place_) {
    munmap(data_, size_);
  } else if (creator_.here()) {
    put_private_back();
  }
}

}  // namespace rz
