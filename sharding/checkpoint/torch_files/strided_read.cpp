#include "sharding/checkpoint/torch_files/strided_read.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace rz {
namespace {

using std::uint64_t;

/// A range of a storage up to this size is read at once.
constexpr uint64_t max_window_bytes = uint64_t{64} << 20;

struct Dimension {
  uint64_t extent, stride;
};

/// The dimensions, without those of one element; neighbours that lie without gaps are one.
std::vector<Dimension> merged_dimensions(const TorchTensor& t) {
  std::vector<Dimension> all;
  for (std::size_t d = 0; d < t.shape.size(); ++d) {
    if (t.shape[d] == 1) continue;
    if (!all.empty() && all.back().stride == t.shape[d] * t.strides[d]) {
      all.back() = {all.back().extent * t.shape[d], t.strides[d]};
    } else {
      all.push_back({t.shape[d], t.strides[d]});
    }
  }
  return all;
}

/// Copies elements [begin, begin + out.size() / bytes) of a view.
class StridedReader {
 public:
  StridedReader(const InputFile& file, const TorchTensor& t, std::vector<Dimension> dimensions,
                StridedWindow& window)
      : file_(file),
        tensor_(t),
        dimensions_(std::move(dimensions)),
        window_(window),
        bytes_(t.element_bytes) {
    for (std::size_t d = 1; d < dimensions_.size(); ++d) {
      row_ *= dimensions_[d].extent;
      row_extent_ += (dimensions_[d].extent - 1) * dimensions_[d].stride;
    }
    if (window_.data != t.data || window_.shape != t.shape || window_.strides != t.strides)
      window_ = {.data = t.data, .shape = t.shape, .strides = t.strides};
  }

  void read(uint64_t begin, std::span<std::byte> out) {
    const auto [extent, stride] = dimensions_.back();
    uint64_t at = begin;
    while (!out.empty()) {
      const uint64_t row = at / row_, last_row = (at + out.size() / bytes_ - 1) / row_;
      if (row < window_.row_begin || row >= window_.row_end) fill_window(row, last_row);
      uint64_t n = std::min<uint64_t>(extent - at % extent, out.size() / bytes_);
      if (dimensions_.size() == 1 && window_.row_end > row) n = std::min(n, window_.row_end - row);
      read_run(at, n, stride, out.first(n * bytes_));
      out = out.subspan(n * bytes_), at += n;
    }
    if (at == tensor_.count) window_ = {};
  }

 private:
  /// Reads the outermost rows from `row` on: those up to `last_row`, or as many as a window holds if the rows
  /// lie within each other, as the columns of a transposed matrix do, since the next calls need them. Leaves
  /// the window empty if one row exceeds it.
  void fill_window(uint64_t row, uint64_t last_row) {
    const auto [rows, stride] = dimensions_[0];
    const uint64_t max_elements = max_window_bytes / bytes_, left = rows - row;
    const bool interleaved = stride < row_extent_;
    const uint64_t wanted = interleaved ? left : last_row - row + 1;
    const uint64_t fitting = row_extent_ > max_elements ? 0
                             : stride == 0              ? wanted
                                                        : (max_elements - row_extent_) / stride + 1;
    window_.row_begin = row, window_.row_end = row, window_.bytes.clear();
    constexpr uint64_t min_tile_rows = 64;  // of which a column is read at once
    if (fitting < wanted && stride == 1 && dimensions_.size() == 2 && max_elements / row_ >= min_tile_rows) {
      fill_tile(std::min(left, max_elements / row_));
    } else if (const uint64_t n = std::min(fitting, wanted); n > 0) {
      window_.row_end = row + n, window_.row_stride = stride, window_.column_stride = 0;
      window_.bytes.resize(((n - 1) * stride + row_extent_) * bytes_);
      file_.read(tensor_.data + row * stride * bytes_, window_.bytes);
    }
  }

  /// Of a transposed matrix: a part of each column.
  void fill_tile(uint64_t rows) {
    const uint64_t first = window_.row_begin;
    window_.row_end = first + rows, window_.row_stride = 1, window_.column_stride = rows;
    window_.bytes.resize(rows * row_ * bytes_);
    for (uint64_t c = 0; c < row_; ++c)
      file_.read(tensor_.data + (first + c * dimensions_[1].stride) * bytes_,
                 std::span(window_.bytes).subspan(c * rows * bytes_, rows * bytes_));
  }

  /// The index of an element in the storage, or in the window.
  uint64_t index_of(uint64_t element, bool in_window) const {
    uint64_t index = 0;
    for (std::size_t d = dimensions_.size(); d-- > 1; element /= dimensions_[d].extent)
      index += element % dimensions_[d].extent * column_stride(d, in_window);
    return index +
           (in_window ? (element - window_.row_begin) * window_.row_stride : element * dimensions_[0].stride);
  }
  uint64_t column_stride(std::size_t d, bool in_window) const {
    return in_window && window_.column_stride ? window_.column_stride : dimensions_[d].stride;
  }

  /// Reads elements that lie in one row of the innermost dimension.
  void read_run(uint64_t element, uint64_t count, uint64_t stride, std::span<std::byte> out) {
    const bool in_window = !window_.bytes.empty();
    const uint64_t index = index_of(element, in_window);
    if (!in_window) {
      if (stride == 1) return file_.read(tensor_.data + index * bytes_, out);
      for (uint64_t i = 0; i < count; ++i)
        file_.read(tensor_.data + (index + i * stride) * bytes_, out.subspan(i * bytes_, bytes_));
      return;
    }
    const uint64_t step =
        dimensions_.size() == 1 ? window_.row_stride : column_stride(dimensions_.size() - 1, true);
    const std::byte* from = window_.bytes.data() + index * bytes_;
    switch (bytes_) {
      case 2:
        return gather<2>(from, step, count, out.data());
      case 4:
        return gather<4>(from, step, count, out.data());
      case 8:
        return gather<8>(from, step, count, out.data());
      default:
        for (uint64_t i = 0; i < count; ++i)
          std::memcpy(out.data() + i * bytes_, from + i * step * bytes_, bytes_);
    }
  }
  template <std::size_t Bytes>
  static void gather(const std::byte* from, uint64_t step, uint64_t count, std::byte* out) {
    for (uint64_t i = 0; i < count; ++i) std::memcpy(out + i * Bytes, from + i * step * Bytes, Bytes);
  }

  const InputFile& file_;
  const TorchTensor& tensor_;
  std::vector<Dimension> dimensions_;
  StridedWindow& window_;
  uint64_t bytes_, row_ = 1, row_extent_ = 1;
};

}  // namespace

bool extent_of_view(std::span<const uint64_t> shape, std::span<const uint64_t> strides, uint64_t& extent) {
  extent = 1;
  for (const uint64_t n : shape)
    if (n == 0) return extent = 0, true;
  for (std::size_t d = 0; d < shape.size(); ++d) {
    uint64_t steps = 0;
    if (__builtin_mul_overflow(shape[d] - 1, strides[d], &steps) ||
        __builtin_add_overflow(extent, steps, &extent))
      return false;
  }
  return true;
}

void read_strided(const InputFile& file, const TorchTensor& t, uint64_t begin, std::span<std::byte> out,
                  StridedWindow& window) {
  if (out.empty()) return;
  auto dimensions = merged_dimensions(t);
  if (dimensions.empty() || (dimensions.size() == 1 && dimensions[0].stride == 1))
    return file.read(t.data + begin * t.element_bytes, out);
  StridedReader(file, t, std::move(dimensions), window).read(begin, out);
}

}  // namespace rz
