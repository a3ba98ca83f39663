#pragma once
/// Every collective as one call on one block of memory, so that a test can make it on the host and on a
/// device, and compare bytes.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "comm/communicator.h"

namespace rz::test {

/// One call of a collective on memory of any device: the places of input and output in one block.
struct Call {
  std::string name;
  std::size_t in_at, in_count, out_at, out_count;
  std::function<Work(Communicator&, ConstBuffer in, Buffer out, const Stream&)> start;
  std::size_t block() const { return std::max(in_at + in_count, out_at + out_count); }
};

/// Of n elements per rank; in place where `in_place`. Those that reduce for every operator, the others for
/// sum.
std::vector<Call> calls(int rank, int size, std::size_t n, ReduceOp op, bool in_place);

/// Numbers with every mantissa bit in use, so that another order of additions gives other bits.
std::vector<std::byte> random_block(DType dtype, std::size_t count, std::uint32_t seed);

/// The block after the call, as computed on the host.
std::vector<std::byte> on_host(Communicator& comm, const Call& call, DType dtype,
                               std::vector<std::byte> block);

/// The same on the device, with the input written just before in the same stream and read just after: in
/// `memory`, which must be large enough, or in memory of Communicator::allocate.
std::vector<std::byte> on_device(Communicator& comm, const Call& call, DType dtype,
                                 std::vector<std::byte> block, const Stream& stream,
                                 std::byte* memory = nullptr);

/// Both have the same bytes after every call, in place and not. `memory` as above: at most 3 · n · ranks
/// elements.
void expect_same(Communicator& comm, DType dtype, ReduceOp op, std::size_t n, const Stream& stream,
                 std::byte* memory = nullptr);

}  // namespace rz::test
