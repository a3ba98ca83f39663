#include "bench/harness/options.h"

#include <algorithm>

#include "bench/collectives.h"
#include "bench/support/common_options.h"
#include "bench/support/numbers.h"
#include "comm/core/byte_size.h"
#include "comm/core/error.h"
#include "tools/command_line/command_line.h"

namespace rz::bench {
namespace {

constexpr const char* what_else =
    "The number of ranks is processes times -t times -g: without a launcher one process; under rzrun, "
    "mpirun,\n"
    "torchrun or srun, those of the launch. Only rank 0 prints. On host memory an iteration starts the\n"
    "operation and waits for it, so `time` is the latency that a caller sees. On devices the iterations are\n"
    "put into a stream, which is waited for at the end. Ranks use the devices of their machine round-robin.\n"
    "\n"
    "  rzrun -n 2 all_reduce_perf -b 8 -e 128M -f 2\n"
    "  all_reduce_perf -t 2 -b 64K -e 64K -d all -o all\n"
    "  all_reduce_perf --backend peer_cuda -g 2 -b 8 -e 256M -f 2\n"
    "\n"
    "NCCL_TESTS_MIN_BW=X: the average bus bandwidth must be 0.9 X GB/s at least.\n"
    "\n"
    "Exit status: 0 success, 7 wrong results or less bandwidth than that, 2 a wrong command line, 1 any "
    "other\n"
    "error.";

/// In the order of nccl-tests, in which -d all runs.
constexpr struct {
  DType dtype;
  const char* name;
} dtype_names[] = {
    {DType::i8, "int8"},    {DType::u8, "uint8"},      {DType::i32, "int32"},     {DType::u32, "uint32"},
    {DType::i64, "int64"},  {DType::u64, "uint64"},    {DType::f16, "half"},      {DType::f32, "float"},
    {DType::f64, "double"}, {DType::bf16, "bfloat16"}, {DType::f8e4m3, "f8e4m3"}, {DType::f8e5m2, "f8e5m2"},
};
constexpr ReduceOp::Kind all_ops[] = {ReduceOp::sum, ReduceOp::prod, ReduceOp::max,
                                      ReduceOp::min, ReduceOp::avg,  ReduceOp::premul_sum};

std::vector<DType> dtypes_of(const std::string& word) {
  std::vector<DType> all;
  for (const auto& d : dtype_names) all.push_back(d.dtype);
  if (word == "all") return all;
  try {
    return {dtype_from_name(word)};
  } catch (const Error& e) {
    fail(Errc::config, e.what(), " or all");
  }
}

std::vector<ReduceOp> ops_of(const std::string& word) {
  if (word == "all") return {std::begin(all_ops), std::end(all_ops)};
  try {
    return {op_from_name(word)};
  } catch (const Error& e) {
    fail(Errc::config, e.what(), " or all");
  }
}

/// Flags that are converted before they are stored in Options.
struct Words {
  std::string min = "32M", max = "32M", step = "1M", op = "sum", dtype = "float";
  std::string device;
  int parallel_init = 0, cta_policy = 0, device_implementation = 0, device_ctas = 16, average = 1;
};

void add_sizes(CommandLine& line, Options& o, Words& w) {
  line.add_option("-t,--nthreads", o.threads, "Threads of this process, each a rank; default 1")
      .within(1, 1 << 30);
  line.add_option("-g,--ngpus", o.gpus, "Devices per thread, each a rank with a thread of its own; default 1")
      .within(1, 1 << 30);
  line.add_option("-b,--minbytes", w.min,
                  "Smallest size; K, M, G are binary, KB, MB, GB decimal; default 32M");
  line.add_option("-e,--maxbytes", w.max, "Largest size; default 32M");
  line.add_option("-i,--stepbytes", w.step, "Increment of the size; default 1M");
  line.add_option("-f,--stepfactor", o.step_factor, "Factor of the size, instead of -i").within(1.0, 1e9);
  line.add_option("-n,--iters", o.iterations, "Iterations per size; default 20").within(1, 1 << 30);
  line.add_option("-w,--warmup_iters", o.warmup, "Not timed, at the largest and the smallest size; default 1")
      .within(0, 1 << 30);
  line.add_option("-m,--agg_iters", o.aggregated,
                  "Operations per iteration, submitted as one group; the time is that of one operation. Up "
                  "to 16 KiB each, or 1 MiB in total, each has its own buffers; default 1")
      .within(1, 1 << 30);
  line.add_flag("--separate", o.separate, "With -m: separate calls, one after the other, instead of a group");
  line.add_option("-N,--run_cycles", o.cycles, "Runs of all sizes, 0 for ever; default 1").within(0, 1 << 30);
}

void add_operation(CommandLine& line, Options& o, Words& w) {
  line.add_option("-o,--op", w.op, "sum, prod, max, min, avg, mulsum or all; default sum");
  line.add_option(
      "-d,--datatype", w.dtype,
      "int8, uint8, int32, uint32, int64, uint64, half, float, double, bfloat16, f8e4m3, f8e5m2 or all; "
      "default float");
  line.add_option("-r,--root", o.root, "Root of a rooted collective; -1: all ranks in turn; default 0")
      .within(-1, 1 << 20);
  line.add_option("-c,--check", o.checks,
                  "Passes that check results, after the timing; 0 for none; default 1")
      .within(0, 1 << 20);
}

void add_running(CommandLine& line, Options& o, Words& w) {
  line.add_option("-p,--parallel_init", w.parallel_init, "Accepted; threads always join at once");
  line.add_option("-y,--stream_null", o.null_stream, "1: the device's null stream; default 0");
  line.add_option("-z,--blocking", o.blocking,
                  "1: wait for each operation, with a barrier; 2: wait for each operation (with -m one by "
                  "one, not as a group); 3: a barrier after each iteration; default 0")
      .within(0, 3);
  line.add_option("-G,--cudagraph", o.graph,
                  "Capture the iterations in a CUDA graph; number of replays; default 0")
      .within(0, 1 << 20);
  line.add_option("-x,--cta_policy", w.cta_policy, "Only 0 is supported");
  line.add_option("-D,--device_implementation", w.device_implementation, "Only 0 is supported");
  line.add_option("-V,--device_cta_count", w.device_ctas, "Has no effect without -D");
  line.add_option(
          "-R,--local_register", o.registered,
          "1: buffers of Communicator::allocate (with nccl: registered); 2: of allocate_symmetric (with "
          "nccl: symmetric windows; with peer_cuda among processes: read in place); 3: plain memory, then "
          "Communicator::register_buffer; default 0, plain memory")
      .within(0, 3);
  line.add_option("-u,--unalign", o.misalign, "Misalignment of the buffers in elements; default 0")
      .within(0, 4096);
  add_timeout(line, o.timeout_s);
}

void add_ours(CommandLine& line, Options& o, Words& w) {
  line.add_option("--device", w.device, "host or cuda; default cuda for nccl and peer_cuda, else host")
      .one_of({"host", "cuda"});
  line.add_option(
      "--backend", o.backend,
      "Implementation of the collectives: auto, native, mpi, nccl or peer_cuda; default RZ_BACKEND or auto, "
      "which on devices is the first of nccl, peer_cuda and native (staged through the host) that works");
  line.add_option("--algorithm", o.algorithm,
                  "Algorithm of this collective (an unknown name lists them), or "
                  "all_reduce=ring,broadcast=tree; default RZ_ALGORITHM or the tuning table (RZ_TUNING). "
                  "Algorithms that do not sum in rank order need RZ_DETERMINISTIC=0")
      .type_name("NAME");
}

void add_report(CommandLine& line, Options& o, Words& w) {
  line.add_option("-C,--report_cputime", o.cpu_time,
                  "1: time until the operation was submitted, not until it completed");
  line.add_option("-a,--average", w.average, "Over ranks: 0 rank 0's, 1 mean, 2 min, 3 max; default 1")
      .within(0, 3);
  line.add_option("-S,--report_timestamps", o.timestamps, "1: date and time behind each row");
  line.add_option(
      "-J,--output_file", o.json,
      "Write the results, or the error, there as JSON; with -N 0 after each cycle, with its rows");
  line.add_option("-M,--memory_report,--memory", o.memory_report,
                  "1: memory of the buffers and of the process");
  line.add_option("-I,--per_iteration,--per_iter_timing", o.per_iteration,
                  "1: a line of statistics over rank 0's iterations");
  line.add_flag("--percentiles", o.percentiles,
                "Six more columns: p50, p99 and maximum time (us) out of place and in place, over the timed "
                "iterations; each time is that of the slowest rank of the iteration. Reads the clock once "
                "per iteration; on devices it waits for each iteration");
  line.add_flag("--touch", o.touch,
                "Host memory: write the input before and read the result after each iteration, as a program "
                "does. Neither is in the time, but a rank waits for another that is still at it");
  line.add_flag("--verbose", o.verbose,
                "A line before each row: algorithm, transport and chunk size of its calls, and the reason");
  line.add_option("-K,--skip_samples,--per_iter_skip", o.skipped,
                  "First iterations that -I and --percentiles leave out; default 0")
      .within(0, 1 << 30);
}

void settle(const Collective& c, Options& o, const Words& w) {
  const bool device_backend = o.backend == "nccl" || o.backend == "peer_cuda";
  o.cuda = w.device == "cuda" || (w.device.empty() && device_backend);
  require(o.cuda || !device_backend, Errc::config, "--backend ", o.backend,
          " moves device memory; leave out --device host");
  require(o.cuda || o.gpus == 1, Errc::config, "-g ", o.gpus,
          ": on host memory a thread has one device; use -t or more processes, or --device cuda");
  require(o.cuda || !o.null_stream, Errc::config,
          "-y: host memory has no null stream; leave it out, or use --device cuda");
  require(o.cuda || o.graph == 0, Errc::config,
          "-G: host memory has no CUDA graphs; leave it out, or use --device cuda");
  require(!o.cuda || o.registered != 3, Errc::config,
          "-R 3: register_buffer is for host memory; -R 1 and -R 2 are for devices, too");
  require(!o.null_stream || o.graph == 0, Errc::config,
          "-y with -G: CUDA captures no null stream in a graph; leave out one of them");
  require(!o.percentiles || o.graph == 0, Errc::config,
          "--percentiles with -G: a graph's iterations have no times of their own; leave out one of them");
  require(!o.touch || (!o.cuda && o.aggregated == 1 && !o.cpu_time), Errc::config,
          "--touch is for host memory and one operation per iteration; leave out --device cuda, -m and -C");
  require(!o.percentiles || o.skipped < o.iterations, Errc::config, "-K ", o.skipped, " of -n ", o.iterations,
          " leaves no iteration for --percentiles");
  const bool one = !o.algorithm.empty() && o.algorithm.find('=') == std::string::npos;
  if (one && c.kind != rz::Collective::all_reduce)  // a name without a collective applies to all_reduce
    o.algorithm.insert(0, concat(name(c.kind), "="));
  require(w.cta_policy == 0, Errc::config, "-x ", w.cta_policy, ": only 0 is supported; leave it out");
  require(w.device_implementation == 0, Errc::config, "-D ", w.device_implementation,
          ": only 0 is supported; leave it out, --backend peer_cuda runs kernels of ringzero");
  o.min_bytes = byte_size_of_flag("-b", w.min);
  o.max_bytes = byte_size_of_flag("-e", w.max);
  o.step_bytes = byte_size_of_flag("-i", w.step);
  require(o.min_bytes <= o.max_bytes, Errc::config, "-b ", w.min, " is more than -e ", w.max);
  require(o.step_factor > 1 || o.step_bytes > 0 || o.min_bytes == o.max_bytes, Errc::config,
          "-i 0 never reaches -e");
  o.dtypes = dtypes_of(w.dtype);
  o.ops = ops_of(w.op);
  if (!c.has_op) o.ops = {ReduceOp::sum};
  o.average = static_cast<Average>(w.average);
}

}  // namespace

std::size_t Options::next_size(std::size_t bytes) const {
  const auto scaled = static_cast<std::size_t>(static_cast<double>(bytes) * step_factor);
  return step_factor > 1 ? std::max(scaled, bytes + 1) : bytes + std::max<std::size_t>(step_bytes, 1);
}

ParsedOptions parse_options(const Collective& collective, int argc, const char* const* argv) {
  ParsedOptions parsed;
  Words words;
  CommandLine line(concat("Times ", collective.name,
                          " on host or device memory; flags and output are those of nccl-tests."),
                   concat(collective.name, "_perf"), what_else);
  add_sizes(line, parsed.options, words);
  add_operation(line, parsed.options, words);
  add_running(line, parsed.options, words);
  add_ours(line, parsed.options, words);
  add_report(line, parsed.options, words);
  parsed.help = line.parse(argc, argv);
  if (!parsed.help.empty()) return parsed;
  parsed.options.arguments.assign(argv, argv + argc);
  settle(collective, parsed.options, words);
  return parsed;
}

const char* type_name(DType t) {
  for (const auto& d : dtype_names)
    if (d.dtype == t) return d.name;
  return "?";
}

}  // namespace rz::bench
