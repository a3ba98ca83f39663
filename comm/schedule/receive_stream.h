#pragma once
/// What one peer sends in a call: its signature is compared once, its bytes are received as they arrive or by
/// whole elements.

#include <cstddef>
#include <span>

#include "comm/transport/transport.h"

namespace rz::schedule {

class ReceiveStream {
 public:
  ReceiveStream(Transport& transport, int rank, int peer) : transport_(transport), rank_(rank), peer_(peer) {}
  /// For a new call.
  void start() { partial_.bytes = 0, matched_ = false; }

  /// True once bytes of this call have arrived; Errc::mismatch if they belong to a call other than `mine`.
  bool match(const CallSignature& mine);
  bool matched() const { return matched_; }
  bool has_bytes() const { return !transport_.peek(peer_, Channel::collective).bytes.empty(); }

  /// Copies bytes to `into` and returns how many.
  std::size_t receive(std::span<std::byte> into) {
    return transport_.receive(peer_, Channel::collective, into);
  }
  /// Whole elements, readable in place until consume(); empty if no element has arrived completely.
  std::span<const std::byte> peek_elements(std::size_t element_bytes);
  /// Removes the first `bytes` of what peek_elements() returned; all of it, if that was one element.
  void consume(std::size_t bytes);

 private:
  Transport& transport_;
  const int rank_, peer_;
  // First bytes of an element that has not arrived completely, or that arrived in parts.
  struct {
    std::size_t bytes = 0;
    std::byte data[8];
  } partial_;
  bool matched_ = false;
};

}  // namespace rz::schedule
