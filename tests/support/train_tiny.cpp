#include "tests/support/train_tiny.h"

#include <gtest/gtest.h>

#include <bit>
#include <cstdlib>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "sharding/checkpoint/safetensors.h"
#include "sharding/huggingface/pretrained_weights.h"
#include "sharding/io/json.h"
#include "tensor/ops.h"
#include "tests/support/ranks.h"

namespace rz::test {

namespace {

namespace fs = std::filesystem;
using lm::UpdateReport;

}  // namespace

void write_tiny_start(const Gpt2Config& config, const std::string& path, DType precision) {
  Gpt2 model(config);
  std::vector<SafetensorsSpec> tensors;
  for (const Parameter* p : model.parameters()) {
    tensors.push_back({p->name, {}});
    for (int i = 0; i < p->shape.dims(); ++i) tensors.back().shape.push_back(p->shape[i]);
  }
  SafetensorsWriter writer(path, tensors);
  for (const Parameter* p : model.parameters()) {
    std::vector<float> values(p->count());
    gpt2_tiny_weights(*p, config.n_layer, {0, values.size()}, values.data());
    const Tensor whole = Tensor::borrow(values.data(), p->shape),
                 rounded = Tensor::empty(p->shape, precision);
    ops::copy(rounded, whole, {});
    ops::copy(whole, rounded, {});
    writer.write(values);
  }
  writer.finish();
}

TinyOptions tiny_options(const TinyCase& c, int ranks, StrategyKind kind) {
  TinyOptions o;
  o.strategy = kind;
  o.ds.optimizer = OptimizerConfig{.lr = 1e-3, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1};
  o.ds.sizes = {c.batch, c.batch / ranks, 1};
  o.ds.gradient_clipping = 0;
  o.seq_len = c.config.n_positions;
  return o;
}

namespace {
EngineOptions engine_options(const TinyRun& run, const PretrainedWeights& weights) {
  EngineOptions e;
  e.ds_config = run.options.ds;
  const Precision& precision = run.options.strategy_options.precision;
  e.ds_config->strategy.precision.parameters = precision.parameters;
  e.ds_config->strategy.precision.gradients = precision.gradients;
  e.strategy = run.options.strategy;
  e.decay = run.options.decay;
  e.configure_strategy = [&run](StrategyOptions& s) { s = run.options.strategy_options; };
  e.initial_values = [&weights](const Parameter& p, Range elements, float* out) {
    weights.read(p, elements, out);
  };
  e.expected_terms =
      static_cast<double>(run.options.ds.sizes.train) * static_cast<double>(run.options.seq_len);
  e.threads = run.options.threads;
  e.graph = run.options.graph;
  e.log = nullptr;
  return e;
}

/// Equal for NaN too.
std::uint64_t bits(double x) { return std::bit_cast<std::uint64_t>(x); }
}  // namespace

std::vector<Reports> train_all(const TinyRun& run, std::int64_t steps) {
  std::vector<Reports> reports(static_cast<std::size_t>(run.ranks));
  run_ranks(run.ranks, [&](int rank, std::shared_ptr<Store> store) {
    World world(run.connect ? run.connect(rank, std::move(store))
                            : Communicator::connect(rank, run.ranks, std::move(store), run.comm(rank)));
    Gpt2 model(run.c.config);
    model.checkpoint_activations(run.recompute);
    Engine engine = initialize(world, model, engine_options(run, PretrainedWeights(run.checkpoint, model)));
    const Tokens tokens = Tokens::from_file(run.tokens);
    const std::size_t seq_len = run.options.seq_len;
    Loader loader = lm::token_loader(engine, tokens, seq_len,
                                     lm::batch_sampler(engine, tokens.samples(seq_len), false, 0));
    for (std::int64_t i = 0; i < steps; ++i) {
      reports[static_cast<std::size_t>(rank)].push_back(lm::update(engine, model, loader, seq_len).value());
      if (run.each) run.each(engine);
    }
    if (run.afterwards) run.afterwards(engine, model);
  });
  return reports;
}

Reports train(const TinyRun& run, std::int64_t steps) {
  const std::vector<Reports> reports = train_all(run, steps);
  for (const Reports& r : reports)
    for (std::size_t i = 0; i < reports[0].size(); ++i) {
      EXPECT_EQ(bits(r.at(i).loss), bits(reports[0][i].loss));
      EXPECT_EQ(bits(r.at(i).grad_norm), bits(reports[0][i].grad_norm));
    }
  return reports[0];
}

Reports train_tiny(const std::string& name, int ranks, StrategyKind kind, std::int64_t steps,
                   const std::function<void(TinyRun&)>& change) {
  const Folder folder;
  const TinyCase c = tiny_case(name);
  TinyRun run{c, ranks, tiny_options(c, ranks, kind), folder / "start.safetensors"};
  write_tiny_start(c.config, run.checkpoint);
  if (change) change(run);
  return train(run, steps);
}

TinyRun smallest_run(StrategyKind kind, int ranks, const Folder& folder) {
  TinyCase c = tiny_case("tiny");
  c.config.n_embd = 16;
  c.config.n_head = 2;
  c.config.n_positions = 8;
  c.batch = 4;
  TinyRun run{c, ranks, tiny_options(c, ranks, kind), folder / "start.safetensors"};
  run.options.ds.gradient_clipping = 0.5;
  // Also of a scope of zero3, which is cut into several units.
  run.options.strategy_options.reduce_bucket_size = 1024;
  run.options.strategy_options.first_bucket_size = 256;
  write_tiny_start(c.config, run.checkpoint);
  return run;
}

void expect_same_bits(const Reports& a, const Reports& b, const std::string& what) {
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i) {
    EXPECT_EQ(bits(a[i].loss), bits(b[i].loss)) << what << ", update " << i;
    EXPECT_EQ(bits(a[i].grad_norm), bits(b[i].grad_norm)) << what << ", update " << i;
  }
}

}  // namespace rz::test
