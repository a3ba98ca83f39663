// Failures are named on every rank, in time. Each test is a job of its own.

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <numeric>
#include <thread>
#include <vector>

#include "comm/backends/mpi/mpi_runtime.h"
#include "comm/core/deadline.h"
#include "comm/os/spin.h"
#include "tests/mpi/world.h"

namespace rz {
namespace {

using namespace std::chrono_literals;
using test::connect;
using test::error_of;
using test::quick;
using test::world_rank;
using test::world_size;
using Clock = std::chrono::steady_clock;

void wait_for_all(const std::string& where) {
  test::world_store()->set(concat(where, "/", world_rank()), "");
  for (int r = 0; r < world_size(); ++r)
    test::world_store()->get(concat(where, "/", r), Deadline::after(30s));
}

bool has_text(const Error& e, const std::string& text) {
  return std::string(e.what()).find(text) != std::string::npos;
}

TEST(Failure, ARankThatMakesNoCallIsNamed) {
  auto comm = connect(quick("mpi", 700ms));
  const int missing = world_size() - 1;
  std::vector<float> x(1000, 1);
  comm.all_reduce({x.data(), x.size()}).wait();
  if (world_rank() != missing) {
    const auto begin = Clock::now();
    const Error e = error_of([&] { comm.all_reduce({x.data(), x.size()}).wait(); });
    EXPECT_EQ(e.code(), Errc::timeout) << e.what();
    EXPECT_EQ(e.culprit(), missing) << e.what();
    EXPECT_TRUE(has_text(e, concat("rank ", missing, " did not call it"))) << e.what();
    EXPECT_TRUE(has_text(e, "all_reduce #1 (1000 f32, sum)")) << e.what();
    EXPECT_LT(Clock::now() - begin, 5s);
  }
  wait_for_all("timed out");
  EXPECT_EQ(error_of([&] { comm.barrier().wait(); }).code(), Errc::timeout);
}

TEST(Failure, AnUnmatchedReceiveNamesThePeer) {
  auto comm = connect(quick("mpi", 700ms));
  float x = 0;
  if (world_rank() == 0) {
    const Error e = error_of([&] { comm.recv({&x, 1}, 1).wait(); });
    EXPECT_EQ(e.code(), Errc::timeout) << e.what();
    EXPECT_EQ(e.culprit(), 1) << e.what();
  }
  wait_for_all("timed out");
}

TEST(Failure, DifferentCallsAreNamedOnEveryRank) {
  auto comm = connect(quick("mpi"));
  std::vector<float> x(8, 1);
  const int odd = world_size() - 1;
  const auto begin = Clock::now();
  const Error e = error_of([&] {
    if (world_rank() == odd)
      comm.broadcast({x.data(), 5}, 0).wait();
    else
      comm.all_reduce({x.data(), 8}).wait();
  });
  EXPECT_EQ(e.code(), Errc::mismatch) << e.what();
  EXPECT_TRUE(has_text(e, "all_reduce #0 (8 f32, sum)") && has_text(e, "broadcast #0 (5 f32, root 0)"))
      << e.what();
  EXPECT_TRUE(has_text(e, concat("rank ", odd, " called broadcast")) ||
              has_text(e, concat("rank ", odd, " called ")) || world_rank() == odd)
      << e.what();
  EXPECT_EQ(e.culprit(), world_size() > 2 ? odd : -1) << e.what();
  EXPECT_LT(Clock::now() - begin, 5s);
  EXPECT_EQ(error_of([&] { comm.barrier().wait(); }).code(), Errc::mismatch);
}

// A point-to-point message on one rank and an MPI collective on another would never match.
TEST(Failure, ADevicesMemoryBesideAHostsIsNamed) {
  const auto backend = mpi_backend(MPI_COMM_WORLD, {.timeout = 30s});
  std::vector<float> x(8, 1);
  CollectiveCall op{.kind = Collective::broadcast, .in = Buffer(x.data(), 8), .out = Buffer(x.data(), 8)};
  if (world_rank() == 1) op.in.device = op.out.device = {Device::cuda, 0};
  const Error e = error_of([&] { backend->submit({&op, 1}).wait(); });
  EXPECT_EQ(e.code(), Errc::mismatch) << e.what();
  EXPECT_TRUE(has_text(e, "broadcast #0 (8 f32, root 0, algorithm 1)")) << e.what();
}

TEST(Failure, AnAbsentDeviceIsNamed) {
  CommOptions options = quick("mpi");
  options.device = {Device::cuda, 99};
  for (const bool by_store : {true, false}) {
    const Error e = error_of([&] { by_store ? connect(options) : connect_mpi(MPI_COMM_WORLD, options); });
    EXPECT_EQ(e.code(), Errc::config) << e.what();
    EXPECT_TRUE(has_text(e, "cuda:99 is not there")) << e.what();
  }
}

TEST(Failure, ADevicesMemoryIsNotCombined) {
  const auto backend = mpi_backend(MPI_COMM_WORLD, {.timeout = 30s});
  std::vector<float> x(8, 1);
  const Device device{Device::cuda, 0};
  const CollectiveCall op{
      .kind = Collective::all_reduce, .in = Buffer(x.data(), 8, device), .out = Buffer(x.data(), 8, device)};
  const Error e = error_of([&] { backend->submit({&op, 1}).wait(); });
  EXPECT_TRUE(has_text(e, "MPI was given memory on cuda:0 to combine; copy it to the host")) << e.what();
}

TEST(Failure, DifferentCountsAreNamed) {
  auto comm = connect(quick("mpi"));
  std::vector<float> x(8, 1);
  const Error e = error_of([&] { comm.all_reduce({x.data(), world_rank() == 0 ? 8u : 7u}).wait(); });
  EXPECT_EQ(e.code(), Errc::mismatch) << e.what();
  EXPECT_TRUE(has_text(e, "(8 f32, sum)") && has_text(e, "(7 f32, sum)")) << e.what();
}

TEST(Failure, MismatchedAllToAllCountsAreNamed) {
  auto comm = connect(quick("mpi"));
  const auto ranks = static_cast<std::size_t>(world_size());
  std::vector<std::size_t> one(ranks, 1), receive(ranks, 1), at(ranks);
  for (std::size_t r = 0; r < ranks; ++r) at[r] = 2 * r;
  if (world_rank() == 1) receive[0] = 2;
  static std::vector<int> in(2 * ranks), out(2 * ranks);  // MPI may write there for ever
  const Error e = error_of([&] {
    comm.all_to_all_v(ConstBuffer(in.data(), in.size()), one, at, {out.data(), out.size()}, receive, at)
        .wait();
    comm.barrier().wait();
  });
  EXPECT_EQ(e.code(), Errc::mismatch) << e.what();
  EXPECT_TRUE(has_text(e, "rank 0 sends 1 elements")) << e.what();
}

TEST(Failure, MessagesThatDoNotFitAreNamed) {
  auto comm = connect(quick("mpi"));
  static std::vector<int> x(9);  // MPI may write there for ever
  const Error e = error_of([&] {
    if (world_rank() == 0) comm.send(ConstBuffer(x.data(), 9), 1).wait();
    if (world_rank() == 1) comm.recv({x.data(), 8}, 0).wait();
    comm.barrier().wait();
    comm.barrier().wait();
  });
  EXPECT_EQ(e.code(), Errc::mismatch) << e.what();
  EXPECT_TRUE(has_text(e, "rank 0 sent message #0 of 9 i32")) << e.what();
}

TEST(Failure, AbortEndsEveryRankWithinASecond) {
  auto comm = connect(quick("mpi"));
  comm.barrier().wait();
  if (world_rank() == 0) {
    test::world_store()->set("at", concat(Clock::now().time_since_epoch().count()));
    comm.abort("the user pressed a key");
    comm.abort("twice");
  }
  float x = 1;
  const Error e = error_of([&] {
    for (;;) comm.all_reduce({&x, 1}).wait();
  });
  const auto at = Clock::duration(std::stoll(test::world_store()->get("at", Deadline::after(1s))));
  EXPECT_LT(Clock::now().time_since_epoch() - at, 1s);
  EXPECT_EQ(e.code(), Errc::aborted);
  EXPECT_EQ(e.culprit(), 0);
  EXPECT_TRUE(has_text(e, "the user pressed a key")) << e.what();
}

// Repeated, and with a slow rank: a departing rank's message may arrive before the end of the barrier that
// both take part in.
TEST(Failure, ARankThatLeftIsNamed) {
  std::vector<std::jthread> others;
  if (world_rank() + 1 == world_size())
    for (int i = 0; i < 2; ++i)
      others.emplace_back([](const std::stop_token& over) {
        while (!over.stop_requested()) cpu_pause();
      });
  for (int time = 0; time < 10; ++time) {
    {
      auto comm = connect(quick("mpi"));
      comm.barrier().wait();
      if (world_rank() != 0) {
        const auto begin = Clock::now();
        const Error e = error_of([&] { comm.barrier().wait(); });
        EXPECT_EQ(e.code(), Errc::peer_lost) << e.what();
        EXPECT_EQ(e.culprit(), 0) << e.what();
        EXPECT_LT(Clock::now() - begin, 5s);
      }
    }
    wait_for_all(concat("gone", time));
  }
}

TEST(Failure, DestructionWithOperationsPendingIsBounded) {
  auto comm = std::make_optional(connect(quick("mpi")));
  static std::vector<float> x(500000), y(7);  // MPI may write there for ever
  comm->barrier().wait();
  if (world_rank() == 0) {
    const Work works[] = {comm->all_reduce({x.data(), x.size()}), comm->recv({y.data(), y.size()}, 1)};
    const auto begin = Clock::now();
    comm.reset();
    EXPECT_LT(Clock::now() - begin, 3s);
    for (const Work& w : works) EXPECT_EQ(error_of([&] { w.wait(); }).code(), Errc::aborted);
  } else {
    const Error e = error_of([&] {
      for (;;) comm->barrier().wait();
    });
    EXPECT_TRUE(e.code() == Errc::peer_lost || e.code() == Errc::mismatch) << e.what();
  }
  wait_for_all("gone");
}

// Its progress thread is stopped with it: it cannot reply.
TEST(Failure, AStoppedRankIsNamed) {
  auto comm = connect(quick("mpi", 500ms));
  comm.barrier().wait();
  test::world_store()->set(concat("pid/", world_rank()), concat(getpid()));
  if (world_rank() == 1) {
    kill(getpid(), SIGSTOP);
  } else {
    const Error e = error_of([&] {
      for (;;) comm.barrier().wait();
    });
    EXPECT_EQ(e.code(), Errc::timeout) << e.what();
    EXPECT_EQ(e.culprit(), 1) << e.what();
    EXPECT_TRUE(has_text(e, "rank 1 sent no reply")) << e.what();
    if (world_rank() == 0) kill(std::stoi(test::world_store()->get("pid/1", Deadline::after(1s))), SIGCONT);
  }
  wait_for_all("awake");
  const Error e = error_of([&] {
    for (;;) comm.barrier().wait();  // one may still succeed: in the end all have called it
  });
  EXPECT_EQ(e.code(), Errc::timeout) << e.what();
}

TEST(Failure, CommunicatorsOfAProcessFailAlone) {
  auto first = connect(quick("mpi")), second = connect(quick("mpi"));
  auto part = second.split(0, world_rank());
  if (world_rank() == 1) first.abort();
  EXPECT_EQ(error_of([&] {
              for (;;) first.barrier().wait();
            }).code(),
            Errc::aborted);
  int x = 1, y = 1;
  second.all_reduce({&x, 1}).wait();
  part->all_reduce({&y, 1}).wait();
  EXPECT_EQ(x + y, 2 * world_size());
}

/// `missing` comes to the split `number` when the others have left it. What it is told then.
Error comes_late(Backend& backend, int missing, int number) {
  std::vector<int> members(static_cast<std::size_t>(world_size()));
  std::iota(members.begin(), members.end(), 0);
  const auto begin = Clock::now();
  Error late(Errc::system, "came in time");
  if (world_rank() != missing) {
    const Error e = error_of([&] { backend.split(members, number); });
    EXPECT_EQ(e.code(), Errc::timeout) << e.what();
    EXPECT_EQ(e.culprit(), missing) << e.what();
    EXPECT_TRUE(has_text(e, concat("rank ", missing, " did not come within 1 s"))) << e.what();
  }
  wait_for_all(concat("left ", number));
  if (world_rank() == missing) late = error_of([&] { backend.split(members, number); });
  wait_for_all(concat("told ", number));
  EXPECT_LT(Clock::now() - begin, 8s);
  return late;
}

// MPI_Comm_create_group would wait for it without an end. The group is left as it was.
TEST(Failure, ARankThatComesToNoSplitIsNamed) {
  const auto backend = mpi_backend(MPI_COMM_WORLD, {.timeout = 30s, .rendezvous_timeout = 1s});
  const int last = world_size() - 1;
  if (const Error e = comes_late(*backend, last, 0); world_rank() == last) {
    EXPECT_EQ(e.culprit(), last) << e.what();
    EXPECT_TRUE(has_text(e, concat("rank 0 says: rank ", last, " did not come within 1 s"))) << e.what();
  }
  if (const Error e = comes_late(*backend, 0, 1); world_rank() == 0) {
    EXPECT_EQ(e.code(), Errc::timeout) << e.what();
    EXPECT_EQ(e.culprit(), 1) << e.what();
  }
  std::vector<int> members(static_cast<std::size_t>(world_size()));
  std::iota(members.rbegin(), members.rend(), 0);
  const auto part = backend->split(members, 2);
  float x = 1, y = 1;
  for (Backend* const group : {backend.get(), part.get()}) {
    const CollectiveCall op{.kind = Collective::all_reduce, .in = Buffer(&x, 1), .out = Buffer(&y, 1)};
    group->submit({&op, 1}).wait();
    EXPECT_EQ(y, static_cast<float>(world_size()));
  }
}

TEST(Failure, ARankThatLeftIsNamedInASplit) {
  for (const int first : {0, 1}) {
    auto backend = mpi_backend(MPI_COMM_WORLD, {.timeout = 5s, .rendezvous_timeout = 20s});
    const std::vector<int> members{first, 1 - first};
    if (world_rank() == 1) backend.reset();
    if (world_rank() == 0) {
      const Error e = error_of([&] { backend->split(members, 0); });
      EXPECT_EQ(e.code(), Errc::peer_lost) << e.what();
      EXPECT_EQ(e.culprit(), 1) << e.what();
    }
    wait_for_all(concat("over ", first));
  }
}

// A member may end after it has come. In a program that is not MPI_THREAD_MULTIPLE the process ends:
// `stuck` in main.cpp.
TEST(Failure, ACallThatDoesNotReturnIsLeft) {
  if (!test::threaded()) GTEST_SKIP();
  constexpr int tag = 77;
  const auto number = std::make_shared<int>(0);
  const auto begin = Clock::now();
  const Error e = error_of([&] {
    mpi::MpiRuntime::instance().call_within(300ms, "MPI_Recv", [number, self = world_rank()] {
      MPI_Recv(number.get(), 1, MPI_INT, self, tag, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    });
  });
  EXPECT_EQ(e.code(), Errc::timeout) << e.what();
  EXPECT_TRUE(has_text(e, concat("rank ", world_rank(),
                                 " of MPI_COMM_WORLD: MPI_Recv did not return within "
                                 "0.3 s")))
      << e.what();
  EXPECT_LT(Clock::now() - begin, 5s);
  const int one = 1;
  MPI_Send(&one, 1, MPI_INT, world_rank(), tag, MPI_COMM_WORLD);
  const auto end = Deadline::after(10s);
  while (number.use_count() > 1 && !end.expired()) std::this_thread::sleep_for(1ms);
  EXPECT_EQ(*number, 1);
}

TEST(Failure, BadCommunicatorsAreRefused) {
  EXPECT_EQ(error_of([] { connect_mpi(MPI_COMM_NULL); }).code(), Errc::invalid_argument);
  EXPECT_EQ(error_of([] { mpi_backend(MPI_COMM_WORLD, {.max_call_bytes = 7}); }).code(),
            Errc::invalid_argument);
}

// MPI cannot cancel what a rank has called: it is left behind, and the next generation has a communicator of
// its own.
TEST(Failure, AGroupGoesOnInANewGeneration) {
  auto comm = connect(quick("mpi"));
  std::vector<float> x(1000);
  for (int round = 0; round < 6; ++round) {
    const int culprit = round % world_size();
    if (world_rank() != culprit) {
      const Error e = error_of([&] {
        for (;;) comm.all_reduce({x.data(), x.size()}, ReduceOp::max).wait();
      });
      EXPECT_EQ(e.code(), Errc::cancelled) << e.what();
      EXPECT_EQ(e.culprit(), culprit) << e.what();
    }
    comm.renew();
    std::fill(x.begin(), x.end(), static_cast<float>(round));
    comm.all_reduce({x.data(), x.size()}).wait();
    EXPECT_EQ(std::count(x.begin(), x.end(), static_cast<float>(round * world_size())), 1000);
  }
}

}  // namespace
}  // namespace rz
