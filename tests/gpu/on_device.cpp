#include "tests/gpu/on_device.h"

#include <cmath>
#include <cstdlib>
#include <type_traits>

#include "comm/core/math.h"
#include "comm/device/cuda_runtime.h"
#ifdef RZ_EMULATED_DEVICE
#include "tests/emulated_gpu/emulated_gpu.h"
#endif

namespace rz::test {

#ifdef RZ_TESTED_ON_HOST
const Device tested_device{};
#else
const Device tested_device{Device::cuda, 0};
#endif

#ifdef RZ_EMULATED_DEVICE
const bool emulated_device = true;
struct OnDevice::Schedule {
  explicit Schedule(std::uint64_t seed) : schedule(seed) {}
  emulated::Schedule schedule;
};
#else
const bool emulated_device = false;
struct OnDevice::Schedule {
  explicit Schedule(std::uint64_t) {}
};
#endif

namespace {
// Before CUDA starts: ranks are threads here, and may share a card
// (comm/backends/peer_cuda/peer_cuda_backend.h).
[[maybe_unused]] const int eager = ::setenv("CUDA_MODULE_LOADING", "EAGER", 0);
[[maybe_unused]] const int queues = ::setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
}  // namespace

OnDevice::OnDevice() = default;

OnDevice::~OnDevice() {
  stream = {};
  schedule_.reset();
}

void OnDevice::SetUp() {
  if (!on_host() && cuda::device_count() == 0) GTEST_SKIP() << "no CUDA device";
  reschedule(1);
}

void OnDevice::reschedule(std::uint64_t seed) {
  stream = {};
  schedule_.reset();
  schedule_ = std::make_unique<Schedule>(seed);
  stream = on_host() ? Stream::host(static_cast<int>(1 + seed % 3)) : Stream::create(device);
}

namespace {

/// What an integer has in place of NaN.
constexpr int no_number = 101;

/// f(T())
template <class F>
auto of_type(DType t, const F& f) {
  return t == DType::u8     ? f(std::uint8_t())
         : t == DType::i32  ? f(std::int32_t())
         : t == DType::i64  ? f(std::int64_t())
         : t == DType::f16  ? f(f16())
         : t == DType::bf16 ? f(bf16())
                            : f(float());
}

template <class T>
Tensor rounded(const std::vector<double>& values, const Shape& shape, const Stream& stream) {
  std::vector<T> raw;
  for (const double v : values)
    if constexpr (std::is_integral_v<T>)
      raw.push_back(static_cast<T>(std::isnan(v) ? no_number : v));
    else
      raw.push_back(from_f32<T>(static_cast<float>(v)));
  const Tensor t = empty_on(stream, shape, dtype_of<T>);
  t.assign(std::span<const T>(raw), stream);
  return t;
}

template <class T>
std::vector<double> widened(const Tensor& host) {
  std::vector<double> values;
  for (const T v : std::span(host.data<T>(), host.count()))
    if constexpr (std::is_integral_v<T>)
      values.push_back(v == no_number ? NAN : static_cast<double>(v));
    else
      values.push_back(static_cast<double>(to_f32(v)));
  return values;
}

}  // namespace

Tensor to_device(const std::vector<double>& values, const Shape& shape, DType dtype, const Stream& stream) {
  return of_type(dtype, [&](auto t) { return rounded<decltype(t)>(values, shape, stream); });
}

Tensor to_device(const std::vector<std::int32_t>& values, const Shape& shape, const Stream& stream) {
  const Tensor t = empty_on(stream, shape, DType::i32);
  t.assign(std::span<const std::int32_t>(values), stream);
  return t;
}

Tensor empty_on(const Stream& stream, const Shape& shape, DType dtype) {
  return Tensor::empty(shape, dtype, allocator_on(stream.device()));
}

std::vector<double> from_device(const Tensor& t, const Stream& stream) {
  const Tensor host = t.on_host(stream);
  if (t.dtype() == DType::f64) return {host.data<double>(), host.data<double>() + host.count()};
  return of_type(t.dtype(), [&](auto of) { return widened<decltype(of)>(host); });
}

}  // namespace rz::test
