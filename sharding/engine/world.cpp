#include "sharding/engine/world.h"

#include <chrono>
#include <cstdio>
#include <optional>
#include <string_view>
#include <thread>
#include <utility>

#include "comm/core/deadline.h"
#include "comm/core/error.h"
#include "comm/device/cuda_runtime.h"
#include "sharding/parallel/rank_agreement.h"

namespace rz {

World World::from_environment(const WorldOptions& options) {
  const LaunchInfo launch = launch_info_from_environment();
  CommOptions comm = options.comm;
  comm.device = cuda::device_from_name(options.device, launch.local_rank);
  if (comm.name.empty()) comm.name = "world";
  return World(Communicator::connect(launch.rank, launch.size, store_for_launch(launch), comm), launch);
}

World::World(Communicator communicator, LaunchInfo launch)
    : launch_(std::move(launch)),
      communicator_(std::move(communicator)),
      threads_(fair_threads(communicator_)) {}

Communicator World::new_communicator(std::optional<ReductionOrder> order) {
  return std::move(*communicator_.split(0, rank(), order));
}

void World::reduce(std::span<double> values, ReduceOp op) {
  communicator_.all_reduce(Buffer(values.data(), values.size()), op).wait();
}

double World::reduce(double value, ReduceOp op) {
  reduce(std::span(&value, 1), op);
  return value;
}

double World::reduce(const Mean& mean) {
  double both[] = {mean.sum, mean.count};
  reduce(both, ReduceOp::sum);
  return both[0] / both[1];
}

Tensor World::gather(const Tensor& rows, const Stream& stream) {
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
    World world = World::from_environment(printing);
    return run_and_report(world, body);
  } catch (const Error& e) {
    std::fprintf(stderr, "%s\n", one_line(e).c_str());
    return e.code() == Errc::config ? 2 : 1;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s\n", one_line(e).c_str());
    return 1;
  }
}

}  // namespace rz
