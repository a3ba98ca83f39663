/// Updates that fail on some ranks fail on all, and the next ones are right.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "autograd_lite/models/gpt2.h"
#include "sharding/data/batch_sampler.h"
#include "sharding/engine/engine.h"
#include "sharding/strategy/strategy.h"
#include "tests/lab/training.h"
#include "tests/support/error_of.h"
#include "tests/support/folder.h"

namespace rz {
namespace {

constexpr int accumulation = 3;

/// Where a rank fails in a micro-batch.
enum class Moment { nowhere, before, loader, forward, backward, pass, after };

struct Injected : std::runtime_error {
  Injected() : std::runtime_error("injected") {}
};

const lab::MlpSizes sizes{.in = 5, .hidden = 7, .classes = 3, .dropout = 0.3, .samples = 70, .ignored = 4};

struct Net : lab::Mlp {
  Moment fails = Moment::nowhere;
  ModuleBuffer mean;
  explicit Net(bool with_buffer = false) : Mlp(sizes) {
    if (with_buffer) register_buffer(mean, "mean", {2});
  }
  nn::Loss operator()(Tape& t, const Batch& b) {
    Var hidden = drop(t, nn::gelu(t, fc1(t, b["x"])));
    if (fails == Moment::forward) throw Injected();
    if (fails == Moment::backward)
      hidden = t.record(t.value(hidden), {hidden}, [](Tape&, const Tensor&) { throw Injected(); });
    return nn::cross_entropy(t, fc2(t, hidden), b["y"]);
  }
};

struct Samples : Dataset {
  std::uint64_t size() const override { return all->size(); }
  std::vector<Field> fields() const override { return all->fields(); }
  void read(std::uint64_t i, BatchRows& to, std::size_t row) const override {
    if (*fails) throw Injected();
    all->read(i, to, row);
  }
  std::shared_ptr<const Dataset> all = lab::samples(sizes);
  std::shared_ptr<bool> fails = std::make_shared<bool>(false);
};

struct Case {
  int stage = 0;
  int updates = 200;
  bool buffer = false, train_batch = false, two_losses = false;
  double rate = 0.3;  ///< of updates that fail; the first one does
};

/// What happens in an update, the same on all ranks: some fail, and at least one does not.
struct Plan {
  Plan(const Case& c, int update, int ranks)
      : moments(static_cast<std::size_t>(ranks)), micro(moments.size()) {
    const auto draw = [&](const char* what, std::size_t rank) {
      return random_uniform(9, what, static_cast<std::uint64_t>(update) * 8 + rank);
    };
    if (update > 0 && draw("fails", 0) >= c.rate) return;
    const auto spared = static_cast<std::size_t>(draw("spared", 0) * ranks);
    for (std::size_t r = 0; r < moments.size(); ++r) {
      if (r == spared || draw("rank", r) > 0.7) continue;
      moments[r] = static_cast<Moment>(1 + static_cast<int>(draw("moment", r) * 6));
      micro[r] = static_cast<int>(draw("micro", r) * accumulation);
    }
  }
  bool fails(int rank) const {
    return rank >= 0 && moments[static_cast<std::size_t>(rank)] != Moment::nowhere;
  }
  bool fails() const {
    return std::ranges::any_of(moments, [](Moment m) { return m != Moment::nowhere; });
  }
  std::vector<Moment> moments;
  std::vector<int> micro;
};

class Rank {
 public:
  Rank(World& world, const Case& c)
      : world_(world),
        case_(c),
        net_(c.buffer),
        engine_(initialize(
            world, net_,
            {.config = concat(R"({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": )",
                              accumulation, R"(, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
                "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 50, "warmup_max_lr": 0.02}},
                "zero_optimization": {"stage": )",
                              c.stage, R"(, "stage3_param_persistence_threshold": 0}})"),
             .seed = 3,
             .log = nullptr})),
        loader_(engine_.loader(samples_, {.num_workers = 0})),
        whole_(engine_.loader(Samples(), {.num_workers = 0})) {}

  /// Those that fail, or without them.
  lab::Trace train(bool with_failures) {
    lab::Trace out;
    for (int u = 0; u < case_.updates; ++u) {
      const Plan plan(case_, u, world_.size());
      for (int m = 0; m < accumulation; ++m) whole_.next();
      if (!plan.fails())
        update(out);
      else if (with_failures)
        fail(plan, u);
      loader_.set_state(whole_.state());
    }
    out.values = lab::values_of(engine_, net_);
    return out;
  }

 private:
  void micro_batch(Moment fails) {
    if (fails == Moment::before) throw Injected();
    *samples_.fails = fails == Moment::loader;
    Batch& batch = loader_.next();
    net_.fails = fails;
    const nn::Loss first = net_(engine_.tape(), batch);
    if (fails == Moment::pass) throw Injected();
    engine_.backward(first);
    net_.fails = Moment::nowhere;
    if (case_.two_losses) engine_.backward(net_(engine_.tape(), batch));
    if (fails == Moment::after) throw Injected();
    engine_.step();
  }

  void whole_update(Moment fails, int micro) {
    int m = 0;
    *samples_.fails = fails == Moment::loader && micro == 0;
    engine_.train_batch(loader_, [&](Tape& t, const Batch& b) {
      const Moment here = m == micro ? fails : Moment::nowhere;
      if (here == Moment::before) throw Injected();
      net_.fails = here;
      const nn::Loss made = net_(t, b);
      if (here == Moment::pass || here == Moment::after) throw Injected();
      *samples_.fails = ++m == micro && fails == Moment::loader;
      return made;
    });
  }

  void run(Moment fails, int micro) {
    if (case_.train_batch) return whole_update(fails, micro);
    for (int m = 0; m < accumulation; ++m) micro_batch(m == micro ? fails : Moment::nowhere);
  }

  void update(lab::Trace& out) {
    const std::int64_t before = engine_.global_steps();
    run(Moment::nowhere, -1);
    ASSERT_EQ(engine_.global_steps(), before + 1);
    out.updates.push_back(lab::report_of(engine_));
  }

  void fail(const Plan& plan, int u) {
    const auto rank = static_cast<std::size_t>(world_.rank());
    const Moment own = plan.moments[rank];
    bool failed = false;
    try {
      run(own, plan.micro[rank]);
    } catch (const std::exception& e) {
      failed = true;
      const auto* const error = dynamic_cast<const Error*>(&e);
      if (error && error->code() == Errc::cancelled) {
        ASSERT_TRUE(plan.fails(error->culprit())) << e.what();
        EXPECT_NE(error->culprit(), world_.rank());
      } else {
        EXPECT_NE(own, Moment::nowhere) << e.what();
        if (own == Moment::backward) expect_refusal();
      }
      net_.fails = Moment::nowhere;
      *samples_.fails = false;
      engine_.cancel_update();
      expect_equal_positions();
    }
    EXPECT_TRUE(failed) << "update " << u;
  }

  /// Ranks may have taken different numbers of batches before.
  void expect_equal_positions() {
    const std::uint64_t own = loader_.state().batch;
    std::vector<std::uint64_t> all(static_cast<std::size_t>(world_.size()));
    world_.communicator().all_gather(ConstBuffer(&own, 1), Buffer(all.data(), all.size())).wait();
    EXPECT_EQ(std::ranges::count(all, own), std::ssize(all));
  }

  /// A pass that has failed must be cancelled.
  void expect_refusal() {
    if (case_.train_batch) return;
    EXPECT_EQ(test::error_of([&] { engine_.step(); }).code(), Errc::unsynchronised);
    const std::string what = test::error_of([&] { engine_.step(); }).what();
    EXPECT_NE(what.find("cancel_update()"), std::string::npos) << what;
  }

  World& world_;
  Case case_;
  Samples samples_;
  Net net_;
  Engine engine_;
  Loader loader_;
  Loader whole_;  ///< all batches of an update are taken, whether it fails or not
};

void expect_left_out(const Case& c, int ranks) {
  lab::world(ranks, [&](World& world) {
    SCOPED_TRACE(concat("stage ", c.stage, ", rank ", world.rank()));
    EXPECT_EQ(Rank(world, c).train(true), Rank(world, c).train(false));
  });
}

TEST(CancelledUpdates, AreLeftOutInEveryStage) {
  for (const int stage : {0, 1, 2, 3}) expect_left_out({.stage = stage}, 3);
}
TEST(CancelledUpdates, AreLeftOutWithBuffers) {
  for (const int stage : {0, 3}) expect_left_out({.stage = stage, .updates = 50, .buffer = true}, 2);
}
TEST(CancelledUpdates, AreLeftOutByTrainBatch) {
  for (const int stage : {1, 3}) expect_left_out({.stage = stage, .updates = 50, .train_batch = true}, 3);
}
TEST(CancelledUpdates, AreLeftOutWithSeveralLosses) {
  for (const int stage : {0, 2, 3}) expect_left_out({.stage = stage, .updates = 50, .two_losses = true}, 2);
}

/// Where each rank fails at another place, and none reaches the end: the samples that follow are the same
/// everywhere, and the batch that could not be read is left out.
TEST(CancelledUpdates, ContinueBehindTheLastBatchOfAnyRank) {
  for (const int ranks : {1, 3})
    lab::world(ranks, [&](World& world) {
      Net net;
      Engine engine = initialize(world, net,
                                 {.config = R"({"train_micro_batch_size_per_gpu": 2,
              "gradient_accumulation_steps": 9, "optimizer": {"type": "SGD"}})",
                                  .log = nullptr});
      const Samples samples;
      Loader loader = engine.loader(samples, {.num_workers = 0});
      for (int m = 0; m < 2 + world.rank(); ++m) {
        engine.backward(net(engine.tape(), loader.next()));
        engine.step();
      }
      *samples.fails = world.rank() == ranks - 1;
      if (*samples.fails) {
        EXPECT_THROW(loader.next(), std::exception);
      }
      *samples.fails = false;
      engine.cancel_update();
      EXPECT_EQ(loader.state(), (Loader::State{0, static_cast<std::uint64_t>(ranks + 2)}));
      EXPECT_TRUE(!engine.is_gradient_accumulation_boundary());
      for (int m = 0; m < 9; ++m) {
        engine.backward(net(engine.tape(), loader.next()));
        EXPECT_EQ(engine.step(), m == 8);
      }
    });
}

/// What the ranks that have not failed wait in.
enum class Wait { forward, step, loss, mean, evaluation, checkpoint, world, metrics };

TEST(CancelledUpdates, EndWhateverTheOthersWaitIn) {
  const test::Folder folder;
  for (const int stage : {0, 3})
    lab::world(2, [&](World& world) {
      Net net;
      Engine engine =
          initialize(world, net,
                     {.config = concat(R"({"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD"},
            "zero_optimization": {"stage": )",
                                       stage, R"(, "stage3_param_persistence_threshold": 0}})"),
                      .log = nullptr});
      Loader loader = engine.loader(Samples(), {.num_workers = 0});
      const auto update = [&] {
        engine.backward(net(engine.tape(), loader.next()));
        engine.step();
      };
      const auto wait = [&](Wait in) {
        switch (in) {
          case Wait::forward:
            for (;;) net(engine.tape(), loader.next()), world.wait_for_everyone();
          case Wait::step:
            return update();
          case Wait::loss:
            return void(engine.loss());
          case Wait::mean:
            return void(engine.mean(std::vector<Mean>{{1, 1}}));
          case Wait::evaluation:
            return engine.evaluate([&](Tape& t) {
              net(t, loader.next());
              world.wait_for_everyone();
            });
          case Wait::checkpoint:
            return engine.save_checkpoint(folder.path());
          case Wait::world:
            return world.wait_for_everyone();
          case Wait::metrics:
            return void(engine.gather_for_metrics(loader.next(), Tensor::zeros({2})));
        }
      };
      update();
      int culprit = 0;
      for (const Wait in : {Wait::forward, Wait::step, Wait::loss, Wait::mean, Wait::evaluation,
                            Wait::checkpoint, Wait::world, Wait::metrics}) {
        SCOPED_TRACE(concat("stage ", stage, ", wait ", static_cast<int>(in)));
        culprit = 1 - culprit;
        if (world.rank() != culprit) {
          const Error e = test::error_of([&] { wait(in); });
          EXPECT_EQ(e.code(), Errc::cancelled) << e.what();
          EXPECT_EQ(e.culprit(), culprit);
        }
        engine.cancel_update();
        const std::int64_t before = engine.global_steps();
        update();
        EXPECT_EQ(engine.global_steps(), before + 1);
      }
    });
}

/// The other ranks wait for the one that has failed before each micro-batch that is left. Rank 1 has fewer
/// batches than the others.
std::vector<float> train_joined(World& world, bool buffer, bool first_fails, bool with_failures) {
  Net net(buffer);
  Engine engine =
      initialize(world, net,
                 {.config = R"({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3,
          "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}, "ringzero": {"join": {"enable": true}}})",
                  .seed = 3,
                  .log = nullptr});
  const Samples samples;
  int update = 0, taken = 0;
  const int batches = world.rank() == 1 ? 14 : 21;
  const auto culprit = [&] { return update % 3; };
  // Update u fails at micro-batch u % 4 of its culprit: before next() if that is 3.
  const auto fails = [&] { return with_failures && (update > 0 ? update % 2 == 1 : first_fails); };
  const auto micro = [&] { return update / 2 % 4; };
  Engine::Join join(engine);
  bool more = true;
  while (more) {
    const bool here = fails() && culprit() == world.rank();
    const int begun = taken;
    try {
      for (int m = 0; m < accumulation; ++m) {
        if (here && micro() == 3 && m == 0) throw Injected();
        more = join.next(taken < batches);
        if (!more) break;
        if (here && m == micro()) throw Injected();
        if (join.active()) {
          Loader one(std::make_shared<Samples>(samples),
                     std::make_shared<DistributedBatchSampler>(
                         BatchSamplerOptions{.samples = 70, .batch_size = 2, .shuffle = false}),
                     engine.stream(), {.num_workers = 0});
          one.set_state({0, static_cast<std::uint64_t>(taken)});
          const Batch& b = one.next();
          engine.backward(net(engine.tape(), b));
          ++taken;
        } else {
          join.backward_without_data();
        }
        engine.step();
      }
      EXPECT_FALSE(fails() && more) << "update " << update;
    } catch (const Injected&) {
      engine.cancel_update();
      taken = begun;
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Errc::cancelled) << e.what();
      EXPECT_EQ(e.culprit(), culprit());
      engine.cancel_update();
      taken = begun;
    }
    ++update;
  }
  return lab::values_of(engine, net);
}

TEST(CancelledUpdates, AreLeftOutOfAJoin) {
  for (const bool buffer : {false, true})
    for (const bool first_fails : {false, true})
      lab::world(3, [&](World& world) {
        EXPECT_EQ(train_joined(world, buffer, first_fails, true),
                  train_joined(world, buffer, first_fails, false));
      });
}

// ---- of engines

using lab::batch;
using lab::options;
using lab::Trainer;
using lab::values_of;

TEST(FailedUpdates, ACancelledUpdateLeavesNothingBehind) {
  lab::world(2, [](World& world) {
    const auto run = [&](bool fails) {
      Trainer t(world, options(lab::config(2)));
      t.net.eval();
      for (int u = 0; u < 3; ++u) {
        if (fails && u == 1) {
          t.engine.backward(t.net(t.engine.tape(), batch(50)));
          t.engine.step();
          t.net(t.engine.tape(), batch(50));  // and then an error
          t.engine.cancel_update();
        }
        for (int m = 0; m < 3; ++m) t.pass();
      }
      return values_of(t.engine, t.net);
    };
    EXPECT_EQ(run(true), run(false));
  });
}

TEST(FailedUpdates, GradientsThatAreNotFiniteAreAnErrorInF32) {
  lab::world(2, [](World& world) {
    Trainer t(world, options(R"({"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "SGD"}})"));
    const std::vector<float> before = values_of(t.engine, t.net);
    const Batch b = batch(0);
    b["x"].data<float>()[0] = NAN;
    t.engine.backward(t.net(t.engine.tape(), b));
    EXPECT_EQ(test::error_of([&] { t.engine.step(); }).code(), Errc::diverged);
    EXPECT_TRUE(t.engine.report().skipped);
    EXPECT_EQ(values_of(t.engine, t.net), before);
    EXPECT_TRUE(t.pass());
    EXPECT_TRUE(std::isfinite(t.engine.report().grad_norm));
  });
}

/// Updates of a model in bf16 whose batch is not finite on the ranks that `bad` selects.
template <class Bad>
Error diverged_update(World& world, Trainer& t, const Bad& bad) {
  const Batch b = batch(0);
  if (bad(world.rank())) b["x"].data<float>()[0] = NAN;
  return test::error_of([&] {
    t.engine.backward(t.net(t.engine.tape(), b));
    t.engine.step();
  });
}

TEST(FailedUpdates, ALossThatIsNotFiniteIsAnErrorInEachPrecision) {
  lab::world(3, [](World& world) {
    for (const char* precision : {"", R"("bf16": {"enabled": true},)", R"("fp16": {"enabled": true},)"}) {
      Trainer t(world, options(concat(R"({"train_micro_batch_size_per_gpu": 4, )", precision,
                                      R"("optimizer": {"type": "SGD"}})")));
      const std::vector<float> before = values_of(t.engine, t.net);
      const Error one = diverged_update(world, t, [](int rank) { return rank == 1; });
      EXPECT_EQ(one.code(), Errc::diverged);
      EXPECT_EQ(one.culprit(), 1);
      EXPECT_NE(std::string(one.what())
                    .find("update 0: the loss of rank 1 is not finite, and the parameters are as before"),
                std::string::npos)
          << one.what();
      const Error two = diverged_update(world, t, [](int rank) { return rank != 1; });
      EXPECT_EQ(two.culprit(), -1);
      EXPECT_NE(std::string(two.what()).find("the losses of ranks 0, 2 are not finite"), std::string::npos)
          << two.what();
      const Error all = diverged_update(world, t, [](int) { return true; });
      EXPECT_NE(std::string(all.what()).find("update 2: the loss is not finite"), std::string::npos)
          << all.what();
      EXPECT_EQ(values_of(t.engine, t.net), before);
      EXPECT_EQ(t.engine.report().skipped_steps, 3);
    }
  });
}

/// A constant in a loss has no gradient.
TEST(FailedUpdates, ALossThatIsNotFiniteEndsARunWhoseGradientsAreFinite) {
  lab::world(3, [](World& world) {
    for (const int stage : {0, 1, 2, 3})
      for (const char* precision : {"", R"("bf16": {"enabled": true},)", R"("fp16": {"enabled": true},)"})
        for (const float bad : {NAN, INFINITY}) {
          lab::Mlp net;
          auto engine = initialize(
              world, net,
              options(concat(R"({"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, )",
                             precision, R"("zero_optimization": {"stage": )", stage,
                             R"(}, "optimizer": {"type": "SGD"}})")));
          const std::vector<float> before = values_of(engine, net);
          const auto update = [&](float constant) {
            for (int m = 0; m < 2; ++m) {
              Tape& t = engine.tape();
              Tensor value = Tensor::zeros({});
              *value.data<float>() = m == 0 && world.rank() == 1 ? constant : 1;
              engine.backward(net(t, batch(0)) + t.constant(value));
              engine.step();
            }
          };
          const Error e = test::error_of([&] { update(bad); });
          EXPECT_EQ(e.code(), Errc::diverged);
          EXPECT_EQ(e.culprit(), 1);
          EXPECT_NE(std::string(e.what()).find("the loss of rank 1 is not finite"), std::string::npos)
              << e.what();
          EXPECT_EQ(values_of(engine, net), before);
          update(1);
          EXPECT_FALSE(engine.report().skipped);
          EXPECT_TRUE(std::isfinite(engine.report().grad_norm));
        }
  });
}

TEST(FailedUpdates, SkippedUpdatesInARowAreAnError) {
  lab::world(2, [](World& world) {
    lab::Mlp net;
    auto engine = initialize(world, net, options(R"({"train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": true}, "optimizer": {"type": "SGD"}, "ringzero": {"max_skipped_updates": 3}})"));
    const auto update = [&](double factor) {
      engine.backward(factor * net(engine.tape(), batch(0)));
      engine.step();
    };
    const double huge = 1e200;  // beyond f32, in which gradients are; the loss is a finite f64
    for (int i = 0; i < 2; ++i) update(huge);
    EXPECT_EQ(engine.report().skipped_steps, 2);
    update(1);
    EXPECT_FALSE(engine.report().skipped);
    for (int i = 0; i < 2; ++i) update(huge);
    const Error e = test::error_of([&] { update(huge); });
    EXPECT_EQ(e.code(), Errc::diverged);
    EXPECT_EQ(e.culprit(), -1);
    EXPECT_NE(std::string(e.what()).find("not finite in 3 updates in a row (ringzero.max_skipped_updates)"),
              std::string::npos)
        << e.what();
  });
}

TEST(FailedUpdates, AnOverflowInF16SkipsTheStepAndLowersTheScale) {
  lab::world(2, [](World& world) {
    Trainer t(world, options(R"({"train_micro_batch_size_per_gpu": 4,
        "fp16": {"enabled": true, "initial_scale_power": 30, "hysteresis": 1},
        "optimizer": {"type": "SGD"}})"));
    Engine& engine = t.engine;
    const std::vector<float> before = values_of(engine, t.net);
    EXPECT_TRUE(t.pass());
    EXPECT_TRUE(engine.report().skipped);
    EXPECT_EQ(engine.report().loss_scale, 0x1p30);
    EXPECT_EQ(engine.report().skipped_steps, 1);
    EXPECT_EQ(values_of(engine, t.net), before);
    for (int u = 0; u < 20 && engine.report().skipped; ++u) t.pass();
    EXPECT_FALSE(engine.report().skipped);
    EXPECT_LT(engine.report().loss_scale, 0x1p30);
  });
}

// ---- ranks that share layers

/// A language model on a mesh of four ranks. Updates have two micro-batches, of which the second fails.
class SharedLayers {
 public:
  SharedLayers(World& world, const MeshSizes& mesh, int stage)
      : model_(config()),
        engine_(initialize(world, model_,
                           {.config = concat(R"({"train_micro_batch_size_per_gpu": 2,
              "gradient_accumulation_steps": 2, "gradient_clipping": 0.5,
              "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}, "zero_optimization": {"stage": )",
                                             stage, R"(, "stage3_param_persistence_threshold": 0}})"),
                            .mesh = mesh,
                            .seed = 3,
                            .log = nullptr})) {}

  void update(Moment fails = Moment::nowhere) {
    for (int micro = 0; micro < 2; ++micro) {
      const Moment here = micro == 1 ? fails : Moment::nowhere;
      if (here == Moment::before) throw Injected();
      const nn::Loss loss = model_.forward(engine_.tape(), tokens(micro, 0), tokens(micro, 1)).loss;
      if (here == Moment::pass) throw Injected();
      engine_.backward(loss);
      if (here == Moment::after) throw Injected();
      engine_.step();
    }
  }
  /// The loss of the next update, and all values.
  std::pair<double, std::vector<float>> next() {
    update();
    return {engine_.loss(), lab::values_of(engine_, model_)};
  }
  Engine& engine() { return engine_; }

 private:
  static Gpt2Config config() {
    Gpt2Config c;
    c.n_layer = 2, c.n_head = 2, c.n_embd = 16, c.n_positions = 8, c.vocab_size = 11;
    c.embd_pdrop = c.attn_pdrop = c.resid_pdrop = 0.1;
    return c;
  }
  Tensor tokens(int micro, int shift) {
    const Tensor t = Tensor::empty({2, 8}, DType::i32);
    const auto sample = 4 * engine_.global_steps() + 2 * engine_.mesh().data().rank() + micro;
    for (int i = 0; i < 16; ++i)
      t.data<std::int32_t>()[i] = static_cast<std::int32_t>((sample * 5 + i * i + shift) % 11);
    return t;
  }

  Gpt2 model_;
  Engine engine_;
};

TEST(CancelledUpdates, AreLeftOutByRanksThatShareLayers) {
  struct Failure {
    Moment moment;
    std::vector<int> ranks;
  };
  // The batch of ranks 2 and 3 cannot be used; rank 1 fails alone, where others wait for it in a layer, and
  // behind its last one.
  const std::vector<Failure> failures{
      {Moment::before, {2, 3}}, {Moment::before, {1}}, {Moment::pass, {2, 3}}, {Moment::after, {1}}};
  for (const auto& [mesh, stage] :
       {std::pair(MeshSizes{1, 2, 2}, 0), std::pair(MeshSizes{1, 2, 2}, 3), std::pair(MeshSizes{2, 1, 2}, 1)})
    lab::world(4, [&, mesh = mesh, stage = stage](World& world) {
      SCOPED_TRACE(concat(describe(mesh), ", stage ", stage));
      SharedLayers without(world, mesh, stage), with(world, mesh, stage);
      for (const Failure& f : failures) {
        EXPECT_EQ(with.next(), without.next());
        const bool fails = std::ranges::find(f.ranks, world.rank()) != f.ranks.end();
        try {
          with.update(fails ? f.moment : Moment::nowhere);
          ADD_FAILURE() << "nothing was thrown";
        } catch (const Injected&) {
          EXPECT_TRUE(fails);
        } catch (const Error& e) {
          EXPECT_EQ(e.code(), Errc::cancelled) << e.what();
          EXPECT_NE(std::ranges::find(f.ranks, e.culprit()), f.ranks.end()) << e.what();
        }
        with.engine().cancel_update();
      }
      EXPECT_EQ(with.next(), without.next());
    });
}

}  // namespace
}  // namespace rz
