// Runs: ci
// Needs: rz_bench

// The _perf tools on devices: the flags of nccl-tests that concern devices. On host memory:
// tests/tools/bench_test.cpp.

#include <gtest/gtest.h>

#include <atomic>
#include <sstream>

#include "bench/harness/harness.h"
#include "comm/core/error.h"
#include "tests/emulated_gpu/emulated_gpu.h"
#include "tests/emulated_gpu/nccl.h"

namespace rz {
namespace {

using namespace bench;

struct Outcome {
  int status = 0;
  std::string text;
  bool has_text(const std::string& words) const { return text.find(words) != std::string::npos; }
  std::ptrdiff_t rows() const {
    std::istringstream in(text);
    std::ptrdiff_t n = 0;
    for (std::string line; std::getline(in, line);) n += line.starts_with(' ');
    return n;
  }
};

class BenchOnDevices : public testing::Test {
 protected:
  static Outcome run_perf(std::string_view collective, std::vector<std::string> flags,
                          const Hooks& hooks = {}) {
    flags.insert(flags.end(), {"-b", "4K", "-e", "8K", "-f", "2", "-n", "3"});
    std::vector<const char*> argv{"perf"};
    for (const auto& f : flags) argv.push_back(f.c_str());
    const bench::Collective& c = bench::collective_from_name(collective);
    const Options options = parse_options(c, static_cast<int>(argv.size()), argv.data()).options;
    Outcome outcome;
    outcome.status = run(
        c, options, [&](const std::string& t) { outcome.text += t; }, hooks);
    return outcome;
  }
  static void expect_right(const Outcome& o) {
    EXPECT_EQ(o.status, 0) << o.text;
    EXPECT_TRUE(o.has_text("# Out of bounds values : 0 OK")) << o.text;
    EXPECT_EQ(o.rows(), 2) << o.text;
  }

  emulated::Schedule schedule;
  emulated::Nccl nccl;
};

TEST_F(BenchOnDevices, EachBackendNameSelectsThatBackend) {
  const std::pair<std::vector<std::string>, std::string> backends[] = {
      {{"--backend", "nccl"}, "# Backend: NCCL 2.28.9 on cuda:0"},
      {{"--backend", "peer_cuda"}, "# Backend: peer_cuda on cuda:0"},
      {{"--backend", "native", "--device", "cuda"},
       "# Backend: cuda:0 staged through pinned memory over native over "},
      {{"--backend", "auto", "--device", "cuda"}, "(chosen: every rank has a GPU of its own)"},
      {{"--backend", "auto"}, "# Backend: native over "}};
  for (auto [flags, text] : backends) {
    flags.insert(flags.end(), {"-t", "2"});
    const Outcome o = run_perf("all_reduce", flags);
    expect_right(o);
    EXPECT_TRUE(o.has_text(text)) << o.text;
  }
}

TEST_F(BenchOnDevices, ThreadsTimesGpusAreRanksOnDevicesInTurn) {
  const Outcome o = run_perf("all_gather", {"--backend", "nccl", "-t", "2", "-g", "2"});
  expect_right(o);
  for (int r = 0; r < 4; ++r)
    EXPECT_TRUE(o.has_text(concat("device  ", r, " [0000:0", r + 1, ":00] emulated device"))) << o.text;
  const Outcome shared = run_perf("all_gather", {"--backend", "peer_cuda", "-g", "5"});
  expect_right(shared);
  EXPECT_TRUE(shared.has_text("#  Rank  4 ")) << shared.text;
}

TEST_F(BenchOnDevices, MoreRanksThanGpusAreRefusedByNccl) {
  try {
    run_perf("all_reduce", {"--backend", "nccl", "-g", "5"});
    ADD_FAILURE() << "accepted";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Errc::config);
    EXPECT_NE(std::string(e.what()).find("ranks 0 and 4 are both on one GPU, cuda:0"), std::string::npos)
        << e.what();
  }
}

// Two buffers per rank.
TEST_F(BenchOnDevices, RegistrationIsNccls) {
  for (const bool registered : {false, true}) {
    std::atomic<int> handles{-1};
    Hooks hooks;
    hooks.before_check = [&](int, Buffer) { handles = nccl.registrations(); };
    expect_right(
        run_perf("all_reduce", {"--backend", "nccl", "-g", "2", "-R", registered ? "1" : "0"}, hooks));
    EXPECT_EQ(handles, registered ? 4 : 0);
  }
  EXPECT_EQ(nccl.registrations(), 0);
}

TEST_F(BenchOnDevices, ResultsAreRightInEveryRunMode) {
  for (const std::string backend : {"nccl", "peer_cuda"})
    for (const std::vector<std::string>& more :
         std::vector<std::vector<std::string>>{{"-y", "1"},
                                               {"-G", "2"},
                                               {"-G", "2", "-m", "2"},
                                               {"-z", "1"},
                                               {"-z", "2"},
                                               {"-z", "3"},
                                               {"-z", "2", "-m", "2"},
                                               {"-m", "3"},
                                               {"-m", "3", "--separate"},
                                               {"-I", "1"},
                                               {"-C", "1"},
                                               {"-u", "1"},
                                               {"-R", "1"}}) {
      std::vector<std::string> flags{"--backend", backend, "-g", "2"};
      flags.insert(flags.end(), more.begin(), more.end());
      const Outcome o = run_perf("reduce_scatter", flags);
      EXPECT_EQ(o.status, 0) << backend << " " << more[0] << " " << more[1] << "\n" << o.text;
      EXPECT_TRUE(o.has_text("# Out of bounds values : 0 OK")) << o.text;
      if (more[0] == "-G") {
        EXPECT_TRUE(o.has_text("graph: 2")) << o.text;
      }
    }
}

TEST_F(BenchOnDevices, AGraphOfWhatGoesThroughTheHostIsRefused) {
  try {
    run_perf("all_reduce", {"--backend", "native", "--device", "cuda", "-G", "1"});
    ADD_FAILURE() << "accepted";
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("which a CUDA graph cannot hold"), std::string::npos) << e.what();
  }
}

TEST_F(BenchOnDevices, EveryCollectiveIsRight) {
  for (const std::string_view c : {"all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce",
                                   "alltoall", "alltoallv", "scatter", "gather", "sendrecv"})
    expect_right(run_perf(c, {"--backend", "auto", "--device", "cuda", "-t", "2"}));
}

}  // namespace
}  // namespace rz
