// Runs: serial
// Needs: rzrun all_reduce_perf train_lm no_mpi_plugin old_mpi_plugin mpi_plugin_without_mpi

// The programs under mpirun, over MPI and over our own transports.

#include <gtest/gtest.h>
#include <signal.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <thread>

#include "comm/core/text.h"
#include "tests/support/folder.h"
#include "tests/support/program.h"

namespace rz {
namespace {

namespace fs = std::filesystem;
using namespace std::chrono_literals;
using test::built;
using test::Folder;
using test::Program;
using Words = std::vector<std::string>;

#ifdef RZ_MPIRUN
const std::string launcher = RZ_MPIRUN;
#else
const std::string launcher;
#endif

[[maybe_unused]] bool finds(const std::string& program) {
  return Program({"sh", "-c", "command -v " + program}).wait() == 0;
}

std::string why_not() {
#ifndef RZ_MPIRUN
  return "this build has no MPI";
#else
  return finds(launcher) ? "" : launcher + " was not found (Debian: openmpi-bin)";
#endif
}

Words mpirun(int ranks, const Words& command) {
  Words all{RZ_SOURCE_DIR "/tests/mpi/run.sh", launcher, std::to_string(ranks)};
  all.insert(all.end(), command.begin(), command.end());
  return all;
}

int lines_of(const std::string& text) { return static_cast<int>(std::count(text.begin(), text.end(), '\n')); }

class UnderMpirun : public testing::Test {
 protected:
  void SetUp() override {
    if (const std::string reason = why_not(); !reason.empty()) GTEST_SKIP() << reason;
  }
};

TEST_F(UnderMpirun, BenchesCheckTheirResults) {
  for (const std::string backend : {"native", "mpi"}) {
    Program p(mpirun(2, {built("all_reduce_perf"), "-b", "8", "-e", "1M", "-f", "64", "-n", "2", "-d", "all",
                         "--backend", backend}));
    EXPECT_EQ(p.wait(), 0) << p.err();
    EXPECT_NE(p.out().find("# Out of bounds values : 0 OK"), std::string::npos) << p.out() << p.err();
  }
}

TEST_F(UnderMpirun, MpiIsLoadedOnRequestOnly) {
  for (const std::string backend : {"auto", "mpi"}) {
    Program p(mpirun(
        2, {"env", "LD_DEBUG=files", built("all_reduce_perf"), "-b", "8", "-e", "8", "--backend", backend}));
    EXPECT_EQ(p.wait(), 0);
    EXPECT_EQ(p.err().find("libmpi") != std::string::npos, backend == "mpi") << backend;
  }
}

/// Loss and gradient norm of every update.
std::string course(const std::string& log) {
  std::string text, line;
  for (std::ifstream in(log); std::getline(in, line);) {
    const auto update = nlohmann::json::parse(line);
    text += update["loss"].dump() + " " + update["grad_norm"].dump() + "\n";
  }
  return text;
}

TEST_F(UnderMpirun, TrainingOverMpiHasTheBitsOfTheNativeBackend) {
  const Folder folder;
  const std::string data = RZ_SOURCE_DIR "/tests/data/gpt2_tiny/";
  std::string first;
  for (const int ranks : {2, 4}) {
    std::string ring;
    for (const std::string strategy : {"ddp", "zero1", "zero2", "zero3"})
      for (const std::string backend : {"native", "mpi"}) {
        if (backend == "native" && strategy != "ddp")
          continue;  // tests/tools/gpt2_tiny_test.cpp: all are alike
        const std::string log = folder / (strategy + backend + std::to_string(ranks));
        Program p(
            mpirun(ranks, {built("train_lm"), "--model", data + "config.json", "--config",
                           data + "ds_config.json", "--tokens", data + "tokens.bin", "--strategy", strategy,
                           "--steps", "4", "--threads", "1", "--metrics", log, "--backend", backend}));
        ASSERT_EQ(p.wait(120s), 0) << p.out() << p.err();
        EXPECT_NE(p.out().find(backend == "mpi" ? "(mpi (" : "(native over"), std::string::npos) << p.out();
        const std::string got = course(log);
        EXPECT_EQ(lines_of(got), 4) << got;
        if (backend == "native") ring = got;
        EXPECT_EQ(got, ring) << strategy << " on " << ranks << " ranks over " << backend;
      }
  }
}

TEST_F(UnderMpirun, AKilledRankEndsTheJob) {
  Program p(mpirun(
      3, {built("all_reduce_perf"), "-b", "1M", "-e", "1M", "-N", "0", "--backend", "mpi", "-T", "5"}));
  p.wait_for("float");
  const std::string out = p.out();
  const auto line = out.find("#  Rank  1 ");
  ASSERT_NE(line, std::string::npos) << out;
  const pid_t pid = std::stoi(out.substr(out.find("Pid", line) + 4));
  ASSERT_EQ(::kill(pid, SIGKILL), 0);
  EXPECT_NE(p.wait(30s), 0);
}

/// For programs that start MPI without mpirun. MPI does not free its allocations.
const Program::Variables alone = {{"OMPI_ALLOW_RUN_AS_ROOT", "1"},
                                  {"OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"},
                                  {"ASAN_OPTIONS", "detect_leaks=0"}};

TEST_F(UnderMpirun, AnotherLauncherIsNamed) {
  Program p({built("rzrun"), "-n", "2", built("all_reduce_perf"), "-b", "8", "-e", "8", "--backend", "mpi"},
            alone);
  EXPECT_EQ(p.wait(), 1);
  EXPECT_NE(p.err().find("sees 1 process, but the launcher, torchrun, started 2; start with the mpirun of"),
            std::string::npos)
      << p.err();
}

TEST_F(UnderMpirun, ThreadsAreNoRanksOfMpi) {
  Program p({built("all_reduce_perf"), "-t", "2", "-b", "8", "-e", "8", "--backend", "mpi"}, alone);
  EXPECT_EQ(p.wait(), 1);
  EXPECT_NE(p.err().find("the MPI backend needs a process a rank"), std::string::npos) << p.err();
}

// The first of two ranks on two hosts, as mpirun starts it.
TEST(MpiLibrary, WithoutItSeveralHostsNeedAnAddress) {
  const Folder folder;
  fs::copy_file(built("all_reduce_perf"), folder / "all_reduce_perf");
  Program p({folder / "all_reduce_perf"}, {{"OMPI_COMM_WORLD_RANK", "0"},
                                           {"OMPI_COMM_WORLD_SIZE", "2"},
                                           {"OMPI_COMM_WORLD_LOCAL_RANK", "0"},
                                           {"OMPI_COMM_WORLD_LOCAL_SIZE", "1"}});
  EXPECT_EQ(p.wait(), 2);
  EXPECT_EQ(lines_of(p.err()), 1) << p.err();
  EXPECT_NE(p.err().find("MASTER_ADDR and MASTER_PORT are missing, and only 1 of 2 ranks are on this host"),
            std::string::npos)
      << p.err();
  EXPECT_NE(p.err().find("the MPI backend could not be loaded: libringzero_mpi.so: "), std::string::npos)
      << p.err();
}

// A program outside of the library's folder: a copy of one of the build.
TEST(MpiLibrary, MissingOrBrokenIsOneLine) {
  const Folder folder;
  fs::copy_file(built("all_reduce_perf"), folder / "all_reduce_perf");
  const auto run = [&] {
    Program p({folder / "all_reduce_perf", "--backend", "mpi"});
    EXPECT_EQ(p.wait(), 1);
    EXPECT_EQ(lines_of(p.err()), 1) << p.err();
    return p.err();
  };
  const std::string missing = run();
  EXPECT_NE(missing.find("the MPI backend could not be loaded: libringzero_mpi.so: "), std::string::npos)
      << missing;
  EXPECT_NE(missing.find("--backend native"), std::string::npos) << missing;
  std::ofstream(folder / "libringzero_mpi.so") << "no library";
  const std::string broken = run();
  EXPECT_NE(broken.find(folder / "libringzero_mpi.so"), std::string::npos) << broken;
  const std::pair<const char*, const char*> stubs[] = {
      {"no_mpi_plugin", "libringzero_mpi.so is no MPI backend of ringzero: it has no rz_mpi_plugin_version"},
      {"old_mpi_plugin", "libringzero_mpi.so is of ringzero 0.0.9, but this program of "},
      {"mpi_plugin_without_mpi", "the MPI backend could not be loaded: libabsent_mpi.so"}};
  for (const auto& [stub, words] : stubs) {
    fs::copy_file(concat(RZ_BINARY_DIR "/stubs/", stub, ".so"), folder / "libringzero_mpi.so",
                  fs::copy_options::overwrite_existing);
    const std::string message = run();
    EXPECT_NE(message.find(words), std::string::npos) << message;
    EXPECT_NE(message.find("--backend native"), std::string::npos) << message;
  }
}

}  // namespace
}  // namespace rz
