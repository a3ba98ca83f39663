#include "sharding/data/subset.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "comm/core/error.h"
#include "sharding/data/batch_sampler.h"
#include "sharding/io/checksum.h"
#include "sharding/parallel/rank_agreement.h"

namespace rz {
namespace {

void add_number(Checksum& to, std::uint64_t word) { to.add(std::as_bytes(std::span(&word, 1))); }

/// Datasets without a checksum differ from those with any.
void add_checksum(Checksum& to, const Dataset& dataset) {
  const auto own = dataset.checksum();
  add_number(to, own.has_value());
  add_number(to, own.value_or(0));
}

}  // namespace

Subset::Subset(std::shared_ptr<const Dataset> dataset, std::vector<std::uint64_t> indices)
    : dataset_(std::move(dataset)), indices_(std::move(indices)) {
  require(dataset_ != nullptr, Errc::invalid_argument, "a subset without a dataset");
  const std::uint64_t size = dataset_->size();
  for (std::size_t i = 0; i < indices_.size(); ++i)
    require(indices_[i] < size, Errc::invalid_argument, "index ", i, " of the subset is sample ", indices_[i],
            "; the dataset has ", size, " samples");
}

void Subset::read(std::uint64_t index, BatchRows& to, std::size_t row) const {
  dataset_->read(indices_[index], to, row);
}

std::optional<std::uint64_t> Subset::checksum() const {
  Checksum all;
  add_checksum(all, *dataset_);
  all.add(std::as_bytes(std::span(indices_)));
  return all.value();
}

namespace {

std::string text_of(const SplitSize& s) { return s.is_fraction() ? concat(s.value()) : fixed(s.value(), 0); }

std::string text_of(const std::vector<SplitSize>& sizes) {
  std::string text;
  for (const SplitSize& s : sizes) text += concat(text.empty() ? "" : ", ", text_of(s));
  return text;
}

/// Samples of each part.
std::vector<std::uint64_t> lengths_of(const std::vector<SplitSize>& sizes, std::uint64_t samples) {
  require(!sizes.empty(), Errc::invalid_argument, "random_split() into no parts");
  const SplitSize whole = sizes.front().is_fraction() ? SplitSize(1.0) : SplitSize(samples);
  double sum = 0;
  for (const SplitSize& s : sizes) {
    require(s.is_fraction() == whole.is_fraction(), Errc::invalid_argument, "random_split() into ",
            text_of(sizes), ": give numbers of samples only, or fractions only");
    require(s.value() >= 0 && s.value() <= whole.value(), Errc::invalid_argument, "random_split() of ",
            samples, " samples into ", text_of(sizes), ": give 0 to ", text_of(whole));
    sum += s.value();
  }
  require(std::abs(sum - whole.value()) <= 1e-9 * whole.value(), Errc::invalid_argument, "random_split() of ",
          samples, " samples into ", text_of(sizes), ": they add up to ", sum, ", not to ", text_of(whole));
  std::vector<std::uint64_t> lengths;
  std::uint64_t left = samples;
  for (const SplitSize& s : sizes) {
    const double length =
        whole.is_fraction() ? std::floor(static_cast<double>(samples) * s.value()) : s.value();
    lengths.push_back(std::min(left, static_cast<std::uint64_t>(length)));
    left -= lengths.back();
  }
  for (std::size_t i = 0; left > 0; i = (i + 1) % lengths.size(), --left) ++lengths[i];
  return lengths;
}

}  // namespace

std::vector<std::shared_ptr<const Dataset>> random_split(std::shared_ptr<const Dataset> dataset,
                                                         const std::vector<SplitSize>& sizes,
                                                         std::uint64_t seed) {
  require(dataset != nullptr, Errc::invalid_argument, "random_split() without a dataset");
  const std::uint64_t samples = dataset->size();
  std::vector<std::shared_ptr<const Dataset>> parts;
  std::uint64_t next = 0;
  for (const std::uint64_t length : lengths_of(sizes, samples)) {
    std::vector<std::uint64_t> indices;
    for (const std::uint64_t end = next + length; next < end; ++next)
      indices.push_back(Permutation(samples, seed)(next));
    parts.push_back(std::make_shared<Subset>(dataset, std::move(indices)));
  }
  return parts;
}

std::vector<std::shared_ptr<const Dataset>> random_split(std::shared_ptr<const Dataset> dataset,
                                                         const std::vector<SplitSize>& sizes,
                                                         std::uint64_t seed, Communicator& ranks) {
  std::string own;
  check_on_all_ranks(ranks, [&] {
    require(dataset != nullptr, Errc::invalid_argument, "random_split() without a dataset");
    const auto checksum = dataset->checksum();
    own = concat("seed ", seed, ", ", text_of(sizes), " of ", dataset->size(), " samples",
                 checksum ? concat(" with checksum ", checksum_text(*checksum)) : "");
  });
  const std::vector<std::string> all = all_gather_text(ranks, own);
  for (std::size_t r = 1; r < all.size(); ++r)
    if (all[r] != all[0])
      throw Error(Errc::mismatch,
                  concat("random_split(): rank ", r, " has ", all[r], "; rank 0 has ", all[0],
                         "; give all ranks the same"),
                  static_cast<int>(r));
  return random_split(std::move(dataset), sizes, seed);
}

namespace {

/// "x f32 [2], y i32 []"
std::string text_of_fields(const std::vector<Field>& fields) {
  std::string text;
  for (const Field& f : fields)
    text += concat(text.empty() ? "" : ", ", f.name, ' ', name(f.dtype), ' ', name(f.shape));
  return text;
}

}  // namespace

ConcatDataset::ConcatDataset(std::vector<std::shared_ptr<const Dataset>> datasets)
    : datasets_(std::move(datasets)) {
  require(!datasets_.empty(), Errc::invalid_argument, "a concatenation of no datasets");
  std::uint64_t end = 0;
  for (std::size_t i = 0; i < datasets_.size(); ++i) {
    require(datasets_[i] != nullptr, Errc::invalid_argument, "dataset ", i, " of a concatenation is null");
    const std::vector<Field> first = datasets_.front()->fields(), own = datasets_[i]->fields();
    require(own == first, Errc::invalid_argument, "dataset ", i, " of a concatenation has the fields ",
            text_of_fields(own), "; dataset 0 has ", text_of_fields(first));
    ends_.push_back(end += datasets_[i]->size());
  }
}

void ConcatDataset::read(std::uint64_t index, BatchRows& to, std::size_t row) const {
  const auto at = std::ranges::upper_bound(ends_, index) - ends_.begin();
  const std::uint64_t begin = at == 0 ? 0 : ends_[static_cast<std::size_t>(at) - 1];
  datasets_[static_cast<std::size_t>(at)]->read(index - begin, to, row);
}

std::optional<std::uint64_t> ConcatDataset::checksum() const {
  Checksum all;
  for (const auto& dataset : datasets_) {
    add_number(all, dataset->size());
    add_checksum(all, *dataset);
  }
  return all.value();
}

}  // namespace rz
