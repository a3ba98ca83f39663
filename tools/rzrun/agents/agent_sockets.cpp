#include "tools/rzrun/agents/agent_sockets.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <thread>

#include "comm/bootstrap/secret.h"
#include "comm/core/environment.h"
#include "comm/core/error.h"

namespace rz::rzrun {
namespace {

using Status = net::Authentication::Status;

constexpr std::chrono::milliseconds other_secret_patience{2000}, max_connect_pause{1000},
    time_to_connect{3800}, out_of_descriptors{100};

/// Agents that connect at once from one address: containers, or hosts behind one router.
constexpr std::size_t expected_of_a_host = 8;

net::AuthenticationKey agent_key(const SharedSecret& secret) {
  return {secret.get(), net::Purpose::agent, ""};
}

/// Equal for all, so that two ends with different secrets find that they are both rzrun's.
std::uint64_t group_of_agents() { return net::fingerprint("agents of rzrun"); }

/// The frames of a socket whose two ends have proved the secret: the one place where both ends make them.
FrameStream proven_stream(UniqueFd socket, net::Authentication& end) {
  return FrameStream(net::Stream(std::move(socket), end.take_tls()));
}

}  // namespace

AgentAccess process_access() { return access_by(process_secret()); }

AgentAccess access_by(SharedSecret secret) {
  const auto encryption = secret ? net::parse_encryption(environment().encryption) : net::Encryption::off;
  return {std::move(secret), encryption};
}

// ---- the end of rzrun

AgentListener::AgentListener(std::vector<UniqueFd> listeners, const AgentAccess& access)
    : listeners_(std::move(listeners)), key_(agent_key(access.secret)), encryption_(access.encryption) {}

std::vector<AgentListener::Connection> AgentListener::advance(double per_second) {
  if (rests_ && rests_->expired()) rests_.reset();
  std::vector<Connection> proven;
  // Those that are there first, so that later ones cannot displace them.
  for (auto s = unproven_.begin(); s != unproven_.end();) {
    const auto next = std::next(s);
    if (!read(*s, proven)) drop(s);
    s = next;
  }
  for (const UniqueFd& listener : listeners_) {
    if (rests_) break;
    const auto rest = accept_rate_.rest(per_second);
    if (rest.count())
      rests_ = Deadline::after(rest);
    else
      accept(listener.get(), proven);
  }
  return proven;
}

/// False once it is proven, and added to `proven`, or has to be dropped.
bool AgentListener::read(Stranger& s, std::vector<Connection>& proven) {
  while (s.authentication.status() == Status::pending) {  // the hello and the proof may both be there
    const bool had_hello = s.authentication.has_hello();
    s.authentication.advance(s.socket.get());
    if (had_hello == s.authentication.has_hello()) break;
  }
  if (s.authentication.status() == Status::proven) {
    accept_rate_.proven();
    const std::string here = net::local_address(s.socket.get()).host();
    proven.push_back({proven_stream(std::move(s.socket), s.authentication), s.from.host(), here});
  }
  return s.authentication.status() == Status::pending && !s.until.expired();
}

void AgentListener::drop(std::list<Stranger>::iterator s) {
  if (s->authentication.status() != Status::proven) strangers_.count(s->from, s->authentication);
  unproven_.erase(s);
}

void AgentListener::accept(int listener, std::vector<Connection>& proven) {
  for (int i = 0; i < net::max_accepts_per_poll && !rests_; ++i) {
    net::SocketAddress from;
    UniqueFd socket = net::accept_connection(listener, from);
    if (!socket) {
      if (errno == EAGAIN || errno == EWOULDBLOCK) return;
      if (errno != EMFILE && errno != ENFILE && errno != ENOBUFS && errno != ENOMEM) continue;
      if (!unproven_.empty())
        drop_one(proven);
      else
        rests_ = Deadline::after(out_of_descriptors);
      continue;
    }
    accept_rate_.accepted();
    net::set_tcp_options(socket.get());
    unproven_.push_back({std::move(socket),
                         net::Authentication::server(key_, 0, group_of_agents(), encryption_), from,
                         Deadline::after(time_to_prove)});
    if (!read(unproven_.back(), proven)) drop(std::prev(unproven_.end()));  // its hello may be there
    if (unproven_.size() > max_unproven) drop_one(proven);
  }
}

void AgentListener::drop_one(std::vector<Connection>& proven) {
  std::vector<net::Unproven> all;
  for (const Stranger& s : unproven_) all.push_back({net::source_of(s.from), s.authentication.has_hello()});
  const auto dropped =
      std::next(unproven_.begin(), static_cast<std::ptrdiff_t>(net::choose_dropped(all, expected_of_a_host)));
  read(*dropped, proven);  // its proof may have come: the agent then takes the connection for established
  drop(dropped);
}

std::string AgentListener::places() const {
  std::string text;
  for (const UniqueFd& l : listeners_)
    text += concat(text.empty() ? "" : ", ", net::local_address(l.get()).text());
  return text;
}

void AgentListener::append_descriptors(std::vector<pollfd>& wait) const {
  for (const UniqueFd& listener : listeners_) wait.push_back({rests_ ? -1 : listener.get(), POLLIN, 0});
  for (const Stranger& s : unproven_) wait.push_back({s.socket.get(), POLLIN, 0});
}

// ---- the end of an agent

FrameStream connect_to_rzrun(const net::HostPort& where, const AgentAccess& access, Deadline deadline,
                             const std::function<void(const std::string& why)>& waits) {
  const net::AuthenticationKey key = agent_key(access.secret);
  std::string why = "no address", refusal;  // of the last try, and of the last one that a listener took
  std::optional<Deadline> other_secret;
  for (auto pause = std::chrono::milliseconds(50);; pause = std::min(pause * 2, max_connect_pause)) {
    try {
      for (const net::SocketAddress& address : net::resolve(where)) {
        const auto left = std::min<Deadline::Clock::duration>(deadline.remaining(), time_to_connect);
        UniqueFd socket = net::connect_in_tries(address, Deadline::after(left));
        if (!socket) {
          why = concat("connect to ", address.text(), ": ", std::strerror(errno));
          continue;
        }
        auto end = net::Authentication::client(key, {.group = group_of_agents()}, access.encryption);
        try {
          end.complete(socket.get(), Deadline::after(AgentListener::time_to_prove));
          return proven_stream(std::move(socket), end);
        } catch (const Error& e) {
          why = refusal = concat(address.text(), " took the connection, but ", e.what());
          const bool is_other = end.refusal() == net::Authentication::Refusal::other_secret;
          if (is_other && !other_secret) other_secret = Deadline::after(other_secret_patience);
          require(!is_other || !other_secret->expired(), Errc::mismatch, "the rzrun at ", address.text(),
                  " is of another job or user: ", end.reason());
          require(end.refusal() != net::Authentication::Refusal::other_encryption, Errc::mismatch,
                  "the rzrun at ", address.text(), " is of this job, but ", end.reason());
        }
      }
    } catch (const Error& e) {
      if (e.code() == Errc::mismatch) throw;
      why = e.what();
    }
    const bool hides = !refusal.empty() && refusal != why;
    require(!deadline.expired(), Errc::rendezvous, why, hides ? "; before that " + refusal : "");
    waits(why);
    std::this_thread::sleep_for(pause);
  }
}

}  // namespace rz::rzrun
