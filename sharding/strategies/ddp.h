#pragma once
/// Distributed data parallel: every rank holds all parameters, gradients and optimizer state. Gradients are
/// averaged over the ranks bucket by bucket, while backward computes the rest (Li et al., PyTorch
/// Distributed, doi:10.14778/3415478.3415530).

#include "sharding/strategies/replicated_values.h"
#include "sharding/strategies/strategy.h"

namespace rz {

/// The first zero_grad() after the first step rebuckets the members in the order in which their gradients
/// became ready on rank 0.
class Ddp final : public Strategy {
 public:
  Ddp(Module&, Communicator&, StrategyOptions);
  ~Ddp() override;

 private:
  void fill_values(const Fill& fill) override { values_.fill(fill, stream()); }
  void visit_frozen(const Visit& visit) const override { values_.visit_frozen(visit, stream()); }
  Tensor unsharded_value(const Parameter& p) override { return p.value; }
  void ensure_gradient_storage(int) override {}
  Work reduce(int bucket, const Stream&) override;
  Updated updated(int bucket) const override;
  void after_step(const Stream&) override;
  void drop_gradients() override;
  void count_memory(MemoryReport&) const override;

  void allocate_gradients();

  ReplicatedValues values_;
  std::vector<Tensor> gradients_;  // one per bucket
  enum class Rebuild { pending, due, done } rebuild_;
  std::vector<int> ready_order_;
};

}  // namespace rz
