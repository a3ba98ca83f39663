#pragma once
/// Values as bytes, for the payloads of frames: the same function lists the fields for both directions.

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "comm/core/error.h"

namespace rz::rzrun {

class WireWriter {
 public:
  std::string bytes;

  template <class... T>
  void operator()(const T&... values) {
    (put(values), ...);
  }

 private:
  template <class T>
  void put(const T& value) {
    if constexpr (std::is_arithmetic_v<T>) {
      const auto wide = static_cast<std::int64_t>(value);
      bytes.append(reinterpret_cast<const char*>(&wide), sizeof wide);
    } else {
      put(static_cast<std::int64_t>(value.size()));
      for (const auto& part : value) put(part);
    }
  }
  void put(const std::string& text) {
    put(static_cast<std::int64_t>(text.size()));
    bytes += text;
  }
  template <class A, class B>
  void put(const std::pair<A, B>& both) {
    put(both.first);
    put(both.second);
  }
};

/// Errc::io if the bytes are not those of the values.
class WireReader {
 public:
  explicit WireReader(std::string_view bytes) : rest_(bytes) {}

  template <class... T>
  void operator()(T&... values) {
    (get(values), ...);
  }
  void end() const { require(rest_.empty(), Errc::io, "a frame is too long"); }

 private:
  template <class T>
  void get(T& value) {
    if constexpr (std::is_arithmetic_v<T>) {
      std::int64_t wide = 0;
      std::memcpy(&wide, take(sizeof wide).data(), sizeof wide);
      value = static_cast<T>(wide);
    } else {
      value.clear();
      // Each part has 8 bytes or more, so a false count costs no memory.
      for (auto n = count(); n > 0; --n) get(value.emplace_back());
    }
  }
  void get(std::string& text) { text = take(static_cast<std::size_t>(count())); }
  template <class A, class B>
  void get(std::pair<A, B>& both) {
    get(both.first);
    get(both.second);
  }

  std::int64_t count() {
    std::int64_t n = 0;
    get(n);
    require(n >= 0 && static_cast<std::uint64_t>(n) <= rest_.size(), Errc::io, "a frame is cut off");
    return n;
  }
  std::string_view take(std::size_t n) {
    require(n <= rest_.size(), Errc::io, "a frame is cut off");
    const auto taken = rest_.substr(0, n);
    rest_.remove_prefix(n);
    return taken;
  }

  std::string_view rest_;
};

}  // namespace rz::rzrun
