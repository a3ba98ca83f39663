// Measures several communicators over the same ranks that are used concurrently.

#include <algorithm>
#include <cstdio>

#include "bench/concurrent/measure.h"
#include "bench/support/bench_main.h"
#include "bench/support/common_options.h"
#include "bench/support/numbers.h"
#include "bench/support/statistics.h"
#include "comm/core/byte_size.h"
#include "comm/core/error.h"

namespace rz::bench::concurrent {
namespace {

constexpr const char* details =
    "Each communicator has a stream of all_reduces (sum of f32, out of place) with one call in flight at a\n"
    "time. Three phases are interleaved; results are those of rank 0, medians over rounds:\n"
    "  alone    each stream alone\n"
    "  threads  all streams concurrently, each on a thread of its own\n"
    "  in_turn  all streams concurrently on one thread: starts one call of each, then waits for all of them\n"
    "  share    calls per second of a stream, relative to those of a stream of its size alone. In the row\n"
    "           \"all\" their sum: 1 means as much work as the streams do one after the other\n"
    "  fair     the smallest share divided by the largest\n"
    "busbw is 2 (n - 1) / n times bytes per second; p50 and p99 are the times of a call, from start to end.\n"
    "\n"
    "  rzrun -n 2 concurrent_bench --bytes 8,8,8,8\n"
    "  rzrun -n 2 concurrent_bench --bytes 8,4M -R 1\n"
    "\n"
    "Exit status: 0 success, 2 a wrong command line, 1 any other error.";

struct Options {
  Plan plan;
  std::string bytes = "1K,1K,1K,1K";
  double seconds = 0.2, timeout_s = 0;
};

void complete(Options& o) {
  for (const std::string& word : split_at_commas(o.bytes)) {
    const std::size_t bytes = byte_size_of_flag("--bytes", word);
    require(bytes >= 8 && bytes % 4 == 0, Errc::config, "--bytes: ", word,
            " is not a number of floats of 4 bytes, two at least");
    o.plan.bytes.push_back(bytes);
  }
  o.plan.phase = std::chrono::duration<double>(o.seconds);
}

void add_options(CommandLine& line, Options& o) {
  line.add_option(
      "--bytes", o.bytes,
      "Bytes of a call, one entry per communicator, separated by commas; K, M, G are binary; default " +
          o.bytes);
  line.add_option("--rounds", o.plan.rounds, "Rounds of the three phases; default 5").within(1, 1 << 20);
  line.add_option("--seconds", o.seconds, "Duration of a phase; default 0.2").within(0.001, 3600.0);
  add_memory(line, o.plan.registered);
  add_timeout(line, o.timeout_s);
}

struct Row {
  Figure figure;
  std::size_t bytes = 0;
  double alone = 0;  ///< calls per second of a stream of this size that runs alone

  double share() const { return figure.calls_per_s / alone; }
  double bus_bytes_per_s(int ranks) const {
    return figure.calls_per_s * static_cast<double>(bytes) * 2 * (ranks - 1) / ranks;
  }
};

/// Medians of one phase over all rounds.
struct Table {
  const char* way;
  std::vector<Row> rows;

  double shares() const {
    double sum = 0;
    for (const Row& r : rows) sum += r.share();
    return sum;
  }
  double fairness() const {
    const auto [min, max] =
        std::minmax_element(rows.begin(), rows.end(), [](auto& a, auto& b) { return a.share() < b.share(); });
    return min->share() / max->share();
  }
};

double median(const std::vector<Round>& rounds, Phase Round::*phase, std::size_t stream,
              double Figure::*which) {
  std::vector<double> values;
  for (const Round& r : rounds) values.push_back((r.*phase)[stream].*which);
  return summarize(values).p50;
}

/// Calls per second of a stream that runs alone: the median over all streams of this size, since they differ
/// by noise only.
double alone(const std::vector<Round>& rounds, const Plan& plan, std::size_t bytes) {
  std::vector<double> values;
  for (const Round& r : rounds)
    for (std::size_t i = 0; i < plan.bytes.size(); ++i)
      if (plan.bytes[i] == bytes) values.push_back(r.alone[i].calls_per_s);
  return summarize(values).p50;
}

Table table_of(const char* way, const std::vector<Round>& rounds, Phase Round::*phase, const Plan& plan) {
  Table t{way, {}};
  for (std::size_t i = 0; i < plan.bytes.size(); ++i) {
    Row row{.bytes = plan.bytes[i], .alone = alone(rounds, plan, plan.bytes[i])};
    for (double Figure::*which : {&Figure::calls_per_s, &Figure::p50_us, &Figure::p99_us})
      row.figure.*which = median(rounds, phase, i, which);
    t.rows.push_back(row);
  }
  return t;
}

void print(const Communicator& comm, const Options& o, const std::vector<Table>& tables) {
  std::printf("# %d ranks, %s; %zu communicators, memory -R %d; medians of %d rounds of %g s a phase\n",
              comm.size(), comm.describe().c_str(), o.plan.bytes.size(), o.plan.registered, o.plan.rounds,
              o.seconds);
  std::printf("# %6s %6s %10s %10s %9s %9s %9s %6s %6s\n", "way", "stream", "bytes", "calls/s", "busbw GB/s",
              "p50 us", "p99 us", "share", "fair");
  for (const Table& t : tables) {
    double calls = 0, bus = 0;
    for (std::size_t i = 0; i < t.rows.size(); ++i) {
      const Row& r = t.rows[i];
      calls += r.figure.calls_per_s, bus += r.bus_bytes_per_s(comm.size());
      std::printf("%8s %6zu %10zu %10.0f %10.3f %9.2f %9.2f %6.3f\n", t.way, i, r.bytes, r.figure.calls_per_s,
                  r.bus_bytes_per_s(comm.size()) / 1e9, r.figure.p50_us, r.figure.p99_us, r.share());
    }
    if (t.way == tables.front().way) continue;  // in this phase streams do not run concurrently
    std::printf("%8s %6s %10s %10.0f %10.3f %9s %9s %6.3f %6.3f\n", t.way, "all", "", calls, bus / 1e9, "",
                "", t.shares(), t.fairness());
  }
}

Json json_of(const Communicator& comm, const Options& o, const std::vector<Table>& tables) {
  Json j{{"ranks", comm.size()},    {"backend", comm.describe()}, {"local_register", o.plan.registered},
         {"rounds", o.plan.rounds}, {"seconds", o.seconds},       {"ways", Json::object()}};
  for (const Table& t : tables) {
    Json streams = Json::array();
    for (const Row& r : t.rows)
      streams.push_back({{"bytes", r.bytes},
                         {"calls_per_s", r.figure.calls_per_s},
                         {"bus_bytes_per_s", r.bus_bytes_per_s(comm.size())},
                         {"p50_us", r.figure.p50_us},
                         {"p99_us", r.figure.p99_us},
                         {"alone_calls_per_s", r.alone},
                         {"share", r.share()}});
    j["ways"][t.way] = {{"streams", streams}, {"shares", t.shares()}, {"fairness", t.fairness()}};
  }
  return j;
}

Json run(const Options& o) {
  Communicator comm = connect_group(o.timeout_s);
  const auto rounds = Measure(comm, o.plan).run();
  if (comm.rank() != 0) return nullptr;
  const std::vector<Table> tables{table_of("alone", rounds, &Round::alone, o.plan),
                                  table_of("threads", rounds, &Round::threads, o.plan),
                                  table_of("in_turn", rounds, &Round::in_turn, o.plan)};
  print(comm, o, tables);
  return json_of(comm, o, tables);
}

constexpr BenchProgram<Options> program{
    "concurrent_bench",
    "Times several communicators over the same ranks that are used concurrently.",
    details,
    add_options,
    complete,
    run};

}  // namespace
}  // namespace rz::bench::concurrent

int main(int argc, char** argv) { return rz::bench::bench_main(rz::bench::concurrent::program, argc, argv); }
