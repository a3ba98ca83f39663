#include "comm/transports/meet.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <list>
#include <set>

#include "comm/core/error.h"
#include "comm/transports/socket.h"

namespace rz {

namespace {

constexpr std::uint32_t protocol_version = 1;
constexpr std::size_t most_gifts = 4;
constexpr std::size_t most_strangers = 64;
constexpr auto stranger_limit = std::chrono::seconds(5);

struct Hello {
  char magic[8];
  std::uint32_t version, rank, size, index;
  JobId job;
};
static_assert(sizeof(Hello) == 40);

/// A connection on its way from stranger to peer.
struct Guest {
  Connection connection;
  bool called = false;  ///< by us; its rank is known
  bool connecting = false;
  Deadline patience;
  Hello hello{};
  std::size_t got = 0;
};

class Meeting {
 public:
  Meeting(const Introduction& me, int listener, const std::vector<int>& callers, int links, Deadline deadline)
      : me_(me), listener_(listener), deadline_(deadline) {
    for (const int rank : callers)
      for (int i = 0; i < links; ++i) missing_.insert({rank, i});
  }

  std::vector<Connection> run(std::vector<Connection> calls) {
    for (auto& call : calls) {
      missing_.insert({call.rank, call.index});
      guests_.push_back({std::move(call), true, true, deadline_});
    }
    while (!missing_.empty()) step();
    return std::move(met_);
  }

 private:
  void step() {
    require(!deadline_.expired(), Errc::timeout, "rank ", me_.rank, ": no connection with rank ",
            list_ranks(missing_ranks()),
            " before the deadline; did the process end, or does a firewall stand between?");
    std::vector<pollfd> fds{{listener_, POLLIN, 0}};
    for (const auto& g : guests_)
      fds.push_back({g.connection.socket.get(), static_cast<short>(g.connecting ? POLLOUT : POLLIN), 0});
    if (poll(fds.data(), fds.size(), deadline_.poll_ms(100)) < 0 && errno != EINTR) fail_errno("poll");
    std::size_t i = 1;
    for (auto it = guests_.begin(); it != guests_.end(); ++i)
      it = (fds[i].revents ? attend(*it) : !it->patience.expired()) ? std::next(it) : guests_.erase(it);
    if (fds[0].revents) accept_strangers();
  }

  /// False: this guest is done with, as a peer or as nobody.
  bool attend(Guest& guest) {
    if (guest.connecting) {
      int error = 0;
      socklen_t size = sizeof error;
      getsockopt(guest.connection.socket.get(), SOL_SOCKET, SO_ERROR, &error, &size);
      if (error) call_failed(guest, std::strerror(error));
      guest.connecting = false;
      return say_hello(guest);
    }
    const ssize_t n = hear(guest);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return true;
    if (n <= 0) return guest.called ? call_failed(guest, n ? std::strerror(errno) : "it hung up") : false;
    guest.got += static_cast<std::size_t>(n);
    if (guest.got < sizeof(Hello)) return true;
    if (!valid(guest)) return guest.called ? call_failed(guest, "something else answers there") : false;
    guest.connection.rank = static_cast<int>(guest.hello.rank);
    guest.connection.index = static_cast<int>(guest.hello.index);
    if (!guest.called && !say_hello(guest)) return false;
    missing_.erase({guest.connection.rank, guest.connection.index});
    met_.push_back(std::move(guest.connection));
    return false;
  }

  bool valid(const Guest& guest) const {
    const Hello& h = guest.hello;
    const std::pair who{static_cast<int>(h.rank), static_cast<int>(h.index)};
    if (std::memcmp(h.magic, "ringzero", 8) != 0 || h.version != protocol_version || h.job != me_.job ||
        h.size != static_cast<std::uint32_t>(me_.size) || !missing_.count(who))
      return false;
    return !guest.called || who == std::pair{guest.connection.rank, guest.connection.index};
  }

  bool call_failed(const Guest& guest, const char* why) const {
    fail(Errc::rendezvous, "rank ", me_.rank, " cannot connect to rank ", guest.connection.rank, " at ",
         guest.connection.address, ": ", why,
         "; is that process alive, and the address reachable from this host (RZ_INTERFACE chooses another)?");
  }

  bool say_hello(Guest& guest) {
    Hello hello{{'r', 'i', 'n', 'g', 'z', 'e', 'r', 'o'},
                protocol_version,
                static_cast<std::uint32_t>(me_.rank),
                static_cast<std::uint32_t>(me_.size),
                static_cast<std::uint32_t>(guest.connection.index),
                me_.job};
    iovec bytes{&hello, sizeof hello};
    alignas(cmsghdr) char control[CMSG_SPACE(most_gifts * sizeof(int))] = {};
    msghdr message{};
    message.msg_iov = &bytes, message.msg_iovlen = 1;
    if (const std::size_t size = me_.gifts.size() * sizeof(int)) {
      message.msg_control = control, message.msg_controllen = CMSG_SPACE(size);
      cmsghdr* header = CMSG_FIRSTHDR(&message);
      header->cmsg_level = SOL_SOCKET, header->cmsg_type = SCM_RIGHTS, header->cmsg_len = CMSG_LEN(size);
      std::memcpy(CMSG_DATA(header), me_.gifts.data(), size);
    }
    const ssize_t n = sendmsg(guest.connection.socket.get(), &message, MSG_NOSIGNAL);
    if (n != sizeof hello && guest.called) call_failed(guest, n < 0 ? std::strerror(errno) : "short write");
    return n == sizeof hello;
  }

  static ssize_t hear(Guest& guest) {
    iovec bytes{reinterpret_cast<char*>(&guest.hello) + guest.got, sizeof(Hello) - guest.got};
    alignas(cmsghdr) char control[CMSG_SPACE(most_gifts * sizeof(int))];
    msghdr message{};
    message.msg_iov = &bytes, message.msg_iovlen = 1;
    message.msg_control = control, message.msg_controllen = sizeof control;
    const ssize_t n = recvmsg(guest.connection.socket.get(), &message, MSG_CMSG_CLOEXEC);
    if (n <= 0) return n;
    for (auto* h = CMSG_FIRSTHDR(&message); h; h = CMSG_NXTHDR(&message, h))
      if (h->cmsg_level == SOL_SOCKET && h->cmsg_type == SCM_RIGHTS)
        for (std::size_t i = 0; i < (h->cmsg_len - CMSG_LEN(0)) / sizeof(int); ++i) {
          int fd = -1;
          std::memcpy(&fd, CMSG_DATA(h) + i * sizeof fd, sizeof fd);
          guest.connection.gifts.emplace_back(fd);
        }
    return n;
  }

  void accept_strangers() {
    for (int i = 0; i < max_accepts_a_turn; ++i) {
      Descriptor socket(accept4(listener_, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
      if (!socket) {
        if (errno == EAGAIN || errno == EWOULDBLOCK) return;
        if (errno == EMFILE || errno == ENFILE || errno == ENOMEM) {
          if (drop_oldest_stranger()) continue;
          fail_errno("accept4", "(ulimit -n raises the limit)");
        }
        continue;  // that connection ended before it was accepted
      }
      if (!same_user(socket.get())) continue;
      Guest guest{Connection{}, false, false, Deadline::after(stranger_limit)};
      guest.connection.socket = std::move(socket);
      guests_.push_back(std::move(guest));
      make_room();
    }
  }

  static bool is_stranger(const Guest& g) { return !g.called; }

  /// Strangers beyond a number are dropped, the oldest first.
  void make_room() {
    if (static_cast<std::size_t>(std::count_if(guests_.begin(), guests_.end(), is_stranger)) >
        most_strangers + missing_.size())
      drop_oldest_stranger();
  }
  bool drop_oldest_stranger() {
    const auto guest = std::find_if(guests_.begin(), guests_.end(), is_stranger);
    if (guest == guests_.end()) return false;
    guests_.erase(guest);
    return true;
  }

  /// On a unix socket only processes of this user may be peers.
  static bool same_user(int socket) {
    int domain = 0;
    socklen_t size = sizeof domain;
    getsockopt(socket, SOL_SOCKET, SO_DOMAIN, &domain, &size);
    if (domain != AF_UNIX) return true;
    ucred peer{};
    size = sizeof peer;
    return getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 && peer.uid == geteuid();
  }

  std::vector<int> missing_ranks() const {
    std::set<int> ranks;
    for (const auto& [rank, index] : missing_) ranks.insert(rank);
    return {ranks.begin(), ranks.end()};
  }

  const Introduction& me_;
  int listener_;
  Deadline deadline_;
  std::set<std::pair<int, int>> missing_;  ///< rank, index
  std::list<Guest> guests_;
  std::vector<Connection> met_;
};

}  // namespace

std::vector<Connection> meet(const Introduction& me, int listener, std::vector<Connection> calls,
                             const std::vector<int>& callers, int links, Deadline deadline) {
  return Meeting(me, listener, callers, links, deadline).run(std::move(calls));
}

std::string list_ranks(const std::vector<int>& ranks) {
  std::string text;
  for (std::size_t i = 0; i < ranks.size(); ++i)
    text += str(i == 0 ? "" : i + 1 == ranks.size() ? " and " : ", ", ranks[i]);
  return text;
}

}  // namespace rz
