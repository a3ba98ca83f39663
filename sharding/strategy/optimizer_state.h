#pragma once
/// Memory of the optimizer state of the elements that a rank updates.

#include <functional>
#include <span>
#include <string>
#include <vector>

#include "sharding/model/runtime.h"
#include "sharding/model/sharded_model.h"
#include "sharding/optim/optimizer.h"

namespace rz {

/// f32 values, bucket by bucket, in memory of ShardedModel::state_allocator(). A member has the states of its
/// group and takes no memory for others.
class OptimizerState {
 public:
  /// Writes `elements` of a state of a flat parameter to out[0, elements.count()).
  using Fill = std::function<void(const std::string& state, const Parameter&, Range elements, float* out)>;
  /// Reads `elements` of a state of a flat parameter from value[0, elements.count()).
  using Visit =
      std::function<void(const std::string& state, const Parameter&, Range elements, const float* value)>;

  /// The model must outlive the state.
  OptimizerState(const ShardedModel& model, const Runtime& runtime) : model_(model), runtime_(runtime) {}

  /// Allocates the states of an optimizer with their initial values; `groups` by member. Later calls check
  /// that the optimizer needs the same states: Errc::invalid_argument if not.
  void prepare(const Optimizer&, std::span<const int> groups);
  /// Follows ShardedModel::rebucket().
  void move(const BucketLayout& before);

  /// State number s of the element of `member` at an offset of its bucket, within the updated range.
  /// Consecutive members of one group are contiguous. Null if the member has no such state.
  float* at(std::size_t s, int member, std::size_t offset) const;
  /// State number s of the elements in a range of a bucket, which are contiguous. Undefined if there are
  /// none.
  Tensor part(std::size_t s, int bucket, Range) const;

  /// Calls fill for the states of all elements that this rank updates. Not collective.
  void fill(const Fill&) const;
  /// Visits the states that this rank exports. Over all ranks, each element is visited once. Not collective.
  void visit(const Visit&) const;
  struct Elements {
    std::string state;
    ParameterElements of;
  };
  /// What visit() visits, in its order. No values are read.
  std::vector<Elements> owned() const;
  /// Bytes held, padding included; 0 before prepare().
  HeldBytes bytes() const;

 private:
  using Buckets = std::vector<Tensor>;
  /// Part of a bucket's updated range that belongs to a member, with the padding after it.
  struct Extent {
    int member;
    Range range;  ///< in the bucket
  };

  std::vector<Extent> extents(int bucket) const;
  const std::vector<StateSpec>& states_of(int member) const;
  void allocate();
  Tensor tensor(std::size_t s, int member, std::size_t offset, std::size_t count) const;
  /// Calls f(spec, parameter, elements, values) for the states of this rank's shard, or of all that it
  /// updates.
  template <class F>
  void each(bool shard, const F&) const;

  const ShardedModel& model_;
  const Runtime& runtime_;
  std::vector<std::vector<StateSpec>> states_;  // by group
  std::vector<int> groups_;                     // by member
  std::vector<Buckets> memory_;                 // [state][bucket]; undefined if no member has the state
  /// [state][member]: offset in memory_ of the member's first updated element, minus its offset in the
  /// bucket.
  std::vector<std::vector<std::ptrdiff_t>> shift_;
};

}  // namespace rz
