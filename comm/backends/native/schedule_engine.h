#pragma once
/// Collectives by verified schedules over a transport: selects the schedule of a call and keeps the plans of
/// earlier ones.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "comm/backends/native/native_options.h"
#include "comm/progress/collective_engine.h"
#include "comm/schedule/executor.h"
#include "comm/tuning/intranode.h"
#include "comm/tuning/overrides.h"
#include "comm/tuning/select.h"

namespace rz {

/// Sums of 8- and 16-bit floats: storing a partial sum rounds it. Min and max select one contribution.
bool rounds_partial_sums(DType, const ReduceOp&);
bool rounds_partial_sums(const CollectiveCall&);

/// The driving thread calls it; the functions that are const, except for those of CollectiveEngine, are
/// thread safe.
class ScheduleEngine final : public CollectiveEngine {
 public:
  ScheduleEngine(Transport&, int rank, int size, const NativeOptions&);

  /// Starts the schedule that schedule_for() selects.
  void start(const CollectiveCall&, std::uint32_t sequence) override;
  /// Starts that schedule, in slices of `slice` bytes; 0: of the default size.
  void start(const CollectiveCall&, std::uint32_t sequence, const schedule::Algorithm&, std::size_t slice);
  bool advance() override { return executor_.advance(); }
  bool complete() const override { return executor_.complete(); }
  WaitState waiting_on() const override { return executor_.waiting_on(); }

  /// The schedule of a call. `bytes`: message_bytes(). `rounds`: rounds_partial_sums().
  tuning::SelectedAlgorithm schedule_for(Collective, std::size_t bytes, bool rounds) const;
  /// False if the algorithm rounds partial sums of this type, so that its bits differ from other
  /// algorithms', although `deterministic` is set and the algorithm is not forced. A tuning rule may name
  /// such an algorithm.
  bool is_allowed(const schedule::Algorithm&, Collective, bool rounds) const;
  /// Errc::config if the forced algorithm of a collective has no schedule.
  void require_schedules() const;

  /// The table of the intra-node engine of this group.
  tuning::IntranodeTable intranode_table() const;
  /// The reason for a selection.
  std::string reason(Collective, const tuning::SelectedAlgorithm&) const;

 private:
  struct CachedPlan {
    const schedule::Algorithm* algorithm;
    int root;
    bool in_place;
    std::unique_ptr<schedule::DependencyPlan> plan;
  };

  const schedule::DependencyPlan& plan_for(const schedule::Algorithm&, int root, bool in_place);

  const int rank_, size_;
  const bool deterministic_;
  const ReductionOrder order_;
  const std::string tuning_name_;
  const tuning::AlgorithmOverrides overrides_;
  const std::vector<tuning::Rule> file_rules_;  // of the tuning file, for this group
  const bool intra_node_;
  const std::vector<int> node_of_rank_;
  const int nodes_;
  schedule::Executor executor_;
  std::vector<CachedPlan> plans_;
};

}  // namespace rz
