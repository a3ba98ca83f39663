#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <memory>

#include "comm/core/environment.h"
#include "comm/core/error.h"
#include "comm/net/random.h"
#include "comm/topology.h"
#include "tools/doctor/agent.h"
#include "tools/doctor/report.h"

namespace rz::doctor {
namespace {

constexpr std::chrono::seconds facts_timeout{60};

double clock_now() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

Job job_of(const Options& o, int nodes, int ranks) {
  return {.nodes = nodes,
          .ranks = ranks,
          .local_ranks = ranks,
          .cuda = o.cuda,
          .sockets = environment().sockets,
          .master = o.master};
}

/// Fills the slots of the hosts in their order.
std::vector<int> ranks_of_nodes(const Options& o, int ranks) {
  std::vector<int> all;
  for (const auto& node : o.nodes) {
    all.push_back(std::min(ranks, static_cast<int>(node.slots.size())));
    ranks -= all.back();
  }
  return all;
}

struct Node {
  std::string host;
  int ranks = 0;
  std::unique_ptr<RemoteAgent> agent;  ///< null if it could not be reached
  double before = 0;
};

std::vector<Node> start_agents(const Options& o, int ranks) {
  std::vector<Node> nodes;
  const auto local = ranks_of_nodes(o, ranks);
  const int used = static_cast<int>(std::ranges::count_if(local, [](int n) { return n > 0; }));
  const std::string request =
      to_json(FactsRequest{o.master, used, o.cuda, used > 1 ? net::random_hex() : ""});
  for (std::size_t i = 0; i < local.size(); ++i) {
    if (local[i] == 0) continue;
    Node& n = nodes.emplace_back(Node{o.nodes[i].name, local[i], nullptr, clock_now()});
    n.agent = std::make_unique<RemoteAgent>(o.shell, n.host, o.program);
    try {
      n.agent->send("facts", request);
    } catch (const Error&) {  // its end is found when it is read
    }
  }
  return nodes;
}

/// By what ssh printed.
std::string remedy_of_ssh(const std::string& host, const std::string& why) {
  const auto has = [&](const char* words) { return why.find(words) != std::string::npos; };
  if (has("Could not resolve"))
    return concat("Make the name known here: echo 'ADDRESS ", host,
                  "' >> /etc/hosts, or correct the hostfile");
  if (has("Host key verification failed") || has("HOST IDENTIFICATION HAS CHANGED"))
    return concat("Accept the host's key once, after a look at it: ssh ", host,
                  " true; an old one goes with: ssh-keygen -R ", host);
  if (has("Connection refused") || has("timed out") || has("not responding") || has("No route to host"))
    return concat("Start sshd there, open its port, or name another one: --rsh 'ssh -p PORT'; ping ", host);
  return concat("Let this user in without a password, then repeat: ssh-copy-id ", host, "; ssh ", host,
                " true");
}

Finding unreachable(const Options& o, const std::string& host, const std::string& why) {
  const bool ssh = o.shell.front() == "ssh";
  return {host,
          "remote shell",
          why,
          concat("'", o.shell.front(), " ", host, " ", o.program, " --agent' answers"),
          Verdict::missing,
          why.find(o.program) != std::string::npos
              ? "Install ringzero there at the same path, or name its path: --program PATH"
          : ssh ? remedy_of_ssh(host, why)
                : concat("Try the remote shell alone: ", o.shell.front(), " ", host, " true")};
}

void read_all_facts(const Options& o, std::vector<Node>& nodes, Report& report) {
  const Deadline deadline = Deadline::after(facts_timeout);
  for (Node& n : nodes) try {
      HostFacts facts = parse_facts(n.agent->receive("facts", deadline), n.host);
      report.facts.push_back({n.host, std::move(facts), n.before, clock_now()});
    } catch (const std::exception& e) {
      report.findings.push_back(unreachable(o, n.host, one_line(e)));
      n.agent.reset();
    }
}

/// The pairs to measure, of hosts that were reached: all in both directions, or each with the first and the
/// next.
std::vector<std::pair<std::size_t, std::size_t>> pairs_of(std::size_t nodes) {
  constexpr std::size_t max_for_all = 4;
  std::vector<std::pair<std::size_t, std::size_t>> pairs;
  for (std::size_t i = 0; i < nodes; ++i)
    for (std::size_t j = 0; j < nodes; ++j) {
      const bool chosen = nodes <= max_for_all ? i != j : i < j && (i == 0 || j == i + 1);
      if (chosen) pairs.emplace_back(i, j);
    }
  return pairs;
}

void measure_pairs(const std::vector<Node>& nodes, Report& report) {
  std::vector<RemoteAgent*> agents;
  for (const Node& n : nodes)
    if (n.agent) agents.push_back(n.agent.get());
  for (const auto& [from, to] : pairs_of(agents.size())) {
    const std::string& address = report.facts[to].facts.address;
    if (address.empty()) continue;  // the check of its interfaces has the reason
    report.pairs.push_back(measure_pair(*agents[from], *agents[to], address));
  }
}

}  // namespace

Report diagnose_this_host(const Options& o) {
  Report report;
  HostFacts facts = read_facts({o.master, 1, o.cuda, ""});
  const int own = o.cuda ? std::max(1, facts.devices) : usable_processors();
  report.ranks = o.ranks > 0 ? o.ranks : own;
  report.findings = check_host(facts.name, facts, job_of(o, 1, report.ranks));
  report.facts.push_back({facts.name, std::move(facts), 0, 0});
  return report;
}

Report diagnose_hosts(const Options& o) {
  Report report;
  std::size_t slots = 0;
  for (const auto& node : o.nodes) slots += node.slots.size();
  report.ranks = o.ranks > 0 ? o.ranks : static_cast<int>(slots);
  auto nodes = start_agents(o, report.ranks);
  report.nodes = static_cast<int>(nodes.size());
  read_all_facts(o, nodes, report);
  Job job = job_of(o, report.nodes, report.ranks);
  const auto add = [&](const std::vector<Finding>& more) {
    report.findings.insert(report.findings.end(), more.begin(), more.end());
  };
  for (const NamedFacts& f : report.facts) {
    const auto node = std::ranges::find(nodes, f.host, &Node::host);
    job.local_ranks = node->ranks, job.first = node == nodes.begin();
    add(check_host(f.host, f.facts, job));
  }
  if (report.nodes == 1) return report;
  if (nodes.front().agent) add(compare_hosts(report.facts, job));
  measure_pairs(nodes, report);
  add(check_pairs(report.pairs));
  return report;
}

}  // namespace rz::doctor
