#include "sharding/world/world.h"

#include <cstdio>
#include <utility>

#include "comm/core/error.h"
#include "comm/device/cuda_runtime.h"
#include "sharding/world/rank_agreement.h"

namespace rz {

World World::from_environment(const WorldOptions& options) {
  const LaunchInfo launch = launch_info_from_environment();
  CommOptions comm = options.comm;
  comm.device = cuda::device_from_name(options.device, launch.local_rank);
  return World(Communicator::connect(launch.rank, launch.size, store_for_launch(launch), comm), launch);
}

World::World(Communicator communicator, LaunchInfo launch)
    : launch_(std::move(launch)),
      communicator_(std::move(communicator)),
      threads_(fair_threads(communicator_)) {}

Communicator World::new_communicator() { return std::move(*communicator_.split(0, rank())); }

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

int run_and_report(World& world, const std::function<void(World&)>& body) {
  try {
    body(world);
    return 0;
  } catch (const Error& e) {
    // All ranks throw the same error of the configuration (check_on_all_ranks), with the rank that has it.
    const bool agreed = e.code() == Errc::config && e.culprit() >= 0;
    // The rank that aborted has printed its error.
    const bool printed_elsewhere = e.code() == Errc::aborted || (agreed && e.culprit() != world.rank());
    if (!printed_elsewhere) print_failure(world.rank(), e.what());
    if (!agreed) world.communicator().abort(e.what());
    return e.code() == Errc::config ? 2 : 1;
  } catch (const std::exception& e) {
    print_failure(world.rank(), e.what());
    world.communicator().abort(e.what());
    return 1;
  }
}

}  // namespace

int run_entrypoint(const std::function<void(World&)>& body, const WorldOptions& options) {
  try {
    World world = World::from_environment(options);
    return run_and_report(world, body);
  } catch (const Error& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return e.code() == Errc::config ? 2 : 1;
  }
}

}  // namespace rz
