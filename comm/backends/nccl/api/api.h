#pragma once
/// Table of the NCCL calls that ringzero makes, filled from libnccl.so.2 at run time. A build needs neither
/// NCCL's header nor its library, and tests install their own table. Types and constants are those of NCCL's
/// stable interface; header_check.cpp compares them with nccl.h if it is installed.

#include <climits>
#include <cstddef>
#include <string>

namespace rz::nccl {

using Result = int;  ///< an ncclResult_t
inline constexpr Result success = 0, unhandled_cuda_error = 1, system_error = 2, internal_error = 3,
                        invalid_argument = 4, invalid_usage = 5, remote_error = 6, in_progress = 7;

using DataType = int;  ///< an ncclDataType_t
inline constexpr DataType int8 = 0, uint8 = 1, int32 = 2, uint32 = 3, int64 = 4, uint64 = 5, float16 = 6,
                          float32 = 7, float64 = 8, bfloat16 = 9, float8e4m3 = 10, float8e5m2 = 11;

using RedOp = int;  ///< an ncclRedOp_t
inline constexpr RedOp sum = 0, prod = 1, max = 2, min = 3, avg = 4;
inline constexpr int scalar_host_immediate = 1;
inline constexpr int window_is_symmetric = 1;  ///< NCCL_WIN_COLL_SYMMETRIC

struct UniqueId {
  char bytes[128];
};
using Comm = struct OpaqueComm*;

/// ncclConfig_t of 2.18, which every later version accepts.
struct Config {
  static constexpr int undefined = INT_MIN;
  std::size_t size = sizeof(Config);
  unsigned magic = 0xcafebeef, version = 21800;
  int blocking = undefined, cga_cluster_size = undefined, min_ctas = undefined, max_ctas = undefined;
  const char* net_name = nullptr;
  int split_share = undefined;
};

/// Streams are cudaStream_t; counts are in elements.
struct NcclApi {
  Result (*get_version)(int*);
  Result (*get_unique_id)(UniqueId*);
  Result (*comm_init_rank_config)(Comm*, int size, UniqueId, int rank, Config*);
  Result (*comm_get_async_error)(Comm, Result*);
  Result (*comm_abort)(Comm);
  Result (*comm_finalize)(Comm);
  Result (*comm_destroy)(Comm);

  Result (*group_start)();
  Result (*group_end)();
  Result (*all_reduce)(const void*, void*, std::size_t, DataType, RedOp, Comm, void* stream);
  Result (*reduce_scatter)(const void*, void*, std::size_t, DataType, RedOp, Comm, void* stream);
  Result (*all_gather)(const void*, void*, std::size_t, DataType, Comm, void* stream);
  Result (*broadcast)(const void*, void*, std::size_t, DataType, int root, Comm, void* stream);
  Result (*reduce)(const void*, void*, std::size_t, DataType, RedOp, int root, Comm, void* stream);
  Result (*send)(const void*, std::size_t, DataType, int peer, Comm, void* stream);
  Result (*recv)(void*, std::size_t, DataType, int peer, Comm, void* stream);
  Result (*red_op_create_pre_mul_sum)(RedOp*, void* scalar, DataType, int residence, Comm);
  Result (*red_op_destroy)(RedOp, Comm);
  const char* (*get_error_string)(Result);

  // Null if the library is too old.
  const char* (*get_last_error)(Comm);
  Result (*comm_register)(Comm, void*, std::size_t, void** handle);  ///< 2.19
  Result (*comm_deregister)(Comm, void* handle);
  Result (*comm_window_register)(Comm, void*, std::size_t, void** window, int flags);  ///< 2.27
  Result (*comm_window_deregister)(Comm, void* window);
  Result (*mem_alloc)(void**, std::size_t);  ///< 2.19
  Result (*mem_free)(void*);
};

/// Loads a library, which stays loaded, and returns its table. Errc::unsupported, one line with the missing
/// symbol or file and the remedy.
NcclApi load_nccl(const std::string& file = "libnccl.so.2");

/// Table of the process's libnccl.so.2, loaded on the first call; throws as load_nccl(). Thread-safe.
const NcclApi& nccl_api();

/// Version of the library, e.g. 22809. Errc::unsupported, one line, unless it is at least 2.18 and below 3.
int require_version(const NcclApi&);
std::string version_text(int version);  ///< "2.28.9"

}  // namespace rz::nccl
