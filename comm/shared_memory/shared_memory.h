#pragma once
/// Memory that processes share by passing a file descriptor: a memfd. It is sealed, so that no holder can
/// shrink it while others use it. All pages are allocated at creation, so that lack of memory is an error and
/// not a SIGBUS. From 2 MiB on, it uses huge pages as far as the system has them free (Linux 6.1 and newer).

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "comm/os/fd.h"
#include "comm/os/process.h"

namespace rz {

class SharedMemory {
 public:
  SharedMemory() = default;
  /// Creates zeroed memory. Errc::system states the bytes needed and available, or the file size limit
  /// (ulimit -f), which applies to memfds. Memory from 2 MiB on gets huge pages, which are zeroed here; small
  /// pages are zeroed at their first use. Of the first `used_in_part` bytes they are small.
  static SharedMemory create(std::size_t bytes, std::size_t used_in_part = 0);
  /// Maps memory created by a peer. Errc::system if it is not sealed against shrinking.
  static SharedMemory map(UniqueFd fd, bool writable);
  /// Replaces ordinary memory by shared memory: all pages that overlap the range, at the same addresses, with
  /// the same contents. Empty if the pages cannot be replaced; `why` has the reason (check_remappable()). The
  /// pages are replaced in one step: concurrent reads see the old or the new pages. Writes between the copy
  /// and the replacement are lost. Needs as much memory again for a moment; Errc::system if there is not
  /// enough, and the pages are unchanged. Thread-safe.
  static std::optional<SharedMemory> remap_as_shared(std::span<std::byte>, std::string& why);

  SharedMemory(SharedMemory&& other) noexcept { swap(other); }
  SharedMemory& operator=(SharedMemory&& other) noexcept {
    swap(other);
    return *this;
  }
  /// Unmaps the memory. After remap_as_shared(), puts private, anonymous memory with the current contents in
  /// its place instead, 32 MiB per step. In a child of fork() remapped pages stay shared, and only the
  /// descriptor is closed.
  ~SharedMemory();

  std::byte* data() const { return data_; }
  std::size_t size() const { return size_; }
  int fd() const { return fd_.get(); }
  /// Keeps the contents for peers after this object is destroyed: disables discard().
  void keep_for_peers() { kept_for_peers_ = true; }
  /// Returns the memory to the system, even while peers have it mapped; they read zeros from then on. Does
  /// nothing after keep_for_peers(), or if a child of fork() may read the memory.
  void discard() const noexcept { punch_hole(0, size_); }
  /// Closes the descriptor; the mapping stays. The memory cannot be passed to a peer any more.
  void close_fd() { fd_.close(); }

 private:
  void allocate_backing(std::size_t bytes, std::size_t used_in_part);
  void swap(SharedMemory& other) {
    std::swap(fd_, other.fd_), std::swap(data_, other.data_), std::swap(size_, other.size_);
    std::swap(remapped_, other.remapped_), std::swap(creator_, other.creator_);
    std::swap(forks_at_creation_, other.forks_at_creation_),
        std::swap(kept_for_peers_, other.kept_for_peers_);
  }
  void restore_private() noexcept;
  void punch_hole(std::size_t offset, std::size_t bytes) const noexcept;
  UniqueFd fd_;
  std::byte* data_ = nullptr;
  std::size_t size_ = 0;
  bool remapped_ = false, kept_for_peers_ = false;
  Creator creator_;
  std::uint64_t forks_at_creation_ = fork_count();  // before the memory existed
};

/// Available memory in bytes: the kernel's estimate (MemAvailable), at most what the control groups' limits
/// leave. `root`: prefix of /proc and /sys, for tests.
unsigned long long available_memory(const std::string& root = "");

/// True for a large request, of 64 MiB or more, that exceeds available_memory().
bool exceeds_available_memory(std::size_t bytes);

}  // namespace rz
