#pragma once
/// At which calls ranks are, and which of them is the odd one.

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "tools/flight/read_dump.h"

namespace rz::flight_tool {

/// Ranks that are at the same place of a communicator.
struct Place {
  std::vector<int> ranks;
  std::string call, state, line;  ///< as those of a Call; without a call "no call", "no file"
  std::string verdict;            ///< "late", "differs", "no file", or empty
};

struct GroupReport {
  std::string name;
  std::vector<Place> places;          ///< those of most ranks first
  std::vector<std::string> findings;  ///< a sentence for each rank that is to blame; empty if all agree
};

/// A report for each communicator, of what its ranks last called; if calls of one number differ, of the first
/// such. If they do, those differ that are not the calls of more than half of the ranks; if there is no such
/// majority, all. A rank is late if another one has begun a call that it has not.
std::vector<GroupReport> compare_ranks(const std::map<int, Dump>&);

/// "0-3, 7"
std::string list_of(const std::vector<int>& ranks);

}  // namespace rz::flight_tool
