#pragma once
/// rzrun on a host that is not node 0 of a job which the user starts on each host.

#include "tools/rzrun/flags/options.h"

namespace rz::rzrun {

/// Joins the job at the endpoint of `options.rendezvous`, runs the ranks of this host with these options and
/// this environment, prints what they print, and returns the exit status of the job. If node 0 does not
/// listen yet, it waits for the time to join. Throws Errc::rendezvous, or Errc::mismatch, if there is no such
/// job.
int run_member(const Options&);

}  // namespace rz::rzrun
