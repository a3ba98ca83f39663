#include "comm/net/peer_user.h"

#include <linux/inet_diag.h>
#include <linux/netlink.h>
#include <linux/sock_diag.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <optional>
#include <string>

#include "comm/core/error.h"
#include "comm/core/text.h"
#include "comm/net/socket.h"
#include "comm/os/fd.h"

namespace rz::net {

namespace {

/// One end of a connection. An address of IPv4 is mapped to IPv6, as a socket of IPv6 names it.
struct End {
  std::array<std::uint32_t, 4> ip{};  ///< in network order, as is the port
  std::uint16_t port = 0;
  std::uint32_t scope = 0;  ///< the interface of a link-local address

  bool is_ipv4() const { return !ip[0] && !ip[1] && ip[2] == htonl(0xffff); }
};

End end_at(const SocketAddress& address) {
  End end;
  if (address.storage.ss_family == AF_INET) {
    const auto& ipv4 = reinterpret_cast<const sockaddr_in&>(address.storage);
    end.ip = {0, 0, htonl(0xffff), ipv4.sin_addr.s_addr};
    end.port = ipv4.sin_port;
  } else {
    const auto& ipv6 = reinterpret_cast<const sockaddr_in6&>(address.storage);
    std::memcpy(end.ip.data(), &ipv6.sin6_addr, sizeof end.ip);
    end.port = ipv6.sin6_port;
    end.scope = ipv6.sin6_scope_id;
  }
  return end;
}

/// What the kernel knows of one end.
struct Owner {
  int state = 0;            ///< TCP_ESTABLISHED, …
  uid_t user = 0;           ///< of the process that has opened it
  std::uint64_t inode = 0;  ///< as fstat(2) has it; 0: no process has it open
};

/// Asks for one connection, in microseconds. Empty if it does not exist, or if this kernel has no such
/// interface.
std::optional<Owner> ask_kernel(const End& of, const End& other, int kernel) {
  struct {
    nlmsghdr header;
    inet_diag_req_v2 body;
  } question{};
  question.header.nlmsg_len = sizeof question;
  question.header.nlmsg_type = SOCK_DIAG_BY_FAMILY;
  question.header.nlmsg_flags = NLM_F_REQUEST;
  question.body.sdiag_family = of.is_ipv4() ? AF_INET : AF_INET6;
  question.body.sdiag_protocol = IPPROTO_TCP;
  question.body.idiag_states = ~0u;
  inet_diag_sockid& id = question.body.id;
  id.idiag_sport = of.port, id.idiag_dport = other.port;
  const std::size_t skipped = of.is_ipv4() ? 3 : 0;
  std::copy(of.ip.begin() + skipped, of.ip.end(), id.idiag_src);
  std::copy(other.ip.begin() + skipped, other.ip.end(), id.idiag_dst);
  id.idiag_if = of.scope;
  id.idiag_cookie[0] = id.idiag_cookie[1] = INET_DIAG_NOCOOKIE;
  alignas(nlmsghdr) char bytes[4096];
  while (recv(kernel, bytes, sizeof bytes, MSG_DONTWAIT) > 0) {  // an answer that was not read in time
  }
  if (::send(kernel, &question, sizeof question, 0) != sizeof question) return std::nullopt;
  const ssize_t n = recv(kernel, bytes, sizeof bytes, MSG_DONTWAIT);
  const auto& header = reinterpret_cast<const nlmsghdr&>(bytes);
  if (n < static_cast<ssize_t>(NLMSG_LENGTH(sizeof(inet_diag_msg))) ||
      header.nlmsg_type != SOCK_DIAG_BY_FAMILY)
    return std::nullopt;
  inet_diag_msg answer;
  std::memcpy(&answer, NLMSG_DATA(&header), sizeof answer);
  return Owner{answer.idiag_state, answer.idiag_uid, answer.idiag_inode};
}

std::string hex(unsigned value, int digits) {
  char text[16];
  std::snprintf(text, sizeof text, "%0*X", digits, value);
  return text;
}

/// As ask_kernel(), but in milliseconds: reads the list of all connections.
std::optional<Owner> read_proc(const End& of, const End& other, int /*kernel*/) {
  const auto text = [](const End& end, std::size_t skipped) {
    std::string words;
    for (std::size_t i = skipped; i < end.ip.size(); ++i) words += hex(end.ip[i], 8);
    return concat(words, ':', hex(ntohs(end.port), 4));
  };
  for (const char* name : {"/proc/thread-self/net/tcp", "/proc/thread-self/net/tcp6"}) {
    const bool ipv6 = std::string_view(name).ends_with('6');
    if (!ipv6 && !of.is_ipv4()) continue;
    const std::size_t skipped = ipv6 ? 0 : 3;
    const std::string wanted = concat(' ', text(of, skipped), ' ', text(other, skipped), ' ');
    std::ifstream list(name);
    for (std::string line; std::getline(list, line);) {
      const auto at = line.find(wanted);
      if (at == line.npos) continue;
      // state tx_queue:rx_queue timer:when retransmits uid timeout inode
      const auto words = words_of(std::string_view(line).substr(at + wanted.size()));
      if (words.size() < 7) continue;
      const auto state = parse_number<int>(words[0], 16);
      const auto user = parse_number<uid_t>(words[4]);
      const auto inode = parse_number<std::uint64_t>(words[6]);
      if (state && user && inode) return Owner{*state, *user, *inode};
    }
  }
  return std::nullopt;
}

SocketAddress peer_address(int socket) {
  SocketAddress there;
  there.size = sizeof there.storage;
  if (getpeername(socket, there.get(), &there.size) != 0) there.size = 0;
  return there;
}

}  // namespace

UniqueFd socket_to_kernel() {
  return UniqueFd(::socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_SOCK_DIAG));
}

bool is_of_this_user(int socket, int kernel) {
  if (is_unix_socket(socket)) {
    ucred peer{};
    socklen_t size = sizeof peer;
    return getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 && peer.uid == geteuid();
  }
  const SocketAddress address = peer_address(socket);
  struct stat self {};
  if (address.size == 0 || fstat(socket, &self) != 0) return false;
  const End here = end_at(local_address(socket)), there = end_at(address);
  UniqueFd own_kernel;
  if (kernel < 0) own_kernel = socket_to_kernel(), kernel = own_kernel.get();
  for (const auto owner_of : {ask_kernel, read_proc}) {
    // In this order: while this end is established, another process cannot have taken the other end's place.
    const auto other = owner_of(there, here, kernel), own = owner_of(here, there, kernel);
    if (!own || own->inode != self.st_ino) continue;  // not to be had in this way, or not of this namespace
    return own->state == TCP_ESTABLISHED && other && other->state == TCP_ESTABLISHED && other->inode != 0 &&
           other->user == geteuid();
  }
  return false;
}

bool is_of_this_host(int socket) {
  const SocketAddress address = peer_address(socket);
  if (is_unix_socket(socket) || address.size == 0 || address.loopback()) return true;
  const End there = end_at(address);
  if (there.is_ipv4() && ntohl(there.ip[3]) >> 24 == 127) return true;
  try {
    return std::ranges::any_of(interfaces(),
                               [&](const Interface& i) { return end_at(i.address).ip == there.ip; });
  } catch (const Error&) {
    return true;
  }
}

}  // namespace rz::net
