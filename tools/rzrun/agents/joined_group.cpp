#include "tools/rzrun/agents/joined_group.h"

#include <signal.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "comm/core/environment.h"
#include "comm/core/error.h"
#include "comm/net/listening.h"
#include "tools/rzrun/ranks/restart_policy.h"

namespace rz::rzrun {
namespace {

constexpr std::chrono::seconds time_until_line{10};  // then a line names the hosts that are missing
constexpr std::chrono::seconds time_to_leave{2};     // for the rzruns of other hosts, at the end

bool is_own_address(const net::HostPort& where) {
  try {
    const auto own = net::interfaces();
    return std::ranges::any_of(net::resolve(where), [&](const net::SocketAddress& a) {
      return a.loopback() ||
             std::ranges::any_of(own, [&](const auto& i) { return i.address.host() == a.host(); });
    });
  } catch (const Error&) {
    return false;  // a name that this host does not know is not its own
  }
}

/// Whether this host is node 0 if its port is free: by its --node-rank, or as the owner of the endpoint.
bool is_node0(const Rendezvous& r) {
  return r.node_rank < 0 ? r.is_host.value_or(is_own_address({r.host, r.port})) : r.node_rank == 0;
}

/// Where node 0 listens.
net::HostPort place_of_node0(const Rendezvous& r) {
  return {r.local_address.empty() ? r.host : r.local_address, r.port};
}

/// "node 1", and why it is that one; or how its number would be found.
std::string which_node(const Rendezvous& r, bool is_first) {
  if (r.node_rank >= 0) return concat("node ", r.node_rank);
  if (!is_first) return "a node that is numbered by its arrival";
  return r.is_host ? "node 0, by is_host of --rdzv-conf"
                   : concat("node 0, since ", r.host, " is its address");
}

std::string ranks_of(const Hosts& o, bool is_first) {
  const Rendezvous& r = *o.rendezvous;
  const int before = r.node_rank * o.ranks;
  if (is_first) return ranks_text(0, o.ranks);
  const std::string count = concat(o.ranks, o.ranks == 1 ? " rank" : " ranks");
  if (r.node_rank < 0 || r.min_nodes != r.max_nodes) return count + ", behind those of the hosts before";
  return concat(ranks_text(before, o.ranks), " if each host before has ", count);
}

}  // namespace

std::string describe_node(const Hosts& o) {
  const Rendezvous& r = *o.rendezvous;
  const bool is_first = is_node0(r);
  std::string text = concat(nodes_text(r.min_nodes, r.max_nodes), " hosts, job ", hosts::quoted(r.id),
                            "; this is ", which_node(r, is_first), "\n");
  if (is_first) {
    const net::HostPort where = place_of_node0(r);
    text += concat("listens at ", net::join_host_port(where.host, where.port),
                   is_own_address(where) ? "" : ", which is no address of this host", "; waits ",
                   seconds(r.join_timeout), " for the other hosts");
    if (r.min_nodes < r.max_nodes)
      text += concat(", and ", seconds(r.last_call), " for more than ", r.min_nodes);
  } else {
    text += concat("connects to ", net::join_host_port(r.host, r.port), "; waits ", seconds(r.join_timeout),
                   " for node 0");
  }
  return concat(text, "\nthis host: ", ranks_of(o, is_first), "\n");
}

JoinRequest join_request_of(const JobSpec& job) {
  const Rendezvous& r = *job.hosts.rendezvous;
  return {hosts::own_name(),   r.node_rank,      job.hosts.ranks, r.min_nodes, r.max_nodes, r.id,
          job.program.command, job.max_restarts, job.program.role};
}

std::vector<UniqueFd> listen_as_node0(const Rendezvous& r) {
  if (!is_node0(r)) return {};
  const net::HostPort where = place_of_node0(r);
  std::vector<UniqueFd> listeners;
  try {
    listeners = net::listen_at(net::listening_addresses(where, environment().interface), r.port);
  } catch (const Error& e) {
    fail(Errc::config, "node 0 listens at ", net::join_host_port(where.host, r.port),
         ", but this host cannot: ", e.what(),
         "; is this host node 0? If others reach it by the address of a service or router, give --local-addr "
         "ADDRESS with one of its own");
  }
  require(!listeners.empty() || r.node_rank < 0, Errc::rendezvous, "port ", r.port, " of ", where.host,
          " is in use, by another job or program; choose another port on all hosts");
  return listeners;
}

JoinedGroup::JoinedGroup(const JobSpec& spec, std::vector<UniqueFd> listeners, Console& out, Console& err)
    : hosts_of_job_(spec.hosts),
      rendezvous_(*spec.hosts.rendezvous),
      own_(join_request_of(spec)),
      local_(out, err),
      links_(out, err, [this](HostLink& link, const Frame& frame) { decide(link, frame); }),
      listener_(std::move(listeners), process_access()),
      last_call_(rendezvous_),
      join_until_(Deadline::after(rendezvous_.join_timeout)),
      explain_at_(Deadline::after(time_until_line)) {}

// ---- hosts

/// Node 0, and the others in the order of their arrival.
std::vector<JoinRequest> JoinedGroup::joined() const {
  std::vector<JoinRequest> all{own_};
  all.front().node_rank = 0;
  for (const HostLink& a : links_.all)
    if (a.is_ready && a.lost.empty()) all.push_back(a.request);
  return all;
}

/// A host joins, or its rzrun has got a signal to end.
void JoinedGroup::decide(HostLink& a, const Frame& frame) {
  WireReader reader(frame.payload);
  if (frame.kind == Frame::Kind::join) {
    JoinRequest::fields(reader, a.request);
    join(a);
  } else if (frame.kind == Frame::Kind::stop) {
    int signal = 0;
    reader(signal);
    if (signal != SIGCONT) stop_ = {signal, " on host " + a.host};
  }
}

void JoinedGroup::join(HostLink& a) {
  require(!a.is_ready && a.request.local_ranks >= 1 && a.request.local_ranks <= hosts::max_slots, Errc::io,
          "a host with ", a.request.local_ranks, " ranks, or one that joins twice");
  a.host = a.request.host;
  a.local_ranks = a.request.local_ranks;
  if (const std::string why = difference(own_, a.request); !why.empty()) {
    return is_waiting_ ? fail_all(a, why) : refuse(a, 2, why);
  }
  if (const std::string why = refusal(joined(), a.request); !why.empty()) {
    const bool has_places = static_cast<int>(joined().size()) < rendezvous_.max_nodes;
    return is_waiting_ && has_places ? fail_all(a, why) : refuse(a, 1, why);
  }
  if (!is_waiting_ && job_.restarts >= job_.max_restarts)
    return refuse(a, 1,
                  concat("the job runs already, and has no restart left at which ", a.host, " could join"));
  a.is_ready = true;
  if (is_waiting_) return;
  const std::string line =
      concat("host ", a.host, " has come while the job runs; it takes part after the next restart");
  links_.print(line);
  a.stream.send(Frame::Kind::message, line);
}

/// Hosts that cannot form a job: all of them end.
void JoinedGroup::fail_all(HostLink& a, const std::string& why) {
  a.is_ready = true;
  links_.fail({2, why});
}

/// This host alone ends.
void JoinedGroup::refuse(HostLink& a, int status, const std::string& line) {
  links_.print(concat("host ", a.host, " is refused: ", line));
  WireWriter writer;
  writer(status, line);
  a.stream.send(Frame::Kind::end, writer.bytes);
  refused_.push_back(&a);
}

/// Hosts that have gone and have no part in the job.
void JoinedGroup::drop_lost() {
  for (auto a = links_.all.begin(); a != links_.all.end();) {
    const bool takes_part = is_started_ && !is_waiting_ && a->node > 0;
    if (a->lost.empty() || takes_part) {
      ++a;
      continue;
    }
    if (std::erase(refused_, &*a) == 0) links_.print(concat("host ", a->host, " has gone: ", a->lost));
    a = links_.all.erase(a);
  }
}

std::string JoinedGroup::why_no_restart() const {
  const int left = static_cast<int>(joined().size());
  if (left >= rendezvous_.min_nodes) return "";
  return concat("of --nnodes ", nodes_text(rendezvous_.min_nodes, rendezvous_.max_nodes), " only ", left,
                left == 1 ? " host is left" : " hosts are left");
}

// ---- start

void JoinedGroup::start(const Job& job, const std::function<bool()>&) {
  const bool is_first = !is_started_;
  job_ = job;
  is_waiting_ = true;
  if (is_first) return;
  std::erase_if(links_.all, [](const HostLink& a) { return !a.lost.empty(); });
  if (const std::string why = why_no_restart(); !why.empty()) {
    links_.fail({255, "no restart: " + why});
    return;
  }
  start_ranks();
}

void JoinedGroup::wait_for_hosts() {
  if (links_.has_failed()) return;
  const auto all = joined();
  if (last_call_.may_start(all.size(), LastCall::Clock::now())) return start_ranks();
  const bool is_over = join_until_.expired() && static_cast<int>(all.size()) < rendezvous_.min_nodes;
  const bool is_news = listener_.strangers().has_member() && !std::exchange(has_warned_, true);
  if (!is_over && !is_news && !explain_at_.expired()) return;
  std::string names;
  for (const JoinRequest& h : all) names += concat(names.empty() ? "" : ", ", h.host);
  const std::string what = static_cast<int>(all.size()) >= rendezvous_.min_nodes
                               ? concat("; the job starts when ", rendezvous_.max_nodes, " have come, or ",
                                        seconds(rendezvous_.last_call), " after host ", rendezvous_.min_nodes)
                               : concat("; ", missing(all), " missing");
  const std::string line =
      concat(all.size(), " of ", nodes_text(rendezvous_.min_nodes, rendezvous_.max_nodes),
             " hosts have come (", names, ")", what, "; node 0 listens at ", listener_.places());
  if (!is_over) {
    links_.print(concat("waiting for hosts: ", line, listener_.text()));
    if (explain_at_.expired()) explain_at_ = Deadline::after(rendezvous_.join_timeout * 2);
  } else {
    links_.fail(
        {1, concat(line, " after ", seconds(rendezvous_.join_timeout),
                   "; is rzrun running there with this endpoint? join_timeout of --rdzv-conf is the time to "
                   "wait",
                   listener_.text())});
  }
}

/// Numbers hosts and ranks. Hosts that are not taken, since there are too many, keep node 0, which is this
/// one.
void JoinedGroup::choose_numbers() {
  const auto numbers = node_numbers(joined());
  std::vector<std::pair<int, HostLink*>> in_order;
  std::size_t i = 1;
  for (HostLink& a : links_.all) {
    a.node = 0;
    if (a.is_ready && a.lost.empty()) in_order.emplace_back(numbers[i++], &a);
  }
  std::ranges::sort(in_order);
  job_.nodes = 1;
  job_.ranks = own_.local_ranks;
  for (auto& [number, a] : in_order) {
    a->node = number;
    a->first_rank = job_.ranks;
    job_.ranks += a->local_ranks;
    ++job_.nodes;
  }
}

void JoinedGroup::start_ranks() {
  choose_numbers();
  links_.begin_job(false);
  is_started_ = true;
  is_waiting_ = false;
  job_.master_addr = place_of_node0(rendezvous_).host;
  if (net::is_unspecified(job_.master_addr)) job_.master_addr = reached_at_;
  try {
    // Without --rdzv-endpoint --master-port is where node 0 listens.
    const int given = hosts_of_job_.master_port;
    job_.master_port = given && given != rendezvous_.port ? given : free_port();
    for (HostLink& a : links_.all)
      if (a.node > 0) links_.send_job(a, job_, {});
    Job own = job_;
    own.host = own_.host;
    own.local_ranks = own_.local_ranks;
    local_.start(own, [] { return true; });
  } catch (...) {
    links_.fail(start_failure_of(std::current_exception(), job_.program.command.front()));
  }
}

// ---- what Ranks has

std::vector<RankEnd> JoinedGroup::advance() {
  const double rate = is_waiting_ ? net::AcceptRate::while_starting : net::AcceptRate::while_running;
  for (auto& c : listener_.advance(rate)) {
    if (reached_at_.empty() || net::names_loopback(reached_at_)) reached_at_ = c.reached_at;
    links_.add(std::move(c.stream), c.address, AgentListener::time_to_prove);
  }
  links_.advance();
  auto ends = links_.take_ends();
  drop_lost();
  if (is_waiting_) wait_for_hosts();
  for (RankEnd& end : local_.advance()) {
    end.host = own_.host;
    ends.push_back(end);
  }
  return ends;
}

void JoinedGroup::end(int status, const std::string& line) {
  WireWriter writer;
  writer(status, line);
  for (HostLink& a : links_.all)
    if (std::ranges::count(refused_, &a) == 0) a.stream.send(Frame::Kind::end, writer.bytes);
  // Until they have closed their connections: to close this end first might take the last frame from them.
  for (const auto until = Deadline::after(time_to_leave); !until.expired();) {
    std::vector<pollfd> wait;
    bool any = false;
    for (HostLink& a : links_.all) {
      a.stream.flush();
      a.stream.receive();
      a.stream.append_descriptors(wait);
      any = any || !a.stream.ended();
    }
    if (!any) return;
    ::poll(wait.data(), wait.size(), until.poll_ms(1000));
  }
}

/// The last line of a job that has started: how many strangers came to its port.
void JoinedGroup::finish_output() {
  local_.finish_output();
  if (is_started_ && listener_.strangers().unknown()) last_message_ = listener_.strangers().sentence();
}

void JoinedGroup::append_descriptors(std::vector<pollfd>& wait) const {
  links_.append_descriptors(wait);
  local_.append_descriptors(wait);
  listener_.append_descriptors(wait);
}

std::vector<std::string> JoinedGroup::messages() {
  auto all = links_.take_messages();
  for (std::string& line : local_.messages()) all.push_back(std::move(line));
  if (!last_message_.empty()) all.push_back(std::exchange(last_message_, {}));
  return all;
}

std::vector<int> JoinedGroup::running() const {
  auto all = local_.running();
  for (const int r : links_.running()) all.push_back(r);
  return all;
}

bool JoinedGroup::any_process_alive() const {
  return is_waiting_ || local_.any_process_alive() || links_.any_process_alive();
}

void JoinedGroup::signal_all(int signal) {
  is_waiting_ = false;
  if (!is_started_) return;
  local_.signal_all(signal);
  links_.signal_all(signal);
}

bool JoinedGroup::signal_handlers(int signal) {
  local_.signal_handlers(signal);
  links_.signal_handlers(signal);
  return true;  // a host whose ranks have no handler reports that
}

}  // namespace rz::rzrun
