#include "sharding/grad_norm.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <mutex>
#include <utility>

#include "comm/core/memory.h"
#include "tensor/kernels/device_ops.h"
#include "tensor/kernels/optimizer.h"

namespace rz {

namespace {

constexpr int limbs = ExactLayout::limbs, words = ExactLayout::words;
constexpr int not_a_number = ExactLayout::not_a_number, plus_infinity = ExactLayout::plus_infinity,
              minus_infinity = ExactLayout::minus_infinity;
constexpr std::int64_t low_half = 0xffffffff;
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
  std::copy(from.begin(), from.end(), summand.word_.begin());
  add(summand);
}

/// Leaves 32 bits in every limb but the last, which keeps the sign.
void ExactSum::carry() {
  for (std::size_t i = 0; i + 1 < limbs; ++i) {
    word_[i + 1] += word_[i] >> 32;
    word_[i] &= low_half;
  }
  pending_ = 0;
}

double ExactSum::value() const {
  if (word_[not_a_number] || (word_[plus_infinity] && word_[minus_infinity]))
    return std::numeric_limits<double>::quiet_NaN();
  if (word_[plus_infinity]) return std::numeric_limits<double>::infinity();
  if (word_[minus_infinity]) return -std::numeric_limits<double>::infinity();

  ExactSum s = *this;
  s.carry();
  const bool negative = s.word_[limbs - 1] < 0;
  if (negative) {
    for (std::size_t i = 0; i < limbs; ++i) s.word_[i] = -s.word_[i];
    s.carry();
  }
  int top = limbs - 1;
  while (top >= 0 && s.word_[static_cast<std::size_t>(top)] == 0) --top;
  if (top < 0) return 0;

  // The upper three limbs hold at least 65 bits. 64 of them, the last one standing for everything below, are
  // rounded by the conversion to double as the whole would be. Below 2^-1022 nothing is rounded: every sum is
  // a multiple of the smallest double.
  const auto limb = [&](int i) {
    return i < 0 ? std::uint64_t{0} : static_cast<std::uint64_t>(s.word_[static_cast<std::size_t>(i)]);
  };
  const unsigned __int128 upper = static_cast<unsigned __int128>(limb(top)) << 64 |
                                  static_cast<unsigned __int128>(limb(top - 1)) << 32 | limb(top - 2);
  const int spare = 64 - std::countl_zero(limb(top));
  bool sticky = (upper & ((static_cast<unsigned __int128>(1) << spare) - 1)) != 0;
  for (int i = top - 3; i >= 0; --i) sticky = sticky || limb(i) != 0;
  const auto kept = static_cast<std::uint64_t>(upper >> spare) | static_cast<std::uint64_t>(sticky);
  const double magnitude = std::ldexp(static_cast<double>(kept), 32 * (top - 2) + spare - 1074);
  return negative ? -magnitude : magnitude;
}

void ExactSum::all_reduce(Communicator& communicator) {
  carry();
  communicator.all_reduce(Buffer(word_.data(), words)).wait();
  pending_ = communicator.size();
}

/// Threads add up on their own: since sums are exact, the order in which they are joined does not matter.
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

void SquareSum::add(const Tensor& x) {
  if (stream_.device().kind == Device::host) return add_squares(sum_, x.data<float>(), x.count(), stream_);
  if (!words_.defined())
    words_ = Tensor::empty({ExactLayout::words}, DType::i64, allocator_on(stream_.device()));
  if (!std::exchange(begun_, true)) set_bytes(words_.raw(), 0, words_.bytes(), stream_);
  const ops::Squared squared{x.raw(), x.dtype(), x.count()};
  ops::device_ops().optimizer.add_squares(words_.data<std::int64_t>(), {&squared, 1}, stream_);
}

ExactSum SquareSum::read() const {
  ExactSum sum = sum_;
  if (!begun_) return sum;
  const Tensor words = words_.on_host(stream_);
  sum.add(std::span<const std::int64_t, ExactLayout::words>(words.data<std::int64_t>(), ExactLayout::words));
  return sum;
}

}  // namespace rz
