#include "tools/rzrun/agents/agent_group.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "comm/core/error.h"
#include "tools/rzrun/agents/connector.h"
#include "tools/rzrun/agents/wire.h"
#include "tools/rzrun/flags/starters.h"
#include "tools/rzrun/hosts/hosts.h"
#include "tools/rzrun/ranks/processes.h"

namespace rz::rzrun {
namespace {

constexpr std::chrono::seconds time_to_start{60};
/// So long a connection that has ended may take to give its reason, and agents to end when they are not
/// needed.
constexpr std::chrono::seconds time_to_end{2};

}  // namespace

AgentGroup::AgentGroup(const Hosts& hosts, Console& out, Console& err)
    : job_hosts_(hosts), stdout_(out), stderr_(err) {
  int first_rank = 0;
  for (int node = 0; node < static_cast<int>(hosts.nodes.size()); ++node) {
    start_agent(node, first_rank);
    first_rank += agents_.back().local_ranks;
  }
}

void AgentGroup::start_agent(int node, int first_rank) {
  const hosts::Host& host = job_hosts_.nodes[static_cast<std::size_t>(node)];
  const auto words = agent_command(job_hosts_.starter, host.name);
  Connector c = start_connector(words);
  agents_.push_back({.host = host.name,
                     .connector = hosts::is_this_host(host.name) ? "its agent" : words.front(),
                     .node = node,
                     .first_rank = first_rank,
                     .local_ranks = static_cast<int>(host.slots.size()),
                     .slots = host.filtered ? host.slots : std::vector<int>(),
                     .pid = c.pid,
                     .pidfd = std::move(c.pidfd),
                     .stream = {std::move(c.out), std::move(c.in)},
                     .errors = {std::move(c.err), nullptr, UniqueFd(), concat("host ", host.name, ": ")},
                     .ready_by = Deadline::after(time_to_start)});
  agents_.back().errors.set_console(&agents_.back().error_lines);
}

AgentGroup::HostLink& AgentGroup::add(FrameStream stream, const std::string& address,
                                      std::chrono::seconds time_to_begin) {
  agents_.push_back({.host = address,
                     .connector = "its rzrun",
                     .stream = std::move(stream),
                     .errors = {UniqueFd(), nullptr, UniqueFd(), ""},
                     .ready_by = Deadline::after(time_to_begin)});
  return agents_.back();
}

AgentGroup::~AgentGroup() {
  for (HostLink& a : agents_) a.stream.close();
  std::erase_if(agents_, [](const HostLink& a) { return a.pid < 0; });
  for (const auto end = Deadline::after(time_to_end); !end.expired();) {
    std::erase_if(agents_, [](const HostLink& a) { return ::waitpid(a.pid, nullptr, WNOHANG) != 0; });
    if (agents_.empty()) return;
    ::usleep(5000);
  }
  for (HostLink& a : agents_) {
    ::kill(-a.pid, SIGKILL);
    ::waitpid(a.pid, nullptr, 0);
  }
}

void AgentGroup::start(const Job& job, const std::function<bool()>&) {
  job_ = job;
  job_.output.prefix = true;  // whole lines, as each host sends them
  for (HostLink& a : agents_) require(a.lost.empty(), Errc::peer_lost, "host ", a.host, " is gone: ", a.lost);
  is_pending_ = true;
  is_killed_ = false;
  send_jobs();
}

/// Agents begin only once nothing can fail any more: one that has got no job never reports its end.
void AgentGroup::send_jobs() {
  if (!is_pending_ || !std::ranges::all_of(agents_, &HostLink::is_ready) || !all_have_joined()) return;
  job_.nodes = static_cast<int>(agents_.size());
  job_.master_addr = job_hosts_.master_addr;
  if (job_.master_addr.empty()) {
    std::vector<std::vector<std::string>> addresses;
    for (const HostLink& a : agents_) addresses.push_back(a.addresses);
    job_.master_addr = hosts::master_address(addresses);
  }
  if (job_.master_addr.empty()) {
    failure_ = {2, concat("host ", agents_.front().host,
                          " has no address but loopback that other hosts could use; set --master-addr")};
    return signal_all(SIGTERM);
  }
  const HostLink& first = agents_.front();
  job_.master_port = job_hosts_.master_port ? job_hosts_.master_port : first.free_port;
  if (!job_.master_port) {
    failure_ = {2, concat("host ", first.host, ": ", first.why_no_port)};
    return signal_all(SIGTERM);
  }
  // srun has exported them, beside those which Slurm sets on each host.
  const Variables variables =
      job_hosts_.starter.kind == Starter::Kind::slurm ? Variables() : forwarded_environment();
  is_pending_ = false;
  for (HostLink& a : agents_) send_job(a, variables);
}

void AgentGroup::send_job(HostLink& a, const Variables& variables) {
  Job job = job_;
  job.host = a.host;
  job.slots = a.slots;
  job.node = a.node;
  job.first_rank = a.first_rank;
  job.local_ranks = a.local_ranks;
  a.stream.send(Frame::Kind::job, pack_job(job, variables));
  for (int r = 0; r < a.local_ranks; ++r) a.running.insert(a.first_rank + r);
  a.is_idle = false;
  a.left = 0;
  a.stream.flush();
}

void AgentGroup::append_descriptors(std::vector<pollfd>& wait) const {
  for (const HostLink& a : agents_) {
    a.stream.append_descriptors(wait);
    wait.push_back({a.errors.fd(), POLLIN, 0});
    wait.push_back({a.lost.empty() && !a.lost_at ? a.pidfd.get() : -1, POLLIN, 0});
  }
}

std::vector<RankEnd> AgentGroup::reap() {
  own_stop_.look();
  const bool beat = next_beat_.expired();
  if (beat) next_beat_ = Deadline::after(Silence::beat_time);
  for (HostLink& a : agents_) {
    if (!a.lost.empty()) continue;
    receive(a);
    if (beat) a.stream.send(Frame::Kind::beat);
    a.stream.flush();
    watch(a);
  }
  send_jobs();
  std::ranges::stable_partition(ends_, [](const RankEnd& e) { return e.status.signal || !e.lost.empty(); });
  return std::exchange(ends_, {});
}

void AgentGroup::receive(HostLink& a) {
  a.errors.pump();
  a.stream.receive();
  try {
    if (const auto text = a.stream.parser.text_before()) a.banner += *text;
    while (const auto frame = a.stream.parser.next()) handle(a, *frame);
  } catch (const Error& e) {
    lose(a, one_line(e));
  }
  collect_lines(a);
}

/// Whole lines of what the connecting process and a shell on the host have printed.
void AgentGroup::collect_lines(HostLink& a) {
  if (a.is_ready || !a.lost.empty()) a.banner += a.banner.empty() ? "" : "\n";
  for (auto end = a.banner.find('\n'); end != std::string::npos; end = a.banner.find('\n')) {
    if (end > 0) messages_.push_back(concat("host ", a.host, ": ", a.banner.substr(0, end)));
    a.banner.erase(0, end + 1);
  }
  if (a.error_lines.pending().empty()) return;
  for (const std::string& line : parts_of(a.error_lines.take(), '\n'))
    if (!line.empty()) messages_.push_back(line);
}

void AgentGroup::handle(HostLink& a, const Frame& frame) {
  a.silence.end();
  WireReader reader(frame.payload);
  std::int64_t number = 0;
  std::string text;
  switch (frame.kind) {
    case Frame::Kind::hello:
      reader(a.addresses, text, a.free_port, a.why_no_port);
      require(!a.is_ready, Errc::io, "an agent that begins twice");
      take_place(a, text);
      a.is_ready = true;
      break;
    case Frame::Kind::output:
      if (frame.payload.empty()) break;
      (frame.payload.front() == 2 ? stderr_ : stdout_).write(std::string_view(frame.payload).substr(1));
      a.not_accepted += frame.payload.size();
      break;
    case Frame::Kind::exit: {
      RankEnd end = unpack_end(frame.payload);
      end.host = a.host;
      a.running.erase(end.rank);
      if (!a.is_stopping) ends_.push_back(std::move(end));
      break;
    }
    case Frame::Kind::start_failure:
      failure_.emplace();
      reader(failure_->status, failure_->text);
      failure_->text = concat("host ", a.host, ": ", failure_->text);
      break;
    case Frame::Kind::message:
      messages_.push_back(concat("host ", a.host, ": ", frame.payload));
      break;
    case Frame::Kind::left:
      reader(number);
      a.left = static_cast<std::size_t>(number);
      break;
    case Frame::Kind::idle:
      reader(a.free_port, a.why_no_port);
      a.running.clear();
      a.left = 0;
      a.is_idle = true;
      break;
    case Frame::Kind::join:
      JoinRequest::fields(reader, a.request);
      join(a);
      break;
    case Frame::Kind::stop:
      reader(number);
      stop(a, static_cast<int>(number));
      break;
    case Frame::Kind::leave:
      reader(a.leaves_by);
      break;
    case Frame::Kind::suspended:
      a.silence.announce();
      break;
    default:
      break;
  }
}

void AgentGroup::stop(HostLink& a, int signal) {
  if (signal != SIGCONT) stop_ = {signal, " on host " + a.host};
}

/// Finds that a host is lost.
void AgentGroup::watch(HostLink& a) {
  if (!a.lost.empty()) return;
  if (a.is_stopping && a.stream.ended()) {
    a.running.clear();
    a.left = 0;
    a.is_idle = true;
  }
  if (a.pid < 0 && a.stream.ended() && !a.is_stopping) return lose(a, why_ended(a));
  pollfd ended{a.pidfd.get(), POLLIN, 0};
  if (!a.lost_at && (a.stream.ended() || ::poll(&ended, 1, 0) > 0)) a.lost_at = Deadline::after(time_to_end);
  if (a.lost_at && ((a.stream.ended() && ::poll(&ended, 1, 0) > 0) || a.lost_at->expired()))
    return lose(a, why_ended(a));
  if (a.is_ready && a.silence.too_long())
    return lose(a, concat("no sign of its agent for ", Silence::limit.count(), " s"));
  if (!a.is_ready && a.ready_by.expired())
    lose(a, concat("no agent of rzrun within ", time_to_start.count(), " s"));
}

std::string AgentGroup::why_ended(HostLink& a) {
  if (const char* name = a.leaves_by ? sigabbrev_np(a.leaves_by) : nullptr) return concat("SIG", name);
  if (a.pid < 0) return a.stream.why_ended();
  int status = 0;
  if (::waitpid(a.pid, &status, WNOHANG) == 0) return concat(a.connector, " has closed the connection");
  const std::string text = concat(a.connector, " ", describe(exit_status_of_wait(status)));
  return a.is_ready ? text : concat(text, " before an agent of rzrun began");
}

void AgentGroup::lose(HostLink& a, const std::string& why) {
  a.lost = why;
  a.stream.close();
  if (a.pid > 0) ::kill(-a.pid, SIGKILL);
  a.errors.finish();
  collect_lines(a);
  // After a stop of this process that they did not wait out, the hosts have ended for that alone.
  if (const std::string own = own_stop_.text(); !own.empty() && !a.is_idle) {
    if (!failure_) failure_ = {255, own};
  } else if (!a.is_idle || is_pending_)
    ends_.push_back({.rank = a.first_rank,
                     .status = {255, 0, false},
                     .host = a.host,
                     .lost = why,
                     .has_left = a.leaves_by != 0,
                     .ranks = std::max(1, a.local_ranks)});
  a.running.clear();
  a.left = 0;
  a.is_idle = true;
  // A host that never came up leaves the others without a job.
  if (is_pending_) signal_all(SIGTERM);
}

void AgentGroup::forward_output() {
  for (HostLink& a : agents_) {
    if (a.not_accepted == 0 || stdout_.full() || stderr_.full()) continue;
    a.stream.send(Frame::Kind::accepted, with_number(static_cast<int>(std::exchange(a.not_accepted, 0))));
    for (const auto& [console, number] : {std::pair(&stdout_, 1), std::pair(&stderr_, 2)})
      if (console->error() == EPIPE) a.stream.send(Frame::Kind::output_closed, with_number(number));
  }
}

std::string AgentGroup::why_no_restart() const {
  const auto lost = std::ranges::find_if(agents_, [](const HostLink& a) { return !a.lost.empty(); });
  return lost == agents_.end() ? "" : "a host is gone";
}

int AgentGroup::size() const {
  int sum = 0;
  for (const HostLink& a : agents_) sum += a.local_ranks;
  return sum;
}

std::vector<int> AgentGroup::running() const {
  std::vector<int> all;
  for (const HostLink& a : agents_) all.insert(all.end(), a.running.begin(), a.running.end());
  return all;
}

bool AgentGroup::any_process_alive() const {
  return is_pending_ || !ends_.empty() || !std::ranges::all_of(agents_, &HostLink::is_idle);
}

std::size_t AgentGroup::leftovers() const {
  std::size_t sum = 0;
  for (const HostLink& a : agents_) sum += a.left;
  return sum;
}

void AgentGroup::signal_all(int signal) {
  if (signal == SIGKILL && std::exchange(is_killed_, true)) return;  // agents repeat it
  for (HostLink& a : agents_) {
    if (is_pending_) {
      a.running.clear();
      a.is_idle = true;
    } else if (!a.is_idle) {
      a.stream.send(Frame::Kind::signal, with_number(signal));
      a.stream.flush();
    }
  }
  is_pending_ = false;
}

void AgentGroup::suspend() {
  for (HostLink& a : agents_) {
    a.stream.send(Frame::Kind::suspended);
    a.stream.flush();
  }
  stop_as_by_terminal();
  own_stop_.forgive();
}

bool AgentGroup::signal_handlers(int signal) {
  for (HostLink& a : agents_)
    if (!a.is_idle && !is_pending_) a.stream.send(Frame::Kind::handlers, with_number(signal));
  return true;  // an agent whose ranks have no handler reports that
}

}  // namespace rz::rzrun
