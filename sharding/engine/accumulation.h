#pragma once
/// Which pass of an update a loop has reached.

#include <cstdint>
#include <optional>

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

}  // namespace rz
