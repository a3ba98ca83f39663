#pragma once
/// Table of the ten collectives that the _perf programs time.

#include <cstddef>
#include <span>
#include <string_view>
#include <vector>

#include "comm/collective.h"
#include "comm/communicator.h"

namespace rz::bench {

/// One rank of a group.
struct RankInfo {
  int rank = 0;
  int size = 1;
};

/// How many elements one rank sends and receives for a requested size, and where they lie in place.
struct ElementCounts {
  std::size_t send = 0, recv = 0;
  std::size_t count_column = 0;  ///< shown in the column `count`
  /// Shown in the column `size` and used for the bandwidths; equal on every rank.
  std::size_t size_column = 0;
  /// In place, input and output start at these elements of one buffer of `in_place_extent` elements.
  std::size_t in_place_in = 0, in_place_out = 0, in_place_extent = 0;
};

/// The arguments of one call on one rank.
struct Call {
  Communicator& comm;
  const std::byte* in;
  std::byte* out;
  ElementCounts counts;
  DType dtype;
  ReduceOp op;
  int root;
  bool in_place;
  Stream stream;  ///< of the memory's device

  ConstBuffer input() const { return {in, counts.send, dtype, stream.device()}; }
  Buffer output() const { return {out, counts.recv, dtype, stream.device()}; }
};

/// Expected values of a part of the output of a rank: elements [from, from + count) of the input of rank
/// `source`, or of the reduction of all inputs, start at element `at` of the output.
struct ExpectedRange {
  static constexpr int reduced = -1;
  int source;
  std::size_t from, at, count;
};

/// A row of the table.
struct Collective {
  std::string_view name;  ///< the program is NAME_perf
  rz::Collective kind;
  bool has_op, has_root;
  bool checks_in_place;  ///< false: the column #wrong of the in-place run is N/A
  ElementCounts (*counts)(std::size_t count, std::size_t element_size, RankInfo);
  double (*busbw_factor)(int ranks);
  std::vector<ExpectedRange> (*expected)(const ElementCounts&, RankInfo, int root);
  Work (*start)(const Call&);
  Group& (*add)(Group&, const Call&);  ///< adds the same call to a group
};

std::span<const Collective> collectives();

/// Throws Errc::config for an unknown name.
const Collective& collective_from_name(std::string_view);

}  // namespace rz::bench
