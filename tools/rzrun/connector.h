#pragma once
/// The process that connects rzrun to the agent of another host, such as ssh.

#include <sys/types.h>

#include <string>
#include <vector>

#include "comm/os/fd.h"
#include "tools/rzrun/frames.h"
#include "tools/rzrun/options.h"

namespace rz::rzrun {

/// The name of this host.
std::string own_name();
/// True for "localhost" and the name of this host.
bool is_this_host(const std::string& name);

/// The words that start the agent of a host: through ssh or the command of --rsh, or without on this host.
std::vector<std::string> agent_command(const Options&, const std::string& host);

/// Variables that ranks on other hosts get from this process: all but those of a login, of a session and of
/// one machine, such as HOME and TMPDIR.
Variables forwarded_environment();

struct Connector {
  pid_t pid = -1;
  UniqueFd pidfd;         ///< readable when it has ended
  UniqueFd out, in, err;  ///< its standard output, to read; input, to write; error output, to read
};
/// Starts the process, with pipes at its standard streams, in a process group of its own.
Connector start_connector(const std::vector<std::string>& words);

}  // namespace rz::rzrun
