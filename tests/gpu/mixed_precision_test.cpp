// Runs: ci host operators

// Training with 16 bits: close to the float64 run, the same bits for every strategy, masters imported and
// exported in f32, and updates skipped after overflow.

#include <algorithm>
#include <cmath>
#include <map>
#include <mutex>

#include "comm/device/cuda_runtime.h"
#include "sharding/strategy/strategy.h"
#include "tests/gpu/on_card.h"
#include "tests/gpu/on_device.h"
#include "tests/lab/training.h"

namespace rz::test {
namespace {

constexpr int ranks = 2;

/// On the host or on a device.
CommOptions in_memory(int rank) {
  if (tested_device.kind == Device::cuda) return on_a_card(rank);
  return {.timeout = std::chrono::seconds(60)};
}

/// Three updates. Keys of precision have no effect on them.
lab::Run run_in(const Precision& precision, StrategyKind kind, const LossScaleOptions& loss_scale = {}) {
  return {.model = lab::gpt(),
          .strategy = kind,
          .ranks = ranks,
          .updates = 3,
          .options =
              [=](EngineOptions& o) {
                o.ds_config->strategy.precision = precision;
                o.ds_config->precision.skip_overflow = precision.parameters == DType::f16;
                o.ds_config->precision.loss_scale = loss_scale;
              },
          .comm = in_memory};
}

class MixedPrecision : public OnDevice, public testing::WithParamInterface<Precision> {};

/// Rounding to 8 bits moves the loss of an untrained model by little; 2e-2 of 5.5 is far below the effect of
/// a wrong operator or a lost gradient. At update 11 the gradient is fifteen times as large as before: it
/// overflows f16 with the initial factor, and rounding decides its norm. That ends the comparison.
TEST_P(MixedPrecision, FollowsFloat64) {
  const TinyCase c = tiny_case("tiny");
  lab::Run run = run_in(GetParam(), StrategyKind::zero2);
  run.model = lab::gpt(lab::of_case(c));
  run.updates = checks_addresses ? 1 : emulated_device ? 2 : 11;
  const auto reports = lab::train(run).updates;
  for (std::size_t i = 0; i < reports.size(); ++i) {
    EXPECT_NEAR(reports[i].loss, c.loss[i], 2e-2) << "update " << i;
    EXPECT_NEAR(reports[i].grad_norm, c.grad_norm[i], 0.05 * c.grad_norm[i]) << "update " << i;
    EXPECT_FALSE(reports[i].skipped);
  }
}

TEST_P(MixedPrecision, HasTheSameBitsForEveryStrategy) {
  const auto train_with = [](StrategyKind kind) {
    return lab::train(run_in(GetParam(), kind, {.fixed = 1024}));
  };
  const lab::Trace first = train_with(StrategyKind::ddp);
  for (const auto& update : first.updates) EXPECT_FALSE(update.skipped);
  for (const StrategyKind kind : {StrategyKind::zero1, StrategyKind::zero2, StrategyKind::zero3})
    EXPECT_EQ(train_with(kind), first) << name(kind);
}

class AutocastOnDevice : public OnDevice {};

TEST_F(AutocastOnDevice, HasTheSameBitsForEveryStrategyAndFollowsF32) {
  const auto train_with = [](StrategyKind kind) {
    lab::Run run = run_in({}, kind);
    run.keys = R"("torch_autocast": {"enabled": true, "dtype": "bfloat16"})";
    return lab::train(run);
  };
  const lab::Trace first = train_with(StrategyKind::ddp);
  for (const StrategyKind kind : {StrategyKind::zero1, StrategyKind::zero2, StrategyKind::zero3})
    EXPECT_EQ(train_with(kind), first) << name(kind);
  const double loss = first.updates.at(0).loss;
  const double full = lab::train(run_in({}, StrategyKind::ddp)).updates.at(0).loss;
  EXPECT_NE(loss, full);
  EXPECT_NEAR(loss, full, 2e-2);
}

std::string precision_name(const testing::TestParamInfo<Precision>& info) {
  return concat(name(info.param.parameters), "_gradients_in_", name(info.param.gradients));
}
const Precision precisions[] = {
    {DType::bf16, DType::bf16}, {DType::bf16, DType::f32}, {DType::f16, DType::f16}};
INSTANTIATE_TEST_SUITE_P(Types, MixedPrecision,
                         testing::ValuesIn(std::begin(precisions),
                                           checks_addresses ? precisions + 1 : std::end(precisions)),
                         precision_name);

class Masters : public OnDevice {};

/// Every element of every parameter has bits that do not fit into 16 bits.
float exact(const Parameter& p, std::size_t i) {
  return 1 + std::ldexp(static_cast<float>((p.name.size() * 131 + i) % 1021), -20);
}

TEST_F(Masters, AreImportedAndExportedUnchanged) {
  const Gpt2Config config{.n_layer = 1, .n_head = 2, .n_embd = 16, .n_positions = 8, .vocab_size = 32};
  for (const StrategyKind kind : lab::strategies) {
    std::mutex mutex;
    std::map<std::string, std::size_t> seen;
    lab::group(ranks, in_memory, [&](Communicator& comm) {
      Gpt2 model(config);
      const auto s = make_strategy(kind, model, comm, {.precision = {DType::bf16, DType::bf16}});
      s->values().fill([&](const Parameter& p, Range r, float* out) {
        for (std::size_t i = r.begin; i < r.end; ++i) out[i - r.begin] = exact(p, i);
      });
      s->values().visit_owned([&](const Parameter& p, Range r, const float* value) {
        const std::lock_guard lock(mutex);
        for (std::size_t i = r.begin; i < r.end; ++i) seen[p.name] += value[i - r.begin] == exact(p, i);
      });
      const Stream reader = Stream::create(comm.options().device);
      for (const Parameter* p : model.parameters()) {
        const Tensor whole = s->values().whole(*p, reader).on_host(reader);
        ASSERT_EQ(whole.shape(), p->shape);
        for (std::size_t i = 0; i < whole.count(); ++i)
          ASSERT_EQ(whole.data<float>()[i], exact(*p, i)) << name(kind) << " " << p->name << " " << i;
      }
      const MemoryReport memory = s->memory();
      const std::size_t parts = kind == StrategyKind::ddp ? 1 : ranks;
      EXPECT_EQ(memory.masters * parts, 2 * memory.parameters * (kind == StrategyKind::zero3 ? ranks : 1));
      EXPECT_EQ(memory.optimizer_state, 0u);
      comm.barrier().wait();
    });
    Gpt2 model(config);
    for (const Parameter* p : model.parameters()) EXPECT_EQ(seen[p->name], p->count()) << p->name;
  }
}

/// Members of one bucket share the gathered memory while it is read.
TEST_F(Masters, AreGatheredOnceABucket) {
  const Gpt2Config config{.n_layer = 1, .n_head = 2, .n_embd = 16, .n_positions = 8, .vocab_size = 32};
  for (const StrategyKind kind : {StrategyKind::zero1, StrategyKind::zero3})
    lab::group(ranks, in_memory, [&](Communicator& comm) {
      Gpt2 model(config);
      const auto s = make_strategy(kind, model, comm, {.precision = {DType::bf16, DType::bf16}});
      const auto fill = [&](float value) {
        s->values().fill([&](const Parameter&, Range r, float* out) { std::fill_n(out, r.count(), value); });
      };
      const Stream reader = Stream::create(comm.options().device);
      const auto first_of = [&](const char* name) {
        const auto parameters = model.parameters();
        const Parameter& p =
            **std::ranges::find_if(parameters, [&](const Parameter* q) { return q->name == name; });
        return s->values().whole(p, reader);
      };
      fill(1);
      const Tensor weight = first_of("transformer.h.0.ln_1.weight");
      const std::size_t in_use = s->memory().transient_in_use;
      const Tensor bias = first_of("transformer.h.0.ln_1.bias");
      EXPECT_EQ(s->memory().transient_in_use, in_use) << name(kind);
      fill(2);  // the gathered values are stale
      EXPECT_EQ(first_of("transformer.h.0.ln_1.bias").on_host(reader).data<float>()[0], 2) << name(kind);
      comm.barrier().wait();
    });
}

class Overflow : public OnDevice {};

/// With a factor of 2^32 every gradient is infinite in f16: two updates are skipped before the factor is
/// halved (hysteresis 2), and the loss stays as it is.
TEST_F(Overflow, LeavesUpdatesOutAndLowersTheScale) {
  for (const StrategyKind kind : {StrategyKind::ddp, StrategyKind::zero3}) {
    const auto r = lab::train(run_in({DType::f16, DType::f16}, kind, {.initial_power = 32})).updates;
    const double scales[] = {0x1p32, 0x1p32, 0x1p31};
    ASSERT_EQ(r.size(), std::size(scales));
    for (std::size_t i = 0; i < r.size(); ++i) {
      EXPECT_TRUE(r[i].skipped) << i;
      EXPECT_EQ(r[i].diverged, "") << i;
      EXPECT_EQ(r[i].loss_scale, scales[i]) << i;
      EXPECT_FALSE(std::isfinite(r[i].grad_norm)) << i;
    }
  }
}

/// A fixed factor, a power of two, does not change results unless gradients leave f16's range.
TEST_F(Overflow, AFixedScaleIsDividedOut) {
  const auto with_scale = [](double scale) {
    lab::Run run = run_in({DType::f16, DType::f32}, StrategyKind::ddp, {.fixed = scale});
    run.ranks = 1;
    return lab::train(run).updates;
  };
  const auto a = with_scale(1024), b = with_scale(4096);
  ASSERT_EQ(a.size(), 3u);
  for (std::size_t i = 0; i < a.size(); ++i) {
    EXPECT_NEAR(a[i].grad_norm, b[i].grad_norm, 1e-3 * a[i].grad_norm) << i;
    EXPECT_NEAR(a[i].loss, b[i].loss, 1e-4) << i;
    EXPECT_EQ(b[i].loss_scale, 4096) << i;
  }
}

}  // namespace
}  // namespace rz::test
