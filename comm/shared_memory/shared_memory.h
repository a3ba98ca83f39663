#pragma once
/// Memory that processes share by passing a file descriptor: a memfd, sealed so that no holder can shrink it
/// under another's feet, and fully backed from the start, so that lack of memory is an error, never a SIGBUS.
/// From 2 MiB on it is in huge pages as far as the system has them free (Linux 6.1 and newer).

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
  /// Zeroed. Errc::system states need and have, or the limit of files (ulimit -f), which counts here too.
  static SharedMemory create(std::size_t bytes);
  /// Maps memory that a peer made. Errc::system if it is not sealed, i.e. could shrink.
  static SharedMemory map(UniqueFd fd, bool writable);
  /// Shared memory in the place of ordinary memory: over the whole pages that hold the range, at the same
  /// addresses, with the same contents. None, and why, if the pages cannot be replaced (check_remappable()).
  /// They change in one step: who reads them meanwhile finds the old or the new ones; what is written to them
  /// between the copy and that step is lost. Errc::system if there is no memory for it, as much again for a
  /// moment; then the pages are as they were. Thread-safe.
  static std::optional<SharedMemory> remap_as_shared(std::span<std::byte>, std::string& why);

  SharedMemory(SharedMemory&& other) noexcept { swap(other); }
  SharedMemory& operator=(SharedMemory&& other) noexcept {
    swap(other);
    return *this;
  }
  /// In the place of ordinary memory: puts private, anonymous memory with the current contents back, likewise
  /// in one step, 32 MiB at a time. Not in a child of fork(), where the pages stay shared: it closes the
  /// descriptor alone.
  ~SharedMemory();

  std::byte* data() const { return data_; }
  std::size_t size() const { return size_; }
  int fd() const { return fd_.get(); }
  /// Peers may read it even when it has ended here.
  void keep_for_peers() { kept_for_peers_ = true; }
  /// Gives the memory back to the system, though peers still have it mapped and find zeros from now on. Not
  /// what was promised, nor what a child of fork() may read.
  void discard() const noexcept { punch_hole(0, size_); }
  /// The mapping stays; nobody can be given it any more.
  void close_fd() { fd_.close(); }

 private:
  void allocate_backing(std::size_t bytes);
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
  std::uint64_t forks_at_creation_ = fork_count();  // before the memory was there
};

/// What can still be had of memory: the kernel's estimate, at most what control groups leave. `root`: where
/// /proc and /sys stand.
unsigned long long available_memory(const std::string& root = "");

}  // namespace rz
