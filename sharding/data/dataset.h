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

#include "../../comm/core/range.h"
#include "../../comm/core/types.h"
#include "../../tensor/tensor.h"

namespace rz {

/// One field of every sample, e.g. {"x", DType::f32, {32}}; a label is a field without dimensions.
struct Field {
  std::string name;
  DType dtype = DType::f32;
  Shape shape = {};  ///< of one sample, at most three dimensions
  /// Samples have first extents of their own, at most shape[0], such as numbers of tokens. A batch pads them
  /// (Collation), and has one more field with these, "NAME.lengths", i32 []: where rows are padded on the
  /// right, the key_counts of attention.
  bool ragged = false;
  /// What a ragged field is padded with: pad_token_id for inputs, -100 for targets, 0 for a mask of ones.
  double padding_value = 0;
  bool operator==(const Field&) const = default;
};

/// How samples of different lengths become one batch; the names are those of Hugging Face's tokenizers.
struct Collation {
  enum class Padding { longest, max_length };
  enum class Side { right, left };
  /// To the longest sample of the batch, or to Field::shape, so that all batches have one shape, as CUDA
  /// graphs need.
  Padding padding = Padding::longest;
  Side padding_side = Side::right;
  std::size_t pad_to_multiple_of = 1;  ///< the padded length is rounded up, also beyond Field::shape
};

/// What noise on a sample may depend on. Neither ranks, workers and batches nor an interruption change it.
struct SampleDraw {
  std::uint64_t epoch = 0;  ///< pass over the data
  std::uint64_t seed = 0;   ///< differs for every sample and epoch, and by the seed of the loader
};

/// Host memory of a batch into which a sample is read: a row of every field.
class BatchRows {
 public:
  /// `memory[f]` holds [rows, shape…] of `fields[f]`, a ragged field at least as much. The lengths of ragged
  /// fields are among them. Both must outlive this object.
  BatchRows(std::span<const Field> fields, std::span<const Tensor> memory, const SampleDraw& draw = {})
      : fields_(fields), memory_(memory), draw_(draw) {}

  /// The draw of the sample that is read.
  const SampleDraw& draw() const { return draw_; }

  /// The elements of a row. Errc::invalid_argument if there is no such field, it lists the fields, if T is
  /// not its dtype, or if it is ragged.
  template <class T>
  std::span<T> row(std::string_view field, std::size_t row) {
    const std::size_t f = find(field, dtype_of<T>, false);
    return {memory_[f].data<T>() + row * elements(f), fields_[f].shape.count()};
  }
  /// The row of a sample of a ragged field, whose first extent is `length`, which the batch keeps. Without
  /// this call a sample has the length 0. Errc::invalid_argument, as above, if the field is not ragged, or
  /// for a length beyond Field::shape.
  template <class T>
  std::span<T> row(std::string_view field, std::size_t row, std::size_t length) {
    const std::size_t f = find(field, dtype_of<T>, true);
    return {memory_[f].data<T>() + row * elements(f), set_length(f, row, length)};
  }
  /// The bytes of a row of field number `field`.
  std::span<std::byte> bytes(std::size_t field, std::size_t row);

 private:
  std::size_t find(std::string_view field, DType, bool ragged) const;
  /// Between the beginnings of two rows.
  std::size_t elements(std::size_t field) const { return memory_[field].count() / memory_[field].shape()[0]; }
  /// Returns the elements of so many.
  std::size_t set_length(std::size_t field, std::size_t row, std::size_t length);

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
  /// `tensors[f]` is [indices.size(), shape…] of field f; of a ragged one, what it is padded to is the first
  /// extent of the shape.
  Batch(std::shared_ptr<const std::vector<Field>> fields, std::vector<Tensor> tensors,
        std::vector<std::uint64_t> indices, std::size_t padding);

  /// [rows, shape…]. Errc::invalid_argument if there is no such field; it lists the fields.
  const Tensor& operator[](std::string_view field) const;
  /// The fields of its tensors.
  std::span<const Field> fields() const {
    return fields_ ? std::span<const Field>(*fields_) : std::span<const Field>();
  }
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
  /// Tensors on the host of at least one dimension, whose first extents are equal. Shares their memory, which
  /// must not be written while a loader reads. Errc::invalid_argument names the tensor that does not fit.
  explicit TensorDataset(std::vector<NamedTensor>);

  std::uint64_t size() const override { return size_; }
  std::vector<Field> fields() const override;
  void read(std::uint64_t index, BatchRows& to, std::size_t row) const override;
  /// Joins parts_of_checksum() of each tensor.
  std::optional<std::uint64_t> checksum() const override;

 private:
  std::vector<NamedTensor> tensors_;
  std::uint64_t size_ = 0;
};

/// tensor_dataset({{"x", x}, {"y", y}}), for a Loader.
std::shared_ptr<const Dataset> tensor_dataset(std::vector<NamedTensor>);

}  // namespace rz
