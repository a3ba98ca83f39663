#pragma once
/// Which hosts take part in a job that the user starts on each of them, as with torchrun. All pure; the
/// caller passes the time.

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "tools/rzrun/flags/job.h"

namespace rz::rzrun {

/// What a host that joins sends.
struct JoinRequest {
  std::string host;
  int node_rank = -1, local_ranks = 0, min_nodes = 0, max_nodes = 0;
  std::string id;
  std::vector<std::string> command;
  int max_restarts = 0;
  std::string role = "default";

  template <class Archive, class J>
  static void fields(Archive& a, J& j) {
    a(j.host, j.node_rank, j.local_ranks, j.min_nodes, j.max_nodes, j.id, j.command, j.max_restarts, j.role);
  }
};

/// Why the two hosts are not of one job, since flags or programs differ; or empty. The numbers of their ranks
/// may differ, and so may the arguments of the program.
std::string difference(const JoinRequest&, const JoinRequest& other);

/// Why `other` can't be one of the hosts, which are there already: its node rank is taken or too high, or
/// there is no place; or empty.
std::string refusal(const std::vector<JoinRequest>& hosts, const JoinRequest& other);

/// The numbers of the hosts, whose first one is node 0: those with a node rank are in the order of these,
/// the others fill the places that are left, in the order of arrival. The numbers have no gaps.
std::vector<int> node_numbers(const std::vector<JoinRequest>& hosts);

/// "node rank 1 is", "node ranks 1, 3 are", "1 host is": what is missing, `hosts` being there.
std::string missing(const std::vector<JoinRequest>& hosts);

/// When the job may start: once max_nodes are there, or once min_nodes have been there for the time of the
/// last call.
class LastCall {
 public:
  using Clock = std::chrono::steady_clock;

  explicit LastCall(const Rendezvous& r)
      : min_(static_cast<std::size_t>(r.min_nodes)),
        max_(static_cast<std::size_t>(r.max_nodes)),
        last_call_(r.last_call) {}
  bool may_start(std::size_t hosts, Clock::time_point now);

 private:
  std::size_t min_, max_;
  std::chrono::seconds last_call_;
  std::optional<Clock::time_point> start_;  // while there are min_ or more
};

}  // namespace rz::rzrun
