#pragma once
/// Data for training: samples of named fields, and batches of them.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "comm/core/range.h"
#include "comm/core/types.h"
#include "tensor/tensor.h"

namespace rz {

/// One field of every sample, e.g. {"x", DType::f32, {32}}; a label is a field without dimensions.
struct Field {
  std::string name;
  DType dtype = DType::f32;
  Shape shape = {};  ///< of one sample, at most three dimensions
  bool operator==(const Field&) const = default;
};

/// What noise on a sample may depend on. Neither ranks, workers and batches nor an interruption change it.
struct SampleDraw {
  std::uint64_t epoch = 0;  ///< pass over the data
  std::uint64_t seed = 0;   ///< differs for every sample and epoch, and by the seed of the loader
};

/// Host memory of a batch into which a sample is read: a row of every field.
class BatchRows {
 public:
  /// `memory[f]` holds [rows, shape…] of `fields[f]`. Both must outlive this object.
  BatchRows(std::span<const Field> fields, std::span<const Tensor> memory, const SampleDraw& draw = {})
      : fields_(fields), memory_(memory), draw_(draw) {}

  /// Of the sample that is read.
  const SampleDraw& draw() const { return draw_; }

  /// The elements of a row. Errc::invalid_argument if there is no such field, it lists the fields, or if T is
  /// not its dtype.
  template <class T>
  std::span<T> row(std::string_view field, std::size_t row) {
    const std::size_t f = find(field, dtype_of<T>);
    const std::size_t count = fields_[f].shape.count();
    return {memory_[f].data<T>() + row * count, count};
  }
  /// The bytes of a row of field number `field`.
  std::span<std::byte> bytes(std::size_t field, std::size_t row);

 private:
  std::size_t find(std::string_view field, DType) const;

  std::span<const Field> fields_;
  std::span<const Tensor> memory_;
  SampleDraw draw_;
};

/// The parts of `count` things whose checksum stands for them all: everything if that is at most 64 times
/// `piece`, else 64 pieces from the first to the last.
std::vector<Range> parts_of_checksum(std::size_t count, std::size_t piece);

/// Samples that are read by index, as torch.utils.data.Dataset with __getitem__. The const functions may be
/// called from several threads at once.
class Dataset {
 public:
  virtual ~Dataset() = default;
  /// Number of samples.
  virtual std::uint64_t size() const = 0;
  virtual std::vector<Field> fields() const = 0;
  /// Differs for other samples; by which a run that is resumed finds that its data are others. By default
  /// none.
  virtual std::optional<std::uint64_t> checksum() const { return std::nullopt; }
  /// Writes all fields of sample `index` < size() to a row. What is random about it, such as a crop, words
  /// that are dropped or masked, depends on the index and BatchRows::draw() alone:
  ///
  ///     std::mt19937_64 random(to.draw().seed);
  virtual void read(std::uint64_t index, BatchRows& to, std::size_t row) const = 0;
};

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
