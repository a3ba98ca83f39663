#pragma once
/// The ranks of a program.
///
///     int main() {
///       return rz::run_entrypoint([](rz::World& world) {  // under rzrun, torchrun, mpirun, srun, or alone
///         world.print("ranks: ", world.size());
///         const double loss = world.reduce(own_loss, rz::ReduceOp::avg);
///       });
///     }
///
/// Functions are collective where their comment says so: every rank calls them in the same order.

#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "../../comm/communicator.h"
#include "../../comm/core/text.h"
#include "../../tensor/tensor.h"

namespace rz {

struct LaunchInfo;

/// A sum and the number of its terms. The mean of all ranks is World::reduce(): sum of sums over sum of
/// counts, so that ranks with more terms weigh more.
struct Mean {
  double sum = 0, count = 0;

  /// Adds `n` terms whose mean is `value`.
  void add(double value, double n = 1) {
    sum += value * n;
    count += n;
  }
  void add(const Mean& other) {
    sum += other.sum;
    count += other.count;
  }
  /// NaN without terms. A NaN has no sign, which programs would print: "nan", not "-nan".
  double value() const {
    const double mean = sum / count;
    return std::isnan(mean) ? std::numeric_limits<double>::quiet_NaN() : mean;
  }
};

struct WorldOptions {
  std::string device = "host";  ///< "host", "cuda" (device LOCAL_RANK modulo their number), or "cuda:N"
  CommOptions comm;             ///< `device` is set from the name above; `name`: "world" by default
};

/// A rank's place in the group, and small exchanges between the ranks. One thread per rank.
class World {
 public:
  /// Connects the ranks that a launcher started (comm/bootstrap.h); without a launcher, a group of one.
  static World from_environment(const WorldOptions& = {});
  /// A group that is connected already. The local rank is that of the launch, else 0.
  explicit World(Communicator);
  explicit World(Communicator, const LaunchInfo&);

  int rank() const { return communicator_.rank(); }
  int size() const { return communicator_.size(); }
  /// The ranks of every node if nodes have equally many, each of consecutive numbers; else 0. Collective.
  int ranks_per_node(CallSite = CallSite::current());
  int local_rank() const { return local_rank_; }
  bool is_main() const { return rank() == 0; }
  bool is_local_main() const { return local_rank_ == 0; }
  /// The device of this rank's models.
  Device device() const { return communicator_.options().device; }
  /// Number of threads for this rank (fair_threads()).
  int threads() const { return threads_; }

  /// For calls of the caller's own. Engines have communicators of their own.
  Communicator& communicator() { return communicator_; }
  /// A communicator of all ranks whose calls are independent of those of others. `order`: of its reductions;
  /// default: that of communicator(). Collective.
  Communicator new_communicator(std::optional<ReductionOrder> order = {}, CallSite = CallSite::current());

  /// The way back after an error, wherever the ranks wait: Communicator::renew() of communicator(), and with
  /// it of the communicators of engines, which drop their updates in progress. Collective.
  void renew(const std::string& reason = {}, CallSite = CallSite::current());
  /// Calls `f` on every rank at the end of each renew(), after those that were added before, while the result
  /// lives.
  [[nodiscard]] std::shared_ptr<void> on_renewal(std::function<void()> f);

  /// Waits for every rank. Collective.
  void wait_for_everyone(CallSite site = CallSite::current()) { communicator_.barrier(site).wait(); }
  /// The value reduced over the ranks, on every rank. Collective.
  double reduce(double value, ReduceOp op = ReduceOp::avg, CallSite = CallSite::current());
  /// Mean over the terms of all ranks. NaN without terms. Collective.
  double reduce(const Mean&, CallSite = CallSite::current());
  /// Replaces the values by those reduced over the ranks. Collective.
  void reduce(std::span<double>, ReduceOp op, CallSite = CallSite::current());
  /// The rows of all ranks, in the order of ranks, on the host. Collective. Errc::mismatch on every rank,
  /// which names a rank, unless dtypes and shapes are equal on all ranks.
  Tensor gather(const Tensor&, const Stream& = {}, CallSite = CallSite::current());

  /// Prints a line to standard output, on rank 0 only.
  template <class... T>
  void print(const T&... parts) const {
    if (is_main()) print_line(concat(parts...));
  }

 private:
  static void print_line(const std::string&);

  Communicator communicator_;
  int local_rank_ = 0;
  int threads_;
  std::vector<std::weak_ptr<std::function<void()>>> renewed_;  // on_renewal()
};

/// Thrown for a request for help: what() is its text. All ranks throw it.
class HelpRequest : public Error {
 public:
  explicit HelpRequest(const std::string& text) : Error(Errc::config, text) {}
};

/// Runs `body` in World::from_environment() and returns the exit status for main(): 0; 2 after an error of
/// the user (Errc::config); else 1. Prints an error as one line to standard error, with its rank, and ends
/// the other ranks: their operations throw Errc::aborted with this rank as culprit, or Errc::peer_lost those
/// of other communicators. Such errors are not printed. An Errc::config that all ranks throw is printed once:
/// one that they agree on (sharding/parallel/rank_agreement.h), and one of their common command line, by rank
/// 0. Waits of 10 s without progress are printed, too (CommOptions::on_wait), unless `comm` has another
/// function.
/// Each rank's error is also in its error file (comm/os/error_file.h). Under rzrun a crash records its stack
/// (flight::record_crashes()), unless the program has a handler of its own for the signal. With RZ_FLIGHT,
/// SIGUSR1 writes the last calls of the rank (comm/flight_dump.h).
/// The text of a HelpRequest is printed to standard output by rank 0, and the status is 0.
int run_entrypoint(const std::function<void(World&)>& body, const WorldOptions& = {});

/// Runs `main` in `ranks` processes, made by fork(), each with its World, and waits for them. As
/// torch.multiprocessing.spawn: nothing that `main` computes comes back; it writes files, or prints.
///
/// When a rank fails, the others are ended: SIGTERM, 5 s later SIGKILL. Then the first failure is thrown:
/// its code, and "rank 2: MESSAGE", or the signal that killed the rank; culprit() is the rank, or the one
/// that its error names. The ranks end when this process does.
///
/// fork() copies the calling thread only, and no CUDA context: call it before other threads run and before
/// CUDA is used. Do not use communicators of this process in `main`.
void spawn(int ranks, const std::function<void(World&)>& main, const WorldOptions& = {});

}  // namespace rz
