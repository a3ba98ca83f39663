#include "sharding/data/dataset.h"

#include <algorithm>
#include <utility>

#include "comm/core/error.h"
#include "sharding/io/checksum.h"

namespace rz {

namespace {

/// Errc::invalid_argument lists the fields there are.
std::size_t find_field(std::span<const Field> fields, std::string_view name) {
  for (std::size_t f = 0; f < fields.size(); ++f)
    if (fields[f].name == name) return f;
  std::string names;
  for (const Field& f : fields) names += concat(names.empty() ? "" : ", ", f.name);
  fail(Errc::invalid_argument, "there is no field \"", name, "\"; the samples have ", names);
}

}  // namespace

std::vector<Range> parts_of_checksum(std::size_t count, std::size_t piece) {
  constexpr std::size_t pieces = 64;
  if (count <= pieces * piece) return {{0, count}};
  std::vector<Range> parts;
  for (std::size_t i = 0; i + 1 < pieces; ++i) {
    const std::size_t begin = (count - piece) / (pieces - 1) * i;
    parts.push_back({begin, begin + piece});
  }
  parts.push_back({count - piece, count});
  return parts;
}

std::size_t BatchRows::find(std::string_view field, DType dtype, bool ragged) const {
  const std::size_t f = find_field(fields_, field);
  require(fields_[f].dtype == dtype, Errc::invalid_argument, "field ", field, " of ",
          rz::name(fields_[f].dtype), " was written as ", rz::name(dtype));
  require(fields_[f].ragged == ragged, Errc::invalid_argument, "field ", field,
          ragged ? " is not ragged: call row() without a length"
                 : " is ragged: give row() the length of the sample");
  return f;
}

std::span<std::byte> BatchRows::bytes(std::size_t field, std::size_t row) {
  const std::size_t size = size_of(fields_[field].dtype);
  return {memory_[field].raw() + row * elements(field) * size, fields_[field].shape.count() * size};
}

Batch::Batch(std::shared_ptr<const std::vector<Field>> fields, std::vector<Tensor> tensors,
             std::vector<std::uint64_t> indices, std::size_t padding)
    : fields_(std::move(fields)),
      tensors_(std::move(tensors)),
      indices_(std::move(indices)),
      padding_(padding) {}

const Tensor& Batch::operator[](std::string_view field) const {
  return tensors_[find_field(fields(), field)];
}

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
    for (const Range part : parts_of_checksum(tensor.bytes(), 1 << 18))
      checksum.add({tensor.raw() + part.begin, part.end - part.begin});
  return checksum.value();
}

std::shared_ptr<const Dataset> tensor_dataset(std::vector<NamedTensor> tensors) {
  return std::make_shared<TensorDataset>(std::move(tensors));
}

}  // namespace rz
