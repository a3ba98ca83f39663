#pragma once
/// Shared parts of the stores. Internal.

#include <condition_variable>
#include <cstddef>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "comm/net/authentication.h"
#include "comm/store.h"

namespace rz {

/// Keys and values in the memory of one process: for the memory store and the server of the TCP store.
/// Thread-safe.
class KeyValueTable {
 public:
  /// set() and add() throw Errc::rendezvous if keys and values would take more than `max_bytes`.
  explicit KeyValueTable(std::size_t max_bytes = std::numeric_limits<std::size_t>::max())
      : max_bytes_(max_bytes) {}
  void set(std::string_view key, std::string_view value);
  std::int64_t add(std::string_view key, std::int64_t amount);
  /// Waits until the key exists; empty if the deadline passes first.
  std::optional<std::string> wait(std::string_view key, Deadline);
  /// Empty if the key does not exist.
  std::optional<std::string> find(std::string_view key);

 private:
  void put(const std::string& key, std::string value);

  const std::size_t max_bytes_;
  std::size_t bytes_ = 0;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, std::string> values_;
};

/// The sum of a key's value, empty for none, and `amount`. Errc::rendezvous names the key if there is none.
std::int64_t add_to_counter(std::string_view key, std::string_view text, std::int64_t amount);
/// Message of an Errc::timeout from get().
std::string missing_key(std::string_view key, std::string_view where);
/// A view of the store whose waits call `check` several times a second, which may throw.
std::shared_ptr<Store> watching_store(std::shared_ptr<Store>, std::function<void()> check);
/// The store behind all prefix_stores.
const Store& innermost(const Store&);
/// Numeric local address, without port, of a tcp_store's connection: the interface through which this process
/// reaches rank 0. Empty for any other store.
std::string tcp_store_local_address(const Store&);
/// The secret by which a tcp_store's ends authenticate each other; null if they have none, and of any other
/// store.
std::shared_ptr<const net::Secret> tcp_store_secret(const Store&);
/// Whether it is a tcp_store whose ends have no secret, so that others may read what it holds.
bool is_insecure(const Store&);

}  // namespace rz
