#include <poll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <list>
#include <mutex>
#include <thread>

#include "comm/core/error.h"
#include "comm/store.h"
#include "comm/store_detail.h"
#include "comm/transports/socket.h"

// One request, one answer, on a connection that stays. Fixed header, lengths checked before anything is read;
// who breaks the rules is disconnected, and nobody else notices.

namespace rz {

namespace {

constexpr std::uint32_t request_magic = 0x31515a52;  // "RZQ1": the version is part of it
constexpr std::uint32_t answer_magic = 0x31415a52;   // "RZA1"
constexpr std::uint32_t longest_key = 1024, longest_value = 1 << 20;
constexpr std::size_t most_clients = 4096;
/// A client that has not sent a whole first request by then is dropped.
constexpr auto patience_with_strangers = std::chrono::seconds(10);

struct Request {
  enum Kind : std::uint32_t { set = 1, get = 2, add = 3 };
  std::uint32_t magic = request_magic;
  std::uint32_t kind = 0;
  std::uint32_t key_bytes = 0, value_bytes = 0;
  std::int64_t number = 0;  ///< add: amount; get: milliseconds to wait
};
static_assert(sizeof(Request) == 24);

struct Answer {
  enum Status : std::uint32_t { ok = 0, timeout = 1, refused = 2 };
  std::uint32_t magic = answer_magic;
  std::uint32_t status = ok;
  std::uint32_t value_bytes = 0, unused = 0;
  std::int64_t number = 0;
};
static_assert(sizeof(Answer) == 24);

bool valid(const Request& r) {
  return r.magic == request_magic && r.kind >= Request::set && r.kind <= Request::add &&
         r.key_bytes <= longest_key && r.value_bytes <= longest_value &&
         (r.kind == Request::set || !r.value_bytes);
}

// ---- server ----

class Server {
 public:
  explicit Server(Descriptor listener) : listener_(std::move(listener)), stop_(eventfd(0, EFD_CLOEXEC)) {
    if (!stop_) fail_errno("eventfd");
    thread_ = std::thread([this] { run(); });
  }
  ~Server() {
    const std::uint64_t one = 1;
    [[maybe_unused]] const auto n = ::write(stop_.get(), &one, sizeof one);
    thread_.join();
  }

 private:
  struct Client {
    Descriptor socket;
    Deadline patience;
    std::string in, out;
    bool trusted = false;  ///< has sent a whole request
    std::string waiting_for;
    bool waiting = false;
    Deadline until = Deadline::after({});
  };

  void run() {
    for (;;) {
      std::vector<pollfd> fds{{stop_.get(), POLLIN, 0}, {listener_.get(), POLLIN, 0}};
      for (const Client& c : clients_)
        fds.push_back({c.socket.get(), static_cast<short>(c.out.empty() ? POLLIN : POLLIN | POLLOUT), 0});
      if (poll(fds.data(), fds.size(), timeout()) < 0 && errno != EINTR) return;
      if (fds[0].revents) return;
      std::size_t i = 2;
      for (auto c = clients_.begin(); c != clients_.end(); ++i)
        c = keep(*c, fds[i].revents) ? std::next(c) : clients_.erase(c);
      answer_waiting();
      if (fds[1].revents) accept_clients();
    }
  }

  /// Until the next deadline of a client.
  int timeout() const {
    int ms = 1000;
    for (const Client& c : clients_) {
      if (c.waiting) ms = c.until.poll_ms(ms);
      if (!c.trusted) ms = c.patience.poll_ms(ms);
    }
    return ms;
  }

  void accept_clients() {
    for (;;) {
      Descriptor socket(accept4(listener_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
      if (!socket) return;
      if (clients_.size() >= most_clients) continue;
      set_tcp_options(socket.get());
      clients_.push_back({std::move(socket), Deadline::after(patience_with_strangers), {}, {}});
    }
  }

  bool keep(Client& c, short events) {
    if (!c.trusted && c.patience.expired()) return false;
    if (events & (POLLIN | POLLHUP | POLLERR)) {
      char bytes[65536];
      const ssize_t n = ::recv(c.socket.get(), bytes, sizeof bytes, 0);
      if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR)) return false;
      if (n > 0) c.in.append(bytes, static_cast<std::size_t>(n));
    }
    return serve(c) && flush(c);
  }

  /// Every whole request that is there. False: a malformed one.
  bool serve(Client& c) {
    while (!c.waiting && c.in.size() >= sizeof(Request)) {
      Request r;
      std::memcpy(&r, c.in.data(), sizeof r);
      if (!valid(r)) return false;
      const std::size_t size = sizeof r + r.key_bytes + r.value_bytes;
      if (c.in.size() < size) return true;
      perform(c, r, c.in.substr(sizeof r, r.key_bytes), c.in.substr(sizeof r + r.key_bytes, r.value_bytes));
      c.in.erase(0, size);
      c.trusted = true;
    }
    // While one request waits, its client has nothing to say.
    return c.in.size() <= sizeof(Request) + longest_key + longest_value;
  }

  void perform(Client& c, const Request& r, std::string key, std::string value) {
    if (r.kind == Request::set) {
      table_.set(key, value);
      answer(c, Answer::ok, {}, 0);
    } else if (r.kind == Request::add) {
      try {
        answer(c, Answer::ok, {}, table_.add(key, r.number));
      } catch (const Error& e) {
        answer(c, Answer::refused, e.what(), 0);
      }
    } else if (auto found = table_.find(key)) {
      answer(c, Answer::ok, *found, 0);
    } else {
      c.waiting = true;
      c.waiting_for = std::move(key);
      c.until = Deadline::after(std::chrono::milliseconds(std::clamp<std::int64_t>(r.number, 0, 86'400'000)));
    }
  }

  void answer_waiting() {
    for (Client& c : clients_) {
      if (!c.waiting) continue;
      const auto found = table_.find(c.waiting_for);
      if (!found && !c.until.expired()) continue;
      c.waiting = false;
      answer(c, found ? Answer::ok : Answer::timeout, found.value_or(""), 0);
      flush(c);
    }
  }

  static void answer(Client& c, Answer::Status status, const std::string& value, std::int64_t number) {
    const Answer a{answer_magic, status, static_cast<std::uint32_t>(value.size()), 0, number};
    c.out.append(reinterpret_cast<const char*>(&a), sizeof a).append(value);
  }

  static bool flush(Client& c) {
    if (c.out.empty()) return true;
    const ssize_t n = ::send(c.socket.get(), c.out.data(), c.out.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n > 0) c.out.erase(0, static_cast<std::size_t>(n));
    return n > 0 || errno == EAGAIN || errno == EINTR;
  }

  Descriptor listener_, stop_;
  KeyTable table_;
  std::list<Client> clients_;
  std::thread thread_;
};

// ---- client ----

class TcpStore final : public Store {
 public:
  TcpStore(const std::string& address, bool serve, Deadline deadline)
      : address_(address), where_(parse_host_port(address)) {
    require(serve || where_.port != 0, Errc::config, "address '", address,
            "': port 0 is for the server only");
    if (serve) start_server();
    idle_.push_back(connect(where_, deadline));
    local_address_ = rz::local_address(idle_.back().get()).host();
  }

  void set(std::string_view key, std::string_view value) override {
    call({request_magic, Request::set, 0, 0, 0}, key, value, Deadline::after(patience));
  }

  std::string get(std::string_view key, Deadline deadline) override {
    const auto ms = std::chrono::ceil<std::chrono::milliseconds>(deadline.remaining());
    return call({request_magic, Request::get, 0, 0, ms.count()}, key, {}, Deadline::after(ms + patience))
        .second;
  }

  std::int64_t add(std::string_view key, std::int64_t amount) override {
    return call({request_magic, Request::add, 0, 0, amount}, key, {}, Deadline::after(patience)).first;
  }

  int port() const { return port_; }
  const std::string& local_address() const { return local_address_; }

 private:
  /// For the server to answer what it can answer at once.
  static constexpr auto patience = std::chrono::seconds(30);

  /// On the first address of the name that other hosts can reach, if it has one.
  void start_server() {
    try {
      const auto addresses = resolve(where_);
      auto at = std::find_if(addresses.begin(), addresses.end(), [](auto& a) { return !a.loopback(); });
      if (at == addresses.end()) at = addresses.begin();
      Descriptor listener = listen_tcp(*at);
      where_.port = port_ = rz::local_address(listener.get()).port();
      server_ = std::make_unique<Server>(std::move(listener));
    } catch (const Error& e) {
      fail(Errc::rendezvous, "cannot serve a store at ", address_, ": ", e.what());
    }
  }

  /// Again and again until the deadline: the server may not be up yet.
  Descriptor connect(const HostPort& where, Deadline deadline) const {
    std::string reason = "no address";
    for (auto pause = std::chrono::milliseconds(5);;
         pause = std::min(pause * 2, std::chrono::milliseconds(500))) {
      try {
        for (const auto& address : resolve(where)) {
          if (Descriptor socket = connect_tcp(address, deadline)) return socket;
          reason = str("connect to ", address.text(), ": ", std::strerror(errno));
        }
      } catch (const Error& e) {
        reason = e.what();
      }
      require(!deadline.expired(), Errc::rendezvous, "no store at ", address_, " before the deadline (",
              reason, "); is rank 0 running there, and the port open?");
      std::this_thread::sleep_for(std::min<Deadline::Clock::duration>(pause, deadline.remaining()));
    }
  }

  std::pair<std::int64_t, std::string> call(Request request, std::string_view key, std::string_view value,
                                            Deadline deadline) {
    require(key.size() <= longest_key, Errc::invalid_argument, "a key of ", key.size(), " bytes; at most ",
            longest_key);
    require(value.size() <= longest_value, Errc::invalid_argument, "the value of key '", key, "' has ",
            value.size(), " bytes; at most ", longest_value);
    request.key_bytes = static_cast<std::uint32_t>(key.size());
    request.value_bytes = static_cast<std::uint32_t>(value.size());
    std::string bytes(reinterpret_cast<const char*>(&request), sizeof request);
    bytes.append(key).append(value);
    Descriptor socket = take(deadline);
    send_all(socket, bytes, key, deadline);
    Answer answer;
    receive_all(socket, &answer, sizeof answer, key, deadline);
    if (answer.magic != answer_magic || answer.value_bytes > longest_value)
      broken(key, "it is no store of ringzero");
    std::string text(answer.value_bytes, '\0');
    receive_all(socket, text.data(), text.size(), key, deadline);
    give_back(std::move(socket));
    if (answer.status == Answer::timeout) fail(Errc::timeout, missing_key(key, "the store at " + address_));
    if (answer.status == Answer::refused) fail(Errc::rendezvous, text);
    return {answer.number, std::move(text)};
  }

  /// A connection that no other call is using: a get that waits must not keep a set from being heard.
  Descriptor take(Deadline deadline) {
    {
      const std::lock_guard lock(mutex_);
      if (!idle_.empty()) {
        Descriptor socket = std::move(idle_.back());
        idle_.pop_back();
        return socket;
      }
    }
    return connect(where_, deadline);
  }
  void give_back(Descriptor socket) {
    const std::lock_guard lock(mutex_);
    idle_.push_back(std::move(socket));
  }

  void send_all(const Descriptor& socket, std::string_view bytes, std::string_view key, Deadline deadline) {
    while (!bytes.empty()) {
      const ssize_t n = ::send(socket.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (n > 0) bytes.remove_prefix(static_cast<std::size_t>(n));
      if (n < 0) await(socket, POLLOUT, key, deadline);
    }
  }

  void receive_all(const Descriptor& socket, void* to, std::size_t size, std::string_view key,
                   Deadline deadline) {
    auto* at = static_cast<char*>(to);
    while (size) {
      const ssize_t n = ::recv(socket.get(), at, size, 0);
      if (n == 0) broken(key, "it hung up; did rank 0 end?");
      if (n < 0) await(socket, POLLIN, key, deadline);
      if (n > 0) at += n, size -= static_cast<std::size_t>(n);
    }
  }

  /// After a call that returned -1.
  void await(const Descriptor& socket, short events, std::string_view key, Deadline deadline) {
    if (errno != EAGAIN && errno != EINTR) broken(key, std::strerror(errno));
    if (deadline.expired()) broken(key, "it does not answer");
    pollfd p{socket.get(), events, 0};
    poll(&p, 1, deadline.poll_ms(1000));
  }

  [[noreturn]] void broken(std::string_view key, const std::string& why) const {
    fail(Errc::rendezvous, "the store at ", address_, " failed at key '", key, "': ", why);
  }

  std::string address_;
  HostPort where_;
  int port_ = 0;
  std::unique_ptr<Server> server_;
  std::string local_address_;
  std::mutex mutex_;
  std::vector<Descriptor> idle_;
};

}  // namespace

std::shared_ptr<Store> tcp_store(const std::string& address, bool serve, std::chrono::milliseconds timeout) {
  return std::make_shared<TcpStore>(address, serve, Deadline::after(timeout));
}

int tcp_store_port(const Store& store) {
  const auto* tcp = dynamic_cast<const TcpStore*>(&innermost(store));
  return tcp ? tcp->port() : 0;
}

std::string tcp_store_local_address(const Store& store) {
  const auto* tcp = dynamic_cast<const TcpStore*>(&innermost(store));
  return tcp ? tcp->local_address() : "";
}

}  // namespace rz
