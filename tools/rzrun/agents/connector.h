#pragma once
/// The process that connects rzrun to the agent of another host, such as ssh.

#include <sys/types.h>

#include <string>
#include <vector>

#include "comm/os/fd.h"
#include "tools/rzrun/agents/frames.h"
#include "tools/rzrun/flags/job.h"

namespace rz::rzrun {

/// Variables that ranks on other hosts get from this process: all but those of a login, of a session and of
/// one machine, such as HOME and TMPDIR.
Variables forwarded_environment();

struct Connector {
  pid_t pid = -1;
  UniqueFd pidfd;         ///< readable when it has ended
  UniqueFd out, in, err;  ///< its standard output, to read; input, to write; error output, to read
};
/// Starts the process, with pipes at its standard streams and these variables, in a process group of its own.
Connector start_connector(const std::vector<std::string>& words, const Variables& = {});

}  // namespace rz::rzrun
