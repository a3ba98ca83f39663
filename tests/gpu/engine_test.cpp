// Runs: ci operators

// The engine on devices: pass by pass, by update, and as a CUDA graph, with the same bits.

#include "sharding/engine/engine.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <functional>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "autograd_lite/nn/init.h"
#include "autograd_lite/nn/layers.h"
#include "comm/device/allocate.h"
#include "comm/device/cuda_runtime.h"
#include "tests/gpu/on_card.h"
#include "tests/gpu/on_device.h"
#include "tests/lab/world.h"
#include "tests/support/error_of.h"

namespace rz::test {
namespace {

constexpr std::size_t in = 16, hidden = 32, classes = 8;
constexpr int updates = 6;

struct Net : Module {
  nn::Linear fc1{*this, "fc1", in, hidden}, fc2{*this, "fc2", hidden, classes};
  nn::Dropout drop{*this, "drop", 0.25};
  Var operator()(Tape& t, const Tensor& x) { return fc2(t, drop(t, nn::gelu(t, fc1(t, x)))); }
};

struct Points : Dataset {
  std::uint64_t size() const override { return 48; }
  std::vector<Field> fields() const override { return {{"x", DType::f32, {in}}, {"y", DType::i32, {}}}; }
  void read(std::uint64_t i, BatchRows& to, std::size_t row) const override {
    for (std::size_t c = 0; c < in; ++c)
      to.row<float>("x", row)[c] = static_cast<float>(random_uniform(1, "x", i * in + c));
    to.row<std::int32_t>("y", row)[0] = static_cast<std::int32_t>(i % classes);
  }
};

enum class Way { by_pass, by_update, as_graph };

struct Trained {
  std::vector<double> losses, norms, scales;
  int graphs = 0;
};

Trained train(World& world, int stage, Way way, const std::string& keys = "", bool own_loss = false) {
  Net net;
  auto engine =
      initialize(world, net,
                 {.config = concat(R"({"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2,
           "optimizer": {"type": "AdamW", "params": {"lr": 0.02}},
           "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_max_lr": 0.02}},
           "zero_optimization": {"stage": )",
                                   stage, "}", keys, "}"),
                  .graph = way == Way::as_graph,
                  .log = nullptr});
  auto loader = engine.loader(Points());
  Trained out;
  const auto labels = [&](Tape& t, const Batch& b) { return nn::cross_entropy(t, net(t, b["x"]), b["y"]); };
  const auto scalar = [&](Tape& t, const Batch& b) { return nn::mean(t, nn::softplus(t, net(t, b["x"]))); };
  const auto run = [&](const auto& forward) {
    if (way != Way::by_pass) return engine.train_batch(loader, forward), true;
    engine.backward(forward(engine.tape(), loader.next()));
    return engine.step();
  };
  while (engine.global_steps() < updates) {
    if (!(own_loss ? run(scalar) : run(labels))) continue;
    out.losses.push_back(engine.loss());
    out.norms.push_back(engine.report().grad_norm);
    out.scales.push_back(engine.report().loss_scale);
    out.graphs += engine.report().ran_graph;
  }
  return out;
}

class EngineOnDevices : public OnDevice {};

TEST_F(EngineOnDevices, HasTheSameBitsPassByPassAndAsAGraph) {
  for (const int stage : checks_addresses ? std::vector{3} : std::vector{0, 2, 3})
    lab::world(2, on_a_card, [&](World& world) {
      const Trained expected = train(world, stage, Way::by_update);
      EXPECT_EQ(expected.graphs, 0);
      for (const Way way : {Way::by_pass, Way::as_graph}) {
        const Trained got = train(world, stage, way);
        EXPECT_EQ(got.losses, expected.losses) << "stage " << stage;
        EXPECT_EQ(got.norms, expected.norms) << "stage " << stage;
        EXPECT_EQ(got.graphs, way == Way::as_graph ? updates - 3 : 0);
      }
    });
}

/// The loss scale doubles after each update but the first, as in DeepSpeed, also after those that are
/// replayed.
TEST_F(EngineOnDevices, AnyScalarLossHasTheSameBitsPassByPassAndAsAGraph) {
  for (const char* precision :
       {"", R"(, "fp16": {"enabled": true, "initial_scale_power": 4, "loss_scale_window": 1})"})
    lab::world(2, on_a_card, [&](World& world) {
      const Trained expected = train(world, 3, Way::by_update, precision, true);
      EXPECT_LT(expected.losses.back(), expected.losses.front());
      EXPECT_EQ(expected.scales.back(), *precision ? 16 << (updates - 2) : 1);
      for (const Way way : {Way::by_pass, Way::as_graph}) {
        const Trained got = train(world, 3, way, precision, true);
        EXPECT_EQ(got.losses, expected.losses) << precision;
        EXPECT_EQ(got.norms, expected.norms) << precision;
        EXPECT_EQ(got.scales, expected.scales) << precision;
        EXPECT_EQ(got.graphs, way == Way::as_graph ? updates - 3 : 0);
      }
    });
}

struct Averaging : Net {
  Averaging() { register_buffer(mean, "mean", {3}); }
  ModuleBuffer mean;
};

TEST_F(EngineOnDevices, BuffersAreSavedAndLoaded) {
  const std::string path =
      std::filesystem::temp_directory_path() / concat("rz-buffers-", ::getpid(), ".safetensors");
  lab::world(2, on_a_card, [&](World& world) {
    const std::string config = R"({"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "SGD"},
                                   "zero_optimization": {"stage": 3}})";
    Averaging saved, loaded;
    auto engine = initialize(world, saved, {.config = config, .log = nullptr});
    const std::vector<float> mean{1, 2, static_cast<float>(3 + world.rank())};
    saved.mean.value.assign(std::span<const float>(mean), engine.stream());
    engine.save_model(path);
    world.wait_for_everyone();
    auto again = initialize(world, loaded, {.config = config, .log = nullptr});
    again.load_model(path);
    const Tensor got = loaded.mean.value.on_host(again.stream());
    EXPECT_EQ((std::vector<float>{got.data<float>(), got.data<float>() + 3}), (std::vector<float>{1, 2, 3}));
  });
  std::filesystem::remove(path);
}

/// Trains from where the keys resume up to `until` updates, and returns their losses.
std::vector<double> train_and_save(World& world, const std::string& keys, int until, int* graphs) {
  Net net;
  auto engine =
      initialize(world, net,
                 {.config = concat(R"({"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2,
           "optimizer": {"type": "AdamW", "params": {"lr": 0.02}}, "zero_optimization": {"stage": 3},
           "ringzero": {"checkpoint": {"signals": false, )",
                                   keys, "}}}"),
                  .log = nullptr});
  auto loader = engine.loader(Points());
  std::vector<double> losses;
  while (engine.global_steps() < until && !engine.should_stop()) {
    engine.train_batch(loader,
                       [&](Tape& t, const Batch& b) { return nn::cross_entropy(t, net(t, b["x"]), b["y"]); });
    losses.push_back(engine.loss());
    *graphs += world.is_main() && engine.report().ran_graph;
    engine.checkpoints().record({{"loss", losses.back()}});
  }
  engine.checkpoints().finish();
  return losses;
}

TEST_F(EngineOnDevices, CheckpointsOfUpdatesInAGraphAreResumed) {
  const std::string dir = std::filesystem::temp_directory_path() / concat("rz-graphs-", ::getpid());
  int graphs = 0;
  lab::world(2, on_a_card, [&](World& world) {
    const std::string steps =
        concat(R"("output_dir": ")", dir,
               R"(", "save_steps": 1, "async_save": true, "load_best_model_at_end": true)");
    const auto plain = train_and_save(world, R"("eval_steps": 1)", 9, &graphs);
    EXPECT_EQ(train_and_save(world, steps, 5, &graphs),
              std::vector<double>(plain.begin(), plain.begin() + 5));
    EXPECT_EQ(train_and_save(world, steps + R"(, "resume_from_checkpoint": true)", 9, &graphs),
              std::vector<double>(plain.begin() + 5, plain.end()));
  });
  EXPECT_EQ(graphs, 6 + 2 + 1) << "three updates of each run precede its graph";
  std::filesystem::remove_all(dir);
}

TEST_F(EngineOnDevices, AGraphIsNotRunForBatchesOfOtherShapes) {
  lab::world(2, on_a_card, [](World& world) {
    Net net;
    auto engine = initialize(
        world, net,
        {.config = R"({"train_micro_batch_size_per_gpu": 5, "optimizer": {"type": "SGD"}})", .log = nullptr});
    auto loader = engine.loader(Points());  // 24 samples: four batches of 5 and one of 4
    const auto update = [&] {
      engine.train_batch(
          loader, [&](Tape& t, const Batch& b) { return nn::cross_entropy(t, net(t, b["x"]), b["y"]); });
    };
    for (int i = 0; i < 4; ++i) update();
    EXPECT_TRUE(engine.report().ran_graph);
    const Error e = error_of(update);
    EXPECT_EQ(e.code(), Errc::invalid_argument);
    EXPECT_STREQ(
        e.what(),
        "train_batch(): a batch has x [4, 16]; the CUDA graph of the updates has [5, 16]: drop the "
        "incomplete "
        "last batch (drop_last), pad to Collation::Padding::max_length, or set EngineOptions::graph to "
        "false");
    engine.cancel_update();
    update();
    EXPECT_EQ(engine.global_steps(), 5);
  });
}

/// A graph of passes before start_powerSGD_iter would send whole gradients for ever.
TEST_F(EngineOnDevices, PowerSgdIsInNoGraph) {
  lab::world(2, on_a_card, [](World& world) {
    const std::string keys =
        R"(, "ringzero": {"comm_hook": "power_sgd", "comm_state_option": {"start_powerSGD_iter": 4}})";
    const Trained expected = train(world, 0, Way::by_update, keys),
                  got = train(world, 0, Way::as_graph, keys);
    EXPECT_EQ(got.graphs, 0);
    EXPECT_EQ(got.losses, expected.losses);
    EXPECT_NE(got.losses, train(world, 0, Way::as_graph).losses);
    const std::unique_ptr<std::FILE, int (*)(std::FILE*)> log(std::tmpfile(), std::fclose);
    Net net;
    initialize(
        world, net,
        {.config = concat(R"({"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "SGD"})", keys, "}"),
         .log = log.get()});
    std::rewind(log.get());
    std::string text(1 << 16, ' ');
    text.resize(std::fread(text.data(), 1, text.size(), log.get()));
    const auto at =
        text.find("updates run without a CUDA graph: the communication hook cannot be captured\n");
    EXPECT_EQ(at != text.npos, world.is_main()) << text;
  });
}

/// Update 4, from 0, is measured, and three updates precede the next graph, it among them.
TEST_F(EngineOnDevices, TheUpdateThatIsProfiledIsInNoGraph) {
  const auto file = std::filesystem::temp_directory_path() / concat("rz-flops-", ::getpid());
  lab::world(2, on_a_card, [&](World& world) {
    const Trained expected = train(world, 0, Way::by_update);
    const Trained got =
        train(world, 0, Way::as_graph,
              concat(R"(, "flops_profiler": {"enabled": true, "profile_step": 4, "output_file": ")",
                     file.string(), R"("})"));
    EXPECT_EQ(got.losses, expected.losses);
    EXPECT_EQ(got.graphs, 1 + std::max(0, updates - 7));
  });
  EXPECT_GT(std::filesystem::file_size(file), 0u);
  std::filesystem::remove(file);
}

// ---- updates in a graph that fail

/// What happens on a rank in an update.
struct Fault {
  int update = -1;
  enum Kind { none, loader, forward, rate, loss, targets } kind = none;
};

struct FaultyPoints : Points {
  void read(std::uint64_t i, BatchRows& to, std::size_t row) const override {
    if (*fails) throw std::runtime_error("injected");
    Points::read(i, to, row);
    if (*ignored) to.row<std::int32_t>("y", row)[0] = -100;
  }
  std::shared_ptr<bool> fails = std::make_shared<bool>(false), ignored = std::make_shared<bool>(false);
};

struct FaultyRun {
  std::vector<double> losses, norms;
  int graphs = 0, thrown = 0;
  Errc code{};
  int culprit = -1;
};

/// Rank 1 has the fault. A loss has a constant, which is read in each run of a graph.
void train_with(World& world, int stage, bool graph, const Fault& fault, FaultyRun& out) {
  Net net;
  auto engine =
      initialize(world, net,
                 {.config = concat(R"({"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2,
           "optimizer": {"type": "AdamW", "params": {"lr": 0.02}}, "zero_optimization": {"stage": )",
                                   stage, "}}"),
                  .graph = graph,
                  .log = nullptr});
  const FaultyPoints points;
  auto loader = engine.loader(points, {.shuffle = false, .num_workers = 0});
  const Tensor constant = Tensor::empty({}, DType::f32, allocator_on(engine.stream().device()));
  bool fails_forward = false;
  const auto set = [&](float value) { constant.assign(std::span<const float>(&value, 1), engine.stream()); };
  for (int u = 0; u < 9; ++u) {
    const bool here = u == fault.update && world.rank() == 1;
    *points.fails = here && fault.kind == Fault::loader;
    *points.ignored = u == fault.update && fault.kind == Fault::targets;
    fails_forward = here && fault.kind == Fault::forward;
    set(here && fault.kind == Fault::loss ? NAN : 1);
    if (here && fault.kind == Fault::rate) engine.optimizer().set_learning_rate(0.5);
    try {
      engine.train_batch(loader, [&](Tape& t, const Batch& b) {
        if (fails_forward) throw std::runtime_error("injected");
        return nn::cross_entropy(t, net(t, b["x"]), b["y"]) + t.constant(constant);
      });
      if (!engine.report().skipped) {
        out.losses.push_back(engine.loss());
        out.norms.push_back(engine.report().grad_norm);
      }
      out.graphs += engine.report().ran_graph;
    } catch (const std::exception& e) {
      ++out.thrown;
      const auto* const error = dynamic_cast<const Error*>(&e);
      const bool injected = here && (fault.kind == Fault::loader || fault.kind == Fault::forward);
      ASSERT_TRUE(injected || error) << e.what();
      out.code = injected ? Errc::cancelled : error->code(), out.culprit = injected ? 1 : error->culprit();
      *points.fails = false;
      if (out.code == Errc::cancelled) {
        engine.cancel_update();
        continue;
      }
    }
    engine.optimizer().set_learning_rate(0.02);
  }
}

void expect_left_out(int stage, const Fault& fault, int thrown, Errc code, int culprit) {
  lab::world(2, on_a_card, [&](World& world) {
    SCOPED_TRACE(concat("stage ", stage, ", fault ", static_cast<int>(fault.kind), ", rank ", world.rank()));
    FaultyRun by_pass, got;
    train_with(world, stage, false, fault, by_pass);
    train_with(world, stage, true, fault, got);
    EXPECT_EQ(by_pass.losses.size(), 8u);
    EXPECT_EQ(got.losses, by_pass.losses);
    EXPECT_EQ(got.norms, by_pass.norms);
    for (const FaultyRun& run : {by_pass, got}) {
      EXPECT_EQ(run.thrown, thrown);
      if (thrown == 0) continue;
      EXPECT_EQ(run.code, code);
      EXPECT_EQ(run.culprit, culprit);
    }
    EXPECT_GT(got.graphs, 0);
  });
}

/// Update 3 is captured, update 4 only replayed.
TEST_F(EngineOnDevices, ARankThatFailsCancelsUpdatesInAGraph) {
  for (const int stage : checks_addresses ? std::vector{3} : std::vector{0, 3}) {
    expect_left_out(stage, {4, Fault::loader}, 1, Errc::cancelled, 1);
    expect_left_out(stage, {3, Fault::forward}, 1, Errc::cancelled, 1);
  }
}
TEST_F(EngineOnDevices, RatesThatDifferAreFoundInPassesAndInAGraph) {
  for (const int update : {1, 4})
    expect_left_out(checks_addresses ? 3 : 0, {update, Fault::rate}, 1, Errc::mismatch, -1);
}
TEST_F(EngineOnDevices, LossesThatAreNotFiniteAndUpdatesWithoutTermsAreFoundInAGraph) {
  expect_left_out(0, {4, Fault::loss}, 1, Errc::diverged, 1);
  expect_left_out(0, {4, Fault::targets}, 0, Errc::diverged, -1);
}

}  // namespace
}  // namespace rz::test
