#include "tools/rzrun/agents/agent_group.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>

#include "comm/core/error.h"
#include "tools/rzrun/flags/flags.h"
#include "tools/rzrun/hosts/hosts.h"

namespace rz::rzrun {
namespace {

/// Variables that ranks on other hosts get from this process: all but those of a login, of a session and of
/// one machine, such as HOME and TMPDIR.
Variables forwarded_environment() {
  static constexpr std::string_view own[] = {
      "HOME",    "USER",   "LOGNAME",   "SHELL", "MAIL",     "HOSTNAME",     "HOST",
      "PWD",     "OLDPWD", "SHLVL",     "_",     "TMPDIR",   "TERM",         "TTY",
      "DISPLAY", "TMUX",   "TMUX_PANE", "STY",   "WINDOWID", "RZ_SECRET_FD", "RZ_FLIGHT_FD"};
  static constexpr std::string_view own_prefixes[] = {"SSH_", "XDG_", "DBUS_", "WAYLAND_"};
  Variables found;
  for (char** v = environ; *v; ++v) {
    const std::string_view text = *v;
    const auto equals = text.find('=');
    if (equals == std::string_view::npos) continue;
    const std::string_view name = text.substr(0, equals);
    const auto begins = [&](std::string_view prefix) { return name.starts_with(prefix); };
    if (std::ranges::count(own, name) || std::ranges::any_of(own_prefixes, begins)) continue;
    found.emplace_back(name, text.substr(equals + 1));
  }
  return found;
}

}  // namespace

AgentGroup::AgentGroup(const JobSpec& spec, Console& out, Console& err)
    : hosts_of_job_(spec.hosts),
      links_(out, err, [this](HostLink& link, const Frame& frame) { decide(link, frame); }) {
  if (spec.hosts.starter.kind != Starter::Kind::ssh) {
    starter_.emplace(spec, links_);
    return;
  }
  int node = 0, first_rank = 0;
  for (const hosts::Host& h : spec.hosts.nodes) {
    HostLink& link = links_.start(h.name, agent_command(spec.hosts.starter, h.name));
    link.node = node++;
    link.first_rank = first_rank;
    link.local_ranks = static_cast<int>(h.slots.size());
    if (h.filtered) link.slots = h.slots;
    first_rank += link.local_ranks;
  }
}

/// An agent has begun, or it has received a signal to end. SIGCONT counts as one: mpirun sends it first.
void AgentGroup::decide(HostLink& link, const Frame& frame) {
  WireReader reader(frame.payload);
  if (frame.kind == Frame::Kind::hello) {
    std::string place;
    reader(link.addresses, place, link.free_port, link.why_no_port);
    require(!link.is_ready, Errc::io, "an agent that begins twice");
    if (starter_) starter_->join(link, place);
    link.is_ready = true;
  } else if (frame.kind == Frame::Kind::stop) {
    int signal = 0;
    reader(signal);
    if (starter_)
      starter_->stop(link, signal);
    else if (signal != SIGCONT)
      stop_ = {signal, " on host " + link.host};
  }
}

void AgentGroup::start(const Job& job, const std::function<bool()>&) {
  job_ = job;
  job_.output.prefix = true;  // whole lines, as each host sends them
  if (starter_) job_.folder = std::filesystem::current_path();
  for (const HostLink& a : links_.all)
    require(a.lost.empty(), Errc::peer_lost, "host ", a.host, " is gone: ", a.lost);
  links_.begin_job(true);
  send_jobs();
}

/// As given, or by the addresses of the hosts; empty if there is none.
std::string AgentGroup::master_address() const {
  if (!hosts_of_job_.master_addr.empty()) return hosts_of_job_.master_addr;
  std::vector<std::vector<std::string>> addresses;
  for (const HostLink& a : links_.all) addresses.push_back(a.addresses);
  return hosts::master_address(addresses);
}

/// Agents begin only once nothing can fail any more: one that has got no job never reports its end.
void AgentGroup::send_jobs() {
  if (!links_.is_waiting() || !std::ranges::all_of(links_.all, &HostLink::is_ready) ||
      (starter_ && !starter_->all_joined()))
    return;
  const HostLink& first = links_.all.front();
  job_.nodes = static_cast<int>(links_.all.size());
  job_.master_addr = master_address();
  job_.master_port = hosts_of_job_.master_port ? hosts_of_job_.master_port : first.free_port;
  if (job_.master_addr.empty() || !job_.master_port) {
    links_.fail({2, concat("host ", first.host,
                           job_.master_addr.empty()
                               ? " has no address but loopback that other hosts could use; set --master-addr"
                               : concat(": ", first.why_no_port))});
    return links_.signal_all(SIGTERM);
  }
  // srun has exported them, beside those which Slurm sets on each host.
  const bool is_slurm = hosts_of_job_.starter.kind == Starter::Kind::slurm;
  const Variables variables = is_slurm ? Variables() : forwarded_environment();
  links_.begin_job(false);
  for (HostLink& a : links_.all) links_.send_job(a, job_, variables);
}

std::optional<StopRequest> AgentGroup::stop_request() {
  if (starter_ && !stop_) stop_ = starter_->stop_request();
  return std::exchange(stop_, {});
}

void AgentGroup::append_descriptors(std::vector<pollfd>& wait) const {
  links_.append_descriptors(wait);
  if (starter_) starter_->append_descriptors(wait);
}

std::vector<RankEnd> AgentGroup::advance() {
  if (starter_) starter_->advance();
  links_.advance();
  send_jobs();
  return links_.take_ends();
}

bool AgentGroup::signal_handlers(int signal) {
  links_.signal_handlers(signal);
  return true;  // an agent whose ranks have no handler reports that
}

}  // namespace rz::rzrun
