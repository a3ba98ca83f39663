#pragma once
/// Every environment variable that the library reads, in one place. Explicit options beat them. They are read
/// once, on the first call of environment(); values that cannot be used are an error that names the variable.

#include <optional>
#include <string>

namespace rz {

struct Environment {
  /// RZ_BACKEND: what performs the collectives: "auto" (default: "native" on host memory; on devices the
  /// first of "nccl", "peer_cuda" and "native" that can serve all ranks), "native" (ours, over shared memory
  /// and TCP), "mpi", "nccl" or "peer_cuda".
  std::string backend = "auto";
  /// RZ_TRANSPORT: "auto" (default: shared memory within a host, TCP between hosts), "shm" or "tcp".
  std::string transport = "auto";
  /// RZ_INTERFACE: network interface for TCP: its name, address, or the address's first numbers ("10.1");
  /// default: by the route to rank 0.
  std::string interface;
  /// RZ_SOCKETS: TCP sockets from a host to another, 1 to 16; default 2. Ranks that share a host share them
  /// out; each link has at least one.
  int sockets = 2;
  /// RZ_CONGESTION: congestion control of the TCP sockets between ranks: "system" (default: none is set, so
  /// that the host's applies) or a name, such as "reno".
  std::string congestion = "system";
  /// RZ_ALGORITHM: forces an algorithm of all_reduce by name ("ring", …), or of any collective
  /// ("all_reduce=ring,broadcast=tree"); default: the tuning table.
  std::string algorithm;
  /// RZ_TUNING: a file with a tuning table, as `tune` writes it; default: the built-in one. Rank 0's counts.
  std::string tuning;
  /// RZ_DETERMINISTIC: 1 (default): reductions sum in rank order; 0: any algorithm may serve them.
  bool deterministic = true;
  /// RZ_ALLOW_TF32: 1: products of f32 matrices on a CUDA device may round their factors to TF32 (10 bits of
  /// mantissa), which is several times as fast; 0 (default): they are f32 throughout.
  bool allow_tf32 = false;
  /// RZ_TIMEOUT_S: deadline of an operation in seconds; default 600.
  double timeout_s = 600;
  /// RZ_RENDEZVOUS_TIMEOUT_S: deadline of the rendezvous in seconds; default 30.
  double rendezvous_timeout_s = 30;
  /// RZ_HOST_ID: what counts as one host; default the kernel's boot id and host name. Tests split a machine
  /// with it.
  std::string host_id;
  /// NCCL_HOSTID, NCCL's own: what it counts as one host. Ranks that share a GPU need different ones.
  std::string nccl_host_id;
  /// NCCL_MULTI_RANK_GPU_ENABLE, NCCL's own (2.30.3 and newer): 1 lets ranks share a GPU.
  bool nccl_shares_gpus = false;

  /// Reads the process's environment now. Errc::config names a malformed variable.
  static Environment read();
};

/// The process's environment as it was on the first call.
const Environment& environment();

}  // namespace rz
