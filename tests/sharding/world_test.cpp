// Runs: alone

/// Ranks as processes of one call, and what they exchange.
#include "sharding/parallel/world.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "comm/bootstrap.h"
#include "sharding/engine/checkpoints/signal_handler.h"
#include "sharding/engine/parse_arguments.h"
#include "tests/lab/world.h"
#include "tests/support/error_of.h"
#include "tests/support/folder.h"

namespace rz {
namespace {

namespace fs = std::filesystem;

using test::Folder;

TEST(Spawn, EveryRankRunsInAProcessOfItsOwn) {
  const Folder folder;
  spawn(3, [&](World& world) {
    require(world.size() == 3 && world.local_rank() == world.rank(), Errc::system, "wrong place");
    std::ofstream((folder / concat(world.rank()))) << ::getpid();
    world.wait_for_everyone();
  });
  std::string first;
  for (int rank = 0; rank < 3; ++rank) {
    std::string pid;
    std::ifstream((folder / concat(rank))) >> pid;
    EXPECT_FALSE(pid.empty()) << "rank " << rank;
    EXPECT_NE(pid, first) << "rank " << rank;
    if (rank == 0) first = pid;
  }
}

TEST(Spawn, ARankHasNoDescriptorsOfTheRanksBeforeIt) {
  spawn(3, [](World&) {
    for (const auto& open : fs::directory_iterator("/proc/self/fd")) {
      std::error_code closed;  // the descriptor of the iterator
      require(fs::read_symlink(open.path(), closed) != "anon_inode:[pidfd]", Errc::system,
              "a descriptor of a rank");
    }
  });
}

TEST(Spawn, TheErrorOfARankIsThrownWithItsRank) {
  try {
    spawn(3, [](World& world) {
      if (world.rank() == 2) fail(Errc::config, "data.bin: empty");
      world.wait_for_everyone();
    });
    FAIL() << "no error";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Errc::config);
    EXPECT_STREQ(e.what(), "rank 2: data.bin: empty");
    EXPECT_EQ(e.culprit(), 2);
  }
}

/// The rank that reports an error need not be the one that has caused it.
TEST(Spawn, AStoppedRankIsNamed) {
  WorldOptions options;
  options.comm.detection = std::chrono::milliseconds(500);
  try {
    spawn(
        3,
        [](World& world) {
          if (world.rank() == 1) ::raise(SIGSTOP);
          world.wait_for_everyone();
        },
        options);
    FAIL() << "no error";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Errc::peer_lost);
    EXPECT_EQ(e.culprit(), 1) << e.what();
    EXPECT_NE(std::string(e.what()).find("was stopped by a signal"), std::string::npos) << e.what();
  }
}

TEST(Spawn, AKilledRankIsNamedWithItsSignal) {
  const auto start = std::chrono::steady_clock::now();
  try {
    spawn(3, [](World& world) {
      if (world.rank() == 1) ::raise(SIGKILL);
      world.wait_for_everyone();
    });
    FAIL() << "no error";
  } catch (const Error& e) {
    EXPECT_EQ(e.culprit(), 1);
    EXPECT_NE(std::string(e.what()).find("rank 1 was killed by signal 9"), std::string::npos) << e.what();
  }
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(30));
}

TEST(Spawn, ARankThatDoesNotEndIsEnded) {
  const auto start = std::chrono::steady_clock::now();
  EXPECT_EQ(test::error_of([] {
              spawn(2, [](World& world) {
                if (world.rank() == 0) fail(Errc::config, "wrong");
                ::signal(SIGTERM, SIG_IGN);
                for (;;) std::this_thread::sleep_for(std::chrono::seconds(1));
              });
            }).code(),
            Errc::config);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(30));
}

/// Two nodes of two ranks.
TEST(World, TheFirstRankOfEachNodeIsItsLocalMain) {
  lab::group(4, [](Communicator& comm) {
    LaunchInfo launch;
    launch.local_rank = comm.rank() % 2;
    const World world(std::move(comm), launch);
    EXPECT_EQ(world.is_local_main(), world.rank() == 0 || world.rank() == 2);
    EXPECT_EQ(world.is_main(), world.rank() == 0);
  });
}

TEST(World, CountsTheRanksOfANode) {
  const auto per_node = [](int ranks, const lab::OptionsOfRank& options) {
    int found = -1;
    lab::world(ranks, options, [&](World& world) {
      const int n = world.ranks_per_node();
      EXPECT_EQ(world.reduce(n, ReduceOp::min), world.reduce(n, ReduceOp::max));
      if (world.rank() == 0) found = n;
    });
    return found;
  };
  EXPECT_EQ(per_node(3, [](int) { return CommOptions(); }), 3);
  EXPECT_EQ(per_node(4, lab::on_hosts("aabb")), 2);
  EXPECT_EQ(per_node(3, lab::on_hosts("abc")), 1);
  EXPECT_EQ(per_node(3, lab::on_hosts("aab")), 0) << "nodes of different sizes";
  EXPECT_EQ(per_node(4, lab::on_hosts("aaab")), 0);
  EXPECT_EQ(per_node(4, lab::on_hosts("abab")), 0) << "the ranks of a node are not consecutive";
}

TEST(World, ReducesValuesAndMeansByTheirCounts) {
  spawn(3, [](World& world) {
    const double r = world.rank();
    require(world.reduce(r) == 1.0, Errc::system, "mean of ranks is ", world.reduce(r));
    require(world.reduce(r, ReduceOp::max) == 2.0, Errc::system, "maximum");
    Mean mean;  // rank r has r terms of the value r: (1 + 2 · 2) / 3
    if (world.rank() > 0) mean.add(r, r);
    require(world.reduce(mean) == 5.0 / 3, Errc::system, "mean of terms is ", world.reduce(mean));
    require(std::isnan(world.reduce(Mean{})), Errc::system, "a mean without terms is a number");
  });
}

TEST(World, GathersRowsInTheOrderOfRanks) {
  spawn(3, [](World& world) {
    Tensor rows = Tensor::empty({2, 1}, DType::i32);
    for (int i = 0; i < 2; ++i) rows.data<std::int32_t>()[i] = world.rank() * 10 + i;
    const Tensor all = world.gather(rows);
    require(all.shape() == Shape{6, 1}, Errc::system, "shape ", name(all.shape()));
    for (int i = 0; i < 6; ++i)
      require(all.data<std::int32_t>()[i] == i / 2 * 10 + i % 2, Errc::system, "row ", i);
  });
}

/// Without a check the ranks would read past the end of a tensor, or wait for each other.
TEST(World, RowsOfOtherShapesAreNamedOnEveryRank) {
  lab::world(3, [](World& world) {
    const auto error = [&](const Shape& own, const Shape& others, DType dtype = DType::i32) {
      const bool differs = world.rank() == 1;
      const Tensor rows = Tensor::zeros(differs ? own : others, differs ? dtype : DType::i32);
      const Error e = test::error_of([&] { world.gather(rows); });
      EXPECT_EQ(e.code(), Errc::mismatch) << e.what();
      EXPECT_EQ(e.culprit(), 1);
      return std::string(e.what());
    };
    EXPECT_EQ(
        error({3, 2}, {2, 2}),
        "World::gather() differs over the ranks: the tensor is i32 [2, 2] on rank 0 and i32 [3, 2] on rank "
        "1; pad it to one shape, and leave the padding out behind the call");
    EXPECT_NE(error({2, 2}, {4}).find("i32 [4] on rank 0 and i32 [2, 2] on rank 1"), std::string::npos);
    EXPECT_NE(error({2}, {2}, DType::f32).find("i32 [2] on rank 0 and f32 [2]"), std::string::npos);
    EXPECT_NE(error({}, {1}).find("i32 [1] on rank 0 and i32 [] on rank 1"), std::string::npos);
    const Tensor all = world.gather(Tensor::zeros({2, 1}));  // the group goes on
    EXPECT_EQ(all.shape(), (Shape{6, 1}));
  });
}

TEST(World, ACommunicatorOfItsOwnDoesNotMeetOtherCalls) {
  spawn(2, [](World& world) {
    Communicator own = world.new_communicator();
    float a = 1, b = 2;
    Work first = own.all_reduce(Buffer(&a, 1));
    Work second = world.communicator().all_reduce(Buffer(&b, 1));
    second.wait(), first.wait();
    require(a == 2 && b == 4, Errc::system, a, " and ", b);
  });
}

// ---- run_entrypoint

/// Processes that run_entrypoint runs, as a launcher starts them.
class Launch {
 public:
  Launch(int ranks, const std::function<void(World&)>& body) {
    for (int rank = 0; rank < ranks; ++rank) pids_.push_back(start(rank, ranks, body));
    for (const pid_t pid : pids_) {
      int status = 0;
      ::waitpid(pid, &status, 0);
      statuses.push_back(WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status));
    }
    for (int rank = 0; rank < ranks; ++rank) {
      std::ifstream file((folder_ / concat(rank)));
      for (std::string line; std::getline(file, line);) errors.push_back(line);
    }
  }

  std::vector<int> statuses;
  std::vector<std::string> errors;  ///< lines of standard error, rank by rank

 private:
  pid_t start(int rank, int ranks, const std::function<void(World&)>& body) {
    const pid_t pid = ::fork();
    if (pid != 0) return pid;
    ::alarm(50);
    for (const char* name : {"RANK", "LOCAL_RANK"}) ::setenv(name, concat(rank).c_str(), 1);
    for (const char* name : {"WORLD_SIZE", "LOCAL_WORLD_SIZE"}) ::setenv(name, concat(ranks).c_str(), 1);
    for (const char* name : {"RZ_LAUNCH", "TORCHELASTIC_RUN_ID"})
      ::setenv(name, concat("world_test-", ::getppid(), "-", number_).c_str(), 1);
    ::setenv("MASTER_ADDR", "127.0.0.1", 1);
    ::setenv("MASTER_PORT", "29500", 1);
    if (!std::freopen((folder_ / concat(rank)).c_str(), "w", stderr)) ::_exit(3);
    const int status = run_entrypoint(body);
    std::fflush(nullptr);
    ::_exit(status);
  }

  static inline int launches_ = 0;
  const int number_ = launches_++;
  const Folder folder_;
  std::vector<pid_t> pids_;
};

using Lines = std::vector<std::string>;

TEST(Entrypoint, AnErrorOfTheCommonCommandLineIsPrintedOnce) {
  const Launch launch(3, [](World& world) {
    if (world.rank() == 0) std::this_thread::sleep_for(std::chrono::milliseconds(50));
    const char* const words[] = {"program", "--learn_rate", "1"};
    parse_arguments(3, words);
  });
  EXPECT_EQ(launch.errors, Lines{"rank 0: --learn_rate: unknown flag; nearest: --learning_rate"});
  EXPECT_EQ(launch.statuses, (std::vector{2, 2, 2}));
}

TEST(Entrypoint, ARequestForHelpIsNoError) {
  const Launch launch(2, [](World&) {
    const char* const words[] = {"program", "--learning_rate", "1", "-h"};
    parse_arguments(4, words);
  });
  EXPECT_EQ(launch.errors, Lines{});
  EXPECT_EQ(launch.statuses, (std::vector{0, 0}));
}

TEST(Entrypoint, SIGUSR1WritesTheLastCallsAlsoWhileTheRankWaits) {
  const Folder folder;
  ::setenv("RZ_FLIGHT", (folder / "dumps").c_str(), 1);
  const Launch launch(2, [&](World& world) {
    const auto written_while_it_waits = [&] {
      const auto pid = static_cast<pid_t>(world.reduce(world.rank() == 0 ? ::getpid() : 0, ReduceOp::max));
      const std::string file = folder / "dumps/flight_rank_0";
      if (world.rank() == 1) {
        ::kill(pid, SIGUSR1);
        while (!std::filesystem::exists(file)) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        std::filesystem::remove(file);
      }
      world.wait_for_everyone();
    };
    written_while_it_waits();
    SignalHandler requests_to_save;
    written_while_it_waits();
    require(requests_to_save.received().user1 == (world.rank() == 0), Errc::system, "not a request to save");
  });
  EXPECT_EQ(launch.errors, Lines{});
  EXPECT_EQ(launch.statuses, (std::vector{0, 0}));
}

TEST(Entrypoint, AFolderThatCannotBeWrittenIsRefused) {
  const Folder folder;
  folder.put("file", "");
  ::setenv("RZ_FLIGHT", (folder / "file/dumps").c_str(), 1);
  const Launch launch(1, [](World&) {});
  ASSERT_EQ(launch.errors.size(), 1u);
  EXPECT_TRUE(launch.errors[0].starts_with("RZ_FLIGHT: " + folder / "file/dumps" + ": cannot be "))
      << launch.errors[0];
  EXPECT_EQ(launch.statuses, (std::vector{2}));
}

TEST(Entrypoint, ErrorsAreInTheFileThatTheLauncherNames) {
  const Folder folder;
  const Launch launch(2, [&](World& world) {
    ::setenv("TORCHELASTIC_ERROR_FILE", (folder / concat(10 + world.rank())).c_str(), 1);
    if (world.rank() == 1) fail(Errc::config, "data.bin: \"empty\"");
    world.wait_for_everyone();
  });
  const auto report = [&](int rank) {
    std::string line;
    std::getline(std::ifstream((folder / concat(10 + rank))), line);
    return line;
  };
  EXPECT_TRUE(report(1).starts_with(
      R"({"message":{"extraInfo":{"code":"configuration","py_callstack":"","timestamp":")"))
      << report(1);
  EXPECT_TRUE(report(1).ends_with(R"("},"message":"data.bin: \"empty\""}})")) << report(1);
  EXPECT_NE(report(0).find(R"("culprit":1)"), std::string::npos) << report(0);
}

TEST(Entrypoint, AnErrorOfOneRankIsPrintedByIt) {
  const Launch launch(3, [](World& world) {
    if (world.rank() == 1) fail(Errc::config, "data.bin: empty");
    world.wait_for_everyone();
  });
  EXPECT_EQ(launch.errors, Lines{"rank 1: data.bin: empty"});
  EXPECT_EQ(launch.statuses, (std::vector{1, 2, 1}));
}

TEST(Entrypoint, DifferentErrorsAreAllPrinted) {
  const Launch launch(2, [](World& world) { fail(Errc::config, "file ", world.rank(), ": empty"); });
  EXPECT_EQ(launch.errors, (Lines{"rank 0: file 0: empty", "rank 1: file 1: empty"}));
  EXPECT_EQ(launch.statuses, (std::vector{2, 2}));
}

// The rank that throws destroys the communicator in which the others wait.
TEST(Entrypoint, AnErrorReachesRanksThatWaitInAnotherCommunicator) {
  const Launch launch(3, [](World& world) {
    Communicator own = world.new_communicator();
    own.barrier().wait();
    if (world.rank() == 1) fail(Errc::io, "weights.bin: damaged");
    own.barrier().wait();
  });
  EXPECT_EQ(launch.errors, Lines{"rank 1: weights.bin: damaged"});
  EXPECT_EQ(launch.statuses, (std::vector{1, 1, 1}));
}

TEST(Entrypoint, ALostRankIsNamedByTheOthers) {
  const Launch launch(3, [](World& world) {
    Communicator own = world.new_communicator();
    own.barrier().wait();
    if (world.rank() == 1) ::raise(SIGKILL);
    own.barrier().wait();
  });
  EXPECT_EQ(launch.statuses, (std::vector{1, 128 + SIGKILL, 1}));
  ASSERT_FALSE(launch.errors.empty());
  for (const std::string& line : launch.errors) EXPECT_NE(line.find("rank 1 "), line.npos) << line;
}

}  // namespace
}  // namespace rz
