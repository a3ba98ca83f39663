// Runs: ci
// Not under sanitizers: ALongWaitUsesNoProcessorTime DoesNotStarve

// Ranks share cores, communicators share ranks, and calls share a communicator: no call may receive another's
// data.

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

#include "comm/communicator.h"
#include "tests/lab/group.h"
#include "tests/support/ranks.h"

namespace rz {
namespace {

using namespace std::chrono_literals;

double processor_seconds() {
  rusage use{};
  ::getrusage(RUSAGE_SELF, &use);
  const auto seconds = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) + 1e-6 * static_cast<double>(t.tv_usec);
  };
  return seconds(use.ru_utime) + seconds(use.ru_stime);
}

class Over : public testing::TestWithParam<std::string> {};

TEST_P(Over, ALongWaitUsesNoProcessorTime) {
  const auto late = [&](int rank, std::shared_ptr<Store> store) {
    CommOptions options;
    options.transport = GetParam();
    auto comm = Communicator::connect(rank, 3, std::move(store), options);
    std::vector<float> x(1 << 16, 1.0f);
    comm.barrier().wait();
    for (const std::size_t n : {std::size_t{1}, x.size()}) {
      double lowest = 1;  // of several intervals, since the machine may run other work, too
      std::thread watch([&] {
        for (int i = 0; i < 5; ++i) {
          std::this_thread::sleep_for(250ms);
          const double before = processor_seconds();
          std::this_thread::sleep_for(200ms);
          lowest = std::min(lowest, processor_seconds() - before);
        }
      });
      if (rank == 2) watch.join();
      comm.all_reduce({x.data(), n}).wait();
      if (rank != 2) watch.join();
      EXPECT_LT(lowest, 0.0015) << "s of 0.2 s that rank " << rank << " waited";
    }
  };
  test::expect_processes(3, late);
}
INSTANTIATE_TEST_SUITE_P(Transports, Over, testing::Values("shm", "tcp"),
                         [](const auto& info) { return info.param; });

TEST(Sharing, CallsInFlightEndInTheirOrder) {
  lab::group(3, [](Communicator& comm) {
    std::vector<std::vector<float>> values;
    std::vector<Work> works;
    for (std::size_t i = 0; i < 120; ++i)
      values.emplace_back(i % 3 == 0 ? 100'000 : i % 3 == 1 ? 1 : 3000, static_cast<float>(i));
    for (auto& v : values) works.push_back(comm.all_reduce({v.data(), v.size()}));
    for (std::size_t ended = 0; ended < works.size();) {
      const bool last_first = works.back().done();
      while (ended < works.size() && works[ended].done()) ++ended;
      EXPECT_TRUE(!last_first || ended == works.size());
      if (ended == works.size()) break;
      for (std::size_t i = works.size(); i-- > ended + 1;)
        if (works[i].done()) {
          ASSERT_TRUE(works[ended].done()) << i << " ended before " << ended;
        }
      works[ended].wait();
    }
    for (std::size_t i = 0; i < values.size(); ++i)
      for (const float v : values[i]) ASSERT_EQ(v, 3 * static_cast<float>(i)) << i;
  });
}

TEST(Sharing, ALargeCallDoesNotStarveAnotherCommunicator) {
  std::atomic<int> small[2]{}, rounds[2]{};
  lab::group(2, [&](Communicator& comm) {
    auto other = comm.split(0, comm.rank());
    std::thread busy([&] {
      std::vector<float> x(8 << 20, 1.0f);
      for (int i = 0; i < 12; ++i, ++rounds[comm.rank()])
        comm.all_reduce({x.data(), x.size()}, ReduceOp::max).wait();
    });
    // All ranks make the same number of small calls: they continue until the ranks agree that both are done.
    for (float both = 0; both < 2;) {
      both = rounds[comm.rank()] == 12 ? 1.0f : 0.0f;
      other->all_reduce({&both, 1}).wait();
      if (rounds[comm.rank()] < 12) ++small[comm.rank()];
    }
    busy.join();
  });
  EXPECT_GE(small[0], 12);
  EXPECT_GE(small[1], 12);
}

}  // namespace
}  // namespace rz
