// GPT-2 trained on devices: PyTorch's course in float64 for every strategy and number of ranks, and the same
// bits whatever the schedule.

#include <algorithm>

#include "comm/device/cuda_runtime.h"
#include "tests/gpu/on_device.h"
#include "tests/support/train_tiny.h"

namespace rz::test {
namespace {

using Setting = std::tuple<std::string, int, StrategyKind>;

/// Ranks are threads, each on a device of its own if there are enough.
std::function<void(TinyRun&)> on_devices(const std::string& backend) {
  return [backend](TinyRun& run) {
    run.comm = [backend](int rank) {
      CommOptions o;
      o.backend = backend;
      o.device = {Device::cuda, rank % cuda::device_count()};
      o.timeout = std::chrono::seconds(60);
      return o;
    };
  };
}

/// An update takes the emulated device a second. One setting of each number of ranks runs to the end, a
/// minute in all; the others, which have the same bits, run three updates.
bool goes_all_the_way(const Setting& setting) {
  static const Setting settings[] = {{"peer_cuda", 1, StrategyKind::ddp},
                                     {"peer_cuda", 2, StrategyKind::zero3},
                                     {"peer_cuda", 4, StrategyKind::zero2}};
  return !emulated_device || std::ranges::find(settings, setting) != std::end(settings);
}

class Training : public OnDevice, public testing::WithParamInterface<Setting> {};

TEST_P(Training, FollowsPyTorchInFloat64) {
  const auto& [backend, ranks, kind] = GetParam();
  if (backend == "nccl" && !emulated_device)
    GTEST_SKIP() << "NCCL needs a process a rank on a card of its own; gpu_nccl_processes_test";
  const TinyCase c = tiny_case("tiny");
  const std::int64_t steps = checks_addresses ? 1 : goes_all_the_way(GetParam()) ? c.steps : 3;
  expect_close(train_tiny("tiny", ranks, kind, steps, on_devices(backend)), c);
}

std::string setting_name(const testing::TestParamInfo<Setting>& info) {
  return concat(std::get<0>(info.param), "_ranks", std::get<1>(info.param), "_",
                name(std::get<2>(info.param)));
}
using Kinds = std::vector<StrategyKind>;
INSTANTIATE_TEST_SUITE_P(Peers, Training,
                         testing::Combine(testing::Values("peer_cuda"),
                                          testing::ValuesIn(checks_addresses ? std::vector{2}
                                                                             : std::vector{1, 2, 4}),
                                          testing::ValuesIn(checks_addresses ? Kinds{StrategyKind::zero3}
                                                                             : Kinds(std::begin(strategies),
                                                                                     std::end(strategies)))),
                         setting_name);
INSTANTIATE_TEST_SUITE_P(Others, Training,
                         testing::Combine(testing::Values("native", "nccl"), testing::Values(2),
                                          testing::ValuesIn(checks_addresses ? Kinds{StrategyKind::zero3}
                                                                             : Kinds{StrategyKind::ddp,
                                                                                     StrategyKind::zero3})),
                         setting_name);

}  // namespace
}  // namespace rz::test
