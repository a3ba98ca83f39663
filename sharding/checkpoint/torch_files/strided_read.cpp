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
  StridedReader(const InputFile& file, const TorchTensor& t, std::vector<Dimension> dimensions)
      : file_(file), tensor_(t), dimensions_(std::move(dimensions)), bytes_(t.element_bytes) {}

  void read(uint64_t begin, std::span<std::byte> out) {
    fill_window(begin, begin + out.size() / bytes_);
    const auto [extent, stride] = dimensions_.back();
    for (uint64_t at = begin; !out.empty();) {
      const uint64_t n = std::min<uint64_t>(extent - at % extent, out.size() / bytes_);
      read_run(index_of(at), n, stride, out.first(n * bytes_));
      out = out.subspan(n * bytes_), at += n;
    }
  }

 private:
  uint64_t index_of(uint64_t element) const {
    uint64_t index = 0;
    for (std::size_t d = dimensions_.size(); d-- > 0; element /= dimensions_[d].extent)
      index += element % dimensions_[d].extent * dimensions_[d].stride;
    return index;
  }

  /// Reads the range of the storage that holds the outermost rows of the elements, unless it is too large.
  void fill_window(uint64_t begin, uint64_t end) {
    uint64_t row = 1, row_extent = 1;
    for (std::size_t d = 1; d < dimensions_.size(); ++d) {
      row *= dimensions_[d].extent;
      row_extent += (dimensions_[d].extent - 1) * dimensions_[d].stride;
    }
    const uint64_t first = begin / row * dimensions_[0].stride,
                   last = (end - 1) / row * dimensions_[0].stride + row_extent;
    if (last - first > max_window_bytes / bytes_) return;
    window_begin_ = first, window_.resize((last - first) * bytes_);
    file_.read(tensor_.data + first * bytes_, window_);
  }

  void read_run(uint64_t index, uint64_t count, uint64_t stride, std::span<std::byte> out) {
    if (window_.empty() && stride == 1) return file_.read(tensor_.data + index * bytes_, out);
    for (uint64_t i = 0; i < count; ++i) read_element(index + i * stride, out.subspan(i * bytes_, bytes_));
  }

  void read_element(uint64_t index, std::span<std::byte> out) {
    if (window_.empty()) return file_.read(tensor_.data + index * bytes_, out);
    std::memcpy(out.data(), window_.data() + (index - window_begin_) * bytes_, bytes_);
  }

  const InputFile& file_;
  const TorchTensor& tensor_;
  std::vector<Dimension> dimensions_;
  uint64_t bytes_, window_begin_ = 0;
  std::vector<std::byte> window_;
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

void read_strided(const InputFile& file, const TorchTensor& t, uint64_t begin, std::span<std::byte> out) {
  if (out.empty()) return;
  auto dimensions = merged_dimensions(t);
  if (dimensions.empty() || (dimensions.size() == 1 && dimensions[0].stride == 1))
    return file.read(t.data + begin * t.element_bytes, out);
  StridedReader(file, t, std::move(dimensions)).read(begin, out);
}

}  // namespace rz
