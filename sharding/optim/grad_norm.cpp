#include "sharding/optim/grad_norm.h"

#include <algorithm>
#include <mutex>
#include <utility>

#include "comm/device/memory.h"
#include "comm/device/meta.h"
#include "tensor/kernels/device_ops.h"
#include "tensor/kernels/optimizer/optimizer.h"

namespace rz {

namespace {

constexpr int limbs = ExactLayout::limbs, words = ExactLayout::words;
constexpr std::int64_t additions_before_carry = std::int64_t{1} << 29;

}  // namespace

void ExactSum::add(double x) {
  const ExactParts parts = exact_parts(x);
  const auto first = static_cast<std::size_t>(parts.first);
  if (parts.first >= limbs) {
    ++word_[first];
    return;
  }
  for (std::size_t i = 0; i < 3; ++i) word_[first + i] += parts.part[i];
  if (++pending_ == additions_before_carry) carry();
}

void ExactSum::add(const ExactSum& other) {
  ExactSum summand = other;
  summand.carry();
  carry();
  for (std::size_t i = 0; i < words; ++i) word_[i] += summand.word_[i];
  pending_ = 1;
}

void ExactSum::add(std::span<const std::int64_t, ExactLayout::words> from) {
  ExactSum summand;
  std::copy(from.begin(), from.end(), summand.word_);
  add(summand);
}

void ExactSum::carry() {
  propagate_carries(word_);
  pending_ = 0;
}

double ExactSum::value() const {
  ExactSum copy = *this;
  return exact_value(copy.word_);
}

void ExactSum::all_reduce(Communicator& communicator) {
  carry();
  communicator.all_reduce(Buffer(word_, words)).wait();
  pending_ = communicator.size();
}

void ExactSum::all_reduce(std::span<ExactSum> sums, std::vector<std::int64_t>& buffer,
                          Communicator& communicator, std::span<std::int64_t> more) {
  buffer.resize(sums.size() * words + more.size());
  auto at = buffer.begin();
  for (ExactSum& sum : sums) {
    sum.carry();
    at = std::copy_n(sum.word_, words, at);
  }
  std::ranges::copy(more, at);
  communicator.all_reduce(Buffer(buffer.data(), buffer.size())).wait();
  at = buffer.begin();
  for (ExactSum& sum : sums) {
    std::copy_n(at, words, sum.word_);
    sum.pending_ = communicator.size();
    at += words;
  }
  std::copy_n(at, more.size(), more.begin());
}

/// Each thread has its own sum. Sums are exact, so the order in which they are added does not matter.
void add_squares(ExactSum& sum, const float* x, std::size_t count, const Stream& stream) {
  std::mutex joining;
  stream.parallel_for(count / norm_block, 1024, [&](std::size_t begin, std::size_t end) {
    ExactSum own;
    std::array<double, 256> squares;
    for (std::size_t first = begin; first < end; first += squares.size()) {
      const std::size_t n = std::min(squares.size(), end - first);
      kernels::sum_of_squares(x + first * norm_block, n, squares.data());
      for (std::size_t i = 0; i < n; ++i) own.add(squares[i]);
    }
    const std::lock_guard lock(joining);
    sum.add(own);
  });
}

namespace {

/// The squares of 16-bit elements are those of their values in f32, which are exact.
void add_squares_of_16_bits(ExactSum& sum, const Tensor& x, const Stream& stream) {
  constexpr std::size_t blocks = 32;
  std::mutex joining;
  stream.parallel_for(x.count() / norm_block, 1024, [&](std::size_t begin, std::size_t end) {
    ExactSum own;
    std::array<float, blocks * norm_block> wide;
    const Stream this_thread;
    for (std::size_t first = begin; first < end; first += blocks) {
      const std::size_t n = std::min(blocks, end - first) * norm_block;
      ops::copy(Tensor::borrow(wide.data(), {n}), x.view(first * norm_block, {n}), this_thread);
      add_squares(own, wide.data(), n, this_thread);
    }
    const std::lock_guard lock(joining);
    sum.add(own);
  });
}

}  // namespace

void SquareSum::add(const Tensor& x) {
  if (is_meta(x.device())) return;  // zeros
  const bool host = stream_.device().kind == Device::host;
  if (host && x.dtype() == DType::f32) return add_squares(sum_, x.data<float>(), x.count(), stream_);
  if (host) return add_squares_of_16_bits(sum_, x, stream_);
  const ops::Squared squared{x.raw(), x.dtype(), x.count()};
  ops::device_ops().optimizer.add_squares(words().data<std::int64_t>(), {&squared, 1}, stream_);
}

const Tensor& SquareSum::words() {
  if (!words_.defined())
    words_ = Tensor::empty({ExactLayout::words}, DType::i64, allocator_on(stream_.device()));
  if (!std::exchange(begun_, true)) memset_async(words_.raw(), 0, words_.bytes(), stream_);
  return words_;
}

ExactSum SquareSum::read() const {
  ExactSum sum = sum_;
  if (!begun_) return sum;
  const Tensor words = words_.on_host(stream_);
  sum.add(std::span<const std::int64_t, ExactLayout::words>(words.data<std::int64_t>(), ExactLayout::words));
  return sum;
}

}  // namespace rz
