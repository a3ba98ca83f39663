#include "tools/tune/options.h"

#include "comm/core/byte_size.h"
#include "comm/core/error.h"
#include "comm/tuning/tuning.h"
#include "tools/command_line/command_line.h"

namespace rz::tune {
namespace {

constexpr const char* description =
    "Measures which algorithm is the fastest for each collective and size, on the ranks of this job, and\n"
    "writes a tuning table.\n"
    "\n"
    "  rzrun -n 4 tune --output tuning.txt\n"
    "  RZ_TUNING=tuning.txt rzrun -n 4 all_reduce_perf -b 8 -e 64M -f 4 --verbose";

constexpr const char* footer =
    "Within a node it times the intra-node algorithms, and from which size on zero-copy from memory of\n"
    "allocate() is faster; between nodes it times every schedule. All candidates of one size are timed in\n"
    "interleaved rounds; the median over rounds of the slowest rank's time counts.\n"
    "The table is text; comm/tuning/tuning.h and docs/tuning.md describe its format, and how to combine\n"
    "tables of several group sizes in one file.\n"
    "\n"
    "Nothing else should run on the machine meanwhile. RZ_TRANSPORT, RZ_HOST_ID and similar variables "
    "apply;\n"
    "RZ_TUNING and RZ_ALGORITHM are ignored.\n"
    "\n"
    "Exit status: 0 success, 2 a wrong command line, 1 any other error.";

struct RawOptions {
  std::string min_bytes = "8", max_bytes = "8M", collectives;
};

void resolve(Options& o, const RawOptions& w) {
  o.min_bytes = byte_size_of_flag("--min", w.min_bytes, 1);
  o.max_bytes = byte_size_of_flag("--max", w.max_bytes, 1);
  require(o.min_bytes <= o.max_bytes, Errc::config, "--min ", w.min_bytes, " is more than --max ",
          w.max_bytes);
  require(!o.output.empty(), Errc::config, "--output needs the name of a file");
  for (std::size_t at = 0; at < w.collectives.size();) {
    const std::size_t end = std::min(w.collectives.find(',', at), w.collectives.size());
    o.collectives.push_back(tuning::collective_from_name(w.collectives.substr(at, end - at)));
    at = end + 1;
  }
}

}  // namespace

std::vector<std::size_t> Options::sizes() const {
  std::vector<std::size_t> all;
  for (std::size_t bytes = min_bytes; bytes <= max_bytes; bytes *= static_cast<std::size_t>(factor))
    all.push_back(bytes);
  return all;
}

ParsedOptions parse_options(int argc, const char* const* argv) {
  ParsedOptions parsed;
  Options& o = parsed.options;
  RawOptions raw;
  CommandLine line(description, "tune", footer);
  line.add_option("-o,--output", o.output, "File for the table, emptied at the start; default tuning.txt")
      .type_name("FILE");
  line.add_option("--min", raw.min_bytes,
                  "Smallest size of the whole buffer; K, M, G are binary, KB, MB, GB decimal; default 8");
  line.add_option("--max", raw.max_bytes, "Largest size; default 8M");
  line.add_option("--factor", o.factor, "Ratio of consecutive sizes; default 4").within(2, 1024);
  line.add_option("--rounds", o.rounds, "Measurements of each candidate, interleaved; default 5")
      .within(1, 1000);
  line.add_option("--seconds", o.seconds, "Approximate duration of the measurement; default 40")
      .within(0.01, 86400.0);
  line.add_option("--collectives", raw.collectives,
                  "e.g. all_reduce,broadcast; default: all that have several algorithms");
  line.add_flag(
      "--schedules", o.schedules,
      "Within a node: also time the schedules, although the intra-node algorithms are nearly always faster");
  parsed.help = line.parse(argc, argv);
  if (parsed.help.empty()) resolve(o, raw);
  return parsed;
}

}  // namespace rz::tune
