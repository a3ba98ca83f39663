#pragma once
/// Reports of calls that make no progress for long (CommOptions::on_wait), for every backend.

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>

namespace rz {

struct WaitReportOptions {
  std::string communicator = "a communicator";  ///< its name
  std::function<void(const std::string& line)> report;
  std::chrono::milliseconds after{10'000};  ///< without progress
};

/// The waits of one rank, each of which is reported once. For one thread.
class LongWait {
 public:
  using Time = std::chrono::steady_clock::time_point;

  LongWait(WaitReportOptions options, int rank, int size)
      : options_(std::move(options)), rank_(rank), size_(size) {}

  /// `call` is what this rank waits for, by a number that differs from that of the call before; 0: nothing.
  /// True once it has been the same for `after`, if waits are reported; then false until it changes.
  bool is_due(Time now, std::uint64_t call) {
    if (!options_.report) return false;
    if (call != call_) call_ = call, since_ = now, reported_ = false;
    if (!call || reported_ || now - since_ < options_.after) return false;
    return reported_ = true;
  }
  /// Reports the wait: "rank 0 of 2 of NAME: CALL has made no progress for 10.1 s: REASON". What the report
  /// throws is dropped.
  void report(Time now, const std::string& call, const std::string& reason) const noexcept {
    report(options_, rank_, size_, call, now - since_, reason);
  }
  static void report(const WaitReportOptions&, int rank, int size, const std::string& call,
                     std::chrono::duration<double> waited, const std::string& reason) noexcept;

 private:
  const WaitReportOptions options_;
  const int rank_, size_;
  std::uint64_t call_ = 0;
  Time since_{};
  bool reported_ = false;
};

}  // namespace rz
