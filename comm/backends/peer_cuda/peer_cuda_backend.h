#pragma once
/// Collectives among CUDA devices of one node, by ringzero's own kernels. Ranks read each other's device
/// memory and reduce in rank order, with the same bits as on the host (comm/reduce/reduce_ops.h). Ranks may
/// be threads or processes, and may share a GPU.
///
/// Zero copy. If all ranks are threads of one process, kernels read memory of allocate() in place. Processes
/// map each other's parts of allocate_symmetric() through CUDA IPC handles. Everything else is copied through
/// slots in the arenas; so are calls of a group made by split() on memory that is not its own. Each rank may
/// pass either kind of memory, at any offset, also in captured graphs.
///
/// Windows. A group has at most 64 symmetric windows, each a multiple of 2 MiB, which exist until the group
/// ends. A window that all ranks have freed is reused by a later call that fits. Beyond 64 windows,
/// allocate_symmetric() returns memory of allocate() on every rank. If a rank cannot allocate, cannot map a
/// peer's part, or requests another size, every rank's call fails with an error that names it, and the group
/// stays usable.
///
/// Shutdown. Among processes, the destructor waits up to 2 s until all ranks have unmapped each other's
/// memory. After that, memory that a peer may still read is leaked.
///
/// Forward progress. The kernels of all ranks wait for each other, so all must be resident at once:
/// PeerArenas limits the blocks of a kernel so that all ranks of a GPU fit. No thread must wait for these
/// kernels in a call of the driver that keeps another rank's thread from launching its own: calls of this
/// library do not (DeferredFrees, memcpy_async()); a caller's own cudaFree, or copy of pageable memory, while
/// another rank on the same GPU is in a collective, does. If ranks that share a GPU are threads of one
/// process, set two variables before the first CUDA call. CUDA_MODULE_LOADING=EAGER: otherwise the first
/// launch of a kernel may wait until the GPU is idle. CUDA_DEVICE_MAX_CONNECTIONS=32 (the maximum; default
/// 8): streams that share a hardware queue wait for each other, and each rank has three streams besides the
/// caller's. Graphs with copies between host and device memory besides collectives (training that offloads)
/// share queues that nothing sets: ranks that share a GPU as threads must not launch such graphs, and
/// Backend::reason_against_copies_in_graphs() names two of them.

#include <memory>

#include "comm/backend.h"
#include "comm/backends/peer_cuda/peer_cuda_options.h"

namespace rz {

/// Collective. `host` exchanges setup data and reports failures. Collectives run in submission order;
/// point-to-point messages run in a separate order. Operations submitted on a capturing stream become part of
/// its graph. Work::wait_on() never blocks. Errc::config if `options.algorithm` is unknown; Errc::unsupported
/// as PeerArenas, or in a build without CUDA.
std::unique_ptr<Backend> peer_cuda_backend(std::shared_ptr<Backend> host, const PeerCudaOptions&);

}  // namespace rz
