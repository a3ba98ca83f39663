#pragma once
/// Memory of the emulated devices: host memory with access control. New memory is poisoned (bytes of 0xFF:
/// NaN as a float, -1 as an integer), freed memory is never reused, and a guard page follows every
/// allocation. While the memory is closed, host code that reads or writes it ends the process with a line
/// that names the allocation; within a kernel an access out of bounds does so, and the line names the thread.

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "comm/core/types.h"

namespace rz::emulated {

struct IpcPlace;

/// The instance of this process; after fork() the child has none of its parent's memory. Thread-safe.
class DeviceMemory {
 public:
  static DeviceMemory& instance();

  /// Null if `capacity` bytes of the device would be exceeded.
  void* allocate(int device, std::size_t bytes);
  /// False unless `memory` is the start of an allocation.
  bool free(void* memory);
  void* allocate_pinned(std::size_t bytes);
  bool free_pinned(void*);

  /// Lets other processes open an allocation, by its first byte. False if it is none.
  bool share(const void* memory, IpcPlace&);
  /// Another process's, at an address of this one; null if it is gone. Closed by close_shared() alone.
  void* open_shared(const IpcPlace&);
  bool close_shared(void* memory);

  struct Owner {
    bool on_device = false, pinned = false;
    int device = 0;
    std::size_t offset = 0, bytes = 0;  ///< of the address in its allocation, and of this
  };
  Owner owner(const void*) const;
  std::size_t in_use(int device) const;
  /// How often these bytes occur in this process's own memory on devices.
  std::size_t places_of(std::string_view bytes);
  std::size_t capacity = std::size_t{1} << 30;  ///< of a device

  /// Opening and closing cost a system call per allocation: the machine leaves the memory open between tasks,
  /// and closes it when a host thread has waited for them.
  void open();
  void close();

  struct State;

 private:
  DeviceMemory();
  State* state_;
};

}  // namespace rz::emulated
