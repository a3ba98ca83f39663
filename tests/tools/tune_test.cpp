// Runs: serial
// Needs: tune_lib tune rzrun all_reduce_perf

// The program that measures a tuning table: its command line, the table made from times, and a run.

#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "comm/core/error.h"
#include "tests/support/error_of.h"
#include "tests/support/program.h"
#include "tools/tune/measure.h"
#include "tools/tune/options.h"

namespace rz {
namespace {

using test::error_of;
using test::Program;
using namespace tune;
using Words = std::vector<std::string>;

ParsedOptions parse(Words flags) {
  std::vector<const char*> argv{"tune"};
  for (const auto& f : flags) argv.push_back(f.c_str());
  return parse_options(static_cast<int>(argv.size()), argv.data());
}

bool has_text(const std::string& text, const std::string& what) {
  return text.find(what) != std::string::npos;
}

TEST(TuneOptions, DefaultsAndFlags) {
  const Options o = parse({}).options;
  EXPECT_EQ(o.output, "tuning.txt");
  EXPECT_EQ(o.sizes(),
            (std::vector<std::size_t>{8, 32, 128, 512, 2048, 8192, 32768, 131072, 524288, 2097152, 8388608}));
  const Options given =
      parse({"-o", "t", "--min", "1K", "--max", "1M", "--factor", "32", "--collectives", "reduce,broadcast"})
          .options;
  EXPECT_EQ(given.output, "t");
  EXPECT_EQ(given.sizes(), (std::vector<std::size_t>{1 << 10, 32 << 10, 1 << 20}));
  EXPECT_EQ(given.collectives, (std::vector{Collective::reduce, Collective::broadcast}));
}

TEST(TuneOptions, AWrongFlagIsOneLine) {
  const std::vector<std::pair<Words, std::vector<const char*>>> wrong = {
      {{"--min", "8X"}, {"--min: '8X'", "as in 64K"}},
      {{"--min", "0"}, {"--min: '0'"}},
      {{"--min", "2K", "--max", "1K"}, {"--min 2K is more than --max 1K"}},
      {{"--collectives", "all_redcue"}, {"'all_redcue'", "all_reduce"}},
      {{"--outptu", "x"}, {"--outptu", "did you mean --output?"}},
      {{"--rounds", "0"}, {"--rounds"}},
  };
  for (const auto& [flags, parts] : wrong) {
    const Error e = error_of([&] { parse(flags); });
    EXPECT_EQ(e.code(), Errc::config);
    for (const char* part : parts) EXPECT_TRUE(has_text(e.what(), part)) << e.what();
  }
}

TEST(TuneOptions, HelpDescribesTheFlags) {
  const std::string help = parse({"--help"}).help;
  for (const char* part : {"rzrun -n 4 tune --output tuning.txt", "RZ_TUNING", "--seconds", "--schedules",
                           "docs/tuning.md", "Exit status"})
    EXPECT_TRUE(has_text(help, part)) << help;
}

TEST(TuneCandidates, AreAllThatCompete) {
  const auto count = [](bool intra_node, const Options& o) { return candidates(intra_node, o).size(); };
  Options all_reduce;
  all_reduce.collectives = {Collective::all_reduce};
  EXPECT_EQ(count(true, all_reduce), 3u) << "one_shot, two_shot, zero_copy";
  all_reduce.schedules = true;
  std::size_t schedules = 0;
  for (const schedule::Algorithm& a : schedule::algorithms())
    schedules += a.collective == Collective::all_reduce;
  EXPECT_EQ(count(true, all_reduce), 3 + schedules);
  EXPECT_EQ(count(false, all_reduce), schedules);
  Options gather;
  gather.collectives = {Collective::gather};
  EXPECT_EQ(count(true, gather), 2u);
  EXPECT_EQ(count(false, gather), 0u) << "it has one schedule";
}

// ---- tables from times

Measured times(bool intra_node, Collective c,
               const std::vector<std::pair<std::string, std::vector<double>>>& rows) {
  Measured m;
  m.ranks = 4, m.intra_node = intra_node, m.backend = "native over nothing";
  std::size_t bytes = 64;
  for (std::size_t i = 0; i < rows[0].second.size(); ++i, bytes *= 4)
    for (const auto& [name, us] : rows) {
      const tuning::Scope scope = !intra_node           ? tuning::Scope::inter_node
                                  : name == "zero_copy" ? tuning::Scope::intra_node_registered
                                                        : tuning::Scope::intra_node;
      m.times.push_back({{c, scope, name}, bytes, us[i]});
    }
  return m;
}

std::string lines(const Measured& m) { return make_table(m).text(); }

TEST(TuneTable, ARangeEndsWhereTimesCross) {
  EXPECT_EQ(
      lines(times(true, Collective::all_reduce,
                  {{"one_shot", {1, 1, 2, 8}}, {"two_shot", {4, 4, 3, 2}}, {"zero_copy", {3, 3, 1, 1}}})),
      "all_reduce intra_node ranks=4 bytes<=1280 one_shot\n"
      "all_reduce intra_node ranks=4 two_shot\n"
      "all_reduce intra_node_registered ranks=4 bytes<=576 staged\n"
      "all_reduce intra_node_registered ranks=4 zero_copy\n");
}

TEST(TuneTable, NoiseAtOneSizeWritesNoLine) {
  EXPECT_EQ(lines(times(true, Collective::broadcast,
                        {{"staged", {1, 1, 1.1, 1, 1}}, {"zero_copy", {1.05, 1.2, 1, 1.2, 1.1}}})),
            "broadcast intra_node_registered ranks=4 staged\n");
}

TEST(TuneTable, AnAlgorithmOutOfRankOrderHasAFallback) {
  const std::string table =
      lines(times(false, Collective::all_reduce,
                  {{"tree", {1, 1, 9, 9}}, {"one_shot", {2, 2, 8, 9}}, {"two_shot", {4, 4, 2, 2}}}));
  EXPECT_EQ(table,
            "all_reduce inter_node ranks=4 bytes<=480 tree\n"
            "all_reduce inter_node ranks=4 bytes>480 two_shot\n"
            "all_reduce inter_node ranks=4 bytes<=384 one_shot\n"
            "all_reduce inter_node ranks=4 two_shot\n");
  const tuning::Table t = tuning::parse_tuning(table, "t");
  const auto algorithm = [&](std::size_t bytes, bool deterministic) {
    return std::string(tuning::find_rule(t.rules,
                                         {Collective::all_reduce, tuning::Scope::inter_node, bytes, 4},
                                         deterministic)
                           ->algorithm);
  };
  EXPECT_EQ(algorithm(100, false), "tree");
  EXPECT_EQ(algorithm(100, true), "one_shot");
  EXPECT_EQ(algorithm(4096, true), "two_shot");
}

// ---- the program

class File {
 public:
  File()
      : path_((std::filesystem::temp_directory_path() / concat("rz_tune_test_", static_cast<int>(::getpid())))
                  .string()) {}
  ~File() { std::filesystem::remove(path_); }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

TEST(Tune, WritesATableThatCallsUse) {
  const File table;
  Program p({test::built("rzrun"), "-n", "2", test::built("tune"), "-o", table.path(), "--seconds", "0.5",
             "--rounds", "3", "--max", "128K", "--factor", "16"});
  ASSERT_EQ(p.wait(), 0) << p.err();
  EXPECT_TRUE(has_text(p.out(), table.path() + ": ")) << p.out();
  EXPECT_EQ(p.err(), "") << "no progress bar without a terminal";
  const tuning::Table t = tuning::read_tuning(table.path());
  for (const tuning::Scope scope : {tuning::Scope::intra_node, tuning::Scope::intra_node_registered})
    EXPECT_NE(tuning::find_rule(t.rules, {Collective::all_reduce, scope, 1000, 2}, true), nullptr);
  std::ostringstream text;
  text << std::ifstream(table.path()).rdbuf();
  EXPECT_TRUE(has_text(text.str(), "# 2 ranks, native over shm\n")) << text.str();

  Program bench(
      {test::built("rzrun"), "-n", "2", test::built("all_reduce_perf"), "-b", "8", "-e", "8", "--verbose"},
      {{"RZ_TUNING", table.path()}});
  ASSERT_EQ(bench.wait(), 0) << bench.err();
  EXPECT_TRUE(has_text(bench.out(), "(tuning table " + table.path() + ": all_reduce intra-node"))
      << bench.out();
}

TEST(Tune, MeasuresSchedulesBetweenNodes) {
  const File table;
  Program p({test::built("rzrun"), "-n", "2", test::built("tune"), "-o", table.path(), "--seconds", "0.2",
             "--rounds", "1", "--max", "512", "--factor", "64", "--collectives", "broadcast"},
            {{"RZ_TRANSPORT", "tcp"}});
  ASSERT_EQ(p.wait(), 0) << p.err();
  const tuning::Table t = tuning::read_tuning(table.path());
  EXPECT_NE(tuning::find_rule(t.rules, {Collective::broadcast, tuning::Scope::inter_node, 1000, 2}, true),
            nullptr);
}

TEST(Tune, BadInputExitsWithStatusTwo) {
  const std::vector<std::pair<Words, const char*>> wrong = {
      {{"--min", "x"}, "--min: 'x'"},
      {{}, "one rank alone has nothing to choose"},
      {{"--frobnicate"}, "unknown flag"},
  };
  for (const auto& [flags, part] : wrong) {
    Words command{test::built("tune")};
    command.insert(command.end(), flags.begin(), flags.end());
    Program p(command);
    EXPECT_EQ(p.wait(), 2);
    EXPECT_TRUE(has_text(p.err(), part)) << p.err();
  }
  Program p({test::built("rzrun"), "-n", "2", test::built("tune"), "-o", "/nowhere/at/all"});
  EXPECT_EQ(p.wait(), 2);
  EXPECT_TRUE(has_text(p.err(), "--output /nowhere/at/all: cannot be written: No such file or directory"))
      << p.err();
}

TEST(Tune, AnEarlierTableDoesNotOutliveARunThatFails) {
  const File table;
  std::ofstream(table.path()) << "all_reduce ring\n";
  Program wrong({test::built("rzrun"), "-n", "2", test::built("tune"), "-o", table.path(), "--min", "x"});
  EXPECT_EQ(wrong.wait(), 2);
  const auto text = [&] {
    std::ostringstream all;
    all << std::ifstream(table.path()).rdbuf();
    return all.str();
  };
  EXPECT_EQ(text(), "all_reduce ring\n") << "emptied for a wrong command line";
  Program failing({test::built("rzrun"), "-n", "2", test::built("tune"), "-o", table.path()},
                  {{"RZ_TRANSPORT", "pigeon"}});
  EXPECT_NE(failing.wait(), 0);
  EXPECT_TRUE(text().starts_with("# error: ")) << text();
  EXPECT_TRUE(has_text(text(), "pigeon")) << text();
}

}  // namespace
}  // namespace rz
