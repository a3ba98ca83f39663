#pragma once
/// Memory and traffic of a training run before it starts, as DeepSpeed's
/// estimate_zero3_model_states_mem_needs_all_live() has them for the states of a model, here with
/// activations, transient memory and traffic.
///
///     Gpt2 model(config);  // without values
///     const auto record = [&](Tape& t) { return loss_of(model, t, t.empty({4, 1024}, DType::i32)); };
///     const TrainingPlan plan = plan_training(model, {.config = "ds.json"}, record, {.ranks = 8});
///     std::puts(describe(plan.memory).c_str());

#include <functional>
#include <memory>
#include <vector>

#include "../../autograd_lite/nn/module.h"
#include "../../autograd_lite/ops.h"
#include "../../autograd_lite/tape.h"
#include "../model/memory_report.h"
#include "../parallel/mesh.h"
#include "../parallel/traffic.h"
#include "engine_options.h"

namespace rz {

/// Records the loss of a micro-batch, as a training loop does. It makes its inputs with Tape::empty(), or on
/// meta_device (comm/device/meta.h); they are zeros. What it reads from tensors is zero.
using RecordLoss = std::function<nn::Loss(Tape&)>;

/// A module without values, and the loss of its micro-batches.
struct PlannedModule {
  std::shared_ptr<Module> module;
  RecordLoss record;
};
/// Makes one, the same each time.
using MakePlanned = std::function<PlannedModule()>;

struct TrainingPlan {
  StrategyKind strategy = StrategyKind::ddp;
  MeshSizes mesh;  ///< numbers
  RankOf rank;
  MemoryUse memory;    ///< Engine::memory() after a few updates
  MeshTraffic update;  ///< what Strategy::traffic() grows by in each further update
};

/// Plan of a rank of the run that initialize() would begin with this module, which has no values, and these
/// options. `record` records a micro-batch of train_micro_batch_size_per_gpu samples. No memory, no device
/// and no other rank is needed.
///
/// Memory is exact where a run has the same order of events. Reductions that overlap with backward end at the
/// latest possible moment here: with StrategyOptions::overlap_comm, zero2 and zero3 may hold fewer buckets in
/// a run on the host. MemoryReport::transient_peak is then a bound, and what is cached may be less or more.
/// `ranks_per_node`, for a mesh of two "auto", and for the overlap of layers that ranks of several nodes
/// share: 0 if nodes have different numbers; ranks that share layers are then taken to be on one node. For a
/// device, tensors of the tape with padded rows (nn::linear_aligned) are predicted without the padding.
///
/// Where ranks share layers, the module has the parts of this rank afterwards: another plan needs another
/// module. What layers exchange is counted under MeshTraffic::tp.
///
/// Errors are those of initialize(); Errc::config without an optimizer.
TrainingPlan plan_training(Module&, const EngineOptions&, const RecordLoss& record, RankOf,
                           Device::Kind = Device::host, int ranks_per_node = 0);
/// The same of every rank, in their order. Errc::invalid_argument if ranks share layers.
std::vector<TrainingPlan> plan_all_ranks(Module&, const EngineOptions&, const RecordLoss& record, int ranks,
                                         Device::Kind = Device::host, int ranks_per_node = 0);
/// The same, also where ranks share layers.
std::vector<TrainingPlan> plan_all_ranks(const MakePlanned&, const EngineOptions&, int ranks,
                                         Device::Kind = Device::host, int ranks_per_node = 0);

}  // namespace rz
