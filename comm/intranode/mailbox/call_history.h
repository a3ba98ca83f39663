#pragma once
/// The current call of a channel, and a hash of all calls up to it, which slot tags carry. Histories that
/// differed once differ from then on, so that a rank detects a mismatch even if it polls the peer's slots
/// much later. A plain value.

#include <cstdint>

#include "comm/intranode/mailbox/step_number.h"
#include "comm/transport/call_signature.h"

namespace rz::intranode {

class CallHistory {
 public:
  static constexpr int hash_shift = 32;  ///< of a tag: step + 1 below, the upper half of the hash above

  void begin(const CallSignature& call) {
    call_ = call;
    call_hash_ = hash_of(call);
    repeat(call.sequence);
  }
  /// begin() of a call that differs from the last one in its sequence number only.
  void repeat(std::uint32_t sequence) {
    sequence_ = sequence;
    hash_ = (hash_ ^ call_hash_) * 0x9e3779b97f4a7c15u;
    hash_ ^= hash_ >> 29;
  }
  CallSignature call() const {
    CallSignature call = call_;
    call.sequence = sequence_;
    return call;
  }
  void write_to(CallSignature& entry) const { entry = call_, entry.sequence = sequence_; }
  std::uint64_t tag_of(StepNumber step) const { return (hash_ >> hash_shift << hash_shift) | (step + 1); }

 private:
  static std::uint64_t hash_of(const CallSignature&);

  // The sequence number is apart: a store of one field followed by a load of the whole signature is slow.
  CallSignature call_;
  std::uint32_t sequence_ = 0;
  std::uint64_t call_hash_ = 0;  // of call_, without the sequence number
  std::uint64_t hash_ = 0;       // of all calls
};

}  // namespace rz::intranode
