#pragma once
/// Finds that ranks have made different collectives.
///
/// The frames of a transport carry the call that they belong to, so most differences show in the first bytes
/// that arrive. Ranks may also make calls that send each other nothing: one of 0 elements, or with another
/// root. One of them then waits for bytes that do not come, so a long wait queries the peers for their call
/// of its number. Used with the progress token.

#include <chrono>
#include <cstdint>
#include <optional>

#include "comm/transport/call_signature.h"
#include "comm/transport/transport.h"

namespace rz {

class CallComparison {
 public:
  using Time = std::chrono::steady_clock::time_point;

  CallComparison(Transport& transport, int rank, int size)
      : transport_(transport), rank_(rank), size_(size) {}

  /// The current call cannot go on: data of another one has arrived. The calls of the other ranks, which are
  /// queried, tell which rank differs; poll() then throws.
  void begin(const OtherCall&);
  bool found() const { return difference_.has_value(); }

  /// While calls are in flight. `request`: that of the current collective, or null; `moved`: a call has
  /// progressed since the last poll. Throws Errc::mismatch once the difference and its culprit are known,
  /// two seconds after begin() at most.
  void poll(Time now, const void* request, bool moved) {
    if (!difference_ && (moved || request != request_)) restart(now, request);
    if (now >= next_) advance(now);
  }

 private:
  struct Difference {
    std::uint32_t number;            // of the calls that are compared
    std::optional<OtherCall> frame;  // that has shown it; none: a reply has
    Time decide_at;                  // even if calls of other ranks are not known
  };

  void restart(Time now, const void* request);
  void advance(Time now);
  void decide(Time now) const;
  CallsOfRanks calls_of(std::uint32_t number) const;

  Transport& transport_;
  const int rank_, size_;
  const void* request_ = nullptr;
  Time next_ = Time::max();  // when advance() has something to do
  // Of a wait.
  Time query_at_{}, replies_until_{};
  std::chrono::seconds interval_{1};  // of queries
  std::optional<Difference> difference_;
};

}  // namespace rz
