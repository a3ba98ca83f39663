// Every collective on device memory has the bits of the same call on host memory, over every device backend.
// Ranks are threads; on a card they share it.

#include "comm/backends/nccl/api/api.h"
#include "comm/communicator.h"
#include "comm/core/error.h"
#include "comm/device/cuda_runtime.h"
#include "tests/gpu/device_calls.h"
#include "tests/gpu/on_device.h"
#include "tests/lab/group.h"

namespace rz::test {
namespace {

class Collectives : public OnDevice, public testing::WithParamInterface<std::tuple<const char*, int>> {
 protected:
  void SetUp() override {
    OnDevice::SetUp();
    if (IsSkipped() || std::get<0>(GetParam()) != std::string("nccl")) return;
    if (size() > cuda::device_count())
      GTEST_SKIP() << "NCCL requires a device for each rank: " << size() << " ranks, " << cuda::device_count()
                   << " devices";
    try {
      nccl::nccl_api();
    } catch (const Error& e) {
      GTEST_SKIP() << e.what();
    }
  }
  int size() const { return std::get<1>(GetParam()); }
  static CommOptions options(int rank) {
    CommOptions o;
    o.backend = std::get<0>(GetParam());
    o.device = {Device::cuda, rank % cuda::device_count()};
    o.timeout = std::chrono::seconds(30);
    return o;
  }
  /// f(communicator, stream) on every rank.
  template <class F>
  void on_ranks(const F& f) {
    lab::group(size(), options, [&](Communicator& comm) {
      const Stream s = Stream::create(comm.options().device);
      f(comm, s);
      s.synchronize();
      comm.barrier().wait();
    });
  }
  void expect_same(DType dtype, ReduceOp op, std::size_t n) {
    on_ranks([&](Communicator& comm, const Stream& s) { test::expect_same(comm, dtype, op, n, s); });
  }
};

TEST_P(Collectives, HaveTheBitsOfTheHost) {
  for (const std::size_t n : {0, 1, 7, 1000, 30'001}) expect_same(DType::f32, ReduceOp::sum, n);
}

TEST_P(Collectives, CombineEveryType) {
  for (int t = 0; t < dtype_count; ++t) expect_same(static_cast<DType>(t), ReduceOp::sum, 333);
}

TEST_P(Collectives, HandleEveryOperator) {
  for (const auto kind : {ReduceOp::avg, ReduceOp::prod, ReduceOp::min, ReduceOp::max, ReduceOp::premul_sum})
    for (const DType t : {DType::f32, DType::bf16, DType::i32, DType::f8e4m3})
      expect_same(t, ReduceOp(kind, 0.5), 257);
}

TEST_P(Collectives, AreOrderedByStreams) {
  for (int seed = 0; seed < schedules(20); ++seed) {
    reschedule(static_cast<std::uint64_t>(seed));
    on_ranks([&](Communicator& comm, const Stream& s) {
      const Stream other = Stream::create(s.device());
      constexpr std::size_t n = 512;
      const auto memory = comm.allocate_array<float>(n);
      const Buffer all(memory.get(), n, s.device());
      std::vector<float> values(n, 1), result(n);
      memcpy_async(memory.get(), values.data(), n * sizeof(float), s);
      comm.all_reduce(all, ReduceOp::sum, s).wait_on(other);
      comm.all_reduce(all, ReduceOp::sum, other).wait_on(s);
      memcpy_async(result.data(), memory.get(), n * sizeof(float), s);
      EXPECT_EQ(result, std::vector<float>(n, static_cast<float>(comm.size() * comm.size())));
      other.synchronize();
    });
  }
}

TEST_P(Collectives, ManyAreInFlightAtOnce) {
  on_ranks([&](Communicator& comm, const Stream& s) {
    constexpr std::size_t n = 700, calls = 40;
    std::vector<std::shared_ptr<float>> memory;
    std::vector<Work> works;
    for (std::size_t i = 0; i < calls; ++i) {
      memory.push_back(comm.allocate_array<float>(n));
      const std::vector<float> values(n, static_cast<float>(i));
      memcpy_async(memory[i].get(), values.data(), n * sizeof(float), s);
      works.push_back(comm.all_reduce(Buffer(memory[i].get(), n, s.device()), ReduceOp::sum, s));
    }
    for (std::size_t i = 0; i < calls; ++i) {
      works[i].wait();
      EXPECT_TRUE(works[i].done());
      std::vector<float> result(n);
      memcpy_async(result.data(), memory[i].get(), n * sizeof(float), s);
      EXPECT_EQ(result, std::vector<float>(n, static_cast<float>(i * static_cast<std::size_t>(comm.size()))));
    }
  });
}

TEST_P(Collectives, RefuseMemoryOfAnotherDevice) {
  if (size() > 1) GTEST_SKIP() << "once is enough";
  on_ranks([&](Communicator& comm, const Stream& s) {
    const auto memory = comm.allocate_array<float>(8);
    float host[8] = {};
    const auto refused = [&](const auto& call) {
      try {
        call();
      } catch (const Error& e) {
        EXPECT_EQ(e.code(), Errc::invalid_argument);
        return std::string(e.what());
      }
      return std::string("nothing");
    };
    EXPECT_EQ(refused([&] {
                static_cast<void>(comm.all_reduce(ConstBuffer(host, 8), Buffer(memory.get(), 8, s.device()),
                                                  ReduceOp::sum, s));
              }),
              "all_reduce on rank 0: 'in' is on host and 'out' on cuda:0");
    EXPECT_EQ(
        refused([&] {
          static_cast<void>(comm.all_reduce(Buffer(memory.get(), 8, {Device::cuda, 5}), ReduceOp::sum, s));
        }),
        "all_reduce on rank 0: 'in' is on cuda:5, but this communicator moves memory of cuda:0 and the host");
    EXPECT_EQ(refused([&] {
                static_cast<void>(comm.all_gather(ConstBuffer(memory.get(), 8, s.device()), Buffer(host, 8)));
              }),
              "all_gather on rank 0: 'in' is on cuda:0 and 'out' on host");
    if (cuda::device_count() > 1) {
      const Stream elsewhere = Stream::create({Device::cuda, 1});
      EXPECT_EQ(
          refused([&] {
            static_cast<void>(comm.all_reduce(Buffer(memory.get(), 8, s.device()), ReduceOp::sum, elsewhere));
          }),
          "all_reduce on rank 0: the memory is on cuda:0, but the stream is of cuda:1");
    }
    EXPECT_NE(refused([&] {
                static_cast<void>(comm.group()
                                      .all_reduce(Buffer(host, 8))
                                      .all_reduce(Buffer(memory.get(), 8, s.device()))
                                      .launch());
              }).find("make it two groups"),
              std::string::npos);
  });
}

INSTANTIATE_TEST_SUITE_P(Native, Collectives,
                         testing::Combine(testing::Values("native"), testing::Values(1, 2, 3)));
INSTANTIATE_TEST_SUITE_P(PeerCuda, Collectives,
                         testing::Combine(testing::Values("peer_cuda"), testing::Values(1, 2, 3, 4)));
INSTANTIATE_TEST_SUITE_P(Nccl, Collectives,
                         testing::Combine(testing::Values("nccl"), testing::Values(1, 2, 3, 4)));

}  // namespace
}  // namespace rz::test
