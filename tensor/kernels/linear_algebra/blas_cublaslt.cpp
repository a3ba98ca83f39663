// cuBLASLt is column-major, so a row-major matrix is its transpose there: d = a · b is computed as dᵀ = bᵀ ·
// aᵀ, which exchanges "A" and "B". The library (half a gigabyte) is loaded at the first call, so that
// programs without matrix products on a GPU start and run without it.

#include <cublasLt.h>
#include <dlfcn.h>

#include <algorithm>
#include <compare>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>

#include "comm/core/error.h"
#include "comm/device/cuda_runtime.h"
#include "tensor/kernels/linear_algebra/blas.h"

namespace rz::kernels {

namespace {

// ---- the library

struct Library {
#define RZ_SYMBOLS(X)                 \
  X(cublasLtCreate)                   \
  X(cublasLtGetStatusName)            \
  X(cublasLtMatmul)                   \
  X(cublasLtMatmulAlgoGetHeuristic)   \
  X(cublasLtMatmulDescCreate)         \
  X(cublasLtMatmulDescDestroy)        \
  X(cublasLtMatmulDescSetAttribute)   \
  X(cublasLtMatrixLayoutCreate)       \
  X(cublasLtMatrixLayoutDestroy)      \
  X(cublasLtMatrixLayoutSetAttribute) \
  X(cublasLtMatmulPreferenceCreate)   \
  X(cublasLtMatmulPreferenceDestroy)  \
  X(cublasLtMatmulPreferenceSetAttribute)
#define RZ_MEMBER(name) decltype(&::name) name;
  RZ_SYMBOLS(RZ_MEMBER)
#undef RZ_MEMBER
};

#define RZ_TEXT_(x) #x
#define RZ_TEXT(x) RZ_TEXT_(x)
constexpr const char* versioned = "libcublasLt.so." RZ_TEXT(CUBLAS_VER_MAJOR);

void* open_library() {
  if (void* found = dlopen(versioned, RTLD_NOW | RTLD_LOCAL)) return found;
  const std::string why = dlerror();
  if (void* found = dlopen("libcublasLt.so", RTLD_NOW | RTLD_LOCAL)) return found;
  fail(Errc::unsupported, "matrix products on a CUDA device need cuBLASLt: ", why,
       "; install CUDA's libcublas (", CUBLAS_VER_MAJOR, ".x) or add its folder to LD_LIBRARY_PATH");
}

void* symbol(void* library, const char* name) {
  void* found = dlsym(library, name);
  if (!found)
    fail(Errc::unsupported, "cuBLASLt has no ", name, "; install CUDA's libcublas ", CUBLAS_VER_MAJOR, ".x");
  return found;
}

const Library& library() {
  static const Library all = [] {
    void* const it = open_library();
    Library l{};
#define RZ_LOOK_UP(name) l.name = reinterpret_cast<decltype(l.name)>(symbol(it, #name));
    RZ_SYMBOLS(RZ_LOOK_UP)
#undef RZ_LOOK_UP
    return l;
  }();
  return all;
}

void check(cublasStatus_t status, const char* call, Device device) {
  if (status != CUBLAS_STATUS_SUCCESS)
    fail(Errc::system, call, " on ", name(device), ": ", library().cublasLtGetStatusName(status));
}

// ---- descriptions

/// Owner of a cuBLASLt object.
template <class T>
class Owned {
 public:
  using Destroy = cublasStatus_t (*)(T);
  explicit Owned(Destroy destroy) : destroy_(destroy) {}
  ~Owned() {
    if (it_) destroy_(it_);
  }
  Owned(const Owned&) = delete;
  T* out() { return &it_; }
  T get() const { return it_; }

 private:
  T it_ = nullptr;
  Destroy destroy_;
};

cudaDataType_t data_type(DType t) {
  return t == DType::f16 ? CUDA_R_16F : t == DType::bf16 ? CUDA_R_16BF : CUDA_R_32F;
}

cublasLtEpilogue_t epilogue(const GemmCall& c) {
  switch (c.epilogue) {
    case Epilogue::bias:
      return CUBLASLT_EPILOGUE_BIAS;
    case Epilogue::gelu:
      return c.bias ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : CUBLASLT_EPILOGUE_GELU_AUX;
    case Epilogue::gelu_gradient:
      return CUBLASLT_EPILOGUE_DGELU;
    case Epilogue::column_sums_of_b:
      return CUBLASLT_EPILOGUE_BGRADA;  // b is cuBLASLt's A
    case Epilogue::row_sums_of_a:
      return CUBLASLT_EPILOGUE_BGRADB;
    default:
      return CUBLASLT_EPILOGUE_DEFAULT;
  }
}

/// A GemmCall translated to cuBLASLt.
class Description {
 public:
  Description(const GemmCall& c, Device device) : device_(device) {
    const bool tf32 = c.allow_tf32 && c.factors == DType::f32;
    check(library().cublasLtMatmulDescCreate(
              product.out(), tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F, CUDA_R_32F),
          "cublasLtMatmulDescCreate", device);
    set(CUBLASLT_MATMUL_DESC_TRANSA, c.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N);
    set(CUBLASLT_MATMUL_DESC_TRANSB, c.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N);
    describe_epilogue(c);
    layout(first, c.factors, c.transpose_b ? c.k : c.n, c.transpose_b ? c.n : c.k, c.b_stride);
    layout(second, c.factors, c.transpose_a ? c.m : c.k, c.transpose_a ? c.k : c.m, c.a_stride);
    layout(result, c.result, c.n, c.m, c.d_stride);
    if (c.batch.count == 1) return;
    repeat(first, c.batch.count, c.batch.b_step);
    repeat(second, c.batch.count, c.batch.a_step);
    repeat(result, c.batch.count, c.batch.d_step);
  }

  Owned<cublasLtMatmulDesc_t> product{library().cublasLtMatmulDescDestroy};
  Owned<cublasLtMatrixLayout_t> first{library().cublasLtMatrixLayoutDestroy},
      second{library().cublasLtMatrixLayoutDestroy}, result{library().cublasLtMatrixLayoutDestroy};

 private:
  template <class T>
  void set(cublasLtMatmulDescAttributes_t attribute, const T& value) {
    check(library().cublasLtMatmulDescSetAttribute(product.get(), attribute, &value, sizeof value),
          "cublasLtMatmulDescSetAttribute", device_);
  }
  void layout(Owned<cublasLtMatrixLayout_t>& to, DType t, std::size_t rows, std::size_t columns,
              std::size_t stride) {
    check(library().cublasLtMatrixLayoutCreate(to.out(), data_type(t), rows, columns,
                                               static_cast<std::int64_t>(stride)),
          "cublasLtMatrixLayoutCreate", device_);
  }
  void repeat(const Owned<cublasLtMatrixLayout_t>& matrix, std::size_t count, std::size_t step) {
    const auto matrices = static_cast<std::int32_t>(count);
    const auto distance = static_cast<std::int64_t>(step);
    set(matrix, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, matrices);
    set(matrix, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, distance);
  }
  template <class T>
  void set(const Owned<cublasLtMatrixLayout_t>& matrix, cublasLtMatrixLayoutAttribute_t attribute,
           const T& value) {
    check(library().cublasLtMatrixLayoutSetAttribute(matrix.get(), attribute, &value, sizeof value),
          "cublasLtMatrixLayoutSetAttribute", device_);
  }
  void describe_epilogue(const GemmCall& c) {
    if (c.epilogue == Epilogue::none) return;
    set(CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue(c));
    if (c.bias) {
      set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, static_cast<std::int32_t>(data_type(c.result)));
      set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, c.bias);
    }
    if (c.aux) {
      set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_DATA_TYPE, static_cast<std::int32_t>(data_type(c.result)));
      set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, static_cast<std::int64_t>(c.d_stride));
      set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, c.aux);
    }
  }

  Device device_;
};

// ---- choice of the kernel

/// Alignment, at most 16. Larger alignments are ignored: otherwise equal calls could use different kernels
/// and get different bits.
std::uint32_t alignment(const void* p) {
  const auto at = reinterpret_cast<std::uintptr_t>(p);
  return at % 16 == 0 ? 16 : static_cast<std::uint32_t>(at & (~at + 1));
}
/// The alignment of all matrices, which are `step` elements apart.
std::uint32_t alignment(const void* p, std::size_t step, DType t) {
  return alignment(reinterpret_cast<const void*>(reinterpret_cast<std::uintptr_t>(p) | step * size_of(t)));
}
struct Alignments {
  std::uint32_t a, b, d;
  explicit Alignments(const GemmCall& c)
      : a(alignment(c.a, c.batch.a_step, c.factors)),
        b(alignment(c.b, c.batch.b_step, c.factors)),
        d(alignment(c.d, c.batch.d_step, c.result)) {}
  auto operator<=>(const Alignments&) const = default;
};

/// Everything on which the choice depends.
struct Key {
  std::size_t m, n, k, a_stride, b_stride, d_stride;
  bool transpose_a, transpose_b, accumulate, has_bias, tf32;
  DType factors, result;
  GemmBatch batch;
  Epilogue epilogue;
  Alignments matrices;
  std::uint32_t bias, aux;

  explicit Key(const GemmCall& c)
      : m(c.m),
        n(c.n),
        k(c.k),
        a_stride(c.a_stride),
        b_stride(c.b_stride),
        d_stride(c.d_stride),
        transpose_a(c.transpose_a),
        transpose_b(c.transpose_b),
        accumulate(c.beta != 0),
        has_bias(c.bias != nullptr),
        tf32(c.allow_tf32),
        factors(c.factors),
        result(c.result),
        batch(c.batch),
        epilogue(c.epilogue),
        matrices(c),
        bias(alignment(c.bias)),
        aux(alignment(c.aux)) {}
  auto operator<=>(const Key&) const = default;
};

std::size_t workspace_bytes(Device device) {
  static std::mutex mutex;
  static std::map<int, std::size_t> known;
  const std::lock_guard lock(mutex);
  const auto [it, added] = known.try_emplace(device.index, 0);
  if (added) {
    cuda::DeviceProperties p;
    cuda::check(cuda::runtime().get_properties(&p, device.index), "cudaGetDeviceProperties", device);
    it->second = std::size_t{p.major >= 9 ? 32u : 8u} << 20;  // NVIDIA's recommendation
  }
  return it->second;
}

using Algorithm = std::optional<cublasLtMatmulAlgo_t>;

/// cuBLASLt state of one device. Lives as long as the process; holds no device memory.
class Card {
 public:
  explicit Card(Device device) : device_(device) {
    const cuda::DeviceGuard guard(device);
    check(library().cublasLtCreate(&handle_), "cublasLtCreate", device);
  }

  cublasLtHandle_t handle() const { return handle_; }

  /// The algorithm for a call, cached; nullopt if cuBLASLt has none.
  Algorithm algorithm(const GemmCall& c) {
    const std::lock_guard lock(mutex_);
    const auto known = chosen_.find(Key(c));
    if (known != chosen_.end()) return known->second;
    return chosen_.emplace(Key(c), query(c)).first->second;
  }

 private:
  template <class T>
  void set(cublasLtMatmulPreference_t to, cublasLtMatmulPreferenceAttributes_t attribute, T value) const {
    check(library().cublasLtMatmulPreferenceSetAttribute(to, attribute, &value, sizeof value),
          "cublasLtMatmulPreferenceSetAttribute", device_);
  }

  Algorithm query(const GemmCall& c) const {
    const Description d(c, device_);
    Owned<cublasLtMatmulPreference_t> wanted{library().cublasLtMatmulPreferenceDestroy};
    check(library().cublasLtMatmulPreferenceCreate(wanted.out()), "cublasLtMatmulPreferenceCreate", device_);
    set(wanted.get(), CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, std::uint64_t{workspace_bytes(device_)});
    // Partial sums are reduced in f32, not in the result type, and in a fixed order.
    set(wanted.get(), CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
        static_cast<std::uint32_t>(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
    const Alignments matrices(c);
    set(wanted.get(), CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, matrices.b);
    set(wanted.get(), CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, matrices.a);
    set(wanted.get(), CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, matrices.d);
    set(wanted.get(), CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, matrices.d);
    cublasLtMatmulHeuristicResult_t best{};
    int found = 0;
    const cublasStatus_t status = library().cublasLtMatmulAlgoGetHeuristic(
        handle_, d.product.get(), d.first.get(), d.second.get(), d.result.get(), d.result.get(), wanted.get(),
        1, &best, &found);
    const bool none = status == CUBLAS_STATUS_NOT_SUPPORTED || status == CUBLAS_STATUS_INVALID_VALUE;
    if (!none) check(status, "cublasLtMatmulAlgoGetHeuristic", device_);
    return none || found == 0 || best.state != CUBLAS_STATUS_SUCCESS ? Algorithm() : best.algo;
  }

  Device device_;
  cublasLtHandle_t handle_ = nullptr;
  std::mutex mutex_;
  std::map<Key, Algorithm> chosen_;
};

Card& card(Device device) {
  static std::mutex mutex;
  // never destroyed: the driver may be unloaded before static objects are
  static auto* const cards = new std::map<int, Card>();
  const std::lock_guard lock(mutex);
  return cards->try_emplace(device.index, device).first->second;
}

// ---- the table

bool aux_fits(const GemmCall& c) { return !c.aux || (c.d_stride % 8 == 0 && alignment(c.aux) == 16); }

bool can(const GemmCall& c, Device device) {
  const cuda::DeviceGuard guard(device);
  return aux_fits(c) && card(device).algorithm(c).has_value();
}

std::string describe(const GemmCall& c) {
  return concat(c.batch.count > 1 ? concat(c.batch.count, " times ") : "", "[", c.m, ", ", c.k, "] · [", c.k,
                ", ", c.n, "] of ", name(c.factors), " into ", name(c.result), ", epilogue ",
                static_cast<int>(c.epilogue));
}

void gemm(const GemmCall& c, Device device, void* stream) {
  const cuda::DeviceGuard guard(device);
  Card& on = card(device);
  const Algorithm algorithm = on.algorithm(c);
  if (!algorithm)
    fail(Errc::unsupported, "cuBLASLt has no kernel on ", name(device), " for ", describe(c),
         ": addresses and rows must be aligned to 16 bytes for most");
  const Description d(c, device);
  const cublasStatus_t status =
      library().cublasLtMatmul(on.handle(), d.product.get(), &c.alpha, c.b, d.first.get(), c.a,
                               d.second.get(), &c.beta, c.d, d.result.get(), c.d, d.result.get(), &*algorithm,
                               c.workspace, workspace_bytes(device), static_cast<cudaStream_t>(stream));
  if (status != CUBLAS_STATUS_SUCCESS) check(status, concat("cublasLtMatmul ", describe(c)).c_str(), device);
}

}  // namespace

const Blas& blas() {
  static_cast<void>(library());
  static constexpr Blas table{.workspace_bytes = workspace_bytes, .can = can, .gemm = gemm};
  return table;
}

}  // namespace rz::kernels
