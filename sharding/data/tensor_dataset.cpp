#include "sharding/data/tensor_dataset.h"

#include <algorithm>
#include <utility>

#include "comm/core/error.h"
#include "sharding/io/checksum.h"

namespace rz {
namespace {

Shape row_shape(const Shape& s) {
  std::vector<std::size_t> extents;
  for (int i = 1; i < s.dims(); ++i) extents.push_back(s[i]);
  return Shape(extents);
}

void check_tensor(const NamedTensor& t, const NamedTensor& first) {
  require(t.tensor.defined() && t.tensor.shape().dims() > 0, Errc::invalid_argument, "tensor ", t.name,
          " has no rows; its first dimension counts samples");
  require(t.tensor.device().kind == Device::host, Errc::invalid_argument, "tensor ", t.name, " is on ",
          rz::name(t.tensor.device()), "; give host memory, from which the loader copies batches");
  require(t.tensor.shape()[0] == first.tensor.shape()[0], Errc::invalid_argument, "tensor ", t.name, " of ",
          rz::name(t.tensor.shape()), " has other rows than ", first.name, " of ",
          rz::name(first.tensor.shape()));
}

}  // namespace

TensorDataset::TensorDataset(std::vector<NamedTensor> tensors) : tensors_(std::move(tensors)) {
  require(!tensors_.empty(), Errc::invalid_argument, "a dataset of no tensors");
  for (const NamedTensor& t : tensors_) check_tensor(t, tensors_.front());
  size_ = tensors_.front().tensor.shape()[0];
}

std::vector<Field> TensorDataset::fields() const {
  std::vector<Field> all;
  for (const auto& [name, tensor] : tensors_)
    all.push_back({name, tensor.dtype(), row_shape(tensor.shape())});
  return all;
}

void TensorDataset::read(std::uint64_t index, BatchRows& to, std::size_t row) const {
  for (std::size_t f = 0; f < tensors_.size(); ++f) {
    const std::span<std::byte> out = to.bytes(f, row);
    std::copy_n(tensors_[f].tensor.raw() + index * out.size(), out.size(), out.data());
  }
}

std::optional<std::uint64_t> TensorDataset::checksum() const {
  Checksum checksum;
  for (const auto& [name, tensor] : tensors_)
    for (const ChecksumPart part : parts_of_checksum(tensor.bytes(), 1 << 18))
      checksum.add({tensor.raw() + part.begin, part.end - part.begin});
  return checksum.value();
}

std::shared_ptr<const Dataset> tensor_dataset(std::vector<NamedTensor> tensors) {
  return std::make_shared<TensorDataset>(std::move(tensors));
}

}  // namespace rz
