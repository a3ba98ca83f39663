#include "sharding/checkpoint/compare.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>

#include "comm/core/error.h"
#include "sharding/io/json.h"
#include "sharding/io/text.h"

namespace rz {
namespace {

constexpr std::uint64_t compared_elements = std::uint64_t{1} << 18;
constexpr double no_value = std::numeric_limits<double>::quiet_NaN();

template <class T>
double element_value(const std::byte* element) {
  T value;
  std::memcpy(&value, element, sizeof value);
  return static_cast<double>(value);
}

using ValueOf = double (*)(const std::byte*);

/// Null for a dtype without values here, and for floating point that f32 holds.
ValueOf integer_value(const std::string& dtype) {
  const std::pair<const char*, ValueOf> types[] = {
      {"BOOL", element_value<std::uint8_t>}, {"U8", element_value<std::uint8_t>},
      {"I8", element_value<std::int8_t>},    {"I16", element_value<std::int16_t>},
      {"U16", element_value<std::uint16_t>}, {"I32", element_value<std::int32_t>},
      {"U32", element_value<std::uint32_t>}, {"I64", element_value<std::int64_t>},
      {"U64", element_value<std::uint64_t>}, {"F64", element_value<double>}};
  for (const auto& [name, value] : types)
    if (dtype == name) return value;
  return nullptr;
}

/// A block of a tensor: its bytes, and its values, NaN for a dtype that has none here.
class ComparedBlock {
 public:
  explicit ComparedBlock(const TensorSource& source) : source_(source) {}

  void read(const TensorInfo& t, std::uint64_t begin, std::uint64_t count) {
    size_ = t.bytes / t.count;
    bytes_.resize(count * size_);
    source_.read_bytes(t, begin * size_, bytes_);
    values_.assign(count, no_value);
    if (const ValueOf value = integer_value(t.dtype)) {
      for (std::uint64_t i = 0; i < count; ++i) values_[i] = value(&bytes_[i * size_]);
    } else if (is_float_dtype(t.dtype)) {
      narrow_.resize(count);
      source_.read_f32(t, begin, narrow_);
      std::ranges::copy(narrow_, values_.begin());
    }
  }
  double value(std::uint64_t i) const { return values_[i]; }
  bool has_bits_of(const ComparedBlock& other, std::uint64_t i) const {
    return size_ == other.size_ && std::memcmp(&bytes_[i * size_], &other.bytes_[i * size_], size_) == 0;
  }

 private:
  const TensorSource& source_;
  std::size_t size_ = 0;
  std::vector<std::byte> bytes_;
  std::vector<float> narrow_;
  std::vector<double> values_;
};

std::string dtype_and_shape(const TensorInfo& t) { return concat(t.dtype, " ", name(t.shape)); }

class TensorComparer {
 public:
  TensorComparer(const TensorSource& a, const TensorSource& b, double tolerance)
      : a_(a), b_(b), tolerance_(tolerance) {}

  TensorDifference compare(const TensorInfo& a, const TensorInfo& b) {
    TensorDifference d{.name = a.name, .a = dtype_and_shape(a), .b = dtype_and_shape(b), .count = a.count};
    same_type_ = a.dtype == b.dtype;
    has_values_ = is_float_dtype(a.dtype) || integer_value(a.dtype) != nullptr;
    d.comparable = a.shape == b.shape && (same_type_ || (is_float_dtype(a.dtype) && is_float_dtype(b.dtype)));
    for (std::uint64_t at = 0, n; d.comparable && at < a.count; at += n) {
      n = std::min(compared_elements, a.count - at);
      a_.read(a, at, n), b_.read(b, at, n);
      for (std::uint64_t i = 0; i < n; ++i) add_element(d, i);
    }
    return d;
  }
  bool differ(const TensorDifference& d) const {
    return !d.comparable || d.differing > 0 || (tolerance_ == 0 && !same_type_);
  }

 private:
  void add_element(TensorDifference& d, std::uint64_t i) {
    if (same_type_ && a_.has_bits_of(b_, i)) return;
    const double x = a_.value(i), y = b_.value(i);
    const bool equal = x == y || (std::isnan(x) && std::isnan(y) && has_values_);
    const double difference = equal ? 0 : std::abs(x - y);
    if (std::isnan(difference) || difference > d.max_difference) d.max_difference = difference;
    const bool by_bits = same_type_ && tolerance_ == 0;
    d.differing += by_bits || !(difference <= tolerance_);
  }

  ComparedBlock a_, b_;
  double tolerance_;
  bool same_type_ = true, has_values_ = true;
};

std::string key_path(const std::string& path, const std::string& key) {
  return path.empty() ? key : path + "." + key;
}

/// Lines for the leaves of two documents that differ.
void compare_json(const nlohmann::json& a, const nlohmann::json& b, const std::string& path,
                  std::vector<std::string>& lines) {
  if (a == b) return;
  if (!a.is_object() || !b.is_object())
    return lines.push_back(escaped(concat(path, ": ", to_display(a), " and ", to_display(b))));
  for (const auto& [key, value] : a.items()) {
    if (b.contains(key)) {
      compare_json(value, b[key], key_path(path, key), lines);
    } else {
      lines.push_back(escaped(concat(key_path(path, key), ": only in A")));
    }
  }
  for (const auto& [key, value] : b.items())
    if (!a.contains(key)) lines.push_back(escaped(concat(key_path(path, key), ": only in B")));
}

std::map<std::string, const TensorInfo*> tensors_by_name(const TensorSource& source) {
  std::map<std::string, const TensorInfo*> all;
  for (const TensorInfo& t : source.tensors()) all[t.name] = &t;
  return all;
}

}  // namespace

SourceDifferences compare(const TensorSource& a, const TensorSource& b, double tolerance,
                          const std::function<void(std::uint64_t, std::uint64_t)>& progress) {
  require_whole_bytes(a), require_whole_bytes(b);
  SourceDifferences all;
  const auto in_a = tensors_by_name(a), in_b = tensors_by_name(b);
  TensorComparer comparer(a, b, tolerance);
  std::uint64_t done = 0;
  for (const auto& [name, tensor] : in_a) {
    const auto other = in_b.find(name);
    if (other == in_b.end()) {
      all.only_in_a.push_back(name);
    } else if (const TensorDifference d = comparer.compare(*tensor, *other->second); comparer.differ(d)) {
      all.tensors.push_back(d);
    } else {
      ++all.equal;
    }
    progress(++done, in_a.size());
  }
  for (const auto& [name, tensor] : in_b)
    if (!in_a.contains(name)) all.only_in_b.push_back(name);
  if (a.state() && b.state())
    compare_json(parse_json(*a.state(), a.path(), JsonDialect::strict),
                 parse_json(*b.state(), b.path(), JsonDialect::strict), "", all.state);
  return all;
}

}  // namespace rz
