#include "comm/backends/backend_factory.h"

#include <algorithm>

#include "comm/backends/auto_backend.h"
#include "comm/backends/host_staged_backend.h"
#include "comm/backends/mpi_plugin.h"
#include "comm/backends/native/native_backend.h"
#include "comm/backends/nccl/nccl_backend.h"
#include "comm/backends/peer_cuda/peer_cuda_backend.h"
#include "comm/bootstrap/device_location.h"
#include "comm/bootstrap/peer_info.h"
#include "comm/bootstrap/rendezvous.h"
#include "comm/bootstrap/store_internal.h"
#include "comm/core/error.h"
#include "comm/device/cuda_runtime.h"
#include "comm/transport/group/connect_transport.h"
#include "comm/tuning/overrides.h"

namespace rz {

namespace {

// Exchanged among ranks as the name, a newline, and the table; all ranks then use the same text.
std::string serialize_tuning(const tuning::Table& tuning) {
  return tuning.empty() ? "" : concat(tuning.name, '\n', tuning.text());
}
tuning::Table deserialize_tuning(const std::string& text) {
  const std::size_t end = std::min(text.find('\n'), text.size());
  return text.empty() ? tuning::Table{}
                      : tuning::parse_tuning(std::string_view(text).substr(end), text.substr(0, end));
}

/// Up to three ranks, both orders are the same.
void require_rank_order(int size, const CommOptions& options, const char* backend) {
  require(size <= 3 || options.reduction_order == ReductionOrder::rank, Errc::unsupported, "the backend '",
          backend, "' has no reduction order '", name(options.reduction_order), "' for ", size,
          " ranks; set reduction_order (RZ_REDUCTION_ORDER) to 'rank'");
}

std::unique_ptr<Backend> connect_native(int rank, int size, Store& store, const CommOptions& options,
                                        const Inherited& from) {
  // peer_cuda's algorithm names apply to its own kernels, not to host memory.
  const std::string algorithm = options.backend == "peer_cuda" ? std::string() : options.algorithm;
  tuning::AlgorithmOverrides(algorithm, options.deterministic,
                             options.reduction_order);  // throws for a name that cannot be forced
  const tuning::Table tuning = options.tuning.empty() ? tuning::Table{} : tuning::read_tuning(options.tuning);
  const GroupSettings settings{.transport = options.transport,
                               .sockets = options.sockets,
                               .encryption = options.encryption,
                               .algorithm = algorithm,
                               .deterministic = options.deterministic,
                               .reduction_order = options.reduction_order,
                               .tuning = serialize_tuning(tuning)};
  const Deadline deadline = Deadline::after(options.rendezvous_timeout);
  const PeerInfo peers = exchange_peer_info(rank, size, store, settings, options.host_id, deadline);
  auto wire = connect_transport(peers, store,
                                {.interface = options.interface,
                                 .congestion = options.congestion,
                                 .detection = options.detection,
                                 .memory = from.memory,
                                 .parent = {from.failures, from.ranks}},
                                deadline);
  const NativeOptions scheduled{.timeout = options.timeout,
                                .detection = options.detection,
                                .deterministic = options.deterministic,
                                .order = options.reduction_order,
                                .algorithm = algorithm,
                                .tuning = deserialize_tuning(peers.settings.tuning),
                                .waits = options.waits()};
  return make_native_backend(rank, size, std::move(wire), scheduled);
}

std::unique_ptr<Backend> make_native(int rank, int size, Store& store, const CommOptions& options,
                                     const Inherited& from) try {
  return connect_native(rank, size, store, options, from);
} catch (const Error& e) {
  publish_failure(rank, store, e);
  throw;
}

std::unique_ptr<Backend> make_mpi(int rank, int size, Store& store, const CommOptions& options,
                                  const Inherited&) {
  require_rank_order(size, options, "mpi");
  return load_mpi_backend(rank, size, store, options);
}

// ---- device backends; they use `host` to exchange their setup data

std::unique_ptr<Backend> make_host_staged(int rank, int, const std::shared_ptr<Store>&,
                                          const CommOptions& options, const std::shared_ptr<Backend>& host) {
  return host_staged_backend(host, {.device = options.device, .rank = rank, .timeout = options.timeout});
}

std::unique_ptr<Backend> make_host_staged_over_mpi(int rank, int size, const std::shared_ptr<Store>&,
                                                   const CommOptions& options,
                                                   const std::shared_ptr<Backend>& host) {
  return host_staged_over_mpi(host, rank, size, options);
}

std::unique_ptr<Backend> make_peer_cuda(int rank, int size, const std::shared_ptr<Store>&,
                                        const CommOptions& options, const std::shared_ptr<Backend>& host) {
  require_rank_order(size, options, "peer_cuda");
  return peer_cuda_backend(host, {.rank = rank,
                                  .size = size,
                                  .device = options.device,
                                  .timeout = options.timeout,
                                  .algorithm = options.algorithm,
                                  .waits = options.waits()});
}

std::unique_ptr<Backend> make_nccl(int rank, int size, const std::shared_ptr<Store>& store,
                                   const CommOptions& options, const std::shared_ptr<Backend>& host) {
  require_rank_order(size, options, "nccl");
  const nccl::NcclOptions nccl{.rank = rank,
                               .size = size,
                               .device = options.device,
                               .deterministic = options.deterministic,
                               .rendezvous_timeout = options.rendezvous_timeout,
                               .timeout = options.timeout,
                               .waits = options.waits()};
  return nccl_backend(nccl::nccl_api(), store, host, nccl);
}

struct BackendEntry {
  const char* name;
  std::unique_ptr<Backend> (*make_host)(int rank, int size, Store&, const CommOptions&, const Inherited&);
  /// Null: no device support.
  std::unique_ptr<Backend> (*make_device)(int rank, int size, const std::shared_ptr<Store>&,
                                          const CommOptions&, const std::shared_ptr<Backend>& host);
  bool serves_host;  ///< can serve a communicator on the host
};
// On devices, resolve_auto() replaces "auto" by another entry.
constexpr BackendEntry backend_entries[] = {{"auto", make_native, make_host_staged, true},
                                            {"native", make_native, make_host_staged, true},
                                            {"mpi", make_mpi, make_host_staged_over_mpi, true},
                                            {"nccl", make_native, make_nccl, false},
                                            {"peer_cuda", make_native, make_peer_cuda, false}};

const BackendEntry& find_backend(const std::string& backend) {
  std::string names;
  for (const BackendEntry& choice : backend_entries) {
    if (backend == choice.name) return choice;
    names += concat(names.empty() ? "" : ", ", choice.name);
  }
  fail(Errc::config, "the backend '", backend, "' is unknown; choose one of ", names);
}

/// Replaces backend "auto" in `options` by the choice for this group's devices; returns the reason.
std::string resolve_auto(int rank, int size, Backend& host, CommOptions& options) {
  if (options.backend != "auto") return "";
  BackendChoice choice =
      choose_backend(gather_device_ranks(host, rank, size, options), options.deterministic);
  options.backend = choice.backend;
  options.algorithm.clear();  // an algorithm name of the host backend, which already has it
  return choice.reason;
}

}  // namespace

// All ranks must choose alike: the two paths make different MPI calls.
std::unique_ptr<Backend> host_staged_over_mpi(const std::shared_ptr<Backend>& host, int rank, int size,
                                              const CommOptions& options) {
  const auto all = all_gather_value(*host, static_cast<std::uint8_t>(host->moves_device_memory()), size);
  const bool direct = std::find(all.begin(), all.end(), 0) == all.end();
  return host_staged_backend(
      host,
      {.device = options.device, .rank = rank, .timeout = options.timeout, .pass_device_memory = direct});
}

std::unique_ptr<Backend> make_backend(int rank, int size, const std::shared_ptr<Store>& own,
                                      const CommOptions& options, const Inherited& from) {
  const BackendEntry& choice = find_backend(options.backend);
  const bool on_host = options.device.kind == Device::host;
  require(on_host ? choice.serves_host : choice.make_device != nullptr, Errc::unsupported, "rank ", rank,
          ": the backend '", options.backend, "' does not serve memory on ", name(options.device),
          "; use 'native' or 'mpi'");
  require(options.deterministic || options.reduction_order == ReductionOrder::rank, Errc::config,
          "reduction_order '", name(options.reduction_order),
          "' requires `deterministic` (RZ_DETERMINISTIC=1)");
  cuda::require_device(options.device);
  const auto store = from.check_peers ? watching_store(own, from.check_peers) : own;
  auto host = choice.make_host(rank, size, *store, options, from);
  if (on_host) return host;
  const std::shared_ptr<Backend> shared = std::move(host);
  CommOptions resolved = options;
  const std::string why = resolve_auto(rank, size, *shared, resolved);
  auto device = find_backend(resolved.backend).make_device(rank, size, store, resolved, shared);
  return device_and_host_backend(shared, std::move(device), why);
}

}  // namespace rz
