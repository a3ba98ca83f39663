#include "sharding/checkpoint/float_values.h"

#include <algorithm>
#include <array>
#include <bit>

#include "comm/core/error.h"

namespace rz {
namespace {

struct Half {
  std::uint16_t bits;
};
struct Brain {
  std::uint16_t bits;
};

float widened(float x) { return x; }
float widened(double x) { return static_cast<float>(x); }
float widened(Half half) {
  // IEEE 754 binary16: a normal number is rebiased to f32; a subnormal one is an exact product.
  const std::uint32_t sign = std::uint32_t(half.bits & 0x8000u) << 16, rest = half.bits & 0x7fffu;
  if (rest >= 0x7c00u) return std::bit_cast<float>(sign | 0x7f800000u | (rest & 0x3ffu) << 13);
  if (rest >= 0x400u) return std::bit_cast<float>(sign | ((rest << 13) + (112u << 23)));
  const float small = static_cast<float>(rest) * 0x1p-24f;
  return sign ? -small : small;
}
float widened(Brain x) { return std::bit_cast<float>(std::uint32_t(x.bits) << 16); }

template <class T, class Read>
void read_blocks(std::uint64_t begin, std::span<float> out, const Read& read) {
  std::array<T, 8192> block;
  for (std::size_t done = 0; done < out.size();) {
    const std::size_t n = std::min(block.size(), out.size() - done);
    read(begin + done, std::as_writable_bytes(std::span(block).first(n)));
    for (std::size_t i = 0; i < n; ++i) out[done + i] = widened(block[i]);
    done += n;
  }
}

}  // namespace

bool is_float_dtype(std::string_view dtype) {
  constexpr std::array<std::string_view, 4> floats{"F32", "F16", "BF16", "F64"};
  return std::ranges::find(floats, dtype) != floats.end();
}

void read_as_f32(std::string_view dtype, std::uint64_t begin, std::span<float> out,
                 const std::function<void(std::uint64_t, std::span<std::byte>)>& read) {
  require(is_float_dtype(dtype), Errc::unsupported, "dtype ", dtype,
          " cannot be read as f32; F32, F16, BF16 and F64 can");
  if (dtype == "F32") return read_blocks<float>(begin, out, read);
  if (dtype == "F64") return read_blocks<double>(begin, out, read);
  if (dtype == "F16") return read_blocks<Half>(begin, out, read);
  read_blocks<Brain>(begin, out, read);
}

}  // namespace rz
