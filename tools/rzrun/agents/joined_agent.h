#pragma once
/// rzrun on a host that is not node 0 of a job which the user starts on each host.

#include <variant>
#include <vector>

#include "tools/rzrun/agents/frames.h"
#include "tools/rzrun/flags/job.h"

namespace rz::rzrun {

/// The connection to node 0 of the job at this endpoint. If node 0 does not listen yet, it waits for the time
/// to join; Errc::rendezvous, or Errc::config, if there is no such job. Or listeners at the endpoint, if it
/// is this host's and its port, which another program had, has become free: this host is node 0 then.
std::variant<FrameStream, std::vector<UniqueFd>> find_node0(const Rendezvous&);

/// Joins the job over this connection, runs the ranks of this host with these options and this environment,
/// prints what they print, and returns the exit status of the job.
int run_joined_agent(const JobSpec&, FrameStream node0);

}  // namespace rz::rzrun
