#pragma once
/// Updates that allocate and communicate as real ones do, without memory, ranks and arithmetic: memory and
/// traffic of any module are those of the code that trains it.

#include <functional>
#include <optional>

#include "autograd_lite/nn/module.h"
#include "autograd_lite/ops.h"
#include "autograd_lite/tape.h"
#include "comm/communicator.h"
#include "sharding/model/flat_layout.h"
#include "sharding/model/memory_report.h"
#include "sharding/model/runtime.h"
#include "sharding/optim/optimizer.h"
#include "sharding/strategy/strategy_options.h"

namespace rz {

/// A communicator on meta_device of rank `rank` of `ranks`, whose other ranks are taken to make the same
/// calls with the same data. A call ends when it is waited for, not before. Memory of the meta device is not
/// moved. Calls other than all_gather, reduce_scatter, all_reduce, broadcast and barrier are
/// Errc::unsupported.
Communicator meta_communicator(int rank, int ranks);

/// Records the loss of a micro-batch, as a training loop does. It makes its inputs with Tape::empty(), or on
/// meta_device (comm/device/meta.h); they are zeros. What it reads from tensors is zero.
using RecordLoss = std::function<nn::Loss(Tape&)>;

struct DryRunOptions {
  StrategyKind strategy = StrategyKind::ddp;
  StrategyOptions options;
  RankOf rank;
  int accumulation = 1;  ///< micro-batches of an update; the last one reduces
  std::optional<DType> autocast;
};

struct DryRun {
  MemoryUse memory;  ///< after some updates
  Traffic update;    ///< of one update after others
};

/// Runs updates of a module without values on meta_device; it has none afterwards, either. Offload has no
/// effect, as on the host.
///
/// Memory is exact where a run has the same order of events. Reductions that overlap with backward end at the
/// latest possible moment here: with StrategyOptions::overlap_comm, zero2 and zero3 may hold fewer buckets in
/// a run. MemoryReport::transient_peak is then a bound, and what is cached may be less or more.
///
/// Errors are those of make_strategy() and of `record`; Errc::invalid_argument if the module has values.
DryRun dry_run(Module&, const Optimizer&, const RecordLoss& record, const DryRunOptions&);

}  // namespace rz
