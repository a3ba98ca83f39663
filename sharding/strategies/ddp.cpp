#include "sharding/strategies/ddp.h"

#include <cstdint>

namespace rz {

Ddp::Ddp(Module& module, Communicator& communicator, StrategyOptions options)
    : Strategy(StrategyKind::ddp, module, communicator, std::move(options)),
      values_(communicator, precision().parameters, members(), frozen(), stream()),
      rebuild_(this->options().rebuild ? Rebuild::pending : Rebuild::done) {
  set_layout(plan_member_buckets(members(), precision().gradients, bucket_options()));
  values_.move_to_layout(layout(), stream());
  allocate_gradients();
}

Ddp::~Ddp() { abort_in_flight(); }

void Ddp::allocate_gradients() {
  gradients_.clear();
  for (Parameter* p : members()) p->grad = {};
  for (const auto& b : layout().buckets)
    gradients_.push_back(allocate_flat(communicator(), b.count, b.dtype));
  for (std::size_t m = 0; m < members().size(); ++m) {
    const auto place = layout().offsets[m];
    members()[m]->grad =
        gradients_[static_cast<std::size_t>(place.bucket)].view(place.offset, members()[m]->shape);
    members()[m]->grad_is_fresh = true;
  }
}

Work Ddp::reduce(int bucket, const Stream& stream) {
  return communicator().all_reduce(gradients_[static_cast<std::size_t>(bucket)].buffer(), ReduceOp::avg,
                                   stream);
}

Strategy::Updated Ddp::updated(int bucket) const {
  const Tensor& gradient = gradients_[static_cast<std::size_t>(bucket)];
  return {values_.bucket(bucket), gradient};
}

void Ddp::after_step(const Stream&) {
  if (rebuild_ != Rebuild::pending) return;
  rebuild_ = Rebuild::due;
  ready_order_ = scheduler().ready_order();
}

void Ddp::drop_gradients() {
  if (rebuild_ != Rebuild::due) return;
  rebuild_ = Rebuild::done;
  std::vector<std::int32_t> order(ready_order_.begin(), ready_order_.end());
  communicator().broadcast(Buffer(order.data(), order.size()), 0).wait();
  stream().synchronize();  // the last update still reads the gradients
  gradients_.clear();      // before new buckets are allocated
  change_layout(plan_member_buckets(members(), precision().gradients, bucket_options(),
                                    std::vector<int>(order.begin(), order.end())));
  values_.move_to_layout(layout(), stream());
  allocate_gradients();
}

void Ddp::count_memory(MemoryReport& report) const {
  report.parameters = values_.bytes();
  for (const Tensor& g : gradients_) report.gradients += g.bytes();
}

}  // namespace rz
