// Measures overlap: gradients are all-reduced in buckets while the ranks still compute other gradients.

#include <cstdio>

#include "bench/overlap/measure.h"
#include "bench/support/bench_main.h"
#include "bench/support/common_options.h"
#include "bench/support/numbers.h"
#include "bench/support/statistics.h"
#include "comm/core/byte_size.h"
#include "comm/core/error.h"

namespace rz::bench::overlap {
namespace {

constexpr const char* details =
    "Each rank computes (arithmetic in the first-level cache, a fixed amount per parameter). When all\n"
    "parameters of a bucket are done, it starts the all_reduce of the bucket (mean of f32, in place). It "
    "waits\n"
    "for all of them at the end. Three phases are interleaved: computing alone, communicating alone, both.\n"
    "Medians over iterations, each of the slowest rank, in ms:\n"
    "  exposed   both, minus computing alone: the cost of communication per step\n"
    "  lost      additional time of computing, since communication needs processors too; a part of exposed\n"
    "  hidden    the percentage of communication alone that is not exposed\n"
    "One row uses the communicator directly, one uses the bucket scheduler.\n"
    "\n"
    "  rzrun -n 2 overlap_bench\n"
    "  rzrun -n 2 overlap_bench --bytes 100M --bucket 4M -R 0 --passes 3000\n"
    "\n"
    "To compare two builds, pass the same --passes to both, as printed by one of them.\n"
    "Exit status: 0 success, 2 a wrong command line, 1 any other error.";

struct Options {
  Plan plan;
  std::string bytes = "495000000", bucket = "25M";
  double timeout_s = 0;
};

void complete(Options& o) {
  o.plan.bytes = byte_size_of_flag("--bytes", o.bytes);
  o.plan.bucket_bytes = byte_size_of_flag("--bucket", o.bucket);
  require(o.plan.bytes >= 4, Errc::config, "--bytes ", o.bytes, ": a gradient has 4 bytes at least");
  require(o.plan.bucket_bytes / 4 >= o.plan.members, Errc::config, "--bucket ", o.bucket,
          " holds less than its ", o.plan.members, " parameters, of 4 bytes at least each");
}

void add_options(CommandLine& line, Options& o) {
  line.add_option("--bytes", o.bytes, "Bytes of all gradients; K, M, G are binary; default " + o.bytes);
  line.add_option("--bucket", o.bucket, "Bytes per bucket; default " + o.bucket);
  line.add_option("--members", o.plan.members, "Parameters per bucket; default 5").within(1, 1 << 20);
  line.add_option("-n,--iters", o.plan.iterations, "Iterations; default 5").within(1, 1 << 20);
  add_memory(line, o.plan.registered, ", as in training");
  line.add_option("--passes", o.plan.passes,
                  "Computing passes per parameter; default: computing takes as long as communicating")
      .within(1L, 1L << 40);
  add_timeout(line, o.timeout_s);
}

struct Row {
  const char* through;
  std::vector<Times> iterations;

  std::vector<double> each(double Times::*which) const {
    std::vector<double> values;
    for (const Times& t : iterations) values.push_back(t.*which);
    return values;
  }
  double median(double Times::*which) const { return summarize(each(which)).p50; }
  double hidden() const {
    const double alone = median(&Times::communication);
    return alone > 0 ? 1 - median(&Times::exposed) / alone : 0;
  }
};

constexpr struct {
  const char* name;
  double Times::*of;
} columns[] = {{"compute", &Times::compute},
               {"communication", &Times::communication},
               {"overlapped", &Times::overlapped},
               {"exposed", &Times::exposed},
               {"lost_compute", &Times::lost_compute}};

void print(const Communicator& comm, const Options& o, const Measure& measure, const std::vector<Row>& rows) {
  std::printf(
      "# %d ranks, %s; %s of f32 in %zu buckets of %s, %zu parameters each, memory -R %d\n"
      "# %ld passes of compute a parameter; medians of %d iterations, ms, of the rank that took longest\n",
      comm.size(), comm.describe().c_str(), human_bytes(o.plan.bytes).c_str(),
      measure.layout().buckets.size(), human_bytes(o.plan.bucket_bytes).c_str(), o.plan.members,
      o.plan.registered, measure.passes(), o.plan.iterations);
  std::printf("# %12s", "through");
  for (const auto& c : columns) std::printf("  %13s", c.name);
  std::printf("  %8s\n", "hidden");
  for (const Row& r : rows) {
    std::printf("%14s", r.through);
    for (const auto& c : columns) std::printf("  %13.2f", r.median(c.of));
    std::printf("  %7.1f%%\n", 100 * r.hidden());
  }
}

Json json_of(const Communicator& comm, const Options& o, const Measure& measure,
             const std::vector<Row>& rows) {
  Json j{{"ranks", comm.size()},
         {"backend", comm.describe()},
         {"bytes", o.plan.bytes},
         {"bucket_bytes", o.plan.bucket_bytes},
         {"buckets", measure.layout().buckets.size()},
         {"members_per_bucket", o.plan.members},
         {"local_register", o.plan.registered},
         {"passes", measure.passes()},
         {"rows", Json::array()}};
  for (const Row& r : rows) {
    Json row{{"through", r.through}};
    for (const auto& c : columns) row[concat(c.name, "_ms")] = r.median(c.of);
    row["hidden"] = r.hidden();
    for (const auto& c : columns) row["samples"][concat(c.name, "_ms")] = r.each(c.of);
    j["rows"].push_back(std::move(row));
  }
  return j;
}

Json run(const Options& o) {
  Communicator comm = connect_group(o.timeout_s);
  Measure measure(comm, o.plan);
  const auto results = measure.run();
  const std::vector<Row> rows{{"communicator", results.communicator}, {"scheduler", results.scheduler}};
  if (comm.rank() != 0) return nullptr;
  print(comm, o, measure, rows);
  return json_of(comm, o, measure, rows);
}

constexpr BenchProgram<Options> program{
    "overlap_bench", "Times the all_reduce of gradients in buckets while the ranks compute.",
    details,         add_options,
    complete,        run};

}  // namespace
}  // namespace rz::bench::overlap

int main(int argc, char** argv) { return rz::bench::bench_main(rz::bench::overlap::program, argc, argv); }
