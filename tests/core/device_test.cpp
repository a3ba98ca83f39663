// Runs: ci pure

// Devices by name, and absent ones: one line on every machine, with or without devices.

#include <gtest/gtest.h>

#include "comm/core/error.h"
#include "comm/device/cuda_runtime.h"
#include "tests/support/error_of.h"

namespace rz {
namespace {

template <class F>
std::string refused(const F& call) {
  return test::refusal(call, Errc::config);
}

std::string how_many() {
  try {
    static_cast<void>(cuda::runtime());
  } catch (const Error& none) {
    return none.what();
  }
  const int n = cuda::device_count();
  if (n == 0) return "no CUDA device was found";
  return concat("this machine has ", n, n == 1 ? " device" : " devices", ", from cuda:0");
}

TEST(Device, TheHostIsAlwaysThere) {
  EXPECT_EQ(cuda::device_from_name("host"), Device{});
  EXPECT_NO_THROW(cuda::require_device({}));
}

TEST(Device, AnAbsentOneIsNamedWithThosePresent) {
  for (const std::string device : {"cuda:99", "cuda:-1"})
    EXPECT_EQ(refused([&] { cuda::device_from_name(device); }).find(device + " is not there: " + how_many()),
              0u)
        << refused([&] { cuda::device_from_name(device); });
  EXPECT_EQ(refused([] { cuda::require_device({Device::cuda, 99}); }).find("cuda:99 is not there: "), 0u);
}

TEST(Device, AnyOfNoneIsRefused) {
  if (cuda::device_count() > 0) GTEST_SKIP() << "this machine has devices";
  EXPECT_EQ(refused([] { cuda::device_from_name("cuda"); }).find("cuda:0 is not there: " + how_many()), 0u);
}

TEST(Device, AWordThatIsNoDeviceIsRefusedWithTheChoices) {
  for (const std::string word : {"", "gpu", "cuda:", "cuda:x", "cuda:1x", "cuda:99999999999", "CUDA:0"})
    EXPECT_EQ(refused([&] { cuda::device_from_name(word); }),
              "device '" + word + "' is unknown; choose host, cuda or cuda:N");
}

}  // namespace
}  // namespace rz
