#include "bench/harness/harness.h"

#include <sys/resource.h>

#include <chrono>
#include <exception>
#include <mutex>
#include <optional>
#include <thread>

#include "bench/harness/buffers.h"
#include "bench/harness/report.h"
#include "bench/harness/timing.h"
#include "bench/harness/validation.h"
#include "bench/harness/variables.h"
#include "comm/bootstrap.h"
#include "comm/core/environment.h"
#include "comm/core/error.h"
#include "comm/device/cuda_runtime.h"
#include "tools/command_line/output_file.h"

namespace rz::bench {
namespace {

Stream stream_for(const Options& options, Device device) {
  return options.null_stream ? Stream::borrow(device, nullptr) : Stream::create(device);
}

double reduce_over_ranks(Communicator& comm, Average average, double us) {
  if (average == Average::rank0) return us;
  constexpr ReduceOp::Kind kinds[] = {ReduceOp::sum, ReduceOp::avg, ReduceOp::min, ReduceOp::max};
  comm.all_reduce({&us, 1}, kinds[static_cast<int>(average)]).wait();
  return us;
}

/// The maximum over ranks of each iteration's time. Call after the timing; collective.
std::vector<double> max_over_ranks(Communicator& comm, std::vector<double> us) {
  comm.all_reduce({us.data(), us.size()}, ReduceOp::max).wait();
  return us;
}

std::string memory_line(std::size_t read_buffer_bytes) {
  rusage use{};
  ::getrusage(RUSAGE_SELF, &use);
  return concat("# Memory: ", human_bytes(read_buffer_bytes), " of buffers per rank, ",
                human_bytes(static_cast<unsigned long long>(use.ru_maxrss) * 1024),
                " of rank 0's process at most so far\n");
}

/// What only rank 0 does.
struct Output {
  const Print& print;
  OutputFile* json;  ///< of -J; may be null
};

/// Runs all cases on one rank.
class RankRun {
 public:
  /// `output` is null on all ranks but 0.
  RankRun(const Collective& collective, const Options& options, Communicator comm, const Hooks& hooks,
          const Output* output)
      : collective_(collective),
        options_(options),
        comm_(std::move(comm)),
        output_(output),
        stream_(stream_for(options, comm_.options().device)),
        buffers_(comm_, collective, options, stream_),
        timing_(collective, options, comm_, stream_),
        validation_(collective, options, comm_, stream_, buffers_.disjoint_operations(), hooks) {}

  int run(int local_rank, Results& results) {
    results.devices = gather_devices(comm_, local_rank);
    print([&] {
      return start_lines(collective_, options_) + device_lines(results.devices) +
             concat("# Backend: ", comm_.describe(), "\n") +
             (options_.memory_report ? memory_line(buffers_.bytes()) : "");
    });
    print([&] { return header_lines(options_); });
    const bool endless = options_.cycles == 0;
    for (int cycle = 0; endless || cycle < options_.cycles; ++cycle) {
      if (endless) results.rows.clear();
      run_cycle(results);
      if (endless) write_json(results);
    }
    print([&] { return results.closing_lines(collective_); });
    int status = results.failed() ? status_failed : 0;  // bandwidths differ between ranks with -a 0
    comm_.broadcast({&status, 1}, 0).wait();
    write_json(results);
    return status;
  }

 private:
  static constexpr int status_failed = 7;

  template <class F>
  void print(const F& text) const {
    if (output_) output_->print(text());
  }

  void write_json(Results& results) const {
    if (!output_ || !output_->json) return;
    results.end_time = now();
    output_->json->write(json_text(collective_, options_, results));
  }

  void run_cycle(Results& results) {
    const int first = collective_.has_root ? std::max(options_.root, 0) : 0;
    const int last = collective_.has_root && options_.root < 0 ? comm_.size() - 1 : first;
    for (DType dtype : options_.dtypes)
      for (ReduceOp op : options_.ops)
        for (int root = first; root <= last; ++root) run_sizes({0, dtype, op, root}, results);
  }

  void run_sizes(Case c, Results& results) {
    if (c.op.kind == ReduceOp::premul_sum) c.op.factor = premul_factor(comm_.rank());
    for (std::size_t bytes : {options_.max_bytes, options_.min_bytes}) {
      c.bytes = bytes;
      warm_up(c);
    }
    for (c.bytes = options_.min_bytes; c.bytes <= options_.max_bytes; c.bytes = options_.next_size(c.bytes))
      run_row(c, results);
  }

  void warm_up(const Case& c) {
    BufferRotation rotation = buffers_.rotation(c);
    for (int i = 0; i < options_.warmup; ++i) start_operation(collective_, rotation, i).wait();
  }

  void run_row(Case c, Results& results) {
    const ElementCounts n = counts_of(collective_, c, {comm_.rank(), comm_.size()});
    Row row{n.size_column * size_of(c.dtype),
            n.count_column,
            type_name(c.dtype),
            collective_.has_op ? name(c.op) : "none",
            collective_.has_root ? c.root : -1,
            {},
            {},
            options_.timestamps ? now() : ""};
    print([&] { return options_.verbose ? choice_line(c, row.bytes) : ""; });
    row.out_of_place = measure(c, row.bytes, results);
    c.in_place = true;
    row.in_place = measure(c, row.bytes, results);
    print(
        [&] { return row_line(row) + (options_.per_iteration ? sample_lines(row, options_.skipped) : ""); });
    results.add(std::move(row));
  }

  std::string choice_line(const Case& c, std::size_t bytes) const {
    const AlgorithmChoice choice =
        comm_.explain(collective_.kind, bytes, options_.registered > 0, c.dtype, c.op);
    return concat("# ", bytes, " B: ", choice.algorithm, " over ", choice.transport,
                  choice.chunk_bytes ? ", pieces of " + human_bytes(choice.chunk_bytes) : "", " (",
                  choice.reason, ")\n");
  }

  /// `bytes`: the value of the column size, from which the bandwidths are computed.
  Figure measure(const Case& c, std::size_t bytes, Results& results) {
    Timed timed = timing_.time(buffers_.rotation(c));
    Figure f;
    f.us = reduce_over_ranks(comm_, options_.average, timed.mean_us);
    if (options_.percentiles)
      f.slowest = summarize(max_over_ranks(comm_, timed.iterations_us), options_.skipped);
    if (options_.per_iteration) f.samples = std::move(timed.iterations_us);
    f.alg_bw = f.us > 0 ? static_cast<double>(bytes) / (f.us * 1e3) : 0;
    f.bus_bw = f.alg_bw * collective_.busbw_factor(comm_.size());
    if (options_.checks && (!c.in_place || collective_.checks_in_place)) {
      const CheckResult found = validation_.check(c, buffers_.rotation(c));
      f.wrong = found.wrong_elements;
      results.failed_checks += found.failed_checks;
    }
    return f;
  }

  const Collective& collective_;
  const Options& options_;
  Communicator comm_;
  const Output* output_;
  const Stream stream_;
  RankBuffers buffers_;
  Timing timing_;
  Validation validation_;
};

CommOptions comm_options(const Options& options, int local_rank) {
  CommOptions comm;
  if (options.timeout_s > 0)
    comm.timeout = std::chrono::milliseconds(static_cast<long>(options.timeout_s * 1e3));
  if (!options.backend.empty()) comm.backend = options.backend;
  if (!options.algorithm.empty()) comm.algorithm = options.algorithm;
  if (options.cuda) comm.device = {Device::cuda, local_rank % cuda::device_count()};
  return comm;
}

/// Calls rank_main(0) on this thread and rank_main(1) to rank_main(count - 1) on other threads; rethrows the
/// first failure.
void run_in_threads(int count, const std::function<void(int)>& rank_main) {
  std::mutex mutex;
  std::exception_ptr
      error;  // the first failure of the ranks of this process; later ones are its consequences
  const auto guarded = [&](int thread) {
    try {
      rank_main(thread);
    } catch (...) {
      const std::lock_guard lock(mutex);
      if (!error) error = std::current_exception();
    }
  };
  {
    std::vector<std::jthread> others;
    for (int t = 1; t < count; ++t) others.emplace_back(guarded, t);
    guarded(0);
  }
  if (error) std::rethrow_exception(error);
}

}  // namespace

int run(const Collective& collective, const Options& options, const Print& print, const Hooks& hooks) {
  const std::optional<double> min_bandwidth = min_bandwidth_from_environment(collective);
  const LaunchInfo info = launch_info_from_environment();
  const int here = options.threads * options.gpus, size = info.size * here;
  require(options.root < size, Errc::config, "-r ", options.root, ", but there are only ", size, " ranks");
  if (options.cuda) cuda::require_device({Device::cuda, 0});
  environment();  // a wrong variable is an error of the input, for which no file is emptied
  std::optional<OutputFile> json;
  if (info.rank == 0 && !options.json.empty()) json.emplace("-J", options.json);
  const Output output{print, json ? &*json : nullptr};
  Results results;  // of thread 0
  results.min_bandwidth = min_bandwidth;
  results.start_time = now();
  if (json) {
    Results unfinished = results;
    unfinished.error = unfinished_error;
    json->hold(json_text(collective, options, unfinished));
  }
  int status = 0;  // of thread 0; equal on all ranks
  try {
    const auto store = store_for_launch(info, std::chrono::seconds(30), options.backend);
    run_in_threads(here, [&](int thread) {
      const int rank = info.rank * here + thread, local_rank = info.local_rank * here + thread;
      RankRun rank_run(collective, options,
                       Communicator::connect(rank, size, store, comm_options(options, local_rank)), hooks,
                       rank == 0 ? &output : nullptr);
      Results other;
      const int own_status = rank_run.run(local_rank, thread == 0 ? results : other);
      if (thread == 0) status = own_status;
    });
  } catch (const std::exception& e) {
    results.error = one_line(e);
    results.end_time = now();
    if (json) json->try_write(json_text(collective, options, results));
    throw;
  }
  return status;
}

}  // namespace rz::bench
