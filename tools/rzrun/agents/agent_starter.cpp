#include "tools/rzrun/agents/agent_starter.h"

#include <signal.h>

#include <algorithm>
#include <cctype>
#include <cstring>

#include "comm/bootstrap/secret.h"
#include "comm/core/environment.h"
#include "comm/core/error.h"
#include "comm/net/listening.h"
#include "comm/net/random.h"
#include "tools/rzrun/flags/starters.h"

namespace rz::rzrun {
namespace {

/// srun may wait for other steps, and a host that boots for its login.
constexpr std::chrono::seconds time_to_join{300}, time_until_named{10};
/// For the agents, once the starter has ended by itself.
constexpr std::chrono::seconds time_for_agents{2};
/// At the end: for the starter by itself, with a host that is lost or has not come, and after SIGTERM.
constexpr std::chrono::seconds time_to_exit{10}, time_if_lost{2}, time_after_sigterm{3};

constexpr std::chrono::milliseconds time_for_all_to_stop{500};

/// One line of Slurm without a plugin that binds, which needs no --cpu-bind=none.
constexpr std::string_view no_news = "cluster configuration lacks support for cpu binding";

/// At a free port of each address that other hosts may reach; loopback alone if there is none.
std::vector<UniqueFd> listen_for_agents() {
  auto addresses = net::reachable_addresses(environment().interface);
  if (addresses.empty())
    for (const net::Interface& i : net::interfaces())
      if (i.address.loopback()) addresses.push_back(i.address);
  require(!addresses.empty(), Errc::config, "this host has no address at which agents could connect");
  for (int i = 0; i < 10; ++i)
    if (auto listeners = net::listen_at(addresses, 0); !listeners.empty()) return listeners;
  fail(Errc::rendezvous, "no port is free on all addresses of this host");
}

/// Variables that a job of Slurm may have for its tasks, and that srun would apply to the agents, one a host:
/// they would get the share of one task.
void remove_variables_of_tasks() {
  for (const char* name : {"SRUN_CPUS_PER_TASK", "SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK",
                           "SLURM_NTASKS_PER_GPU", "SLURM_GPU_BIND"})
    ::unsetenv(name);
}

std::string addresses_of(const std::vector<UniqueFd>& listeners) {
  std::string text;
  for (const UniqueFd& l : listeners)
    text += concat(text.empty() ? "" : ",", net::local_address(l.get()).text());
  return text;
}

/// The secret of the agents, which find it by these variables: what the user has set for all hosts, or one of
/// this job alone.
SharedSecret secret_of_agents(Variables& variables) {
  ::unsetenv("RZ_SECRET_FD");  // of a launcher above this one
  if (secret_variable() != "RZ_SECRET" || has_value("RZ_SECRET")) return process_secret();
  variables.emplace_back("RZ_SECRET", net::random_hex() + net::random_hex());
  return std::make_shared<const net::Secret>(net::Secret::of_text(variables.back().second));
}

std::string names_of_hosts(const std::vector<const hosts::Host*>& all) {
  std::string names;
  for (const hosts::Host* h : all) names += concat(names.empty() ? "" : ", ", h->name);
  return names;
}

}  // namespace

bool blames(std::string_view line, const std::string& host) {
  const auto is_of_name = [&](std::size_t i) {  // a part of a longer name, or of an address
    const char c = i < line.size() ? line[i] : ' ';
    const bool inner = c == '.' && i + 1 < line.size() && line[i + 1] != ' ';
    return std::isalnum(static_cast<unsigned char>(c)) || c == '-' || c == '_' || inner;
  };
  const bool is_sentence = line.starts_with("ssh: "), is_table = line.starts_with("Node:");
  for (auto at = line.find(host); at != std::string_view::npos; at = line.find(host, at + 1)) {
    const auto end = at + host.size();
    const char before = at ? line[at - 1] : ' ';
    if (is_of_name(end) || (before != ' ' && before != '@')) continue;
    if (is_sentence || is_table || (end < line.size() && line[end] == ':')) return true;
  }
  return false;
}

AgentStarter::AgentStarter(const JobSpec& spec, HostLinks& links)
    : hosts_of_job_(spec.hosts),
      links_(links),
      out_(UniqueFd(), nullptr, UniqueFd(), ""),
      err_(UniqueFd(), nullptr, UniqueFd(), ""),
      join_by_(Deadline::after(time_to_join)),
      explain_at_(Deadline::after(time_until_named)) {
  auto listeners = listen_for_agents();
  Variables variables{{"RZ_AGENT", addresses_of(listeners)}, {"RZ_ENCRYPTION", environment().encryption}};
  listener_.emplace(std::move(listeners), access_by(secret_of_agents(variables)));
  if (spec.hosts.starter.kind == Starter::Kind::slurm) remove_variables_of_tasks();
  starter_ = hosts::Connector(starter_command(spec.hosts, spec.grace), variables);
  out_ = {std::move(starter_.out), &lines_, UniqueFd(), starter_.name + ": "};
  err_ = {std::move(starter_.err), &lines_, UniqueFd(), starter_.name + ": "};
  starter_.in.close();  // it reads nothing
}

AgentStarter::~AgentStarter() {
  for (HostLink& a : links_.all) a.stream.close();
  const auto ends_within = [&](std::chrono::seconds time) {
    const auto until = Deadline::after(time);
    do {
      out_.pump();  // it must not wait for a reader
      err_.pump();
      lines_.drop();
    } while (!starter_.process.wait(Deadline::after(std::chrono::milliseconds(5))) && !until.expired());
    return starter_.process.ended();
  };
  if (ends_within(links_.any_lost() || !missing().empty() ? time_if_lost : time_to_exit)) return;
  ::kill(starter_.process.pid(), SIGTERM);  // it ends its children by itself
  if (!ends_within(time_after_sigterm)) starter_.process.kill();
}

// ---- agents

/// mpirun gives an agent the number of its host, srun the name.
void AgentStarter::join(HostLink& a, const std::string& place) {
  int node = 0, first_rank = 0;
  for (const hosts::Host& h : hosts_of_job_.nodes) {
    if (place == (hosts_of_job_.starter.kind == Starter::Kind::slurm ? h.name : concat(node))) {
      const bool is_first = std::ranges::count(links_.all, h.name, &HostLink::host) == 0;
      require(is_first, Errc::io, "a second agent of host ", h.name);
      a.host = h.name;
      a.node = node;
      a.first_rank = first_rank;
      a.local_ranks = static_cast<int>(h.slots.size());
      if (h.filtered) a.slots = h.slots;
      return;
    }
    ++node;
    first_rank += static_cast<int>(h.slots.size());
  }
  fail(Errc::io, "an agent of a host that the job does not have: ", hosts::quoted(place));
}

bool AgentStarter::all_joined() {
  if (links_.all.size() != hosts_of_job_.nodes.size()) return false;
  links_.all.sort([](const HostLink& a, const HostLink& b) { return a.node < b.node; });
  return true;
}

/// The starter ends the agents that it reaches once it has lost a host, or when it is told to end. mpirun
/// prints why and sends SIGCONT, long before SIGTERM; a SIGCONT alone may come from anybody.
void AgentStarter::stop(HostLink& a, int signal) {
  if (signal == SIGCONT && (hosts_of_job_.starter.kind != Starter::Kind::openmpi || !has_complained_)) return;
  a.is_warned = true;
  a.is_stopping = signal != SIGCONT;
  if (!stopped_at_) stopped_at_ = Deadline::after(time_for_all_to_stop);
  if (signal != SIGCONT) stopped_by_ = signal;
}

/// Before the ranks of other hosts that miss those of the stopped agents are taken for the first failure.
void AgentStarter::explain_stop() {
  stopped_at_.reset();
  const auto is_left = [](const HostLink& a) { return a.lost.empty() && !a.is_warned; };
  if (std::ranges::none_of(links_.all, is_left)) {
    if (stopped_by_) stop_ = {stopped_by_, " from " + starter_.name};
    return;
  }
  for (HostLink& a : links_.all)
    if (is_left(a))
      links_.lose(a,
                  concat(starter_.name, " ends the agents of the other hosts, and does not reach its own"));
}

std::vector<const hosts::Host*> AgentStarter::missing() const {
  std::vector<const hosts::Host*> all;
  for (const hosts::Host& h : hosts_of_job_.nodes)
    if (std::ranges::count(links_.all, h.name, &HostLink::host) == 0) all.push_back(&h);
  return all;
}

// ---- the starter

void AgentStarter::append_descriptors(std::vector<pollfd>& wait) const {
  listener_->append_descriptors(wait);
  for (const int fd : {out_.fd(), err_.fd(), ended_ ? -1 : starter_.process.pidfd()})
    wait.push_back({fd, POLLIN, 0});
}

void AgentStarter::advance() {
  const double rate = missing().empty() ? net::AcceptRate::while_running : net::AcceptRate::while_starting;
  for (auto& c : listener_->advance(rate))
    links_.add(std::move(c.stream), c.address, AgentListener::time_to_prove);
  take_lines();
  watch();
  if (stopped_at_ && stopped_at_->expired()) explain_stop();
}

/// Its lines, of which rules and empty ones are left out.
void AgentStarter::take_lines() {
  out_.pump();
  err_.pump();
  if (lines_.pending().empty()) return;
  has_complained_ = has_complained_ || missing().empty();
  for (const std::string& line : parts_of(lines_.take(), '\n')) {
    const std::string_view text =
        std::string_view(line).substr(std::min(line.size(), starter_.name.size() + 2));
    if (text.find_first_not_of("- \t") == std::string_view::npos || text.ends_with(no_news)) continue;
    for (const hosts::Host& h : hosts_of_job_.nodes)
      if (blames(text.substr(text.find_first_not_of(" \t")), h.name)) blamed_.insert(h.name);
    links_.print(text.starts_with(starter_.name + ": ") ? std::string(text) : line);
  }
}

/// It is itself the reason of the end if a signal killed it; if it exits, that is because of an agent, which
/// is found first.
void AgentStarter::watch() {
  if (!ended_ && starter_.process.ended()) {
    ended_ = exit_status_of_wait(starter_.process.status());
    lost_at_ = Deadline::after(ended_->signal ? std::chrono::seconds(0) : time_for_agents);
    out_.finish();
    err_.finish();
    take_lines();
  }
  if (ended_ && lost_at_->expired() && !links_.any_lost())
    lose_all(concat(starter_.name, " ", describe(*ended_)));
  const auto missing_hosts = missing();
  if (missing_hosts.empty() || ended_) return;
  if (join_by_.expired())
    lose_all(concat("no agent of rzrun within ", time_to_join.count(), " s"));
  else if (explain_at_.expired()) {
    links_.print(concat("waiting for ", starter_.name, ", which has not started the agents of ",
                        names_of_hosts(missing_hosts)));
    explain_at_ = Deadline::after(time_to_join * 2);
  }
}

/// All hosts; if some have not come, these, or those among them that its lines blame.
void AgentStarter::lose_all(const std::string& why) {
  auto lost = missing();
  if (std::ranges::any_of(lost, [&](const auto* h) { return blamed_.contains(h->name); }))
    std::erase_if(lost, [&](const auto* h) { return !blamed_.contains(h->name); });
  if (lost.empty()) {
    for (HostLink& a : links_.all)
      if (a.lost.empty()) links_.lose(a, why);
    return;
  }
  const hosts::Host& first = *lost.front();  // the others are named with it
  lost.erase(lost.begin());
  HostLink& a = links_.add({UniqueFd(), UniqueFd()}, first.name, time_for_agents);
  for (const hosts::Host* h = hosts_of_job_.nodes.data(); h != &first; ++h) {
    ++a.node;
    a.first_rank += static_cast<int>(h->slots.size());
  }
  links_.lose(a, concat(why, " before an agent of rzrun began",
                        lost.empty() ? "" : " there or on " + names_of_hosts(lost)));
}

}  // namespace rz::rzrun
