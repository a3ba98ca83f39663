#pragma once
/// A collective as the harness sees it: a small table of functions.

#include <cstddef>
#include <span>
#include <string_view>
#include <vector>

#include "comm/communicator.h"

namespace rz::bench {

/// Who asks.
struct Member {
  int rank = 0;
  int size = 1;
};

/// Elements that one rank handles when the user asks for `count` of them in all.
struct Shape {
  std::size_t send = 0, recv = 0;
  std::size_t param = 0;  ///< what the column `count` shows
  std::size_t size = 0;   ///< what the column `size` shows, the S of the bandwidths; the same on every rank
  /// In place: where input and output start in one buffer of `extent` elements.
  std::size_t in_place_in = 0, in_place_out = 0, extent = 0;
};

struct Call {
  Communicator& comm;
  const std::byte* in;
  std::byte* out;
  Shape shape;
  DType dtype;
  ReduceOp op;
  int root;
  bool in_place;
  Stream stream;  ///< of the memory's device

  ConstBuffer input() const { return {in, shape.send, dtype, stream.device()}; }
  Buffer output() const { return {out, shape.recv, dtype, stream.device()}; }
};

/// A part of what a rank must end with: elements [from, from + count) of rank `source`'s input, or of the
/// combination of all inputs, at `at` of the output.
struct Piece {
  static constexpr int combined = -1;
  int source;
  std::size_t from, at, count;
};

struct Collective {
  std::string_view name;
  bool reduces, rooted;
  bool checks_in_place;  ///< false: #wrong of the in-place run is N/A
  Shape (*shape)(std::size_t count, std::size_t element, Member);
  Work (*start)(const Call&);
  Group& (*add)(Group&, const Call&);  ///< the same call, as one more of a group
  std::vector<Piece> (*expected)(const Shape&, Member, int root);
  double (*busbw_factor)(int ranks);
};

extern const Collective all_reduce, reduce_scatter, all_gather, broadcast, reduce, alltoall, alltoallv,
    scatter, gather, sendrecv;

/// What the library calls it: alltoall is all_to_all.
rz::Collective kind_of(const Collective&);

/// Errc::config for a name that is none.
const Collective& collective_from_name(std::string_view);

/// A rank's part of `count` elements, a multiple of 16 bytes.
inline std::size_t part(std::size_t count, std::size_t element, int ranks) {
  return count / static_cast<std::size_t>(ranks) & ~(16 / element - 1);
}
inline double factor_one(int) { return 1; }
/// (n-1)/n: what a rank need not send to itself.
inline double factor_others(int n) { return static_cast<double>(n - 1) / n; }

}  // namespace rz::bench
