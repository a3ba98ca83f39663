#pragma once
/// Options of a communicator. Their defaults are those of the environment (comm/core/environment.h) when the
/// object is made.

#include <chrono>
#include <functional>
#include <string>

#include "core/environment.h"
#include "core/types.h"

namespace rz {

struct WaitReportOptions;

/// Writes the line to standard error; for CommOptions::on_wait.
void print_wait(const std::string& line);

struct CommOptions {
  Device device{};
  std::chrono::milliseconds rendezvous_timeout{static_cast<long>(environment().rendezvous_timeout_s * 1e3)};
  /// Deadline of one operation. milliseconds::max() disables it; likewise for rendezvous_timeout.
  std::chrono::milliseconds timeout{static_cast<long>(environment().timeout_s * 1e3)};
  /// How long a rank may show no sign of life before it is lost; 0: for ever, see RZ_DETECTION_S. "native",
  /// also beneath a device backend.
  std::chrono::milliseconds detection{static_cast<long>(environment().detection_s * 1e3)};
  /// Backend: a name or "auto"; see RZ_BACKEND. describe() reports the choice of "auto" and the reason.
  std::string backend = environment().backend;
  std::string transport = environment().transport;  ///< "native" only: "auto" or a name; see RZ_TRANSPORT
  /// TCP network interface; empty: the one that routes to rank 0
  std::string interface = environment().interface;
  int sockets = environment().sockets;                ///< TCP sockets between two nodes
  std::string congestion = environment().congestion;  ///< TCP congestion control: "system" or a name
  std::string encryption = environment().encryption;  ///< "on", "off" or "always"; see RZ_ENCRYPTION
  std::string host_id = environment().host_id;        ///< identifier of the node; empty: this machine's
  /// Forces algorithms: "two_shot" (all_reduce only) or "all_reduce=ring,broadcast=tree"; names are in
  /// comm/tuning/overrides.h. Applies to host memory of "native" (also under "auto"), and to all_reduce of
  /// "peer_cuda". Empty: the tuning table decides. Errc::config lists the valid names.
  std::string algorithm = environment().algorithm;
  /// File with a tuning table (comm/tuning/tuning.h) for "native"; its rules precede the built-in ones. Rank
  /// 0's table applies to the group. Errc::mismatch names a rank whose table differs; a rank may pass none.
  std::string tuning = environment().tuning;
  /// Reduce in `reduction_order`, so that results do not depend on the bucket layout or the sharding
  /// strategy.
  bool deterministic = environment().deterministic;
  /// Order of the contributions in a reduction (ReductionOrder); the same on all ranks, or
  /// Errc::mismatch. `pairwise` requires `deterministic` (Errc::config). Up to three ranks, every backend
  /// has it; with more, Errc::unsupported names a backend that reduces in rank order only.
  ReductionOrder reduction_order = environment().reduction_order;
  /// Name of the communicator in reports of waits. The group of its n-th split() is "NAME/split n".
  std::string name;
  /// Called with one line when a call has made no progress for `wait_report`: the communicator, the call and
  /// its number. "native" and "mpi" add the ranks that it waits for; "native" on host memory also what these
  /// do (in other communicators of their process, too), and what else this process waits for. Once a wait, a
  /// little more than a second later at most, on a thread that waits for a call or on one of the
  /// communicator's. It must not use a communicator; what it throws is dropped. Default: none; print_wait()
  /// if RZ_WAIT_REPORT_S is set.
  std::function<void(const std::string& line)> on_wait = environment().wait_report_s > 0
                                                             ? print_wait
                                                             : std::function<void(const std::string&)>();
  std::chrono::milliseconds wait_report{
      environment().wait_report_s > 0 ? static_cast<long>(environment().wait_report_s * 1e3) : 10'000};

  /// What a backend reads of `name`, `on_wait` and `wait_report`.
  WaitReportOptions waits() const;
};

}  // namespace rz
