#include "tools/train_gpt/trainer_options.h"

#include <algorithm>

namespace rz::train_gpt {

bool decays(const Options& o, const Parameter& p) { return o.decay == Decay::all || p.shape.dims() >= 2; }

namespace {

GatherLimits gather_limits(const ZeroConfig& zero) {
  const auto elements = [](std::int64_t n) { return static_cast<std::size_t>(n); };
  return {.prefetch_bucket_size = elements(zero.prefetch_bucket_size),
          .max_live_parameters = elements(zero.max_live_parameters),
          .max_reuse_distance = elements(zero.max_reuse_distance),
          .param_persistence_threshold = elements(zero.param_persistence_threshold),
          .model_persistence_threshold = elements(zero.model_persistence_threshold)};
}

StrategyOptions strategy_options(const Options& o, const DsConfig& ds) {
  StrategyOptions s;
  s.precision = {ds.precision.parameters, ds.precision.gradients};
  s.wire = {ds.precision.communication, ds.precision.prescale_gradients,
            ds.precision.gradient_predivide_factor};
  if (ds.zero.reduce_bucket_size)
    s.reduce_bucket_size = static_cast<std::size_t>(*ds.zero.reduce_bucket_size);
  if (o.bucket_mb)
    s.reduce_bucket_size =
        static_cast<std::size_t>(*o.bucket_mb * (1 << 20)) / size_of(s.precision.gradients);
  s.first_bucket_size = std::min(s.reduce_bucket_size, s.first_bucket_size);
  s.allgather_bucket_size = static_cast<std::size_t>(ds.zero.allgather_bucket_size);
  s.overlap_comm = o.overlap && ds.zero.overlap_comm.value_or(true);
  s.gathers = gather_limits(ds.zero);
  s.unused_parameters = ds.unused_parameters;
  return s;
}

}  // namespace

TrainerOptions trainer_options(const Options& o, const Inputs& in, int threads) {
  TrainerOptions t;
  t.strategy = in.strategy;
  t.strategy_options = strategy_options(o, in.ds);
  t.optimizer = *in.ds.optimizer;
  t.decay_all = o.decay == Decay::all;
  t.schedule = in.ds.schedule;
  t.gradient_clipping = in.ds.gradient_clipping;
  t.loss_scale = in.ds.precision.loss_scale;
  t.skip_overflow = in.ds.precision.skip_overflow;
  t.batches = {.samples = in.samples,
               .sizes = in.sizes,
               .shuffle = o.shuffle,
               .drop_last = in.ds.drop_last,
               .seed = o.seed};
  t.seq_len = in.seq_len;
  t.graph = o.graph;
  t.seed = o.seed;
  t.threads = threads;
  return t;
}

}  // namespace rz::train_gpt
