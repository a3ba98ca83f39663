#pragma once
/// Handle of the caller's memory that local peers access in place, returned by
/// Communicator::register_buffer().
///
/// End it while no operation on the memory is in flight, and before the memory is freed. It may outlive the
/// communicator. When it ends, the memory becomes private and anonymous again at the same address with the
/// same contents, so that free(), calloc() and madvise(MADV_DONTNEED) behave as usual. This takes as long as
/// copying the memory and temporarily needs 32 MiB. If these cannot be allocated, the rest remains a private
/// mapping of the shared file: no other process sees it, and free() releases it.

#include <memory>
#include <string>
#include <utility>

namespace rz {

class [[nodiscard]] Registration {
 public:
  /// An empty registration.
  Registration() = default;
  /// A failed registration; `why` is one line.
  explicit Registration(std::string why) : reason_(std::move(why)) {}
  /// Registered until the last copy of `held` is destroyed.
  explicit Registration(std::shared_ptr<void> held) : held_(std::move(held)) {}

  Registration(Registration&&) noexcept = default;
  Registration& operator=(Registration&&) noexcept = default;

  /// True if intra-node collectives access the memory in place; false if they copy it.
  bool zero_copy() const { return held_ != nullptr; }
  /// The reason if zero_copy() is false, otherwise empty.
  const std::string& reason() const { return reason_; }

 private:
  std::shared_ptr<void> held_;
  std::string reason_;
};

}  // namespace rz
