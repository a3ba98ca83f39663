#include "tests/lab/training.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <nlohmann/json.hpp>
#include <string_view>
#include <tuple>

#include "comm/device/allocate.h"
#include "comm/device/memory.h"
#include "sharding/lm/updates.h"

namespace rz::lab {

Batch batch(std::uint64_t number, std::size_t rows, const MlpSizes& s) {
  const Tensor x = Tensor::empty({rows, s.in}), y = Tensor::empty({rows}, DType::i32);
  std::vector<std::uint64_t> samples;
  for (std::size_t row = 0; row < rows; ++row) {
    const std::uint64_t sample = samples.emplace_back(number * rows + row);
    double total = 0;
    for (std::size_t c = 0; c < s.in; ++c) {
      const double v = random_uniform(3, "x", sample * s.in + c) - 0.5;
      x.data<float>()[row * s.in + c] = static_cast<float>(v);
      total += v * static_cast<double>(c + 1);
    }
    const auto label = static_cast<std::size_t>(std::abs(std::lround(total * 3))) % s.classes;
    const bool ignored = s.ignored && sample % s.ignored == s.ignored - 1;
    y.data<std::int32_t>()[row] = ignored ? -100 : static_cast<std::int32_t>(label);
  }
  const std::vector<Field> fields{{"x", DType::f32, {s.in}}, {"y", DType::i32, {}}};
  return {std::make_shared<const std::vector<Field>>(fields), {x, y}, samples, 0};
}

std::shared_ptr<const Dataset> samples(const MlpSizes& s) {
  const Batch all = batch(0, s.samples, s);
  return tensor_dataset({{"x", all["x"]}, {"y", all["y"]}});
}

Model mlp(const MlpSizes& sizes) {
  return {.make = [=] { return std::make_unique<Mlp>(sizes); },
          .loader = [=](Engine& engine) { return engine.loader(samples(sizes)); },
          .config = R"({"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3,
              "gradient_clipping": 0.5, "optimizer": {"type": "AdamW", "params": {"lr": 0.02, "weight_decay": 0.1}},
              "scheduler": {"type": "WarmupDecayLR",
                            "params": {"total_num_steps": 12, "warmup_num_steps": 4, "warmup_max_lr": 0.02}},
              "zero_optimization": {"stage3_param_persistence_threshold": 0}})",
          .loss = [](Module& m, Tape& t, const Batch& b) { return dynamic_cast<Mlp&>(m)(t, b); }};
}

Model language(const LanguageData& d, std::function<std::unique_ptr<LanguageModel>()> make,
               const std::string& config) {
  auto all = nlohmann::json::parse(R"({"zero_optimization": {"stage3_param_persistence_threshold": 0,
      "stage3_prefetch_bucket_size": 1, "stage3_max_reuse_distance": 0}})");
  all.merge_patch(nlohmann::json::parse(config));
  Model m{.make = std::move(make), .config = all.dump()};
  m.loader = [d](Engine& engine) {
    const Tokens all = Tokens::from_file(d.tokens);
    return lm::token_loader(engine, all, d.seq_len,
                            lm::batch_sampler(engine, all.samples(d.seq_len), false, 0));
  };
  m.options = [d](EngineOptions& o, Module& module) {
    o.decay = Decay::matrices;
    o.threads = 1;
    o.expected_terms = static_cast<double>(o.ds_config->sizes.train) * static_cast<double>(d.seq_len);
    if (d.weights.empty()) return;
    const auto file = std::make_shared<PretrainedWeights>(d.weights, module);
    o.initial_values = [file](const Parameter& p, Range r, float* out) { file->read(p, r, out); };
  };
  return m;
}

Model gpt(const Gpt& g) {
  Model m = language(
      {g.config.n_positions, g.weights, g.tokens}, [=] { return std::make_unique<Gpt2>(g.config); },
      concat(R"({"train_batch_size": )", g.batch,
             R"(, "gradient_accumulation_steps": 1, "gradient_clipping": )", g.clipping, R"(,
          "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}})",
             g.bucket ? concat(R"(, "zero_optimization": {"reduce_bucket_size": )", g.bucket, "}") : "",
             "}"));
  m.options = [g, of_all = m.options](EngineOptions& o, Module& module) {
    of_all(o, module);
    if (g.bucket) o.ds_config->strategy.first_bucket_size = g.bucket / 4;
    if (!g.weights.empty()) return;
    o.initial_values = [n = g.config.n_layer](const Parameter& p, Range r, float* out) {
      test::gpt2_tiny_weights(p, n, r, out);
    };
  };
  return m;
}

namespace {

std::string_view bytes(const std::vector<float>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float)};
}

auto bits(const lm::UpdateReport& r) {
  const auto of = [](double x) { return std::bit_cast<std::uint64_t>(x); };
  return std::tuple(r.step, of(r.loss), of(r.grad_norm), of(r.lr), of(r.loss_scale), r.skipped,
                    r.without_terms, r.diverged);
}

lm::UpdateReport update(const Run& run, Engine& engine, Module& module, Loader& loader) {
  auto* const model = dynamic_cast<LanguageModel*>(&module);
  EXPECT_FALSE(run.before && (model || run.whole_updates)) << "a whole update does not call before()";
  if (model) return lm::update(engine, *model, loader, 1).value();
  const auto loss = [&](Tape& t, const Batch& b) { return run.model.loss(module, t, b); };
  std::int64_t micro = engine.global_steps() * engine.config().sizes.accumulation;
  if (run.whole_updates) engine.train_batch(loader, loss);
  for (bool done = run.whole_updates; !done; done = engine.step()) {
    if (run.before) run.before(engine, micro++);
    engine.backward(loss(engine.tape(), loader.next()));
  }
  return report_of(engine);
}

}  // namespace

bool operator==(const Trace& a, const Trace& b) {
  return std::ranges::equal(a.updates, b.updates, {}, bits, bits) && bytes(a.values) == bytes(b.values);
}

void PrintTo(const Trace& trace, std::ostream* out) {
  for (const lm::UpdateReport& r : trace.updates) *out << "\n" << lm::to_json(r) << " " << r.diverged;
  const std::size_t hash = std::hash<std::string_view>()(bytes(trace.values));
  *out << "\n" << trace.values.size() << " values of hash " << hash;
}

Trace train(const Run& run) {
  std::vector<Trace> all(static_cast<std::size_t>(run.ranks));
  world(run.ranks, run.comm, [&](World& w) { all[static_cast<std::size_t>(w.rank())] = train(w, run); });
  EXPECT_TRUE(std::ranges::all_of(all[0].values, [](float x) { return std::isfinite(x); }));
  for (std::size_t r = 1; r < all.size(); ++r) EXPECT_EQ(all[r], all[0]) << "rank " << r << " and rank 0";
  return all[0];
}

Trace train(World& world, const Run& run) {
  EXPECT_TRUE(run.ranks == 1 || run.ranks == world.size()) << "the group has been made";
  const auto module = run.model.make();
  EngineOptions o = options("");
  o.ds_config = parse_ds_config(config(run), "ds.json", {}, {.ranks = world.size()});
  if (run.model.options) run.model.options(o, *module);
  if (run.options) run.options(o);
  Engine engine = initialize(world, *module, std::move(o));
  EXPECT_TRUE(run.mesh == MeshSizes{} || engine.mesh().sizes() == run.mesh) << describe(run.mesh);
  Loader loader = run.model.loader(engine);
  if (run.start) run.start(engine, *module);
  Trace out;
  for (std::int64_t i = engine.global_steps(); i < run.updates; ++i) {
    out.updates.push_back(update(run, engine, *module, loader));
    if (run.each) run.each(engine, *module);
  }
  out.values = values_of(engine, *module);
  if (run.end) run.end(engine, *module);
  return out;
}

Trace train_in_every_strategy(Run run) {
  run.strategy = StrategyKind::ddp;
  const Trace first = train(run);
  for (const StrategyKind kind : {StrategyKind::zero1, StrategyKind::zero2, StrategyKind::zero3})
    EXPECT_EQ((run.strategy = kind, train(run)), first) << name(kind);
  return first;
}

lm::UpdateReport report_of(Engine& engine) {
  const StepReport& r = engine.report();
  lm::UpdateReport out{static_cast<std::uint64_t>(r.step), engine.loss(), r.grad_norm, r.lr};
  out.loss_scale = r.loss_scale, out.skipped = r.skipped, out.without_terms = r.without_terms;
  return out;
}

EngineOptions options(std::string config) { return {.config = std::move(config), .seed = 7, .log = nullptr}; }
std::string config(const Run& run) {
  nlohmann::json all = nlohmann::json::parse(run.model.config);
  all["zero_optimization"]["stage"] = static_cast<int>(run.strategy);
  if (const MeshSizes& m = run.mesh; m != MeshSizes{})
    all["ringzero"]["mesh"] = {{"replicate", m.replicate}, {"shard", m.shard}, {"tp", m.tp}};
  all.merge_patch(nlohmann::json::parse("{" + run.keys + "}"));
  return all.dump();
}

std::vector<float> values_of(Strategy& strategy, Module& module, const Stream& stream) {
  std::size_t count = 0;
  for (const Parameter* p : module.parameters()) count += p->global_shape().count();
  const Tensor all = Tensor::empty({count}, DType::f32, allocator_on(stream.device()));
  for (std::size_t at = 0; const Parameter* p : module.parameters()) {
    const Tensor value = strategy.values().whole(*p, stream);
    memcpy_async(all.view(at, value.shape()).raw(), value.raw(), value.bytes(), stream);
    at += value.count();
  }
  const Tensor here = all.on_host(stream);  // one wait for the device, not one for each parameter
  return {here.data<float>(), here.data<float>() + count};
}

}  // namespace rz::lab
