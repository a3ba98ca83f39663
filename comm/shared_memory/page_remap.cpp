// Replaces a caller's private pages by shared memory, and back.

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <mutex>

#include "comm/core/error.h"
#include "comm/os/process.h"
#include "comm/shared_memory/page_check.h"
#include "comm/shared_memory/shared_memory.h"

namespace rz {

namespace {

#ifdef MADV_POPULATE_WRITE
constexpr int madv_populate_write = MADV_POPULATE_WRITE;
#else
constexpr int madv_populate_write = 23;
#endif
constexpr std::size_t restore_chunk_bytes = std::size_t{32} << 20;

/// Makes the check and the replacement of pages atomic among threads that register. A child of fork()
/// inherits each page either private or shared, with the same contents.
constinit ProcessMutex remap_mutex;

// System calls without the C library's wrappers: the edge pages contain bytes outside the caller's
// allocation, which the sanitizers' interceptors would report.

/// On failure returns false with errno set.
bool write_all(int fd, std::span<const std::byte> from) {
  for (std::size_t at = 0; at < from.size();) {
    const long n = syscall(SYS_pwrite64, fd, from.data() + at, from.size() - at, at);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    at += static_cast<std::size_t>(n);
  }
  return true;
}

bool read_all(int fd, std::size_t offset, std::span<std::byte> to) {
  for (std::size_t at = 0; at < to.size();) {
    const long n = syscall(SYS_pread64, fd, to.data() + at, to.size() - at, offset + at);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    at += static_cast<std::size_t>(n);
  }
  return true;
}

/// Copies a part of the file to `aside`, and then moves the pages of `aside` to `to`.
bool restore_chunk(int fd, std::size_t offset, std::byte* to, std::byte* aside, std::size_t bytes) {
  return read_all(fd, offset, {aside, bytes}) &&
         mremap(aside, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, to) != MAP_FAILED;
}

}  // namespace

std::optional<SharedMemory> SharedMemory::remap_as_shared(std::span<std::byte> memory, std::string& why) {
  const std::lock_guard lock(remap_mutex);
  why = check_remappable(memory);
  if (!why.empty()) return std::nullopt;
  const auto pages = pages_of(memory);
  SharedMemory m = create(pages.size());
  if (!write_all(m.fd(), pages)) fail_errno("pwrite", "of memory that is to be shared");
  if (mremap(m.data_, m.size_, m.size_, MREMAP_MAYMOVE | MREMAP_FIXED, pages.data()) == MAP_FAILED)
    fail_errno("mremap", concat("of ", human_bytes(m.size_), " of shared memory"));
  // Avoids a page fault per page in the first calls. From Linux 5.14 on.
  (void)madvise(pages.data(), pages.size(), madv_populate_write);
  m.data_ = pages.data();
  m.remapped_ = true;
  return m;
}

/// Returns this part of the file to the system, unless it is kept for peers or a child of fork() may read it.
void SharedMemory::punch_hole(std::size_t offset, std::size_t bytes) const noexcept {
  if (kept_for_peers_ || !fd_) return;
  unless_forked_since(forks_at_creation_, [&] {
    (void)fallocate(fd_.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
                    static_cast<off_t>(bytes));
  });
}

void SharedMemory::restore_private() noexcept {
  const std::lock_guard lock(remap_mutex);
  // Not our mapping any more: the caller has freed the memory too early, and it may be in other use.
  if (!is_mapping_of(fd_.get(), {data_, size_})) return;
  // One region for all chunks, so that the result is a single mapping.
  void* const aside = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  std::size_t at = 0;
  for (std::size_t n = 0; aside != MAP_FAILED && at < size_; at += n) {
    n = std::min(restore_chunk_bytes, size_ - at);
    if (!restore_chunk(fd_.get(), at, data_ + at, static_cast<std::byte*>(aside) + at, n)) break;
    punch_hole(at, n);  // peers may have it mapped, which would keep the memory in use
  }
  if (at == size_) return;
  if (aside != MAP_FAILED) munmap(static_cast<std::byte*>(aside) + at, size_ - at);
  // The rest could not be restored: map it privately from the file, which needs no memory. If that fails too,
  // the pages stay shared; their contents are unchanged.
  (void)mmap(data_ + at, size_ - at, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED, fd_.get(),
             static_cast<off_t>(at));
}

}  // namespace rz
