#include "tensor/kernels/broadcast.h"

#include <algorithm>
#include <cstring>

namespace rz::ops {

namespace {

/// Extent d of four; a missing one is 1.
std::size_t aligned_extent(const Shape& s, int d) { return d < 4 - s.dims() ? 1 : s[d - 4 + s.dims()]; }

/// Appends an extent, or enlarges the last one where the offsets go on.
void append(IndexMap& map, std::size_t extent, std::size_t stride) {
  if (extent == 1) return;
  const int last = map.dims - 1;
  if (map.dims > 0 && map.stride[last] == stride * extent) {
    map.extent[last] *= extent;
    map.stride[last] = stride;
    return;
  }
  map.extent[map.dims] = extent;
  map.stride[map.dims] = stride;
  ++map.dims;
}

/// Writes n copies of an element, each time as many as there are.
void repeat(std::byte* to, const std::byte* from, std::size_t size, std::size_t n) {
  std::memcpy(to, from, size);
  for (std::size_t done = 1; done < n; done *= 2)
    std::memcpy(to + done * size, to, std::min(done, n - done) * size);
}

}  // namespace

bool broadcasts(const Shape& from, const Shape& to) {
  if (from.dims() > to.dims()) return false;
  for (int d = 1; d <= from.dims(); ++d)
    if (from[-d] != to[-d] && from[-d] != 1) return false;
  return true;
}

IndexMap broadcast_map(const Shape& from, const Shape& to) {
  std::array<std::size_t, 4> strides{};
  for (std::size_t d = 4, next = 1; d-- > 0; next *= aligned_extent(from, static_cast<int>(d)))
    strides[d] = aligned_extent(from, static_cast<int>(d)) == 1 ? 0 : next;
  IndexMap map;
  for (int d = 0; d < 4; ++d) append(map, aligned_extent(to, d), strides[static_cast<std::size_t>(d)]);
  return map;
}

Reduction reduction(const Shape& out, const Shape& in) {
  Reduction r;
  std::array<std::size_t, 4> strides{};
  for (std::size_t d = 4, next = 1; d-- > 0; next *= aligned_extent(in, static_cast<int>(d)))
    strides[d] = next;
  for (int d = 0; d < 4; ++d) {
    const std::size_t extent = aligned_extent(in, d);
    if (extent == 1) continue;
    r.by_rows = aligned_extent(out, d) == 1;
    append(r.by_rows ? r.terms : r.outputs, extent, strides[static_cast<std::size_t>(d)]);
  }
  return r;
}

BroadcastOperand::BroadcastOperand(const Tensor& t, const Shape& to)
    : map_(broadcast_map(t.shape(), to)), data_(t.raw()), size_(size_of(t.dtype())) {}

const std::byte* BroadcastOperand::read(std::size_t begin, std::size_t n, std::byte* buffer) const {
  const std::size_t run = map_.dims ? map_.extent[map_.dims - 1] : 1;
  const bool repeated = map_.dims && map_.stride[map_.dims - 1] == 0;
  if (!repeated && begin % run + n <= run) return at(begin);
  std::byte* to = buffer;
  for (std::size_t i = begin, count; i < begin + n; i += count, to += count * size_) {
    count = std::min(begin + n - i, run - i % run);
    if (repeated)
      repeat(to, at(i), size_, count);
    else
      std::memcpy(to, at(i), count * size_);
  }
  return buffer;
}

}  // namespace rz::ops
