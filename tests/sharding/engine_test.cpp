/// The engine against loops by hand: the same bits, whatever drives the strategy.
#include "sharding/engine/engine.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "autograd_lite/nn/containers.h"
#include "autograd_lite/nn/init.h"
#include "autograd_lite/nn/layers.h"
#include "sharding/engine/reports/comms_logger.h"
#include "sharding/engine/reports/step_monitor.h"
#include "sharding/engine/reports/update_losses.h"
#include "sharding/optim/optimizers.h"
#include "sharding/strategy/strategy.h"
#include "tests/support/engine.h"
#include "tests/support/error_of.h"

namespace rz {
namespace {

using test::engine::Batch;
using test::engine::batch;
using test::engine::Batches;
using test::engine::classes;
using test::engine::config;
using test::engine::in;
using test::engine::in_world;
using test::engine::Net;
using test::engine::options;
using test::engine::values_of;

struct Trained {
  std::vector<double> losses, norms, rates;
  std::vector<float> values;
  bool operator==(const Trained&) const = default;
};

constexpr int updates = 8;
void record(Engine& engine, Trained& out) {
  out.losses.push_back(engine.loss());
  out.norms.push_back(engine.report().grad_norm);
  out.rates.push_back(engine.report().lr);
}

Trained by_steps(World& world, const std::string& config) {
  Net net;
  auto engine = initialize(world, net, options(config));
  Batches batches{world.rank(), world.size(), 4};
  Trained out;
  while (engine.global_steps() < updates) {
    const Batch& b = batches.next();
    Tape& t = engine.tape();
    engine.backward(nn::cross_entropy(t, net(t, b.x), b.y));
    if (engine.step()) record(engine, out);
  }
  out.values = values_of(engine.strategy(), net);
  return out;
}

Trained by_train_batch(World& world, const std::string& config) {
  Net net;
  auto engine = initialize(world, net, options(config));
  Batches batches{world.rank(), world.size(), 4};
  batches.live.resize(1);  // every batch is in the same memory
  Trained out;
  for (int u = 0; u < updates; ++u) {
    engine.train_batch(batches,
                       [&](Tape& t, const Batch& b) { return nn::cross_entropy(t, net(t, b.x), b.y); });
    record(engine, out);
  }
  out.values = values_of(engine.strategy(), net);
  return out;
}

/// What the configuration above describes, without an engine.
Trained by_hand(World& world, StrategyKind kind) {
  Net net;
  Communicator comm = world.new_communicator();
  const auto strategy = make_strategy(kind, net, comm, {.gathers = {.param_persistence_threshold = 0}});
  strategy->values().fill([](const Parameter& p, Range elements, float* out) {
    init_slice(p, {out, elements.count()}, elements.begin, 7);
  });
  Tape tape(Stream::host(world.threads()));
  strategy->attach(tape);
  const auto adamw = make_adamw({.learning_rate = 0.02, .weight_decay = 0.1});
  const LrSchedule schedule = WarmupDecayLr{.total_num_steps = 12, .max_lr = 0.02, .num_steps = 4};
  Batches batches{world.rank(), world.size(), 4};
  Trained out;
  for (int u = 0; u < updates; ++u) {
    strategy->zero_grad();
    adamw->set_learning_rate(learning_rate(schedule, adamw->updates(), {.base_lr = 0.02}));
    std::vector<Mean> losses;
    for (std::uint64_t m = 0; m < 3; ++m) {
      const Batch& b = batches.next();
      const auto ranks = static_cast<std::uint64_t>(world.size());
      const std::uint64_t pass = static_cast<std::uint64_t>(u) * 3 + m;
      tape.seed(7 ^ (pass * ranks + static_cast<std::uint64_t>(world.rank()) + 1) * 0x9e3779b97f4a7c15u);
      const nn::Loss loss = nn::cross_entropy(tape, net(tape, b.x), b.y);
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
    out.losses.push_back(exact_mean(losses, world.communicator()));
    out.norms.push_back(strategy->outcome(*adamw).norm);
    out.rates.push_back(adamw->learning_rate());
  }
  out.values = values_of(*strategy, net);
  return out;
}

TEST(Engine, HasTheBitsOfALoopByHandInEveryStage) {
  for (const int ranks : {1, 2, 3})
    in_world(ranks, [](World& world) {
      const Trained expected = by_hand(world, StrategyKind::ddp);
      for (int stage = 0; stage < 4; ++stage) {
        EXPECT_TRUE(by_steps(world, config(stage)) == expected) << "stage " << stage << " pass by pass";
        EXPECT_TRUE(by_train_batch(world, config(stage)) == expected) << "stage " << stage << " by update";
      }
      EXPECT_TRUE(by_hand(world, StrategyKind::zero3) == expected);
    });
}

/// Gradients of several losses of one micro-batch add up.
TEST(Engine, SeveralLossesBeforeAStepAddUp) {
  in_world(2, [](World& world) {
    const auto run = [&](bool apart, int stage) {
      Net net;
      auto engine = initialize(world, net, options(config(stage)));
      net.eval();  // without dropout both ways compute the same
      for (std::uint64_t m = 0; m < 6; ++m) {
        Tape& t = engine.tape();
        const Batch a = batch(m * 4 + static_cast<std::uint64_t>(world.rank()), 4);
        const auto mse = [&] {
          const Tensor zero = Tensor::zeros({4, classes});
          return nn::mse(t, net(t, a.x), zero);
        };
        if (apart) {
          engine.backward(mse());
          engine.backward(mse());
        } else {
          engine.backward(nn::mul(t, mse(), 2));
        }
        engine.step();
      }
      return std::pair(engine.report().grad_norm, values_of(engine.strategy(), net));
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
    in_world(3, [&](World& world) {
      Net net;
      auto engine = initialize(world, net, options(config(0)));
      auto loader = engine.loader(Numbers(samples), {.num_workers = 2});
      std::vector<int> seen(samples);
      for (const rz::Batch& b : loader) {
        const Tensor all = engine.gather_for_metrics(b, b["number"]);
        for (std::size_t i = 0; i < all.count(); ++i)
          ++seen[static_cast<std::size_t>(all.data<std::int32_t>()[i])];
      }
      EXPECT_EQ(seen, std::vector<int>(samples, 1)) << samples << " samples on rank " << world.rank();
    });
}

TEST(Engine, RowsThatDoNotFitTheBatchOfARankAreAnErrorOnAll) {
  in_world(3, [](World& world) {
    Net net;
    auto engine = initialize(world, net, options(config(0)));
    auto loader = engine.loader(Numbers(24)), smaller = engine.loader(Numbers(24), {.batch_size = 3});
    const rz::Batch& b = loader.next();
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
  in_world(2, [](World& world) {
    Net net;
    auto engine = initialize(world, net, options(config(0, R"(, "dataloader_drop_last": true)")));
    EXPECT_EQ(engine.loader(Numbers(35)).size(), 4u);  // ⌊17 / 4⌋
    EXPECT_EQ(engine.loader(Numbers(35), {.drop_last = false}).size(), 5u);
    EXPECT_EQ(engine.loader(Numbers(35)).next().rows(), 4u);
    EXPECT_EQ(engine.loader(Numbers(35), {.batch_size = 7}).next().rows(), 7u);
    Net frozen;
    auto inference = initialize(world, frozen, options(""));
    EXPECT_EQ(test::error_of([&] { inference.loader(Numbers(35)); }).code(), Errc::config);
  });
}

/// A loop that was left by break: an evaluation begins again, training goes on.
TEST(Engine, LoadersInOrderBeginAgainAfterABreak) {
  in_world(2, [](World& world) {
    Net net;
    auto engine = initialize(world, net, options(config(0)));
    const auto two = [](Loader& loader) {
      std::vector<std::uint64_t> all;
      for (const rz::Batch& b : loader) {
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

std::string text_of(const std::filesystem::path& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

TEST(Engine, ReportsUpdatesAsTheConfigurationAsks) {
  const auto folder = std::filesystem::temp_directory_path() / concat("rz-engine-", ::getpid());
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> log(std::tmpfile(), std::fclose);
  std::vector<double> losses;
  in_world(2, [&](World& world) {
    Net net;
    EngineOptions o = options(config(1, concat(R"(, "steps_per_print": 3, "wall_clock_breakdown": true,
        "memory_breakdown": true, "csv_monitor": {"enabled": true, "job_name": "job", "output_path": ")",
                                               folder.string(), "\"}")));
    o.log = log.get();
    o.name = "net";
    auto engine = initialize(world, net, std::move(o));
    Batches batches{world.rank(), world.size(), 4};
    for (int u = 0; u < 7; ++u) {
      engine.train_batch(batches,
                         [&](Tape& t, const Batch& b) { return nn::cross_entropy(t, net(t, b.x), b.y); });
      const double loss = engine.loss();
      EXPECT_EQ(engine.breakdown().empty(), !world.is_main() || u % 3 != 2) << u;
      if (world.is_main()) losses.push_back(loss);
    }
    engine.add_scalar("Eval/accuracy", 0.25);
  });
  std::rewind(log.get());
  std::string printed(100'000, '\0');
  printed.resize(std::fread(printed.data(), 1, printed.size(), log.get()));
  std::vector<std::string> steps;
  std::istringstream lines(printed);
  for (std::string line; std::getline(lines, line);)
    if (line.starts_with("net: ")) steps.push_back(line);
  ASSERT_EQ(steps.size(), 6u) << printed;
  for (std::size_t i = 0; i < 2; ++i) {
    char start[80];
    std::snprintf(start, sizeof start, "net: step %zu: loss %.4f, lr ", 3 * (i + 1), losses[3 * i + 2]);
    EXPECT_TRUE(steps[3 * i].starts_with(start)) << steps[3 * i] << "\nis not\n" << start;
    EXPECT_NE(steps[3 * i + 1].find("time (ms) | fwd: "), std::string::npos) << steps[3 * i + 1];
    EXPECT_NE(steps[3 * i + 1].find(" | bwd_allreduce: "), std::string::npos) << steps[3 * i + 1];
    EXPECT_NE(steps[3 * i + 2].find("parameters"), std::string::npos) << steps[3 * i + 2];
  }
  std::string expected = "step,train_loss\n";
  for (std::size_t u = 0; u < losses.size(); ++u) {
    char line[80];
    std::snprintf(line, sizeof line, "%zu,%.17g\n", (u + 1) * 24, losses[u]);
    expected += line;
  }
  EXPECT_EQ(text_of(folder / "job/Train_Samples_train_loss.csv"), expected);
  EXPECT_EQ(text_of(folder / "job/Eval_accuracy.csv"), "step,accuracy\n168,0.25\n");
  EXPECT_NE(text_of(folder / "job/Train_Samples_elapsed_time_ms_step.csv").find("\n144,"), std::string::npos);
  const std::string rates = text_of(folder / "job/Train_Samples_lr.csv");
  EXPECT_TRUE(rates.starts_with("step,lr\n24,"));
  EXPECT_NE(rates.find("\n48,"), std::string::npos);
  CsvMonitor resumed(folder.string(), "job");
  for (const std::int64_t samples : {48, 72}) resumed.write({"Train/Samples/lr", 0.5}, samples);
  EXPECT_EQ(text_of(folder / "job/Train_Samples_lr.csv"),
            rates.substr(0, rates.find("48,")) + "48,0.5\n72,0.5\n")
      << "a run that is resumed replaces the lines that it writes again";
  std::filesystem::remove_all(folder);
}

/// A second reduction would wait for the other rank.
TEST(Engine, TheLossOfAnUpdateIsReducedOnceForAllReports) {
  const auto folder = std::filesystem::temp_directory_path() / concat("rz-loss-", ::getpid());
  in_world(2, [&](World& world) {
    Net net;
    auto engine = initialize(
        world, net,
        options(config(
            0, concat(R"(, "csv_monitor": {"enabled": true, "output_path": ")", folder.string(), R"("})"))));
    Batches batches{world.rank(), world.size(), 4};
    const auto forward = [&](Tape& t, const Batch& b) { return nn::cross_entropy(t, net(t, b.x), b.y); };
    for (int u = 0; u < 2; ++u) {
      engine.train_batch(batches, forward);
      if (world.is_main()) EXPECT_GT(engine.loss(), 0);
    }
    const double first = engine.loss();
    engine.backward(forward(engine.tape(), batches.next()));
    EXPECT_NE(engine.loss(), first) << "of the update in progress";
    engine.cancel_update();
    world.wait_for_everyone();
  });
  std::filesystem::remove_all(folder);
}

/// RFC 3720, appendix B.4.
TEST(Engine, ChecksumsOfEventFilesAreThoseOfTheStandard) {
  const auto masked = [](std::uint32_t crc) { return (crc >> 15 | crc << 17) + 0xa282ead8u; };
  EXPECT_EQ(masked_crc32c(std::string(32, '\0')), masked(0x8a9136aa));
  EXPECT_EQ(masked_crc32c(std::string(32, '\xff')), masked(0x62a8ab43));
  EXPECT_EQ(masked_crc32c("123456789"), masked(0xe3069283));
}

/// Awaited at once, so that nothing is exposed beside it, and counted as Traffic counts.
TEST(Engine, TheCommsLoggerCountsWhatTheStrategySends) {
  for (const int stage : {0, 3})
    in_world(2, [&](World& world) {
      const auto train = [&](const char* section) {
        Net net;
        auto engine = initialize(world, net, options(config(stage, section)));
        Batches batches{world.rank(), world.size(), 4};
        for (int u = 0; u < 3; ++u)
          engine.train_batch(batches,
                             [&](Tape& t, const Batch& b) { return nn::cross_entropy(t, net(t, b.x), b.y); });
        return std::tuple(engine.log_summary(), engine.loss(), engine.strategy().traffic().total());
      };
      const auto [none, loss, traffic] = train("");
      EXPECT_EQ(none, "");
      const auto [table, measured_loss, measured] = train(R"(, "comms_logger": {"enabled": true})");
      EXPECT_EQ(measured_loss, loss);
      EXPECT_EQ(measured, traffic);
      std::uint64_t calls = 0;
      std::istringstream lines(table);
      for (std::string line; std::getline(lines, line);)
        if (line.starts_with(' ')) {
          std::string size, unit;
          std::uint64_t count = 0;
          double total = 0, mean = 0, algorithm = 0, bus = 0;
          std::istringstream(line) >> size >> unit >> count >> total >> mean >> algorithm >> bus;
          EXPECT_GT(total, 0) << line;  // a bandwidth may round to 0 on a busy machine
          calls += count;
        }
      EXPECT_EQ(calls, traffic.all_reduce.calls + traffic.reduce_scatter.calls + traffic.all_gather.calls)
          << table;
      const auto [some, same_loss, same] = train(
          R"(, "comms_logger": {"enabled": true, "prof_all": false, "prof_ops": ["all_gather_into_tensor"]})");
      EXPECT_EQ(some.find("reduce"), std::string::npos) << some;
      EXPECT_EQ(some.find("all_gather") != std::string::npos, stage == 3) << some;
    });
}

/// nccl-tests: doc/PERFORMANCE.md.
TEST(Engine, BandwidthsAreThoseOfNcclTests) {
  const auto bus = [](Collective kind) { return bandwidth(kind, 1000, 1, 4).bus; };
  EXPECT_EQ(bandwidth(Collective::all_reduce, 1000, 0.5, 4).algorithm, 2000);
  EXPECT_EQ(bus(Collective::all_reduce), 1500);
  EXPECT_EQ(bus(Collective::reduce_scatter), 750);
  EXPECT_EQ(bus(Collective::all_gather), 750);
  EXPECT_EQ(bus(Collective::broadcast), 1000);
}

std::string single_spaced(const std::string& text) {
  std::string out;
  for (const char c : text)
    if (c != ' ' || !out.ends_with(' ')) out += c;
  return out;
}

/// By pass and by update alike. Net: 6 · 16 and 16 · 5 weights, 3 micro-batches of 4 rows; the gradient of
/// its input is not computed.
TEST(Engine, TheFlopsProfilerCountsOneUpdate) {
  const auto file = std::filesystem::temp_directory_path() / concat("rz-flops-", ::getpid());
  for (const bool by_pass : {false, true})
    in_world(2, [&](World& world) {
      const auto train = [&](const std::string& section, std::vector<std::string>* reports) {
        Net net;
        auto engine = initialize(world, net, options(config(3, section)));
        Batches batches{world.rank(), world.size(), 4};
        const auto forward = [&](Tape& t, const Batch& b) { return nn::cross_entropy(t, net(t, b.x), b.y); };
        while (engine.global_steps() < 4) {
          engine.evaluate([&](Tape& t) { return engine.item(forward(t, batch(1, 4))); });
          const std::int64_t before = engine.global_steps();
          if (!by_pass) engine.train_batch(batches, forward);
          while (by_pass && engine.global_steps() == before) {
            engine.backward(forward(engine.tape(), batches.next()));
            engine.step();
          }
          if (reports) reports->push_back(engine.breakdown());
        }
        return engine.loss();
      };
      std::vector<std::string> reports;
      const double loss = train("", nullptr);
      EXPECT_EQ(train(R"(, "flops_profiler": {"enabled": true, "profile_step": 2})", &reports), loss);
      for (const std::size_t u : {0, 1, 3}) EXPECT_EQ(reports[u], "");
      const std::string report = single_spaced(reports[2]);
      EXPECT_EQ(report.empty(), !world.is_main());
      const auto has = [&](const std::string& text) {
        if (world.is_main()) EXPECT_NE(report.find(text), std::string::npos) << text << " in\n" << report;
      };
      has("flops profiler: update 3 on rank 0 of 2, micro-batches: 3, parameters: 197\n");
      has("forward 2.11 K 4.22 K");   // 12 · (96 + 80)
      has("backward 3.07 K 6.14 K");  // 12 · (96 + 2 · 80)
      has("update 5.18 K 10.37 K");
      has("top of depth 0: MACs: model 5.18 K; parameters: model 197;");
      has("top of depth 1: MACs: fc2 2.88 K; parameters: fc1 112;");
      has(" fc2 85 960 1.92 K 55.6%");
      const std::string keys =
          R"(, "flops_profiler": {"enabled": true, "module_depth": 0, "detailed": false, "output_file": ")";
      EXPECT_EQ(train(concat(keys, file.string(), R"("})"), nullptr), loss);
      if (!world.is_main()) return;
      const std::string written = text_of(file);
      EXPECT_NE(written.find("update 2 on rank 0"), std::string::npos) << "the default";
      EXPECT_EQ(written.find("fc2"), std::string::npos);
      std::filesystem::remove(file);
    });
}

/// Of updates 2 and 3, of both ranks.
TEST(Engine, ATraceHasThePhasesAndTheCollectivesOfAllRanks) {
  const auto file = std::filesystem::temp_directory_path() / concat("rz-trace-", ::getpid(), ".json");
  in_world(2, [&](World& world) {
    Net net;
    auto engine = initialize(world, net,
                             options(config(3, concat(R"(, "ringzero": {"trace": {"path": ")", file.string(),
                                                      R"(", "first_step": 2, "steps": 2}})"))));
    Batches batches{world.rank(), world.size(), 4};
    for (int u = 0; u < 4; ++u) {
      engine.train_batch(batches,
                         [&](Tape& t, const Batch& b) { return nn::cross_entropy(t, net(t, b.x), b.y); });
      if (world.is_main()) EXPECT_EQ(std::filesystem::file_size(file) > 0, u >= 2) << "emptied at the start";
    }
  });
  const std::string text = text_of(file);
  std::filesystem::remove(file);
  const auto count = [&](const std::string& part) {
    int n = 0;
    for (std::size_t at = text.find(part); at != text.npos; at = text.find(part, at + 1)) ++n;
    return n;
  };
  for (const int rank : {0, 1}) {
    const auto spans = [&](const char* name, const char* category) {
      return count(concat(R"("name":")", name, R"(","cat":")", category, R"(","ph":"X","pid":)", rank, ","));
    };
    EXPECT_EQ(spans("update 2", "computation"), 1);
    EXPECT_EQ(spans("update 3", "computation"), 1);
    for (const char* phase : {"reduction", "step"}) EXPECT_EQ(spans(phase, "computation"), 2) << phase;
    EXPECT_EQ(spans("forward", "computation"), spans("backward", "computation"));
    EXPECT_GE(spans("reduce_scatter", "communication"), 2);
    EXPECT_GE(spans("all_gather", "communication"), 2);
  }
  EXPECT_EQ(count("\"update "), 4);
  EXPECT_GT(count("\"memory\""), 0);
}

struct Blocks : Module {
  struct Block : Module {
    Block(Module& parent, const std::string& name) : Module(parent, name) { one_scope(); }
    Var operator()(Tape& t, Var x) {
      ++calls;
      return nn::add(t, x, drop(t, nn::tanh(t, fc(t, x))));
    }
    nn::Linear fc{*this, "fc", in, in};
    nn::Dropout drop{*this, "drop", 0.2};
    int calls = 0;
  };
  Blocks() {
    layers.append<nn::Linear>(in, in).append<Block>().append<Block>().append<nn::Linear>(in, classes);
  }
  Var operator()(Tape& t, const Tensor& x) { return layers(t, t.constant(x)); }
  int calls() { return static_cast<Block&>(layers[1]).calls; }
  nn::Sequential layers{*this, "layers"};
};

TEST(Engine, ActivationCheckpointingRunsBlocksTwiceWithTheSameBits) {
  in_world(2, [](World& world) {
    for (const int stage : {0, 3}) {
      const auto run = [&](const char* checkpointing) {
        Blocks net;
        auto engine = initialize(world, net, options(config(stage, checkpointing)));
        Batches batches{world.rank(), world.size(), 4};
        Trained out;
        for (int u = 0; u < 3; ++u) {
          engine.train_batch(batches,
                             [&](Tape& t, const Batch& b) { return nn::cross_entropy(t, net(t, b.x), b.y); });
          record(engine, out);
        }
        out.values = values_of(engine.strategy(), net);
        return std::pair(out, net.calls());
      };
      const auto [plain, calls] = run("");
      const auto [recomputed, calls_again] =
          run(R"(, "activation_checkpointing": {"number_checkpoints": 2})");
      EXPECT_TRUE(recomputed == plain) << "stage " << stage;
      EXPECT_EQ(calls, 9);
      EXPECT_EQ(calls_again, 18);
    }
  });
}

TEST(Engine, AFolderThatCannotBeMadeIsAnErrorOnAllRanks) {
  in_world(2, [&](World& world) {
    Net net;
    const Error e = test::error_of([&] {
      initialize(world, net, options(config(0, R"(, "csv_monitor": {"enabled": true,
          "output_path": "/proc/none"})")));
    });
    EXPECT_EQ(e.code(), Errc::io);
    EXPECT_EQ(e.culprit(), 0);
  });
}

TEST(Engine, AStepInsideNoSyncIsAnErrorThatNamesIt) {
  in_world(2, [](World& world) {
    Net net;
    auto engine = initialize(world, net, options(config(1)));
    const Engine::NoSync no_sync(engine);
    const Batch b = batch(0, 4);
    engine.backward(nn::cross_entropy(engine.tape(), net(engine.tape(), b.x), b.y));
    const Error e = test::error_of([&] { engine.step(); });
    EXPECT_EQ(e.code(), Errc::unsynchronised);
    EXPECT_NE(std::string(e.what()).find("step() inside NoSync"), std::string::npos) << e.what();
  });
}

TEST(Engine, AnUpdateOfTrainBatchInsideNoSyncIsAnErrorThatNamesIt) {
  in_world(2, [](World& world) {
    Net net;
    auto engine = initialize(world, net, options(config(1)));
    struct {
      Batch& next() { return b; }
      Batch b = batch(0, 4);
    } batches;
    const auto forward = [&](Tape& t, Batch& b) { return nn::cross_entropy(t, net(t, b.x), b.y); };
    {
      const Engine::NoSync no_sync(engine);
      const Error e = test::error_of([&] { engine.train_batch(batches, forward); });
      EXPECT_EQ(e.code(), Errc::unsynchronised);
      EXPECT_NE(std::string(e.what()).find("train_batch() inside NoSync"), std::string::npos) << e.what();
    }
    engine.train_batch(batches, forward);
    EXPECT_EQ(engine.global_steps(), 1);
  });
}

TEST(Engine, AnUpdateWhoseLastPassDidNotSynchroniseIsAnError) {
  in_world(2, [](World& world) {
    Net net;
    auto engine = initialize(world, net, options(config(0)));
    for (int m = 0; m < 3; ++m) {
      const Batch b = batch(0, 4);
      {
        const Engine::NoSync no_sync(engine);
        engine.backward(nn::cross_entropy(engine.tape(), net(engine.tape(), b.x), b.y));
      }
      if (m < 2)
        engine.step();
      else
        EXPECT_EQ(test::error_of([&] { engine.step(); }).code(), Errc::unsynchronised);
    }
  });
}

TEST(Engine, AForcedBoundaryEndsAnUpdateEarlierOrLater) {
  in_world(2, [](World& world) {
    Net net;
    auto engine = initialize(world, net, options(config(1)));  // three micro-batches per update
    std::vector<bool> boundaries, updated;
    const auto pass = [&](std::optional<bool> boundary) {
      engine.set_gradient_accumulation_boundary(boundary);
      const Batch b = batch(updated.size(), 4);
      engine.backward(nn::cross_entropy(engine.tape(), net(engine.tape(), b.x), b.y));
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
  in_world(1, [](World& world) {
    Net net;
    auto engine = initialize(world, net, options(config(0)));
    EXPECT_EQ(test::error_of([&] { engine.step(); }).code(), Errc::invalid_argument);
  });
}

TEST(Engine, WithoutAnOptimizerItRunsInferenceOnly) {
  in_world(2, [](World& world) {
    Net trained, net;
    auto student = initialize(world, trained, options(config(0)));
    auto teacher = initialize(world, net, options(R"({"zero_optimization": {"stage": 3,
        "stage3_param_persistence_threshold": 0}})"));
    const Batch b = batch(1, 4);
    const Tensor expected = student.evaluate([&](Tape& t) { return t.value(trained(t, b.x)); });
    const Tensor logits = teacher.evaluate([&](Tape& t) { return t.value(net(t, b.x)); });
    for (std::size_t i = 0; i < logits.count(); ++i)
      EXPECT_EQ(logits.data<float>()[i], expected.data<float>()[i]);
    EXPECT_EQ(teacher.strategy().memory().gradients, 0u);
    EXPECT_EQ(teacher.strategy().memory().optimizer_state, 0u);
    const Error e = test::error_of(
        [&] { teacher.backward(nn::cross_entropy(teacher.tape(), net(teacher.tape(), b.x), b.y)); });
    EXPECT_EQ(e.code(), Errc::invalid_argument);
  });
}

TEST(Engine, EvaluationUsesNoDropoutAndLeavesTrainingAsItWas) {
  in_world(1, [](World& world) {
    const auto run = [&](bool evaluate) {
      Net net;
      auto engine = initialize(world, net, options(config(0)));
      Batches batches{0, 1, 4};
      std::vector<double> losses;
      while (engine.global_steps() < 4) {
        const Batch& b = batches.next();
        if (evaluate) {
          const Batch other = batch(99, 4);
          const auto logits = [&] {
            return engine.evaluate([&](Tape& t) { return t.value(net(t, other.x)); });
          };
          const Tensor once = logits(), twice = logits();
          for (std::size_t i = 0; i < once.count(); ++i)
            EXPECT_EQ(once.data<float>()[i], twice.data<float>()[i]);
        }
        engine.backward(nn::cross_entropy(engine.tape(), net(engine.tape(), b.x), b.y));
        if (engine.step()) losses.push_back(engine.loss());
      }
      EXPECT_TRUE(net.training());
      return losses;
    };
    EXPECT_EQ(run(true), run(false));
  });
}

/// train_batch() leaves no gradients to what comes after it.
TEST(Engine, PassesAndErrorsAfterTrainBatchBeginAnUpdate) {
  in_world(2, [](World& world) {
    for (const int stage : {0, 1, 2, 3}) {
      const auto run = [&](bool by_update, bool fails) {
        Net net;
        auto engine = initialize(world, net, options(config(stage)));
        Batches batches{world.rank(), world.size(), 4};
        const auto loss = [&](Tape& t, const Batch& b) { return nn::cross_entropy(t, net(t, b.x), b.y); };
        for (int u = 0; u < 4; ++u) {
          if (by_update && u % 2 == 0)
            engine.train_batch(batches, loss);
          else
            for (int m = 0; m < 3; ++m) {
              engine.backward(loss(engine.tape(), batches.next()));
              engine.step();
            }
          if (!fails) continue;
          if (world.rank() == 0) {
            engine.cancel_update();
          } else {
            Batches others{1, 2, 4};
            EXPECT_EQ(test::error_of([&] { engine.train_batch(others, loss); }).code(), Errc::cancelled);
          }
        }
        return std::pair(values_of(engine.strategy(), net), engine.report().grad_norm);
      };
      const auto expected = run(false, false);
      EXPECT_EQ(run(true, false), expected) << "stage " << stage;
      EXPECT_EQ(run(true, true), expected) << "stage " << stage;
    }
  });
}

/// Of f16 values it is in f16, and the first loss scales overflow.
TEST(Engine, TrainBatchTakesAnyScalarAsBackwardDoes) {
  const auto own_loss = [](Tape& t, Net& net, const Batch& b) {
    return nn::mean(t, nn::softplus(t, net(t, b.x)));
  };
  for (const char* precision :
       {"", R"(, "bf16": {"enabled": true})", R"(, "fp16": {"enabled": true, "initial_scale_power": 20})"})
    in_world(2, [&](World& world) {
      for (const int stage : {0, 1, 2, 3}) {
        const auto run = [&](bool by_update) {
          Net net;
          auto engine = initialize(world, net, options(config(stage, precision)));
          Batches batches{world.rank(), world.size(), 4};
          std::vector<double> reported;
          while (engine.global_steps() < 12) {
            if (by_update) {
              engine.train_batch(batches, [&](Tape& t, const Batch& b) { return own_loss(t, net, b); });
            } else {
              engine.backward(own_loss(engine.tape(), net, batches.next()));
              if (!engine.step()) continue;
            }
            const StepReport& r = engine.report();
            reported.insert(reported.end(), {engine.loss(), r.loss_scale, static_cast<double>(r.skipped)});
            if (!r.skipped) reported.push_back(r.grad_norm);
          }
          const Batch b = batch(100, 4);
          reported.push_back(
              engine.evaluate([&](Tape& t) { return engine.item(own_loss(t, net, b)); }).value());
          EXPECT_LT(reported.back(), reported.front());
          return std::pair(values_of(engine.strategy(), net), reported);
        };
        EXPECT_EQ(run(true), run(false)) << "stage " << stage << precision;
      }
    });
}

TEST(Engine, ALossThatIsNoScalarIsRefused) {
  in_world(1, [](World& world) {
    Net net;
    auto engine = initialize(world, net, options(config(0)));
    Batches batches{0, 1, 4};
    const auto forward = [&](Tape& t, const Batch& b) { return net(t, b.x); };
    const char* const text =
        "backward() starts from a scalar, not from [4, 5]: take its nn::mean() or nn::sum()";
    EXPECT_STREQ(test::error_of([&] { engine.backward(forward(engine.tape(), batches.next())); }).what(),
                 text);
    engine.cancel_update();
    EXPECT_STREQ(test::error_of([&] { engine.train_batch(batches, forward); }).what(), text);
    engine.cancel_update();
    EXPECT_EQ(test::error_of([&] {
                engine.train_batch(batches, [](Tape&, const Batch&) { return Var(); });
              }).code(),
              Errc::invalid_argument);
  });
}

TEST(Engine, MicroBatchesThatFillNoUpdateAreReported) {
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> log(std::tmpfile(), std::fclose);
  for (const int passes : {3, 4, 2})
    in_world(2, [&](World& world) {
      Net net;
      auto o = options(config(0));
      o.log = log.get(), o.name = concat("net", passes);
      auto engine = initialize(world, net, std::move(o));
      Batches batches{world.rank(), world.size(), 4};
      for (int m = 0; m < passes; ++m) {
        engine.backward(nn::cross_entropy(engine.tape(), net(engine.tape(), batches.next().x),
                                          Tensor::zeros({4}, DType::i32)));
        if (m + 1 < passes || passes != 2) engine.step();
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
  in_world(1, [](World& world) {
    Net net;
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
  in_world(3, [](World& world) {
    Net net;
    EngineOptions o = options(world.rank() == 2 ? R"({"zero_optimisation": 2})" : config(1));
    const Error e = test::error_of([&] { initialize(world, net, std::move(o)); });
    EXPECT_EQ(e.code(), Errc::config);
    EXPECT_EQ(e.culprit(), 2);
    EXPECT_NE(std::string(e.what()).find("zero_optimization"), std::string::npos) << e.what();
  });
}

TEST(Engine, ConfigurationsThatDifferOverTheRanksAreNamed) {
  in_world(2, [](World& world) {
    Net net;
    const Error e = test::error_of([&] { initialize(world, net, options(config(world.rank()))); });
    EXPECT_EQ(e.code(), Errc::mismatch);
    EXPECT_EQ(e.culprit(), -1) << "neither of two ranks differs from a majority";
  });
}

TEST(Engine, AModelWithValuesStartsFromThoseOfRank0) {
  in_world(2, [](World& world) {
    Net net;
    init_parameters((allocate_parameters(net), net), static_cast<std::uint64_t>(world.rank()) + 1);
    auto engine = initialize(world, net, options(config(3)));
    Net first;
    init_parameters((allocate_parameters(first), first), 1);
    std::vector<float> values;
    for (const Parameter* p : first.parameters())
      values.insert(values.end(), p->value.data<float>(), p->value.data<float>() + p->value.count());
    EXPECT_EQ(values_of(engine.strategy(), net), values);
  });
}

TEST(Engine, RefusesAMeshThatDoesNotFit) {
  test::run_ranks(2, [](int rank, std::shared_ptr<Store> store) {
    World world(Communicator::connect(rank, 2, std::move(store)));
    Net net;
    const auto on = [&](const MeshSizes& mesh) {
      return initialize(world, net, {.config = config(2), .mesh = mesh, .log = nullptr});
    };
    { const Engine trains = on({.shard = 2}); }
    EXPECT_EQ(test::error_of([&] { on({.shard = 3}); }).code(), Errc::config);
  });
}

}  // namespace
}  // namespace rz
