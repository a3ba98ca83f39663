#pragma once
/// Server of the TCP store. Internal: users call tcp_store().

#include <poll.h>

#include <chrono>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "comm/bootstrap/store_internal.h"
#include "comm/bootstrap/store_wire.h"
#include "comm/core/deadline.h"
#include "comm/net/door.h"
#include "comm/net/stream.h"
#include "comm/os/fd.h"

namespace rz {

/// Serves on its own thread until it is destroyed. A client that violates the protocol is disconnected; other
/// clients are not affected. Memory is bounded: each client has at most one request and one reply in memory,
/// and all values together are limited (64 MiB). Nothing of a client is parsed or kept before it has proved
/// the job's secret (net::Door). Clients without a proof and a hello are dropped after
/// Options::hello_timeout, or if there are too many of them. A get that finds no value in time has the number
/// of those that were refused; so has a line on stderr at the end, unless all of them were ranks of other
/// launches.
class StoreServer {
 public:
  struct Options {
    std::string launch;                         ///< clients of any other launch are refused, with this name
    int size = 0;                               ///< ranks of the group; 0: unknown
    std::shared_ptr<const net::Secret> secret;  ///< null: clients prove that they are of this user
    /// Time for a client to send its proof and hello.
    std::chrono::milliseconds hello_timeout = std::chrono::seconds(10);
    net::Encryption encryption = net::Encryption::off;
  };
  /// Descriptors that the server of a group needs.
  static std::size_t files_for(int size);
  /// Starts the thread. Errc::system if the limit of open files is too low for the group.
  StoreServer(std::vector<UniqueFd> listeners, Options);
  StoreServer(const StoreServer&) = delete;
  ~StoreServer();

 private:
  /// What a get has not found yet.
  struct Wanted {
    std::string key;
    std::size_t prefix_bytes = 0;              ///< of the key, without its number
    std::optional<std::uint32_t> number = {};  ///< of a get_numbered
  };
  struct Client {
    net::Stream stream;
    std::uint32_t rank;                    ///< that it has named, with its proof
    Deadline hello_deadline;               ///< for its hello
    std::string in;                        ///< at most one request and one read
    std::string out;                       ///< at most one reply
    std::size_t sent = 0;                  ///< bytes of `out`
    bool admitted = false;                 ///< has sent its hello
    bool leaving = false;                  ///< close the connection once `out` is sent
    std::optional<Wanted> waits_for;       ///< of a get without a reply yet
    Deadline until = Deadline::after({});  ///< of that get
  };
  using Clients = std::list<Client>;

  void run();
  void list_descriptors();
  int time_to_poll() const;
  bool poll_again(Client&, short events) noexcept;
  bool serve_events(Client&, short events);
  bool receive(Client&);
  static bool reads(const Client& c) { return c.out.empty() && !c.waits_for; }
  bool serve_rest(Client&);
  static bool flush(Client&);
  bool serve(Client&);
  void perform(Client&, const store_wire::StoreRequest&, std::string_view launch, std::string_view key,
               std::string_view value);
  void admit(Client&);
  std::optional<std::string> find(const Wanted&);
  void find_value(Client&, Wanted, std::int64_t milliseconds);
  void reply_to_waiting() noexcept;
  static void reply(Client&, store_wire::Reply::Status, std::string_view value, std::int64_t number = 0);
  void let_in(net::Door::Arrival&) noexcept;
  void drop_silent() noexcept;
  double accepts_per_second() const;
  Clients::iterator drop(Clients::iterator);
  void warn(const net::Authentication&) noexcept;

  std::vector<UniqueFd> listeners_;
  UniqueFd stop_;
  const Options options_;
  net::Door door_;
  bool has_warned_ = false;  ///< of a rank with another secret or user
  KeyValueTable table_;
  Clients clients_;
  std::size_t admitted_ = 0;  ///< number of admitted clients
  std::vector<pollfd> descriptors_;
  std::thread thread_;
};

}  // namespace rz
