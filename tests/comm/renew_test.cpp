// Runs: serial alone
/// A group goes on after a failure: all ranks leave their calls, nothing of them arrives later, and what one
/// rank has completed is complete on all.

#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "comm/communicator.h"
#include "comm/core/error.h"
#include "tests/lab/group.h"
#include "tests/support/error_of.h"
#include "tests/support/ranks.h"

namespace rz {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;
using test::error_of;

CommOptions quick(const std::string& transport, std::chrono::milliseconds timeout = 60s) {
  CommOptions options;
  options.transport = transport;
  options.timeout = timeout;
  return options;
}

/// The same on every rank.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15u + 1) {}
  std::size_t below(std::size_t n) {
    state_ ^= state_ << 13, state_ ^= state_ >> 7, state_ ^= state_ << 17;
    return static_cast<std::size_t>(state_ >> 11) % n;
  }

 private:
  std::uint64_t state_;
};

/// A collective that every rank takes part in, with results that are exact. `memory` has room for 2^17
/// elements for each rank.
void call(Communicator& comm, std::size_t kind, std::size_t count, float value, std::vector<float>& memory) {
  const auto size = static_cast<std::size_t>(comm.size());
  const float sum = value * static_cast<float>(size * (size + 1) / 2);
  const float own = value * static_cast<float>(comm.rank() + 1);
  float* const in = memory.data();
  float* const out = in + count * size;
  std::fill_n(in, count * size, own);
  const auto expect = [&](const float* at, std::size_t n, float expected) {
    ASSERT_EQ(std::count(at, at + n, expected), static_cast<std::ptrdiff_t>(n))
        << "call of kind " << kind << ", " << count << " elements, rank " << comm.rank();
  };
  const auto expect_parts = [&] {
    for (std::size_t r = 0; r < size; ++r) expect(out + r * count, count, value * static_cast<float>(r + 1));
  };
  switch (kind) {
    case 0:
      comm.all_reduce({in, count}).wait();
      return expect(in, count, sum);
    case 1:
      comm.all_gather({in, count}, {out, count * size}).wait();
      return expect_parts();
    case 2:
      comm.reduce_scatter({in, count * size}, {out, count}).wait();
      return expect(out, count, sum);
    case 3:
      comm.all_to_all({in, count * size}, {out, count * size}).wait();
      return expect_parts();
    default:
      comm.barrier().wait();
  }
}

class Renewal : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Over, Renewal, testing::Values("shm", "tcp", "mixed"),
                         [](const auto& info) { return info.param; });

/// Of four ranks; "mixed": two on each of two nodes.
void group_of_four(const std::string& over, const lab::Body& body) {
  if (over == "mixed") return lab::group("aabb", quick("auto"), body);
  lab::group(4, quick(over), body);
}

constexpr std::size_t counts[] = {1, 7, 100, 5'000, 60'000};

/// In each round some ranks stop after a few calls and renew, the others when they are told.
TEST_P(Renewal, WhatHasCompletedOnOneRankCompletesOnAll) {
  constexpr int rounds = 150;
  group_of_four(GetParam(), [](Communicator& comm) {
    Random random(7);
    std::vector<float> memory(1 << 19);
    int told = 0;
    for (int round = 0; round < rounds; ++round) {
      const std::size_t stops = random.below(12), stopping = 1 + random.below(14);  // ranks, as bits
      const auto seed = random.below(1 << 20);
      const bool stopper = stopping >> comm.rank() & 1;
      Random calls(seed);
      std::size_t done = 0;
      try {
        for (; !stopper || done < stops; ++done) {
          const std::size_t kind = calls.below(5), count = counts[calls.below(5)];
          call(comm, kind, count, static_cast<float>(round + 1), memory);
        }
      } catch (const Error& e) {
        ASSERT_EQ(e.code(), Errc::cancelled) << e.what();
        ASSERT_TRUE(e.culprit() >= 0 && stopping >> e.culprit() & 1) << e.what();
        ASSERT_FALSE(stopper) << e.what();
        ++told;
      }
      comm.renew();
      ASSERT_EQ(done, stops) << "round " << round << ", rank " << comm.rank();
      call(comm, 1, 100, static_cast<float>(round), memory);
    }
    EXPECT_GT(told, rounds / 10);
  });
}

/// Bytes, messages and handles that are on their way belong to the generation before.
TEST_P(Renewal, NothingOfTheGenerationBeforeArrives) {
  group_of_four(GetParam(), [](Communicator& comm) {
    std::vector<float> memory(1 << 19), large(1 << 20), other(1 << 20);
    const auto shared = comm.allocate_array<float>(1 << 19);
    const int next = (comm.rank() + 1) % 4, last = (comm.rank() + 3) % 4;
    for (int round = 1; round < 12; ++round) {
      std::fill(large.begin(), large.end(), static_cast<float>(-round));
      std::fill_n(shared.get(), 1 << 19, static_cast<float>(-round));
      std::vector<Work> calls;
      try {  // ranks differ in how far they get, and nobody waits
        if (comm.rank() >= round % 3) calls.push_back(comm.all_reduce({large.data(), large.size()}));
        if (comm.rank() == round % 4) calls.push_back(comm.all_reduce({shared.get(), 1 << 19}));
        calls.push_back(comm.send({large.data(), 70'000}, next));
        if (round % 2) calls.push_back(comm.recv({other.data(), 70'000}, last));
      } catch (const Error& e) {
        EXPECT_EQ(e.code(), Errc::cancelled) << e.what();
      }
      if (comm.rank() == round % 4) std::this_thread::sleep_for(2ms);
      comm.renew();
      for (Work& work : calls) try {  // messages may have completed
          work.wait();
        } catch (const Error& e) {
          EXPECT_EQ(e.code(), Errc::cancelled) << e.what();
        }
      for (std::size_t kind = 0; kind < 5; ++kind)
        call(comm, kind, counts[static_cast<std::size_t>(round + static_cast<int>(kind)) % 5],
             static_cast<float>(round), memory);
      std::fill_n(shared.get(), 1 << 19, static_cast<float>(round));
      comm.all_reduce({shared.get(), 1 << 19}).wait();
      EXPECT_EQ(std::count(shared.get(), shared.get() + (1 << 19), static_cast<float>(4 * round)), 1 << 19);
      float sent = static_cast<float>(comm.rank()), received = -1;
      const Work message = comm.send({&sent, 1}, next);
      comm.recv({&received, 1}, last).wait();
      message.wait();
      EXPECT_EQ(received, static_cast<float>(last));
      comm.barrier().wait();  // a rank may renew while another one waits for its message
    }
  });
}

TEST_P(Renewal, FollowsAnyFailureOfRanksThatLive) {
  group_of_four(GetParam(), [](Communicator& comm) {
    std::vector<float> memory(1 << 12);
    const auto expect_renewed = [&](Errc code, const std::function<void()>& fails) {
      const Error e = error_of(fails);
      EXPECT_EQ(e.code(), code) << e.what();
      comm.renew();
      call(comm, 0, 100, 2, memory);
    };
    expect_renewed(Errc::aborted, [&] {
      if (comm.rank() == 2) comm.abort("enough");
      for (;;) comm.barrier().wait();
    });
    expect_renewed(Errc::mismatch, [&] {
      comm.all_reduce({memory.data(), comm.rank() == 1 ? std::size_t{7} : std::size_t{8}}).wait();
    });
    comm.renew();  // without a failure
    call(comm, 3, 100, 2, memory);
    comm.renew("rank N wants it");
    const Error e = error_of([&] {
      if (comm.rank() == 3) {
        comm.renew("rank 3 wants it");
        throw Error(Errc::cancelled, "rank 3 wants it", 3);
      }
      for (;;) comm.barrier().wait();
    });
    if (comm.rank() != 3) comm.renew();
    EXPECT_EQ(e.culprit(), 3);
    EXPECT_STREQ(e.what(), "rank 3 wants it");
    call(comm, 0, 100, 2, memory);
  });
}

TEST(RenewalOfGroups, RenewsThoseThatWereSplitFromIt) {
  lab::group(4, quick("auto"), [](Communicator& world) {
    auto pair = *world.split(world.rank() / 2, 0, {}, true);
    auto other = *world.split(0, 3 - world.rank());
    auto odd = world.split(world.rank() % 2 ? std::optional(1) : std::nullopt, 0);
    auto within = *pair.split(0, 0, {}, true);
    const Error refused = error_of([&] { pair.renew(); });
    EXPECT_EQ(refused.code(), Errc::invalid_argument) << refused.what();
    std::vector<float> memory(1 << 12);
    for (int culprit = 0; culprit < 4; ++culprit) {
      if (world.rank() == culprit) {
        world.renew();
      } else {
        // Ranks wait in different groups, of which only some have the culprit as a member.
        Communicator* const waits[] = {&world, &pair, &other, &within};
        Communicator* waited = nullptr;
        const Error e = error_of([&] {
          for (;;) {
            waited = waits[(world.rank() + culprit) % 4];
            waited->barrier().wait();
            if (odd) waited = &*odd, odd->barrier().wait();
          }
        });
        // In numbers of the group that shares its failures; `odd` has ranks 1 and 3 alone.
        const int of_odd = culprit % 2 ? culprit / 2 : -1;
        EXPECT_EQ(e.culprit(), waited == &other         ? 3 - culprit
                               : odd && waited == &*odd ? of_odd
                                                        : culprit)
            << e.what();
        EXPECT_EQ(e.code(), Errc::cancelled) << e.what();
        world.renew();
      }
      for (Communicator* group : {&world, &pair, &other, &within}) {
        SCOPED_TRACE(group->size());
        call(*group, 0, 100, 3, memory);
      }
      if (odd) call(*odd, 0, 100, 3, memory);
    }
    // Failures are shared as before.
    if (world.rank() == 3) within.abort("of all");
    const Error e = error_of([&] {
      for (;;) world.barrier().wait();
    });
    EXPECT_EQ(e.code(), Errc::aborted) << e.what();
    EXPECT_EQ(e.culprit(), 3) << e.what();
    world.renew();
    call(within, 0, 100, 3, memory);
  });
}

std::ptrdiff_t open_files() {
  const std::filesystem::directory_iterator files("/proc/self/fd"), end;
  return std::distance(files, end);
}

TEST(RenewalOfGroups, LeavesNothingOpen) {
  lab::group(3, quick("auto"), [](Communicator& comm) {
    std::vector<float> memory(1 << 12);
    const Allocator allocator = comm.allocator();
    const auto kept = allocator.allocate(4096);  // of the first generation
    std::ptrdiff_t first = 0;
    for (int n = 0; n < 20; ++n) {
      comm.renew();
      call(comm, 0, 100, 1, memory);
      comm.barrier().wait();
      if (n == 2) first = open_files();
      comm.barrier().wait();
    }
    EXPECT_LE(open_files(), first + 2);
    comm.barrier().wait();
  });
}

TEST(RenewalOfGroups, NamesARankThatDoesNotCome) {
  lab::group(
      3,
      [](int) {
        CommOptions options = quick("auto", 1s);
        options.rendezvous_timeout = 1s;
        return options;
      },
      [](Communicator& comm) {
        if (comm.rank() == 1) return std::this_thread::sleep_for(3s);
        const Error e = error_of([&] { comm.renew(); });
        EXPECT_EQ(e.code(), Errc::timeout) << e.what();
        EXPECT_EQ(e.culprit(), 1) << e.what();
        EXPECT_EQ(std::string(e.what()).find("renew() on rank "), 0u) << e.what();
      });
}

/// A rank that dies, at any time, is named by all others within two seconds, and is not waited for.
TEST(RenewalOfProcesses, ALostRankIsNamed) {
  for (const std::string transport : {"shm", "tcp"})
    for (const int delay_ms : {0, 20, 300}) {
      const auto endings = test::run_processes(3, [&](int rank, auto store) {
        auto comm = Communicator::connect(rank, 3, store, quick(transport));
        if (rank == 1) {
          std::this_thread::sleep_for(std::chrono::milliseconds(delay_ms));
          kill(getpid(), SIGKILL);
        }
        const auto begin = Clock::now();
        const Error e = error_of([&] {
          for (;;) comm.renew();
        });
        EXPECT_LT(Clock::now() - begin, 2s + std::chrono::milliseconds(delay_ms));
        EXPECT_EQ(e.code(), Errc::peer_lost) << e.what();
        EXPECT_EQ(e.culprit(), 1) << e.what();
      });
      for (const std::size_t survivor : {0, 2})
        EXPECT_EQ(endings[survivor].exit_code, 0) << endings[survivor].error;
    }
}

TEST(RenewalOfProcesses, GoesOnBetweenProcesses) {
  for (const std::string transport : {"shm", "tcp"})
    test::expect_processes(3, [&](int rank, auto store) {
      auto comm = Communicator::connect(rank, 3, store, quick(transport));
      std::vector<float> memory(1 << 19);
      const auto shared = comm.template allocate_array<float>(1 << 18);
      for (int round = 1; round <= 10; ++round) {
        if (rank == round % 3) {
          comm.renew();
        } else {
          const Error e = error_of([&] {
            for (;;) comm.all_reduce({shared.get(), 1 << 18}, ReduceOp::max).wait();
          });
          EXPECT_EQ(e.code(), Errc::cancelled) << e.what();
          comm.renew();
        }
        for (std::size_t kind = 0; kind < 5; ++kind)
          call(comm, kind, 5'000, static_cast<float>(round), memory);
      }
    });
}

}  // namespace
}  // namespace rz
