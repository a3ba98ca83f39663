#pragma once
/// All environment variables that the library reads. They are read once, at the first call of environment().
/// Explicit options override them. An invalid value is Errc::config, which names the variable, as is a name
/// that is nearly one of them, such as RZ_TIMEOUT.

#include <optional>
#include <string>

#include "comm/core/reduction_order.h"

namespace rz {

struct Environment {
  /// RZ_BACKEND: "auto" (default), "native" (over shared memory and TCP), "mpi", "nccl" or "peer_cuda".
  /// "auto" is "native" on host memory; on devices it is the first of "nccl", "peer_cuda" and "native" that
  /// all ranks can use.
  std::string backend = "auto";
  /// RZ_TRANSPORT: "auto" (default: shared memory within a node, TCP between nodes), "shm" or "tcp".
  std::string transport = "auto";
  /// RZ_INTERFACE: TCP network interface, by name, address, or leading parts of the address ("10.1").
  /// Default: the one that routes to rank 0.
  std::string interface;
  /// RZ_SOCKETS: TCP sockets between two nodes, 1 to 16; default 2. They are divided among the ranks of a
  /// node; each link has at least one.
  int sockets = 2;
  /// RZ_CONGESTION: congestion control of the TCP sockets between ranks: a name such as "reno", or "system"
  /// (default), which leaves the system's setting.
  std::string congestion = "system";
  /// RZ_ALGORITHM: forces the algorithm of all_reduce ("ring") or of any collective
  /// ("all_reduce=ring,broadcast=tree"). Default: the tuning table.
  std::string algorithm;
  /// RZ_TUNING: file with a tuning table, as written by `tune`. Default: the built-in table. Rank 0's
  /// applies.
  std::string tuning;
  /// RZ_DETERMINISTIC: 1 (default): reduce in the order of RZ_REDUCTION_ORDER; 0: in any.
  bool deterministic = true;
  /// RZ_REDUCTION_ORDER: "rank" (default) or "pairwise".
  ReductionOrder reduction_order = ReductionOrder::rank;
  /// RZ_ALLOW_TF32: 1: f32 matrix products on CUDA devices may round their operands to TF32 (10-bit
  /// mantissa), which is several times faster; 0 (default): full f32.
  bool allow_tf32 = false;
  /// RZ_TIMEOUT_S: deadline of an operation in seconds; default 600.
  double timeout_s = 600;
  /// RZ_RENDEZVOUS_TIMEOUT_S: deadline of the rendezvous in seconds; default 30.
  double rendezvous_timeout_s = 30;
  /// RZ_HOST_ID: identifier of the node. Default: the kernel's boot id and the host name. Tests set it to
  /// simulate several nodes on one machine.
  std::string host_id;
  /// NCCL_HOSTID: NCCL's identifier of the node. Ranks that share a GPU need different values.
  std::string nccl_host_id;
  /// NCCL_MULTI_RANK_GPU_ENABLE (NCCL 2.30.3 and newer): 1 allows ranks to share a GPU.
  bool nccl_shares_gpus = false;

  /// Reads the process environment now. Errc::config names a malformed or misspelt variable.
  static Environment read();
};

/// The environment at the first call. Thread-safe.
const Environment& environment();

}  // namespace rz
