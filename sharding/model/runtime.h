#pragma once
/// Where the parts of a strategy run on this rank, and what their communication costs.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "comm/communicator.h"
#include "comm/device/stream.h"
#include "sharding/model/flat_layout.h"
#include "sharding/parallel/communication_meter.h"
#include "sharding/parallel/mesh.h"
#include "tensor/tensor.h"

namespace rz {

/// Memory of buffers that live for a part of a step: whole gradients until they are reduced, gathered scopes.
/// Caches whole blocks of `upstream`. allocate() returns the smallest free block that is large enough, unless
/// more than half of it would be wasted and there is room for a new block: the peak of concurrent use, and on
/// a device as much again as was ever released. Beyond that, free blocks that are too small are released to
/// upstream before a new one is allocated. On a device a release waits, and must not fall into the capture of
/// a graph; what is released makes room to keep it the next time: steps with the same allocations release
/// less and less, and after a few upstream is not called any more. Thread-safe.
class TransientMemory {
 public:
  /// `synchronize` is called before blocks are released to upstream: on a device it waits for the work that
  /// still uses them.
  explicit TransientMemory(Allocator upstream, std::function<void()> synchronize = {});

  /// Uninitialised memory. The block is free again when the last Tensor that refers to it is destroyed.
  Tensor allocate(const Shape&, DType = DType::f32);

  std::size_t held() const;         ///< bytes, in use or free
  std::size_t in_use() const;       ///< bytes allocated and not yet returned
  std::size_t peak() const;         ///< maximum of in_use() so far
  std::size_t allocations() const;  ///< number of blocks allocated from upstream so far

 private:
  struct State;
  std::shared_ptr<State> state_;
};

/// A mesh of ranks, with stream and memory on their device. One per strategy; its parts refer to it.
struct Runtime {
  /// Creates a stream on the device of the communicator of the mesh. `offloads`: with streams for copies from
  /// and to host memory. `divides_again`: all data ranks divide the values; the ranks of the dimension shard
  /// divide once more what was gathered.
  explicit Runtime(Mesh, bool offloads = false, bool divides_again = false);
  Runtime(const Runtime&) = delete;

  /// Returns `given` if it is a stream of the device, or on the host one with several threads; otherwise
  /// `stream`. On the host both give the same results.
  const Stream& stream_for(const Stream& given) const;
  /// Zeros in memory of the communicator, which its groups know, on its device.
  Tensor allocate_flat(std::size_t count, DType) const;

  /// Collectives of a group of the mesh, which are counted in `traffic`.
  MeteredGroup counted(Communicator& group) { return {group, *mesh.meter(), traffic_of(group)}; }
  /// The part of `traffic` that calls of a group of the mesh belong to.
  Traffic& traffic_of(const Communicator& group);

  /// Whether squares and values of a parameter count on this rank, among those of its tp group.
  bool counts(const Parameter& p) const { return place.part.rank == 0 || is_split(p); }

  /// Ends all operations in flight with Errc::aborted.
  void abort(const std::string& reason) noexcept;

  Mesh mesh;
  MeshCoordinates place;       ///< of this rank; `shard` is in shard_group
  Communicator& communicator;  ///< of all ranks, which train together
  Communicator& data;          ///< of the ranks over which gradients are means
  Communicator& shard_group;   ///< of the ranks between which values, gradients and state are divided
  Communicator* secondary;     ///< of the ranks that divide gathered values once more; null: none
  Communicator* replicas;      ///< of the ranks that have the same shard; null: this one alone
  Stream stream;               ///< the stream of the tape, once one is attached
  Stream to_device, to_host;   ///< of copies that overlap with computation, if memory is offloaded
  Stream between;              ///< on a device, orders sums over replicas after those over shard_group
  TransientMemory transient;   ///< memory of the communicator for buffers that live for a part of a step
  ExposedTime& exposed;        ///< that of the mesh, as is `traffic`
  /// The calls of all updates, without checks that are made once, ParameterValues::whole(), and the calls of
  /// an engine for reports, checkpoints and ranks that have ended.
  MeshTraffic& traffic;
};

}  // namespace rz
