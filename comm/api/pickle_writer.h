#pragma once
/// Writes a pickle of Python, protocol 2, of dicts, lists, texts, integers, booleans and None.

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

#include "comm/core/text.h"

namespace rz {

/// Each function appends one value. A dict is begin_dict(), then a key and a value in turn, then end_dict().
class PickleWriter {
 public:
  PickleWriter& none() { return add("N"); }
  PickleWriter& boolean(bool b) { return add(b ? "\x88" : "\x89"); }
  PickleWriter& integer(std::int64_t n) {
    if (n >= INT32_MIN && n <= INT32_MAX) return add("J").raw(static_cast<std::int32_t>(n));
    return add("\x8a\x08").raw(n);
  }
  /// Bytes that are no UTF-8 become question marks.
  PickleWriter& text(std::string_view s) {
    std::string valid;
    for (std::size_t n = 0; !s.empty(); s.remove_prefix(n)) {
      n = utf8_length(s);
      valid += n ? s.substr(0, n) : "?";
      if (n == 0) n = 1;
    }
    return add("X").raw(static_cast<std::uint32_t>(valid.size())).add(valid);
  }
  PickleWriter& begin_dict() { return add("}("); }
  PickleWriter& end_dict() { return add("u"); }
  PickleWriter& begin_list() { return add("]("); }
  PickleWriter& end_list() { return add("e"); }

  /// The whole pickle, of the one value that was written.
  std::string finish() && { return std::move(add(".").bytes_); }

 private:
  PickleWriter& add(std::string_view bytes) {
    bytes_ += bytes;
    return *this;
  }
  template <class T>
  PickleWriter& raw(T value) {  // little-endian, as the hosts are
    char bytes[sizeof value];
    std::memcpy(bytes, &value, sizeof value);
    return add({bytes, sizeof bytes});
  }

  std::string bytes_ = "\x80\x02";
};

}  // namespace rz
