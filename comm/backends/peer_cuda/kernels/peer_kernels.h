#pragma once
/// Table of the CUDA kernels of the communicator. A build with CUDA fills it from the .cu files of this
/// folder; tests fill it from the same files compiled for an emulated device.

#include <cstddef>
#include <span>

#include "comm/backends/peer_cuda/kernels/kernel_args.h"
#include "comm/core/types.h"
#include "comm/device/stream.h"

namespace rz {

struct PeerKernels {
  /// rz::reduce (comm/reduce/reduce.h) on device memory, with the same bits. Sources may be on the stream's
  /// device or on a peer that it can access. dst may be one of the sources. An avg is divided by `divide`.
  /// Errc::unsupported for more than max_sources, Errc::invalid_argument for none.
  void (*reduce)(void* dst, std::span<const void* const> sources, std::size_t count, DType, ReduceOp::Kind,
                 int divide, const Stream&);
  /// rz::scale on device memory, with the same bits. dst may be src.
  void (*scale)(void* dst, const void* src, std::size_t count, DType, double factor, const Stream&);

  /// One collective. Every rank must launch it with the same number of blocks; threads: 32 to 512.
  void (*collective_reduce)(const peer::DeviceComm&, const peer::ReduceArgs&, DType, ReduceOp::Kind,
                            int blocks, int threads, const Stream&);
  void (*collective_copy)(const peer::DeviceComm&, const peer::CopyArgs&, int blocks, int threads,
                          const Stream&);
  /// Point-to-point messages. Each must have its counterpart in some send_recv() of the peer.
  void (*send_recv)(const peer::DeviceComm&, const peer::SendRecvArgs&, int threads, const Stream&);

  static constexpr std::size_t max_sources = 256;
};

/// Errc::unsupported in a build without CUDA.
const PeerKernels& peer_kernels();

/// Entries of the table; each .cu file defines its own.
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
