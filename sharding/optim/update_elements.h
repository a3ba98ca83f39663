#pragma once
/// Element-wise updates of spans on host or device.

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "sharding/optim/optimizer.h"
#include "tensor/kernels/device_ops.h"
#include "tensor/kernels/optimizer/optimizer.h"

namespace rz {

/// Elements per thread; waking another thread for fewer does not pay.
inline constexpr std::size_t host_grain = 4096;

inline kernels::UpdateRun run_of(const UpdateSpan& s) {
  return {.value = s.value,
          .gradient = s.gradient,
          .gradient_dtype = s.gradient_dtype,
          .working = s.working,
          .working_dtype = s.working_dtype,
          .state0 = s.state[0],
          .state1 = s.state[1],
          .state2 = s.state[2],
          .count = s.count,
          .member = static_cast<std::uint32_t>(s.member)};
}

/// Calls kernel(run, factors) on the host for parts of the spans; factors_of(group) are the constants of a
/// group, with the factor of the update. Nothing is allocated.
template <class Factors, class Of>
void update_on_host(std::span<const UpdateSpan> spans,
                    void (*kernel)(const kernels::UpdateRun&, const Factors&), const Of& factors_of,
                    const Stream& stream) {
  int group = -1;
  Factors factors{};
  for (const UpdateSpan& s : spans) {
    if (s.group != group) factors = factors_of(group = s.group);
    const kernels::UpdateRun run = run_of(s);
    stream.parallel_for(s.count, host_grain, [&](std::size_t begin, std::size_t end) {
      kernel(kernels::part_of(run, begin, end), factors);
    });
  }
}

/// Launches `kernel` on the device for the groups, as many at a time as its arguments have room for.
template <class Factors, class Kernel>
void update_on_device(std::span<const UpdateSpan> spans, Kernel kernel, const std::vector<Factors>& factors,
                      const UpdateScale& scale, const Stream& stream) {
  std::vector<kernels::UpdateRun> runs;
  for (std::size_t first = 0; first < factors.size(); first += ops::device::max_rules) {
    const auto some =
        std::span(factors).subspan(first, std::min(ops::device::max_rules, factors.size() - first));
    runs.clear();
    for (const UpdateSpan& s : spans) {
      const auto rule = static_cast<std::size_t>(s.group) - first;
      if (rule >= some.size()) continue;
      runs.push_back(run_of(s));
      runs.back().rule = static_cast<std::uint32_t>(rule);
    }
    ops::StepInputs inputs;
    if (scale.device_outcome)
      inputs.grad_scale = &scale.device_outcome->grad_scale, inputs.skip = &scale.device_outcome->skip;
    if (scale.device_norms) inputs.norms = &scale.device_norms->values;
    if (scale.constants) inputs.rules = static_cast<const Factors*>(scale.constants) + first;
    kernel(runs, some, inputs, stream);
  }
}

}  // namespace rz
