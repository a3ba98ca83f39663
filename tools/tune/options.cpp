#include "tools/tune/options.h"

#include "comm/core/error.h"
#include "comm/tuning/tuning.h"
#include "tools/command_line/command_line.h"

namespace rz::tune {
namespace {

constexpr const char* description =
    "Measures which algorithm is the fastest for each collective and size, on the ranks that it is started "
    "with,\n"
    "and writes a tuning table.\n\n"
    "  rzrun -n 4 tune --output tuning.txt\n"
    "  RZ_TUNING=tuning.txt rzrun -n 4 all_reduce_perf -b 8 -e 64M -f 4 --verbose";

constexpr const char* footer =
    "On one host it times what ranks do that meet in shared memory, and from which size on memory of "
    "allocate() is\n"
    "better read where it lies; between hosts every schedule. All that compete at one size are timed in "
    "turn, "
    "several\n"
    "rounds; medians count, of the rank that takes longest. Out of all times it fits what a message, a byte "
    "and a byte\n"
    "of a sum cost on that link, by which groups of other sizes are served. The table is text; "
    "comm/tuning/tuning.h and\n"
    "docs/tuning.md say how to read it, and how to put tables of several group sizes into one file.\n\n"
    "Nothing else should run on the machine meanwhile. RZ_TRANSPORT, RZ_HOST_ID and the like count, "
    "RZ_TUNING "
    "and\n"
    "RZ_ALGORITHM do not.\n\n"
    "Exit status: 0 all right, 2 a wrong command line, 1 anything else.";

struct RawOptions {
  std::string min_bytes = "8", max_bytes = "8M", collectives;
};

std::size_t size_of_word(const std::string& word, const char* flag) {
  const auto bytes = bytes_from(word);
  require(bytes && *bytes > 0, Errc::config, flag, " '", word,
          "' is no size; write bytes, or as many K, M or G");
  return *bytes;
}

void resolve(Options& o, const RawOptions& w) {
  o.min_bytes = size_of_word(w.min_bytes, "--min");
  o.max_bytes = size_of_word(w.max_bytes, "--max");
  require(o.min_bytes <= o.max_bytes, Errc::config, "--min ", w.min_bytes, " is more than --max ",
          w.max_bytes);
  require(!o.output.empty(), Errc::config, "--output needs the name of a file");
  for (std::size_t at = 0; at < w.collectives.size();) {
    const std::size_t end = std::min(w.collectives.find(',', at), w.collectives.size());
    o.collectives.push_back(collective_from_name(w.collectives.substr(at, end - at)));
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
  line.add_option("-o,--output", o.output, "Where the table goes; default tuning.txt").type_name("FILE");
  line.add_option("--min", raw.min_bytes, "Least size, of the whole buffer; K, M, G are binary; default 8");
  line.add_option("--max", raw.max_bytes, "Largest; default 8M");
  line.add_option("--factor", o.factor, "From a size to the next; default 4").within(2, 1024);
  line.add_option("--rounds", o.rounds, "In which all that compete take turns; default 5").within(1, 1000);
  line.add_option("--seconds", o.seconds, "How long to measure, about; default 40").within(0.01, 86400.0);
  line.add_option("--collectives", raw.collectives,
                  "all_reduce,broadcast and the like; default: all that have a choice");
  line.add_flag("--schedules", o.schedules,
                "Within a node: the schedules too, which the intra-node algorithms nearly always beat");
  parsed.help = line.parse(argc, argv);
  if (parsed.help.empty()) resolve(o, raw);
  return parsed;
}

}  // namespace rz::tune
