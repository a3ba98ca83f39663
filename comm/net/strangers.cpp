#include "comm/net/strangers.h"

#include <netinet/in.h>

#include <algorithm>
#include <cstring>
#include <map>

#include "comm/core/error.h"

namespace rz::net {

Source source_of(const SocketAddress& address) {
  Source source{};
  if (address.storage.ss_family == AF_INET)
    std::memcpy(source.data(), &reinterpret_cast<const sockaddr_in&>(address.storage).sin_addr, 4);
  if (address.storage.ss_family == AF_INET6) {
    const auto& ip = reinterpret_cast<const sockaddr_in6&>(address.storage).sin6_addr;
    const bool is_ipv4 = IN6_IS_ADDR_V4MAPPED(&ip);
    std::memcpy(source.data(), ip.s6_addr + (is_ipv4 ? 12 : 0), is_ipv4 ? 4 : 8);
  }
  return source;
}

UniqueFd accept_connection(int listener, Source& source) {
  SocketAddress from;
  from.size = sizeof from.storage;
  UniqueFd socket(accept4(listener, from.get(), &from.size, SOCK_NONBLOCK | SOCK_CLOEXEC));
  if (socket) source = source_of(from);
  return socket;
}

std::size_t choose_dropped(std::span<const Unproven> all) {
  const bool some_without = std::ranges::any_of(all, [](const Unproven& u) { return !u.has_hello; });
  const auto may_go = [&](const Unproven& u) { return !some_without || !u.has_hello; };
  std::map<Source, std::size_t> of_host;
  for (const Unproven& u : all) of_host[u.source] += may_go(u);
  std::size_t chosen = 0, largest = 0;
  for (std::size_t i = 0; i < all.size(); ++i)
    if (may_go(all[i]) && of_host[all[i].source] > largest) largest = of_host[all[i].source], chosen = i;
  return chosen;
}

void Strangers::count(int socket, const Authentication& end) noexcept {
  ++refused_;
  try {
    SocketAddress from;
    from.size = sizeof from.storage;
    if (getpeername(socket, from.get(), &from.size) == 0 && from.storage.ss_family != AF_UNIX)
      last_ = from.host();
    if (end.refusal() == Authentication::Refusal::other_secret)
      with_other_secret_ = concat("rank ", end.claim().rank, last_.empty() ? "" : " at " + last_);
  } catch (const std::exception&) {  // the number alone
  }
}

std::string Strangers::text() const {
  if (!refused_) return "";
  return concat("; ", refused_,
                refused_ == 1 ? " connection that did not prove the secret of this job was refused"
                              : " connections that did not prove the secret of this job were refused",
                last_.empty() ? "" : ", the last from " + last_,
                with_other_secret_.empty() ? ""
                                           : concat("; one of them names itself ", with_other_secret_,
                                                    " of this job: if it is, its RZ_SECRET, RZ_SECRET_FILE, "
                                                    "~/.config/ringzero/secret or RZ_INSECURE differs"));
}

}  // namespace rz::net
