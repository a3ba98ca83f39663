#include "tests/gpu/device_calls.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>

#include "comm/core/error.h"
#include "comm/core/math.h"
#include "comm/device/memory.h"

namespace rz::test {

std::vector<Call> calls(int rank, int size, std::size_t n, ReduceOp op, bool in_place) {
  const auto r = static_cast<std::size_t>(rank), p = static_cast<std::size_t>(size);
  const int root = size - 1;
  const bool is_root = rank == root;
  std::vector<Call> all;
  const auto add = [&](const char* name, std::size_t in_count, std::size_t out_count, std::size_t in_inside,
                       std::size_t out_inside, auto start) {
    if (in_place)
      all.push_back({concat(name, " in place"), in_inside, in_count, out_inside, out_count, start});
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
  // Rank a sends (a + b) % 3 · n / 2 elements to rank b, with a gap of one before each part.
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

std::vector<std::byte> on_host(Communicator& comm, const Call& call, DType dtype,
                               std::vector<std::byte> block) {
  const std::size_t size = size_of(dtype);
  call.start(comm, {block.data() + call.in_at * size, call.in_count, dtype},
             {block.data() + call.out_at * size, call.out_count, dtype}, {})
      .wait();
  return block;
}

std::vector<std::byte> on_device(Communicator& comm, const Call& call, DType dtype,
                                 std::vector<std::byte> block, const Stream& stream, std::byte* memory) {
  const Device device = stream.device();
  const std::size_t size = size_of(dtype);
  const auto own = memory ? nullptr : comm.allocate(block.size() + 1);
  if (own) memory = own.get();
  memcpy_async(memory, block.data(), block.size(), stream);
  const Work work = call.start(comm, {memory + call.in_at * size, call.in_count, dtype, device},
                               {memory + call.out_at * size, call.out_count, dtype, device}, stream);
  work.wait_on(stream);
  memcpy_async(block.data(), memory, block.size(), stream);
  work.wait();
  return block;
}

void expect_same(Communicator& comm, DType dtype, ReduceOp op, std::size_t n, const Stream& stream,
                 std::byte* memory) {
  for (const bool in_place : {false, true})
    for (const Call& call : calls(comm.rank(), comm.size(), n, op, in_place)) {
      const auto seed = static_cast<std::uint32_t>(comm.rank() * 100 + 7);
      const auto block = random_block(dtype, call.block() + (in_place ? 1 : 0), seed);
      EXPECT_EQ(on_device(comm, call, dtype, block, stream, memory), on_host(comm, call, dtype, block))
          << call.name << ", " << name(dtype) << " " << name(op) << ", " << n << " elements, rank "
          << comm.rank();
    }
}

}  // namespace rz::test
