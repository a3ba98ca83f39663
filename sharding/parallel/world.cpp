#include "sharding/parallel/world.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/random.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "comm/bootstrap.h"
#include "comm/core/deadline.h"
#include "comm/core/environment.h"
#include "comm/core/error.h"
#include "comm/device/cuda_runtime.h"
#include "comm/flight_dump.h"
#include "comm/os/child.h"
#include "comm/os/error_file.h"
#include "comm/os/flight_recorder.h"
#include "comm/os/process.h"
#include "sharding/parallel/rank_agreement.h"
#include "sharding/parallel/rank_consistency.h"

namespace rz {

World World::from_environment(const WorldOptions& options) {
  const LaunchInfo launch = launch_info_from_environment();
  CommOptions comm = options.comm;
  comm.device = cuda::device_from_name(options.device, launch.local_rank);
  if (comm.name.empty()) comm.name = "world";
  return World(Communicator::connect(launch.rank, launch.size,
                                     store_for_launch(launch, comm.rendezvous_timeout, comm.backend), comm),
               launch);
}

World::World(Communicator communicator)
    : communicator_(std::move(communicator)), threads_(fair_threads(communicator_)) {}

World::World(Communicator communicator, const LaunchInfo& launch) : World(std::move(communicator)) {
  local_rank_ = launch.local_rank;
}

Communicator World::new_communicator(std::optional<ReductionOrder> order, CallSite site) {
  return std::move(*communicator_.split(0, rank(), order, false, site));
}

void World::renew(const std::string& reason, CallSite site) {
  const OuterSite outer(site);
  communicator_.renew(reason);
  for (const auto& f : std::vector(renewed_))
    if (const auto living = f.lock()) (*living)();
}

std::shared_ptr<void> World::on_renewal(std::function<void()> f) {
  std::erase_if(renewed_, [](const auto& ended) { return ended.expired(); });
  auto added = std::make_shared<std::function<void()>>(std::move(f));
  renewed_.push_back(added);
  return added;
}

int World::ranks_per_node(CallSite site) {
  const OuterSite outer(site);
  const std::string& id = communicator_.options().host_id;
  const std::vector<std::string> nodes = all_gather_text(communicator_, id.empty() ? machine_id() : id);
  const auto n =
      std::ranges::find_if(nodes, [&](const std::string& node) { return node != nodes[0]; }) - nodes.begin();
  if (std::ssize(nodes) % n != 0) return 0;
  std::set<std::string_view> seen;
  for (auto first = nodes.begin(); first != nodes.end(); first += n)
    if (!seen.insert(*first).second || std::count(first, first + n, *first) != n) return 0;
  return static_cast<int>(n);
}

void World::reduce(std::span<double> values, ReduceOp op, CallSite site) {
  communicator_.all_reduce(Buffer(values.data(), values.size()), op, {}, site).wait();
}

double World::reduce(double value, ReduceOp op, CallSite site) {
  reduce(std::span(&value, 1), op, site);
  return value;
}

double World::reduce(const Mean& mean, CallSite site) {
  double both[] = {mean.sum, mean.count};
  reduce(both, ReduceOp::sum, site);
  return both[0] / both[1];
}

Tensor World::gather(const Tensor& rows, const Stream& stream, CallSite site) {
  const OuterSite outer(site);
  const Fact fact{"the tensor", concat(name(rows.dtype()), ' ', name(rows.shape()))};
  require_same("World::gather()", {&fact, 1},
               "pad it to one shape, and leave the padding out behind the call", communicator_);
  require(rows.shape().dims() > 0, Errc::invalid_argument,
          "World::gather() of a scalar; give it a shape, or use reduce()");
  const Tensor own = rows.on_host(stream);
  std::size_t extents[4];
  const int dims = own.shape().dims();
  for (int d = 0; d < dims; ++d) extents[d] = own.shape()[d];
  extents[0] *= static_cast<std::size_t>(size());
  Tensor all = Tensor::empty(Shape(std::span<const std::size_t>(extents, static_cast<std::size_t>(dims))),
                             own.dtype());
  communicator_.all_gather(own.buffer(), all.buffer()).wait();
  return all;
}

void World::print_line(const std::string& line) {
  std::printf("%s\n", line.c_str());
  std::fflush(stdout);
}

namespace {

void print_failure(int rank, const char* what) {
  std::fflush(stdout);
  std::fprintf(stderr, "rank %d: %s\n", rank, what);
}

/// How long a rank waits for the report of another one before it prints its own error.
constexpr std::chrono::milliseconds report_time(500);

/// The failure of the group that this rank learns of within report_time.
std::optional<Error> find_failure(World& world) {
  const Deadline end = Deadline::after(report_time);
  do {
    try {
      world.communicator().synchronize(Stream());
    } catch (const Error& e) {
      return e;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  } while (!end.expired());
  return {};
}

/// True if another rank prints the cause of this rank's error.
bool is_printed_elsewhere(World& world, const Error& mine) {
  if (mine.code() == Errc::aborted) return true;  // with the error of the rank that aborted
  // A rank that throws first destroys its engines, whose peers lose it, and then aborts the world.
  const bool lost = mine.code() == Errc::peer_lost;
  // Errors of one command line are thrown by every rank; rank 0 prints them.
  const bool common = mine.code() == Errc::config && !world.is_main();
  if (!lost && !common) return false;
  const auto failure = find_failure(world);
  return failure && failure->code() == Errc::aborted &&
         (lost || std::string_view(mine.what()).starts_with(failure->what()));
}

int end_with(World& world, const Error& e) {
  write_error_file(e);
  const int status = e.code() == Errc::config ? 2 : 1;
  if (e.code() == Errc::config && e.culprit() >= 0) {  // thrown by all ranks, with the rank that has it
    if (e.culprit() == world.rank()) print_failure(world.rank(), e.what());
    return status;
  }
  if (!is_printed_elsewhere(world, e)) print_failure(world.rank(), e.what());
  world.communicator().abort(e.what());
  return status;
}

int run_and_report(World& world, const std::function<void(World&)>& body) {
  try {
    body(world);
    return 0;
  } catch (const HelpRequest& help) {
    world.print(help.what());
    return 0;
  } catch (const Error& e) {
    return end_with(world, e);
  } catch (const std::exception& e) {
    return end_with(world, Error(Errc::system, one_line(e)));
  }
}

}  // namespace

int run_entrypoint(const std::function<void(World&)>& body, const WorldOptions& options) {
  try {
    WorldOptions printing = options;
    if (!printing.comm.on_wait) printing.comm.on_wait = print_wait;
    flight::record_crashes();
    const flight::DumpOnSignal dumps;
    World world = World::from_environment(printing);
    return run_and_report(world, body);
  } catch (const Error& e) {
    write_error_file(e);
    std::fprintf(stderr, "%s\n", one_line(e).c_str());
    return e.code() == Errc::config ? 2 : 1;
  } catch (const std::exception& e) {
    write_error_file(e);
    std::fprintf(stderr, "%s\n", one_line(e).c_str());
    return 1;
  }
}

namespace {

constexpr std::chrono::milliseconds poll_time(50);
/// Ranks that fail for one reason end within this time. The first to end need not be its cause.
constexpr std::chrono::milliseconds common_failure_time(200);

/// What a rank reports when it fails. Small enough that the kernel writes it to a pipe in one piece.
struct Report {
  int rank = 0;
  Errc code = Errc::system;
  int culprit = -1;  ///< of the error
  char text[2000] = {};
};
static_assert(sizeof(Report) <= 4096);  // PIPE_BUF

/// A pipe to which all ranks write.
class ReportPipe {
 public:
  ReportPipe() {
    if (::pipe2(ends_, O_CLOEXEC | O_NONBLOCK) != 0) fail_errno("pipe2");
  }
  ~ReportPipe() {
    ::close(ends_[0]);
    ::close(ends_[1]);
  }
  ReportPipe(const ReportPipe&) = delete;

  void write(int rank, const Error& e) const {
    Report report{.rank = rank, .code = e.code(), .culprit = e.culprit()};
    std::strncpy(report.text, e.what(), sizeof report.text - 1);
    [[maybe_unused]] const auto n = ::write(ends_[1], &report, sizeof report);
  }
  std::optional<Report> read() const {
    Report report;
    if (::read(ends_[0], &report, sizeof report) == sizeof report) return report;
    return {};
  }

 private:
  int ends_[2];
};

std::string launch_id() {
  unsigned long long bits = 0;
  if (::getrandom(&bits, sizeof bits, 0) != sizeof bits) fail_errno("getrandom");
  return concat("spawn-", ::getpid(), "-", bits);
}

/// The variables of a launcher (comm/bootstrap.h): all ranks are on this node and meet under `id`.
void set_environment(int rank, int ranks, const std::string& id) {
  const auto set = [](const char* name, const std::string& value) { ::setenv(name, value.c_str(), 1); };
  for (const char* name : {"RANK", "LOCAL_RANK"}) set(name, concat(rank));
  for (const char* name : {"WORLD_SIZE", "LOCAL_WORLD_SIZE"}) set(name, concat(ranks));
  set("MASTER_ADDR", "127.0.0.1");
  set("MASTER_PORT", "29500");  // unused: the ranks meet under the identifier
  set("RZ_LAUNCH", id);
  set("TORCHELASTIC_RUN_ID", id);
  if (ranks > 1 && !environment_variable("OMP_NUM_THREADS")) set("OMP_NUM_THREADS", "1");
}

/// Runs in the child. The exit status of the process.
int run_rank(int rank, const std::function<void(World&)>& main, const WorldOptions& options,
             const ReportPipe& reports) {
  try {
    World world = World::from_environment(options);
    main(world);
    return 0;
  } catch (const Error& e) {
    reports.write(rank, e);
  } catch (const std::exception& e) {
    reports.write(rank, Error(Errc::system, one_line(e)));
  }
  return 1;
}

struct Rank {
  int rank = 0;
  Child process;
};

void start(int rank, int ranks, const std::string& id, const std::function<void(World&)>& main,
           const WorldOptions& options, const ReportPipe& reports, std::vector<Rank>& running) {
  std::fflush(nullptr);  // else the child would print what is buffered here once more
  const auto run = [&] {
    for (Rank& other : running) other.process.forget();  // no descriptors of them, which no exec closes
    set_environment(rank, ranks, id);
    const int status = run_rank(rank, main, options, reports);
    std::fflush(nullptr);
    return status;
  };
  running.push_back({rank, Child(run, {.signal_if_orphaned = SIGKILL}, concat("rank ", rank))});
}

/// A rank that ended because another one did reports Errc::aborted or peer_lost; the cause comes first.
bool is_consequence(const Report& r) {
  return (r.code == Errc::aborted || r.code == Errc::peer_lost || r.code == Errc::timeout);
}

Error error_of(const Report& r) {
  return Error(r.code, concat("rank ", r.rank, ": ", r.text), r.culprit < 0 ? r.rank : r.culprit);
}

Error error_of(const Rank& r) {
  const int status = r.process.status();
  const std::string how = status < 0            ? "has an unknown end, since SIGCHLD is ignored"
                          : WIFSIGNALED(status) ? concat("was killed by signal ", WTERMSIG(status), " (",
                                                         ::strsignal(WTERMSIG(status)), ")")
                                                : concat("ended with status ", WEXITSTATUS(status));
  return Error(Errc::peer_lost, concat("rank ", r.rank, " ", how), r.rank);
}

/// The cause of a failure: a rank's own error, else a rank that was killed, else an error that follows from
/// the end of another rank, else a status.
Error cause(const ReportPipe& reports, const std::vector<Rank>& failed) {
  std::optional<Report> consequence;
  while (const auto report = reports.read()) {
    if (!is_consequence(*report)) return error_of(*report);
    if (!consequence) consequence = report;
  }
  for (const Rank& r : failed)
    if (WIFSIGNALED(r.process.status())) return error_of(r);
  return consequence ? error_of(*consequence) : error_of(failed.front());
}

/// Moves the failed ranks among those that end within `time`.
void collect_failures(std::vector<Rank>& running, std::chrono::milliseconds time, std::vector<Rank>& failed) {
  for (const auto end = Deadline::after(time); !running.empty() && !end.expired();) {
    const auto ended = std::ranges::find_if(running, [](Rank& r) { return r.process.ended(); });
    if (ended == running.end()) {
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
      continue;
    }
    if (ended->process.status() != 0) failed.push_back(std::move(*ended));
    running.erase(ended);
  }
}

void end_all(std::vector<Rank>& running, std::chrono::seconds grace) {
  for (const Rank& r : running) r.process.signal(SIGTERM);
  const auto end = Deadline::after(grace);
  for (Rank& r : running) r.process.wait(end);
  for (const Rank& r : running) r.process.signal(SIGKILL);
  running.clear();
}

}  // namespace

void spawn(int ranks, const std::function<void(World&)>& main, const WorldOptions& options) {
  require(ranks > 0, Errc::invalid_argument, "spawn(", ranks, "): the number of ranks must be positive");
  const std::string id = launch_id();
  const ReportPipe reports;
  std::vector<Rank> running;
  for (int rank = 0; rank < ranks; ++rank) start(rank, ranks, id, main, options, reports, running);
  while (!running.empty()) {
    std::vector<Rank> failed;
    collect_failures(running, poll_time, failed);
    if (failed.empty()) continue;
    collect_failures(running, common_failure_time, failed);
    end_all(running, std::chrono::seconds(5));
    throw cause(reports, failed);
  }
}

}  // namespace rz
