#pragma once
/// What starts an agent, a program that obeys this one, on a host.

#include <sys/types.h>

#include <optional>
#include <string>
#include <vector>

#include "comm/os/child.h"

namespace rz::hosts {

/// ssh, which asks for nothing, and notices that a host is lost.
std::vector<std::string> ssh_words();
/// The path of this program.
std::string own_path();
/// The words that start `program` --agent on a host, through a remote shell or without one on this host. In
/// `folder`, unless it is empty. RZ_PORTS goes with them, since an agent chooses ports before it gets any
/// variable.
std::vector<std::string> remote_command(std::vector<std::string> shell, const std::string& host,
                                        const std::string& program, const std::string& folder = {});

/// The process that starts agents, such as ssh, with pipes at its standard streams and in a process group of
/// its own.
struct Connector {
  Connector() = default;
  /// `errors`: a descriptor for its error output in place of the pipe `err`.
  explicit Connector(const std::vector<std::string>& words, const EnvironmentVariables& = {},
                     std::optional<int> errors = {});

  /// SIGKILL for the whole group, unless the process has been waited for: the number may then be another's.
  void kill_group() const;

  std::string name;  ///< "ssh", for messages
  Child process;
  pid_t group = 0;        ///< 0: there is no such process
  UniqueFd out, in, err;  ///< its standard output, to read; input, to write; error output, to read
};

}  // namespace rz::hosts
