#pragma once
/// The communicator's kernels for CUDA devices, as one table: filled by the .cu files of this folder in a
/// build with CUDA, and in tests by the same files compiled for an emulated device.

#include <cstddef>
#include <span>

#include "comm/backends/peer_cuda/kernels/kernel_args.h"
#include "comm/core/types.h"
#include "comm/device/stream.h"

namespace rz {

struct PeerKernels {
  /// As rz::reduce (comm/reduce/reduce.h), with the same bits, of memory that the stream's device reaches:
  /// its own, or a peer's. dst may be any one source. Errc::unsupported for more than max_sources.
  void (*reduce)(void* dst, std::span<const void* const> sources, std::size_t count, DType, ReduceOp::Kind,
                 int divide, const Stream&);
  /// As rz::scale, with the same bits. dst may be src.
  void (*scale)(void* dst, const void* src, std::size_t count, DType, double factor, const Stream&);

  /// One collective among ranks, each of which starts it with the same number of blocks; threads: 32 to 512.
  void (*collective_reduce)(const peer::DeviceComm&, const peer::ReduceArgs&, DType, ReduceOp::Kind,
                            int blocks, int threads, const Stream&);
  void (*collective_copy)(const peer::DeviceComm&, const peer::CopyArgs&, int blocks, int threads,
                          const Stream&);
  /// Messages, of which each has its counterpart in some call of the peer's.
  void (*send_recv)(const peer::DeviceComm&, const peer::SendRecvArgs&, int threads, const Stream&);

  static constexpr std::size_t max_sources = 256;
};

/// Errc::unsupported in a build without CUDA.
const PeerKernels& peer_kernels();

/// What peer_kernels() hands out: each .cu file defines its own here.
namespace peer {
void reduce(void* dst, std::span<const void* const> sources, std::size_t count, DType, ReduceOp::Kind,
            int divide, const Stream&);
void scale(void* dst, const void* src, std::size_t count, DType, double factor, const Stream&);
void collective_reduce(const DeviceComm&, const ReduceArgs&, DType, ReduceOp::Kind, int blocks, int threads,
                       const Stream&);
void collective_copy(const DeviceComm&, const CopyArgs&, int blocks, int threads, const Stream&);
void send_recv(const DeviceComm&, const SendRecvArgs&, int threads, const Stream&);
}  // namespace peer

}  // namespace rz
