#include "bench/harness/harness.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <exception>
#include <mutex>
#include <optional>
#include <thread>

#include "bench/harness/report.h"
#include "bench/harness/values.h"
#include "bench/support/memory.h"
#include "bench/support/numbers.h"
#include "comm/bootstrap.h"
#include "comm/core/cuda/runtime.h"
#include "comm/core/error.h"
#include "comm/core/graph.h"
#include "comm/core/memory.h"
#include "comm/topology.h"

namespace rz::bench {
namespace {

using Clock = std::chrono::steady_clock;
double us_between(Clock::time_point begin, Clock::time_point end) {
  return std::chrono::duration<double, std::micro>(end - begin).count();
}
double us_since(Clock::time_point begin) { return us_between(begin, Clock::now()); }

/// One rank's memory. Small messages rotate through it, so that successive iterations do not meet in one
/// cache line.
struct Arena {
  std::shared_ptr<std::byte> memory;
  std::size_t bytes = 0;
  Registration registration{};

  std::size_t places(std::size_t extent) const {
    return extent ? std::max<std::size_t>(bytes / extent, 1) : 1;
  }
};

/// What one row of the table measures.
struct Case {
  std::size_t bytes;
  DType dtype;
  ReduceOp op;
  int root;
};

class RankRun {
 public:
  RankRun(const Collective& collective, const Options& options, Communicator comm, const Hooks& hooks,
          const Print* print)
      : collective_(collective),
        options_(options),
        comm_(std::move(comm)),
        hooks_(hooks),
        print_(print),
        device_(comm_.options().device),
        stream_(options.null_stream ? Stream::borrow(device_, nullptr) : Stream::create(device_)) {
    results_.start_time = now();
    allocate();
  }

  int run(int local_rank) {
    results_.devices = gather_devices(local_rank);
    print([&] {
      return start_lines(collective_, options_) + device_lines(results_.devices) +
             str("# Backend: ", comm_.describe(), "\n") + memory_lines();
    });
    print([&] { return header_lines(options_); });
    for (int cycle = 0; options_.cycles == 0 || cycle < options_.cycles; ++cycle) run_cycle();
    print([&] { return results_.closing_lines(collective_); });
    results_.end_time = now();
    if (comm_.rank() == 0 && !options_.json.empty())
      write_json(options_.json, collective_, options_, results_);
    return results_.failed_checks ? 7 : 0;
  }

 private:
  RankInfo self() const { return {comm_.rank(), comm_.size()}; }

  template <class F>
  void print(const F& text) const {
    if (print_) (*print_)(text());
  }

  ElementCounts shape_of(std::size_t bytes, DType t) const {
    return collective_.counts(bytes / size_of(t), size_of(t), self());
  }

  void allocate() {
    constexpr std::size_t most = 1 << 20;  // so that -m gives small operations memory of their own
    if (options_.max_bytes <= most / static_cast<std::size_t>(options_.aggregated))
      apart_ = options_.aggregated;
    std::size_t send = 0, recv = 0, off = 0;
    for (DType t : options_.dtypes) {
      const ElementCounts s = shape_of(options_.max_bytes, t);
      send = std::max(send, s.send * size_of(t));
      recv = std::max({recv, s.recv * size_of(t), s.in_place_extent * size_of(t)});
      off = std::max(off, static_cast<std::size_t>(options_.misalign) * size_of(t));
    }
    send_ = make_arena(send * static_cast<std::size_t>(apart_), off);
    recv_ = make_arena(recv * static_cast<std::size_t>(apart_), off);
  }

  Arena make_arena(std::size_t bytes, std::size_t off) {
    Memory memory = memory_of(comm_, options_.registered, std::max<std::size_t>(bytes + off, 64), stream_);
    return {std::move(memory.data), bytes, std::move(memory.registration)};
  }

  std::vector<DeviceLine> gather_devices(int local_rank) {
    DeviceLine own{comm_.rank(), ::getpid(), local_rank};
    ::gethostname(own.host, sizeof own.host - 1);
    if (device_.kind == Device::host)
      read_topology().processor.copy(own.processor, sizeof own.processor - 1);
    else
      describe_card(own);
    std::vector<DeviceLine> all(comm_.size());
    comm_.all_gather({&own, sizeof own, DType::u8}, {all.data(), all.size() * sizeof own, DType::u8}).wait();
    return all;
  }

  void describe_card(DeviceLine& line) const {
    cuda::DeviceProperties card;
    cuda::check(cuda::runtime().get_properties(&card, device_.index), "cudaGetDeviceProperties", device_);
    line.local_rank = device_.index;
    line.pci_domain = card.pci_domain, line.pci_bus = card.pci_bus, line.pci_device = card.pci_device;
    card.name.copy(line.processor, sizeof line.processor - 1);
  }

  std::string memory_lines() const {
    if (!options_.memory_report) return "";
    rusage use{};
    ::getrusage(RUSAGE_SELF, &use);
    return str("# Memory: ", human_bytes(send_.bytes + recv_.bytes), " of buffers a rank, ",
               human_bytes(static_cast<unsigned long long>(use.ru_maxrss) * 1024),
               " of rank 0's process at most so far\n");
  }

  void run_cycle() {
    const int first = collective_.has_root ? std::max(options_.root, 0) : 0;
    const int last = collective_.has_root && options_.root < 0 ? comm_.size() - 1 : first;
    for (DType dtype : options_.dtypes)
      for (ReduceOp op : options_.ops)
        for (int root = first; root <= last; ++root) run_sizes({options_.min_bytes, dtype, op, root});
  }

  void run_sizes(Case c) {
    if (c.op.kind == ReduceOp::premul_sum) c.op.factor = premul_factor(comm_.rank());
    for (std::size_t bytes : {options_.max_bytes, options_.min_bytes})
      for (int i = 0; i < options_.warmup; ++i) start({bytes, c.dtype, c.op, c.root}, false, i).wait();
    for (c.bytes = options_.min_bytes; c.bytes <= options_.max_bytes; c.bytes = options_.next_size(c.bytes))
      run_row(c);
  }

  void run_row(const Case& c) {
    const ElementCounts s = shape_of(c.bytes, c.dtype);
    Row row{s.size_column * size_of(c.dtype),
            s.count_column,
            type_name(c.dtype),
            collective_.has_op ? name(c.op) : "none",
            collective_.has_root ? c.root : -1,
            {},
            {},
            options_.timestamps ? now() : ""};
    print([&] { return options_.verbose ? choice_line(c, row.bytes) : ""; });
    row.out_of_place = measure(c, false);
    row.in_place = measure(c, true);
    print(
        [&] { return row_line(row) + (options_.per_iteration ? sample_lines(row, options_.skipped) : ""); });
    results_.rows.push_back(std::move(row));
  }

  std::string choice_line(const Case& c, std::size_t bytes) const {
    const CallChoice choice = comm_.explain(collective_.kind, bytes, options_.registered > 0, c.dtype, c.op);
    return str("# ", bytes, " B: ", choice.algorithm, " over ", choice.transport,
               choice.chunk_bytes ? ", pieces of " + human_bytes(choice.chunk_bytes) : "", " (", choice.why,
               ")\n");
  }

  Figure measure(const Case& c, bool in_place) {
    Figure f;
    f.us = over_ranks(time(c, in_place, f.samples));
    if (options_.percentiles) f.slowest = summarize(slowest_ranks(f.samples), options_.skipped);
    if (!options_.per_iteration) f.samples.clear();
    const ElementCounts s = shape_of(c.bytes, c.dtype);
    f.alg_bw = f.us > 0 ? static_cast<double>(s.size_column * size_of(c.dtype)) / (f.us * 1e3) : 0;
    f.bus_bw = f.alg_bw * collective_.busbw_factor(comm_.size());
    if (options_.checks && (!in_place || collective_.checks_in_place)) f.wrong = check(c, in_place);
    return f;
  }

  /// Microseconds of one operation on this rank. Where iterations are timed, each begins as the one before
  /// ends.
  double time(const Case& c, bool in_place, std::vector<double>& samples) {
    if (options_.times_iterations() && options_.graph == 0)
      samples.assign(static_cast<std::size_t>(options_.iterations), 0);  // touched: no page is missing later
    start(c, in_place, 0).wait();
    comm_.barrier().wait();
    if (options_.graph > 0) return time_graph(c, in_place);
    const bool in_stream =
        device_.kind != Device::host && !options_.times_iterations() && options_.blocking == 0;
    double us = 0;
    const auto begin = Clock::now();
    auto last = begin;
    for (int i = 0; i < options_.iterations; ++i) {
      us += in_stream ? put_iteration(c, in_place, i) : iterate(c, in_place, i);
      if (samples.empty()) continue;
      const auto end = Clock::now();
      samples[static_cast<std::size_t>(i)] = us_between(last, end);
      last = end;
    }
    for (const Work& w : std::exchange(works_, {})) w.wait();
    if (!options_.cpu_time) us = us_since(begin);
    for (double& one : samples) one /= options_.aggregated;
    return us / options_.iterations / options_.aggregated;
  }

  /// One iteration that nobody waits for yet.
  double put_iteration(const Case& c, bool in_place, int i) {
    const auto begin = Clock::now();
    const int n = options_.aggregated;
    if (options_.grouped()) {
      works_.push_back(start_group(c, in_place, i * n, n));
      works_.back().wait_on(stream_);
      return us_since(begin);
    }
    for (int a = 0; a < n; ++a) {
      works_.push_back(start(c, in_place, i * n + a));
      works_.back().wait_on(stream_);  // one after the other, as in a program's stream
    }
    return us_since(begin);
  }

  /// All iterations as one CUDA graph, replayed.
  double time_graph(const Case& c, bool in_place) {
    const Graph graph = capture(stream_, [&] {
      for (int i = 0; i < options_.iterations; ++i) put_iteration(c, in_place, i);
    });
    works_.clear();
    comm_.barrier().wait();
    const auto begin = Clock::now();
    for (int i = 0; i < options_.graph; ++i) graph.launch(stream_);
    const double handed_over = us_since(begin);
    stream_.synchronize();
    const double us = options_.cpu_time ? handed_over : us_since(begin);
    return us / options_.graph / options_.iterations / options_.aggregated;
  }

  /// One iteration; returns the microseconds it took to hand its operations over.
  double iterate(const Case& c, bool in_place, int i) {
    const auto begin = options_.cpu_time ? Clock::now() : Clock::time_point();
    double handed_over = 0;
    if (options_.aggregated == 1) {
      const Work work = start(c, in_place, i);
      if (options_.cpu_time) handed_over = us_since(begin);
      work.wait();
    } else {
      handed_over = iterate_aggregated(c, in_place, i);
    }
    if (options_.blocking == 1 || options_.blocking == 3) comm_.barrier().wait();
    return handed_over;
  }

  /// The operations of an iteration are in flight together; with -z 1 and 2 one after the other.
  double iterate_aggregated(const Case& c, bool in_place, int i) {
    const auto begin = Clock::now();
    const int n = options_.aggregated;
    works_.clear();
    if (options_.grouped()) works_.push_back(start_group(c, in_place, i * n, n));
    for (int a = 0; a < n && !options_.grouped(); ++a) {
      works_.push_back(start(c, in_place, i * n + a));
      if (options_.blocking == 1 || options_.blocking == 2) works_.back().wait();
      if (options_.blocking == 1) comm_.barrier().wait();
    }
    const double handed_over = us_since(begin);
    for (const Work& w : works_) w.wait();
    return handed_over;
  }

  /// How the calls of a case turn through the memory: worked out once a case, and without a division where
  /// one iteration follows the other, since the smallest messages take less time than a few of those.
  struct Turns {
    struct Side {
      std::byte* base = nullptr;
      std::size_t extent = 0, places = 0, at = 0;
      void turn(bool follows, unsigned iteration) {
        if (follows)
          at = at + extent < extent * places ? at + extent : 0;
        else
          at = extent * (iteration % places);
      }
    };
    Case of;
    bool in_place;
    Side in, out;
    Call call;
    unsigned next = ~0u;  // iteration

    bool are_of(const Case& c, bool place) const {
      return of.bytes == c.bytes && of.dtype == c.dtype && of.op.kind == c.op.kind && of.root == c.root &&
             in_place == place;
    }
  };

  // Every rank turns through as many places, even where ranks hold different amounts.
  Turns turns_of(const Case& c, bool in_place) {
    const ElementCounts s = shape_of(c.bytes, c.dtype);
    const std::size_t element = size_of(c.dtype), off = options_.misalign * element;
    const std::size_t sent = s.send * element, got = (in_place ? s.in_place_extent : s.recv) * element;
    Turns::Side in{send_.memory.get() + off, sent, send_.places(sent)};
    Turns::Side out{recv_.memory.get() + off, got, recv_.places(got)};
    if (in_place) {
      in = out;
      in.base += s.in_place_in * element, out.base += s.in_place_out * element;
    }
    return {c, in_place, in, out, {comm_, nullptr, nullptr, s, c.dtype, c.op, c.root, in_place, stream_}};
  }

  const Call& call(const Case& c, bool in_place, int iteration) {
    if (!turns_ || !turns_->are_of(c, in_place)) turns_.emplace(turns_of(c, in_place));
    Turns& t = *turns_;
    const auto i = static_cast<unsigned>(iteration);
    const bool follows = i == t.next;
    t.in.turn(follows, i), t.out.turn(follows, i);
    t.next = i + 1;
    t.call.in = t.in.base + t.in.at, t.call.out = t.out.base + t.out.at;
    return t.call;
  }

  Work start(const Case& c, bool in_place, int iteration) {
    return collective_.start(call(c, in_place, iteration));
  }

  Work start_group(const Case& c, bool in_place, int first, int operations) {
    Group group = comm_.group();
    for (int a = 0; a < operations; ++a) collective_.add(group, call(c, in_place, first + a));
    return group.launch();
  }

  double over_ranks(double us) {
    if (options_.average == Average::rank0) return us;
    constexpr ReduceOp::Kind kinds[] = {ReduceOp::sum, ReduceOp::avg, ReduceOp::min, ReduceOp::max};
    comm_.all_reduce({&us, 1}, kinds[static_cast<int>(options_.average)]).wait();
    return us;
  }

  /// Of each iteration the time of the rank that took longest. Asked after the timing, so that it costs none.
  std::vector<double> slowest_ranks(std::vector<double> us) {
    comm_.all_reduce({us.data(), us.size()}, ReduceOp::max).wait();
    return us;
  }

  /// Wrong elements of all ranks in all checks.
  std::size_t check(const Case& c, bool in_place) {
    std::uint64_t wrong = 0;
    for (int i = 0; i < options_.checks; ++i) {
      std::uint64_t now_wrong = check_once(c, in_place, i);
      comm_.all_reduce({&now_wrong, 1}, ReduceOp::sum).wait();
      results_.failed_checks += now_wrong != 0;
      wrong += now_wrong;
    }
    return wrong;
  }

  /// As the timed operations were started; of a group all that have memory of their own.
  std::size_t check_once(const Case& c, bool in_place, int i) {
    const int n = options_.grouped() ? apart_ : 1, first = i * n;
    for (int a = 0; a < n; ++a) prepare(c, in_place, first + a);
    const Work work = options_.grouped() ? start_group(c, in_place, first, n) : start(c, in_place, first);
    work.wait_on(stream_);
    std::vector<std::vector<std::byte>> results;
    for (int a = 0; a < n; ++a) {
      const Call one = call(c, in_place, first + a);
      results.emplace_back(one.counts.recv * size_of(c.dtype));
      copy_bytes(results.back().data(), one.out, results.back().size(), stream_);
    }
    stream_.synchronize();
    work.wait();
    std::size_t wrong = 0;
    for (int a = 0; a < n; ++a)
      wrong += wrong_in(results[static_cast<std::size_t>(a)], c, in_place, first + a);
    return wrong;
  }

  static std::uint64_t seed(const Case& c, bool in_place, int operation) {
    return c.bytes * 31 + static_cast<std::uint64_t>(operation) * 2 + in_place;
  }

  Pattern input(const Case& c, bool in_place, int operation, int rank) const {
    return Pattern::input(c.dtype, c.op, rank, comm_.size(), seed(c, in_place, operation));
  }

  void prepare(const Case& c, bool in_place, int operation) {
    const Call one = call(c, in_place, operation);
    const std::size_t element = size_of(c.dtype);
    set_bytes(one.out, 0xa5, one.counts.recv * element, stream_);
    std::vector<std::byte> values(one.counts.send * element);
    input(c, in_place, operation, comm_.rank()).fill(values.data(), one.counts.send);
    copy_bytes(const_cast<std::byte*>(one.in), values.data(), values.size(), stream_);
  }

  std::size_t wrong_in(std::vector<std::byte>& result, const Case& c, bool in_place, int operation) {
    const ElementCounts shape = shape_of(c.bytes, c.dtype);
    if (hooks_.before_check) hooks_.before_check(comm_.rank(), {result.data(), shape.recv, c.dtype});
    std::size_t wrong = 0;
    for (const ExpectedRange& p : collective_.expected(shape, self(), c.root)) {
      const Pattern want = p.source == ExpectedRange::reduced
                               ? Pattern::combined(c.dtype, c.op, comm_.size(), seed(c, in_place, operation))
                               : input(c, in_place, operation, p.source);
      wrong += want.wrong(result.data() + p.at * size_of(c.dtype), p.count, p.from);
    }
    return wrong;
  }

  const Collective& collective_;
  const Options& options_;
  Communicator comm_;
  const Hooks& hooks_;
  const Print* print_;
  const Device device_;
  const Stream stream_;
  int apart_ = 1;  ///< operations of an iteration that have memory of their own
  Arena send_, recv_;
  std::optional<Turns> turns_;
  Results results_;
  std::vector<Work> works_;
};

/// The first failure of this process's ranks is the cause; those after it are its consequences.
class FirstError {
 public:
  void keep(std::exception_ptr e) {
    const std::lock_guard lock(mutex_);
    if (!first_) first_ = e;
  }
  void rethrow() const {
    if (first_) std::rethrow_exception(first_);
  }

 private:
  std::mutex mutex_;
  std::exception_ptr first_;
};

}  // namespace

int run(const Collective& collective, const Options& options, const Print& print, const Hooks& hooks) {
  const Place place = place_from_environment();
  const int here = options.threads * options.gpus, size = place.size * here;
  require(options.root < size, Errc::config, "-r ", options.root, ", but there are only ", size, " ranks");
  if (options.cuda) cuda::require_device({Device::cuda, 0});
  const auto store = place.size > 1 ? store_for(place) : memory_store();
  CommOptions comm_options;
  if (options.timeout_s > 0)
    comm_options.timeout = std::chrono::milliseconds(static_cast<long>(options.timeout_s * 1e3));
  if (!options.backend.empty()) comm_options.backend = options.backend;
  if (!options.algorithm.empty()) comm_options.algorithm = options.algorithm;

  std::vector<int> status(here, 0);
  FirstError error;
  const auto rank_main = [&](int thread) {
    try {
      const int rank = place.rank * here + thread, local_rank = place.local_rank * here + thread;
      CommOptions own = comm_options;
      if (options.cuda) own.device = {Device::cuda, local_rank % cuda::device_count()};
      RankRun rank_run(collective, options, Communicator::connect(rank, size, store, own), hooks,
                       rank == 0 ? &print : nullptr);
      status[thread] = rank_run.run(local_rank);
    } catch (...) {
      error.keep(std::current_exception());
    }
  };
  std::vector<std::jthread> others;
  for (int t = 1; t < here; ++t) others.emplace_back(rank_main, t);
  rank_main(0);
  others.clear();
  error.rethrow();
  return status[0];
}

}  // namespace rz::bench
