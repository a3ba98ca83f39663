#pragma once
/// Protocol of the TCP store: requests and replies alternate on a persistent connection. Headers have a fixed
/// size; lengths are checked before anything else is read. Internal.

#include <cstdint>
#include <string>
#include <string_view>

namespace rz::store_wire {

constexpr std::uint32_t request_magic = 0x33515a52;  // "RZQ3": the version is part of it
constexpr std::uint32_t reply_magic = 0x33415a52;    // "RZA3"
constexpr std::uint32_t max_launch = 1024, max_key = 1024, max_value = 1 << 20;

/// The longest reply: a value and its length.
constexpr std::uint32_t max_reply = max_value + sizeof(std::uint32_t);

/// Header of a request. The launch's identity, the key and the value follow.
struct StoreRequest {
  /// The first request of a connection is a hello, which has neither key nor value.
  enum Kind : std::uint32_t { set = 1, get = 2, add = 3, hello = 4, get_numbered = 5 };
  std::uint32_t magic = request_magic;
  std::uint32_t kind = 0;
  std::uint32_t launch_bytes = 0, key_bytes = 0, value_bytes = 0;
  std::uint32_t first = 0;  ///< get_numbered: the first number after the key
  std::int64_t number = 0;  ///< add: amount; get and get_numbered: milliseconds to wait
};
static_assert(sizeof(StoreRequest) == 32);
constexpr std::size_t max_request = sizeof(StoreRequest) + max_launch + max_key + max_value;

/// Header of a reply. The value follows: that of a get; of a get_numbered those of consecutive numbers, each
/// after its length in 4 bytes; the server's launch with `wrong_launch`, or the reason with `refused`.
struct Reply {
  enum Status : std::uint32_t { ok = 0, timeout = 1, refused = 2, wrong_launch = 3 };
  std::uint32_t magic = reply_magic;
  std::uint32_t status = ok;
  std::uint32_t value_bytes = 0, unused = 0;
  std::int64_t number = 0;
};
static_assert(sizeof(Reply) == 24);

inline bool valid(const StoreRequest& r) {
  return r.magic == request_magic && r.kind >= StoreRequest::set && r.kind <= StoreRequest::get_numbered &&
         r.launch_bytes <= max_launch && r.key_bytes <= max_key && r.value_bytes <= max_value &&
         (r.kind == StoreRequest::set || !r.value_bytes) && (r.kind != StoreRequest::hello || !r.key_bytes);
}

/// Serializes a request; sets the lengths in its header.
inline std::string to_bytes(StoreRequest r, std::string_view launch, std::string_view key = {},
                            std::string_view value = {}) {
  r.launch_bytes = static_cast<std::uint32_t>(launch.size());
  r.key_bytes = static_cast<std::uint32_t>(key.size());
  r.value_bytes = static_cast<std::uint32_t>(value.size());
  std::string bytes(reinterpret_cast<const char*>(&r), sizeof r);
  return bytes.append(launch).append(key).append(value);
}

}  // namespace rz::store_wire
