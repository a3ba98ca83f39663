// NCCL itself on a card: two processes that share it, with the settings under which NCCL allows that. Times
// are meaningless.

#include <stdlib.h>
#include <unistd.h>

#include "comm/backends/nccl/api/api.h"
#include "comm/communicator.h"
#include "comm/core/error.h"
#include "comm/device/cuda_runtime.h"
#include "tests/gpu/device_calls.h"
#include "tests/gpu/on_device.h"
#include "tests/support/ranks.h"

namespace rz::test {
namespace {

constexpr int ranks = 2;

/// In a process of its own: the parent must neither use the card nor start a thread before it forks.
std::string problem_here() {
  return run_processes(1,
                       [](int, auto) {
                         require(!emulated_device, Errc::unsupported, "the emulated NCCL is of one process");
                         require(cuda::device_count() > 0, Errc::unsupported, "no CUDA device");
                         nccl::nccl_api();
                       })[0]
      .error;
}

void share_the_card(int rank) {
  const std::string host = concat("h", rank);
  setenv("NCCL_HOSTID", host.c_str(), 1);
  for (const auto& [name, value] : {std::pair("NCCL_IB_DISABLE", "1"),
                                    {"NCCL_MNNVL_ENABLE", "0"},
                                    {"NCCL_NVLS_ENABLE", "0"},
                                    {"NCCL_MAX_CTAS", "2"},
                                    {"NCCL_NET_GDR_LEVEL", "LOC"},
                                    {"NCCL_SOCKET_IFNAME", "lo"},
                                    {"NCCL_MULTI_RANK_GPU_ENABLE", "1"}})
    setenv(name, value, 1);
}

CommOptions options() {
  CommOptions o;
  o.backend = "nccl";
  o.device = {Device::cuda, 0};
  o.timeout = std::chrono::seconds(30);
  return o;
}

template <class F>
void on_processes(const F& f) {
  if (const std::string problem = problem_here(); !problem.empty()) GTEST_SKIP() << problem;
  expect_processes(
      ranks,
      [&](int rank, auto store) {
        share_the_card(rank);
        Communicator comm = Communicator::connect(rank, ranks, store, options());
        f(comm, Stream::create(options().device));
      },
      std::chrono::seconds(120));
}

TEST(NcclProcesses, HaveTheBitsOfTheHost) {
  on_processes([](Communicator& comm, const Stream& s) {
    for (const std::size_t n : {0, 1, 7, 1000, 300'001}) expect_same(comm, DType::f32, ReduceOp::sum, n, s);
    for (int t = 0; t < dtype_count; ++t) expect_same(comm, static_cast<DType>(t), ReduceOp::sum, 333, s);
    for (const auto kind :
         {ReduceOp::avg, ReduceOp::prod, ReduceOp::min, ReduceOp::max, ReduceOp::premul_sum})
      for (const DType t : {DType::f32, DType::bf16, DType::i32})
        expect_same(comm, t, ReduceOp(kind, 0.5), 257, s);
    comm.barrier().wait();
  });
}

TEST(NcclProcesses, ARankThatEndsIsNamed) {
  on_processes([](Communicator& comm, const Stream& s) {
    const auto memory = comm.allocate_array<float>(1000);
    const Buffer all(memory.get(), 1000, s.device());
    comm.all_reduce(all, ReduceOp::sum, s).wait();
    if (comm.rank() == 1) {
      s.synchronize();
      _exit(0);
    }
    const Work work = comm.all_reduce(all, ReduceOp::sum, s);
    try {
      work.wait();
      ADD_FAILURE() << "an all_reduce with a rank that has ended went well";
    } catch (const Error& e) {
      EXPECT_EQ(e.culprit(), 1) << e.what();
    }
  });
}

}  // namespace
}  // namespace rz::test
