#pragma once
/// Names of hosts, and the lists of nodes and of tasks that Slurm writes. All functions are pure, and their
/// errors are Errc::config in one line that names the place and the word.

#include <string>
#include <string_view>
#include <vector>

namespace rz::hosts {

inline constexpr int max_slots = 4096;   ///< of one host
inline constexpr int max_nodes = 65536;  ///< of one list

/// Why the word is no name of a host; empty if it is one. A name has alphanumeric characters, '.', '-', '_',
/// and does not begin with '-', so that no program takes it for a flag.
std::string why_no_host_name(std::string_view word);

/// The word in quotes, for messages: in one line, and not longer than a line.
std::string quoted(std::string_view word);

/// The names in a node list of Slurm: "node[1-3,07],login" is node1, node2, node3, node07, login. `where` is
/// for messages, e.g. "SLURM_JOB_NODELIST".
std::vector<std::string> parse_slurm_nodes(std::string_view list, const std::string& where);

/// The numbers in a list of Slurm, one a node: "2(x3),1" is 2, 2, 2, 1. Each is from 1 to max_slots.
std::vector<int> parse_slurm_counts(std::string_view list, const std::string& where);

}  // namespace rz::hosts
