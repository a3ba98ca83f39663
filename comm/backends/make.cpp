#include "comm/backends/make.h"

#include "comm/backends/mpi_plugin.h"
#include "comm/backends/scheduled.h"
#include "comm/core/error.h"
#include "comm/select.h"
#include "comm/transports/connect.h"

namespace rz {

namespace {

void needs_host_memory(const CommOptions& options) {
  require(options.device.kind == Device::host, Errc::unsupported, "a communicator on ", name(options.device),
          " is not available in this build; use host memory");
}

std::unique_ptr<Backend> make_ring(int rank, int size, Store& store, const CommOptions& options) {
  needs_host_memory(options);
  if (!options.algorithm.empty())
    select({.collective = Collective::all_reduce,
            .size = size,
            .deterministic = options.deterministic,
            .forced = options.algorithm});  // refuses what cannot be forced
  const TransportOptions transport{.kind = options.transport,
                                   .interface = options.interface,
                                   .sockets = options.sockets,
                                   .host_id = options.host_id};
  auto wire = connect_transport(rank, size, store, transport, Deadline::after(options.rendezvous_timeout));
  const ScheduledOptions scheduled{
      .timeout = options.timeout, .deterministic = options.deterministic, .algorithm = options.algorithm};
  return scheduled_backend(rank, size, std::move(wire), scheduled);
}

std::unique_ptr<Backend> make_mpi(int rank, int size, Store& store, const CommOptions& options) {
  needs_host_memory(options);
  return mpi_backend_by_plugin(rank, size, store, options);
}

std::unique_ptr<Backend> make_cuda(int rank, int, Store&, const CommOptions& options) {
  fail(Errc::unsupported, "rank ", rank, ": the backend '", options.backend, "' does not serve memory on ",
       name(options.device), "; use 'ring' or 'mpi'");
}

struct Choice {
  const char* name;
  std::unique_ptr<Backend> (*make)(int rank, int size, Store&, const CommOptions&);
};
constexpr Choice choices[] = {{"auto", make_ring},
                              {"ring", make_ring},
                              {"mpi", make_mpi},
                              {"nccl", make_cuda},
                              {"peer_cuda", make_cuda}};

}  // namespace

std::unique_ptr<Backend> make_backend(int rank, int size, Store& store, const CommOptions& options) {
  std::string names;
  for (const Choice& choice : choices) {
    if (options.backend == choice.name) return choice.make(rank, size, store, options);
    names += str(names.empty() ? "" : ", ", choice.name);
  }
  fail(Errc::config, "the backend '", options.backend, "' is unknown; choose one of ", names);
}

}  // namespace rz
