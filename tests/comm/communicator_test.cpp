#include "comm/communicator.h"

#include <gtest/gtest.h>

#include <atomic>
#include <numeric>
#include <thread>
#include <vector>

#include "comm/core/error.h"
#include "tests/support/ranks.h"

namespace rz {
namespace {

using test::run_ranks;

CommOptions quick() {
  CommOptions options;
  options.timeout = std::chrono::seconds(20);
  return options;
}

TEST(Communicator, SumsOverRanksInPlace) {
  for (int size : {1, 2, 3, 4}) {
    run_ranks(size, [&](int rank, auto store) {
      auto comm = Communicator::connect(rank, size, store, quick());
      for (std::size_t n : {0, 1, 2, 3, 17, 1000, 100003}) {
        std::vector<float> x(n);
        for (std::size_t i = 0; i < n; ++i) x[i] = static_cast<float>(rank + 1) * static_cast<float>(i % 97);
        comm.all_reduce({x.data(), n}).wait();
        for (std::size_t i = 0; i < n; ++i)
          ASSERT_EQ(x[i], static_cast<float>(size * (size + 1) / 2) * static_cast<float>(i % 97)) << i;
      }
    });
  }
}

TEST(Communicator, MessagesCrossWithoutDeadlock) {
  run_ranks(2, [&](int rank, auto store) {
    auto comm = Communicator::connect(rank, 2, store, quick());
    const std::size_t n = 1 << 20;
    std::vector<int> out(n, rank), in(n, -1);
    auto sent = comm.send(ConstBuffer(out.data(), n), 1 - rank);
    comm.recv({in.data(), n}, 1 - rank).wait();
    sent.wait();
    EXPECT_EQ(in, std::vector<int>(n, 1 - rank));
  });
}

TEST(Communicator, CollectivesEndWhileAnotherThreadWaitsForAMessage) {
  run_ranks(2, [&](int rank, auto store) {
    auto comm = Communicator::connect(rank, 2, store, quick());
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
  run_ranks(3, [&](int rank, auto store) {
    auto comm = Communicator::connect(rank, 3, store, quick());
    std::vector<float> x(rank == 2 ? 12 : 24);
    try {
      comm.all_reduce({x.data(), x.size()}).wait();
      ADD_FAILURE() << "rank " << rank << " noticed nothing";
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Errc::mismatch) << e.what();
      EXPECT_NE(std::string(e.what()).find("12 f32"), std::string::npos) << e.what();
    }
  });
}

TEST(Communicator, ATimeoutNamesWhomItWaitsFor) {
  run_ranks(2, [&](int rank, auto store) {
    auto options = quick();
    options.timeout = std::chrono::milliseconds(rank == 0 ? 200 : 20000);
    auto comm = Communicator::connect(rank, 2, store, options);
    float x = 1;
    try {
      if (rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(600));
      comm.all_reduce({&x, 1}).wait();  // what rank 0 sent may have arrived all the same
      comm.barrier().wait();
      ADD_FAILURE() << "rank " << rank << " noticed nothing";
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Errc::timeout) << e.what();
      EXPECT_EQ(e.culprit(), 1) << e.what();
      EXPECT_THROW(comm.barrier().wait(), Error);
    }
  });
}

TEST(Communicator, AbortEndsEveryRank) {
  run_ranks(3, [&](int rank, auto store) {
    auto comm = Communicator::connect(rank, 3, store, quick());
    if (rank == 1) {
      comm.abort("enough");
      comm.abort("again");
    }
    float x = 1;
    try {
      comm.all_reduce({&x, 1}).wait();
      ADD_FAILURE() << "rank " << rank << " noticed nothing";
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Errc::aborted) << e.what();
      EXPECT_EQ(e.culprit(), 1);
    }
  });
}

TEST(Communicator, ManyInFlightEndInOrder) {
  run_ranks(2, [&](int rank, auto store) {
    auto comm = Communicator::connect(rank, 2, store, quick());
    std::vector<std::vector<double>> x(200);
    std::vector<Work> works;
    for (std::size_t i = 0; i < x.size(); ++i) {
      x[i].assign(i * 37 % 5000, rank + static_cast<double>(i));
      works.push_back(comm.all_reduce({x[i].data(), x[i].size()}, ReduceOp::max));
    }
    for (auto& w : works) w.wait();
    for (std::size_t i = 0; i < x.size(); ++i)
      EXPECT_EQ(x[i], std::vector<double>(x[i].size(), 1 + static_cast<double>(i)));
  });
}

// Longer than the progress thread's attention lasts: it must then leave the mutex to the rank that waits.
TEST(Communicator, ARankThatComesLateIsWaitedFor) {
  run_ranks(2, [&](int rank, auto store) {
    auto comm = Communicator::connect(rank, 2, store, quick());
    if (rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(1500));
    int x = rank;
    comm.all_reduce({&x, 1}).wait();
    EXPECT_EQ(x, 1);
  });
}

TEST(Communicator, SplitMakesGroupsOrderedByKey) {
  run_ranks(5, [&](int rank, auto store) {
    auto comm = Communicator::connect(rank, 5, store, quick());
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
  run_ranks(2, [&](int rank, auto store) {
    auto comm = Communicator::connect(rank, 2, store, quick());
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
    const auto exchange = [&](const Counts& send_at, const Counts& receive_at) {
      const Counts four{4, 4};
      refused([&] {
        comm.all_to_all_v(ConstBuffer(a.data(), 8), four, send_at, Buffer(b.data(), 8), four, receive_at)
            .wait();
      });
    };
    exchange({0, 5}, {0, 4});
    exchange({0, SIZE_MAX - 1}, {0, 4});  // offset and count together wrap around
    exchange({0, 4}, {0, SIZE_MAX - 1});
    exchange({0, 4}, {3, 0});  // parts of 'out' overlap
    comm.barrier().wait();
  });
}

TEST(Communicator, ThreadsOfARankMayCallIt) {
  run_ranks(2, [&](int rank, auto store) {
    auto comm = Communicator::connect(rank, 2, store, quick());
    std::vector<std::thread> threads;
    std::atomic<int> wrong{0};
    // The same call from every thread: whatever the order, ranks agree.
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

TEST(Backend, AnUnknownOneIsRefusedWithTheChoices) {
  auto options = quick();
  options.backend = "pigeon";
  try {
    Communicator::connect(0, 1, nullptr, options);
    ADD_FAILURE() << "accepted";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Errc::config);
    for (const char* word : {"pigeon", "auto", "ring", "mpi", "nccl", "peer_cuda"})
      EXPECT_NE(std::string(e.what()).find(word), std::string::npos) << e.what();
  }
}

TEST(Backend, ThoseOfCudaDoNotServeHostMemory) {
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

}  // namespace
}  // namespace rz
