// What this machine allows two ranks that add up floats, beside which all_reduce_perf can be held.

#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "bench/limit/measure.h"
#include "bench/support/common_options.h"
#include "bench/support/file.h"
#include "bench/support/numbers.h"
#include "comm/core/error.h"
#include "comm/topology.h"
#include "tools/command_line/command_line.h"

namespace rz::bench::limit {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* variants[] = {"staged", "staged_in_place", "single_copy", "single_copy_in_place",
                                    "mapped", "mapped_in_place"};
constexpr const char* what_else =
    "Two processes, each on a core of its own, do nothing but an all_reduce's arithmetic, its copies and one "
    "flag a\n"
    "step: what a runtime can come near, not pass. Variants:\n"
    "  staged   memory of one's own, copied through shared slots: the limit of ordinary memory\n"
    "  mapped   memory that both map: each rank adds its half of both inputs and writes it to both outputs "
    "(or, out of\n"
    "           place, adds all of both to its own): the limit of memory of Communicator::allocate (-R 1, -R "
    "2)\n"
    "  single_copy  memory of one's own, out of which the kernel copies (process_vm_readv) where it permits "
    "that: only\n"
    "           if asked for by --variants\n"
    "and all _in_place. A variant's row is the fastest of its ways (pieces, cached or streaming stores) by "
    "the median;\n"
    "--all prints every way. Times are those of the slower rank, one iteration right behind the other, as\n"
    "all_reduce_perf --percentiles has them. busbw is bytes over the median.\n\n"
    "  limit_bench --sizes 8,64K,4M\n\n"
    "Exit status: 0 all right, 2 a wrong command line, 1 anything else.";

struct Options {
  Plan plan;
  std::string sizes = "8,64,1K,8K,64K,512K,4M,32M", json;
  bool all = false;
  double timeout_s = 60;
};

void settle(Options& o) {
  for (const std::string& word : split_at_commas(o.sizes)) {
    const std::size_t bytes = parse_size(word, "--sizes");
    require(bytes >= 4 && bytes % 4 == 0, Errc::config, "--sizes: ", word,
            " is not a number of floats of 4 bytes");
    o.plan.sizes.push_back(bytes);
  }
  o.plan.timeout = std::chrono::milliseconds(static_cast<long>(o.timeout_s * 1e3));
}

Parsed<Options> parse(int argc, const char* const* argv) {
  Parsed<Options> parsed;
  Options& o = parsed.options;
  CommandLine line("The least time that two ranks of this machine need for an all_reduce of floats.",
                   "limit_bench", what_else);
  line.add_option("--sizes", o.sizes, "Bytes, with commas between; K, M, G are binary; default " + o.sizes);
  line.add_option("--variants", o.plan.variants,
                  "Of those below, with commas between; default all but single_copy")
      .delimiter(',')
      .one_of({std::begin(variants), std::end(variants)});
  line.add_option("-n,--iters", o.plan.iterations,
                  "Iterations a way and round; default 2000 (64K) to 6 (above 64M)")
      .within(1, 1'000'000);
  line.add_option("--rounds", o.plan.rounds, "Turns that the ways take; default 2").within(1, 1000);
  line.add_flag("--all", o.all, "A row for every way");
  add_json(line, o.json);
  line.add_option("-T,--timeout", o.timeout_s, "Deadline of a wait in seconds; default 60").within(0.1, 1e6);
  parsed.help = line.parse(argc, argv);
  if (parsed.help.empty()) settle(o);
  return parsed;
}

/// The fastest way of each variant, in the order of `variants`.
std::vector<Timed> fastest(const std::vector<Timed>& timed) {
  std::vector<Timed> best;
  for (const std::string variant : variants) {
    const Timed* least = nullptr;
    for (const Timed& t : timed)
      if (t.way.variant() == variant && (!least || t.us.p50 < least->us.p50)) least = &t;
    if (least) best.push_back(*least);
  }
  return best;
}

double bus_bandwidth(std::size_t bytes, const Timed& t) {
  return t.us.p50 > 0 ? static_cast<double>(bytes) / (t.us.p50 * 1e3) : 0;
}

void print_row(std::size_t bytes, const Timed& t) {
  std::printf("%12zu  %15s  %s  %s  %s  %s  %s\n", bytes, t.way.variant().c_str(),
              fit_time(t.us.min).c_str(), fit_time(t.us.p50).c_str(), fit_time(t.us.p99).c_str(),
              fit_bandwidth(bus_bandwidth(bytes, t)).c_str(), t.way.name().c_str());
}

Json row_json(std::size_t bytes, const Timed& t) {
  return {{"size", bytes},       {"variant", t.way.variant()},
          {"way", t.way.name()}, {"iterations", t.us.count},
          {"min", t.us.min},   {"median", t.us.p50},
          {"p99", t.us.p99},     {"bus_bw", bus_bandwidth(bytes, t)}};
}

void write_json(const Options& o, const Json& rows) {
  const Json j{
      {"tool", "limit_bench"}, {"ranks", 2}, {"processor", read_topology().processor}, {"rows", rows}};
  write_file(o.json, j.dump(1));
}

int run(const Options& o) {
  require(usable_processors() >= 2, Errc::unsupported,
          "two processes that spin need two processors; this one may use ", usable_processors());
  Json rows = Json::array();
  bool begun = false;
  measure(o.plan, [&](std::size_t bytes, const std::vector<Timed>& timed) {
    if (!std::exchange(begun, true))
      std::printf("# %10s  %15s  %7s  %7s  %7s  %6s  way\n# %10s  %15s  %7s  %7s  %7s  %6s\n", "size",
                  "variant", "min", "median", "p99", "busbw", "(B)", "", "(us)", "(us)", "(us)", "(GB/s)");
    for (const Timed& t : o.all ? timed : fastest(timed)) {
      print_row(bytes, t);
      rows.push_back(row_json(bytes, t));
    }
    std::fflush(stdout);
  });
  if (!o.json.empty()) write_json(o, rows);
  return 0;
}

}  // namespace
}  // namespace rz::bench::limit

int main(int argc, char** argv) {
  using namespace rz::bench::limit;
  const auto parse_arguments = [&] { return parse(argc, argv); };
  return rz::run_program("limit_bench", parse_arguments, run);
}
