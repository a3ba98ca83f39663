#pragma once
/// Rendezvous: a small key-value store in which the ranks of a group find each other.

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "comm/core/deadline.h"

namespace rz {

/// Thread-safe. A key is set once; setting it again to another value replaces it.
class Store {
 public:
  virtual ~Store() = default;
  virtual void set(std::string_view key, std::string_view value) = 0;
  /// Waits until the key is there. Errc::timeout names the key and the deadline.
  virtual std::string get(std::string_view key, Deadline) = 0;
  /// Adds to an integer key (absent: 0) and returns the sum.
  virtual std::int64_t add(std::string_view key, std::int64_t amount) = 0;
};

/// For ranks that are threads of one process.
std::shared_ptr<Store> memory_store();

/// A directory that every rank sees. Values are written to a temporary name and renamed, so that a reader
/// never sees half of one. The directory must be empty at the start of a job.
std::shared_ptr<Store> file_store(const std::string& directory);

/// "host:port", IPv4, IPv6 ("[::1]:29500") or a name. With `serve`, this process also runs the server (rank 0
/// does), on a thread that ends with the store; port 0 takes a free one. Errc::rendezvous names address and
/// reason.
std::shared_ptr<Store> tcp_store(const std::string& address, bool serve = false,
                                 std::chrono::milliseconds timeout = std::chrono::seconds(30));
/// The port that a serving tcp_store listens on; 0 for any other store.
int tcp_store_port(const Store&);

/// A view of `store` in which every key stands behind `prefix`: for sub-groups and successive groups.
std::shared_ptr<Store> prefix_store(std::shared_ptr<Store> store, std::string prefix);

}  // namespace rz
