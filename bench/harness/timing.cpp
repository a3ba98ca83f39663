#include "bench/harness/timing.h"

#include <chrono>
#include <numeric>

#include "comm/device/graph.h"

namespace rz::bench {
namespace {

using Clock = std::chrono::steady_clock;
double us_between(Clock::time_point begin, Clock::time_point end) {
  return std::chrono::duration<double, std::micro>(end - begin).count();
}
double us_since(Clock::time_point begin) { return us_between(begin, Clock::now()); }

constexpr std::size_t cache_line_bytes = 64;

/// Writes each cache line of the input and reads each of the output; changes no value.
void touch(const Call& call) {
  auto* in = const_cast<volatile std::byte*>(call.in);  // memory of RankBuffers, which may be written
  const volatile std::byte* out = call.out;
  for (std::size_t i = 0; i < call.input().bytes(); i += cache_line_bytes) in[i] = in[i];
  for (std::size_t i = 0; i < call.output().bytes(); i += cache_line_bytes) static_cast<void>(out[i]);
}

}  // namespace

TimingMode timing_mode(const Options& options, Device device) {
  if (options.graph > 0) return TimingMode::graph;
  if (device.kind != Device::host && !options.times_iterations() && options.blocking == 0)
    return TimingMode::stream;
  return options.aggregated == 1 ? TimingMode::one_operation : TimingMode::several_operations;
}

Work start_operation(const Collective& collective, BufferRotation& rotation, int index) {
  return collective.start(rotation.at(index));
}

Work start_group(const Collective& collective, Communicator& comm, BufferRotation& rotation, int first,
                 int count) {
  Group group = comm.group();
  for (int i = 0; i < count; ++i) collective.add(group, rotation.at(first + i));
  return group.launch();
}

Timing::Timing(const Collective& collective, const Options& options, Communicator& comm, const Stream& stream)
    : collective_(collective),
      options_(options),
      comm_(comm),
      stream_(stream),
      mode_(timing_mode(options, stream.device())) {}

Timed Timing::time(BufferRotation rotation) const {
  Run run{rotation, {}};
  start_operation(collective_, run.rotation, 0).wait();
  comm_.barrier().wait();
  return mode_ == TimingMode::graph ? Timed{time_graph(run), {}} : time_iterations(run);
}

double Timing::per_operation(double us_of_all) const {
  return us_of_all / options_.iterations / options_.aggregated;
}

// If iterations are timed, each starts at the end of the previous one, or with --touch after its touching.
Timed Timing::time_iterations(Run& run) const {
  Timed timed;
  if (options_.times_iterations())  // written before the timing, to avoid page faults in it
    timed.iterations_us.assign(static_cast<std::size_t>(options_.iterations), 0);
  double submitted_us = 0;
  const auto begin = Clock::now();
  auto last = begin;
  for (int i = 0; i < options_.iterations; ++i) {
    if (options_.touch) touch(run.rotation.at(i)), last = Clock::now();
    submitted_us += iterate(run, i);
    if (timed.iterations_us.empty()) continue;
    const auto end = Clock::now();
    timed.iterations_us[static_cast<std::size_t>(i)] = us_between(last, end);
    last = end;
  }
  for (const Work& w : std::exchange(run.works, {})) w.wait();
  const double all_us = options_.touch
                            ? std::accumulate(timed.iterations_us.begin(), timed.iterations_us.end(), 0.0)
                            : us_since(begin);
  timed.mean_us = per_operation(options_.cpu_time ? submitted_us : all_us);
  for (double& us : timed.iterations_us) us /= options_.aggregated;
  return timed;
}

double Timing::time_graph(Run& run) const {
  const Graph graph = capture(stream_, [&] {
    for (int i = 0; i < options_.iterations; ++i) enqueue(run, i);
  });
  run.works.clear();
  comm_.barrier().wait();
  const auto begin = Clock::now();
  for (int i = 0; i < options_.graph; ++i) graph.launch(stream_);
  const double submitted_us = us_since(begin);
  stream_.synchronize();
  return per_operation((options_.cpu_time ? submitted_us : us_since(begin)) / options_.graph);
}

double Timing::iterate(Run& run, int i) const {
  if (mode_ == TimingMode::stream) return enqueue(run, i);
  const double submitted_us =
      mode_ == TimingMode::one_operation ? run_one_operation(run, i) : run_several_operations(run, i);
  if (options_.blocking == 1 || options_.blocking == 3) comm_.barrier().wait();
  return submitted_us;
}

// Reads the clock only if the time is used: reading it takes long compared with a small message.
double Timing::run_one_operation(Run& run, int i) const {
  const auto begin = options_.cpu_time ? Clock::now() : Clock::time_point();
  const Work work = start_operation(collective_, run.rotation, i);
  const double submitted_us = options_.cpu_time ? us_since(begin) : 0;
  work.wait();
  return submitted_us;
}

// With -z 1 and 2 each operation is waited for before the next.
double Timing::run_several_operations(Run& run, int i) const {
  const auto begin = Clock::now();
  const int n = options_.aggregated;
  run.works.clear();
  if (options_.grouped()) run.works.push_back(start_group(collective_, comm_, run.rotation, i * n, n));
  for (int a = 0; a < n && !options_.grouped(); ++a) {
    run.works.push_back(start_operation(collective_, run.rotation, i * n + a));
    if (options_.blocking == 1 || options_.blocking == 2) run.works.back().wait();
    if (options_.blocking == 1) comm_.barrier().wait();
  }
  const double submitted_us = us_since(begin);
  for (const Work& w : run.works) w.wait();
  return submitted_us;
}

// The stream waits for each operation before the next one, as in a typical program.
double Timing::enqueue(Run& run, int i) const {
  const auto begin = Clock::now();
  const int n = options_.aggregated;
  if (options_.grouped()) {
    run.works.push_back(start_group(collective_, comm_, run.rotation, i * n, n));
    run.works.back().wait_on(stream_);
    return us_since(begin);
  }
  for (int a = 0; a < n; ++a) {
    run.works.push_back(start_operation(collective_, run.rotation, i * n + a));
    run.works.back().wait_on(stream_);
  }
  return us_since(begin);
}

}  // namespace rz::bench
