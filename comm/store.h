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

struct TcpStoreOptions {
  bool serve = false;  ///< run the server too (rank 0 does), on a thread that ends with the store
  std::chrono::milliseconds timeout = std::chrono::seconds(30);  ///< of the rendezvous: to listen or connect
  /// What tells the launch from every other; at most 1,024 bytes. It goes into every request, and the server
  /// refuses those of another launch.
  std::string launch;
  int size = 0;  ///< ranks that will come: the server's limit of clients follows from it; 0: not known
  /// The server listens on the first free one of so many ports from the address's on, and clients search them
  /// for the server of their launch, passing over all else that listens there. More than one needs a
  /// `launch`.
  int ports = 1;
  /// The server drops connections that have sent no request by then.
  std::chrono::milliseconds max_unauthenticated = std::chrono::seconds(10);
};

/// "host:port", IPv4, IPv6 ("[::1]:29500") or a name; port 0 takes a free one. A port that is taken, and a
/// server that is not up yet, are tried again until the timeout. It may be opened long before its use: a
/// connection that has ended is made again. Errc::rendezvous names address and reason, and both launches
/// where the server is another launch's; Errc::system the limit of open files where a group of `size` ranks
/// does not fit into it (the soft limit is raised as far as needed).
std::shared_ptr<Store> tcp_store(const std::string& address, const TcpStoreOptions&);
std::shared_ptr<Store> tcp_store(const std::string& address, bool serve = false,
                                 std::chrono::milliseconds timeout = std::chrono::seconds(30));
/// The port that a serving tcp_store listens on; 0 for any other store.
int tcp_store_port(const Store&);

/// A view of `store` in which every key stands behind `prefix`: for sub-groups and successive groups.
std::shared_ptr<Store> prefix_store(std::shared_ptr<Store> store, std::string prefix);

}  // namespace rz
