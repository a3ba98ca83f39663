/// DeepSpeed's runs in 16 bits (tests/data/deepspeed): what their bound sees, and what DeepSpeed does
/// otherwise in runs without sharding.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "autograd_lite/models/gpt2.h"
#include "sharding/config/ds_config.h"
#include "sharding/data/tokens.h"
#include "sharding/engine/engine_options.h"
#include "sharding/strategy/strategy.h"
#include "tests/support/gpt2_tiny.h"
#include "tests/support/ranks.h"
#include "tests/support/reference_deepspeed.h"
#include "tests/support/shared_fixture.h"

namespace rz::test {
namespace {

using Values = std::map<std::string, std::vector<float>>;

/// What a run does otherwise than DeepSpeed with sharding.
struct Change {
  bool idle_step = false;        ///< the optimizer makes a step with gradients of zero first
  bool lose_masters = false;     ///< after each update the masters are the working values
  bool keep_loss_scale = false;  ///< gradients are not divided by the loss scale
  bool plain_losses = false;     ///< losses are not multiplied by the loss scale
  double rate = 1;               ///< factor of the learning rate
};

/// One rank that trains by the configuration of a run.
class Run {
 public:
  Run(const DeepSpeedRun& run, Communicator& comm, const Change& change, bool shared)
      : run_(run),
        change_(change),
        config_(parse_ds_config(run.config, "ds.json")),
        precision_(config_.strategy.precision.parameters),
        strategy_(make_strategy(StrategyKind::ddp, model_, comm,
                                {.precision = {precision_, config_.strategy.precision.gradients}})),
        optimizer_(make_optimizer(*config_.optimizer, Decay::all)),
        tokens_(Tokens::from_file(shared ? shared_fixture::folder() + "/tokens.bin" : tiny_tokens())) {
    strategy_->attach(tape_);
    fill(start(shared));
    if (change.idle_step) optimizer_->set_updates(1);  // the moments stay zero
  }

  void update(std::size_t step) {
    strategy_->settings().set_loss_scale(change_.plain_losses ? 1 : run_.scale[step]);
    strategy_->settings().set_expected_terms(batch * length);
    strategy_->zero_grad();
    const auto out = model_.forward(tape_, rows(step, 0), rows(step, 1));
    strategy_->backward(tape_, out.loss);
    tape_.reset();
    strategy_->finish_gradients();
    strategy_->settings().set_loss_scale(change_.keep_loss_scale ? 1 : run_.scale[step]);
    optimizer_->set_learning_rate(run_.lr[step] * change_.rate);
    strategy_->clip_and_step(*optimizer_, {.max_norm = config_.gradient_clipping});
    const ops::LossSum sum = out.loss.read(tape_.stream());
    losses.push_back(sum.sum / static_cast<double>(sum.count));
    const double norm = strategy_->outcome(*optimizer_).norm;
    norms.push_back(change_.plain_losses ? norm * run_.scale[step] : norm);
    if (change_.lose_masters) fill(rounded_values());
  }

  std::vector<double> losses, norms;

 private:
  static constexpr std::size_t batch = 8, length = 64, samples = 160;

  /// DeepSpeed rounds a model to 16 bits before it makes the masters. An idle step decays them.
  Values start(bool shared) {
    Values values;
    if (shared)
      for (const auto& t : shared_fixture::start()) values[t.name] = t.values;
    else
      for (const Parameter* p : model_.parameters()) {
        values[p->name].resize(p->count());
        gpt2_tiny_weights(*p, 4, {0, p->count()}, values[p->name].data());
      }
    const OptimizerConfig& o = *config_.optimizer;
    const float decay = static_cast<float>(change_.idle_step ? 1 - o.lr * o.weight_decay : 1);
    for (auto& [name, value] : values) {
      round_to(precision_, value);
      for (float& v : value) v *= decay;
    }
    return values;
  }

  void fill(const Values& values) {
    strategy_->values().fill([&](const Parameter& p, Range r, float* out) {
      std::copy_n(values.at(p.name).begin() + static_cast<std::ptrdiff_t>(r.begin), r.count(), out);
    });
  }

  Values rounded_values() {
    Values values;
    for (const Parameter* p : model_.parameters()) {
      const Tensor whole = strategy_->values().whole(*p, Stream());
      values[p->name].assign(whole.data<float>(), whole.data<float>() + whole.count());
      round_to(precision_, values[p->name]);
    }
    return values;
  }

  /// The inputs of a step, or the targets, which are `shift` tokens later.
  Tensor rows(std::size_t step, std::size_t shift) const {
    const Tensor out = Tensor::empty({batch, length}, DType::i32);
    for (std::size_t i = 0; i < batch; ++i)
      tokens_.read((step * batch + i) % samples * length + shift,
                   {out.data<std::int32_t>() + i * length, length});
    return out;
  }

  const DeepSpeedRun& run_;
  const Change change_;
  const DsConfig config_;
  const DType precision_;
  Tape tape_;
  Gpt2 model_{{.n_layer = 4, .n_head = 4, .n_embd = 128, .n_positions = length, .vocab_size = 256}};
  std::unique_ptr<Strategy> strategy_;
  std::unique_ptr<Optimizer> optimizer_;
  Tokens tokens_;
};

struct Course {
  std::vector<double> losses, norms;
};

Course course_of(const DeepSpeedRun& run, const Change& change, bool shared = false) {
  auto comm = Communicator::connect(0, 1, memory_store());
  Run trained(run, comm, change, shared);
  for (std::size_t s = 0; s < run.lr.size(); ++s) trained.update(s);
  return {trained.losses, trained.norms};
}

int beyond(const char* name, const Change& change) {
  const DeepSpeedRun run = own_deepspeed_run(name);
  const Course course = course_of(run, change);
  return beyond_rounding(run, course.losses, course.norms);
}

TEST(DeepSpeed16Bits, IsWithinTheBoundItself) {
  for (const std::string& name : own_deepspeed_runs()) {
    const DeepSpeedRun run = own_deepspeed_run(name);
    if (run.loss_mean.empty()) continue;
    std::vector<double> norms;
    for (const auto& norm : run.grad_norm) norms.push_back(norm.value_or(0));
    EXPECT_EQ(beyond_rounding(run, run.loss, norms), 0) << name;
  }
}

/// Without sharding DeepSpeed 0.19.8 allocates the states of Adam by a step with gradients of zero, and
/// counts it: the first update has the bias corrections of the second, and is smaller by a quarter.
TEST(DeepSpeed16Bits, MakesAStepMoreWithoutSharding) {
  EXPECT_EQ(beyond("bf16_stage0", {.idle_step = true}), 0);
  EXPECT_GT(beyond("bf16_stage0", {}), 15);
}

/// Without sharding DeepSpeed 0.19.8 does not multiply the loss by the scale (its engine scales for
/// optimizers of ZeRO only), but divides gradients by it. Updates of SGD are then smaller by this factor,
/// nothing is clipped, and small gradients are lost in f16. The norm that it reports is not divided. Ours
/// scales the loss.
TEST(DeepSpeed16Bits, DividesByAScaleThatLossesLackWithoutSharding) {
  EXPECT_EQ(beyond("fp16_stage0", {.idle_step = true, .plain_losses = true}), 0);
  EXPECT_EQ(beyond("fp16_stage0_sgd", {.idle_step = true, .plain_losses = true}), 0);
  EXPECT_GT(beyond("fp16_stage0_sgd", {.idle_step = true}), 15);
}

/// The losses of these runs come from a cross-entropy in bf16, which is up to 0.025 away from that in f32. At
/// spikes (the norm at update 13 of the second is 116) rounding decides, and the spread is wide: DeepSpeed's
/// own run is 0.31 away from the mean there.
TEST(DeepSpeed16Bits, TheSharedRunsAreFollowed) {
  if (shared_deepspeed_folder().empty()) GTEST_SKIP() << "no ../shared/fixtures/deepspeed beside the sources";
  for (const char* name : {"bf16", "bf16_zero2_accumulate"}) {
    const DeepSpeedRun run = shared_deepspeed_run(name);
    const Course course = course_of(run, {.idle_step = std::string_view(name) == "bf16"}, true);
    EXPECT_EQ(beyond_rounding(run, course.losses, course.norms), 0) << name;
    for (std::size_t s = 0; s < run.loss.size(); ++s) {
      const double bound = 3e-2 + 5 * run.loss_deviation[s];
      EXPECT_NEAR(run.loss[s], run.loss_mean[s], bound) << name << ", DeepSpeed itself, update " << s;
      EXPECT_NEAR(course.losses[s], run.loss[s], bound) << name << ", update " << s;
    }
  }
}

/// At a rate below a unit in the last place of most weights. That this run and those below are followed
/// without a change is in tests/tools/deepspeed_runs_test.cpp.
TEST(DeepSpeed16Bits, UpdatesBelowAUnitInTheLastPlaceCount) {
  for (const char* name : {"bf16_small_rate", "fp16_small_rate"})
    EXPECT_GT(beyond(name, {.lose_masters = true}), 15) << name;
}

TEST(DeepSpeed16Bits, TheBoundSeesARateThatIsTenPercentOff) {
  for (const char* name : {"bf16_stage1", "fp16_sgd"}) EXPECT_GT(beyond(name, {.rate = 1.1}), 5) << name;
}

TEST(DeepSpeed16Bits, TheBoundSeesALossScaleThatIsNotDividedOut) {
  EXPECT_GT(beyond("fp16_sgd", {.keep_loss_scale = true}), 15);
}

}  // namespace
}  // namespace rz::test
