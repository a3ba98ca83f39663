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

constexpr std::chrono::milliseconds other_secret_patience{2000}, max_connect_pause{1000},
    time_to_connect{3800};

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
    : listeners_(std::move(listeners)),
      door_({.key = agent_key(access.secret),
             .group = group_of_agents(),
             .encryption = access.encryption,
             .members = max_of_a_host,
             .time_to_prove = time_to_prove}) {
  for (const UniqueFd& l : listeners_) door_.add(l.get());
}

std::vector<AgentListener::Connection> AgentListener::advance(double per_second) {
  std::vector<Connection> proven;
  for (net::Door::Arrival& a : door_.advance(per_second)) {
    net::set_tcp_options(a.socket.get());
    const std::string here = net::local_address(a.socket.get()).host();
    proven.push_back({proven_stream(std::move(a.socket), a.authentication), a.from.host(), here});
  }
  return proven;
}

std::string AgentListener::places() const {
  std::string text;
  for (const UniqueFd& l : listeners_)
    text += concat(text.empty() ? "" : ", ", net::local_address(l.get()).text());
  return text;
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
