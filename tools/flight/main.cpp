// Shows at which calls the ranks of a job were.
#include <algorithm>
#include <array>
#include <cstdio>
#include <map>
#include <string>
#include <vector>

#include "comm/core/error.h"
#include "comm/core/text.h"
#include "tools/command_line/command_line.h"
#include "tools/flight/compare_ranks.h"
#include "tools/flight/read_dump.h"

namespace rz::flight_tool {
namespace {

constexpr const char* description =
    "Shows at which collective each rank of a job was, by the line of the program that made the call, who "
    "is\n"
    "late, and who made another call than the others. Reads the files that the ranks write into a folder:\n"
    "\n"
    "  RZ_FLIGHT=flights rzrun -n 4 ./train      when a communicator fails, each rank writes one\n"
    "  kill -USR1 PID_OF_RZRUN                   all ranks write theirs now, also if they hang\n"
    "  flight flights                            what they were doing\n"
    "\n"
    "A row of the table has the ranks that are at one call: 'started' has begun and waits for others,\n"
    "'completed' has ended, 'scheduled' was issued to a device. Calls of a communicator are numbered from 0\n"
    "on. If calls of one number differ, the rows are those of the first such number, and below are the "
    "ranks\n"
    "that do not call what more than half of them call.";

constexpr const char* footer =
    "The files are pickles in the format of PyTorch's flight recorder. Nothing in them is executed. Its\n"
    "analyser reads them as well: python -m torch.distributed.flight_recorder.fr_trace FOLDER\n"
    "\n"
    "Exit status: 0 all ranks agree; 1 a rank is late, differs, or has no file; 2 an input is wrong, in one\n"
    "line.";

Parsed<std::string> parse(int argc, const char* const* argv) {
  Parsed<std::string> parsed;
  CommandLine line(description, "flight FOLDER", footer);
  line.add_option("FOLDER", parsed.options, "Folder with flight_rank_0, flight_rank_1, …")
      .type_name("")
      .required();
  parsed.help = line.parse(argc, argv);
  return parsed;
}

using Row = std::array<std::string, 6>;

/// Columns as wide as their longest cell.
void print(const std::vector<Row>& rows) {
  std::array<std::size_t, std::tuple_size_v<Row>> widths{};
  for (const Row& row : rows)
    for (std::size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  for (const Row& row : rows) {
    std::string text;
    for (std::size_t i = 0; i < row.size(); ++i)
      text += (i ? "  " : "") + row[i] + std::string(widths[i] - row[i].size(), ' ');
    std::printf("%s\n", text.substr(0, text.find_last_not_of(' ') + 1).c_str());
  }
}

/// Why the files were written: the ranks of a failure have one reason, or a few.
void print_reasons(const std::map<int, Dump>& dumps) {
  constexpr std::size_t max_shown = 4;
  std::map<std::string, std::vector<int>> ranks;
  for (const auto& [rank, dump] : dumps) ranks[dump.reason].push_back(rank);
  std::size_t shown = 0;
  for (const auto& [reason, of] : ranks)
    if (shown++ < max_shown) std::printf("ranks %s: %s\n", list_of(of).c_str(), reason.c_str());
  if (shown > max_shown) std::printf("%zu more reasons\n", shown - max_shown);
}

int run(const std::string& folder) {
  const std::map<int, Dump> dumps = read_dumps(folder);
  print_reasons(dumps);
  std::vector<Row> rows{{"communicator", "ranks", "call", "state", "line", ""}};
  std::vector<std::string> findings;
  for (const GroupReport& g : compare_ranks(dumps)) {
    for (const Place& p : g.places)
      rows.push_back({g.name, list_of(p.ranks), p.call, p.state, p.line, p.verdict});
    findings.insert(findings.end(), g.findings.begin(), g.findings.end());
  }
  print(rows);
  for (const std::string& f : findings) std::printf("%s\n", f.c_str());
  if (findings.empty()) std::printf("all ranks agree\n");
  return findings.empty() ? 0 : 1;
}

}  // namespace
}  // namespace rz::flight_tool

int main(int argc, char** argv) {
  return rz::run_program(
      "flight", [&] { return rz::flight_tool::parse(argc, argv); },
      [](const std::string& folder) {
        try {
          return rz::flight_tool::run(folder);
        } catch (const std::exception& e) {
          rz::fail(rz::Errc::config, rz::one_line(e));  // 1 is a result
        }
      });
}
