#pragma once
/// Samples in memory.

#include <memory>
#include <string>
#include <vector>

#include "sharding/data/dataset.h"

namespace rz {

struct NamedTensor {
  std::string name;
  Tensor tensor;
};

/// Sample i is row i of every tensor, as in torch.utils.data.TensorDataset.
class TensorDataset : public Dataset {
 public:
  /// Tensors on the host of at least one dimension, of which the first are equal. Shares their memory, which
  /// must not be written while a loader reads. Errc::invalid_argument names the tensor that does not fit.
  explicit TensorDataset(std::vector<NamedTensor>);

  std::uint64_t size() const override { return size_; }
  std::vector<Field> fields() const override;
  void read(std::uint64_t index, BatchRows& to, std::size_t row) const override;
  /// Of parts_of_checksum() of each tensor.
  std::optional<std::uint64_t> checksum() const override;

 private:
  std::vector<NamedTensor> tensors_;
  std::uint64_t size_ = 0;
};

/// tensor_dataset({{"x", x}, {"y", y}}), for a Loader.
std::shared_ptr<const Dataset> tensor_dataset(std::vector<NamedTensor>);

}  // namespace rz
