// Compiled if nccl.h is installed: static checks of api.h against it. Generates no code.

#include <nccl.h>

#include <type_traits>

#include "comm/backends/nccl/api/api.h"

namespace rz::nccl {

static_assert(ncclSuccess == success && ncclUnhandledCudaError == unhandled_cuda_error &&
              ncclSystemError == system_error && ncclInternalError == internal_error &&
              ncclInvalidArgument == invalid_argument && ncclInvalidUsage == invalid_usage &&
              ncclRemoteError == remote_error && ncclInProgress == in_progress);
static_assert(ncclInt8 == int8 && ncclUint8 == uint8 && ncclInt32 == int32 && ncclUint32 == uint32 &&
              ncclInt64 == int64 && ncclUint64 == uint64 && ncclFloat16 == float16 &&
              ncclFloat32 == float32 && ncclFloat64 == float64 && ncclBfloat16 == bfloat16);
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 24, 0)
static_assert(ncclFloat8e4m3 == float8e4m3 && ncclFloat8e5m2 == float8e5m2);
#endif
static_assert(ncclSum == sum && ncclProd == prod && ncclMax == max && ncclMin == min && ncclAvg == avg);
static_assert(ncclScalarHostImmediate == scalar_host_immediate);
static_assert(sizeof(ncclUniqueId) == sizeof(UniqueId));

#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 18, 0)
static_assert(offsetof(ncclConfig_t, size) == offsetof(Config, size) &&
              offsetof(ncclConfig_t, magic) == offsetof(Config, magic) &&
              offsetof(ncclConfig_t, version) == offsetof(Config, version) &&
              offsetof(ncclConfig_t, blocking) == offsetof(Config, blocking) &&
              offsetof(ncclConfig_t, cgaClusterSize) == offsetof(Config, cga_cluster_size) &&
              offsetof(ncclConfig_t, minCTAs) == offsetof(Config, min_ctas) &&
              offsetof(ncclConfig_t, maxCTAs) == offsetof(Config, max_ctas) &&
              offsetof(ncclConfig_t, netName) == offsetof(Config, net_name) &&
              offsetof(ncclConfig_t, splitShare) == offsetof(Config, split_share));
static_assert(NCCL_CONFIG_UNDEF_INT == Config::undefined);
#endif

// Enumerations and handles are passed as plain integers and pointers, so only the arity is compared.
template <class>
struct Arity;
template <class R, class... A>
struct Arity<R (*)(A...)> {
  static constexpr int value = sizeof...(A);
};
template <class Field, class F>
constexpr bool alike = Arity<Field>::value == Arity<F*>::value;

static_assert(alike<decltype(NcclApi::comm_init_rank_config), decltype(ncclCommInitRankConfig)> &&
              alike<decltype(NcclApi::all_reduce), decltype(ncclAllReduce)> &&
              alike<decltype(NcclApi::reduce_scatter), decltype(ncclReduceScatter)> &&
              alike<decltype(NcclApi::all_gather), decltype(ncclAllGather)> &&
              alike<decltype(NcclApi::broadcast), decltype(ncclBroadcast)> &&
              alike<decltype(NcclApi::reduce), decltype(ncclReduce)> &&
              alike<decltype(NcclApi::send), decltype(ncclSend)> &&
              alike<decltype(NcclApi::recv), decltype(ncclRecv)> &&
              alike<decltype(NcclApi::red_op_create_pre_mul_sum), decltype(ncclRedOpCreatePreMulSum)>);
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 27, 0)
static_assert(NCCL_WIN_COLL_SYMMETRIC == window_is_symmetric && sizeof(ncclWindow_t) == sizeof(void*) &&
              alike<decltype(NcclApi::comm_window_register), decltype(ncclCommWindowRegister)> &&
              alike<decltype(NcclApi::comm_window_deregister), decltype(ncclCommWindowDeregister)>);
#endif
static_assert(sizeof(ncclResult_t) == sizeof(Result) && sizeof(ncclDataType_t) == sizeof(DataType) &&
              sizeof(ncclRedOp_t) == sizeof(RedOp));

}  // namespace rz::nccl
