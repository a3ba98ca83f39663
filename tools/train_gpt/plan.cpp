#include "tools/train_gpt/plan.h"

#include "comm/device/allocate.h"
#include "tools/train_gpt/engine_options.h"

namespace rz::train_gpt {

namespace {

/// A model without values, and what a micro-batch does with it.
struct Planned {
  Planned(const Options& o, const Inputs& in) : model(in.model->config()) {
    model.checkpoint_activations(o.recompute);
    const Shape shape{static_cast<std::size_t>(in.sizes.micro), in.seq_len};
    record = [this, shape](Tape& tape) {
      const Tensor inputs = Tensor::empty(shape, DType::i32, allocator_on(tape.stream().device()));
      const Tensor targets = Tensor::empty(shape, DType::i32, allocator_on(tape.stream().device()));
      return model.forward(tape, inputs, targets).loss;
    };
  }
  Gpt2 model;
  RecordLoss record;
};

}  // namespace

TrainingPlan plan_run(const Options& o, const Inputs& in, RankOf rank, Device::Kind device) {
  Planned planned(o, in);
  return plan_training(planned.model, engine_options(o, in), planned.record, rank, device);
}

std::vector<TrainingPlan> plan_ranks(const Options& o, const Inputs& in, int ranks, Device::Kind device) {
  Planned planned(o, in);
  return plan_all_ranks(planned.model, engine_options(o, in), planned.record, ranks, device);
}

}  // namespace rz::train_gpt
