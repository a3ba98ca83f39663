#pragma once
/// The server side of the TCP store. Not for users: tcp_store() is.

#include <poll.h>

#include <chrono>
#include <list>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "comm/bootstrap/store_internal.h"
#include "comm/bootstrap/store_wire.h"
#include "comm/core/deadline.h"
#include "comm/os/fd.h"

namespace rz {

/// Serves on a thread of its own until it is destroyed. A client that breaks the rules is disconnected, and
/// nobody else notices. What clients cost is bounded: each has at most one request and one answer in memory,
/// values are limited together, and clients that have not sent a hello by `stranger_limit`, or are too many,
/// are dropped, the oldest first.
class StoreServer {
 public:
  struct Options {
    std::string launch;  ///< whose hello is answered; another's is refused by name
    int size = 0;        ///< ranks of the group; 0: not known
    std::chrono::milliseconds max_unauthenticated = std::chrono::seconds(10);
  };
  /// Errc::system if this process may not open as many files as the group needs.
  StoreServer(UniqueFd listener, Options);
  StoreServer(const StoreServer&) = delete;
  ~StoreServer();

 private:
  struct Client {
    UniqueFd socket;
    Deadline deadline_extension;  ///< for its hello
    std::string in;               ///< at most a request and one read
    std::string out;              ///< at most an answer
    std::size_t sent = 0;         ///< of `out`
    bool authenticated = false;   ///< has sent its hello
    bool leaving = false;         ///< ends once `out` is sent
    std::optional<std::string> waits_for;
    Deadline until = Deadline::after({});
  };
  using Clients = std::list<Client>;

  void run();
  void list_descriptors();
  int time_to_poll() const;
  bool poll_again(Client&, short events) noexcept;
  bool serve_events(Client&, short events);
  static bool receive(Client&);
  static bool flush(Client&);
  bool serve(Client&);
  void perform(Client&, const store_wire::Request&, std::string_view launch, std::string_view key,
               std::string_view value);
  void admit(Client&);
  void find_value(Client&, std::string_view key, std::int64_t milliseconds);
  void reply_to_waiting() noexcept;
  static void reply(Client&, store_wire::Reply::Status, std::string_view value, std::int64_t number = 0);
  void accept_clients() noexcept;
  bool accept_client();
  bool drop_oldest_unauthenticated();
  std::size_t unauthenticated() const { return clients_.size() - authenticated_; }
  Clients::iterator drop(Clients::iterator);

  UniqueFd listener_, stop_;
  const Options options_;
  KeyValueTable table_;
  Clients clients_;
  std::size_t authenticated_ = 0;           ///< clients that have sent their hello
  std::optional<Deadline> no_descriptors_;  ///< accept no one until then
  std::vector<pollfd> descriptors_;
  std::thread thread_;
};

}  // namespace rz
