/// The engine against loops by hand: the same bits, whatever drives the strategy.
#include "sharding/engine/engine.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "autograd_lite/nn/containers.h"
#include "autograd_lite/nn/init.h"
#include "autograd_lite/nn/layers.h"
#include "sharding/data/batch_sampler.h"
#include "sharding/engine/reports/update_losses.h"
#include "sharding/optim/optimizers.h"
#include "sharding/strategy/strategy.h"
#include "tests/lab/training.h"
#include "tests/support/error_of.h"
#include "tests/support/folder.h"

namespace rz {
namespace {

using lab::batch;
using lab::config;
using lab::Mlp;
using lab::options;
using lab::Trace;
using lab::Trainer;
using lab::values_of;

/// What the configuration of an Mlp describes, without an engine.
Trace by_hand(World& world, StrategyKind kind) {
  Mlp net;
  Communicator comm = world.new_communicator();
  const auto strategy = make_strategy(kind, net, comm, {.gathers = {.param_persistence_threshold = 0}});
  strategy->values().fill([](const Parameter& p, Range elements, float* out) {
    init_slice(p, {out, elements.count()}, elements.begin, 7);
  });
  Tape tape(Stream::host(world.threads()));
  strategy->attach(tape);
  const auto adamw = make_adamw({.learning_rate = 0.02, .weight_decay = 0.1});
  const LrSchedule schedule = WarmupDecayLr{.total_num_steps = 12, .max_lr = 0.02, .num_steps = 4};
  const auto order = std::make_shared<DistributedBatchSampler>(BatchSamplerOptions{
      .samples = 96, .batch_size = 4, .ranks = world.size(), .rank = world.rank(), .seed = 7});
  Loader loader(lab::samples(), order, tape.stream());
  Trace out;
  for (std::uint64_t u = 0; u < 8; ++u) {
    strategy->zero_grad();
    adamw->set_learning_rate(learning_rate(schedule, adamw->updates(), {.base_lr = 0.02}));
    std::vector<Mean> losses;
    for (std::uint64_t m = 0; m < 3; ++m) {
      const auto ranks = static_cast<std::uint64_t>(world.size());
      tape.seed(7 ^
                ((u * 3 + m) * ranks + static_cast<std::uint64_t>(world.rank()) + 1) * 0x9e3779b97f4a7c15u);
      const nn::Loss loss = net(tape, loader.next());
      const ops::LossSum read = loss.read({});
      if (u == 0 && m == 0)
        strategy->settings().set_expected_terms(3 *
                                                world.reduce(static_cast<double>(read.count), ReduceOp::sum));
      losses.push_back({read.sum, static_cast<double>(read.count)});
      strategy->backward(tape, loss, m == 2);
      tape.reset();
    }
    strategy->finish_gradients();
    strategy->clip_and_step(*adamw, {.max_norm = 0.5, .skip_overflow = true});
    out.updates.push_back({.step = u,
                           .loss = exact_mean(losses, world.communicator()),
                           .grad_norm = strategy->outcome(*adamw).norm,
                           .lr = adamw->learning_rate(),
                           .loss_scale = 1});
  }
  out.values = values_of(*strategy, net);
  return out;
}

TEST(Engine, HasTheBitsOfALoopByHandInEveryStage) {
  for (const int ranks : {1, 2, 3})
    lab::world(ranks, [](World& world) {
      const Trace expected = by_hand(world, StrategyKind::ddp);
      for (const StrategyKind kind : lab::strategies)
        for (const bool by_update : {false, true})
          EXPECT_EQ(lab::train(world, {.strategy = kind, .whole_updates = by_update}), expected)
              << name(kind) << (by_update ? " by update" : " pass by pass");
      EXPECT_EQ(by_hand(world, StrategyKind::zero3), expected);
    });
}

TEST(Engine, ABatchIsReadBeforeTheNextOneIsTaken) {
  lab::world(2, [](World& world) {
    Trainer own(world, options(config(1))), in_one(world, options(config(1)));
    struct {
      Loader& loader;
      Batch memory = batch(0);
      Batch& next() {
        const Batch& from = loader.next();
        for (const char* name : {"x", "y"})
          std::memcpy(memory[name].raw(), from[name].raw(), from[name].bytes());
        return memory;
      }
    } batches{in_one.loader};
    for (int update = 0; update < 3; ++update) {
      own.update();
      in_one.engine.train_batch(batches, std::ref(in_one.net));
    }
    EXPECT_EQ(values_of(in_one.engine, in_one.net), values_of(own.engine, own.net));
  });
}

/// Gradients of several losses of one micro-batch add up.
TEST(Engine, SeveralLossesBeforeAStepAddUp) {
  lab::world(2, [](World& world) {
    const auto run = [&](bool apart, int stage) {
      Mlp net;
      auto engine = initialize(world, net, options(config(stage)));
      net.eval();  // without dropout both ways compute the same
      for (std::uint64_t m = 0; m < 6; ++m) {
        Tape& t = engine.tape();
        const Batch a = batch(m * 4 + static_cast<std::uint64_t>(world.rank()));
        const auto mse = [&] {
          const Tensor zero = Tensor::zeros({4, 5});
          return nn::mse(t, net(t, a["x"]), zero);
        };
        if (apart) {
          engine.backward(mse());
          engine.backward(mse());
        } else {
          engine.backward(nn::mul(t, mse(), 2));
        }
        engine.step();
      }
      return std::pair(engine.report().grad_norm, values_of(engine, net));
    };
    const auto [norm, values] = run(false, 0);
    for (int stage = 0; stage < 4; ++stage) {
      const auto [norm_apart, values_apart] = run(true, stage);
      EXPECT_NEAR(norm_apart, norm, 1e-6 * norm) << "stage " << stage;
      for (std::size_t i = 0; i < values.size(); ++i) EXPECT_NEAR(values_apart[i], values[i], 1e-5);
    }
  });
}

/// Sample i is {i}.
struct Numbers : Dataset {
  explicit Numbers(std::uint64_t size) : count(size) {}
  std::uint64_t size() const override { return count; }
  std::vector<Field> fields() const override { return {{"number", DType::i32, {1}}}; }
  void read(std::uint64_t i, BatchRows& to, std::size_t row) const override {
    to.row<std::int32_t>("number", row)[0] = static_cast<std::int32_t>(i);
  }
  std::uint64_t count;
};

TEST(Engine, GathersEverySampleOfAnEpochOnce) {
  for (const std::uint64_t samples : {1u, 12u, 13u, 25u})
    lab::world(3, [&](World& world) {
      Mlp net;
      auto engine = initialize(world, net, options(config(0)));
      auto loader = engine.loader(Numbers(samples), {.num_workers = 2});
      std::vector<int> seen(samples);
      for (const Batch& b : loader) {
        const Tensor all = engine.gather_for_metrics(b, b["number"]);
        for (std::size_t i = 0; i < all.count(); ++i)
          ++seen[static_cast<std::size_t>(all.data<std::int32_t>()[i])];
      }
      EXPECT_EQ(seen, std::vector<int>(samples, 1)) << samples << " samples on rank " << world.rank();
    });
}

TEST(Engine, RowsThatDoNotFitTheBatchOfARankAreAnErrorOnAll) {
  lab::world(3, [](World& world) {
    Mlp net;
    auto engine = initialize(world, net, options(config(0)));
    auto loader = engine.loader(Numbers(24)), smaller = engine.loader(Numbers(24), {.batch_size = 3});
    const Batch& b = loader.next();
    const Error shape = test::error_of([&] {
      engine.gather_for_metrics(b, world.rank() == 2 ? Tensor::zeros({3, 1}) : Tensor::zeros({4, 1}));
    });
    EXPECT_EQ(shape.code(), Errc::mismatch) << shape.what();
    EXPECT_EQ(shape.culprit(), 2);
    const Error batch = test::error_of([&] {
      engine.gather_for_metrics(world.rank() == 1 ? smaller.next() : b, Tensor::zeros({4, 1}));
    });
    EXPECT_EQ(batch.code(), Errc::invalid_argument) << batch.what();
    EXPECT_EQ(batch.culprit(), 1);
    EXPECT_EQ(engine.gather_for_metrics(b, b["number"]).count(), 12u);
  });
}

TEST(Engine, LoadersHaveTheMicroBatchSizeAndTheirShareOfTheData) {
  lab::world(2, [](World& world) {
    Mlp net;
    auto engine = initialize(world, net, options(config(0, R"("dataloader_drop_last": true)")));
    EXPECT_EQ(engine.loader(Numbers(35)).size(), 4u);  // ⌊17 / 4⌋
    EXPECT_EQ(engine.loader(Numbers(35), {.drop_last = false}).size(), 5u);
    EXPECT_EQ(engine.loader(Numbers(35)).next().rows(), 4u);
    EXPECT_EQ(engine.loader(Numbers(35), {.batch_size = 7}).next().rows(), 7u);
    Mlp frozen;
    auto inference = initialize(world, frozen, options(""));
    EXPECT_EQ(test::error_of([&] { inference.loader(Numbers(35)); }).code(), Errc::config);
  });
}

/// A loop that was left by break: an evaluation begins again, training goes on.
TEST(Engine, LoadersInOrderBeginAgainAfterABreak) {
  lab::world(2, [](World& world) {
    Mlp net;
    auto engine = initialize(world, net, options(config(0)));
    const auto two = [](Loader& loader) {
      std::vector<std::uint64_t> all;
      for (const Batch& b : loader) {
        all.insert(all.end(), b.indices().begin(), b.indices().end());
        if (all.size() == 8) break;
      }
      return all;
    };
    Loader evaluation = engine.loader(Numbers(35), {.shuffle = false}), training = engine.loader(Numbers(35));
    const auto first = two(evaluation), seen = two(training);
    EXPECT_EQ(two(evaluation), first);
    for (const std::uint64_t sample : two(training)) EXPECT_EQ(std::ranges::count(seen, sample), 0) << sample;
  });
}

struct Blocks : Module {
  struct Block : Module {
    Block(Module& parent, const std::string& name) : Module(parent, name) { one_scope(); }
    Var operator()(Tape& t, Var x) {
      ++calls;
      return nn::add(t, x, drop(t, nn::tanh(t, fc(t, x))));
    }
    nn::Linear fc{*this, "fc", 6, 6};
    nn::Dropout drop{*this, "drop", 0.2};
    int calls = 0;
  };
  Blocks() { layers.append<nn::Linear>(6u, 6u).append<Block>().append<Block>().append<nn::Linear>(6u, 5u); }
  nn::Loss operator()(Tape& t, const Batch& b) {
    return nn::cross_entropy(t, layers(t, t.constant(b["x"])), b["y"]);
  }
  int calls() { return static_cast<Block&>(layers[1]).calls; }
  nn::Sequential layers{*this, "layers"};
};

TEST(Engine, ActivationCheckpointingRunsBlocksTwiceWithTheSameBits) {
  lab::world(2, [](World& world) {
    for (const int stage : {0, 3}) {
      const auto run = [&](const char* checkpointing) {
        lab::Run run{.strategy = static_cast<StrategyKind>(stage), .updates = 3, .keys = checkpointing};
        run.model.make = std::make_unique<Blocks>;
        run.model.loss = [](Module& m, Tape& t, const Batch& b) { return dynamic_cast<Blocks&>(m)(t, b); };
        run.whole_updates = true;
        int calls = 0;
        run.end = [&](Engine&, Module& m) { calls = dynamic_cast<Blocks&>(m).calls(); };
        return std::pair(lab::train(world, run), calls);
      };
      const auto [plain, calls] = run("");
      const auto [recomputed, calls_again] = run(R"("activation_checkpointing": {"number_checkpoints": 2})");
      EXPECT_EQ(recomputed, plain) << "stage " << stage;
      EXPECT_EQ(calls, 9);
      EXPECT_EQ(calls_again, 18);
    }
  });
}

TEST(Engine, AFolderThatCannotBeMadeIsAnErrorOnAllRanks) {
  lab::world(2, [&](World& world) {
    Mlp net;
    const Error e = test::error_of([&] {
      initialize(world, net, options(config(0, R"("csv_monitor": {"enabled": true,
          "output_path": "/proc/none"})")));
    });
    EXPECT_EQ(e.code(), Errc::io);
    EXPECT_EQ(e.culprit(), 0);
  });
}

TEST(Engine, AStepInsideNoSyncIsAnErrorThatNamesIt) {
  lab::world(2, [](World& world) {
    Mlp net;
    auto engine = initialize(world, net, options(config(1)));
    const Engine::NoSync no_sync(engine);
    engine.backward(net(engine.tape(), batch(0)));
    const Error e = test::error_of([&] { engine.step(); });
    EXPECT_EQ(e.code(), Errc::unsynchronised);
    EXPECT_NE(std::string(e.what()).find("step() inside NoSync"), std::string::npos) << e.what();
  });
}

/// The same one again and again, of no loader.
struct OneBatch {
  Batch& next() { return b; }
  Batch b = batch(0);
};

TEST(Engine, AnUpdateOfTrainBatchInsideNoSyncIsAnErrorThatNamesIt) {
  lab::world(2, [](World& world) {
    Mlp net;
    auto engine = initialize(world, net, options(config(1)));
    OneBatch batches;
    {
      const Engine::NoSync no_sync(engine);
      const Error e = test::error_of([&] { engine.train_batch(batches, std::ref(net)); });
      EXPECT_EQ(e.code(), Errc::unsynchronised);
      EXPECT_NE(std::string(e.what()).find("train_batch() inside NoSync"), std::string::npos) << e.what();
    }
    engine.train_batch(batches, std::ref(net));
    EXPECT_EQ(engine.global_steps(), 1);
  });
}

TEST(Engine, AnUpdateWhoseLastPassDidNotSynchroniseIsAnError) {
  lab::world(2, [](World& world) {
    Mlp net;
    auto engine = initialize(world, net, options(config(0)));
    for (int m = 0; m < 3; ++m) {
      {
        const Engine::NoSync no_sync(engine);
        engine.backward(net(engine.tape(), batch(0)));
      }
      if (m < 2)
        engine.step();
      else
        EXPECT_EQ(test::error_of([&] { engine.step(); }).code(), Errc::unsynchronised);
    }
  });
}

TEST(Engine, AForcedBoundaryEndsAnUpdateEarlierOrLater) {
  lab::world(2, [](World& world) {
    Mlp net;
    auto engine = initialize(world, net, options(config(1)));  // three micro-batches per update
    std::vector<bool> boundaries, updated;
    const auto pass = [&](std::optional<bool> boundary) {
      engine.set_gradient_accumulation_boundary(boundary);
      engine.backward(net(engine.tape(), batch(updated.size())));
      boundaries.push_back(engine.is_gradient_accumulation_boundary());
      updated.push_back(engine.step());
    };
    for (const auto boundary : {std::optional(true), {}, {}, {}}) pass(boundary);
    for (const auto boundary : {std::optional(false), std::optional(false), std::optional(false)})
      pass(boundary);
    pass({});  // the count is beyond the end of the update
    for (int i = 0; i < 3; ++i) pass({});
    EXPECT_EQ(updated,
              (std::vector{true, false, false, true, false, false, false, true, false, false, true}));
    EXPECT_EQ(boundaries, updated);
  });
}

TEST(Engine, AStepWithoutABackwardIsAnError) {
  lab::world(1, [](World& world) {
    Mlp net;
    auto engine = initialize(world, net, options(config(0)));
    EXPECT_EQ(test::error_of([&] { engine.step(); }).code(), Errc::invalid_argument);
  });
}

TEST(Engine, WithoutAnOptimizerItRunsInferenceOnly) {
  lab::world(2, [](World& world) {
    Mlp trained, net;
    auto student = initialize(world, trained, options(config(0)));
    auto teacher = initialize(world, net, options(R"({"zero_optimization": {"stage": 3,
        "stage3_param_persistence_threshold": 0}})"));
    const Batch b = batch(1);
    const Tensor expected = student.evaluate([&](Tape& t) { return t.value(trained(t, b["x"])); });
    const Tensor logits = teacher.evaluate([&](Tape& t) { return t.value(net(t, b["x"])); });
    for (std::size_t i = 0; i < logits.count(); ++i)
      EXPECT_EQ(logits.data<float>()[i], expected.data<float>()[i]);
    EXPECT_EQ(teacher.strategy().memory().gradients, 0u);
    EXPECT_EQ(teacher.strategy().memory().optimizer_state, 0u);
    const Error e = test::error_of([&] { teacher.backward(net(teacher.tape(), b)); });
    EXPECT_EQ(e.code(), Errc::invalid_argument);
  });
}

TEST(Engine, EvaluationUsesNoDropoutAndLeavesTrainingAsItWas) {
  lab::world(1, [](World& world) {
    const auto run = [&](bool evaluate) {
      Trainer t(world, options(config(0)));
      std::vector<double> losses;
      while (t.engine.global_steps() < 4) {
        if (evaluate) {
          const Batch other = batch(99);
          const auto logits = [&] {
            return t.engine.evaluate([&](Tape& tape) { return tape.value(t.net(tape, other["x"])); });
          };
          const Tensor once = logits(), twice = logits();
          for (std::size_t i = 0; i < once.count(); ++i)
            EXPECT_EQ(once.data<float>()[i], twice.data<float>()[i]);
        }
        if (t.pass()) losses.push_back(t.engine.loss());
      }
      EXPECT_TRUE(t.net.training());
      return losses;
    };
    EXPECT_EQ(run(true), run(false));
  });
}

/// train_batch() leaves no gradients to what comes after it.
TEST(Engine, PassesAndErrorsAfterTrainBatchBeginAnUpdate) {
  lab::world(2, [](World& world) {
    for (const int stage : {0, 1, 2, 3}) {
      const auto run = [&](bool by_update, bool fails) {
        Trainer t(world, options(config(stage)));
        for (int u = 0; u < 4; ++u) {
          if (by_update && u % 2 == 0)
            t.update();
          else
            for (int m = 0; m < 3; ++m) t.pass();
          if (!fails) continue;
          OneBatch other;
          if (world.rank() == 1) {
            EXPECT_EQ(test::error_of([&] { t.engine.train_batch(other, std::ref(t.net)); }).code(),
                      Errc::cancelled);
          }
          t.engine.cancel_update();
        }
        return std::pair(values_of(t.engine, t.net), t.engine.report().grad_norm);
      };
      const auto expected = run(false, false);
      EXPECT_EQ(run(true, false), expected) << "stage " << stage;
      EXPECT_EQ(run(true, true), expected) << "stage " << stage;
    }
  });
}

/// Of f16 values it is in f16, and the first loss scales overflow.
TEST(Engine, TrainBatchTakesAnyScalarAsBackwardDoes) {
  const auto own_loss = [](Tape& t, Mlp& net, const Batch& b) {
    return nn::mean(t, nn::softplus(t, net(t, b["x"])));
  };
  for (const char* precision :
       {"", R"("bf16": {"enabled": true})", R"("fp16": {"enabled": true, "initial_scale_power": 20})"})
    lab::world(2, [&](World& world) {
      for (const int stage : {0, 1, 2, 3}) {
        const auto run = [&](bool by_update) {
          Trainer t(world, options(config(stage, precision)));
          std::vector<double> reported;
          while (t.engine.global_steps() < 12) {
            if (by_update) {
              t.engine.train_batch(t.loader,
                                   [&](Tape& tape, const Batch& b) { return own_loss(tape, t.net, b); });
            } else {
              t.engine.backward(own_loss(t.engine.tape(), t.net, t.loader.next()));
              if (!t.engine.step()) continue;
            }
            const StepReport& r = t.engine.report();
            reported.insert(reported.end(), {t.engine.loss(), r.loss_scale, static_cast<double>(r.skipped)});
            if (!r.skipped) reported.push_back(r.grad_norm);
          }
          const Batch b = batch(100);
          reported.push_back(
              t.engine.evaluate([&](Tape& tape) { return t.engine.item(own_loss(tape, t.net, b)); }).value());
          EXPECT_LT(reported.back(), reported.front());
          return std::pair(values_of(t.engine, t.net), reported);
        };
        EXPECT_EQ(run(true), run(false)) << "stage " << stage << precision;
      }
    });
}

TEST(Engine, ALossThatIsNoScalarIsRefused) {
  lab::world(1, [](World& world) {
    Trainer t(world, options(config(0)));
    Engine& engine = t.engine;
    const auto forward = [&](Tape& tape, const Batch& b) { return t.net(tape, b["x"]); };
    const char* const text =
        "backward() starts from a scalar, not from [4, 5]: take its nn::mean() or nn::sum()";
    EXPECT_STREQ(test::error_of([&] { engine.backward(forward(engine.tape(), batch(0))); }).what(), text);
    engine.cancel_update();
    EXPECT_STREQ(test::error_of([&] { engine.train_batch(t.loader, forward); }).what(), text);
    engine.cancel_update();
    EXPECT_EQ(test::error_of([&] {
                engine.train_batch(t.loader, [](Tape&, const Batch&) { return Var(); });
              }).code(),
              Errc::invalid_argument);
  });
}

TEST(Engine, MicroBatchesThatFillNoUpdateAreReported) {
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> log(std::tmpfile(), std::fclose);
  for (const int passes : {3, 4, 2})
    lab::world(2, [&](World& world) {
      auto o = options(config(0));
      o.log = log.get(), o.name = concat("net", passes);
      Trainer t(world, std::move(o));
      for (int m = 0; m < passes; ++m) {
        t.engine.backward(t.net(t.engine.tape(), t.loader.next()));
        if (m + 1 < passes || passes != 2) t.engine.step();
      }
    });
  std::rewind(log.get());
  std::string printed(100'000, '\0');
  printed.resize(std::fread(printed.data(), 1, printed.size(), log.get()));
  EXPECT_EQ(printed.find("net3: warning: the last"), std::string::npos);
  for (const char* line : {"net4: warning: the last 1 of 3 micro-batches of an update have made none",
                           "net2: warning: the last 2 of 3 micro-batches of an update have made none"}) {
    const std::size_t at = printed.find(line);
    EXPECT_NE(at, std::string::npos) << printed;
    EXPECT_EQ(printed.find(line, at + 1), std::string::npos) << "printed on one rank";
  }
}

TEST(Engine, LambHasTheOptionsOfTheConfiguration) {
  lab::world(1, [](World& world) {
    Mlp net;
    auto engine = initialize(world, net, options(R"({"train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "Lamb", "params": {"lr": 0.5, "betas": [0.5, 0.75], "eps": 0.25, "weight_decay": 2,
            "min_coeff": 0.125, "max_coeff": 4, "bias_correction": false, "eps_inside_sqrt": true}}})"));
    const auto lamb = make_lamb({.learning_rate = 0.5,
                                 .beta1 = 0.5,
                                 .beta2 = 0.75,
                                 .epsilon = 0.25,
                                 .weight_decay = 2,
                                 .max_coeff = 4,
                                 .min_coeff = 0.125,
                                 .bias_correction = false,
                                 .eps_inside_sqrt = true});
    EXPECT_EQ(engine.optimizer().describe(), lamb->describe());
  });
}

TEST(Engine, AWrongConfigurationIsTheSameErrorOnAllRanks) {
  lab::world(3, [](World& world) {
    Mlp net;
    EngineOptions o = options(world.rank() == 2 ? R"({"zero_optimisation": 2})" : config(1));
    const Error e = test::error_of([&] { initialize(world, net, std::move(o)); });
    EXPECT_EQ(e.code(), Errc::config);
    EXPECT_EQ(e.culprit(), 2);
    EXPECT_NE(std::string(e.what()).find("zero_optimization"), std::string::npos) << e.what();
  });
}

TEST(Engine, ConfigurationsThatDifferOverTheRanksAreNamed) {
  lab::world(2, [](World& world) {
    Mlp net;
    const Error e = test::error_of([&] { initialize(world, net, options(config(world.rank()))); });
    EXPECT_EQ(e.code(), Errc::mismatch);
    EXPECT_EQ(e.culprit(), -1) << "neither of two ranks differs from a majority";
  });
}

TEST(Engine, AModelWithValuesStartsFromThoseOfRank0) {
  lab::world(2, [](World& world) {
    Mlp net;
    init_parameters((allocate_parameters(net), net), static_cast<std::uint64_t>(world.rank()) + 1);
    auto engine = initialize(world, net, options(config(3)));
    Mlp first;
    init_parameters((allocate_parameters(first), first), 1);
    std::vector<float> values;
    for (const Parameter* p : first.parameters())
      values.insert(values.end(), p->value.data<float>(), p->value.data<float>() + p->value.count());
    EXPECT_EQ(values_of(engine, net), values);
  });
}

TEST(Engine, RefusesAMeshThatDoesNotFit) {
  lab::world(2, [](World& world) {
    Mlp net;
    const auto on = [&](const MeshSizes& mesh) {
      return initialize(world, net, {.config = config(2), .mesh = mesh, .log = nullptr});
    };
    { const Engine trains = on({.shard = 2}); }
    EXPECT_EQ(test::error_of([&] { on({.shard = 3}); }).code(), Errc::config);
  });
}

}  // namespace
}  // namespace rz
