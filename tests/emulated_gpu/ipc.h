#pragma once
/// Memory of an emulated device that other processes map, as with CUDA's IPC handles: a process's device
/// memory is a file without a name, which others open by /proc. A process that frees memory which another
/// process still has open is ended with an error line, where CUDA guarantees nothing.

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>

namespace rz::emulated {

/// The place of an allocation in its process's file: the contents of a handle.
struct IpcPlace {
  pid_t process;
  int file;
  std::uint64_t offset, bytes;
  int device;
};

/// State of an allocation shared between processes: a page of the file, behind its last.
class IpcNote {
 public:
  /// Null if the file cannot be mapped there.
  static std::unique_ptr<IpcNote> map(int file, std::uint64_t offset);
  ~IpcNote();
  IpcNote(const IpcNote&) = delete;
  IpcNote& operator=(const IpcNote&) = delete;

  void publish() { set(words_->published, 1); }
  /// False: it was freed.
  bool open();
  void close() { __atomic_fetch_sub(&words_->openers, 1, __ATOMIC_ACQ_REL); }
  /// From now on no process can open it. Returns how many have it open.
  std::uint32_t retire();

 private:
  struct Words {
    std::uint32_t published, openers;
  };
  explicit IpcNote(Words* words) : words_(words) {}
  static void set(std::uint32_t& word, std::uint32_t value) {
    __atomic_store_n(&word, value, __ATOMIC_RELEASE);
  }
  Words* words_;
};

/// The file of another process, to be closed by the caller; -1 if it is not there.
int open_file_of(const IpcPlace&);
/// A new file for this process's memory.
int create_file(std::size_t bytes);

}  // namespace rz::emulated
