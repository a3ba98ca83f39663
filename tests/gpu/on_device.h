#pragma once
/// Tests of device code. Every test of tests/gpu and tests/operators is built twice: as gpu_* for the card,
/// where it skips with a reason if there is none, and as emulated_* for the emulated device, where the
/// runtime and the kernels are replaced. Tests of operators are built a third time, as host_*: the host's
/// operators have the same semantics.

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "comm/device/memory.h"
#include "comm/device/stream.h"
#include "tensor/tensor.h"

namespace rz::test {

extern const bool emulated_device;
extern const Device tested_device;  ///< the first CUDA device, or the host

#ifdef __SANITIZE_ADDRESS__
inline constexpr bool checks_addresses = true;  ///< an update of a small model takes seconds
#else
inline constexpr bool checks_addresses = false;
#endif

/// Fixture: a stream of the tested device. On the emulated device each test is a schedule of its own;
/// `reschedule` begins another one, with another order of concurrent tasks. On the host it changes the number
/// of threads.
class OnDevice : public testing::Test {
 protected:
  OnDevice();
  ~OnDevice() override;
  void SetUp() override;
  /// How many schedules a test should try of the same calls: `n` on the emulated device, else 1. A test whose
  /// calls depend on the schedule's number tries them all everywhere.
  static int schedules(int n) { return emulated_device ? n : 1; }
  void reschedule(std::uint64_t seed);

  static bool on_host() { return tested_device.kind == Device::host; }

  const Device device = tested_device;
  Stream stream;

 private:
  struct Schedule;
  std::unique_ptr<Schedule> schedule_;
};

/// A tensor on the stream's device with these values, rounded to `dtype`: not f64. Integers have 101 for NaN.
Tensor to_device(const std::vector<double>& values, const Shape&, DType dtype, const Stream&);
Tensor to_device(const std::vector<std::int32_t>& values, const Shape&, const Stream&);
/// New device memory; on the emulated device NaN.
Tensor empty_on(const Stream&, const Shape&, DType = DType::f32);
/// The values of a tensor, waited for.
std::vector<double> from_device(const Tensor&, const Stream&);

}  // namespace rz::test
