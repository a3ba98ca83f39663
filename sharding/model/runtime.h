#pragma once
/// Where the parts of a strategy run on this rank.

#include <string>

#include "comm/communicator.h"
#include "comm/device/stream.h"
#include "sharding/model/exposed_time.h"
#include "sharding/model/traffic.h"
#include "sharding/model/transient_memory.h"
#include "sharding/parallel/mesh.h"
#include "tensor/tensor.h"

namespace rz {

/// A mesh of ranks, with stream and memory on their device. One per strategy; its parts refer to it.
struct Runtime {
  /// Creates a stream on the device of the communicator of the mesh. `offloads`: with streams for copies from
  /// and to host memory. Errc::unsupported if a dimension other than the last one has several ranks.
  explicit Runtime(Mesh, bool offloads = false);
  Runtime(const Runtime&) = delete;

  /// Returns `given` if it is a stream of the device, or on the host one with several threads; otherwise
  /// `stream`. On the host both give the same results.
  const Stream& stream_for(const Stream& given) const;
  /// Zeros in memory of shard_group, on its device.
  Tensor allocate_flat(std::size_t count, DType) const;

  // Collectives of shard_group that are counted in `traffic`.
  Work all_reduce(const Tensor& in_out, ReduceOp, const Stream&);
  Work reduce_scatter(const Tensor& in, const Tensor& out, ReduceOp, const Stream&);
  Work all_gather(const Tensor& in, const Tensor& out, const Stream&);
  Work broadcast(const Tensor& in_out, int root, const Stream&);

  /// Ends all operations in flight with Errc::aborted.
  void abort(const std::string& reason) noexcept;

  Mesh mesh;
  Communicator& communicator;  ///< of all ranks, which train together
  Communicator& shard_group;   ///< of the ranks between which values, gradients and state are divided
  Stream stream;               ///< the stream of the tape, once one is attached
  Stream to_device, to_host;   ///< of copies that overlap with computation, if memory is offloaded
  TransientMemory transient;   ///< memory of shard_group for buffers that live for a part of a step
  ExposedTime exposed;
  /// Of all updates; not of checks that are made once, of ParameterValues::whole(), and of what an engine
  /// adds for reports, checkpoints and ranks that have ended.
  Traffic traffic;
};

}  // namespace rz
