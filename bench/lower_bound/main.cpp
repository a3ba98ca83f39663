// Lower bound of the time of an all_reduce of floats on two ranks of this machine, for comparison with
// all_reduce_perf.

#include <algorithm>
#include <cstdio>

#include "bench/lower_bound/measure.h"
#include "bench/support/bench_main.h"
#include "bench/support/numbers.h"
#include "comm/core/byte_size.h"
#include "comm/core/error.h"
#include "comm/topology.h"

namespace rz::bench::lower_bound {
namespace {

constexpr const char* methods[] = {"staged", "staged_in_place", "single_copy", "single_copy_in_place",
                                   "mapped", "mapped_in_place"};
constexpr const char* details =
    "Two processes, each on a core of its own, do nothing but the arithmetic of an all_reduce, its copies "
    "and\n"
    "one flag per step. No runtime can be faster with the same method:\n"
    "  staged       a rank accesses its own memory and shared slots: the bound for ordinary memory\n"
    "  mapped       both ranks map all memory: each rank adds its half of both inputs and writes it to both\n"
    "               outputs (or, out of place, adds both inputs to its own output): the bound for memory of\n"
    "               Communicator::allocate (-R 1, -R 2)\n"
    "  single_copy  the kernel copies from the memory of the peer (process_vm_readv), if permitted; only "
    "with\n"
    "               --methods\n"
    "and each of them with the suffix _in_place. A row shows the fastest variant of a method (piece size,\n"
    "cached or streaming stores) by the median; --all prints every variant. Times are those of the slower\n"
    "rank, of iterations without a pause between them, as with all_reduce_perf --percentiles. busbw is "
    "bytes\n"
    "divided by the median.\n"
    "\n"
    "  lower_bound_bench --sizes 8,64K,4M\n"
    "\n"
    "Exit status: 0 success, 2 a wrong command line, 1 any other error.";

struct Options {
  Plan plan;
  std::string sizes = "8,64,1K,8K,64K,512K,4M,32M";
  bool all = false;
  double timeout_s = 60;
};

void complete(Options& o) {
  for (const std::string& word : split_at_commas(o.sizes)) {
    const std::size_t bytes = byte_size_of_flag("--sizes", word);
    require(bytes >= 4 && bytes % 4 == 0, Errc::config, "--sizes: ", word,
            " is not a number of floats of 4 bytes");
    o.plan.sizes.push_back(bytes);
  }
  o.plan.timeout = std::chrono::milliseconds(static_cast<long>(o.timeout_s * 1e3));
}

void add_options(CommandLine& line, Options& o) {
  line.add_option("--sizes", o.sizes, "Bytes, separated by commas; K, M, G are binary; default " + o.sizes);
  line.add_option("--methods", o.plan.methods,
                  "Methods listed below, separated by commas; default all but single_copy")
      .delimiter(',')
      .one_of({std::begin(methods), std::end(methods)});
  line.add_option("-n,--iters", o.plan.iterations,
                  "Iterations per variant and round; default 2000 (64K) to 6 (above 64M)")
      .within(1, 1'000'000);
  line.add_option("--rounds", o.plan.rounds, "Rounds of all variants; default 2").within(1, 1000);
  line.add_flag("--all", o.all, "A row for every variant");
  line.add_option("-T,--timeout", o.timeout_s, "Deadline of a wait in seconds; default 60").within(0.1, 1e6);
}

/// The fastest variant of each method, in the order of `methods`.
std::vector<Timed> fastest(const std::vector<Timed>& timed) {
  std::vector<Timed> best;
  for (const std::string method : methods) {
    const Timed* min = nullptr;
    for (const Timed& t : timed)
      if (t.variant.method() == method && (!min || t.us.p50 < min->us.p50)) min = &t;
    if (min) best.push_back(*min);
  }
  return best;
}

double bus_bandwidth(std::size_t bytes, const Timed& t) {
  return t.us.p50 > 0 ? static_cast<double>(bytes) / (t.us.p50 * 1e3) : 0;
}

void print_row(std::size_t bytes, const Timed& t) {
  std::printf("%12zu  %15s  %s  %s  %s  %s  %s\n", bytes, t.variant.method().c_str(),
              fit_time(t.us.min).c_str(), fit_time(t.us.p50).c_str(), fit_time(t.us.p99).c_str(),
              fit_bandwidth(bus_bandwidth(bytes, t)).c_str(), t.variant.name().c_str());
}

Json row_json(std::size_t bytes, const Timed& t) {
  return {{"size", bytes},
          {"method", t.variant.method()},
          {"variant", t.variant.name()},
          {"iterations", t.us.count},
          {"min", t.us.min},
          {"median", t.us.p50},
          {"p99", t.us.p99},
          {"bus_bw", bus_bandwidth(bytes, t)}};
}

void print_header() {
  std::printf("# %10s  %15s  %7s  %7s  %7s  %6s  variant\n", "size", "method", "min", "median", "p99",
              "busbw");
  std::printf("# %10s  %15s  %7s  %7s  %7s  %6s\n", "(B)", "", "(us)", "(us)", "(us)", "(GB/s)");
}

Json run(const Options& o) {
  require(usable_processors() >= 2, Errc::unsupported,
          "two processes that spin need two processors; this one may use ", usable_processors());
  Json rows = Json::array();
  measure(o.plan, [&](std::size_t bytes, const std::vector<Timed>& timed) {
    if (rows.empty()) print_header();
    for (const Timed& t : o.all ? timed : fastest(timed)) {
      print_row(bytes, t);
      rows.push_back(row_json(bytes, t));
    }
    std::fflush(stdout);
  });
  return {{"ranks", 2}, {"processor", read_topology().processor}, {"rows", rows}};
}

constexpr BenchProgram<Options> program{
    "lower_bound_bench",
    "Lower bound of the time of an all_reduce of floats on two ranks of this machine.",
    details,
    add_options,
    complete,
    run};

}  // namespace
}  // namespace rz::bench::lower_bound

int main(int argc, char** argv) { return rz::bench::bench_main(rz::bench::lower_bound::program, argc, argv); }
