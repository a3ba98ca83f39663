#include "sharding/lm/engine_of_run.h"

#include <memory>

#include "comm/device/allocate.h"

namespace rz::lm {
namespace {

void apply_flags(const Options& o, StrategyOptions& s) {
  if (o.bucket_mb)
    s.reduce_bucket_size =
        static_cast<std::size_t>(*o.bucket_mb * (1 << 20)) / size_of(s.precision.gradients);
  s.overlap_comm = o.overlap && s.overlap_comm;
}

/// A model without values, and what a micro-batch does with it.
struct Planned {
  Planned(const Options& o, const Inputs& in) : model(in.model->without_values()) {
    model->set_origin(in.model->origin());
    model->checkpoint_activations(o.recompute);
    const Shape shape{static_cast<std::size_t>(in.sizes.micro), in.seq_len};
    record = [this, shape, mask = o.document_mask](Tape& tape) {
      const Tensor inputs = Tensor::empty(shape, DType::i32, allocator_on(tape.stream().device()));
      const Tensor targets = Tensor::empty(shape, DType::i32, allocator_on(tape.stream().device()));
      const Tensor starts =
          mask ? Tensor::empty(shape, DType::i32, allocator_on(tape.stream().device())) : Tensor();
      return model->forward(tape, inputs, targets, starts).loss;
    };
  }
  std::unique_ptr<LanguageModel> model;
  RecordLoss record;
};

}  // namespace

bool decays(const Options& o, const Parameter& p) { return o.decay == Decay::all || p.shape.dims() >= 2; }

EngineOptions engine_options(const Options& o, const Inputs& in) {
  EngineOptions e;
  e.ds_config = in.ds;
  e.decay = o.decay;
  e.strategy = in.strategy;
  e.configure_strategy = [o](StrategyOptions& s) { apply_flags(o, s); };
  if (in.checkpoint)
    e.initial_values = [&weights = *in.checkpoint](const Parameter& p, Range elements, float* out) {
      weights.read(p, elements, out);
    };
  e.seed = o.seed;
  if (!o.samples_only && o.prompt_key.empty())  // answers have fewer
    e.expected_terms = static_cast<double>(in.sizes.train) * static_cast<double>(in.seq_len);
  e.threads = static_cast<int>(o.threads);
  e.graph = o.graph;
  e.log = o.log;
  return e;
}

TrainingPlan plan_run(const Options& o, const Inputs& in, RankOf rank, Device::Kind device) {
  Planned planned(o, in);
  return plan_training(*planned.model, engine_options(o, in), planned.record, rank, device);
}

std::vector<TrainingPlan> plan_ranks(const Options& o, const Inputs& in, int ranks, Device::Kind device) {
  const auto make = [&] {
    const auto planned = std::make_shared<Planned>(o, in);
    return PlannedModule{{planned, planned->model.get()}, planned->record};
  };
  return plan_all_ranks(make, engine_options(o, in), ranks, device);
}

}  // namespace rz::lm
