#pragma once
/// Key-value stores for the rendezvous of a group's ranks.

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/deadline.h"

namespace rz {

/// A key-value store; thread-safe. Setting a key again replaces its value.
class Store {
 public:
  virtual ~Store() = default;
  virtual void set(std::string_view key, std::string_view value) = 0;
  /// Waits until the key exists. Errc::timeout names the key and the deadline.
  virtual std::string get(std::string_view key, Deadline) = 0;
  /// Waits until the key prefix + first exists, a decimal number at its end. Returns its value and those of
  /// the numbers after it, up to one that does not exist; maybe fewer, but at least one. Errc::timeout as
  /// get().
  virtual std::vector<std::string> get_numbered(std::string_view prefix, std::uint32_t first, Deadline);
  /// Adds to an integer key (0 if absent) and returns the sum.
  virtual std::int64_t add(std::string_view key, std::int64_t amount) = 0;

 private:
  friend class Communicator;
  /// The store of a rank's next group: of a group after the first on the same store, a view in which no key
  /// of the earlier ones is seen. Each rank counts the groups that it has tried to connect through this
  /// object and prefix.
  static std::shared_ptr<Store> of_next_group(std::shared_ptr<Store>, int rank);
  /// The groups that this process has connected, by the prefix of their keys and its rank in them.
  std::map<std::pair<std::string, int>, int> groups_;
  std::uint64_t fork_generation_ = 0;  // of the process that counts; its children begin anew
  std::mutex groups_mutex_;
};

/// A store for ranks that are threads of one process.
std::shared_ptr<Store> memory_store();

/// A store in a directory that all ranks share. Values are written to a temporary file and renamed, so a
/// reader never sees a partial value. The directory must be empty at the start of a job.
std::shared_ptr<Store> file_store(const std::string& directory);

struct TcpStoreOptions {
  bool serve = false;  ///< also run the server (rank 0); its thread ends with the store
  std::chrono::milliseconds timeout = std::chrono::seconds(30);  ///< to listen or connect
  /// Identifier of the launch, at most 1,024 bytes. Every request carries it; the server rejects requests of
  /// other launches.
  std::string launch;
  /// Some ranks are on other hosts. If the name means loopback on the server's host, as Debian's installer
  /// writes it in /etc/hosts, the server listens at each address of the host, or of the interface that
  /// RZ_INTERFACE names.
  bool remote = false;
  int size = 0;  ///< number of ranks, from which the server derives its limit of clients; 0: unknown
  /// Number of consecutive ports, starting at the address's. The server listens on the first free one;
  /// clients search them for the server of their launch. More than one requires a `launch`.
  int ports = 1;
  int rank = 0;  ///< of this process, for messages
  /// Numeric "host:port" addresses. If there are any, the server listens at each of their hosts, at one port,
  /// that of the first; clients search them all.
  std::vector<std::string> addresses;
  /// Text of at least 32 characters that both ends must have. Empty: the job's secret (RZ_SECRET, or one of
  /// the other sources that comm/core/environment.h lists) if `remote` or RZ_SECRET is set or the address is
  /// not loopback; else none, and both ends must be processes of one user.
  std::string secret;
  /// "on", "off" or "always", the same at both ends; empty: RZ_ENCRYPTION (comm/core/environment.h).
  std::string encryption;
  /// The server drops a connection that has not authenticated itself within this time.
  std::chrono::milliseconds hello_timeout = std::chrono::seconds(10);
};

/// Connects to "host:port" (IPv4, IPv6 as "[::1]:29500", or a name); with `serve`, listens there, and port 0
/// picks a free port. Retries a port in use and a server that is not up until the timeout. A connection that
/// was closed is reopened at the next request. Errc::rendezvous names the address and the reason, and both
/// launches if the server belongs to another one; Errc::mismatch a server of this launch that has another
/// secret, after two seconds. Both ends prove the secret to each other before anything else is sent.
/// Errc::system if a group of `size` ranks exceeds the hard limit of open files; the soft limit is raised as
/// needed.
std::shared_ptr<Store> tcp_store(const std::string& address, const TcpStoreOptions&);
/// As above, without a launch: any rank that reaches the address is let in, one of another job too, whose
/// values would then be mixed with those of this one. Use it only where one job alone knows the address.
std::shared_ptr<Store> tcp_store(const std::string& address, bool serve = false,
                                 std::chrono::milliseconds timeout = std::chrono::seconds(30));
/// The port that a serving tcp_store listens on; 0 for any other store.
int tcp_store_port(const Store&);

/// A view of `store` that prepends `prefix` to every key, for groups of other ranks. Successive groups of the
/// same ranks need none (Communicator::connect()).
std::shared_ptr<Store> prefix_store(std::shared_ptr<Store> store, std::string prefix);

}  // namespace rz
