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
  if (run.mesh != MeshSizes{}) EXPECT_EQ(engine.mesh().sizes(), run.mesh);
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
