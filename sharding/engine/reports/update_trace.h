#pragma once
/// The section "ringzero.trace": a timeline of updates in the trace event format, which Perfetto
/// (https://ui.perfetto.dev) and chrome://tracing show.

#include <chrono>
#include <cstdint>
#include <memory>

#include "sharding/config/ds_config.h"
#include "sharding/engine/reports/step_monitor.h"
#include "sharding/model/memory_report.h"
#include "sharding/parallel/traffic.h"
#include "sharding/parallel/world.h"

namespace rz {

/// Records the updates TraceConfig::first_step … first_step + steps - 1 of this process. Each rank is a
/// process of the trace. Its track "computation" has the update, in it forward, backward, reduction (the wait
/// for the last sums of gradients) and step, and in these the waits for communication; the tracks
/// "communication" have the collectives of Traffic, from their start to their end, which a thread finds out
/// within about 50 µs; counters have the memory of the rank. Clocks of nodes are those of the system.
///
/// One thread per rank.
class UpdateTrace {
 public:
  using Clock = std::chrono::steady_clock;
  /// Makes the folder of the file on rank 0. The world outlives the trace. Errc::io on all ranks if that
  /// fails. Collective.
  UpdateTrace(const TraceConfig&, World&);
  ~UpdateTrace();
  UpdateTrace(const UpdateTrace&) = delete;

  /// Whether the update in progress is recorded.
  bool recording() const;
  /// The update in progress begins at `start`, instead of at the end of the one before.
  void begin(Clock::time_point start);
  void add_phase(Phase, Clock::time_point start, Clock::time_point end);
  /// Waits of less than 2 µs are left out.
  void add_wait(Clock::time_point start, Clock::time_point end);
  void add_collective(const StartedCollective&);
  void add_memory(const MemoryUse&);
  /// The update in progress, which is shown with this number, has ended. After the last one that is recorded
  /// rank 0 writes the file of all ranks: Errc::io on all ranks if it cannot. Returns whether recording() has
  /// changed. Collective.
  bool end_update(std::int64_t number);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace rz
