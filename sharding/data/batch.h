#pragma once
/// Samples on the device of the model.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "sharding/data/dataset.h"
#include "tensor/tensor.h"

namespace rz {

/// Rows of samples, one tensor for each field.
class Batch {
 public:
  /// No rows and no fields.
  Batch() = default;
  /// `tensors[f]` is [indices.size(), shape…] of field f.
  Batch(std::shared_ptr<const std::vector<Field>> fields, std::vector<Tensor> tensors,
        std::vector<std::uint64_t> indices, std::size_t padding);

  /// [rows, shape…]. Errc::invalid_argument if there is no such field; it lists the fields.
  const Tensor& operator[](std::string_view field) const;
  /// Number of samples, padding included.
  std::size_t rows() const { return indices_.size(); }
  /// Number of trailing rows that repeat samples, so that all ranks have the same number of them.
  std::size_t padding() const { return padding_; }
  /// The sample of each row.
  std::span<const std::uint64_t> indices() const { return indices_; }

 private:
  std::shared_ptr<const std::vector<Field>> fields_;
  std::vector<Tensor> tensors_;
  std::vector<std::uint64_t> indices_;
  std::size_t padding_ = 0;
};

}  // namespace rz
