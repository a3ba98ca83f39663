// Runs: alone

#include "comm/communicator.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <filesystem>
#include <fstream>
#include <functional>
#include <mutex>
#include <numeric>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "comm/core/deadline.h"
#include "comm/core/error.h"
#include "comm/os/helper_thread.h"
#include "tests/lab/group.h"
#include "tests/support/error_of.h"
#include "tests/support/forked.h"
#include "tests/support/helper_threads.h"
#include "tests/support/ranks.h"

namespace rz {
namespace {

using test::expect_parts;
using test::run_ranks;
using test::threads_of_process;

CommOptions quick() {
  CommOptions options;
  options.timeout = std::chrono::seconds(20);
  return options;
}

// How often these threads have slept.
long sleeps(const std::set<int>& of) {
  long sum = 0;
  for (const int thread : of) {
    std::ifstream status("/proc/self/task/" + std::to_string(thread) + "/status");
    for (std::string line; std::getline(status, line);)
      if (line.starts_with("voluntary_ctxt_switches:")) sum += std::stol(line.substr(line.find(':') + 1));
  }
  return sum;
}

TEST(HelperThread, BlocksAllSignalsButItsOwnFaults) {
  sigset_t before, within, after;
  pthread_sigmask(SIG_BLOCK, nullptr, &before);
  helper_thread([&] { pthread_sigmask(SIG_BLOCK, nullptr, &within); }).join();
  pthread_sigmask(SIG_BLOCK, nullptr, &after);
  for (int s = 1; s <= 31; ++s) {
    if (s == SIGKILL || s == SIGSTOP) continue;
    EXPECT_EQ(sigismember(&within, s) == 0, test::is_fault(s)) << strsignal(s);
    EXPECT_EQ(sigismember(&before, s), sigismember(&after, s)) << strsignal(s);
  }
}

// So that signal handlers of the embedding program run on that program's threads.
TEST(Communicator, ItsThreadsBlockSignals) {
  test::HelperThreads helpers(2);
  run_ranks(2, [&](int rank, auto store) {
    helpers.begin();
    const auto server = rank == 0 ? tcp_store("127.0.0.1:0", true) : nullptr;
    const Stream team = Stream::host(3);
    const auto comm = Communicator::connect(rank, 2, store, quick());
    helpers.expect_no_signals(rank == 0 ? 1 + 2 + 1 : 2 + 1);  // threads of the store, a team, progress
  });
}

TEST(Communicator, BuffersAreSpansVectorsAndArrays) {
  static_assert(!std::is_convertible_v<const std::vector<float>&, Buffer>);
  static_assert(!std::is_convertible_v<std::span<const float>, Buffer>);
  static_assert(!std::is_convertible_v<std::vector<float>, ConstBuffer>,
                "of a temporary nothing would be left");
  static_assert(!std::is_convertible_v<int&, Buffer>);
  lab::group(2, quick(), [](Communicator& comm) {
    std::vector<float> sums(3, static_cast<float>(comm.rank() + 1));
    comm.all_reduce(sums).wait();
    EXPECT_EQ(sums, std::vector<float>(3, 3));
    const std::vector<std::int64_t> own(2, comm.rank());
    std::array<std::int64_t, 4> all{};
    comm.all_gather(own, all).wait();
    EXPECT_EQ(all, (std::array<std::int64_t, 4>{0, 0, 1, 1}));
    double part[2] = {7.0, 8.0};
    comm.broadcast(std::span(part).subspan(comm.rank(), 1), 1).wait();  // at other places on each rank
    EXPECT_EQ(part[comm.rank()], 8.0);
    std::vector<float> sum(comm.rank() == 0 ? 3 : 0);
    comm.reduce(std::span<const float>(sums), sum, 0).wait();
    EXPECT_EQ(sum, std::vector<float>(sum.size(), 6));
  });
}

TEST(Communicator, SumsOverRanksInPlace) {
  for (int size : {1, 2, 3, 4}) {
    lab::group(size, quick(), [&](Communicator& comm) {
      for (std::size_t n : {0, 1, 2, 3, 17, 1000, 100003}) {
        std::vector<float> x(n);
        for (std::size_t i = 0; i < n; ++i)
          x[i] = static_cast<float>(comm.rank() + 1) * static_cast<float>(i % 97);
        comm.all_reduce({x.data(), n}).wait();
        for (std::size_t i = 0; i < n; ++i)
          ASSERT_EQ(x[i], static_cast<float>(size * (size + 1) / 2) * static_cast<float>(i % 97)) << i;
      }
    });
  }
}

/// Calls of one collective that repeat, between rejected ones. A call like the previous one takes the fast
/// path, which must detect the same errors; the group continues after all ranks have rejected a call.
struct RepeatedCalls {
  static constexpr std::size_t n = 6;
  static constexpr int root = 1;

  RepeatedCalls(Communicator& c, int r) : comm(c), rank(r) {}
  /// Other values for each round.
  void set_round(int r) {
    round = r;
    for (std::size_t i = 0; i < in.size(); ++i) in[i] = of(rank, i);
  }
  /// The input of that rank.
  float of(int r, std::size_t i) const {
    return static_cast<float>(100 * round + 10 * r) + static_cast<float>(i);
  }
  float sum(std::size_t i) const { return of(0, i) + of(1, i); }
  std::size_t shard(std::size_t i) const { return static_cast<std::size_t>(rank) * n + i; }
  float gathered(std::size_t i) const { return of(static_cast<int>(i / n), i % n); }

  /// Makes the call twice, and compares the first `count` elements of `out` with expected(i).
  template <class Call, class Expected>
  void accept(const Call& call, std::size_t count, const Expected& expected) {
    for (int i = 0; i < 2; ++i) out.fill(-1), call().wait();
    for (std::size_t i = 0; i < count; ++i) EXPECT_EQ(out[i], expected(i)) << i;
  }
  template <class Call>
  void refuse(const Call& call) {
    EXPECT_EQ(test::error_of([&] { call().wait(); }).code(), Errc::invalid_argument);
  }

  void all_reduce() {
    accept(
        [&] {
          return comm.all_reduce(part, {out.data(), n}, ReduceOp::sum);
        },
        n, [&](std::size_t i) { return sum(i); });
    refuse([&] { return comm.all_reduce(part, {in.data() + 1, n}, ReduceOp::sum); });
    refuse([&] { return comm.all_reduce(part, {out.data(), n - 1}, ReduceOp::sum); });
    refuse([&] { return comm.all_reduce(part, {other.data(), n}, ReduceOp::sum); });
    refuse([&] { return comm.all_reduce({nothing, n}); });
  }
  void reduce_scatter() {
    accept(
        [&] {
          return comm.reduce_scatter(whole, {out.data(), n});
        },
        n, [&](std::size_t i) { return sum(shard(i)); });
    refuse([&] { return comm.reduce_scatter(whole, {in.data() + 1, n}); });
    refuse([&] { return comm.reduce_scatter(part, {out.data(), n}); });
  }
  void all_gather() {
    accept(
        [&] {
          return comm.all_gather(part, {out.data(), 2 * n});
        },
        2 * n, [&](std::size_t i) { return gathered(i); });
    refuse([&] { return comm.all_gather(part, {in.data() + 1, 2 * n}); });
    refuse([&] { return comm.all_gather(part, {out.data(), 3 * n}); });
  }
  void broadcast() {
    accept(
        [&] {
          return comm.broadcast(part, {out.data(), n}, root);
        },
        n, [&](std::size_t i) { return of(root, i); });
    refuse([&] { return comm.broadcast(part, {nothing, n}, root); });
    refuse([&] { return comm.broadcast({out.data(), n}, 2); });
  }
  void reduce() {
    accept(
        [&] {
          return comm.reduce(part, {out.data(), n}, root);
        },
        rank == root ? n : 0, [&](std::size_t i) { return sum(i); });
    refuse([&] { return comm.reduce({nothing, n}, {out.data(), n}, root); });
  }
  void gather() {
    accept(
        [&] {
          return comm.gather(part, {out.data(), 2 * n}, root);
        },
        rank == root ? 2 * n : 0, [&](std::size_t i) { return gathered(i); });
    refuse([&] { return comm.gather({nothing, n}, {out.data(), 2 * n}, root); });
  }
  void scatter() {
    accept(
        [&] {
          return comm.scatter(whole, {out.data(), n}, root);
        },
        n, [&](std::size_t i) { return of(root, shard(i)); });
    refuse([&] { return comm.scatter(whole, {nothing, n}, root); });
  }

  Communicator& comm;
  const int rank;
  int round = 0;
  std::array<float, 4 * n> in, out;
  std::array<std::int32_t, n> other{};
  float* const nothing = nullptr;
  const ConstBuffer whole{in.data(), 2 * n}, part{in.data(), n};
};

TEST(Communicator, RepeatedCallsAreChecked) {
  lab::group(2, quick(), [&](Communicator& comm) {
    RepeatedCalls calls(comm, comm.rank());
    for (int round = 1; round < 4; ++round) {
      calls.set_round(round);
      calls.all_reduce();
      calls.reduce_scatter();
      calls.all_gather();
      calls.broadcast();
      calls.reduce();
      calls.gather();
      calls.scatter();
    }
  });
}

TEST(Communicator, MessagesCrossWithoutDeadlock) {
  lab::group(2, quick(), [&](Communicator& comm) {
    const std::size_t n = 1 << 20;
    std::vector<int> out(n, comm.rank()), in(n, -1);
    auto sent = comm.send(ConstBuffer(out.data(), n), 1 - comm.rank());
    comm.recv({in.data(), n}, 1 - comm.rank()).wait();
    sent.wait();
    EXPECT_EQ(in, std::vector<int>(n, 1 - comm.rank()));
  });
}

TEST(Communicator, CollectivesEndWhileAnotherThreadWaitsForAMessage) {
  lab::group(2, quick(), [&](Communicator& comm) {
    const int rank = comm.rank();
    int late = -1;
    auto message = comm.recv({&late, 1}, 1 - rank);
    std::thread waiter([&] { message.wait(); });
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    float x = static_cast<float>(rank);
    for (int i = 0; i < 200; ++i) comm.all_reduce({&x, 1}, ReduceOp::max).wait();
    EXPECT_EQ(x, 1);
    EXPECT_FALSE(message.done());
    comm.barrier().wait();
    comm.send(ConstBuffer(&rank, 1), 1 - rank).wait();
    waiter.join();
    EXPECT_EQ(late, 1 - rank);
  });
}

TEST(Communicator, AMismatchIsNamedOnEveryRank) {
  for (const char* const transport : {"shm", "tcp"})
    lab::group(3, {.timeout = std::chrono::seconds(20), .transport = transport}, [&](Communicator& comm) {
      std::vector<float> x(comm.rank() == 2 ? 12 : 24);
      const Error e = test::error_of([&] { comm.all_reduce({x.data(), x.size()}).wait(); });
      EXPECT_EQ(e.code(), Errc::mismatch) << e.what();
      EXPECT_NE(std::string(e.what()).find("rank 2 called all_reduce #0 (12 f32"), std::string::npos)
          << e.what();
      EXPECT_EQ(e.culprit(), 2) << transport << " on rank " << comm.rank();
    });
}

TEST(Communicator, OfTwoRanksThatDifferNeitherIsTheCulprit) {
  lab::group(2, quick(), [&](Communicator& comm) {
    int x = 1;
    const Error e = test::error_of([&] {
      comm.rank() ? comm.barrier().wait() : comm.all_reduce({&x, 1}).wait();
    });
    EXPECT_EQ(e.code(), Errc::mismatch) << e.what();
    EXPECT_EQ(e.culprit(), -1);
    for (const char* const call : {"rank 0 called all_reduce", "rank 1 called barrier"})
      EXPECT_NE(std::string(e.what()).find(call), std::string::npos) << e.what();
  });
}

/// A store whose rank fails when it begins to connect the group of a split().
struct FailingInSplit final : Store {
  explicit FailingInSplit(std::shared_ptr<Store> store) : store(std::move(store)) {}
  void set(std::string_view key, std::string_view value) override {
    require(!key.starts_with("split/"), Errc::system, "this rank fails");
    store->set(key, value);
  }
  std::string get(std::string_view key, Deadline end) override { return store->get(key, end); }
  std::int64_t add(std::string_view key, std::int64_t n) override { return store->add(key, n); }
  const std::shared_ptr<Store> store;
};

/// A store that calls a function at the first use of a key that has this text.
struct HookedStore final : Store {
  HookedStore(std::shared_ptr<Store> s, std::string k, std::function<void()> f)
      : store(std::move(s)), key_part(std::move(k)), hook(std::move(f)) {}
  void check(std::string_view key) {
    if (key.find(key_part) != key.npos && !std::exchange(called, true)) hook();
  }
  void set(std::string_view key, std::string_view value) override { check(key), store->set(key, value); }
  std::string get(std::string_view key, Deadline end) override { return check(key), store->get(key, end); }
  std::int64_t add(std::string_view key, std::int64_t n) override { return check(key), store->add(key, n); }
  const std::shared_ptr<Store> store;
  const std::string key_part;
  const std::function<void()> hook;
  bool called = false;
};

// Before it publishes its address, and before it connects.
TEST(Communicator, ARankThatCannotConnectIsNamedBeforeTheDeadline) {
  for (const char* const transport : {"shm", "tcp"})
    for (const char* const key : {"address/2", "address/0"})
      run_ranks(3, [&](int rank, std::shared_ptr<Store> store) {
        CommOptions options = quick();
        options.transport = transport;
        options.rendezvous_timeout = std::chrono::seconds(20);
        if (rank == 2)
          store = std::make_shared<HookedStore>(store, key,
                                                [] { fail(Errc::system, "no descriptors are left"); });
        const auto begin = std::chrono::steady_clock::now();
        const Error e = test::error_of([&] { Communicator::connect(rank, 3, store, options); });
        EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10)) << key;
        EXPECT_EQ(e.code(), Errc::system) << e.what();
        const std::string text =
            rank == 2 ? "no descriptors" : "rank 2 could not connect: no descriptors are left";
        EXPECT_NE(std::string(e.what()).find(text), std::string::npos) << e.what();
        EXPECT_EQ(e.culprit(), rank == 2 ? -1 : 2) << e.what();
      });
}

TEST(Communicator, ARankThatIsKilledWhileItConnectsIsNamedBeforeTheDeadline) {
  for (const char* const transport : {"shm", "tcp"}) {
    const auto endings = test::run_processes(3, [&](int rank, std::shared_ptr<Store> store) {
      CommOptions options = quick();
      options.transport = transport;
      if (rank == 2)
        store = std::make_shared<HookedStore>(store, "connected/count", [] { kill(getpid(), SIGKILL); });
      const auto begin = std::chrono::steady_clock::now();
      const Error e = test::error_of([&] { Communicator::connect(rank, 3, store, options); });
      EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10));
      EXPECT_EQ(e.code(), Errc::peer_lost) << e.what();
      EXPECT_EQ(e.culprit(), 2) << e.what();
    });
    for (const int rank : {0, 1})
      EXPECT_EQ(endings[static_cast<std::size_t>(rank)].exit_code, 0)
          << endings[static_cast<std::size_t>(rank)].error;
    EXPECT_EQ(endings[2].signal, SIGKILL);
  }
}

// As the ranks of a second job do that has the same MASTER_ADDR and MASTER_PORT.
TEST(Communicator, ASecondProcessOfARankIsRefusedOnceTheGroupIsComplete) {
  run_ranks(2, [&](int rank, std::shared_ptr<Store> store) {
    auto comm = Communicator::connect(rank, 2, store, quick());
    comm.barrier().wait();
    if (rank == 1) {
      const int status = test::in_forked_child([&] {
        const Error e = test::error_of([&] { Communicator::connect(1, 2, store, quick()); });
        const std::string text = e.what();
        return e.code() == Errc::rendezvous && text.find("is rank 1 of this group") != text.npos &&
               text.find("RZ_LAUNCH") != text.npos;
      });
      EXPECT_EQ(status, 0);
    }
    comm.barrier().wait();
  });
}

/// A store for `size` ranks that are threads: one that they share, or a TCP store of each.
std::vector<std::shared_ptr<Store>> stores_of(int size, bool tcp) {
  std::vector<std::shared_ptr<Store>> stores(static_cast<std::size_t>(size), tcp ? nullptr : memory_store());
  if (!tcp) return stores;
  stores[0] = tcp_store("127.0.0.1:0", true);
  for (std::size_t r = 1; r < stores.size(); ++r)
    stores[r] = tcp_store(concat("127.0.0.1:", tcp_store_port(*stores[0])));
  return stores;
}

/// Connects, checks a sum and a split, and returns the group.
Communicator connect_and_check(int rank, int size, const std::shared_ptr<Store>& store,
                               const CommOptions& options) {
  auto comm = Communicator::connect(rank, size, store, options);
  int x = 1;
  comm.all_reduce({&x, 1}).wait();
  EXPECT_EQ(x, size);
  auto split = comm.split(0, size - rank);
  x = 1;
  split->all_reduce({&x, 1}).wait();
  EXPECT_EQ(x, size);
  return comm;
}

TEST(Communicator, AStoreServesOneGroupAfterAnother) {
  for (const bool tcp : {false, true})
    for (const char* const transport : {"shm", "tcp"})
      for (const int size : {2, 3}) {
        const auto stores = stores_of(size, tcp);
        run_ranks(size, [&](int rank, const auto&) {
          const auto& store = stores[static_cast<std::size_t>(rank)];
          CommOptions options = quick();
          options.transport = transport;
          options.rendezvous_timeout = std::chrono::seconds(20);
          { connect_and_check(rank, size, store, options); }  // ends before the next one
          auto a = connect_and_check(rank, size, store, options);
          auto b = connect_and_check(rank, size, store, options);  // beside the one before
          a.abort("the test ends it");
          EXPECT_THROW(a.barrier().wait(), Error);
          auto c = connect_and_check(rank, size, store, options);  // after one that has failed
          // Another prefix is another sequence of groups, whichever object stands for it.
          for (int i = 0; i < 2; ++i)
            connect_and_check((rank + i) % size, size, prefix_store(prefix_store(store, "o"), concat("p", i)),
                              options);
          for (int i = 0; i < 2; ++i) connect_and_check(rank, size, prefix_store(store, "other/"), options);
          for (auto* group : {&b, &c}) group->barrier().wait();
        });
      }
}

TEST(Communicator, AStoreServesAGroupAfterOneThatCouldNotConnect) {
  for (const bool tcp : {false, true})
    for (const int size : {2, 3}) {
      const auto stores = stores_of(size, tcp);
      run_ranks(size, [&](int rank, const auto&) {
        const auto& store = stores[static_cast<std::size_t>(rank)];
        CommOptions options = quick();
        options.rendezvous_timeout = std::chrono::seconds(20);
        options.backend = rank == 1 ? "nonesuch" : "native";
        if (rank != 1) options.rendezvous_timeout = std::chrono::milliseconds(500);
        EXPECT_THROW(Communicator::connect(rank, size, store, options), Error);
        options.rendezvous_timeout = std::chrono::seconds(20);
        options.backend = "native";
        connect_and_check(rank, size, store, options).barrier().wait();
      });
    }
}

TEST(Communicator, TheCulpritOfASplitIsARankOfTheParent) {
  run_ranks(4, [&](int rank, std::shared_ptr<Store> store) {
    CommOptions options = quick();
    options.rendezvous_timeout = std::chrono::seconds(1);
    if (rank == 3) store = std::make_shared<FailingInSplit>(store);
    auto comm = Communicator::connect(rank, 4, store, options);
    if (rank % 2 == 0) return void(comm.split(0, rank)->barrier().wait());
    const Error e = test::error_of([&] { comm.split(1, rank); });
    EXPECT_EQ(e.code(), rank == 3 ? Errc::system : Errc::timeout) << e.what();
    if (rank == 3) return;
    EXPECT_EQ(e.culprit(), 3);
    EXPECT_NE(std::string(e.what()).find("ranks 1 (new rank 0), 3 (1)"), std::string::npos) << e.what();
  });
}

TEST(Communicator, RanksThatDoNotAgreeOnDeterministicAreNamed) {
  run_ranks(2, [](int rank, auto store) {
    CommOptions options = quick();
    options.deterministic = rank == 0;
    try {
      Communicator::connect(rank, 2, store, options);
      ADD_FAILURE() << "rank " << rank << " connected";
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Errc::mismatch) << e.what();
      EXPECT_EQ(e.culprit(), 1 - rank);
      const std::string has = rank ? "rank 0 has deterministic=on, but rank 1 has deterministic=off"
                                   : "rank 1 has deterministic=off, but rank 0 has deterministic=on";
      EXPECT_NE(std::string(e.what()).find(has), std::string::npos) << e.what();
      EXPECT_NE(std::string(e.what()).find("RZ_DETERMINISTIC"), std::string::npos) << e.what();
    }
  });
}

TEST(Communicator, RanksThatDoNotAgreeOnTheReductionOrderAreNamed) {
  run_ranks(2, [](int rank, auto store) {
    CommOptions options = quick();
    if (rank == 0) options.reduction_order = ReductionOrder::pairwise;
    try {
      Communicator::connect(rank, 2, store, options);
      ADD_FAILURE() << "rank " << rank << " connected";
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Errc::mismatch) << e.what();
      EXPECT_EQ(e.culprit(), 1 - rank);
      const std::string has =
          rank ? "rank 0 has reduction_order=pairwise, but rank 1 has reduction_order=rank"
               : "rank 1 has reduction_order=rank, but rank 0 has reduction_order=pairwise";
      EXPECT_NE(std::string(e.what()).find(has), std::string::npos) << e.what();
      EXPECT_NE(std::string(e.what()).find("RZ_REDUCTION_ORDER"), std::string::npos) << e.what();
    }
  });
}

TEST(Communicator, PairwiseOrderRequiresDeterministic) {
  CommOptions options = quick();
  options.reduction_order = ReductionOrder::pairwise;
  options.deterministic = false;
  try {
    Communicator::connect(0, 1, memory_store(), options);
    ADD_FAILURE() << "connected";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Errc::config) << e.what();
    EXPECT_NE(std::string(e.what()).find("RZ_DETERMINISTIC=1"), std::string::npos) << e.what();
  }
}

TEST(Communicator, ATimeoutNamesTheAwaitedRank) {
  run_ranks(2, [&](int rank, auto store) {
    auto options = quick();
    options.timeout = std::chrono::milliseconds(rank == 0 ? 200 : 20000);
    auto comm = Communicator::connect(rank, 2, store, options);
    float x = 1;
    try {
      if (rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(600));
      comm.all_reduce({&x, 1}).wait();  // data of rank 0 may have arrived nevertheless
      comm.barrier().wait();
      ADD_FAILURE() << "rank " << rank << " noticed nothing";
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Errc::timeout) << e.what();
      EXPECT_EQ(e.culprit(), 1) << e.what();
      EXPECT_THROW(comm.barrier().wait(), Error);
    }
  });
}

TEST(Communicator, ATimeoutSaysThatALateRankIsInNoCall) {
  for (const char* const transport : {"shm", "tcp"})
    for (const int calls : {0, 1})
      run_ranks(2, [&](int rank, auto store) {
        auto options = quick();
        options.transport = transport;
        options.timeout = std::chrono::milliseconds(rank == 0 ? 4000 : 20000);
        auto comm = Communicator::connect(rank, 2, store, options);
        int x = 1;
        for (int i = 0; i < calls; ++i) comm.all_reduce({&x, 1}).wait();
        // The last one completes on rank 0 only after rank 1 has sent.
        const Error e = test::error_of([&] {
          if (rank == 1) std::this_thread::sleep_for(std::chrono::seconds(6));
          comm.all_reduce({&x, 1}).wait();
          comm.barrier().wait();
        });
        EXPECT_EQ(e.code(), Errc::timeout) << e.what();
        EXPECT_EQ(e.culprit(), 1) << e.what();
        const std::string text = e.what();
        EXPECT_EQ(text.find("sends no reply"), text.npos) << text;
        EXPECT_NE(text.find(calls ? "rank 1 is in no call of this communicator; its last was all_reduce #0"
                                  : "rank 1 is in no call of this communicator; a rank may be stuck"),
                  text.npos)
            << text;
      });
}

TEST(Communicator, AbortEndsEveryRank) {
  lab::group(3, quick(), [&](Communicator& comm) {
    if (comm.rank() == 1) {
      comm.abort("enough");
      comm.abort("again");
    }
    float x = 1;
    try {
      comm.all_reduce({&x, 1}).wait();
      ADD_FAILURE() << "rank " << comm.rank() << " noticed nothing";
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Errc::aborted) << e.what();
      EXPECT_EQ(e.culprit(), 1);
    }
  });
}

TEST(Communicator, ManyInFlightEndInOrder) {
  lab::group(2, quick(), [&](Communicator& comm) {
    std::vector<std::vector<double>> x(200);
    std::vector<Work> works;
    for (std::size_t i = 0; i < x.size(); ++i) {
      x[i].assign(i * 37 % 5000, comm.rank() + static_cast<double>(i));
      works.push_back(comm.all_reduce({x[i].data(), x[i].size()}, ReduceOp::max));
    }
    for (auto& w : works) w.wait();
    for (std::size_t i = 0; i < x.size(); ++i)
      EXPECT_EQ(x[i], std::vector<double>(x[i].size(), 1 + static_cast<double>(i)));
  });
}

// Longer than the progress thread polls: it must then leave the mutex to the waiting rank.
TEST(Communicator, ALateRankIsAwaited) {
  lab::group(2, quick(), [&](Communicator& comm) {
    if (comm.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(1500));
    int x = comm.rank();
    comm.all_reduce({&x, 1}).wait();
    EXPECT_EQ(x, 1);
  });
}

// Each poll of the progress thread takes the core from a rank in the middle of a call.
TEST(Communicator, TheProgressThreadRarelyPollsWhileCallsAreAttended) {
  run_ranks(2, [&](int rank, auto store) {
    const auto others = threads_of_process();
    auto comm = Communicator::connect(rank, 2, store, quick());
    const std::array<int, 1> own{static_cast<int>(gettid())};
    std::array<int, 2> ranks{};
    comm.all_gather({own.data(), 1}, {ranks.data(), 2}).wait();
    std::set<int> progress;
    for (const int t : threads_of_process())
      if (!others.contains(t) && t != ranks[0] && t != ranks[1]) progress.insert(t);
    EXPECT_EQ(progress.size(), 2u) << "it and that of heartbeats, for both ranks";
    std::vector<float> x(200'000);  // so large that it becomes a request
    int quiet = 0;
    for (int window = 0; window < 40 && !quiet; ++window) {  // a machine that stops a rank makes threads poll
      const long before = sleeps(progress);
      const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(200);
      for (int more = 1; more;) {
        comm.all_reduce({x.data(), x.size()}).wait();
        more = std::chrono::steady_clock::now() < end;
        comm.broadcast({&more, 1}, 0).wait();
      }
      quiet = sleeps(progress) - before < 50;  // 13 times; every millisecond would be 200 times
      comm.all_reduce({&quiet, 1}, ReduceOp::max).wait();
    }
    EXPECT_TRUE(quiet);
  });
}

TEST(Communicator, UnattendedCallsComplete) {
  lab::group(2, quick(), [&](Communicator& comm) {
    std::vector<float> x(200'000);
    for (int i = 0; i < 20; ++i) {
      comm.all_reduce({x.data(), x.size()}).wait();
      const Work work = comm.all_reduce({x.data(), x.size()});
      const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
      while (!work.done()) {
        ASSERT_LT(std::chrono::steady_clock::now(), deadline) << "call " << i << " of rank " << comm.rank();
        std::this_thread::yield();
      }
    }
  });
}

TEST(Communicator, SplitMakesGroupsOrderedByKey) {
  lab::group(5, quick(), [&](Communicator& comm) {
    const int rank = comm.rank();
    auto part = comm.split(rank == 4 ? std::nullopt : std::optional(rank % 2), -rank);
    EXPECT_EQ(part.has_value(), rank != 4);
    if (!part) return;
    EXPECT_EQ(part->size(), 2);
    EXPECT_EQ(part->rank(), rank < 2 ? 1 : 0);
    int x = rank;
    part->all_reduce({&x, 1}).wait();
    EXPECT_EQ(x, rank % 2 == 0 ? 2 : 4);
  });
}

TEST(Communicator, BadArgumentsAreRefusedBeforeAnythingMoves) {
  lab::group(2, quick(), [&](Communicator& comm) {
    std::vector<float> a(8), b(8);
    const auto refused = [&](auto call) {
      try {
        call();
        ADD_FAILURE() << "accepted";
      } catch (const Error& e) {
        EXPECT_EQ(e.code(), Errc::invalid_argument) << e.what();
      }
    };
    refused([&] { comm.all_reduce(Buffer(static_cast<float*>(nullptr), 3)).wait(); });
    refused([&] { comm.all_reduce(ConstBuffer(a.data(), 8), Buffer(b.data(), 7), ReduceOp::sum).wait(); });
    refused([&] { comm.reduce_scatter(ConstBuffer(a.data(), 7), Buffer(b.data(), 4)).wait(); });
    refused(
        [&] { comm.all_reduce(ConstBuffer(a.data(), 4), Buffer(a.data() + 1, 4), ReduceOp::sum).wait(); });
    refused([&] { comm.broadcast({a.data(), 8}, 2).wait(); });
    refused([&] { comm.send(ConstBuffer(a.data(), 8), -1).wait(); });
    const Buffer on_device(b.data(), 8, {Device::cuda, 0});
    refused([&] { comm.all_reduce(on_device).wait(); });
    refused([&] { comm.all_reduce(ConstBuffer(a.data(), 8), on_device, ReduceOp::sum).wait(); });
    refused([&] { comm.recv(on_device, 0).wait(); });
    using Counts = std::array<std::size_t, 2>;
    const std::vector<int> fewer{4, -4};
    try {
      comm.all_to_all_v(a, fewer, fewer, b, fewer, fewer).wait();
      ADD_FAILURE() << "accepted";
    } catch (const Error& e) {
      EXPECT_STREQ(
          e.what(),
          concat("all_to_all_v on rank ", comm.rank(), ": counts and offsets are 0 or more, got -4").c_str());
    }
    const auto exchange = [&](const Counts& send_offsets, const Counts& receive_at) {
      const Counts four{4, 4};
      refused([&] {
        comm.all_to_all_v(ConstBuffer(a.data(), 8), four, send_offsets, Buffer(b.data(), 8), four, receive_at)
            .wait();
      });
    };
    exchange({0, 5}, {0, 4});
    exchange({0, SIZE_MAX - 1}, {0, 4});  // offset plus count overflows
    exchange({0, 4}, {0, SIZE_MAX - 1});
    exchange({0, 4}, {3, 0});  // parts of 'out' overlap
    comm.barrier().wait();
  });
}

/// `long long` is not std::int64_t, and programs of MPI have counts of int.
TEST(Communicator, TakesEveryIntegerOf64BitsAndCountsOfAnyType) {
  lab::group(2, quick(), [&](Communicator& comm) {
    const int rank = comm.rank();
    std::vector<long long> sums{rank - 1LL, 1LL << 40};
    comm.all_reduce(sums).wait();
    EXPECT_EQ(sums, (std::vector<long long>{-1, 2LL << 40}));
    unsigned long long largest = rank ? ~0ULL : 1;  // as signed, the smaller one
    comm.all_reduce({&largest, 1}, ReduceOp::max).wait();
    EXPECT_EQ(largest, ~0ULL);

    const auto exchange = [&]<class A, class B>(A, B) {
      // Rank r sends d + 1 elements to rank d.
      const std::vector<A> counts{1, 2}, offsets{0, 1};
      const std::array<B, 2> expected{static_cast<B>(rank + 1), static_cast<B>(rank + 1)};
      const B at[] = {0, static_cast<B>(rank + 1)};
      const std::vector<int> in{10 * rank, 10 * rank + 1, 10 * rank + 2};
      std::vector<int> out(static_cast<std::size_t>(2 * (rank + 1)));
      comm.all_to_all_v(in, counts, offsets, out, expected, at).wait();
      EXPECT_EQ(out, rank ? (std::vector<int>{1, 2, 11, 12}) : (std::vector<int>{0, 10}));
      std::fill(out.begin(), out.end(), 0);
      comm.group().all_to_all_v(in, counts, offsets, out, expected, {at, 2}).launch().wait();
      EXPECT_EQ(out, rank ? (std::vector<int>{1, 2, 11, 12}) : (std::vector<int>{0, 10}));
    };
    exchange(int(), std::size_t());
    exchange(long(), std::uint32_t());
    exchange(std::int64_t(), short());
  });
}

TEST(Communicator, ThreadsOfARankMayCallIt) {
  lab::group(2, quick(), [&](Communicator& comm) {
    std::vector<std::thread> threads;
    std::atomic<int> wrong{0};
    // Every thread makes the same call, so ranks agree whatever the order.
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([&] {
        for (int i = 0; i < 50; ++i) {
          std::vector<int> x(64, 1);
          comm.all_reduce({x.data(), x.size()}).wait();
          wrong += x != std::vector<int>(64, 2);
        }
      });
    }
    for (auto& t : threads) t.join();
    EXPECT_EQ(wrong, 0);
  });
}

TEST(Backend, AnUnknownNameListsTheChoices) {
  auto options = quick();
  options.backend = "pigeon";
  try {
    Communicator::connect(0, 1, nullptr, options);
    ADD_FAILURE() << "accepted";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Errc::config);
    for (const char* word : {"pigeon", "auto", "native", "mpi", "nccl", "peer_cuda"})
      EXPECT_NE(std::string(e.what()).find(word), std::string::npos) << e.what();
  }
}

TEST(Backend, CudaBackendsDoNotServeHostMemory) {
  for (const char* name : {"nccl", "peer_cuda"}) {
    auto options = quick();
    options.backend = name;
    try {
      Communicator::connect(0, 1, nullptr, options);
      ADD_FAILURE() << name << " was accepted";
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Errc::unsupported);
      EXPECT_NE(std::string(e.what()).find(name), std::string::npos) << e.what();
    }
  }
}

TEST(Communicator, AForcedAlgorithmOfANodeHasNoEffectInAGroupOfOne) {
  for (const char* const name : {"zero_copy", "all_gather=single_copy", "two_shot", "chain"}) {
    CommOptions options = quick();
    options.algorithm = name;
    auto comm = Communicator::connect(0, 1, nullptr, options);
    int x = 3;
    comm.all_reduce({&x, 1}).wait();
    EXPECT_EQ(x, 3) << name;
  }
  run_ranks(2, [](int rank, auto store) {
    CommOptions options = quick();
    options.algorithm = "zero_copy", options.transport = "tcp";
    const Error e = test::error_of([&] { Communicator::connect(rank, 2, store, options); });
    EXPECT_EQ(e.code(), Errc::config) << e.what();
    EXPECT_NE(std::string(e.what()).find("requires that all ranks share memory"), std::string::npos)
        << e.what();
  });
}

// ---- reports of waits

struct Reports {
  std::mutex mutex;
  std::vector<std::string> lines[2];

  CommOptions options(const std::string& name, int rank) {
    CommOptions o = quick();
    o.name = name;
    o.wait_report = std::chrono::milliseconds(20);
    o.on_wait = [this, rank](const std::string& line) {
      const std::lock_guard lock(mutex);
      lines[rank].push_back(line);
    };
    return o;
  }
  std::vector<std::string> of(int rank) {
    const std::lock_guard lock(mutex);
    return lines[rank];
  }
};

class WaitsOver : public testing::TestWithParam<const char*> {};

// The commonest mistake: each rank waits in another communicator, or one of them in none.
TEST_P(WaitsOver, ACallOnOneRankOnlyIsReportedWithWhatTheOtherDoes) {
  Reports reports;
  const int line = __LINE__ + 11;
  const auto at = [&](int rank) { return concat(" at communicator_test.cpp:", line + rank); };
  run_ranks(2, [&](int rank, auto store) {
    const auto connect = [&](const char* name) {
      CommOptions options = reports.options(name, rank);
      options.transport = GetParam();
      return Communicator::connect(rank, 2, prefix_store(store, name), options);
    };
    Communicator world = connect("world"), engine = connect("engine");
    world.barrier().wait();
    int x = 1, y = 1;
    Work work = rank == 0 ? world.all_reduce({&x, 1})      // at(0)
                          : engine.broadcast({&x, 1}, 0);  // at(1)
    std::thread waits([&] { work.wait(); });
    while (reports.of(0).empty() || reports.of(1).empty())
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    EXPECT_EQ(reports.of(rank).size(), 1u) << "one line per wait";
    rank == 0 ? engine.broadcast({&y, 1}, 0).wait() : world.all_reduce({&y, 1}).wait();
    waits.join();
  });
  expect_parts(
      reports.of(0)[0],
      {concat("rank 0 of 2 of world: all_reduce #1 (1 i32, sum)", at(0), " has made no progress for "),
       "it waits for rank 1 to send; rank 1 ",
       concat("broadcast #0 (1 i32, root 0)", at(1), " of engine on rank 1 (waits for rank 0 to send)")});
  expect_parts(
      reports.of(1)[0],
      {"rank 1 of 2 of engine: broadcast #0", "it waits for rank 0 to send; rank 0 ",
       concat("all_reduce #1 (1 i32, sum)", at(0), " of world on rank 0 (waits for rank 1 to send)")});
}

TEST_P(WaitsOver, ARankThatWaitsForAnotherIsReportedWithIt) {
  Reports reports;
  run_ranks(3, [&](int rank, auto store) {
    CommOptions options = rank == 0 ? reports.options("world", 0) : quick();
    options.transport = GetParam();
    options.algorithm = "chain";
    options.deterministic = false;
    auto comm = Communicator::connect(rank, 3, store, options);
    std::vector<int> x(1 << 16, 1);
    if (rank == 2)
      while (reports.of(0).empty()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    comm.all_reduce({x.data(), x.size()}).wait();
  });
  ASSERT_EQ(reports.of(0).size(), 1u);
  expect_parts(reports.of(0)[0], {"all_reduce #0 (65536 i32, sum)", "rank 2"});
}

INSTANTIATE_TEST_SUITE_P(Transports, WaitsOver, testing::Values("shm", "tcp"),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace rz
