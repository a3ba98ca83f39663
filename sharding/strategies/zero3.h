#pragma once
/// ZeRO-3 (Rajbhandari et al., doi:10.1109/SC41405.2020.00024): each rank keeps its own shard of parameters,
/// gradients and optimizer state. The parameters of a scope are gathered just before the scope runs, in
/// forward and backward, and dropped after it. Meanwhile the next scope is prefetched.
///
/// Parameters that belong to the same scopes form one flat parameter, which is gathered, reduced and updated
/// as a whole. Tied embeddings are one flat parameter used by two scopes. All ranks must run the same scopes
/// in the same order, forward and backward. A flat parameter is reduced when the earliest of its scopes
/// leaves backward; that moment is the same on every rank, whichever parameters a rank did not use.

#include <array>
#include <unordered_map>

#include "sharding/strategies/sharded_gradients.h"
#include "sharding/strategies/strategy.h"

namespace rz {

class Zero3 final : public Strategy {
 public:
  /// Errc::invalid_argument names a parameter that belongs to no scope. Parameter::value is undefined until a
  /// scope that uses the parameter is entered.
  Zero3(Module&, Communicator&, StrategyOptions);
  ~Zero3() override;

 private:
  struct FlatParameter {
    std::vector<Parameter*> parameters;
    std::vector<std::size_t> offsets;  // in the flat parameter
    std::size_t count = 0;             // elements, including padding
    std::size_t first_scope = 0;       // index of the earliest scope, the last one to leave backward
    bool trainable = false;            // if true, the index of the flat parameter is that of its bucket
    Tensor shard, unsharded;           // `unsharded` is undefined unless gathered or being gathered
    Work gather;
    int active_scopes = 0;  // scopes that were entered and not yet left
  };
  using FlatParameterIndices = std::vector<int>;

  void make_flat_parameters(const std::vector<const Scope*>&);
  void make_shard(FlatParameter&);
  BucketLayout gradient_layout() const;

  void enter(const Scope&, Pass) override;
  void leave(const Scope&, Pass) override;
  void all_gather_async(FlatParameter&);
  void wait_gathered(FlatParameter&);
  void reshard(FlatParameter&);
  void reshard_all_but(const FlatParameterIndices& keep, const FlatParameterIndices& also);
  const FlatParameterIndices& prefetch_set(const Scope&, Pass);
  FlatParameterIndices find_ahead(const Scope&, Pass) const;
  const FlatParameterIndices& flat_parameters_of(const Scope&);
  FlatParameter& flat_parameter(int u) { return flat_parameters_[static_cast<std::size_t>(u)]; }
  Range own_range(const FlatParameter&) const;
  void fill_values(const Fill&) override;
  void visit_frozen(const Visit&) const override;
  Tensor unsharded_value(const Parameter&) override;
  template <class F>
  static void for_each_parameter(const FlatParameter&, Range, const F&);

  void on_backward_begin() override;
  void on_gradient_begin(int member) override;
  void on_gradient_ready(int member, const Stream&) override;
  void reduce_complete(const Scope&);
  void ensure_gradient_storage(int bucket) override { gradients_->ensure_storage(bucket, stream()); }
  Work reduce(int bucket, const Stream& stream) override { return gradients_->reduce(bucket, stream); }
  void finish_reductions(const Stream& s) override { gradients_->finish_reductions(s); }
  void drop_gradients() override;
  void close_scopes();
  Updated updated(int bucket) const override;
  void after_step(const Stream&) override;
  void count_memory(MemoryReport&) const override;

  std::vector<const Scope*> scopes_;
  std::unordered_map<const Scope*, std::size_t> scope_index_;
  std::unordered_map<const Scope*, FlatParameterIndices> scope_flat_parameters_;
  std::array<std::unordered_map<const Scope*, FlatParameterIndices>, 2>
      ahead_;  // [Pass], results of find_ahead()
  std::unordered_map<const Parameter*, int> flat_parameter_of_;
  std::vector<FlatParameter> flat_parameters_;  // trainable ones first, in the order of reduction
  std::unique_ptr<ShardedGradients> gradients_;
  enum class Progress : char { untouched, touched, ready };
  std::vector<Progress> progress_;  // of each member in this pass
  std::vector<char> queued_;        // flat parameters passed to the scheduler in this pass
};

}  // namespace rz
