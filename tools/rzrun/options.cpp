#include "tools/rzrun/options.h"

#include <algorithm>

#include "comm/core/error.h"
#include "tools/command_line/command_line.h"

namespace rz::rzrun {
namespace {

constexpr const char* description =
    "rzrun -n N [OPTIONS] PROGRAM [ARGS…]\n"
    "\n"
    "Starts N ranks of PROGRAM on this machine, with the environment variables of torchrun, and ends all of\n"
    "them when one fails. All words after PROGRAM are its arguments.\n"
    "\n"
    "  rzrun -n 2 all_reduce_perf -b 8 -e 64M -f 2\n"
    "  rzrun -n 4 --prefix train_gpt --model config.json --config ds.json --data .\n"
    "  rzrun -n 4 --log-dir logs --tee ./my_program";

constexpr const char* footer =
    "Each rank gets RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT and the other\n"
    "variables of torchrun; RZ_LAUNCH, an identifier that is unique to this launch; and OMP_NUM_THREADS=1 "
    "if\n"
    "there are several ranks and it is not set. Rank 0 keeps the standard input unless that is a terminal;\n"
    "the other ranks read /dev/null.\n"
    "\n"
    "When a rank fails, rzrun prints on standard error which rank failed first, and how. All other ranks "
    "and\n"
    "their child processes get SIGTERM and, after the grace period, SIGKILL. Ctrl-C does the same; a second\n"
    "Ctrl-C kills at once.\n"
    "\n"
    "Exit status: 0 if every rank exited with 0; else that of the rank that failed first, 128 + the "
    "signal's\n"
    "number if a signal ended it; 2 for a wrong command line; 126 or 127 if the program cannot be started.";

/// Options whose text differs from their type in Options.
struct RawOptions {
  std::string bind = "core";
  double grace_s = 5;
};

void add_flags(CommandLine& line, Options& o, RawOptions& w) {
  line.add_option("-n,--ranks", o.ranks, "Ranks to start").type_name("N");
  line.add_option(
          "--bind", w.bind,
          "core (default): bind each rank to whole cores, or several ranks to one core; none: no binding")
      .one_of({"core", "none"})
      .type_name("core|none");
  line.add_flag("--prefix", o.prefix, "Print whole lines, each prefixed with \"[rank] \"");
  line.add_option("--log-dir", o.log_dir,
                  "Write rank<R>.stdout and rank<R>.stderr there instead of the console")
      .type_name("DIR");
  line.add_flag("--tee", o.tee, "With --log-dir: also print to the console");
  line.add_option("--grace", w.grace_s, "Between SIGTERM and SIGKILL; default 5")
      .within(0.0, 86400.0)
      .type_name("SECONDS");
  line.add_option("--master-port", o.master_port, "MASTER_PORT; default: a free one")
      .within(1, 65535)
      .type_name("PORT");
}

void check(const CommandLine& line, const Options& o) {
  require(line.is_set("-n"), Errc::config, "how many ranks? Give -n N; see --help");
  require(o.ranks >= 1, Errc::config, "-n must be at least 1, not ", o.ranks);
  require(!o.command.empty(), Errc::config, "no program to start; try: rzrun -n ", o.ranks,
          " PROGRAM [ARGS…]");
  require(!o.tee || !o.log_dir.empty(), Errc::config, "--tee needs --log-dir DIR");
  require(!o.prefix || o.to_console(), Errc::config,
          "--prefix with --log-dir needs --tee: nothing is printed");
}

}  // namespace

ParsedOptions parse_options(int argc, const char* const* argv) {
  ParsedOptions parsed;
  Options& o = parsed.options;
  RawOptions raw;
  CommandLine line(description, "rzrun", footer);
  line.allow_trailing_command();
  add_flags(line, o, raw);
  parsed.help = line.parse(argc, argv);
  if (!parsed.help.empty()) return parsed;
  o.command = line.remaining();
  o.bind = raw.bind == "core";
  o.grace = std::chrono::milliseconds(static_cast<long>(raw.grace_s * 1e3));
  check(line, o);
  return parsed;
}

}  // namespace rz::rzrun
