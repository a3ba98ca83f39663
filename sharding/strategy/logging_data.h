#pragma once
/// What a strategy does and what it costs, for logs.

#include <cstddef>
#include <string>
#include <vector>

#include "../../comm/core/types.h"
#include "../parallel/mesh.h"
#include "../parallel/traffic.h"

namespace rz {

/// As _get_ddp_logging_data() of PyTorch, whose names are in the comments. Times are seconds of the last
/// finished step on the thread of this rank; on a device they are those of the host.
struct LoggingData {
  std::string strategy;  ///< "ddp"
  int rank = 0, world_size = 1;
  MeshSizes mesh;
  std::string backend;                    ///< backend_name: Communicator::describe()
  DType gradients = DType::f32;           ///< dtypes
  std::vector<std::size_t> bucket_bytes;  ///< bucket_sizes, with padding, in the order of reduction
  bool rebuilt_buckets = false;           ///< has_rebuilt_buckets
  bool overlap = true;                    ///< overlap_comm
  bool find_unused_parameters = true, static_graph = false, broadcast_buffers = true;
  std::string communication_hook;              ///< comm_hook: CommunicationHook::describe(); "none"
  std::vector<std::string> unused_parameters;  ///< without a gradient on this rank at the last reduction
  double forward_seconds = 0;   ///< forward_compute_time: from the first scope to begin_backward()
  double backward_seconds = 0;  ///< backward_compute_time: from there to finish_gradients()
  /// backward_comm_time: from the first reduction of a pass to the end of its last.
  double communication_seconds = 0;
  /// Waits of all kinds, Strategy::exposed_seconds(): communication that computation did not hide.
  double exposed_seconds = 0;
  MeshTraffic traffic;  ///< since the strategy was created
};

/// Lines "name: value".
std::string describe(const LoggingData&);

}  // namespace rz
