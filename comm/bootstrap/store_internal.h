#pragma once
/// What the stores have in common. Not for users.

#include <condition_variable>
#include <cstddef>
#include <limits>
#include <map>
#include <mutex>
#include <optional>
#include <string>

#include "comm/store.h"

namespace rz {

/// Keys and values of one process, thread-safe: the memory store, and the server side of the TCP store.
class KeyValueTable {
 public:
  /// Errc::rendezvous from set() and add() once keys and values would take more than so many bytes.
  explicit KeyValueTable(std::size_t max_bytes = std::numeric_limits<std::size_t>::max())
      : max_bytes_(max_bytes) {}
  void set(std::string_view key, std::string_view value);
  std::int64_t add(std::string_view key, std::int64_t amount);
  /// Empty once the deadline has passed.
  std::optional<std::string> wait(std::string_view key, Deadline);
  std::optional<std::string> find(std::string_view key);

 private:
  void put(const std::string& key, std::string value);

  const std::size_t max_bytes_;
  std::size_t bytes_ = 0;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, std::string> values_;
};

/// Errc::rendezvous names the key if the text is not an integer.
std::int64_t parse_counter(std::string_view key, std::string_view text);
/// The message of Errc::timeout.
std::string missing_key(std::string_view key, std::string_view where);
/// The store behind any prefixes.
const Store& innermost(const Store&);
/// The numeric local address, without port, of a tcp_store's connection: the interface by which this process
/// reaches rank 0. Empty for any other store.
std::string tcp_store_local_address(const Store&);

}  // namespace rz
