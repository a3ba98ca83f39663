// Runs: ci long operators

// Updates captured in a CUDA graph and run again have the bits of updates without a graph.

#include <algorithm>

#include "autograd_lite/ops.h"
#include "comm/device/cuda_runtime.h"
#include "comm/device/graph.h"
#include "sharding/optim/optimizers.h"
#include "sharding/strategy/strategy.h"
#include "tests/gpu/on_card.h"
#include "tests/gpu/on_device.h"
#include "tests/lab/training.h"

namespace rz::test {
namespace {

constexpr std::int64_t updates = 7;

struct Case {
  const char* name;
  std::string backend;
  StrategyKind kind;
  int ranks;
  std::string keys{};
  double dropout = 0;
};
void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }

/// `graphs`: updates that ran as graphs, on rank 0.
lab::Trace run(const Case& c, bool graph, int* graphs) {
  lab::Gpt gpt;
  gpt.config.embd_pdrop = gpt.config.attn_pdrop = gpt.config.resid_pdrop = c.dropout;
  lab::Run run{
      .model = lab::gpt(gpt), .strategy = c.kind, .ranks = c.ranks, .updates = updates, .keys = c.keys};
  run.options = [=](EngineOptions& o) { o.graph = graph; };
  run.comm = [&](int rank) { return on_card(rank, c.backend); };
  run.each = [=](Engine& engine, Module&) {
    if (engine.world().is_main()) *graphs += engine.report().ran_graph;
  };
  return lab::train(run);
}

class GraphTraining : public OnDevice, public testing::WithParamInterface<Case> {};

TEST_P(GraphTraining, HasTheSameBits) {
  if (GetParam().backend == "nccl" && !emulated_device)
    GTEST_SKIP() << "NCCL needs a process a rank on a card of its own";
  int with = 0, without = 0;
  const lab::Trace plain = run(GetParam(), false, &without), graph = run(GetParam(), true, &with);
  EXPECT_EQ(without, 0);
  EXPECT_EQ(with, updates - 3);
  EXPECT_EQ(graph, plain);
  EXPECT_LT(graph.updates.back().loss, graph.updates.front().loss);
  if (std::string(GetParam().name) == "f16") {
    EXPECT_GT(graph.updates.back().loss_scale, graph.updates.front().loss_scale);
  }
}

const std::string accumulated = R"("gradient_accumulation_steps": 2)";
const Case cases[] = {
    {"zero3", "peer_cuda", StrategyKind::zero3, 2},
    // The scale doubles every other update; the graph reads it from memory.
    {"f16", "peer_cuda", StrategyKind::zero1, 2, R"("fp16": {"enabled": true, "loss_scale_window": 2})"},
    {"nccl_ddp", "nccl", StrategyKind::ddp, 2},
    {"ddp", "peer_cuda", StrategyKind::ddp, 2},
    {"zero1", "peer_cuda", StrategyKind::zero1, 2},
    {"zero2", "peer_cuda", StrategyKind::zero2, 2},
    {"one_rank", "peer_cuda", StrategyKind::ddp, 1},
    {"nccl_zero3", "nccl", StrategyKind::zero3, 2},
    {"bf16", "peer_cuda", StrategyKind::zero1, 2,
     R"("bf16": {"enabled": true, "check_grad_overflow": false})"},
    {"accumulation", "peer_cuda", StrategyKind::zero2, 2, accumulated},
    {"sgd", "peer_cuda", StrategyKind::ddp, 2,
     R"("optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9, "betas": null, "weight_decay": null}})"},
    {"dropout", "peer_cuda", StrategyKind::zero1, 2, accumulated, 0.2},
};
INSTANTIATE_TEST_SUITE_P(Cases, GraphTraining,
                         testing::ValuesIn(std::begin(cases), checks_addresses ? cases + 3 : std::end(cases)),
                         [](const auto& info) { return info.param.name; });

/// Two weights, each with a loss of its own: mean((x · weight - target)²).
class TwoWeights final : public Module {
 public:
  explicit TwoWeights(const Stream& stream) {
    for (const char* name : {"first", "second"}) {
      auto p = std::make_unique<Parameter>();
      register_parameter(*p, name, {8, 8});
      parameters_.push_back(std::move(p));
    }
    std::vector<double> x, target;
    for (int i = 0; i < 64; ++i) x.push_back(i % 7 - 3), target.push_back(i % 5);
    x_ = to_device(x, {8, 8}, DType::f32, stream), target_ = to_device(target, {8, 8}, DType::f32, stream);
  }
  Var loss(Tape& tape, bool with_second) {
    return in_scope(tape, [&] {
      const Var first = part(tape, 0);
      return with_second ? nn::add(tape, first, part(tape, 1)) : first;
    });
  }

 private:
  Var part(Tape& tape, std::size_t p) {
    return nn::mse(tape, nn::mul(tape, tape.constant(x_), tape.parameter(*parameters_[p])), target_);
  }
  std::vector<std::unique_ptr<Parameter>> parameters_;
  Tensor x_, target_;
};

/// The second weight after updates that reach it or not; those from `captured` on are runs of a graph.
std::vector<double> second_weight(const Stream& stream, Optimizer& optimizer,
                                  const std::vector<bool>& reached, std::size_t captured,
                                  bool schedule = false) {
  CommOptions options;
  options.backend = "peer_cuda";
  options.device = stream.device();
  Communicator comm = Communicator::connect(0, 1, memory_store(), options);
  TwoWeights model(stream);
  Tape tape(stream);
  const auto strategy = make_strategy(StrategyKind::ddp, model, comm);
  strategy->attach(tape);
  strategy->values().fill([](const Parameter&, Range r, float* out) { std::fill_n(out, r.count(), 0.5f); });
  Graph graph;
  for (std::size_t i = 0; i < reached.size(); ++i) {
    if (schedule)
      for (int g = 0; g < optimizer.groups(); ++g)
        optimizer.set_learning_rate(g, 0.1 / static_cast<double>(g + 1 + optimizer.updates()));
    strategy->next_update(optimizer, stream);
    const auto update = [&] {
      strategy->zero_grad();
      const Var loss = model.loss(tape, reached[i]);
      strategy->begin_backward();
      tape.backward(loss);
      tape.reset();
      strategy->finish_gradients(stream);
      strategy->clip_and_step(optimizer, {}, stream);
    };
    if (i < captured) update();
    if (i == captured) graph = capture(stream, update);
    if (i >= captured) graph.launch(stream);
    strategy->outcome(optimizer, stream);
  }
  return from_device(strategy->values().whole(*model.parameters()[1], stream), stream);
}

class UnusedOnDevice : public OnDevice {};

using Make = std::function<std::unique_ptr<Optimizer>()>;
const Make makes[] = {
    [] {
      const ParameterFilter first = [](const Parameter& p) { return p.name == "first"; };
      return make_adamw(ParameterGroups<AdamOptions>(
          {{"first", first, {}}, {"second", {}, {.learning_rate = 0.1, .weight_decay = 0.1}}}));
    },
    [] {  // the groups have two and three states
      const ParameterFilter first = [](const Parameter& p) { return p.name == "first"; };
      return make_adamw(ParameterGroups<AdamOptions>(
          {{"first", first, {}}, {"second", {}, {.learning_rate = 0.1, .amsgrad = true, .maximize = true}}}));
    },
    [] { return make_lamb({.learning_rate = 0.1, .weight_decay = 0.1}); },
    [] { return make_muon({.learning_rate = 0.1, .weight_decay = 0.1}); },
    [] {  // the second weight is no matrix
      const ParameterFilter first = [](const Parameter& p) { return p.name == "first"; };
      return make_muon({.learning_rate = 0.1}, {.learning_rate = 0.05}, first);
    }};

/// A weight that missed updates has bias corrections of its own, also where a graph runs.
TEST_F(UnusedOnDevice, UpdatesLeaveUnusedWeightsUnchanged) {
  for (const Make& make : makes) {
    const auto second = [&](const std::vector<bool>& reached, std::size_t captured) {
      return second_weight(stream, *make(), reached, captured);
    };
    const std::vector<bool> always(6, true), late{false, true, true, true, true, true, true};
    const auto expected = second(always, 6);
    EXPECT_EQ(second(late, 7), expected);
    EXPECT_EQ(second(late, 4), expected) << "as a graph";
    EXPECT_EQ(second({true, true, false, false, false, false}, 4), second({true, true}, 2))
        << "a graph that misses it";
  }
}

TEST_F(UnusedOnDevice, AGraphFollowsTheLearningRatesOfTheGroups) {
  const std::vector<bool> always(7, true);
  for (const Make& make : makes) {
    const auto expected = second_weight(stream, *make(), always, 7, true);
    EXPECT_EQ(second_weight(stream, *make(), always, 3, true), expected);
    EXPECT_NE(second_weight(stream, *make(), always, 7), expected);
  }
}

struct Classifier final : Module {
  nn::Linear layer{*this, "layer", 8, 7, nn::WeightLayout::out_in, false};
};

/// Norms and weights of updates whose number of terms, loss scale, clipping and learning rate all differ;
/// those from `captured` on are runs of one graph.
std::vector<double> with_changing_settings(const Stream& stream, int captured) {
  CommOptions options;
  options.backend = "peer_cuda";
  options.device = stream.device();
  Communicator comm = Communicator::connect(0, 1, memory_store(), options);
  Classifier model;
  Tape tape(stream);
  const auto strategy = make_strategy(StrategyKind::zero1, model, comm);
  strategy->attach(tape);
  strategy->values().fill([](const Parameter&, Range r, float* out) {
    for (std::size_t i = 0; i < r.count(); ++i) out[i] = 0.25f * static_cast<float>((r.begin + i) % 5) - 0.5f;
  });
  strategy->settings().set_expected_terms(16);
  const auto sgd = make_sgd({.momentum = 0.9});
  std::vector<double> x, out;
  for (int i = 0; i < 128; ++i) x.push_back((i * 7 % 13 - 6) / 4.0);
  const Tensor inputs = to_device(x, {16, 8}, DType::f32, stream),
               targets = to_device(std::vector<std::int32_t>(16), {16}, stream);
  Strategy::StepPolicy policy;
  const auto update = [&] {
    strategy->zero_grad();
    strategy->backward(tape, nn::cross_entropy(tape, model.layer(tape, inputs), targets));
    tape.reset();
    strategy->finish_gradients(stream);
    strategy->clip_and_step(*sgd, policy, stream);
  };
  Graph graph;
  for (int i = 0; i < 7; ++i) {
    std::vector<std::int32_t> labels(16, -100);
    for (int k = 0; k < 2 * i + 1; ++k) labels[static_cast<std::size_t>(k)] = k % 7;
    targets.assign(std::span<const std::int32_t>(labels), stream);
    sgd->set_learning_rate(0.1 * (i + 1));
    strategy->settings().set_loss_scale(1 << i);
    policy.max_norm = i % 2 ? 0.25 : 0;
    strategy->settings().set_policy(policy);
    strategy->next_update(*sgd, stream);
    if (i < captured) update();
    if (i == captured) graph = capture(stream, update);
    if (i >= captured) graph.launch(stream);
    out.push_back(strategy->outcome(*sgd, stream).norm);
  }
  const auto values = from_device(strategy->values().whole(model.layer.weight, stream), stream);
  out.insert(out.end(), values.begin(), values.end());
  return out;
}

class SettingsOnDevice : public OnDevice {};

TEST_F(SettingsOnDevice, AGraphReadsThemFromMemory) {
  const std::vector<double> expected = with_changing_settings(stream, 7);
  EXPECT_GT(expected[1], 0.25);  // so that clipping applies
  EXPECT_EQ(with_changing_settings(stream, 3), expected);
}

/// A host-staged backend cannot be captured: each update launches its kernels.
class GraphTrainingElsewhere : public OnDevice {};

TEST_F(GraphTrainingElsewhere, IsLeftOutWhereOperationsCannotBeCaptured) {
  int graphs = 0;
  run({"staged", "native", StrategyKind::ddp, 2}, true, &graphs);
  EXPECT_EQ(graphs, 0);
}

}  // namespace
}  // namespace rz::test
