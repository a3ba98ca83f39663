/// What an engine reports: lines, csv files, events, the table of collectives, flops, a trace.
#include <gtest/gtest.h>

#include <cstdio>
#include <filesystem>
#include <sstream>
#include <string>
#include <vector>

#include "sharding/engine/engine.h"
#include "sharding/engine/reports/comms_logger.h"
#include "sharding/engine/reports/step_monitor.h"
#include "sharding/strategy/strategy.h"
#include "tests/lab/training.h"
#include "tests/support/folder.h"

namespace rz {
namespace {

using lab::batch;
using lab::config;
using lab::options;
using lab::Trainer;

TEST(EngineReports, ReportsUpdatesAsTheConfigurationAsks) {
  const test::Folder folder;
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> log(std::tmpfile(), std::fclose);
  std::vector<double> losses;
  lab::world(2, [&](World& world) {
    EngineOptions o = options(config(1, concat(R"("steps_per_print": 3, "wall_clock_breakdown": true,
        "memory_breakdown": true, "csv_monitor": {"enabled": true, "job_name": "job", "output_path": ")",
                                               folder.path(), "\"}")));
    o.log = log.get();
    o.name = "net";
    Trainer t(world, std::move(o));
    for (int u = 0; u < 7; ++u) {
      t.update();
      const double loss = t.engine.loss();
      EXPECT_EQ(t.engine.breakdown().empty(), !world.is_main() || u % 3 != 2) << u;
      if (world.is_main()) losses.push_back(loss);
    }
    t.engine.add_scalar("Eval/accuracy", 0.25);
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
  EXPECT_EQ(folder.get("job/Train_Samples_train_loss.csv"), expected);
  EXPECT_EQ(folder.get("job/Eval_accuracy.csv"), "step,accuracy\n168,0.25\n");
  EXPECT_NE(folder.get("job/Train_Samples_elapsed_time_ms_step.csv").find("\n144,"), std::string::npos);
  const std::string rates = folder.get("job/Train_Samples_lr.csv");
  EXPECT_TRUE(rates.starts_with("step,lr\n24,"));
  EXPECT_NE(rates.find("\n48,"), std::string::npos);
  CsvMonitor resumed(folder.path(), "job");
  for (const std::int64_t samples : {48, 72}) resumed.write({"Train/Samples/lr", 0.5}, samples);
  EXPECT_EQ(folder.get("job/Train_Samples_lr.csv"), rates.substr(0, rates.find("48,")) + "48,0.5\n72,0.5\n")
      << "a run that is resumed replaces the lines that it writes again";
}

/// A second reduction would wait for the other rank.
TEST(EngineReports, TheLossOfAnUpdateIsReducedOnceForAllReports) {
  const test::Folder folder;
  lab::world(2, [&](World& world) {
    Trainer t(world, options(config(0, concat(R"("csv_monitor": {"enabled": true, "output_path": ")",
                                              folder.path(), R"("})"))));
    for (int u = 0; u < 2; ++u) {
      t.update();
      EXPECT_TRUE(!world.is_main() || t.engine.loss() > 0);
    }
    const double first = t.engine.loss();
    t.engine.backward(t.net(t.engine.tape(), t.loader.next()));
    EXPECT_NE(t.engine.loss(), first) << "of the update in progress";
    t.engine.cancel_update();
    world.wait_for_everyone();
  });
}

/// RFC 3720, appendix B.4.
TEST(EngineReports, ChecksumsOfEventFilesAreThoseOfTheStandard) {
  const auto masked = [](std::uint32_t crc) { return (crc >> 15 | crc << 17) + 0xa282ead8u; };
  EXPECT_EQ(masked_crc32c(std::string(32, '\0')), masked(0x8a9136aa));
  EXPECT_EQ(masked_crc32c(std::string(32, '\xff')), masked(0x62a8ab43));
  EXPECT_EQ(masked_crc32c("123456789"), masked(0xe3069283));
}

/// Awaited at once, so that nothing is exposed beside it, and counted as Traffic counts.
TEST(EngineReports, TheCommsLoggerCountsWhatTheStrategySends) {
  for (const int stage : {0, 3})
    lab::world(2, [&](World& world) {
      const auto train = [&](const char* section) {
        Trainer t(world, options(config(stage, section)));
        for (int u = 0; u < 3; ++u) t.update();
        return std::tuple(t.engine.log_summary(), t.engine.loss(), t.engine.strategy().traffic().total());
      };
      const auto [none, loss, traffic] = train("");
      EXPECT_EQ(none, "");
      const auto [table, measured_loss, measured] = train(R"("comms_logger": {"enabled": true})");
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
          R"("comms_logger": {"enabled": true, "prof_all": false, "prof_ops": ["all_gather_into_tensor"]})");
      EXPECT_EQ(some.find("reduce"), std::string::npos) << some;
      EXPECT_EQ(some.find("all_gather") != std::string::npos, stage == 3) << some;
    });
}

/// nccl-tests: doc/PERFORMANCE.md.
TEST(EngineReports, BandwidthsAreThoseOfNcclTests) {
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
TEST(EngineReports, TheFlopsProfilerCountsOneUpdate) {
  const test::Folder folder;
  for (const bool by_pass : {false, true})
    lab::world(2, [&](World& world) {
      const auto train = [&](const std::string& section, std::vector<std::string>* reports) {
        Trainer t(world, options(config(3, section)));
        while (t.engine.global_steps() < 4) {
          t.engine.evaluate([&](Tape& tape) { return t.engine.item(t.net(tape, batch(1))); });
          if (!by_pass) t.update();
          while (by_pass && !t.pass()) {
          }
          if (reports) reports->push_back(t.engine.breakdown());
        }
        return t.engine.loss();
      };
      std::vector<std::string> reports;
      const double loss = train("", nullptr);
      EXPECT_EQ(train(R"("flops_profiler": {"enabled": true, "profile_step": 2})", &reports), loss);
      for (const std::size_t u : {0, 1, 3}) EXPECT_EQ(reports[u], "");
      const std::string report = single_spaced(reports[2]);
      EXPECT_EQ(report.empty(), !world.is_main());
      const auto has = [&](const std::string& text) {
        EXPECT_TRUE(!world.is_main() || report.find(text) != std::string::npos) << text << " in\n" << report;
      };
      has("flops profiler: update 3 on rank 0 of 2, micro-batches: 3, parameters: 197\n");
      has("forward 2.11 K 4.22 K");   // 12 · (96 + 80)
      has("backward 3.07 K 6.14 K");  // 12 · (96 + 2 · 80)
      has("update 5.18 K 10.37 K");
      has("top of depth 0: MACs: model 5.18 K; parameters: model 197;");
      has("top of depth 1: MACs: fc2 2.88 K; parameters: fc1 112;");
      has(" fc2 85 960 1.92 K 55.6%");
      const std::string keys =
          R"("flops_profiler": {"enabled": true, "module_depth": 0, "detailed": false, "output_file": ")";
      EXPECT_EQ(train(concat(keys, folder / "flops", R"("})"), nullptr), loss);
      if (!world.is_main()) return;
      const std::string written = folder.get("flops");
      EXPECT_NE(written.find("update 2 on rank 0"), std::string::npos) << "the default";
      EXPECT_EQ(written.find("fc2"), std::string::npos);
    });
}

/// Of updates 2 and 3, of both ranks.
TEST(EngineReports, ATraceHasThePhasesAndTheCollectivesOfAllRanks) {
  const test::Folder folder;
  const std::string file = folder / "trace.json";
  lab::world(2, [&](World& world) {
    Trainer t(world, options(config(3, concat(R"("ringzero": {"trace": {"path": ")", file,
                                              R"(", "first_step": 2, "steps": 2}})"))));
    for (int u = 0; u < 4; ++u) {
      t.update();
      EXPECT_TRUE(!world.is_main() || (std::filesystem::file_size(file) > 0) == (u >= 2))
          << "emptied at the start";
    }
  });
  const std::string text = folder.get("trace.json");
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

}  // namespace
}  // namespace rz
