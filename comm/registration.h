#pragma once
/// A caller's own memory that peers of this host read and write where it lies, until this ends. Made by
/// Communicator::register_buffer(), which says what may be registered.
///
/// End it while no operation on the memory is in flight, and before the memory is freed; it may outlive the
/// communicator. The memory keeps its address and contents, and is private and anonymous again, so that
/// free(), calloc() and madvise(MADV_DONTNEED) do what they always do. That takes as much time as copying it,
/// and 32 MiB more memory for a moment; where there is none, what is left stays a private mapping of the
/// shared file: nobody else sees it, and free() takes it.

#include <memory>
#include <string>
#include <utility>

namespace rz {

class [[nodiscard]] Registration {
 public:
  /// Of nothing.
  Registration() = default;
  /// Nothing was registered, and why: one line.
  explicit Registration(std::string why) : reason_(std::move(why)) {}
  /// Registered until the last copy of `held` ends.
  explicit Registration(std::shared_ptr<void> held) : held_(std::move(held)) {}

  Registration(Registration&&) noexcept = default;
  Registration& operator=(Registration&&) noexcept = default;

  /// Collectives of the host use the memory where it lies. False: they copy it, as any other memory.
  bool zero_copy() const { return held_ != nullptr; }
  /// Why not; empty if zero_copy().
  const std::string& reason() const { return reason_; }

 private:
  std::shared_ptr<void> held_;
  std::string reason_;
};

}  // namespace rz
