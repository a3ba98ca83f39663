#pragma once
/// Optimizer state of the elements that a rank updates.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "../../autograd_lite/parameter.h"
#include "../../tensor/tensor.h"
#include "../optim/optimizer.h"

namespace rz {

class ShardedModel;
struct BucketLayout;
struct HeldBytes;
struct Runtime;

/// f32 values, by the names of the optimizer, bucket by bucket, in memory of ShardedModel::state_allocator().
/// A member has the states of its group and takes no memory for others. Strategy::optimizer_state() returns
/// it.
class OptimizerState {
 public:
  /// Writes `elements` of a state of a flat parameter to out[0, elements.count()).
  using Fill = std::function<void(const std::string& state, const Parameter&, Range elements, float* out)>;
  /// Reads `elements` of a state of a flat parameter from value[0, elements.count()).
  using Visit =
      std::function<void(const std::string& state, const Parameter&, Range elements, const float* value)>;

  /// The model must outlive the state.
  OptimizerState(const ShardedModel&, const Runtime&);
  OptimizerState(const OptimizerState&) = delete;

  // ---- import and export; not collective
  /// Calls fill for the states of all elements that this rank updates, allocating them if there are none. In
  /// ddp every rank fills all elements, with the same values.
  void fill(const Optimizer&, const Fill&);
  /// Visits the states that this rank exports; none before the first update. Over all ranks, each element of
  /// each state is visited once.
  void visit(const Visit&) const;
  struct Elements {
    std::string state;
    ParameterElements of;
  };
  /// What visit() visits, in its order. No values are read.
  std::vector<Elements> owned() const;
  /// Updates that skipped a parameter because no loss had reached it: a part of the optimizer state. The same
  /// on all ranks. Errc::invalid_argument if it has no state.
  std::int64_t missed_updates(const Parameter& p) const { return missed_[trained_member(p)]; }
  void set_missed_updates(const Parameter& p, std::int64_t n) { missed_[trained_member(p)] = n; }

  // ---- an update
  /// Allocates the states of an optimizer with their initial values. Later calls check that the optimizer
  /// needs the same states: Errc::invalid_argument if not, and for a group of matrices with a parameter that
  /// has not two dimensions.
  void prepare(const Optimizer&);
  /// Follows ShardedModel::rebucket().
  void move(const BucketLayout& before);
  /// The parameter group of a member; after prepare().
  int group_of(int member) const { return groups_[static_cast<std::size_t>(member)]; }
  /// missed_updates() by member.
  std::span<std::int64_t> missed() { return missed_; }

  /// State number s of the element of `member` at an offset of its bucket, within the updated range.
  /// Consecutive members of one group are contiguous. Null if the member has no such state.
  float* at(std::size_t s, int member, std::size_t offset) const;
  /// State number s of the elements in a range of a bucket, which are contiguous. Undefined if there are
  /// none.
  Tensor part(std::size_t s, int bucket, Range) const;

  /// Bytes held, padding included; 0 before prepare().
  HeldBytes bytes() const;

 private:
  using Buckets = std::vector<Tensor>;
  /// Part of a bucket's updated range that belongs to a member, with the padding after it.
  struct Extent {
    int member;
    Range range;  ///< in the bucket
  };

  std::size_t trained_member(const Parameter&) const;
  std::vector<Extent> extents(int bucket) const;
  const std::vector<StateSpec>& states_of(int member) const;
  void allocate();
  Tensor tensor(std::size_t s, int member, std::size_t offset, std::size_t count) const;
  /// Calls f(spec, parameter, elements, values) for the states of what this rank owns, or of all that it
  /// updates.
  template <class F>
  void each(bool owned, const F&) const;

  const ShardedModel& model_;
  const Runtime& runtime_;
  std::vector<std::vector<StateSpec>> states_;  // by group
  std::vector<int> groups_;                     // by member
  std::vector<std::int64_t> missed_;            // by member
  std::uint64_t prepared_for_ = 0;              // serial number of the optimizer
  std::vector<Buckets> memory_;                 // [state][bucket]; undefined if no member has the state
  /// [state][member]: offset in memory_ of the member's first updated element, minus its offset in the
  /// bucket.
  std::vector<std::vector<std::ptrdiff_t>> shift_;
};

}  // namespace rz
