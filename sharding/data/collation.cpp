#include "sharding/data/collation.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#include "comm/core/error.h"
#include "comm/core/integer_math.h"
#include "comm/core/math.h"

namespace rz {

std::string lengths_name(std::string_view field) { return concat(field, ".lengths"); }

std::vector<Field> fields_of_batches(std::vector<Field> fields) {
  std::vector<Field> lengths;
  for (const Field& f : fields)
    if (f.ragged) lengths.push_back({lengths_name(f.name), DType::i32, {}});
  fields.insert(fields.end(), lengths.begin(), lengths.end());
  return fields;
}

Shape padded_shape(const Field& f, const Collation& c) {
  return f.ragged ? f.shape.with(0, round_up(f.shape[0], c.pad_to_multiple_of)) : f.shape;
}

namespace {

/// The bytes of an element, and whether it has the value exactly.
struct Element {
  std::array<std::byte, 8> bytes{};
  bool exact = false;
};

template <class T>
Element integer_element(double value) {
  Element e;
  // The limits themselves may not be doubles; powers of two are.
  const double end = 2.0 * static_cast<double>(std::numeric_limits<T>::max() / 2 + 1);
  if (!(value >= static_cast<double>(std::numeric_limits<T>::min()) && value < end)) return e;
  const T element = static_cast<T>(value);
  std::memcpy(e.bytes.data(), &element, sizeof element);
  e.exact = static_cast<double>(element) == value;
  return e;
}

template <class T>
Element small_float_element(double value) {
  Element e;
  const T element = from_f32<T>(static_cast<float>(value));
  std::memcpy(e.bytes.data(), &element, sizeof element);
  if constexpr (std::is_same_v<T, float>)
    e.exact = static_cast<double>(element) == value;
  else
    e.exact = static_cast<double>(to_f32(element)) == value;
  return e;
}

Element element_of(DType dtype, double value) {
  switch (dtype) {
    case DType::f32:
      return small_float_element<float>(value);
    case DType::f16:
      return small_float_element<f16>(value);
    case DType::bf16:
      return small_float_element<bf16>(value);
    case DType::f8e4m3:
      return small_float_element<f8e4m3>(value);
    case DType::f8e5m2:
      return small_float_element<f8e5m2>(value);
    case DType::i8:
      return integer_element<std::int8_t>(value);
    case DType::u8:
      return integer_element<std::uint8_t>(value);
    case DType::i32:
      return integer_element<std::int32_t>(value);
    case DType::u32:
      return integer_element<std::uint32_t>(value);
    case DType::i64:
      return integer_element<std::int64_t>(value);
    case DType::u64:
      return integer_element<std::uint64_t>(value);
    case DType::f64:
      break;
  }
  Element e{.exact = true};
  std::memcpy(e.bytes.data(), &value, sizeof value);
  return e;
}

void fill_with(std::byte* from, std::byte* to, const Element& element, std::size_t size) {
  for (; from < to; from += size) std::memcpy(from, element.bytes.data(), size);
}

}  // namespace

void check_padding_value(const Field& f) {
  require(!f.ragged || element_of(f.dtype, f.padding_value).exact, Errc::invalid_argument, "field ", f.name,
          ": padding_value ", f.padding_value, " is no value of ", name(f.dtype));
}

std::size_t BatchRows::set_length(std::size_t field, std::size_t row, std::size_t length) {
  const Field& f = fields_[field];
  require(length <= f.shape[0], Errc::invalid_argument, "field ", f.name, ": a sample of length ", length,
          "; the field has ", rz::name(f.shape), ": cut the sample, or give the field a larger shape");
  const std::size_t lengths = find(lengths_name(f.name), DType::i32, false);
  memory_[lengths].data<std::int32_t>()[row] = static_cast<std::int32_t>(length);
  return f.shape.with(0, length).count();
}

void clear_lengths(std::span<const Field> fields, std::span<const Tensor> memory, std::size_t row) {
  std::size_t lengths = fields.size();
  for (const Field& f : fields) lengths -= f.ragged;
  for (; lengths < fields.size(); ++lengths) memory[lengths].data<std::int32_t>()[row] = 0;
}

std::vector<Shape> collate(std::span<const Field> fields, std::span<const Tensor> memory, std::size_t rows,
                           const Collation& c) {
  std::vector<Shape> shapes;
  std::size_t next = fields.size();
  for (const Field& f : fields) next -= f.ragged;
  for (std::size_t f = 0; f < fields.size(); ++f) {
    shapes.push_back(padded_shape(fields[f], c));
    if (!fields[f].ragged) continue;
    const auto* lengths = memory[next++].data<std::int32_t>();
    if (c.padding == Collation::Padding::longest && rows > 0) {
      const auto longest = static_cast<std::size_t>(*std::max_element(lengths, lengths + rows));
      shapes[f] = shapes[f].with(0, round_up(std::max<std::size_t>(1, longest), c.pad_to_multiple_of));
    }
    const std::size_t size = size_of(fields[f].dtype);
    const std::size_t width = shapes[f].with(0, 1).count() * size, to_stride = shapes[f].count() * size,
                      from_stride = padded_shape(fields[f], c).count() * size;
    const Element padding = element_of(fields[f].dtype, fields[f].padding_value);
    // Rows move to lower addresses, so the next ones stay whole.
    for (std::size_t row = 0; row < rows; ++row) {
      std::byte* const begin = memory[f].raw() + row * to_stride;
      std::byte* const end = begin + to_stride;
      const std::size_t bytes = static_cast<std::size_t>(lengths[row]) * width;
      std::byte* const place = c.padding_side == Collation::Side::right ? begin : end - bytes;
      std::memmove(place, memory[f].raw() + row * from_stride, bytes);
      fill_with(begin, place, padding, size);
      fill_with(place + bytes, end, padding, size);
    }
  }
  return shapes;
}

}  // namespace rz
