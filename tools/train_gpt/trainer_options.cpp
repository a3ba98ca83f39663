#include "tools/train_gpt/trainer_options.h"

#include <algorithm>

namespace rz::train_gpt {

bool decays(const Options& o, const Parameter& p) { return o.decay == Decay::all || p.shape.dims() >= 2; }

namespace {

StrategyOptions with_flags(StrategyOptions s, const Options& o) {
  if (o.bucket_mb)
    s.reduce_bucket_size =
        static_cast<std::size_t>(*o.bucket_mb * (1 << 20)) / size_of(s.precision.gradients);
  s.first_bucket_size = std::min(s.reduce_bucket_size, StrategyOptions().first_bucket_size);
  s.overlap_comm = o.overlap && s.overlap_comm;
  return s;
}

}  // namespace

TrainerOptions trainer_options(const Options& o, const Inputs& in, int threads) {
  TrainerOptions t;
  t.strategy = in.strategy;
  t.strategy_options = with_flags(strategy_options(in.ds), o);
  t.optimizer = *in.ds.optimizer;
  t.decay = o.decay;
  t.schedule = in.ds.schedule;
  t.gradient_clipping = in.ds.gradient_clipping;
  t.loss_scale = in.ds.precision.loss_scale;
  t.skip_overflow = in.ds.precision.skip_overflow;
  t.batches = {.sizes = in.sizes, .shuffle = o.shuffle, .drop_last = in.ds.drop_last, .seed = o.seed};
  t.seq_len = in.seq_len;
  t.graph = o.graph;
  t.seed = o.seed;
  t.threads = threads;
  return t;
}

}  // namespace rz::train_gpt
