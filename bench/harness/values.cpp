#include "bench/harness/values.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>

#include "comm/core/math.h"

namespace rz::bench {
namespace {

bool is_float(DType t) {
  return t == DType::f32 || t == DType::f64 || t == DType::f16 || t == DType::bf16 || t == DType::f8e4m3 ||
         t == DType::f8e5m2;
}
bool is_signed(DType t) { return t != DType::u8 && t != DType::u32 && t != DType::u64; }

/// All integers up to this limit are exact in the dtype; larger ones would not improve the test.
std::int64_t exact_limit(DType t) {
  switch (t) {
    case DType::f8e5m2:
      return 8;
    case DType::f8e4m3:
      return 16;
    case DType::i8:
    case DType::u8:
      return 127;
    case DType::bf16:
      return 256;
    case DType::f16:
      return 2048;
    default:
      return 1 << 20;
  }
}

/// splitmix64 (Steele, Lea, Flood 2014, doi:10.1145/2660193.2660195).
std::uint64_t hash(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
  x = (x ^ x >> 27) * 0x94d049bb133111ebu;
  return x ^ x >> 31;
}

/// If contributions of all ranks would make the total inexact, only one rank in `stride` contributes at an
/// element, and others contribute at the next element.
struct Share {
  int stride;
  std::int64_t largest;
};
Share share(std::int64_t total, int ranks) {
  const auto stride = static_cast<int>((ranks + total - 1) / total);
  return {stride, total / ((ranks + stride - 1) / stride)};
}

struct Source {
  DType dtype;
  ReduceOp op;
  int size;
  std::uint64_t seed;

  std::int64_t value(int rank, std::size_t i) const {
    const std::uint64_t h = hash(hash(seed * 1315423911u + static_cast<std::uint64_t>(rank)) + i);
    const bool negative = is_signed(dtype) && h >> 63;
    return negative ? -magnitude(h, rank, i) : magnitude(h, rank, i);
  }

 private:
  std::int64_t magnitude(std::uint64_t h, int rank, std::size_t i) const {
    const std::int64_t limit = exact_limit(dtype);
    const auto random = static_cast<std::int64_t>(h & 0x7fffffff);
    switch (op.kind) {
      case ReduceOp::min:
      case ReduceOp::max:
        return random % (limit + 1);
      case ReduceOp::prod: {  // ones and a few twos
        const auto turn = share(dtype == DType::f8e5m2 ? 3 : 6, size);
        return static_cast<int>((rank + i) % turn.stride) == 0 ? 1 + (random & 1) : 1;
      }
      default: {
        const auto turn = share(op.kind == ReduceOp::premul_sum ? limit / 2 : limit, size);
        return static_cast<int>((rank + i) % turn.stride) == 0 ? random % (turn.largest + 1) : 0;
      }
    }
  }
};

double combine(const Source& s, std::size_t i) {
  double total = static_cast<double>(s.value(0, i));
  if (s.op.kind == ReduceOp::premul_sum) total *= premul_factor(0);
  for (int rank = 1; rank < s.size; ++rank) {
    const auto v = static_cast<double>(s.value(rank, i));
    switch (s.op.kind) {
      case ReduceOp::prod:
        total *= v;
        break;
      case ReduceOp::min:
        total = std::min(total, v);
        break;
      case ReduceOp::max:
        total = std::max(total, v);
        break;
      case ReduceOp::premul_sum:
        total += v * premul_factor(rank);
        break;
      default:
        total += v;
    }
  }
  if (s.op.kind != ReduceOp::avg) return total;
  return is_float(s.dtype) ? total / s.size : std::trunc(total / s.size);
}

template <class T>
void store(std::byte* at, T value) {
  std::memcpy(at, &value, sizeof value);
}

/// The bits of a float as an integer that is monotone in its value.
std::int64_t ordered(const std::byte* at, std::size_t size) {
  std::uint64_t bits = 0;
  std::memcpy(&bits, at, size);
  const std::uint64_t sign = std::uint64_t{1} << (8 * size - 1);
  return bits & sign ? -static_cast<std::int64_t>(bits ^ sign) : static_cast<std::int64_t>(bits);
}

}  // namespace

double premul_factor(int rank) { return rank % 2 ? 2 : 1; }

void Pattern::set(std::size_t i, double v) {
  std::byte* at = bytes_.data() + i * size_of(dtype_);
  const auto f = static_cast<float>(v);
  const auto n = static_cast<std::int64_t>(v);
  switch (dtype_) {
    case DType::f64:
      return store(at, v);
    case DType::f32:
      return store(at, f);
    case DType::f16:
      return store(at, from_f32<f16>(f));
    case DType::bf16:
      return store(at, from_f32<bf16>(f));
    case DType::f8e4m3:
      return store(at, from_f32<f8e4m3>(f));
    case DType::f8e5m2:
      return store(at, from_f32<f8e5m2>(f));
    case DType::i8:
    case DType::u8:
      return store(at, static_cast<std::uint8_t>(n));
    case DType::i32:
    case DType::u32:
      return store(at, static_cast<std::uint32_t>(n));
    case DType::i64:
    case DType::u64:
      return store(at, static_cast<std::uint64_t>(n));
  }
}

Pattern Pattern::input(DType dtype, ReduceOp op, int rank, int size, std::uint64_t seed) {
  Pattern p(dtype, 0);
  const Source source{dtype, op, size, seed};
  for (std::size_t i = 0; i < period; ++i) p.set(i, static_cast<double>(source.value(rank, i)));
  return p;
}

Pattern Pattern::combined(DType dtype, ReduceOp op, int size, std::uint64_t seed) {
  Pattern p(dtype, op.kind == ReduceOp::avg && is_float(dtype) ? 2 : 0);
  const Source source{dtype, op, size, seed};
  for (std::size_t i = 0; i < period; ++i) p.set(i, combine(source, i));
  return p;
}

void Pattern::fill(void* to, std::size_t count, std::size_t from) const {
  const std::size_t element = size_of(dtype_);
  auto* out = static_cast<std::byte*>(to);
  for (std::size_t done = 0; done < count;) {
    const std::size_t at = (from + done) % period, n = std::min(count - done, period - at);
    std::memcpy(out + done * element, bytes_.data() + at * element, n * element);
    done += n;
  }
}

std::size_t Pattern::wrong(const void* data, std::size_t count, std::size_t from) const {
  std::size_t found = 0;
  for (std::size_t done = 0; done < count;) {
    const std::size_t at = (from + done) % period, n = std::min(count - done, period - at);
    found += wrong_in_run(static_cast<const std::byte*>(data) + done * size_of(dtype_), at, n);
    done += n;
  }
  return found;
}

std::size_t Pattern::wrong_in_run(const std::byte* data, std::size_t first, std::size_t count) const {
  const std::size_t element = size_of(dtype_);
  const std::byte* want = bytes_.data() + first * element;
  if (std::memcmp(data, want, count * element) == 0) return 0;
  std::size_t found = 0;
  for (std::size_t i = 0; i < count; ++i, data += element, want += element) {
    if (std::memcmp(data, want, element) == 0) continue;
    found += !tolerance_ || std::abs(ordered(data, element) - ordered(want, element)) > tolerance_;
  }
  return found;
}

}  // namespace rz::bench
