#pragma once
/// Query of all ranks about a call of this rank, after the deadline of the call or once it is known
/// that not all ranks made the same call. Its result names the ranks that did not make the call or made
/// another.

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "comm/backends/mpi/control_channel.h"
#include "comm/transport/call_signature.h"

namespace rz::mpi {

/// "rank 3", "ranks 0, 3".
std::string ranks_text(const std::vector<int>& ranks);

/// Errc::timeout of `operation` on `rank` after `timeout`.
[[noreturn]] void fail_timeout(const std::string& operation, int rank, std::chrono::milliseconds timeout,
                               const std::string& reason, int culprit);

class TimeoutInquiry {
 public:
  /// Queries all other ranks about this rank's call.
  TimeoutInquiry(ControlChannel&, int rank, int size, const CallSignature& mine);

  void receive(int peer, const ControlMessage& reply);
  /// All ranks have replied, or the time for that is over.
  bool is_over(std::chrono::steady_clock::time_point now) const { return pending_ == 0 || now >= until_; }
  /// Throws the result: Errc::mismatch, or Errc::timeout of a call with that timeout.
  [[noreturn]] void conclude(std::chrono::milliseconds timeout) const;
  /// The result before the deadline: the ranks that are missing, or a call that differs.
  std::string reason() const { return result().reason; }
  const CallSignature& call() const { return mine_; }

 private:
  struct Result {
    CallsOfRanks calls;
    std::string reason;
    int culprit = -1;
  };
  Result result() const;

  const int rank_;
  const CallSignature mine_;
  const std::chrono::steady_clock::time_point until_;
  std::vector<std::optional<ControlMessage>> replies_;  // by rank
  int pending_;
};

}  // namespace rz::mpi
