// Runs: ci

// The contract of every transport, for each of them: shared memory, TCP, and both in one group.

#include "comm/transport/transport.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <cstring>
#include <thread>
#include <vector>

#include "comm/core/error.h"
#include "tests/support/error_of.h"
#include "tests/support/ranks.h"
#include "tests/support/streams.h"

namespace rz {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

struct Kind {
  const char* name;
  const char* transport;
  int nodes;  ///< the ranks are distributed over that many nodes
  int sockets;
  bool one_node = false;
  const char* encryption = "on";
  test::ConnectOptions options(int rank) const {
    return {transport, "", sockets, nodes > 1 ? concat("host", rank % nodes) : "", "", "system", encryption};
  }
};

class EveryTransport : public testing::TestWithParam<Kind> {
 protected:
  std::unique_ptr<Transport> connect(int rank, int size, Store& store) const {
    return test::connect(rank, size, store, GetParam().options(rank));
  }
};

INSTANTIATE_TEST_SUITE_P(Transports, EveryTransport,
                         testing::Values(Kind{"shm", "shm", 1, 1, true}, Kind{"tcp", "tcp", 1, 2},
                                         Kind{"tcp5", "tcp", 1, 5}, Kind{"mixed", "auto", 2, 1},
                                         Kind{"mixed5", "auto", 2, 5},
                                         Kind{"tls", "tcp", 1, 2, false, "always"},
                                         Kind{"tls5", "tcp", 1, 5, false, "always"},
                                         Kind{"tls_mixed", "auto", 2, 2, false, "always"}),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(Sockets, AreDividedAmongTheRanksOfANode) {
  EXPECT_EQ(sockets_per_peer(std::vector{0, 1}, 2), 2);
  EXPECT_EQ(sockets_per_peer(std::vector{0, 0, 1, 1}, 2), 1);
  EXPECT_EQ(sockets_per_peer(std::vector{0, 0, 1, 1}, 5), 2);
  EXPECT_EQ(sockets_per_peer(std::vector{0, 1, 0, 1, 0}, 16), 5);
  EXPECT_EQ(sockets_per_peer(std::vector{0, 0, 0, 1}, 1), 1);
}

TEST_P(EveryTransport, CarriesStreamsBetweenThreads) {
  test::run_ranks(4, [&](int rank, std::shared_ptr<Store> store) {
    const auto t = connect(rank, 4, *store);
    test::exchange_streams(*t, rank, 4, {30, 300'000, 5});
  });
}

TEST_P(EveryTransport, CarriesStreamsBetweenProcesses) {
  test::expect_processes(3, [&](int rank, std::shared_ptr<Store> store) {
    const auto t = connect(rank, 3, *store);
    test::exchange_streams(*t, rank, 3, {20, 500'000, 6});
  });
}

TEST_P(EveryTransport, DescribesItself) {
  test::run_ranks(3, [&](int rank, std::shared_ptr<Store> store) {
    const auto t = connect(rank, 3, *store);
    EXPECT_EQ(t->one_node(), GetParam().one_node);
    const std::string expected = GetParam().nodes > 1 ? "shm+tcp" : GetParam().transport;
    EXPECT_EQ(t->describe(), expected) << "on rank 1, too, which is alone on its node";
    test::sync_all(*t, rank, 3);
  });
}

TEST_P(EveryTransport, AGroupOfOneNeedsNothing) {
  const auto store = memory_store();
  const auto t = connect(0, 1, *store);
  t->progress(0);
  t->wait(milliseconds(1));
  const auto memory = t->allocate(1000);
  EXPECT_EQ(memory.get()[999], std::byte{0});
}

TEST_P(EveryTransport, MemoryIsAlignedZeroedAndOutlivesTheTransport) {
  test::run_ranks(2, [&](int rank, std::shared_ptr<Store> store) {
    auto t = connect(rank, 2, *store);
    std::vector<std::shared_ptr<std::byte>> blocks;
    for (std::size_t size : {0, 1, 255, 4096, 100'000, 1'000'000, 3'000'000}) {
      blocks.push_back(t->allocate(size));
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(blocks.back().get()) % 256, 0u);
      for (std::size_t i = 0; i < size; i += 61) ASSERT_EQ(blocks.back().get()[i], std::byte{0});
      std::memset(blocks.back().get(), 0xff, size);
      blocks.push_back(t->allocate(size));  // must differ from the previous one
      for (std::size_t i = 0; i < size; i += 61) ASSERT_EQ(blocks.back().get()[i], std::byte{0});
      blocks.pop_back();
    }
    test::sync_all(*t, rank, 2);
    t.reset();
    for (auto& b : blocks) *b = std::byte{7};
  });
}

// A sender whose peer does not read is held back; its other channel is not.
TEST_P(EveryTransport, BackPressureIsPerChannel) {
  test::run_ranks(2, [&](int rank, std::shared_ptr<Store> store) {
    const auto t = connect(rank, 2, *store);
    const int peer = 1 - rank;
    constexpr std::size_t total = 64 << 20, piece = 1 << 16;
    std::vector<std::byte> bytes(piece, std::byte(rank + 1));
    std::size_t posted = 0;
    Deadline quiet = Deadline::after(milliseconds(200));
    while (posted < total && !quiet.expired()) {
      const std::size_t n = t->post(peer, Channel::collective, {}, bytes);
      posted += n;
      if (n) quiet = Deadline::after(milliseconds(200));
      t->progress(0);
    }
    EXPECT_LT(posted, total) << "no back-pressure";
    EXPECT_GT(posted, 0u);
    // The collective channel is full in both directions now; the other one still carries a stream.
    std::vector<std::byte> message(3'000'00, std::byte(rank + 3)), got(message.size());
    std::size_t sent = 0, received = 0;
    test::drive(*t, [&] {
      sent += t->post(peer, Channel::point_to_point, {}, std::span(message).subspan(sent));
      received += t->receive(peer, Channel::point_to_point, std::span(got).subspan(received));
      return sent == message.size() && received == got.size() &&
             t->released(peer, Channel::point_to_point) == sent;
    });
    EXPECT_EQ(got.front(), std::byte(peer + 3));
    EXPECT_EQ(got.back(), std::byte(peer + 3));
    // Accepted bytes arrive once they are read.
    std::uint64_t count = 0;
    test::post_all(*t, peer, Channel::point_to_point, {}, std::as_bytes(std::span(&posted, 1)));
    test::receive_all(*t, peer, Channel::point_to_point, std::as_writable_bytes(std::span(&count, 1)));
    std::vector<std::byte> all(count);
    test::receive_all(*t, peer, Channel::collective, all);
    EXPECT_EQ(all.back(), std::byte(peer + 1));
    test::drive(*t, [&] { return t->released(peer, Channel::collective) == posted; });
    test::sync_all(*t, rank, 2);
  });
}

TEST_P(EveryTransport, WakeEndsAWait) {
  test::run_ranks(2, [&](int rank, std::shared_ptr<Store> store) {
    const auto t = connect(rank, 2, *store);
    test::sync_all(*t, rank, 2);
    std::atomic<bool> stop{false};
    std::thread other([&] {
      std::this_thread::sleep_for(milliseconds(30));
      stop = true;
      t->wake();
    });
    const auto start = Deadline::Clock::now();
    while (!stop) t->wait(seconds(60));
    EXPECT_LT(Deadline::Clock::now() - start, seconds(30));
    other.join();
    test::sync_all(*t, rank, 2);
  });
}

/// Makes progress until the transport throws, within `limit`; `before` may fail already.
template <class F>
Error failure_of(Transport& t, milliseconds limit, const F& before) {
  try {
    before();
    const auto start = Deadline::Clock::now();
    for (;;) {
      t.progress(0);
      if (Deadline::Clock::now() - start > limit) break;
      t.wait(milliseconds(50));
    }
  } catch (const Error& e) {
    return e;
  }
  return Error(Errc::timeout, "no failure was seen in time");
}

Error failure_of(Transport& t, milliseconds limit) {
  return failure_of(t, limit, [] {});
}

TEST_P(EveryTransport, AKilledRankIsNamedByAllOthers) {
  constexpr int size = 4, victim = 2;
  const auto endings = test::run_processes(size, [&](int rank, std::shared_ptr<Store> store) {
    const auto t = connect(rank, size, *store);
    const Error e = failure_of(*t, seconds(30), [&] {
      test::sync_all(*t, rank, size);
      if (rank == victim) kill(getpid(), SIGKILL);
    });
    EXPECT_EQ(e.code(), Errc::peer_lost) << e.what();
    EXPECT_EQ(e.culprit(), victim) << e.what();
    EXPECT_NE(std::string(e.what()).find("rank 2"), std::string::npos) << e.what();
    EXPECT_THROW(t->progress(0), Error) << "a failure stays";
  });
  for (int rank = 0; rank < size; ++rank) {
    if (rank == victim)
      EXPECT_EQ(endings[victim].signal, SIGKILL);
    else
      EXPECT_EQ(endings[static_cast<std::size_t>(rank)].exit_code, 0)
          << rank << ": " << endings[static_cast<std::size_t>(rank)].error;
  }
}

// No survivor waits: they post and peek all the time.
TEST_P(EveryTransport, AKilledRankIsNamedBySpinningRanks) {
  constexpr int size = 3, victim = 0;
  const auto endings = test::run_processes(size, [&](int rank, std::shared_ptr<Store> store) {
    const auto t = connect(rank, size, *store);
    const Deadline limit = Deadline::after(seconds(2));
    try {
      test::sync_all(*t, rank, size);
      if (rank == victim) kill(getpid(), SIGKILL);
      std::vector<std::byte> bytes(100'000);
      while (!limit.expired()) {
        t->post(victim, Channel::collective, {}, bytes);
        t->peek(victim, Channel::collective);
        t->progress(0);
      }
      ADD_FAILURE() << "rank " << rank << " saw no failure";
    } catch (const Error& e) {
      EXPECT_EQ(e.culprit(), victim) << e.what();
    }
  });
  for (int rank = 1; rank < size; ++rank)
    EXPECT_EQ(endings[static_cast<std::size_t>(rank)].exit_code, 0)
        << endings[static_cast<std::size_t>(rank)].error;
}

TEST_P(EveryTransport, AbortReachesEveryRankWithItsCulprit) {
  test::run_ranks(4, [&](int rank, std::shared_ptr<Store> store) {
    const auto t = connect(rank, 4, *store);
    std::thread other;
    if (rank == 3)  // from a thread that does not own progress
      other = std::thread([&] {
        std::this_thread::sleep_for(milliseconds(20));
        t->abort({3, Errc::aborted, "rank 3 has had enough"});
        t->abort({3, Errc::aborted, "again"});
      });
    const Error e = failure_of(*t, seconds(30), [&] { test::sync_all(*t, rank, 4); });
    EXPECT_EQ(e.code(), Errc::aborted) << e.what();
    EXPECT_EQ(e.culprit(), 3);
    EXPECT_STREQ(e.what(), "rank 3 has had enough");
    if (other.joinable()) other.join();
  });
}

TEST_P(EveryTransport, AnOrderlyDepartureDisturbsNoRank) {
  test::run_ranks(3, [&](int rank, std::shared_ptr<Store> store) {
    auto t = connect(rank, 3, *store);
    test::sync_all(*t, rank, 3);
    std::byte b{42};
    if (rank == 2) {  // posts and departs
      for (int peer : {0, 1}) test::post_all(*t, peer, Channel::collective, {}, {&b, 1});
      t.reset();
      return;
    }
    for (const Deadline d = Deadline::after(milliseconds(100)); !d.expired(); t->wait(milliseconds(10)))
      t->progress(0);
    std::vector<std::byte> bytes(10'000, std::byte{9});
    test::post_all(*t, 1 - rank, Channel::collective, {}, bytes);
    test::receive_all(*t, 1 - rank, Channel::collective, bytes);
    test::receive_all(*t, 2, Channel::collective, {&b, 1});  // bytes that it posted are still there
    EXPECT_EQ(b, std::byte{42});
    test::drive(*t, [&] { return t->released(1 - rank, Channel::collective) == bytes.size(); });
    t->progress(0);
    test::post_all(*t, 1 - rank, Channel::point_to_point, {}, {&b, 1});
    test::receive_all(*t, 1 - rank, Channel::point_to_point, {&b, 1});
    // A rank that needs more of it fails, with the reason.
    if (rank == 0) {
      const auto want = [&] { return test::receive_all(*t, 2, Channel::collective, {&b, 1}); };
      try {
        want();
        ADD_FAILURE() << "nothing was there to receive";
      } catch (const Error& e) {
        EXPECT_EQ(e.code(), Errc::peer_lost);
        EXPECT_EQ(e.culprit(), 2);
        EXPECT_NE(std::string(e.what()).find("left the group"), std::string::npos) << e.what();
      }
    } else {
      const Error e = failure_of(*t, seconds(30));  // rank 0's failure is the group's
      EXPECT_EQ(e.culprit(), 2) << e.what();
    }
  });
}

TEST_P(EveryTransport, PostingToADepartedRankFails) {
  test::run_ranks(2, [&](int rank, std::shared_ptr<Store> store) {
    auto t = connect(rank, 2, *store);
    test::sync_all(*t, rank, 2);
    if (rank == 1) return;
    for (const Deadline d = Deadline::after(milliseconds(100)); !d.expired(); t->wait(milliseconds(10)))
      t->progress(0);
    std::byte b{1};
    EXPECT_EQ(t->post(1, Channel::collective, {}, {&b, 1}), 0u);
    const Error e = failure_of(*t, seconds(30));
    EXPECT_EQ(e.code(), Errc::peer_lost);
    EXPECT_EQ(e.culprit(), 1) << e.what();
  });
}

TEST_P(EveryTransport, AMissingRankIsNamed) {
  test::run_ranks(3, [&](int rank, std::shared_ptr<Store> store) {
    if (rank == 1) return;
    try {
      test::connect(rank, 3, *store, GetParam().options(rank), Deadline::after(milliseconds(300)));
      ADD_FAILURE() << "connected without rank 1";
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Errc::timeout) << e.what();
      EXPECT_NE(std::string(e.what()).find("rank 1 did not reach the rendezvous"), std::string::npos)
          << e.what();
    }
  });
}

TEST(Connect, RanksOfSeveralNodesCannotShareMemory) {
  test::run_ranks(3, [](int rank, std::shared_ptr<Store> store) {
    try {
      test::connect(rank, 3, *store, {"shm", "", 2, rank == 2 ? "far" : "near"});
      ADD_FAILURE();
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Errc::config);
      EXPECT_NE(std::string(e.what()).find(rank == 2 ? "rank 0 and 1" : "rank 2"), std::string::npos)
          << e.what();
    }
  });
}

TEST(Connect, DifferentOptionsAreNamed) {
  test::run_ranks(2, [](int rank, std::shared_ptr<Store> store) {
    try {
      test::connect(rank, 2, *store, {"tcp", "", rank + 1, ""});
      ADD_FAILURE();
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Errc::mismatch);
      EXPECT_NE(std::string(e.what()).find("RZ_SOCKETS"), std::string::npos) << e.what();
    }
  });
}

/// Ranks with a forced schedule are not connected to ranks without one.
TEST(Connect, AnOverrideOnSomeRanksOnlyIsNamed) {
  test::run_ranks(2, [](int rank, std::shared_ptr<Store> store) {
    try {
      test::ConnectOptions options;
      if (rank == 1) options.algorithm = "ring";
      test::connect(rank, 2, *store, options);
      ADD_FAILURE();
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Errc::mismatch);
      EXPECT_NE(std::string(e.what()).find("algorithm=ring"), std::string::npos) << e.what();
      EXPECT_NE(std::string(e.what()).find("RZ_ALGORITHM"), std::string::npos) << e.what();
    }
  });
}

TEST(PeerInfo, EverySettingThatDiffersIsNamed) {
  const std::pair<const char*, void (*)(GroupSettings&)> differ[] = {
      {"RZ_TRANSPORT", [](GroupSettings& s) { s.transport = "shm"; }},
      {"RZ_SOCKETS", [](GroupSettings& s) { s.sockets = 3; }},
      {"RZ_ENCRYPTION", [](GroupSettings& s) { s.encryption = "off"; }},
      {"RZ_ALGORITHM", [](GroupSettings& s) { s.algorithm = "ring"; }},
      {"RZ_DETERMINISTIC", [](GroupSettings& s) { s.deterministic = false; }},
      {"RZ_REDUCTION_ORDER", [](GroupSettings& s) { s.reduction_order = ReductionOrder::pairwise; }},
      {"RZ_TUNING", [](GroupSettings& s) { s.tuning = "mine\n"; }}};
  for (const auto& [variable, change] : differ)
    test::run_ranks(2, [&, name = variable, f = change](int rank, std::shared_ptr<Store> store) {
      GroupSettings settings;
      if (rank == 1) f(settings);
      const Error e = test::error_of(
          [&] { exchange_peer_info(rank, 2, *store, settings, "", Deadline::after(seconds(5))); });
      EXPECT_EQ(e.code(), Errc::mismatch) << name << ": " << e.what();
      EXPECT_NE(std::string(e.what()).find(name), std::string::npos) << e.what();
    });
}

TEST(PeerInfo, TheTuningTableOfRank0AppliesToTheGroup) {
  test::run_ranks(3, [](int rank, std::shared_ptr<Store> store) {
    const GroupSettings settings{.tuning = rank == 1 ? "" : "table\nall_reduce"};
    const PeerInfo info = exchange_peer_info(rank, 3, *store, settings, "", Deadline::after(seconds(5)));
    EXPECT_EQ(info.settings.tuning, "table\nall_reduce");
    EXPECT_EQ(info.rank, rank);
    EXPECT_EQ(info.size(), 3);
  });
}

TEST(Connect, RanksThatDoNotAgreeOnTheSizeAreNamed) {
  test::run_ranks(2, [&](int rank, std::shared_ptr<Store> store) {
    const Error e =
        test::error_of([&] { test::connect(rank, 2 + rank, *store, {}, Deadline::after(seconds(5))); });
    EXPECT_EQ(e.code(), Errc::mismatch) << e.what();
    EXPECT_EQ(e.culprit(), 1 - rank);
    const std::string has =
        concat("rank ", 1 - rank, " has size=", 3 - rank, ", but rank ", rank, " has size=");
    EXPECT_NE(std::string(e.what()).find(has), std::string::npos) << e.what();
  });
}

// Entries of another version may hold anything but its version.
TEST(Connect, AnotherVersionIsNamed) {
  test::run_ranks(2, [](int rank, std::shared_ptr<Store> store) {
    if (rank == 1) {
      std::string entry = store->get("peer_info/0", Deadline::after(seconds(5)));
      const auto at = entry.find("version="), end = entry.find_first_of("\t\n", at);
      ASSERT_NE(at, std::string::npos);
      store->set("peer_info/1", entry.replace(at, end - at, "version=9.8.7\tand=more"));
      return;
    }
    const Error e = test::error_of([&] { test::connect(0, 2, *store, {}, Deadline::after(seconds(5))); });
    EXPECT_EQ(e.code(), Errc::mismatch) << e.what();
    EXPECT_NE(std::string(e.what()).find("rank 1 has version=9.8.7"), std::string::npos) << e.what();
    EXPECT_EQ(std::string(e.what()).find("and=more"), std::string::npos) << e.what();
  });
}

TEST(Connect, BadArgumentsAreRefused) {
  const auto store = memory_store();
  const auto code = [&](int rank, int size, const test::ConnectOptions& options) {
    try {
      test::connect(rank, size, *store, options);
    } catch (const Error& e) {
      return e.code();
    }
    return Errc::io;
  };
  EXPECT_EQ(code(2, 2, {}), Errc::invalid_argument);
  EXPECT_EQ(code(0, 1, {"carrier pigeon"}), Errc::config);
  const Error e = test::error_of([&] { test::connect(0, 1, *store, {"carrier pigeon"}); });
  EXPECT_NE(std::string(e.what()).find("is not one of auto, shm"), std::string::npos) << e.what();
  EXPECT_EQ(code(0, 1, {"tcp", "", 17}), Errc::config);
}

}  // namespace
}  // namespace rz
