#pragma once
/// Memory of a strategy, exactly, from the shapes of a model: no parameter needs memory, no rank a
/// communicator. dry_run() (sharding/engine/dry_run.h) counts traffic.
///
/// With Ψ trainable elements in whole buckets, N ranks, p bytes per value, g per gradient, s of optimizer
/// state, m = 4 of masters if p = 2, else 0, and w bytes per gradient on the wire (Rajbhandari et al.,
/// doi:10.1109/SC41405.2020.00024, where p = g = w = 2, m = 4, s = 8):
///
///              bytes held                        bytes sent by a rank, in units of (N - 1) / N
///     ddp      pΨ + gΨ + (m + s)Ψ                2wΨ              all_reduce
///     zero1    pΨ + gΨ + (m + s)Ψ/N              wΨ + pΨ          reduce_scatter, all_gather
///     zero2    pΨ + (g + m + s)Ψ/N               wΨ + pΨ          the same
///     zero3    (p + g + m + s)Ψ/N                wΨ + 2pΨ         and a gather in each direction
///
/// On a mesh of R copies of S shards, N = R·S, bytes held divide by S in place of N. A rank sends (S - 1) / S
/// of these bytes along shard, and 2wΨ/S along replicate, in units of (R - 1) / R. With
/// zero_hpz_partition_size, values, gradients and state divide by N, and gathers after the first forward pass
/// are along shard.
///
/// Further: padding, in Ψ, so that members start at multiples of 64 elements and buckets end at multiples of
/// 64N; frozen values, p bytes each, in zero3 p/N and 2p gathered; persistent values in zero3, p bytes whole
/// instead of p/N, gathered once, after the update; in zero3 a gather for each scope that uses a parameter,
/// less where GatherLimits keep it.

#include "autograd_lite/nn/module.h"
#include "sharding/model/memory_report.h"
#include "sharding/model/options.h"
#include "sharding/parallel/mesh.h"

namespace rz {

class Optimizer;

/// Strategy::memory() of a rank after an update by an optimizer of this kind, except for transient memory,
/// which is 0 here, and means of several synchronising passes. In ddp with several buckets, before they are
/// rebuilt, which may change their padding. Errc::invalid_argument as for make_strategy().
MemoryReport predicted_memory(StrategyKind, Module&, const Optimizer&, MeshCoordinates,
                              const StrategyOptions& = {}, Device::Kind = Device::host);

/// Transient memory in which an update copies offloaded memory, tile by tile
/// (sharding/strategy/update_tiles.h). 0 if nothing is offloaded.
std::size_t predicted_tiles(StrategyKind, Module&, const Optimizer&, MeshCoordinates, const StrategyOptions&,
                            Device::Kind);

}  // namespace rz
