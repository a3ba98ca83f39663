#pragma once
/// Agreement of all ranks, once per update, on whether to save and whether to stop.
///
///     SignalHandler handler;
///     SaveRequests requests(communicator, options, [&] { return handler.received(); });
///     for (std::uint64_t step = 1; step <= steps; ++step) {
///       update();
///       const SaveDecision decision = requests.decide(step);
///       if (decision.saves()) save();
///       if (decision.stops()) return stopped_exit_status;
///     }
///
/// | request | action |
/// |---|---|
/// | `save_steps`, `save_interval` | save |
/// | SIGUSR1 | save |
/// | SIGTERM, SIGINT; the end of the allocation within `allocation_margin` | save and stop |
///
/// A signal may reach one rank or all; docs/reliability.md lists which ranks each launcher signals.

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>

#include "comm/bootstrap.h"
#include "comm/communicator.h"
#include "sharding/engine/checkpoints/checkpoint_options.h"
#include "sharding/engine/checkpoints/signal_handler.h"

namespace rz {

struct CheckpointConfig;

/// SLURM_JOB_END_TIME, which srun and sbatch set to the job's end in seconds since 1970 (Slurm 22.05 and
/// newer); nullopt without it or if it is 0. Errc::config if it is malformed. A limit that changes while the
/// job runs (scontrol update) does not change the variable.
std::optional<std::chrono::system_clock::time_point> slurm_job_end_time();
/// The same with variables from another source than the process environment.
std::optional<std::chrono::system_clock::time_point> slurm_job_end_time_from(const Variables&);

struct SaveRequestOptions {
  std::uint64_t save_steps = 0;  ///< save every that many updates; 0: never
  std::chrono::seconds save_interval{
      0};  ///< save when the last save is that long ago, by rank 0's clock; 0: never
  /// The end of the allocation, e.g. slurm_job_end_time().
  std::optional<std::chrono::system_clock::time_point> allocation_end;
  std::chrono::seconds allocation_margin{120};  ///< must suffice for an update and a save
  /// The clocks; tests replace them.
  std::function<std::chrono::steady_clock::time_point()> steady_now = std::chrono::steady_clock::now;
  std::function<std::chrono::system_clock::time_point()> system_now = std::chrono::system_clock::now;
};

/// The requests of save_steps, save_minutes and the end of the allocation, if the keys have it. Errors of
/// slurm_job_end_time().
SaveRequestOptions save_request_options(const CheckpointConfig&);

/// One thread per rank.
class SaveRequests {
 public:
  /// The communicator must outlive this object. `received`: SignalHandler::received() of this rank's process;
  /// may be empty. `save_steps` must be equal on all ranks. Errc::config for a negative duration.
  SaveRequests(Communicator&, SaveRequestOptions, std::function<ReceivedSignals()> received = {});

  /// Called on every rank after every update with the number of updates so far. One all_reduce of 8 bytes.
  /// Collective.
  ///
  /// Launchers signal one rank after the other. So a SIGUSR1 that a rank receives between a save for SIGUSR1
  /// and the next call belongs to the same request. Once a decision stops, later calls return it without
  /// communication.
  SaveDecision decide(std::uint64_t step);
  /// Whether the next decision will stop, for a long phase between two updates: it ends early, and decide()
  /// is called. One all_reduce of 8 bytes. Collective.
  bool stop_requested(bool signals_only = false);
  /// The same between the micro-batches of an update, `micro_batch` of which, counted from 1 on for each
  /// update, have taken `elapsed` on this rank. One all_reduce of 16 bytes about once a second, but at least
  /// every 32 micro-batches. Collective.
  bool stop_requested_in_update(std::int64_t micro_batch, std::chrono::duration<double> elapsed);

 private:
  ReceivedSignals received();
  bool allocation_ends() const;
  SaveReason own_reason(std::uint64_t step);
  SaveDecision agree(SaveReason) const;
  bool stops(const ReceivedSignals&, bool signals_only);

  Communicator& communicator_;
  SaveRequestOptions options_;
  std::function<ReceivedSignals()> received_;
  std::chrono::steady_clock::time_point last_save_;
  SaveDecision decision_;
  bool user1_ = false;                           // received by stop_requested()
  std::int64_t micro_batch_ns_ = 2'000'000'000;  // the longest of a rank, at the last look
  std::int64_t next_look_ = 1;                   // micro-batches of the update in progress
};

}  // namespace rz
