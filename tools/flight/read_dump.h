#pragma once
/// The files of comm/flight_dump.h. Nothing in them is trusted.

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace rz::flight_tool {

/// A collective of one rank.
struct Call {
  std::string text;        ///< "all_reduce #204 (1024 f32, sum)": equal on all ranks where the calls match
  std::string line;        ///< "train.cpp:88"; empty if it is not known
  std::string state;       ///< "scheduled", "started" or "completed"
  std::int64_t order = 0;  ///< among the calls of the rank
};

/// Name and ranks of a communicator.
using GroupId = std::pair<std::string, std::vector<int>>;

struct Dump {
  int rank = 0;
  std::string reason, phase;  ///< why it was written; what the rank did beside its calls
  std::int64_t update = 0;    ///< of training; 0: none
  std::map<GroupId, std::map<std::int64_t, Call>> groups;  ///< with their calls, by number
};

/// Those of a folder, by rank. Errc::config if it has none, in a line. Errc::io names the file that is
/// damaged.
std::map<int, Dump> read_dumps(const std::string& folder);

}  // namespace rz::flight_tool
