#pragma once
/// The passes and updates of a training loop.

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "autograd_lite/ops.h"
#include "autograd_lite/tape.h"
#include "comm/device/graph.h"
#include "comm/device/stream.h"
#include "sharding/engine/loop/training_step.h"
#include "sharding/engine/reports/update_reports.h"
#include "sharding/strategy/strategy.h"

namespace rz {

/// Counts the micro-batches of an update. Several passes may belong to one micro-batch, e.g. of two losses.
class Accumulation {
 public:
  /// An update consists of `steps` micro-batches.
  explicit Accumulation(std::int64_t steps) : steps_(steps) {}

  std::int64_t steps() const { return steps_; }
  /// True in the last micro-batch of an update.
  bool boundary() const { return forced_.value_or(micro_ + 1 >= steps_); }
  /// Decides in place of the count until the next decision; nullopt: the count decides again.
  void force_boundary(std::optional<bool> boundary) { forced_ = boundary; }

  /// A pass of the current micro-batch has run.
  void count_pass() { ++passes_; }
  /// Passes of the current micro-batch.
  std::int64_t passes() const { return passes_; }
  /// Micro-batches of the update in progress that have begun.
  std::int64_t begun() const { return micro_ + (passes_ > 0); }
  /// True before the first pass of an update.
  bool fresh() const { return micro_ == 0 && passes_ == 0; }

  void next_micro_batch() { ++micro_, passes_ = 0; }
  void next_update() { micro_ = 0, passes_ = 0; }

 private:
  std::int64_t steps_;
  std::int64_t micro_ = 0, passes_ = 0;
  std::optional<bool> forced_;
};

/// Every pass of every rank has its own seed. Those of an update lie in memory that a graph may read.
class DropoutSeeds {
 public:
  struct Place {
    int rank = 0, ranks = 1;
    /// Passes of a rank that follow each other in the order of the passes of all ranks, which numbers the
    /// seeds. With those of an update, seeds do not depend on the number of ranks.
    std::uint64_t consecutive = 1;
  };
  /// For updates of `micro_batches`, on the device of the stream.
  DropoutSeeds(std::uint64_t seed, std::size_t micro_batches, Place, const Stream&);

  /// The seed of a pass of this rank, counted from 0.
  std::uint64_t of_pass(std::uint64_t pass) const;
  /// Writes the seeds of an update, which begins with a pass, in the order of the stream.
  void draw(std::uint64_t first_pass, const Stream&);
  /// On the device; see Tape::seed_at().
  const std::uint64_t* at(std::size_t micro_batch) const { return on_device_.get() + micro_batch; }

 private:
  std::uint64_t seed_;
  Place place_;
  std::vector<std::uint64_t> next_;  // in host memory
  std::shared_ptr<std::uint64_t> on_device_;
};

/// Captures updates once they are identical, and replays them.
class UpdateGraph {
 public:
  /// Runs `update`, or replays it if replays(may_capture), after before_launch(). Returns whether it was
  /// replayed.
  bool run(const Stream&, bool may_capture, const std::function<void()>& update,
           const std::function<void()>& before_launch);
  /// Whether the next run() replays the update: it may, and the updates before it have settled.
  bool replays(bool may_capture) const;
  /// True if the last update was replayed.
  bool defined() const { return graph_.defined(); }
  /// Call before operations that may free memory used by the graph.
  void drop();

 private:
  Graph graph_;
  int uncaptured_updates_ = 0;  // updates without a graph since the last change
};

struct UpdateLoopOptions {
  std::int64_t accumulation = 1;         ///< micro-batches of an update
  std::optional<double> expected_terms;  ///< default: those of the first micro-batches, times accumulation
  double max_norm = 0;                   ///< of gradients, by clipping; 0: no clipping
  std::uint64_t seed = 0;                ///< of dropout
  bool graph = true;                     ///< on a device: capture updates
  std::function<void()> when_dropped{};  ///< called on every rank that drops an update
  /// Nothing depends on how many ranks share the micro-batches of an update.
  bool world_size_invariant = false;
  int tp = 1;  ///< neighbouring ranks with the same data, whose losses are compared on the host
};

/// Makes updates of passes, pass by pass or a whole update at once. Engine has the contracts of the functions
/// of the same names.
class UpdateLoop {
 public:
  /// The parts outlive the loop; the strategy is attached to the tape.
  /// `data`: the ranks with other data, of all ranks.
  UpdateLoop(Communicator& all, Communicator& data, Tape&, Strategy&, TrainingStep&&, UpdateReports&&,
             const UpdateLoopOptions&);

  // ---- pass by pass
  void backward(const nn::Loss&);
  /// In place of a pass on a rank without data; see Strategy::backward_without_data().
  void backward_without_data();
  /// True before the first pass of the first update.
  bool fresh() const { return passes_ == 0; }
  bool step();
  /// Drops the update in progress. Communicators have been renewed on every rank. Collective.
  void cancel();
  Accumulation& accumulation() { return accumulation_; }

  // ---- update by update
  /// An update whose micro-batch m has the loss forward(m). `start`: when it began.
  void run(const std::function<nn::Loss(std::size_t)>& forward, UpdateReports::Clock::time_point start);
  /// Back to the beginning of the update that run() began, between two of its micro-batches, on every rank
  /// alike.
  void abandon();
  /// Whether updates may be captured in a graph.
  bool may_capture() const { return options_.graph && tape_.stream().device().kind == Device::cuda; }
  /// Whether there is one.
  bool has_graph() const { return graph_.defined(); }
  /// Call before the strategy is used otherwise.
  void drop_graph() { graph_.drop(); }

  // ---- a run that is resumed
  struct State {
    UpdateReports::Count count;
    TrainingStep::State training;
    std::uint64_t passes = 0;              ///< before the update in progress
    std::optional<double> expected_terms;  ///< none: no loss has decided on them
    bool operator==(const State&) const = default;
  };
  /// At the beginning of the update in progress.
  State state() const;
  /// Between updates.
  void set_state(const State&);
  /// Errc::invalid_argument unless no pass of an update has run.
  void require_between_updates(const char* what) const;

  // ---- parts
  TrainingStep& training() { return training_; }
  UpdateReports& reports() { return reports_; }

 private:
  /// Before a pass of backward() from a loss.
  void begin_pass(bool has_terms);
  void begin_pass();
  void end_pass();
  /// True if the pass is not the first of its micro-batch.
  bool follows() const { return accumulation_.passes() > 0; }
  void require_no_failed_pass(const char* call) const;
  /// Errc::unsynchronised inside NoSync.
  void require_synchronises(const char* call) const;
  /// The terms of the first loss decide on expected_terms, unless they were given. Collective.
  void expect_terms(const nn::Loss&);
  /// Runs what reduces or updates. An error that all ranks have alike drops the update on all.
  template <class F>
  void on_every_rank(const F& body);
  /// Whether run() captures updates once they have settled.
  bool captures() { return may_capture() && !reports_.times().enabled() && !reports_.profiling(); }
  /// Back to the beginning of the update in progress.
  void rewind();
  /// The same, and loaders go on behind it.
  void drop();
  /// After the last pass of an update. May be captured in a graph.
  void reduce_and_apply();
  void run_passes(const std::function<nn::Loss(std::size_t)>& forward);
  void require_equal_losses(std::int64_t update);
  void complete();

  Communicator& all_;   // ranks
  Communicator& data_;  // ranks with other data
  Tape& tape_;
  Strategy& strategy_;
  UpdateLoopOptions options_;
  TrainingStep training_;
  UpdateReports reports_;
  Accumulation accumulation_;
  DropoutSeeds seeds_;
  UpdateGraph graph_;
  std::uint64_t passes_ = 0;             // of all updates
  std::uint64_t passes_of_updates_ = 0;  // before the update in progress
  bool in_pass_ = false;                 // a pass has begun and has not ended: it runs or has failed
  bool given_terms_ = false;             // expected_terms of the options
  double first_terms_ = 0;               // of the first micro-batches of all ranks
  bool new_terms_ = false;               // the update in progress has decided on expected_terms
};

}  // namespace rz
