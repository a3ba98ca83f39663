#pragma once
/// The command line of doctor.

#include <string>
#include <vector>

#include "tools/command_line/command_line.h"
#include "tools/rzrun/hosts/connector.h"
#include "tools/rzrun/hosts/hosts.h"

namespace rz::doctor {

struct Options {
  int ranks = 0;  ///< of the job; 0: all slots, or what this host has processors or GPUs for
  bool cuda = false;
  std::vector<hosts::Host> nodes;  ///< of the hostfile; empty: this host alone
  std::vector<std::string> shell = hosts::ssh_words();
  std::string program;  ///< doctor on the hosts
  std::string master;   ///< MASTER_ADDR; empty: not set, and there is no hostfile
  bool json = false, facts = false, agent = false;
};

/// Errors are Errc::config, one line that names the flag.
Parsed<Options> parse_options(int argc, const char* const* argv);

}  // namespace rz::doctor
