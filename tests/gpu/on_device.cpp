#include "tests/gpu/on_device.h"

#include <cstdlib>

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

template <class T>
Tensor rounded(const std::vector<double>& values, const Shape& shape, const Stream& stream) {
  std::vector<T> raw;
  for (const double v : values) raw.push_back(from_f32<T>(static_cast<float>(v)));
  const Tensor t = empty_on(stream, shape, dtype_of<T>);
  t.assign(std::span<const T>(raw), stream);
  return t;
}

template <class T>
std::vector<double> widened(const Tensor& host) {
  std::vector<double> values;
  for (std::size_t i = 0; i < host.count(); ++i)
    values.push_back(static_cast<double>(to_f32(host.data<T>()[i])));
  return values;
}

}  // namespace

Tensor to_device(const std::vector<double>& values, const Shape& shape, DType dtype, const Stream& stream) {
  if (dtype == DType::f16) return rounded<f16>(values, shape, stream);
  if (dtype == DType::bf16) return rounded<bf16>(values, shape, stream);
  return rounded<float>(values, shape, stream);
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
  if (t.dtype() == DType::f16) return widened<f16>(host);
  if (t.dtype() == DType::bf16) return widened<bf16>(host);
  if (t.dtype() == DType::f64) return {host.data<double>(), host.data<double>() + host.count()};
  return widened<float>(host);
}

}  // namespace rz::test
