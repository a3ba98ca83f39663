#include "sharding/model/pairwise_sums.h"

#include <bit>

#include "comm/core/error.h"
#include "comm/device/allocate.h"
#include "tensor/ops.h"

namespace rz {

namespace {

/// The factor 2^k of a number of passes.
std::uint64_t groups_of(std::int64_t passes) {
  const auto n = static_cast<std::uint64_t>(passes);
  return n & (~n + 1);
}

}  // namespace

PairwiseSums::PairwiseSums(std::int64_t passes, int buckets)
    : passes_(passes),
      group_(passes / static_cast<std::int64_t>(groups_of(passes))),
      kept_(static_cast<std::size_t>(buckets)) {}

std::size_t PairwiseSums::max_kept(std::int64_t passes) {
  return passes > 0 ? static_cast<std::size_t>(std::countr_zero(groups_of(passes))) : 0;
}

void PairwiseSums::begin_pass(bool synchronises) {
  const std::int64_t pass = passes_begun_ + 1;
  require(pass <= passes_ && synchronises == (pass == passes_), Errc::invalid_argument,
          "gradients are summed in pairwise order: an update has ", passes_,
          " passes on each rank, of which the last one synchronises, found pass ", pass,
          synchronises ? ", which synchronises" : ", which does not synchronise",
          "; propagate one loss for each micro-batch, such as a + b of two, and leave boundaries to their "
          "number");
  passes_begun_ = pass;
}

void PairwiseSums::keep(int bucket, const Tensor& group, const Stream& stream) {
  std::vector<Tensor>& kept = kept_[static_cast<std::size_t>(bucket)];
  const std::uint64_t number = group_number();
  std::size_t digits = static_cast<std::size_t>(std::popcount(number));
  const int carries = std::countr_one(number);
  if (carries == 0) {
    if (kept.size() == digits)
      kept.push_back(Tensor::empty(group.shape(), group.dtype(), allocator_on(group.device())));
    ops::copy(kept[digits], group, stream);
    return;
  }
  ops::add(kept[digits - 1], kept[digits - 1], group, stream);
  for (int i = 1; i < carries; ++i) {
    --digits;
    ops::add(kept[digits - 1], kept[digits - 1], kept[digits], stream);
  }
}

void PairwiseSums::add_kept(int bucket, const Tensor& group, const Stream& stream) {
  if (passes_begun_ < 1) return;
  const std::vector<Tensor>& kept = kept_[static_cast<std::size_t>(bucket)];
  const auto ended = static_cast<std::uint64_t>((passes_begun_ - 1) / group_);
  for (auto i = static_cast<std::size_t>(std::popcount(ended)); i > 0; --i)
    ops::add(group, kept[i - 1], group, stream);
}

std::size_t PairwiseSums::bytes() const {
  std::size_t total = 0;
  for (const auto& kept : kept_)
    for (const Tensor& t : kept) total += t.bytes();
  return total;
}

}  // namespace rz
