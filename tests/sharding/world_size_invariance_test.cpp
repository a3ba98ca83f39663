/// ringzero.deterministic = world_size_invariant: training has the same bits on 1, 2, 4 and 8 ranks, with
/// every strategy.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "sharding/engine/engine.h"
#include "sharding/strategy/strategy.h"
#include "tests/lab/training.h"
#include "tests/support/error_of.h"
#include "tests/support/folder.h"
#include "tests/support/toy_model.h"

namespace rz {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t in = 6, classes = 5;
constexpr int updates = 6;

struct Net : Module {
  nn::Linear fc1{*this, "fc1", in, 19}, fc2{*this, "fc2", 19, 23}, fc3{*this, "fc3", 23, classes};
  nn::Dropout drop{*this, "drop", 0.3};
  Var operator()(Tape& t, const Tensor& x) {
    return fc3(t, drop(t, nn::gelu(t, fc2(t, nn::gelu(t, fc1(t, x))))));
  }
};

/// Numbers where every rounding shows. Every seventh target is ignored, all of some batches.
std::shared_ptr<const Dataset> dataset(std::size_t samples) {
  Tensor x = Tensor::empty({samples, in}), y = Tensor::empty({samples}, DType::i32);
  for (std::size_t i = 0; i < samples; ++i) {
    for (std::size_t c = 0; c < in; ++c)
      x.data<float>()[i * in + c] = static_cast<float>(random_uniform(3, "x", i * in + c) - 0.5);
    const bool ignored = i % 7 == 0 || (i >= 24 && i < 28);
    y.data<std::int32_t>()[i] = ignored ? -100 : static_cast<std::int32_t>(i * 13 % classes);
  }
  return tensor_dataset({{"x", x}, {"y", y}});
}

struct Case {
  std::int64_t micro_batches = 8;  ///< of an update over all ranks
  std::int64_t micro = 2;          ///< samples of each
  std::size_t samples = 75;        ///< no multiple of an update
  std::string more = "";           ///< keys of the configuration
  bool shuffle = true;
  bool scalar_loss = false;    ///< backward(Var)
  bool whole_updates = false;  ///< train_batch()
};

std::string config(const Case& c, int stage) {
  return concat(R"({"train_batch_size": )", c.micro_batches * c.micro,
                R"(, "train_micro_batch_size_per_gpu": )", c.micro, R"(, "gradient_clipping": 0.5,
                "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_max_lr": 0.02}},
                "ringzero": {"deterministic": "world_size_invariant"})",
                c.more.find("optimizer") == std::string::npos
                    ? R"(, "optimizer": {"type": "AdamW", "params": {"lr": 0.02, "weight_decay": 0.1}})"
                    : "",
                R"(, "zero_optimization": {"stage": )", stage,
                R"(, "reduce_bucket_size": 256, "stage3_param_persistence_threshold": 0})", c.more, "}");
}

/// What a run computed, as bits.
struct Result {
  std::vector<double> losses, norms;
  std::vector<float> values;
  double evaluated = 0;
};

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}
bool same_bits(const Result& a, const Result& b) {
  return same_bits(a.losses, b.losses) && same_bits(a.norms, b.norms) && same_bits(a.values, b.values) &&
         same_bits(std::vector{a.evaluated}, std::vector{b.evaluated});
}

nn::Loss loss_of(Tape& t, Net& net, const Batch& b) { return nn::cross_entropy(t, net(t, b["x"]), b["y"]); }

/// One update.
void update(Engine& engine, Net& net, Loader& loader, const Case& c) {
  if (c.whole_updates) {
    engine.train_batch(loader, [&](Tape& t, const Batch& b) { return loss_of(t, net, b); });
    return;
  }
  do {
    Tape& t = engine.tape();
    const nn::Loss loss = loss_of(t, net, loader.next());
    if (c.scalar_loss)
      engine.backward(loss.sum);
    else
      engine.backward(loss);
  } while (!engine.step());
}

double evaluate(Engine& engine, Net& net) {
  Loader loader = engine.loader(dataset(20), {.shuffle = false});
  std::vector<Mean> losses;
  for (const Batch& b : loader)
    losses.push_back(engine.evaluate([&](Tape& t) { return engine.item(loss_of(t, net, b)); }));
  return engine.mean(losses);
}

Result train(World& world, const Case& c, int stage) {
  Net net;
  Engine engine = initialize(world, net, {.config = config(c, stage), .seed = 5, .log = nullptr});
  Loader loader = engine.loader(dataset(c.samples), {.shuffle = c.shuffle});
  Result out;
  for (int u = 0; u < updates; ++u) {
    update(engine, net, loader, c);
    if (!c.scalar_loss) out.losses.push_back(engine.loss());
    out.norms.push_back(engine.report().grad_norm);
  }
  out.values = lab::values_of(engine, net);
  out.evaluated = evaluate(engine, net);
  return out;
}

/// The result of rank 0; those of other ranks must be equal.
Result run(int ranks, const Case& c, int stage) {
  std::vector<Result> all(static_cast<std::size_t>(ranks));
  lab::world(ranks,
             [&](World& world) { all[static_cast<std::size_t>(world.rank())] = train(world, c, stage); });
  for (const Result& other : all) EXPECT_TRUE(same_bits(other, all[0])) << ranks << " ranks, stage " << stage;
  return all[0];
}

void expect_invariant(const Case& c, std::initializer_list<int> stages = {0, 1, 2, 3}) {
  const Result one = run(1, c, 0);
  EXPECT_TRUE(std::isfinite(one.norms.back()) && one.norms.back() > 0);
  for (const int stage : stages)
    for (const int ranks : {1, 2, 4, 8}) {
      if (c.micro_batches % ranks != 0) continue;
      const Result other = run(ranks, c, stage);
      EXPECT_TRUE(same_bits(one.losses, other.losses)) << ranks << " ranks, stage " << stage;
      EXPECT_TRUE(same_bits(one, other)) << ranks << " ranks, stage " << stage;
    }
}

TEST(WorldSizeInvariance, EveryStrategyHasTheSameBits) { expect_invariant({}); }
TEST(WorldSizeInvariance, TwentyFourMicroBatchesOfOneSample) {
  expect_invariant({.micro_batches = 24, .micro = 1}, {0, 3});
}
TEST(WorldSizeInvariance, OneMicroBatchARank) { expect_invariant({.micro = 5, .samples = 90}, {0, 2}); }
TEST(WorldSizeInvariance, InOrderAndOnlyWholeUpdates) {
  expect_invariant({.more = R"(, "dataloader_drop_last": true)", .shuffle = false}, {1});
}
TEST(WorldSizeInvariance, ScalarLosses) {
  expect_invariant({.micro_batches = 24, .scalar_loss = true}, {0, 2});
}
TEST(WorldSizeInvariance, WholeUpdates) { expect_invariant({.whole_updates = true}, {0, 3}); }
TEST(WorldSizeInvariance, OptimizersThatNeedWholeParameters) {
  expect_invariant(
      {.more = R"(, "optimizer": {"type": "Lamb", "params": {"lr": 0.02, "weight_decay": 0.1}})"}, {0, 3});
  expect_invariant({.more = R"(, "optimizer": {"type": "Muon", "params": {"lr": 0.02}})"}, {0, 2});
}
TEST(WorldSizeInvariance, SixteenBits) {
  expect_invariant({.more = R"(, "bf16": {"enabled": true}, "data_types": {"grad_accum_dtype": "fp32"})"},
                   {0, 3});
  expect_invariant({.more = R"(, "fp16": {"enabled": true, "initial_scale_power": 18, "hysteresis": 1},
                                 "data_types": {"grad_accum_dtype": "fp32"})"},
                   {1});
}

/// The mode does something: without it the bits differ.
TEST(WorldSizeInvariance, IsNotSoInRankOrder) {
  const auto losses = [](int ranks) {
    std::vector<double> out;
    lab::world(ranks, [&](World& world) {
      Net net;
      std::string text = config({}, 0);
      text.replace(text.find("world_size_invariant"), 20, "rank_order");
      Engine engine = initialize(world, net, {.config = text, .seed = 5, .log = nullptr});
      Loader loader = engine.loader(dataset(75), {});
      for (int u = 0; u < updates; ++u) {
        update(engine, net, loader, {});
        const double loss = engine.loss();
        if (world.is_main()) out.push_back(loss);
      }
    });
    return out;
  };
  EXPECT_FALSE(same_bits(losses(1), losses(4)));
}

// ---- the sums

constexpr std::size_t passes_of_all = 24;

/// Of pass g of all ranks.
float leaf(std::size_t g, std::size_t i) {
  return static_cast<float>(random_uniform(7, "leaf", g * 100 + i) * 3 - 1);
}

/// 8 groups of 3 passes, and a tree over them.
float tree(std::size_t i) {
  std::vector<float> sums;
  for (std::size_t g = 0; g < passes_of_all; g += 3)
    sums.push_back((leaf(g, i) + leaf(g + 1, i)) + leaf(g + 2, i));
  for (std::size_t n = sums.size() / 2; n > 0; n /= 2)
    for (std::size_t k = 0; k < n; ++k) sums[k] = sums[2 * k] + sums[2 * k + 1];
  return sums[0];
}

StrategyOptions pairwise(int ranks) {
  return {.reduce_bucket_size = 64, .pairwise_passes = static_cast<std::int64_t>(passes_of_all) / ranks};
}

void in_pairwise_group(int ranks, const std::function<void(Communicator&)>& body) {
  lab::group(ranks, {.reduction_order = ReductionOrder::pairwise}, body);
}

/// All values are 1, so gradients are the data. "sometimes" is used by every second pass.
void run_pass(Strategy& strategy, Tape& tape, test::ToyModel& model, std::size_t g, bool synchronise) {
  const Var loss = model.loss(
      tape, [&](std::size_t, std::size_t i) { return leaf(g, i); }, g % 2 == 0);
  strategy.begin_backward(synchronise);
  tape.backward(loss);
  tape.reset();
}

TEST(PairwiseOrder, GradientsAreTheSumsOfTheTree) {
  for (const int ranks : {1, 2, 4, 8})
    in_pairwise_group(ranks, [&](Communicator& comm) {
      test::ToyModel model([](std::size_t, std::size_t) { return 1.0f; });
      const auto strategy = make_strategy(StrategyKind::ddp, model, comm, pairwise(ranks));
      Tape tape;
      strategy->attach(tape);
      const std::size_t own = passes_of_all / static_cast<std::size_t>(ranks);
      for (int update = 0; update < 3; ++update) {
        strategy->zero_grad();
        for (std::size_t m = 0; m < own; ++m)
          run_pass(*strategy, tape, model, static_cast<std::size_t>(comm.rank()) * own + m, m + 1 == own);
        strategy->finish_gradients();
        const Parameter& position = model[model.index("position")];
        for (std::size_t i = 0; i < position.count(); ++i)
          EXPECT_EQ(position.grad.data<float>()[i], tree(i)) << i << " on " << ranks << " ranks";
      }
    });
}

TEST(PairwiseOrder, PartialSumsAreAtMostTheLogarithmOfThePasses) {
  in_pairwise_group(1, [&](Communicator& comm) {
    test::ToyModel model([](std::size_t, std::size_t) { return 1.0f; });
    const auto strategy = make_strategy(StrategyKind::ddp, model, comm, pairwise(1));
    Tape tape;
    strategy->attach(tape);
    const std::size_t whole = strategy->memory().gradients;
    for (std::size_t g = 0; g < passes_of_all; ++g)
      run_pass(*strategy, tape, model, g, g + 1 == passes_of_all);
    strategy->finish_gradients();
    EXPECT_EQ(strategy->memory().gradients, 4 * whole) << "3 copies for 8 groups";
  });
}

TEST(PairwiseOrder, OnlyTheLastPassSynchronises) {
  in_pairwise_group(1, [&](Communicator& comm) {
    test::ToyModel model([](std::size_t, std::size_t) { return 1.0f; });
    StrategyOptions options = pairwise(1);
    options.pairwise_passes = 2;
    const auto strategy = make_strategy(StrategyKind::zero2, model, comm, options);
    Tape tape;
    strategy->attach(tape);
    EXPECT_STREQ(
        test::error_of([&] { strategy->begin_backward(true); }).what(),
        "gradients are summed in pairwise order: an update has 2 passes on each rank, of which the last "
        "one synchronises, found pass 1, which synchronises; propagate one loss for each micro-batch, "
        "such as a + b of two, and leave boundaries to their number");
    strategy->cancel_update();
    strategy->zero_grad();
    run_pass(*strategy, tape, model, 0, false);
    EXPECT_EQ(test::error_of([&] { strategy->begin_backward(false); }).code(), Errc::invalid_argument);
    strategy->cancel_update();
    strategy->zero_grad();
    run_pass(*strategy, tape, model, 0, false);
    run_pass(*strategy, tape, model, 1, true);
    strategy->finish_gradients();
    EXPECT_EQ(test::error_of([&] { strategy->begin_backward(true); }).code(), Errc::invalid_argument);
  });
}

/// A pass that failed leaves nothing in the sums.
TEST(PairwiseOrder, ACancelledUpdateIsForgotten) {
  in_pairwise_group(2, [&](Communicator& comm) {
    for (const StrategyKind kind : {StrategyKind::ddp, StrategyKind::zero2}) {
      std::vector<double> norms;
      for (const bool cancels : {false, true}) {
        test::ToyModel model([](std::size_t, std::size_t) { return 1.0f; });
        const auto strategy = make_strategy(kind, model, comm, pairwise(2));
        Tape tape;
        strategy->attach(tape);
        const std::size_t own = passes_of_all / 2;
        if (cancels) {
          for (std::size_t m = 0; m < 8; ++m) run_pass(*strategy, tape, model, 50 + m, false);
          strategy->cancel_update();
        }
        strategy->zero_grad();
        for (std::size_t m = 0; m < own; ++m) run_pass(*strategy, tape, model, m, m + 1 == own);
        strategy->finish_gradients();
        norms.push_back(strategy->gradient_norm());
      }
      EXPECT_EQ(norms[0], norms[1]) << name(kind);
    }
  });
}

TEST(PairwiseOrder, NeedsACommunicatorOfThatOrder) {
  lab::group(4, [&](Communicator& comm) {
    test::ToyModel model([](std::size_t, std::size_t) { return 1.0f; });
    EXPECT_STREQ(test::error_of([&] { make_strategy(StrategyKind::ddp, model, comm, pairwise(4)); }).what(),
                 "pairwise_passes needs a communicator whose CommOptions::reduction_order is pairwise");
    // A group of it may have that order.
    auto group = comm.split(0, comm.rank(), ReductionOrder::pairwise);
    EXPECT_EQ(group->options().reduction_order, ReductionOrder::pairwise);
    const auto strategy = make_strategy(StrategyKind::ddp, model, *group, pairwise(4));
    float x = leaf(static_cast<std::size_t>(comm.rank()), 0);
    group->all_reduce(Buffer(&x, 1), ReduceOp::sum).wait();
    EXPECT_EQ(x, (leaf(0, 0) + leaf(1, 0)) + (leaf(2, 0) + leaf(3, 0)));
  });
}

// ---- what is refused

std::string refusal(const std::string& more, int ranks = 2) {
  return test::error_of([&] {
           parse_ds_config(concat(R"({"train_batch_size": 24, "train_micro_batch_size_per_gpu": 1,
                                      "ringzero": {"deterministic": "world_size_invariant")",
                                  more, "}"),
                           "ds.json", {}, {.ranks = ranks});
         })
      .what();
}

TEST(WorldSizeInvariance, RefusesWhatWouldDependOnTheNumberOfRanks) {
  const std::string key = "ds.json: ringzero.deterministic: world_size_invariant ";
  EXPECT_EQ(
      refusal("}", 3),
      key + "needs 1, 2, 4, 8, … ranks with data of their own, found 3; start as many, or remove the key");
  EXPECT_EQ(
      refusal(R"(}, "communication_data_type": "bf16")"),
      key +
          "needs sums of gradients in f32, found communication_data_type bf16; remove it, or set it to fp32");
  EXPECT_EQ(refusal(R"(}, "prescale_gradients": true)"),
            key + "needs sums of gradients in f32, found prescale_gradients true; remove it");
  EXPECT_EQ(refusal(R"(}, "gradient_predivide_factor": 2)"),
            key + "needs sums of gradients in f32, found gradient_predivide_factor 2; remove it");
  EXPECT_EQ(refusal(R"(}, "bf16": {"enabled": true}, "data_types": {"grad_accum_dtype": "bf16"})"),
            key +
                "needs sums of gradients in f32, found data_types.grad_accum_dtype bf16; set "
                "data_types.grad_accum_dtype to fp32");
  EXPECT_EQ(
      refusal(R"(, "comm_hook": "bf16"})"),
      key + "sums gradients in an order of its own, but ringzero.comm_hook is bf16; remove one of them");
  EXPECT_EQ(refusal(R"(, "join": {}})"),
            key + "has equally many micro-batches on all ranks; remove ringzero.join");
}

TEST(WorldSizeInvariance, RefusesBuffersThatPassesChange) {
  lab::world(1, [&](World& world) {
    struct WithBuffer : Net {
      WithBuffer() { register_buffer(mean, "mean", {3}); }
      ModuleBuffer mean;
    } net;
    EXPECT_STREQ(
        test::error_of([&] { initialize(world, net, {.config = config({}, 0), .log = nullptr}); }).what(),
        "configuration: ringzero.deterministic: world_size_invariant: the buffer mean follows the samples "
        "of rank 0, whose number depends on that of the ranks; remove the key, or train a model without "
        "buffers that are saved");
  });
}

// ---- a run that is resumed

TEST(WorldSizeInvariance, ResumesOnAnyNumberOfRanks) {
  const test::Folder folder;
  const Case c;
  const Result whole = run(1, c, 0);
  const auto half = [&](World& world, int stage, bool second) {
    Net net;
    Engine engine = initialize(world, net, {.config = config(c, stage), .seed = 5, .log = nullptr});
    if (second) engine.load_checkpoint(folder.path());
    Loader loader = engine.loader(dataset(c.samples), {.shuffle = c.shuffle});
    while (engine.global_steps() < (second ? updates : updates / 2)) {
      update(engine, net, loader, c);
      const auto step = static_cast<std::size_t>(engine.global_steps()) - 1;
      EXPECT_EQ(engine.loss(), whole.losses[step]) << world.size() << " ranks, stage " << stage;
    }
    if (!second) {
      engine.save_checkpoint(folder.path());
    } else {
      EXPECT_TRUE(same_bits(lab::values_of(engine, net), whole.values))
          << world.size() << " ranks, stage " << stage;
    }
  };
  for (const int before : {1, 4, 8}) {
    lab::world(before, [&](World& world) { half(world, before == 4 ? 3 : 1, false); });
    for (const int after : {1, 2, 8})
      for (const int stage : {0, 3}) lab::world(after, [&](World& world) { half(world, stage, true); });
  }
}

/// Ranks may have failed in different passes.
TEST(WorldSizeInvariance, GoesOnAfterAnUpdateThatWasCancelled) {
  const auto result_after = [](int ranks) {
    Result out;
    lab::world(ranks, [&](World& world) {
      const Case c;
      Net net;
      Engine engine = initialize(world, net, {.config = config(c, 0), .seed = 5, .log = nullptr});
      Loader loader = engine.loader(dataset(c.samples), {.shuffle = c.shuffle});
      update(engine, net, loader, c);
      engine.backward(loss_of(engine.tape(), net, loader.next()));
      engine.step();
      engine.cancel_update();
      loader.set_state({0, static_cast<std::uint64_t>(8 / ranks)});
      update(engine, net, loader, c);
      const Result after{{engine.loss()}, {engine.report().grad_norm}, lab::values_of(engine, net)};
      if (world.is_main()) out = after;
    });
    return out;
  };
  const Result one = result_after(1);
  for (const int ranks : {2, 4}) EXPECT_TRUE(same_bits(one, result_after(ranks))) << ranks;
}

}  // namespace
}  // namespace rz
