#include "sharding/checkpoint/torch_files/strided_read.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace rz {
namespace {

using std::uint64_t;

/// A range of a storage up to this size is read at once.
constexpr uint64_t max_window_bytes = uint64_t{64} << 20;
/// A transposed matrix is read in windows of rows up to this size, which a cache holds, but of at least so
/// many rows: a column of them is read at once. Pages of a larger window would cost more than the reads.
constexpr uint64_t tile_bytes = uint64_t{16} << 20, min_tile_rows = 256;
constexpr uint64_t max_column_bytes = uint64_t{1} << 20;  // that are read before they are transposed

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

/// Transposes `columns`, whose elements are contiguous, to rows: of `from`, whose columns begin `from_pitch`
/// elements after each other, to `to`, whose rows do `to_pitch`. Blocks of 8 × 8, of which both sides are in
/// the first-level cache even if pitches are powers of two.
template <class T>
void transpose(const T* from, uint64_t from_pitch, uint64_t columns, uint64_t rows, T* to,
               uint64_t to_pitch) {
  constexpr uint64_t side = 8;
  const uint64_t whole_rows = rows / side * side, whole_columns = columns / side * side;
  for (uint64_t r = 0; r < whole_rows; r += side)
    for (uint64_t c = 0; c < whole_columns; c += side)
      for (uint64_t i = 0; i < side; ++i)
        for (uint64_t k = 0; k < side; ++k)
          to[(r + i) * to_pitch + c + k] = from[(c + k) * from_pitch + r + i];
  for (uint64_t r = 0; r < rows; ++r)
    for (uint64_t c = r < whole_rows ? whole_columns : 0; c < columns; ++c)
      to[r * to_pitch + c] = from[c * from_pitch + r];
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
    if (window_.data == t.data && window_.shape == t.shape && window_.strides == t.strides) return;
    window_.data = t.data, window_.shape = t.shape, window_.strides = t.strides;
    window_.row_begin = window_.row_end = 0;
  }

  void read(uint64_t begin, std::span<std::byte> out) {
    const auto [extent, stride] = dimensions_.back();
    uint64_t at = begin;
    while (!out.empty()) {
      const uint64_t row = at / row_, last_row = (at + out.size() / bytes_ - 1) / row_;
      if (row < window_.row_begin || row >= window_.row_end) fill_window(row, last_row);
      uint64_t n = out.size() / bytes_;
      if (window_.row_major) {
        n = std::min(n, window_.row_end * row_ - at);
        std::memcpy(out.data(), window_.bytes.data() + (at - window_.row_begin * row_) * bytes_, n * bytes_);
      } else {
        n = std::min(n, extent - at % extent);
        if (dimensions_.size() == 1 && window_.row_end > row) n = std::min(n, window_.row_end - row);
        read_run(at, n, stride, out.first(n * bytes_));
      }
      out = out.subspan(n * bytes_), at += n;
    }
    if (at != tensor_.count) return;
    window_.data = 0, window_.row_begin = window_.row_end = 0;
    if (window_.bytes.size() > tile_bytes) window_.bytes = {};
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
    window_.row_begin = row, window_.row_end = row, window_.row_major = false;
    const uint64_t tile_rows =
        std::max(tile_bytes / (row_ * bytes_), std::min(min_tile_rows, max_elements / row_));
    const bool transposed = dimensions_.size() == 2 && stride == 1 && dimensions_[1].stride >= rows;
    if (transposed && tile_rows >= std::min<uint64_t>(left, 64)) {
      fill_tile(std::min(left, tile_rows));
    } else if (const uint64_t n = std::min(fitting, wanted); n > 0) {
      window_.row_end = row + n;
      window_.bytes.resize(((n - 1) * stride + row_extent_) * bytes_);
      file_.read(tensor_.data + row * stride * bytes_, window_.bytes);
    } else {
      window_.bytes.clear();
    }
  }

  /// Reads rows of a transposed matrix: a part of each of its columns, or several whole columns at once.
  void fill_tile(uint64_t rows) {
    const uint64_t first = window_.row_begin, stride = dimensions_[1].stride;
    window_.row_end = first + rows, window_.row_major = true;
    if (window_.bytes.size() < rows * row_ * bytes_) window_.bytes.resize(rows * row_ * bytes_);
    const bool whole = stride <= 2 * rows && stride * bytes_ <= max_column_bytes;
    const uint64_t pitch =
        whole ? stride : rows + 64 / bytes_;  // columns of equal sets of a cache would collide
    const uint64_t at_once =
        std::max<uint64_t>(1, std::min<uint64_t>(whole ? row_ : 64, max_column_bytes / (pitch * bytes_)));
    for (uint64_t c = 0; c < row_; c += at_once) {
      const uint64_t n = std::min(at_once, row_ - c);
      window_.columns.resize(std::max(window_.columns.size(), n * pitch * bytes_));
      const auto read = [&](uint64_t column, uint64_t elements) {
        file_.read(tensor_.data + (first + column * stride) * bytes_,
                   std::span(window_.columns).subspan((column - c) * pitch * bytes_, elements * bytes_));
      };
      if (whole)
        read(c, (n - 1) * stride + rows);
      else
        for (uint64_t k = 0; k < n; ++k) read(c + k, rows);
      transpose_columns(n, pitch, rows, window_.bytes.data() + c * bytes_);
    }
  }

  void transpose_columns(uint64_t n, uint64_t pitch, uint64_t rows, std::byte* to) const {
    const auto as = [&](auto type) {
      using T = decltype(type);
      transpose(reinterpret_cast<const T*>(window_.columns.data()), pitch, n, rows, reinterpret_cast<T*>(to),
                row_);
    };
    switch (bytes_) {
      case 1:
        return as(std::uint8_t{});
      case 2:
        return as(std::uint16_t{});
      case 4:
        return as(std::uint32_t{});
      default:
        return as(uint64_t{});
    }
  }

  /// The index of an element in the storage, or in the window.
  uint64_t index_of(uint64_t element, bool in_window) const {
    uint64_t index = 0;
    for (std::size_t d = dimensions_.size(); d-- > 1; element /= dimensions_[d].extent)
      index += element % dimensions_[d].extent * dimensions_[d].stride;
    return index + (in_window ? element - window_.row_begin : element) * dimensions_[0].stride;
  }

  /// Reads elements that lie in one row of the innermost dimension.
  void read_run(uint64_t element, uint64_t count, uint64_t stride, std::span<std::byte> out) {
    const bool in_window = window_.row_end > window_.row_begin;
    const uint64_t index = index_of(element, in_window);
    if (!in_window) {
      if (stride == 1) return file_.read(tensor_.data + index * bytes_, out);
      for (uint64_t i = 0; i < count; ++i)
        file_.read(tensor_.data + (index + i * stride) * bytes_, out.subspan(i * bytes_, bytes_));
      return;
    }
    const std::byte* from = window_.bytes.data() + index * bytes_;
    switch (bytes_) {
      case 2:
        return gather<2>(from, stride, count, out.data());
      case 4:
        return gather<4>(from, stride, count, out.data());
      case 8:
        return gather<8>(from, stride, count, out.data());
      default:
        for (uint64_t i = 0; i < count; ++i)
          std::memcpy(out.data() + i * bytes_, from + i * stride * bytes_, bytes_);
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
