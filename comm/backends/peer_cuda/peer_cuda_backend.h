#pragma once
/// Collectives among CUDA devices of one host by kernels of our own: ranks read each other's device memory,
/// and sum in rank order with the host's bits (comm/reduce/reduce_ops.h). Ranks may be threads or processes,
/// and share a card.
///
/// Where all ranks are threads of one process, kernels read memory of allocate() where it lies. Processes map
/// each other's parts of allocate_symmetric() by CUDA's IPC handles; everything else they copy through slots,
/// and so does a group made by split() with what is not its own. Each rank may pass memory of either kind, at
/// any offset, in captured graphs too. A group has at most 64 such windows, each a multiple of 2 MiB, until
/// it ends: what all ranks have given back serves a later call that it is large enough for, and beyond the
/// last one memory is that of allocate(), on every rank. A rank that has no memory, cannot map a peer's, or
/// asks for another size is named on all, and the group goes on without that window.
///
/// The end of a backend among processes waits, up to two seconds, until all ranks have closed what they have
/// mapped; if they do not come, the memory that they may still read is never given back.
///
/// A kernel of one rank waits for those of its peers, so all must be able to run at once: its blocks are so
/// few that all ranks of a card fit on it (PeerArenas). What runs on the card beside them must not wait for
/// them, as a call does that gives memory back to CUDA while another rank on the same card is in a
/// collective. Where threads of one process are ranks that share a card, two more things have to be set
/// before the first call of CUDA: CUDA_MODULE_LOADING=EAGER, for the first launch of a kernel may else wait
/// until the card is idle; and CUDA_DEVICE_MAX_CONNECTIONS=32, the largest number of hardware queues. Streams
/// that share a queue wait for each other, CUDA makes 8 unless told, and each rank has three streams beside
/// the caller's.

#include <chrono>
#include <memory>
#include <string>

#include "comm/backend.h"

namespace rz {

struct PeerCudaOptions {
  int rank = 0, size = 1;
  Device device;
  std::chrono::milliseconds timeout{600'000};  ///< of one operation, from when it begins on the device
  std::string algorithm;                       ///< forces all_reduce's; empty: select_cuda_launch
  std::size_t slot_bytes = 128 << 10;          ///< that a block moves in one step; the same on every rank
};

/// `host` carries what the ranks say to each other. Operations run in the order of their submission, messages
/// in an order of their own; in a stream that is being captured they become a part of its graph.
/// Work::wait_on() never blocks.
std::unique_ptr<Backend> peer_cuda_backend(std::shared_ptr<Backend> host, const PeerCudaOptions&);

}  // namespace rz
