#pragma once
/// Datasets made of others: parts of one, random splits, and several one after the other.

#include <concepts>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "dataset.h"

namespace rz {

class Communicator;

/// Some samples of a dataset, as torch.utils.data.Subset: sample i is sample indices[i]. An index may come
/// twice; BatchRows::draw() is that of i.
class Subset : public Dataset {
 public:
  /// Errc::invalid_argument without a dataset, and names the first index that it does not have.
  Subset(std::shared_ptr<const Dataset>, std::vector<std::uint64_t> indices);

  std::uint64_t size() const override { return indices_.size(); }
  std::vector<Field> fields() const override { return dataset_->fields(); }
  void read(std::uint64_t index, BatchRows& to, std::size_t row) const override;
  /// Joins the indices and, if there is one, the checksum of the dataset.
  std::optional<std::uint64_t> checksum() const override;

 private:
  std::shared_ptr<const Dataset> dataset_;
  std::vector<std::uint64_t> indices_;
};

/// The size of a part of random_split(): an integer is a number of samples, a floating-point number a
/// fraction.
class SplitSize {
 public:
  template <std::integral T>
  SplitSize(T samples) : value_(static_cast<double>(samples)), is_fraction_(false) {}
  SplitSize(double fraction) : value_(fraction), is_fraction_(true) {}

  double value() const { return value_; }
  bool is_fraction() const { return is_fraction_; }

 private:
  double value_;
  bool is_fraction_;
};

/// Cuts a dataset at random into parts without common samples, as torch.utils.data.random_split. Either all
/// sizes are numbers of samples, which add up to size(), or all are fractions, which add up to 1: a part has
/// ⌊size() · fraction⌋ samples, and those that are left go one each to the first parts. The parts are
/// consecutive pieces of Permutation(size(), seed), so they depend on size() and seed alone; they are not
/// those of torch. Errc::invalid_argument names a size that is out of range, or what they add up to.
///
///     const auto parts = random_split(data, {0.9, 0.1}, 42);  // parts[0] to train, parts[1] to evaluate
std::vector<std::shared_ptr<const Dataset>> random_split(std::shared_ptr<const Dataset>,
                                                         const std::vector<SplitSize>&, std::uint64_t seed);
/// The same. Errc::mismatch on all ranks if they have another seed, other sizes, or a dataset of another size
/// or checksum than rank 0; it names the first of them. Collective.
std::vector<std::shared_ptr<const Dataset>> random_split(std::shared_ptr<const Dataset>,
                                                         const std::vector<SplitSize>&, std::uint64_t seed,
                                                         Communicator&);

/// The samples of several datasets one after the other, as torch.utils.data.ConcatDataset. BatchRows::draw()
/// is that of the index here.
class ConcatDataset : public Dataset {
 public:
  /// Errc::invalid_argument without datasets, and names the first whose fields differ from those of dataset
  /// 0.
  explicit ConcatDataset(std::vector<std::shared_ptr<const Dataset>>);

  std::uint64_t size() const override { return ends_.back(); }
  std::vector<Field> fields() const override { return datasets_.front()->fields(); }
  void read(std::uint64_t index, BatchRows& to, std::size_t row) const override;
  /// Joins the sizes and, where there are any, the checksums of the datasets.
  std::optional<std::uint64_t> checksum() const override;

 private:
  std::vector<std::shared_ptr<const Dataset>> datasets_;
  std::vector<std::uint64_t> ends_;  // of each, in the order of samples
};

}  // namespace rz
