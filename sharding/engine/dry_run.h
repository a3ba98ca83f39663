#pragma once
/// Updates that allocate and communicate as real ones do, without memory, ranks and arithmetic: memory and
/// traffic of any module are those of the code that trains it.

#include <functional>
#include <optional>
#include <utility>

#include "autograd_lite/nn/module.h"
#include "autograd_lite/ops.h"
#include "autograd_lite/tape.h"
#include "comm/communicator.h"
#include "sharding/model/memory_report.h"
#include "sharding/model/options.h"
#include "sharding/parallel/mesh.h"
#include "sharding/parallel/traffic.h"

namespace rz {

class Optimizer;

/// A communicator on meta_device of rank `rank` of `ranks`, whose other ranks are taken to make the same
/// calls with the same data. A call ends when it is waited for, not before. Memory of the meta device is not
/// moved. Calls other than all_gather, reduce_scatter, all_reduce, broadcast and barrier are
/// Errc::unsupported. `transport`: that of AlgorithmChoice.
Communicator meta_communicator(int rank, int ranks, std::string transport = "shm");
/// The place of rank `rank` in a mesh of meta communicators. The sizes are numbers. Layers overlap with what
/// they exchange unless the transport is "shm" (Mesh::layers()).
Mesh meta_mesh(const MeshSizes&, int rank, const std::string& transport = "shm");

/// `mesh` has the sizes of mesh_of() (sharding/strategy/sharding_plan.h).
struct DryRunOptions {
  StrategyKind strategy = StrategyKind::ddp;
  StrategyOptions options;
  Mesh mesh;             ///< meta_mesh(), with which the layers of the module were divided if they are
  int accumulation = 1;  ///< micro-batches of an update; the last one reduces
  std::optional<DType> autocast;
};

/// Runs updates of a module without values on meta_device; it has none afterwards, either. Returns the memory
/// after them and the traffic of each further one. Offload has no effect, as on the host. Memory is as exact
/// as that of plan_training(), and `record` is as there.
///
/// Errors are those of make_strategy() and of `record`; Errc::invalid_argument if the module has values.
std::pair<MemoryUse, MeshTraffic> dry_run(Module&, const Optimizer&,
                                          const std::function<nn::Loss(Tape&)>& record, const DryRunOptions&);

}  // namespace rz
