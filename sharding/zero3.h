#pragma once
/// ZeRO-3 (Rajbhandari et al., doi:10.1109/SC41405.2020.00024): each rank keeps its own part of parameters,
/// gradients and optimizer state; a scope's parameters are gathered just before the scope runs, forward and
/// backward, and dropped after it, while the next scope is already on its way.
///
/// Parameters that stand in the same scopes form a unit, which is gathered, reduced and updated as one; so
/// tied embeddings are one unit that two scopes use. All ranks must run the same scopes in the same order,
/// forward and backward. A unit is reduced when the earliest of its scopes leaves backward: a moment that is
/// the same on every rank, whatever parameters a rank did not use.

#include <array>
#include <unordered_map>

#include "sharding/sharded_gradients.h"
#include "sharding/strategy.h"

namespace rz {

class Zero3 final : public Strategy {
 public:
  /// Errc::invalid_argument names a parameter that stands in no scope. Parameter::value becomes undefined
  /// until a scope that uses it is entered.
  Zero3(Module&, Communicator&, StrategyOptions);
  ~Zero3() override;

 private:
  struct Unit {
    std::vector<Parameter*> parameters;
    std::vector<std::size_t> offsets;  // in the unit
    std::size_t count = 0;             // elements, padded
    std::size_t first_scope = 0;       // the last to leave backward
    bool trainable = false;            // then its index is that of its bucket
    Tensor shard, whole;               // `whole` is undefined unless gathered or on its way
    Work gather;
    int users = 0;  // scopes entered and not left
  };
  using Units = std::vector<int>;

  void make_units(const std::vector<const Scope*>&);
  void make_shard(Unit&);
  BucketLayout gradient_layout() const;

  void enter(const Scope&, Pass) override;
  void leave(const Scope&, Pass) override;
  void fetch(Unit&);
  void await(Unit&);
  void drop(Unit&);
  void drop_all_but(const Units& keep, const Units& also);
  const Units& ahead(const Scope&, Pass);
  Units find_ahead(const Scope&, Pass) const;
  const Units& units_of(const Scope&);
  Unit& unit(int u) { return units_[static_cast<std::size_t>(u)]; }
  Range own(const Unit&) const;
  void fill_values(const Fill&) override;
  void visit_frozen(const Visit&) const override;
  Tensor whole_value(const Parameter&) override;
  template <class F>
  static void for_each_parameter(const Unit&, Range, const F&);

  void pass_begins() override;
  void gradient_begins(int member) override;
  void gradient_ready(int member, const Stream&) override;
  void reduce_complete_units(const Scope&);
  void provide_gradients(int bucket) override { gradients_->provide(bucket, stream()); }
  Work reduce(int bucket, const Stream& stream) override { return gradients_->reduce(bucket, stream); }
  void settle_gradients(const Stream& s) override { gradients_->settle(s); }
  void forget_gradients() override;
  void close_scopes();
  Updated updated(int bucket) const override;
  void after_step(const Stream&) override;
  void count_memory(MemoryReport&) const override;

  std::vector<const Scope*> scopes_;
  std::unordered_map<const Scope*, std::size_t> scope_index_;
  std::unordered_map<const Scope*, Units> scope_units_;
  std::array<std::unordered_map<const Scope*, Units>, 2> ahead_;  // [Pass], as find_ahead() gave them
  std::unordered_map<const Parameter*, int> unit_of_;
  std::vector<Unit> units_;  // the trainable ones first, in the order in which they are reduced
  std::unique_ptr<ShardedGradients> gradients_;
  enum class Progress : char { untouched, touched, ready };
  std::vector<Progress> progress_;  // of members in this pass
  std::vector<char> handed_over_;   // units given to the scheduler in this pass
};

}  // namespace rz
