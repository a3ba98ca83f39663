// Checks that a card cannot show: where the bytes exchanged by CUDA peers in several processes went, and the
// state of their windows after CUDA calls fail.

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "comm/communicator.h"
#include "comm/core/error.h"
#include "comm/device/memory.h"
#include "tests/emulated_gpu/emulated_gpu.h"
#include "tests/support/ranks.h"

namespace rz::test {
namespace {

CommOptions options_of(int rank) {
  CommOptions options;
  options.backend = "peer_cuda";
  options.device = {Device::cuda, rank % emulated::devices};
  options.timeout = std::chrono::seconds(30);
  options.algorithm = "two_shot";
  return options;
}

/// f(communicator, stream) in one process per rank, which must free all memory.
template <class F>
void on_processes(int size, const F& f) {
  expect_processes(size, [&](int rank, std::shared_ptr<Store> store) {
    {
      Communicator comm = Communicator::connect(rank, size, store, options_of(rank));
      f(comm, Stream::create(options_of(rank).device));
      comm.barrier().wait();
    }
    EXPECT_EQ(emulated::bytes_in_use(), 0u);
  });
}

/// Values that no other rank has.
std::vector<float> values_of(int rank, std::size_t n) {
  std::vector<float> values(n);
  for (std::size_t i = 0; i < n; ++i)
    values[i] = static_cast<float>(i + 1 + static_cast<std::size_t>(rank) * n);
  return values;
}

struct Floats {
  Floats(std::shared_ptr<std::byte> m, std::size_t n)
      : memory(std::reinterpret_pointer_cast<float>(m)), count(n) {}
  void set(const std::vector<float>& values, const Stream& s) const {
    memcpy_async(memory.get(), values.data(), count * sizeof(float), s);
  }
  std::vector<float> get(const Stream& s) const {
    std::vector<float> values(count);
    memcpy_async(values.data(), memory.get(), count * sizeof(float), s);
    return values;
  }
  Buffer on(const Stream& s) const { return {memory.get(), count, s.device()}; }
  std::shared_ptr<float> memory;
  std::size_t count;
};

/// In how many places of this rank's device memory the last values occur: a slot that they passed through
/// still holds them.
std::size_t places(const std::vector<float>& values) {
  constexpr std::size_t n = 16;
  return emulated::places_of(
      {reinterpret_cast<const char*>(values.data() + values.size() - n), n * sizeof(float)});
}

/// The input of a rank after an all_gather that copied it to the output.
std::size_t places_after_all_gather(Communicator& comm, const Stream& s, bool symmetric) {
  const std::size_t n = 70'000, all = n * static_cast<std::size_t>(comm.size());
  const auto allocate = [&](std::size_t count) {
    const std::size_t bytes = count * sizeof(float);
    return Floats(symmetric ? comm.allocate_symmetric(bytes) : comm.allocate(bytes), count);
  };
  const Floats in = allocate(n), out = allocate(all);
  const auto mine = values_of(comm.rank(), n);
  in.set(mine, s);
  comm.all_gather(in.on(s), out.on(s), s).wait();
  EXPECT_EQ(out.get(s), values_of(0, all));
  return places(mine);
}

TEST(SymmetricWindows, DataMovementReadsWindowsInPlace) {
  on_processes(3, [](Communicator& comm, const Stream& s) {
    EXPECT_EQ(places_after_all_gather(comm, s, true), 2u) << "the input, and its part of the output";
  });
  on_processes(3, [](Communicator& comm, const Stream& s) {
    EXPECT_EQ(places_after_all_gather(comm, s, false), 3u) << "and a slot";
  });
}

/// The input of a rank, and its shard of the result, after an all_reduce.
std::pair<std::size_t, std::size_t> places_after_all_reduce(Communicator& comm, const Stream& s,
                                                            bool symmetric_in, bool symmetric_out) {
  const std::size_t part = 1000, n = part * static_cast<std::size_t>(comm.size());
  const auto allocate = [&](bool symmetric) {
    return Floats(symmetric ? comm.allocate_symmetric(n * sizeof(float)) : comm.allocate(n * sizeof(float)),
                  n);
  };
  const Floats in = allocate(symmetric_in), out = allocate(symmetric_out);
  const auto mine = values_of(comm.rank(), n);
  in.set(mine, s);
  comm.all_reduce(in.on(s), out.on(s), ReduceOp::sum, s).wait();
  const auto sum = out.get(s);
  EXPECT_EQ(sum[n - 1], static_cast<float>(n * 3 + 3 * n));
  const auto begin = sum.begin() + static_cast<long>(part) * comm.rank();
  return {places(mine), places({begin, begin + static_cast<long>(part)})};
}

TEST(SymmetricWindows, ReductionsReadAndWriteWindowsInPlace) {
  for (const bool in : {true, false})
    for (const bool out : {true, false})
      on_processes(3, [&](Communicator& comm, const Stream& s) {
        const auto [input, result] = places_after_all_reduce(comm, s, in, out);
        EXPECT_EQ(input, in ? 1u : 2u) << "symmetric: " << in << ", " << out;
        EXPECT_EQ(result, out ? 1u : 2u) << "symmetric: " << in << ", " << out;
      });
}

void expect_a_sum(Communicator& comm, const Stream& s) {
  const Floats x(comm.allocate_symmetric(4000), 1000);
  x.set(std::vector<float>(1000, static_cast<float>(comm.rank() + 1)), s);
  comm.all_reduce(x.on(s), ReduceOp::sum, s).wait();
  EXPECT_EQ(x.get(s), std::vector<float>(1000, 6));
}

/// The error of allocate_symmetric where rank 1 fails, and that nothing of it is left.
template <class F>
void expect_failure(const F& trouble, const std::string& here, const std::string& elsewhere) {
  on_processes(3, [&](Communicator& comm, const Stream& s) {
    expect_a_sum(comm, s);
    const std::size_t before = emulated::bytes_in_use();
    if (comm.rank() == 1) trouble();
    try {
      static_cast<void>(comm.allocate_symmetric(std::size_t{100} << 20));
      ADD_FAILURE() << "it went well";
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Errc::system);
      EXPECT_EQ(e.culprit(), comm.rank() == 1 ? -1 : 1);
      EXPECT_NE(std::string(e.what()).find(comm.rank() == 1 ? here : elsewhere), std::string::npos)
          << e.what();
    }
    EXPECT_EQ(emulated::bytes_in_use(), before);
    expect_a_sum(comm, s);
  });
}

TEST(SymmetricWindows, ARankWithoutMemoryIsNamed) {
  expect_failure([] { emulated::set_capacity(64 << 20); }, "cannot allocate 100",
                 "rank 1 has no device memory");
}

TEST(SymmetricWindows, ARankThatCannotMapMemoryIsNamed) {
  expect_failure([] { emulated::fail_call("ipc_open_handle", 1, 1); }, "cudaIpcOpenMemHandle on cuda:1",
                 "rank 1 cannot map its peers' memory");
}

TEST(SymmetricWindows, ARankThatCannotShareMemoryIsNamed) {
  expect_failure([] { emulated::fail_call("ipc_get_handle", 1); }, "cudaIpcGetMemHandle on cuda:1",
                 "rank 1 has no device memory");
}

}  // namespace
}  // namespace rz::test
