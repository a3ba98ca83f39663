#pragma once
/// Types of all layers: Device, DType, ReduceOp, and buffers, which borrow memory.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#if defined(_GLIBCXX_USE_CXX11_ABI) && !_GLIBCXX_USE_CXX11_ABI
#error \
    "ringzero uses the C++11 ABI of libstdc++, whose strings have another layout: remove -D_GLIBCXX_USE_CXX11_ABI=0"
#endif

namespace rz {

struct Device {
  enum Kind : std::uint8_t { host, cuda };
  Kind kind = host;
  int index = 0;
  bool operator==(const Device&) const = default;
};
std::string name(Device);  ///< "host", "cuda:1"

enum class DType : std::uint8_t { f32, f64, f16, bf16, f8e4m3, f8e5m2, i8, u8, i32, u32, i64, u64 };
inline constexpr int dtype_count = 12;

constexpr std::size_t size_of(DType t) {
  switch (t) {
    case DType::f64:
    case DType::i64:
    case DType::u64:
      return 8;
    case DType::f32:
    case DType::i32:
    case DType::u32:
      return 4;
    case DType::f16:
    case DType::bf16:
      return 2;
    default:
      return 1;
  }
}
const char* name(DType);  ///< "f32", "bf16", …
/// Also accepts "float", "half", "bfloat16", "int8", …. Errc::config lists the valid names.
DType dtype_from_name(std::string_view);

// Storage types of the small floats, without arithmetic. comm/core/math.h converts them.
struct f16 {
  std::uint16_t bits;
  bool operator==(const f16&) const = default;
};
struct bf16 {
  std::uint16_t bits;
  bool operator==(const bf16&) const = default;
};
struct f8e4m3 {
  std::uint8_t bits;
  bool operator==(const f8e4m3&) const = default;
};
struct f8e5m2 {
  std::uint8_t bits;
  bool operator==(const f8e5m2&) const = default;
};

template <class T>
inline constexpr DType dtype_of = [] {
  // As large as std::int64_t, but other types.
  constexpr bool is_i64 = std::is_same_v<T, long long>, is_u64 = std::is_same_v<T, unsigned long long>;
  static_assert(is_i64 || is_u64,
                "not an element type of ringzero, which are float, double, rz::f16, rz::bf16, rz::f8e4m3, "
                "rz::f8e5m2 and integers of 8, 32 and 64 bits (std::int8_t, not char); memory of other "
                "types moves as bytes: {pointer, bytes, rz::DType::u8}");
  return is_u64 ? DType::u64 : DType::i64;
}();
template <>
inline constexpr DType dtype_of<float> = DType::f32;
template <>
inline constexpr DType dtype_of<double> = DType::f64;
template <>
inline constexpr DType dtype_of<f16> = DType::f16;
template <>
inline constexpr DType dtype_of<bf16> = DType::bf16;
template <>
inline constexpr DType dtype_of<f8e4m3> = DType::f8e4m3;
template <>
inline constexpr DType dtype_of<f8e5m2> = DType::f8e5m2;
template <>
inline constexpr DType dtype_of<std::int8_t> = DType::i8;
template <>
inline constexpr DType dtype_of<std::uint8_t> = DType::u8;
template <>
inline constexpr DType dtype_of<std::int32_t> = DType::i32;
template <>
inline constexpr DType dtype_of<std::uint32_t> = DType::u32;
template <>
inline constexpr DType dtype_of<std::int64_t> = DType::i64;
template <>
inline constexpr DType dtype_of<std::uint64_t> = DType::u64;

/// Reduction operator. `avg` divides the sum by the group size (integers: towards zero). `premul_sum`
/// multiplies each rank's input by that rank's factor before the sum. Sums and products of 16- and 8-bit
/// floats are computed in f32 and rounded once per reduction step.
///
/// An average of finite floats is finite: contributions are divided by the first power of two that is not
/// less than the group size, the sum by the rest. The bits are those of the sum divided at the end, where
/// that is finite, but for contributions below the smallest normal number times that power of two: in f32 and
/// f64, and in 16- and 8-bit floats where partial sums are stored (`deterministic` off), these may lose their
/// last bits.
struct ReduceOp {
  enum Kind : std::uint8_t { sum, avg, prod, min, max, premul_sum };
  Kind kind = sum;
  double factor = 1;
  constexpr ReduceOp(Kind k = sum, double f = 1) : kind(k), factor(f) {}
  static constexpr ReduceOp premul(double factor) { return {premul_sum, factor}; }
};
const char* name(ReduceOp);
/// sum, prod, max, min, avg or mulsum. Errc::config lists the valid names.
ReduceOp op_from_name(std::string_view);

/// The order in which a reduction combines the contributions of the ranks.
///
/// `rank`: ((x0 + x1) + x2) + …, from the left.
///
/// `pairwise`: a balanced binary tree over the ranks. Neighbours first, then pairs of those, and so on:
/// ((x0 + x1) + (x2 + x3)) + ((x4 + x5) + (x6 + x7)). A last value without a partner passes to the next level
/// unchanged: (x0 + x1) + x2 for 3 ranks, ((x0 + x1) + (x2 + x3)) + x4 for 5. So if W is a power of two and
/// each rank contributes the pairwise sum of G / W consecutive values of G, the result has the same bits for
/// every W.
///
/// `avg` divides in both (ReduceOp). 16- and 8-bit floats are combined in f32 and rounded once. For up to
/// three ranks both orders are the same.
enum class ReductionOrder : std::uint8_t { rank, pairwise };

constexpr const char* name(ReductionOrder order) {
  return order == ReductionOrder::rank ? "rank" : "pairwise";
}

/// Element type of contiguous memory that converts to a std::span, e.g. a std::vector that is not a
/// temporary.
template <class R>
using SpanElement = typename decltype(std::span(std::declval<R>()))::element_type;

/// Counts or offsets of any integer type, copied: a range of them, e.g. a std::vector<int>, or {pointer, n}.
struct Counts {
  std::vector<std::size_t> values;

  template <class R>
  requires std::is_integral_v<std::remove_const_t<SpanElement<const R&>>> Counts(const R& range)
      : Counts(std::span(range).data(), std::span(range).size()) {}  // NOLINT: implicit by design
  template <class T>
  requires std::is_integral_v<T> Counts(const T* data, std::size_t n) : values(data, data + n) {}
};

/// Borrowed memory of `count` elements, e.g. {pointer, count}, a std::span, std::vector or array of one of
/// the types of DType. The caller keeps it alive until the operations on it have ended.
struct Buffer {
  void* data = nullptr;
  std::size_t count = 0;
  DType dtype = DType::f32;
  Device device{};

  Buffer() = default;
  Buffer(void* d, std::size_t n, DType t, Device dev = {}) : data(d), count(n), dtype(t), device(dev) {}
  template <class T>
  Buffer(T* d, std::size_t n, Device dev = {}) : Buffer(static_cast<void*>(d), n, dtype_of<T>, dev) {}
  template <class R>
  requires(!std::is_const_v<SpanElement<R>>)
      Buffer(R&& memory, Device dev = {})  // NOLINT: implicit by design
      : Buffer(std::span(std::forward<R>(memory)).data(), std::span(std::forward<R>(memory)).size(), dev) {}
  std::size_t bytes() const { return count * size_of(dtype); }
};

/// Borrowed memory that is only read.
struct ConstBuffer {
  const void* data = nullptr;
  std::size_t count = 0;
  DType dtype = DType::f32;
  Device device{};

  ConstBuffer() = default;
  ConstBuffer(const void* d, std::size_t n, DType t, Device dev = {})
      : data(d), count(n), dtype(t), device(dev) {}
  ConstBuffer(const Buffer& b) : ConstBuffer(b.data, b.count, b.dtype, b.device) {}
  template <class T>
  ConstBuffer(const T* d, std::size_t n, Device dev = {})
      : ConstBuffer(static_cast<const void*>(d), n, dtype_of<T>, dev) {}
  template <class R, class T = SpanElement<R>>
  ConstBuffer(R&& memory, Device dev = {})  // NOLINT: implicit by design
      : ConstBuffer(static_cast<const T*>(std::span(std::forward<R>(memory)).data()),
                    std::span(std::forward<R>(memory)).size(), dev) {}
  std::size_t bytes() const { return count * size_of(dtype); }
};

/// Allocates uninitialized memory, aligned to 256 bytes, which is freed with the last copy of the pointer.
/// Errc::system reports the bytes required and available. Lets a layer use memory of a sibling without
/// including it, e.g. tensors in communicator memory.
struct Allocator {
  using Function = std::function<std::shared_ptr<std::byte>(std::size_t bytes)>;

  template <class F>
  requires std::is_invocable_r_v<std::shared_ptr<std::byte>, F&, std::size_t> Allocator(F f, Device d = {})
      : allocate(std::move(f)), device(d) {}  // NOLINT: implicit by design
  std::shared_ptr<std::byte> operator()(std::size_t bytes) const { return allocate(bytes); }

  Function allocate;
  Device device;  ///< device of the memory
};

/// Private host memory, uninitialized, aligned to 256 bytes. Errc::system if there is none.
std::shared_ptr<std::byte> allocate_host(std::size_t bytes);

}  // namespace rz
