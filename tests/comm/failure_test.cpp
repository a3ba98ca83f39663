// Runs: serial alone
// Not under the thread sanitizer: AStoppedRankIsNamedByIndirectWaiters

#include <dlfcn.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <future>
#include <thread>
#include <vector>

#include "comm/communicator.h"
#include "comm/core/deadline.h"
#include "comm/core/error.h"
#include "tests/lab/group.h"
#include "tests/support/error_of.h"
#include "tests/support/ranks.h"

namespace {
/// While it exists, an allocation stops where it requests memory from the system.
struct HeldAllocation {
  std::promise<void> begun, go_on;
};
std::atomic<HeldAllocation*> held_allocation{nullptr};
}  // namespace

/// Replaces the system's.
extern "C" int memfd_create(const char* name, unsigned flags) noexcept {
  if (HeldAllocation* const held = held_allocation.exchange(nullptr)) {
    held->begun.set_value();
    held->go_on.get_future().wait();
  }
  static const auto real = reinterpret_cast<int (*)(const char*, unsigned)>(dlsym(RTLD_NEXT, "memfd_create"));
  return real(name, flags);
}

namespace rz {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;
using test::error_of;
using test::run_processes;
using test::run_ranks;

CommOptions quick(const std::string& transport = "auto") {
  CommOptions options;
  options.timeout = 20s;
  options.transport = transport;
  return options;
}

// Deadlines that a working rank must meet and a stopped one must miss; longer under the thread sanitizer,
// where work is slower.
#ifdef __SANITIZE_THREAD__
constexpr auto short_timeout = 2000ms;
#else
constexpr auto short_timeout = 400ms;
#endif

// steady_clock is the same for all processes of a machine.
std::string now_text() { return std::to_string(Clock::now().time_since_epoch().count()); }
Clock::duration since(const std::string& text) {
  return Clock::now().time_since_epoch() - Clock::duration(std::stoll(text));
}

template <class F>
void expect_error(Errc code, int culprit, const F& call) {
  const Error e = error_of(call);
  EXPECT_EQ(e.code(), code) << e.what();
  EXPECT_EQ(e.culprit(), culprit) << e.what();
}

void reduce_until_killed(Communicator& comm, std::size_t n) {
  std::vector<float> x(n, 1);
  for (;;) {
    std::fill(x.begin(), x.end(), 1.0f);
    comm.all_reduce({x.data(), n}).wait();
  }
}

// Sends itself a signal during the work of the other threads.
std::thread signal_soon(int signal, std::shared_ptr<Store> store) {
  return std::thread([=] {
    std::this_thread::sleep_for(60ms);
    store->set("at", now_text());
    kill(getpid(), signal);
  });
}

// Process tests come first: they fork before this process has threads.
class Transports : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Over, Transports, testing::Values("shm", "tcp"),
                         [](const auto& info) { return info.param; });

TEST_P(Transports, AKilledRankIsNamedByTheOthersWithinTwoSeconds) {
  for (const std::size_t n : {std::size_t{2}, std::size_t{300000}}) {
    const auto endings = run_processes(3, [&](int rank, auto store) {
      auto comm = Communicator::connect(rank, 3, store, quick(GetParam()));
      if (rank == 1) signal_soon(SIGKILL, store).detach();
      expect_error(Errc::peer_lost, 1, [&] { reduce_until_killed(comm, n); });
      EXPECT_LT(since(store->get("at", Deadline::after(60s))), 2s);
      expect_error(Errc::peer_lost, 1, [&] { comm.barrier().wait(); });
    });
    for (const int survivor : {0, 2})
      EXPECT_EQ(endings[static_cast<std::size_t>(survivor)].exit_code, 0)
          << endings[static_cast<std::size_t>(survivor)].error;
    EXPECT_EQ(endings[1].signal, SIGKILL) << endings[1].error;
  }
}

TEST(Failure, AKilledRankIsNamedBySingleCopyReaders) {
  const auto endings = run_processes(3, [&](int rank, auto store) {
    auto options = quick();
    options.algorithm = "all_gather=single_copy";
    auto comm = Communicator::connect(rank, 3, store, options);
    if (rank == 1) signal_soon(SIGKILL, store).detach();
    std::vector<float> x(100'000), all(300'000);
    expect_error(Errc::peer_lost, 1, [&] {
      for (;;) comm.all_gather({x.data(), x.size()}, {all.data(), all.size()}).wait();
    });
    EXPECT_LT(since(store->get("at", Deadline::after(60s))), 2s);
  });
  for (const std::size_t survivor : {0, 2})
    EXPECT_EQ(endings[survivor].exit_code, 0) << endings[survivor].error;
  EXPECT_EQ(endings[1].signal, SIGKILL) << endings[1].error;
}

// At times each rank waits for both others, but only one of them never comes.
TEST_P(Transports, AStoppedRankIsNamedByATimeout) {
  for (const std::size_t n : {std::size_t{2}, std::size_t{300000}}) {
    for (const int stopped : {0, 2}) {
      test::expect_processes(3, [&](int rank, auto store) {
        auto options = quick(GetParam());
        options.timeout = short_timeout;
        auto comm = Communicator::connect(rank, 3, store, options);
        store->set("pid/" + std::to_string(rank), std::to_string(getpid()));
        std::thread stopper;
        if (rank == stopped) stopper = signal_soon(SIGSTOP, store);
        expect_error(Errc::timeout, stopped, [&] { reduce_until_killed(comm, n); });
        if (stopper.joinable()) stopper.join();
        if (rank == stopped) return;
        EXPECT_LT(since(store->get("at", Deadline::after(60s))), short_timeout + 1600ms);
        store->set("saw/" + std::to_string(rank), "");
        if (rank != 1) return;
        store->get("saw/" + std::to_string(2 - stopped), Deadline::after(60s));
        kill(std::stoi(store->get("pid/" + std::to_string(stopped), Deadline::after(60s))), SIGCONT);
      });
    }
  }
}

TEST_P(Transports, ATimeoutNamesTheLineOfTheCall) {
  run_ranks(2, [](int rank, auto store) {
    CommOptions options = quick(GetParam());
    options.timeout = short_timeout;
    auto comm = Communicator::connect(rank, 2, store, options);
    float x = 1;
    if (rank == 1) return void(store->get("ended", Deadline::after(60s)));
    const Error e = error_of([&] { comm.all_reduce({&x, 1}).wait(); });
    test::expect_parts(e.what(), {concat("all_reduce at failure_test.cpp:", __LINE__ - 1, " did not end")});
    store->set("ended", "");
  });
}

// Where a schedule relays, most ranks wait for a live rank that itself waits for the stopped one: they name
// the stopped one.
struct Relayed {
  std::string algorithm, transport;
  std::vector<int> node;  // of every rank
};

void expect_all_to_name(int stopped, std::size_t n, const Relayed& by) {
  const int size = static_cast<int>(by.node.size()), waker = stopped == 0 ? 1 : 0;
  test::expect_processes(size, [&](int rank, auto store) {
    auto options = quick(by.transport);
    options.timeout = short_timeout;
    options.algorithm = by.algorithm;
    options.deterministic = false;
    options.host_id = std::to_string(by.node[static_cast<std::size_t>(rank)]);
    auto comm = Communicator::connect(rank, size, store, options);
    store->set(concat("pid/", rank), std::to_string(getpid()));
    std::thread stopper;
    if (rank == stopped) stopper = signal_soon(SIGSTOP, store);
    expect_error(Errc::timeout, stopped, [&] { reduce_until_killed(comm, n); });
    if (stopper.joinable()) stopper.join();
    store->set(concat("saw/", rank), "");
    if (rank != waker) return;
    for (int r = 0; r < size; ++r)
      if (r != stopped) store->get(concat("saw/", r), Deadline::after(60s));
    kill(std::stoi(store->get(concat("pid/", stopped), Deadline::after(60s))), SIGCONT);
  });
}

TEST(Failure, AStoppedRankIsNamedByIndirectWaiters) {
  for (const char* algorithm : {"two_shot", "chain", "ring", "tree", "halving_doubling"})
    for (const int stopped : {1, 3}) {
      SCOPED_TRACE(concat(algorithm, ", rank ", stopped));
      expect_all_to_name(stopped, 2, {algorithm, "tcp", {0, 1, 2, 3}});
    }
  for (const char* algorithm : {"hierarchical", "hierarchical_chain", "chain"}) {
    SCOPED_TRACE(concat(algorithm, " over two nodes"));
    expect_all_to_name(3, 2, {algorithm, "auto", {0, 0, 1, 1}});
  }
  expect_all_to_name(3, 300000, {"chain", "tcp", {0, 1, 2, 3}});
  expect_all_to_name(3, 300000, {"two_shot", "shm", {0, 0, 0, 0}});
}

TEST_P(Transports, AGroupOfTheOthersOutlivesADeadRank) {
  const auto endings = run_processes(3, [&](int rank, auto store) {
    auto all = Communicator::connect(rank, 3, store, quick(GetParam()));
    auto part = all.split(rank / 2, rank);
    if (rank == 2) kill(getpid(), SIGKILL);
    expect_error(Errc::peer_lost, 2, [&] { reduce_until_killed(all, 1000); });
    int x = 1;
    part->all_reduce({&x, 1}).wait();
    EXPECT_EQ(x, 2);
  });
  EXPECT_EQ(endings[0].exit_code, 0) << endings[0].error;
  EXPECT_EQ(endings[1].exit_code, 0) << endings[1].error;
}

TEST_P(Transports, DestructionWithOperationsPendingIsBounded) {
  run_ranks(2, [&](int rank, auto store) {
    auto comm = std::make_optional(Communicator::connect(rank, 2, store, quick(GetParam())));
    if (rank == 0) {
      std::vector<float> x(500000), y(7), z(900000);
      const Work works[] = {comm->all_reduce({x.data(), x.size()}), comm->recv({y.data(), y.size()}, 1),
                            comm->send(ConstBuffer(z.data(), z.size()), 1), comm->barrier()};
      const auto begin = Clock::now();
      comm.reset();
      EXPECT_LT(Clock::now() - begin, 2s);
      for (const Work& w : works) EXPECT_TRUE(w.done());
      for (const int i : {0, 1, 3})  // data sent may be in flight
        EXPECT_EQ(error_of([&] { works[i].wait(); }).code(), Errc::aborted);
      store->set("gone", "");
      return;
    }
    store->get("gone", Deadline::after(60s));
    expect_error(Errc::peer_lost, 0, [&] { reduce_until_killed(*comm, 500000); });
  });
}

// Of several pending messages, the one whose deadline has passed names its peer.
TEST(Failure, AnUnmatchedReceiveNamesThePeer) {
  run_ranks(3, [](int rank, auto store) {
    auto options = quick();
    options.timeout = short_timeout;
    auto comm = Communicator::connect(rank, 3, store, options);
    if (rank == 0) {
      float x = 0, y = 0;
      const Work first = comm.recv({&x, 1}, 2);
      std::this_thread::sleep_for(short_timeout / 4);
      const Work second = comm.recv({&y, 1}, 1);
      expect_error(Errc::timeout, 2, [&] { first.wait(); });
      expect_error(Errc::timeout, 2, [&] { second.wait(); });
    }
    store->set(concat("done/", rank), "");
    for (int r = 0; r < 3; ++r) store->get(concat("done/", r), Deadline::after(60s));
  });
}

// Rank 0 waits for a live rank, that one for rank 2, rank 2 for rank 3, which computes.
TEST_P(Transports, ALateMessageNamesTheRankThatDelayedItsSender) {
  run_ranks(4, [&](int rank, auto store) {
    auto options = quick(GetParam());
    options.timeout = rank == 0 ? short_timeout : 20s;
    auto comm = Communicator::connect(rank, 4, store, options);
    float x = 0;
    if (rank == 3)
      for (int r = 0; r < 3; ++r) store->get(concat("saw/", r), Deadline::after(60s));
    expect_error(Errc::timeout, 3, [&] {
      if (rank == 3) comm.barrier().wait();
      comm.recv({&x, 1}, rank + 1).wait();
    });
    store->set(concat("saw/", rank), "");
    for (int r = 0; r < 4; ++r) store->get(concat("saw/", r), Deadline::after(60s));
  });
}

// A thread that waits while another one destroys the communicator does not hang.
TEST(Failure, DestructionEndsAThreadThatWaits) {
  run_ranks(2, [](int rank, auto store) {
    auto comm = std::make_optional(Communicator::connect(rank, 2, store, quick()));
    if (rank == 0) {
      float x = 1;
      const Work work = comm->recv({&x, 1}, 1);
      std::thread waits([&] { EXPECT_EQ(error_of([&] { work.wait(); }).code(), Errc::aborted); });
      std::this_thread::sleep_for(30ms);
      const auto begin = Clock::now();
      comm.reset();
      EXPECT_LT(Clock::now() - begin, 2s);
      waits.join();
    }
    store->set(rank ? "one" : "zero", "");
    store->get(rank ? "zero" : "one", Deadline::after(60s));
  });
}

TEST_P(Transports, AnUnattendedFailureIsThrownByTheNextCall) {
  lab::group(3, quick(GetParam()), [&](Communicator& comm) {
    std::vector<float> x(comm.rank() == 2 ? 3 : 5, 1);
    {
      const Work work = comm.all_reduce({x.data(), x.size()});
      const auto end = Deadline::after(5s);
      while (!work.done() && !end.expired()) std::this_thread::sleep_for(1ms);
      ASSERT_TRUE(work.done()) << "no thread advanced it";
    }
    EXPECT_EQ(error_of([&] { static_cast<void>(comm.barrier()); }).code(), Errc::mismatch);
    EXPECT_EQ(error_of([&] { static_cast<void>(comm.barrier()); }).code(), Errc::mismatch);
  });
}

TEST_P(Transports, AbortFromAnotherThreadEndsWaits) {
  lab::group(3, quick(GetParam()), [&](Communicator& comm) {
    std::vector<float> x(100000);
    std::thread aborter;
    if (comm.rank() == 0) {
      aborter = std::thread([&] {
        std::this_thread::sleep_for(50ms);
        const auto begin = Clock::now();
        comm.abort("the user pressed a key");
        comm.abort("twice");
        EXPECT_LT(Clock::now() - begin, 1s);
      });
    }
    const auto begin = Clock::now();
    // Rank 2 does not take part; its next call throws the abort.
    if (comm.rank() == 2) std::this_thread::sleep_for(200ms);
    const Error e = error_of([&] { comm.all_reduce({x.data(), x.size()}).wait(); });
    EXPECT_LT(Clock::now() - begin, 2s);
    EXPECT_EQ(e.code(), Errc::aborted);
    EXPECT_EQ(e.culprit(), 0);
    EXPECT_NE(std::string(e.what()).find("the user pressed a key"), std::string::npos) << e.what();
    if (aborter.joinable()) aborter.join();
    expect_error(Errc::aborted, 0, [&] { comm.barrier().wait(); });
  });
}

// A large allocation takes seconds.
TEST(Failure, AnAllocationBlocksNeitherCallsNorAbort) {
  lab::group(2, quick("shm"), [](Communicator& comm) {
    HeldAllocation held;
    std::future<std::shared_ptr<std::byte>> allocation;
    if (comm.rank() == 0) {
      held_allocation = &held;
      allocation = std::async(std::launch::async, [&] { return comm.allocate(4 << 20); });
      held.begun.get_future().wait();
    }
    auto calls = std::async(std::launch::async, [&] {
      float x = 1;
      for (int i = 0; i < 10; ++i) comm.all_reduce({&x, 1}, ReduceOp::max).wait();
    });
    EXPECT_EQ(calls.wait_for(10s), std::future_status::ready) << "calls of rank " << comm.rank();
    if (comm.rank() == 0) {
      auto abort = std::async(std::launch::async, [&] { comm.abort("the test's"); });
      EXPECT_EQ(abort.wait_for(10s), std::future_status::ready) << "abort()";
      held.go_on.set_value();
      EXPECT_NE(allocation.get(), nullptr);
    }
    calls.wait();
    expect_error(Errc::aborted, 0, [&] { reduce_until_killed(comm, 10); });
  });
}

TEST(Failure, CommunicatorsOfAProcessFailAlone) {
  run_ranks(3, [](int rank, auto store) {
    auto first = Communicator::connect(rank, 3, prefix_store(store, "first/"), quick("shm"));
    auto second = Communicator::connect(rank, 3, prefix_store(store, "second/"), quick("tcp"));
    auto third = second.split(0, -rank);
    for (int i = 0; i < 20; ++i) {
      if (i == 10 && rank == 1) first.abort();
      int x = 1, y = 1;
      second.all_reduce({&x, 1}).wait();
      third->all_reduce({&y, 1}).wait();
      EXPECT_EQ(x + y, 6);
    }
    expect_error(Errc::aborted, 1, [&] { reduce_until_killed(first, 10); });
    third->barrier().wait();
    second.barrier().wait();
  });
}

// An error on one rank ends the calls of the others soon, before their timeout.
TEST(Failure, AnErrorOfOneRankReachesTheOthers) {
  lab::group(3, quick(), [](Communicator& comm) {
    const auto begin = Clock::now();
    if (comm.rank() == 1) {
      // More memory than any machine has, for the copy that the factor needs; the input is not read.
      constexpr std::size_t n = std::size_t{1} << 44;
      auto* far = reinterpret_cast<float*>(std::uintptr_t{1} << 20);
      EXPECT_EQ(
          error_of([&] {
            comm.reduce_scatter(ConstBuffer(far, 3 * n), Buffer(far + n, n), ReduceOp::premul(2)).wait();
          }).code(),
          Errc::system);
    } else {
      expect_error(Errc::aborted, 1, [&] { comm.barrier().wait(); });
    }
    EXPECT_LT(Clock::now() - begin, 5s);
  });
}

TEST(Failure, AnUnknownAlgorithmIsRefusedBeforeConnecting) {
  auto options = quick();
  options.algorithm = "telepathy";
  const Error unknown = error_of([&] { Communicator::connect(0, 1, nullptr, options); });
  EXPECT_EQ(unknown.code(), Errc::config) << unknown.what();
  options.algorithm = "ring";
  const Error unordered = error_of([&] { Communicator::connect(0, 1, nullptr, options); });
  EXPECT_EQ(unordered.code(), Errc::config) << unordered.what();
  EXPECT_NE(std::string(unordered.what()).find("deterministic"), std::string::npos) << unordered.what();
}

}  // namespace
}  // namespace rz
