// Every collective on device memory gives the bits that it gives on host memory, over every backend of
// devices. Ranks are threads; on a card they share it.

#include <cstring>
#include <numeric>
#include <random>

#include "comm/communicator.h"
#include "comm/core/cuda/runtime.h"
#include "comm/core/math.h"
#include "tests/gpu/on_device.h"
#include "tests/support/ranks.h"

namespace rz::test {
namespace {

/// One call of a collective on memory of any device: where its input and its output lie in one block.
struct Call {
  std::string name;
  std::size_t in_at, in_count, out_at, out_count;
  std::function<Work(Communicator&, ConstBuffer in, Buffer out, const Stream&)> start;
};

/// Of n elements a rank; in place where `in_place`.
std::vector<Call> calls(int rank, int size, std::size_t n, ReduceOp op, bool in_place) {
  const auto r = static_cast<std::size_t>(rank), p = static_cast<std::size_t>(size);
  const int root = size - 1;
  const bool is_root = rank == root;
  std::vector<Call> all;
  const auto add = [&](const char* name, std::size_t in_count, std::size_t out_count, std::size_t in_inside,
                       std::size_t out_inside, auto start) {
    if (in_place)
      all.push_back({str(name, " in place"), in_inside, in_count, out_inside, out_count, start});
    else
      all.push_back({name, 0, in_count, in_count, out_count, start});
  };
  add("all_reduce", n, n, 0, 0,
      [=](auto& c, auto in, auto out, auto& s) { return c.all_reduce(in, out, op, s); });
  add("reduce_scatter", n * p, n, 0, n * r,
      [=](auto& c, auto in, auto out, auto& s) { return c.reduce_scatter(in, out, op, s); });
  add("reduce", n, is_root ? n : 0, 0, 0,
      [=](auto& c, auto in, auto out, auto& s) { return c.reduce(in, out, root, op, s); });
  if (op.kind != ReduceOp::sum) return all;
  add("all_gather", n, n * p, n * r, 0,
      [=](auto& c, auto in, auto out, auto& s) { return c.all_gather(in, out, s); });
  add("broadcast", n, n, 0, 0,
      [=](auto& c, auto in, auto out, auto& s) { return c.broadcast(in, out, root, s); });
  add("gather", n, is_root ? n * p : 0, is_root ? n * r : 0, 0,
      [=](auto& c, auto in, auto out, auto& s) { return c.gather(in, out, root, s); });
  add("scatter", is_root ? n * p : 0, n, 0, is_root ? n * r : 0,
      [=](auto& c, auto in, auto out, auto& s) { return c.scatter(in, out, root, s); });
  add("all_to_all", n * p, n * p, 0, 0,
      [=](auto& c, auto in, auto out, auto& s) { return c.all_to_all(in, out, s); });
  if (in_place) return all;
  const auto ring = [=](Communicator& c, ConstBuffer in, Buffer out, const Stream& s) {
    return c.group().send(in, (rank + 1) % size, s).recv(out, (rank + size - 1) % size, s).launch();
  };
  if (size > 1) add("send and recv", n, n, 0, 0, ring);
  // From rank a to rank b go (a + b) % 3 · n / 2 elements, with a gap of one before each part.
  std::vector<std::size_t> counts, offsets;
  std::size_t at = 0;
  for (std::size_t peer = 0; peer < p; ++peer) {
    counts.push_back((r + peer) % 3 * n / 2);
    offsets.push_back(at + 1);
    at += counts.back() + 1;
  }
  add("all_to_all_v", at, at, 0, 0, [=](auto& c, auto in, auto out, auto& s) {
    return c.all_to_all_v(in, counts, offsets, out, counts, offsets, s);
  });
  return all;
}

/// Numbers with every mantissa bit in use, so that another order of additions gives other bits.
std::vector<std::byte> random_block(DType dtype, std::size_t count, std::uint32_t seed) {
  std::mt19937 random(seed);
  std::uniform_real_distribution<float> values(-2, 2);
  std::vector<std::byte> block(count * size_of(dtype));
  const auto put = [&](std::size_t i, auto value) {
    std::memcpy(block.data() + i * sizeof value, &value, sizeof value);
  };
  for (std::size_t i = 0; i < count; ++i) switch (dtype) {
      case DType::f32:
        put(i, values(random));
        break;
      case DType::f64:
        put(i, static_cast<double>(values(random)) / 3);
        break;
      case DType::f16:
        put(i, from_f32<f16>(values(random)));
        break;
      case DType::bf16:
        put(i, from_f32<bf16>(values(random)));
        break;
      case DType::f8e4m3:
        put(i, from_f32<f8e4m3>(values(random)));
        break;
      case DType::f8e5m2:
        put(i, from_f32<f8e5m2>(values(random)));
        break;
      default:
        put(i * size_of(dtype), static_cast<std::uint8_t>(random() % 5));
        break;
    }
  return block;
}

/// The block after the call, which ran on the host.
std::vector<std::byte> on_host(Communicator& comm, const Call& call, DType dtype,
                               std::vector<std::byte> block) {
  const std::size_t size = size_of(dtype);
  call.start(comm, {block.data() + call.in_at * size, call.in_count, dtype},
             {block.data() + call.out_at * size, call.out_count, dtype}, {})
      .wait();
  return block;
}

/// The same on the device, with the input made just before in the same stream and read just after.
std::vector<std::byte> on_device(Communicator& comm, const Call& call, DType dtype,
                                 std::vector<std::byte> block, const Stream& stream) {
  const Device device = stream.device();
  const std::size_t size = size_of(dtype);
  const auto memory = comm.allocate(block.size() + 1);
  copy_bytes(memory.get(), block.data(), block.size(), stream);
  const Work work = call.start(comm, {memory.get() + call.in_at * size, call.in_count, dtype, device},
                               {memory.get() + call.out_at * size, call.out_count, dtype, device}, stream);
  work.wait_on(stream);
  copy_bytes(block.data(), memory.get(), block.size(), stream);
  work.wait();
  return block;
}

class Collectives : public OnDevice, public testing::WithParamInterface<std::tuple<const char*, int>> {
 protected:
  int size() const { return std::get<1>(GetParam()); }
  CommOptions options(int rank) const {
    CommOptions o;
    o.backend = std::get<0>(GetParam());
    o.device = {Device::cuda, rank % cuda::device_count()};
    o.timeout = std::chrono::seconds(30);
    return o;
  }
  /// f(communicator, stream) on every rank.
  template <class F>
  void on_ranks(const F& f) {
    run_ranks(size(), [&](int rank, std::shared_ptr<Store> store) {
      Communicator comm = Communicator::connect(rank, size(), store, options(rank));
      const Stream s = Stream::create(options(rank).device);
      f(comm, s);
      s.synchronize();
      comm.barrier().wait();
    });
  }
  void expect_same(DType dtype, ReduceOp op, std::size_t n) {
    on_ranks([&](Communicator& comm, const Stream& s) {
      for (const bool in_place : {false, true})
        for (const Call& call : calls(comm.rank(), comm.size(), n, op, in_place)) {
          const std::size_t count =
              std::max(call.in_at + call.in_count, call.out_at + call.out_count) + (in_place ? 1 : 0);
          const auto block = random_block(dtype, count, static_cast<std::uint32_t>(comm.rank() * 100 + 7));
          EXPECT_EQ(on_device(comm, call, dtype, block, s), on_host(comm, call, dtype, block))
              << call.name << ", " << name(dtype) << " " << name(op) << ", " << n << " elements, rank "
              << comm.rank();
        }
    });
  }
};

TEST_P(Collectives, GiveTheBitsOfTheHost) {
  for (const std::size_t n : {0, 1, 7, 1000, 30'001}) expect_same(DType::f32, ReduceOp::sum, n);
}

TEST_P(Collectives, CombineEveryType) {
  for (int t = 0; t < dtype_count; ++t) expect_same(static_cast<DType>(t), ReduceOp::sum, 333);
}

TEST_P(Collectives, KnowEveryOperator) {
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
      copy_bytes(memory.get(), values.data(), n * sizeof(float), s);
      comm.all_reduce(all, ReduceOp::sum, s).wait_on(other);
      comm.all_reduce(all, ReduceOp::sum, other).wait_on(s);
      copy_bytes(result.data(), memory.get(), n * sizeof(float), s);
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
      copy_bytes(memory[i].get(), values.data(), n * sizeof(float), s);
      works.push_back(comm.all_reduce(Buffer(memory[i].get(), n, s.device()), ReduceOp::sum, s));
    }
    for (std::size_t i = 0; i < calls; ++i) {
      works[i].wait();
      EXPECT_TRUE(works[i].done());
      std::vector<float> result(n);
      copy_bytes(result.data(), memory[i].get(), n * sizeof(float), s);
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
    EXPECT_NE(refused([&] {
                static_cast<void>(comm.group()
                                      .all_reduce(Buffer(host, 8))
                                      .all_reduce(Buffer(memory.get(), 8, s.device()))
                                      .launch());
              }).find("make it two groups"),
              std::string::npos);
  });
}

INSTANTIATE_TEST_SUITE_P(Ring, Collectives,
                         testing::Combine(testing::Values("ring"), testing::Values(1, 2, 3)));
INSTANTIATE_TEST_SUITE_P(PeerCuda, Collectives,
                         testing::Combine(testing::Values("peer_cuda"), testing::Values(1, 2, 3, 4)));

}  // namespace
}  // namespace rz::test
