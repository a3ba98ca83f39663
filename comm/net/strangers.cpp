#include "comm/net/strangers.h"

#include <netinet/in.h>

#include <algorithm>
#include <cstring>
#include <vector>

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

UniqueFd accept_connection(int listener, SocketAddress& from) {
  from.size = sizeof from.storage;
  return UniqueFd(accept4(listener, from.get(), &from.size, SOCK_NONBLOCK | SOCK_CLOEXEC));
}

std::size_t choose_dropped(std::span<const Unproven> all, std::size_t expected) {
  std::vector<Source> hosts;
  for (const Unproven& u : all) hosts.push_back(u.source);
  std::ranges::sort(hosts);
  std::vector<std::size_t> beyond;  // the number of its host, if that is more than expected
  for (const Unproven& u : all) {
    const std::size_t n = std::ranges::equal_range(hosts, u.source).size();
    beyond.push_back(n > expected ? n : 0);
  }
  const std::size_t most = *std::ranges::max_element(beyond);
  std::size_t number[2] = {0, 0};  // without a hello, with one
  for (std::size_t i = 0; i < all.size(); ++i)
    if (beyond[i] == most) ++number[all[i].has_hello];
  const bool chosen_kind = number[1] > number[0];
  std::size_t chosen = 0;
  while (beyond[chosen] != most || all[chosen].has_hello != chosen_kind) ++chosen;
  return chosen;
}

void AcceptRate::proven() { left_ = std::min(left_ + 1, at_once_); }

Deadline::Clock::duration AcceptRate::rest(double per_second, Time now) {
  if (counted_ != Time{})
    left_ = std::min(left_ + std::chrono::duration<double>(now - counted_).count() * per_second, at_once_);
  counted_ = now;
  const std::chrono::duration<double> rest(std::max(0.0, (max_accepts_per_poll - left_) / per_second));
  return std::chrono::ceil<Deadline::Clock::duration>(rest);
}

void Strangers::count(const SocketAddress& from, const Authentication& end) noexcept {
  if (!end.has_proof()) {
    ++refused_;
    of_other_groups_ += end.refusal() == Authentication::Refusal::other_group;
    of_other_users_ += end.refusal() == Authentication::Refusal::other_user;
  }
  try {
    const auto family = from.storage.ss_family;
    const std::string where = family == AF_INET || family == AF_INET6 ? from.host() : "";
    const std::string name = end.claim().size ? concat("rank ", end.claim().rank) : "a member";
    const std::string member = concat(name, where.empty() ? "" : " at " + where);
    if (end.has_proof()) {
      other_member_ = concat(member, " proved the secret of this job, but ", end.reason());
      return;
    }
    if (end.refusal() == Authentication::Refusal::other_user) {
      of_other_user_ = end.has_hello()
                           ? concat("; the last names itself ", member, " of this job: if it is, ",
                                    Authentication::remedy_of_other_user)
                           : "";
      return;
    }
    if (!where.empty()) last_ = where;
    if (end.refusal() == Authentication::Refusal::other_secret) with_other_secret_ = member;
  } catch (const std::exception&) {  // the number alone
  }
}

std::string Strangers::sentence() const {
  const auto refused = [](std::uint64_t number, const char* which) {
    return concat(number, number == 1 ? " connection " : " connections ", which,
                  number == 1 ? " was refused" : " were refused");
  };
  std::string all;
  if (const std::uint64_t number = refused_ - of_other_users_)
    all = concat(refused(number, "that did not prove the secret of this job"),
                 last_.empty() ? "" : ", the last from " + last_,
                 with_other_secret_.empty() ? ""
                                            : concat("; one of them names itself ", with_other_secret_,
                                                     " of this job: if it is, its RZ_SECRET, RZ_SECRET_FILE, "
                                                     "~/.config/ringzero/secret or RZ_INSECURE differs"));
  if (of_other_users_)
    all += concat(all.empty() ? "" : "; ", refused(of_other_users_, "of another user"), of_other_user_);
  return all;
}

std::string Strangers::text() const {
  return concat(other_member_.empty() ? "" : "; " + other_member_, refused_ ? "; " + sentence() : "");
}

}  // namespace rz::net
