#include <memory>
#include <set>

#include "comm/backends/mpi/mpi.h"
#include "comm/backends/mpi/mpi_calls.h"
#include "comm/backends/mpi/world_exchange.h"
#include "comm/backends/mpi_plugin.h"
#include "comm/core/deadline.h"
#include "comm/core/error.h"
#include "comm/progress/progress_engine.h"

namespace rz {

namespace mpi {

namespace {

constexpr std::size_t min_thread_wake_bytes = 1 << 20;  // below this, the caller usually waits at once

class MpiBackend final : public Backend {
 public:
  MpiBackend(MpiRuntime& runtime, const MpiOptions& options, int rank, std::unique_ptr<MpiCalls> calls)
      : runtime_(runtime),
        options_(options),
        calls_(*calls),
        engine_(std::make_shared<ProgressEngine>(
            std::move(calls), ProgressOptions{.rank = rank,
                                              .timeout = options.timeout,
                                              .thread = runtime.thread_multiple() ? ProgressOptions::own
                                                                                  : ProgressOptions::none,
                                              .failure_poll = idle_poll,
                                              .wake_bytes = min_thread_wake_bytes})) {
    engine_->start();
  }
  ~MpiBackend() override {
    runtime_.begin_departure();
    engine_->stop();
  }

  Work submit(std::span<const CollectiveCall> group) override { return Work(engine_->submit(group)); }
  void abort(const std::string& reason) noexcept override { engine_->abort(reason); }
  void cancel(const Error& cause) override { engine_->cancel(cause); }
  std::unique_ptr<Backend> split(std::span<const int> members, int number) override;
  std::shared_ptr<std::byte> allocate(std::size_t bytes) override;
  bool moves_device_memory() const override { return runtime_.cuda_aware(); }
  std::string describe() const override {
    return concat("mpi (", runtime_.library(), moves_device_memory() ? ", CUDA-aware)" : ")");
  }

 private:
  MpiRuntime& runtime_;
  const MpiOptions options_;
  MpiCalls& calls_;  // engine_ owns it
  const std::shared_ptr<ProgressEngine> engine_;
};

std::unique_ptr<Backend> backend_over(MpiRuntime& runtime, CommPair comms, MpiOptions options) {
  if (!runtime.cuda_aware()) options.device = {};
  int rank = 0, size = 1;
  check(MPI_Comm_rank(comms.control, &rank), "MPI_Comm_rank");
  check(MPI_Comm_size(comms.control, &size), "MPI_Comm_size");
  return std::make_unique<MpiBackend>(runtime, options, rank,
                                      std::make_unique<MpiCalls>(runtime, comms, rank, size, options));
}

std::unique_ptr<Backend> MpiBackend::split(std::span<const int> members, int number) {
  CommPair comms;
  engine_->run_exclusively([&] { comms = calls_.split(members, number); });
  MpiOptions options = options_;
  options.waits.communicator += "/split";
  return backend_over(runtime_, comms, options);
}

std::shared_ptr<std::byte> MpiBackend::allocate(std::size_t bytes) {
  auto memory = allocate_host(bytes);
  std::fill_n(memory.get(), bytes, std::byte{0});
  return memory;
}

/// The MPI_COMM_WORLD ranks of the group's ranks, exchanged through the store: then all have arrived.
std::vector<int> world_ranks(const MpiLaunchInfo& launch_info, const CommOptions& options) {
  int own = 0;
  check(MPI_Comm_rank(MPI_COMM_WORLD, &own), "MPI_Comm_rank");
  launch_info.store->set(concat("mpi/", launch_info.rank), concat(own));
  const Deadline end = Deadline::after(options.rendezvous_timeout);
  std::vector<int> ranks;
  std::set<int> distinct;
  const auto rank_of = [&](int r) {
    try {
      return parse_number<int>(launch_info.store->get(concat("mpi/", r), end));
    } catch (const Error& e) {
      if (e.code() != Errc::timeout) throw;
      throw Error(Errc::timeout,
                  concat("rank ", launch_info.rank, ": rank ", r, " did not connect by MPI within ",
                         seconds(options.rendezvous_timeout)),
                  r);
    }
  };
  for (int r = 0; r < launch_info.size; ++r) {
    const auto rank = rank_of(r);
    require(rank.has_value(), Errc::rendezvous, "rank ", r,
            " published no rank of MPI; is another job using this "
            "store?");
    ranks.push_back(*rank);
    require(
        distinct.insert(ranks.back()).second, Errc::unsupported, "rank ", r,
        " is in the same MPI process as another rank of its group; the MPI backend needs a process a rank, "
        "started by mpirun");
  }
  return ranks;
}

std::unique_ptr<Backend> connect(MpiRuntime& runtime, const MpiLaunchInfo& launch_info,
                                 const CommOptions& options) {
  require_world(launch_info.rank, launch_info.launched_size, launch_info.launcher, runtime);
  const std::vector<int> ranks = world_ranks(launch_info, options);
  return backend_over(runtime, split(runtime, MPI_COMM_WORLD, ranks, world_tag, options.rendezvous_timeout),
                      {.device = options.device,
                       .timeout = options.timeout,
                       .rendezvous_timeout = options.rendezvous_timeout,
                       .deterministic = options.deterministic,
                       .waits = options.waits()});
}

// A rank that failed to connect must not wait for the others at exit.
Backend* connect_or_fail(const MpiLaunchInfo& launch_info, const CommOptions& options) {
  MpiRuntime& runtime = MpiRuntime::started(launch_info.rank, options.rendezvous_timeout);
  try {
    return connect(runtime, launch_info, options).release();
  } catch (...) {
    runtime.mark_failed();
    throw;
  }
}

}  // namespace
}  // namespace mpi

std::unique_ptr<Backend> mpi_backend(MPI_Comm comm, const MpiOptions& options) {
  int initialised = 0;
  mpi::check(MPI_Initialized(&initialised), "MPI_Initialized");
  require(initialised, Errc::invalid_argument, "connect_mpi() before MPI_Init");
  mpi::MpiRuntime& runtime = mpi::MpiRuntime::instance();
  int inter = 0;
  require(comm != MPI_COMM_NULL, Errc::invalid_argument, "connect_mpi() was given MPI_COMM_NULL");
  mpi::check(MPI_Comm_test_inter(comm, &inter), "MPI_Comm_test_inter");
  require(!inter, Errc::unsupported, "connect_mpi() takes no intercommunicator; merge it first");
  require(options.max_call_bytes >= 8 && options.max_call_bytes <= std::size_t{1} << 30,
          Errc::invalid_argument, "max_call_bytes must be from 8 to 2^30, got ", options.max_call_bytes);
  return mpi::backend_over(runtime, mpi::duplicate(comm, options.rendezvous_timeout), options);
}

}  // namespace rz

// Entry points that are looked up by name (comm/bootstrap/mpi_library.h, comm/backends/mpi_plugin.h).
extern "C" {
const char* rz_mpi_plugin_version() { return RZ_VERSION; }
void rz_mpi_plugin_exchange(const rz::MpiExchange& exchange, std::string& answer) {
  answer = rz::mpi::exchange(exchange);
}
rz::Backend* rz_mpi_plugin_connect(const rz::MpiLaunchInfo& launch_info, const rz::CommOptions& options) {
  return rz::mpi::connect_or_fail(launch_info, options);
}
}
