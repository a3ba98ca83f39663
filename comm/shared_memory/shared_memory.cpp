#include "comm/shared_memory/shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>

#include "comm/core/error.h"
#include "comm/core/integer_math.h"
#include "comm/os/cgroup.h"
#include "comm/shared_memory/page_check.h"

namespace rz {

namespace {

constexpr std::size_t huge_page_bytes = std::size_t{2} << 20;
#ifdef MADV_COLLAPSE
constexpr int madv_collapse = MADV_COLLAPSE;
#else
constexpr int madv_collapse = 25;  // from Linux 6.1 on; EINVAL before
#endif

/// Reserves address space aligned to huge pages; null if there is none.
void* reserve_aligned(std::size_t bytes) {
  const std::size_t all = bytes + huge_page_bytes;
  void* const from = mmap(nullptr, all, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (from == MAP_FAILED) return nullptr;
  auto* const begin = static_cast<std::byte*>(from);
  const std::size_t before =
      (huge_page_bytes - reinterpret_cast<std::uintptr_t>(from) % huge_page_bytes) % huge_page_bytes;
  if (before) munmap(begin, before);
  munmap(begin + before + bytes, all - before - bytes);
  return begin + before;
}

std::byte* map_fd(int fd, std::size_t bytes, int protection) {
  void* const place = bytes >= huge_page_bytes ? reserve_aligned(round_up(bytes, page_bytes())) : nullptr;
  void* const at = mmap(place, bytes, protection, MAP_SHARED | (place ? MAP_FIXED : 0), fd, 0);
  if (at == MAP_FAILED) fail_errno("mmap", concat("of ", human_bytes(bytes), " of shared memory"));
  return static_cast<std::byte*>(at);
}

/// Collapses each whole huge page of the range, as far as the system has free ones; the rest stays
/// unallocated. MADV_COLLAPSE needs one small page in each, and works unless huge pages are disabled
/// system-wide.
void populate_huge_pages(int fd, std::byte* memory, std::size_t begin, std::size_t end) {
  end = end / huge_page_bytes * huge_page_bytes;
  if (begin >= end) return;
  for (std::size_t offset = begin; offset < end; offset += huge_page_bytes)
    if (fallocate(fd, 0, static_cast<off_t>(offset), 1) != 0) return;  // allocate_file() will report it
  (void)madvise(memory + begin, end - begin, madv_collapse);           // on failure, small pages are used
}

[[noreturn]] void fail_no_memory(const char* call, std::size_t bytes, int error) {
  fail(Errc::system, call, "shared memory: need ", human_bytes(bytes), ", have about ",
       human_bytes(available_memory()), ": ", std::strerror(error), " (errno ", error,
       "); use smaller buffers or fewer ranks on this host, or raise the container's memory limit");
}

/// Checks RLIMIT_FSIZE, since SIGXFSZ ends a process that lets a file grow beyond it.
void check_file_size(std::size_t bytes) {
  rlimit limit{};
  if (getrlimit(RLIMIT_FSIZE, &limit) != 0 || bytes <= limit.rlim_cur) return;
  fail(Errc::system, "shared memory: need ", human_bytes(bytes), ", but files of this process may have ",
       human_bytes(limit.rlim_cur), "; raise the limit (ulimit -f)");
}

/// posix_fallocate() in pieces. A signal undoes the piece that it interrupts, so the pieces are halved until
/// they finish between frequent signals, such as a profiler's timer. Returns 0 or an errno value.
int allocate_file(int fd, std::size_t bytes) {
  std::size_t piece = std::size_t{4} << 20;
  for (std::size_t at = 0; at < bytes;) {
    const std::size_t n = std::min(piece, bytes - at);
    const int error = posix_fallocate(fd, static_cast<off_t>(at), static_cast<off_t>(n));
    if (error && error != EINTR) return error;
    if (error) piece = std::max(page_bytes(), piece / 2);
    if (!error) at += n;
  }
  return 0;
}

}  // namespace

unsigned long long available_memory(const std::string& root) {
  unsigned long long available = ~0ull;
  std::ifstream in(root + "/proc/meminfo");
  for (std::string line; std::getline(in, line);)
    if (const auto words = words_of(line); words.size() > 1 && words[0] == "MemAvailable:")
      available = parse_number<unsigned long long>(words[1]).value_or(available / 1024) * 1024;
  return std::min(available, cgroup_memory(root).value_or(~0ull));
}

bool exceeds_available_memory(std::size_t bytes) {
  return bytes >= (64u << 20) && bytes > available_memory();
}

SharedMemory SharedMemory::create(std::size_t bytes, std::size_t used_in_part) {
  if (bytes > static_cast<std::size_t>(PTRDIFF_MAX)) fail_no_memory("", bytes, EFBIG);
  check_file_size(bytes);
  // Beyond a cgroup's limit, the kernel kills the process instead of failing the call.
  if (exceeds_available_memory(bytes)) fail_no_memory("", bytes, ENOMEM);
  SharedMemory m;
  m.fd_ = UniqueFd(memfd_create("ringzero", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!m.fd_) fail_errno("memfd_create");
  m.allocate_backing(bytes, used_in_part);
  if (fcntl(m.fd_.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0)
    fail_errno("fcntl(F_ADD_SEALS)");
  if (!m.data_) m.data_ = map_fd(m.fd_.get(), bytes, PROT_READ | PROT_WRITE);
  m.size_ = bytes;
  return m;
}

/// Allocates all pages of the file. Memory that can have huge pages is mapped first, since MADV_COLLAPSE
/// needs a mapping.
void SharedMemory::allocate_backing(std::size_t bytes, std::size_t used_in_part) {
  if (bytes >= huge_page_bytes) {
    if (ftruncate(fd_.get(), static_cast<off_t>(bytes)) != 0) fail_no_memory("ftruncate of ", bytes, errno);
    data_ = map_fd(fd_.get(), bytes, PROT_READ | PROT_WRITE);
    size_ = bytes;
    populate_huge_pages(fd_.get(), data_, used_in_part / huge_page_bytes * huge_page_bytes, bytes);
  }
  if (const int error = allocate_file(fd_.get(), bytes)) fail_no_memory("posix_fallocate of ", bytes, error);
}

SharedMemory SharedMemory::map(UniqueFd fd, bool writable) {
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
  if (!remapped_) {
    munmap(data_, size_);
  } else if (creator_.is_this_process()) {
    restore_private();
  }
}

}  // namespace rz
