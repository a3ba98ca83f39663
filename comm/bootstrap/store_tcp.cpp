#include <openssl/crypto.h>
#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <mutex>

#include "comm/bootstrap/secret.h"
#include "comm/bootstrap/store_internal.h"
#include "comm/bootstrap/store_server.h"
#include "comm/bootstrap/store_wire.h"
#include "comm/core/environment.h"
#include "comm/core/error.h"
#include "comm/net/authentication.h"
#include "comm/net/listening.h"
#include "comm/net/socket.h"
#include "comm/net/stream.h"
#include "comm/os/process.h"
#include "comm/os/wait_policy.h"
#include "comm/store.h"

namespace rz {

namespace {

using std::chrono::milliseconds;
using store_wire::Reply;
using store_wire::StoreRequest;

/// Time for the server to reply to a request that does not wait.
constexpr auto retry_interval = std::chrono::seconds(30);
/// Time for one address to accept a connection and reply to a hello, in the first rounds and at most in later
/// ones. Short, so that an unresponsive address does not delay the others.
constexpr milliseconds first_address_timeout{500}, max_address_timeout{8000};

constexpr const char* not_of_others =
    " is each host itself; give all ranks a name or address of rank 0's host";

Deadline earlier(milliseconds limit, Deadline deadline) {
  return Deadline::after(std::min<Deadline::Clock::duration>(limit, deadline.remaining()));
}

// ---- one connection

/// A connection to the server, for one call at a time. Error messages state the cause; the caller adds the
/// address.
class StoreConnection {
 public:
  explicit StoreConnection(net::Stream stream) : stream_(std::move(stream)) {}

  std::pair<Reply, std::string> call(std::string_view bytes, Deadline deadline) {
    send_all(bytes, deadline);
    Reply reply;
    receive_all(&reply, sizeof reply, deadline);
    require(reply.magic == store_wire::reply_magic && reply.value_bytes <= store_wire::max_reply,
            Errc::rendezvous, "it is no store of this version of ringzero");
    std::string text(reply.value_bytes, '\0');
    receive_all(text.data(), text.size(), deadline);
    return {reply, std::move(text)};
  }
  /// For an idle connection, on which only its end can be received.
  bool alive() const {
    char c;
    return ::recv(stream_.fd(), &c, 1, MSG_PEEK | MSG_DONTWAIT) < 0 && errno == EAGAIN;
  }
  int fd() const { return stream_.fd(); }

 private:
  void send_all(std::string_view bytes, Deadline deadline) {
    while (!bytes.empty()) {
      const ssize_t n = stream_.send(bytes.data(), bytes.size());
      if (n > 0) bytes.remove_prefix(static_cast<std::size_t>(n));
      if (n < 0) await(POLLOUT, deadline);
    }
    while (!stream_.flush()) await(POLLOUT, deadline);
  }

  void receive_all(void* to, std::size_t size, Deadline deadline) {
    auto* at = static_cast<char*>(to);
    while (size) {
      const ssize_t n = stream_.receive(at, size);
      require(n != 0, Errc::rendezvous, "it closed the connection; did rank 0 end?");
      if (n < 0) await(POLLIN, deadline);
      if (n > 0) at += n, size -= static_cast<std::size_t>(n);
    }
  }

  /// Waits after a system call that returned -1; throws if errno is not EAGAIN or EINTR.
  void await(short events, Deadline deadline) {
    const int error = errno;
    require(stream_.error().empty(), Errc::rendezvous, stream_.error());
    require(error == EAGAIN || error == EINTR, Errc::rendezvous, std::strerror(error));
    require(!deadline.expired(), Errc::rendezvous, "it sends no reply");
    pollfd p{stream_.fd(), events, 0};
    poll(&p, 1, deadline.poll_ms(1000));
  }

  net::Stream stream_;
};

// ---- where the server is

/// How a client authenticates itself and the server.
struct StoreIdentity {
  std::shared_ptr<const net::Secret> secret;
  net::AuthenticationKey key;
  net::Claim claim;
  net::Encryption encryption;
};

/// Time in which other addresses and ports are tried after a server of this launch has shown another secret.
constexpr milliseconds other_secret_patience{2000};

/// Searches addresses and ports for the server of a launch.
class ServerSearch {
 public:
  ServerSearch(const std::string& launch, const StoreIdentity& identity)
      : launch_(launch), identity_(identity) {}

  /// An authenticated connection; if empty, failure() has the reason.
  std::optional<StoreConnection> try_address(const net::SocketAddress& address, Deadline deadline) {
    refused_ = false;
    UniqueFd socket = net::connect_in_tries(address, deadline);
    if (!socket) {
      refused_ = errno == ECONNREFUSED;
      return fails(concat("connect to ", address.text(), ": ", std::strerror(errno)));
    }
    auto end = net::Authentication::client(identity_.key, identity_.claim, identity_.encryption);
    try {
      end.complete(socket.get(), deadline);
      StoreConnection line(net::Stream(std::move(socket), end.take_tls()));
      const auto [reply, text] =
          line.call(to_bytes(StoreRequest{.kind = StoreRequest::hello}, launch_), deadline);
      if (reply.status == Reply::ok) return line;
      if (reply.status != Reply::wrong_launch) return fails(concat(address.text(), ": ", text));
      wrong_launch_ = concat("the store at ", address.text(), " is that of launch '", text,
                             "', and this one is '", launch_, "'");
      return std::nullopt;
    } catch (const Error& e) {
      using Refusal = net::Authentication::Refusal;
      const Refusal why = end.refusal();
      const bool differs =
          why == Refusal::other_secret || why == Refusal::other_user || why == Refusal::other_encryption;
      if (differs && other_secret_.empty()) {
        other_secret_ = concat("rank ", identity_.claim.rank, " and the store at ", address.text(),
                               " are of one launch, but ", end.reason());
        other_secret_until_ = Deadline::after(other_secret_patience);
      }
      return fails(refusal_ = concat(address.text(), " took the connection, but ", e.what()));
    }
  }
  /// Errc::mismatch if the launch's store has another secret or user than this rank, and no other is found
  /// for a while: to wait longer would not help.
  void check_secret() const {
    require(other_secret_.empty() || !other_secret_until_.expired(), Errc::mismatch, other_secret_);
  }
  std::nullopt_t fails(std::string why) {
    failure_ = std::move(why);
    return std::nullopt;
  }
  /// The last failure, beside that of the last server that took the connection; the store of another launch
  /// takes precedence over other causes.
  std::string failure() const {
    if (!wrong_launch_.empty()) return wrong_launch_;
    return refusal_.empty() || refusal_ == failure_ ? failure_ : failure_ + "; before that " + refusal_;
  }
  /// Whether the last address refused the connection: it has no listener.
  bool refused() const { return refused_; }

 private:
  const std::string& launch_;
  const StoreIdentity& identity_;
  std::string other_secret_;
  Deadline other_secret_until_ = Deadline::after({});
  std::string failure_ = "no address", refusal_, wrong_launch_;
  bool refused_ = false;
};

/// Calls `f`, with growing pauses, until its result is not empty or the deadline has passed.
template <class F>
auto repeat_until(Deadline deadline, const F& f) -> decltype(f()) {
  for (unsigned polls = 0;; ++polls) {
    if (auto result = f()) return result;
    if (deadline.expired()) return {};
    tcp_store_backoff.wait(polls, deadline.remaining());
  }
}

class TcpStore final : public Store {
 public:
  TcpStore(const std::string& address, const TcpStoreOptions& options)
      : address_(address),
        options_(options),
        where_(net::parse_host_port(address)),
        identity_(identify(where_, options)) {
    OPENSSL_cleanse(options_.secret.data(), options_.secret.size());
    options_.secret.clear();
    check();
    const Deadline deadline = Deadline::after(options.timeout);
    if (options.serve) start_server(deadline);
    idle_.push_back(find_server(deadline));
    local_address_ = rz::net::local_address(idle_.back().fd()).host();
  }

  void set(std::string_view key, std::string_view value) override {
    call({.kind = StoreRequest::set}, key, value, Deadline::after(retry_interval));
  }

  std::string get(std::string_view key, Deadline deadline) override {
    const auto ms = std::chrono::ceil<milliseconds>(deadline.remaining());
    return call({.kind = StoreRequest::get, .number = ms.count()}, key, {},
                Deadline::after(ms + retry_interval))
        .second;
  }

  std::vector<std::string> get_numbered(std::string_view prefix, std::uint32_t first,
                                        Deadline deadline) override {
    const auto ms = std::chrono::ceil<milliseconds>(deadline.remaining());
    const std::string text = call({.kind = StoreRequest::get_numbered, .first = first, .number = ms.count()},
                                  prefix, {}, Deadline::after(ms + retry_interval))
                                 .second;
    std::vector<std::string> values;
    for (std::string_view rest = text; !rest.empty() || values.empty();) {
      std::uint32_t size = 0;
      if (rest.size() >= sizeof size) std::memcpy(&size, rest.data(), sizeof size);
      if (rest.size() < sizeof size || rest.size() - sizeof size < size)
        broken(prefix, "it sends values of other lengths than it names");
      values.emplace_back(rest.substr(sizeof size, size));
      rest.remove_prefix(sizeof size + size);
    }
    return values;
  }

  std::int64_t add(std::string_view key, std::int64_t amount) override {
    return call({.kind = StoreRequest::add, .number = amount}, key, {}, Deadline::after(retry_interval))
        .first;
  }

  int port() const { return port_; }
  const std::string& local_address() const { return local_address_; }
  const std::shared_ptr<const net::Secret>& secret() const { return identity_.secret; }

 private:
  static StoreIdentity identify(const net::HostPort& where, const TcpStoreOptions& options) {
    const net::Encryption encryption =
        net::parse_encryption(options.encryption.empty() ? environment().encryption : options.encryption);
    std::shared_ptr<const net::Secret> secret;
    if (!options.secret.empty())
      secret = std::make_shared<const net::Secret>(net::Secret::of_text(options.secret));
    else if (options.remote || encryption == net::Encryption::always || !is_loopback(where) || has_secret())
      secret = process_secret();
    return {secret, net::AuthenticationKey(secret.get(), net::Purpose::store, ""),
            net::Claim{.size = static_cast<std::uint32_t>(options.size),
                       .rank = static_cast<std::uint32_t>(options.rank),
                       .group = net::fingerprint(options.launch)},
            secret ? encryption : net::Encryption::off};
  }

  /// Whether a variable of the user gives all ranks a secret. Ends on loopback need none: without one, both
  /// must be of one user.
  static bool has_secret() {
    const std::string variable = variable_of_secret();
    return variable == "RZ_SECRET" || variable == "RZ_SECRET_FILE";
  }

  /// Whether the server listens on loopback alone. A name that cannot be resolved yet is one of another host.
  static bool is_loopback(const net::HostPort& where) {
    try {
      return std::ranges::all_of(net::resolve(where), [](auto& a) { return a.loopback(); });
    } catch (const Error&) {
      return false;
    }
  }

  void check() const {
    require(options_.serve || where_.port != 0, Errc::config, "address '", address_,
            "': port 0 is for the server only");
    require(options_.launch.size() <= store_wire::max_launch, Errc::config, "the launch's identity has ",
            options_.launch.size(), " bytes; at most ", store_wire::max_launch);
    require(options_.ports >= 1 && (options_.ports == 1 || !options_.launch.empty()), Errc::invalid_argument,
            options_.ports, " ports for the store at ", address_,
            "; more than one needs a launch, whose identity distinguishes its server from others");
  }

  /// The ports to try, up to 65535.
  std::vector<int> ports() const {
    std::vector<int> all{where_.port};
    while (where_.port && static_cast<int>(all.size()) < options_.ports && all.back() < 65535)
      all.push_back(all.back() + 1);
    return all;
  }

  void start_server(Deadline deadline) {
    std::vector<UniqueFd> listeners = open_listeners(deadline);
    const net::SocketAddress bound = rz::net::local_address(listeners.front().get());
    where_.port = port_ = bound.port();
    address_ = concat(address_.substr(0, address_.rfind(':')), ':', port_);
    if (options_.remote && bound.host() != where_.host) {
      for (const UniqueFd& l : listeners)
        listens_ +=
            (listens_.empty() ? ", which listens at " : ", ") + rz::net::local_address(l.get()).host();
    }
    if (options_.remote && bound.loopback() && listeners.size() == 1)
      listens_ = concat(", which listens at ", bound.text(),
                        ", as MASTER_ADDR is loopback; no other host reaches it");
    server_ = std::make_unique<StoreServer>(
        std::move(listeners), StoreServer::Options{options_.launch, options_.size, identity_.secret,
                                                   options_.hello_timeout, identity_.encryption});
  }

  std::vector<UniqueFd> open_listeners(Deadline deadline) const {
    try {
      auto all = options_.addresses.empty() ? net::listening_addresses(where_, environment().interface)
                                            : given_addresses();
      if (!options_.remote && !net::is_unspecified(where_.host)) all.resize(1);
      std::vector<UniqueFd> listeners;
      repeat_until(deadline, [&] {
        for (const int port : ports())
          if (listeners = net::listen_at(all, port); !listeners.empty()) return true;
        return false;
      });
      require(!listeners.empty(), Errc::rendezvous, "bind ", all.front().text(),
              options_.ports > 1 ? concat(" and the ", options_.ports - 1, " ports after it") : "", ": ",
              std::strerror(EADDRINUSE));
      return listeners;
    } catch (const Error& e) {
      fail(Errc::rendezvous, "cannot serve a store at ", address_, ": ", e.what(),
           options_.remote
               ? "; rank 0 serves it at a name or address of its own host, even if others reach it "
                 "by that of a service or router"
               : "");
    }
  }

  std::vector<net::SocketAddress> given_addresses() const {
    std::vector<net::SocketAddress> all;
    for (const std::string& text : options_.addresses)
      all.push_back(net::resolve(net::parse_host_port(text)).front());
    return all;
  }

  /// Retries until the deadline: the server may not be up yet, and another program may use a port. Each round
  /// tries the first port and one of the others, since a firewall may make those unresponsive.
  StoreConnection find_server(Deadline deadline) {
    ServerSearch search(options_.launch, identity_);
    const std::vector<int> all = server_ ? std::vector{port_} : ports();
    const std::size_t others = all.size() - 1, turns = std::max<std::size_t>(others, 1);
    auto patience = first_address_timeout;
    std::size_t round = 0;
    auto found = repeat_until(deadline, [&] {
      std::vector<int> now{all.front()};
      if (others) now.push_back(all[1 + round % others]);
      auto line = try_ports(now, search, patience, deadline);
      if (!line) search.check_secret();
      if (++round % turns == 0) patience = std::min(patience * 2, max_address_timeout);
      return line;
    });
    require(found.has_value(), Errc::rendezvous, "no store at ", address_, " before the deadline (",
            search.failure(), "); is rank 0 running there, and the port open?",
            net::is_unspecified(where_.host) ? concat(' ', where_.host, not_of_others) : "");
    return *std::move(found);
  }

  std::optional<StoreConnection> try_ports(const std::vector<int>& ports, ServerSearch& search,
                                           milliseconds patience, Deadline deadline) {
    try {
      const auto addresses = options_.addresses.empty() ? net::resolve(where_) : given_addresses();
      for (const int port : ports)
        for (net::SocketAddress address : addresses) {
          address.set_port(port);
          auto line = search.try_address(address, earlier(patience, deadline));
          if (!line) continue;
          server_address_ = address;
          return line;
        }
    } catch (const Error& e) {
      search.fails(e.what());
    }
    return std::nullopt;
  }

  /// Connects again to the server's address. Fails at once if the address refuses the connection, since the
  /// server will not come back.
  StoreConnection reconnect(std::string_view key, Deadline deadline) const {
    ServerSearch search(options_.launch, identity_);
    auto line = repeat_until(deadline, [&] {
      auto found = search.try_address(server_address_, earlier(max_address_timeout, deadline));
      if (search.refused()) broken(key, "no process listens there any more; did rank 0 end?");
      return found;
    });
    if (!line) broken(key, search.failure());
    return *std::move(line);
  }

  std::pair<std::int64_t, std::string> call(StoreRequest request, std::string_view key,
                                            std::string_view value, Deadline deadline) {
    require(key.size() <= store_wire::max_key, Errc::invalid_argument, "a key of ", key.size(),
            " bytes; at most ", store_wire::max_key);
    require(value.size() <= store_wire::max_value, Errc::invalid_argument, "the value of key '", key,
            "' has ", value.size(), " bytes; at most ", store_wire::max_value);
    StoreConnection line = acquire(key, deadline);
    auto [reply, text] = [&] {
      try {
        return line.call(to_bytes(request, options_.launch, key, value), deadline);
      } catch (const Error& e) {
        broken(key, e.what());
      }
    }();
    release(std::move(line));
    if (reply.status == Reply::timeout) {
      const bool numbered = request.kind == StoreRequest::get_numbered;
      fail(Errc::timeout,
           missing_key(numbered ? concat(key, request.first) : key,
                       concat("the store at ", address_, listens_)),
           text, server_ && options_.remote ? hint_at_firewall() : "");
    }
    if (reply.status == Reply::refused) fail(Errc::rendezvous, text);
    if (reply.status == Reply::wrong_launch) broken(key, concat("it is that of launch '", text, "' now"));
    return {reply.number, std::move(text)};
  }

  /// A connection that no other call uses, since a get that waits must not block a set.
  StoreConnection acquire(std::string_view key, Deadline deadline) {
    {
      const std::lock_guard lock(mutex_);
      while (!idle_.empty()) {
        StoreConnection line = std::move(idle_.back());
        idle_.pop_back();
        if (line.alive()) return line;
      }
    }
    return reconnect(key, deadline);
  }
  void release(StoreConnection line) {
    const std::lock_guard lock(mutex_);
    idle_.push_back(std::move(line));
  }

  std::string hint_at_firewall() const {
    return concat("; if it runs, does a firewall keep it from port ", port_,
                  " of this host? RZ_PORTS=FIRST-LAST limits the ports of a job, and `doctor` tries them");
  }

  [[noreturn]] void broken(std::string_view key, const std::string& why) const {
    fail(Errc::rendezvous, "the store at ", address_, " failed at key '", key, "': ", why);
  }

  std::string address_;      ///< for messages; of a server with the port that it listens on
  TcpStoreOptions options_;  ///< without the text of the secret
  net::HostPort where_;
  const StoreIdentity identity_;
  int port_ = 0;
  std::string listens_;  ///< for messages
  std::unique_ptr<StoreServer> server_;
  net::SocketAddress server_address_;  ///< where it was found
  std::string local_address_;
  std::mutex mutex_;
  std::vector<StoreConnection> idle_;
};

}  // namespace

std::shared_ptr<Store> tcp_store(const std::string& address, const TcpStoreOptions& options) {
  return std::shared_ptr<Store>(new TcpStore(address, options), DeletedByCreator<TcpStore>());
}

std::shared_ptr<Store> tcp_store(const std::string& address, bool serve, milliseconds timeout) {
  return tcp_store(address, TcpStoreOptions{.serve = serve, .timeout = timeout});
}

int tcp_store_port(const Store& store) {
  const auto* tcp = dynamic_cast<const TcpStore*>(&innermost(store));
  return tcp ? tcp->port() : 0;
}

std::string tcp_store_local_address(const Store& store) {
  const auto* tcp = dynamic_cast<const TcpStore*>(&innermost(store));
  return tcp ? tcp->local_address() : "";
}

std::shared_ptr<const net::Secret> tcp_store_secret(const Store& store) {
  const auto* tcp = dynamic_cast<const TcpStore*>(&innermost(store));
  return tcp ? tcp->secret() : nullptr;
}

bool is_insecure(const Store& store) {
  const auto* tcp = dynamic_cast<const TcpStore*>(&innermost(store));
  return tcp && !tcp->secret();
}

}  // namespace rz
