// Norm, clipping and update in one call. If the gradients are on a device, the device decides.

#include <algorithm>
#include <cstring>
#include <vector>

#include "comm/core/error.h"
#include "comm/device/allocate.h"
#include "sharding/optim/grad_norm.h"
#include "sharding/strategies/strategy.h"
#include "tensor/kernels/device_ops.h"

namespace rz {

void Strategy::clip_and_step(Optimizer& optimizer, const StepPolicy& policy, const Stream& given) {
  require_reduced("clip_and_step()");
  require(policy.max_norm >= 0, Errc::invalid_argument, "clip_and_step(): max_norm is ", policy.max_norm,
          ", expected 0 (none) or more");
  const Stream& stream = device_stream(given);
  const StepLimits limits{policy.max_norm, loss_scale_, policy.skip_overflow};
  SquareSum sum(stream, norm_words_);
  add_squares(sum);
  if (stream.device().kind == Device::host) {
    outcome_ = step_outcome(sum_over_ranks(sum), limits);
    if (!outcome_.skip) {
      update_all(optimizer, {.factor = outcome_.grad_scale}, stream);
      count_missed();
    }
    return end_step();
  }
  const Tensor& words = sum.words();
  wait_exposed(communicator_.all_reduce(words.buffer(), ReduceOp::sum, stream), stream);
  if (!device_outcome_.defined())
    device_outcome_ = Tensor::empty({sizeof(StepOutcome)}, DType::u8, allocator_on(stream.device()));
  auto* const decided = reinterpret_cast<StepOutcome*>(device_outcome_.raw());
  ops::device_ops().optimizer.decide_step(decided, words.data<std::int64_t>(), limits, stream);
  update_all(optimizer,
             {.device_outcome = decided, .constants = constants_current_ ? constants_.raw() : nullptr},
             stream);
  end_step();
}

Strategy::Outcome Strategy::outcome(Optimizer& optimizer, const Stream& given) {
  const Stream& stream = device_stream(given);
  if (stream.device().kind == Device::host) return {outcome_.norm, outcome_.skip != 0};
  require(device_outcome_.defined(), Errc::invalid_argument, "outcome() before the first clip_and_step()");
  communicator_.synchronize(stream);
  const Tensor bytes = device_outcome_.on_host(stream);
  StepOutcome made;
  std::memcpy(&made, bytes.raw(), sizeof made);
  if (made.skip) {
    optimizer.set_updates(optimizer.updates() - 1);
  } else {
    count_missed();
  }
  return {made.norm, made.skip != 0};
}

void Strategy::next_update(Optimizer& optimizer, const Stream& given) {
  const Stream& stream = device_stream(given);
  require(stream.device().kind == Device::cuda, Errc::unsupported,
          "next_update() is for updates on a CUDA device");
  optimizer.begin_update();
  std::vector<std::byte> constants = optimizer.constants(0);
  constants_stride_ = constants.size();
  if (!constants_.defined())
    constants_ =
        Tensor::empty({constants_stride_ * (1 + members_.size())}, DType::u8, allocator_on(stream.device()));
  constants.resize(constants_.bytes());
  for (std::size_t m = 0; m < members_.size(); ++m)
    if (missed_[m] != 0)
      std::ranges::copy(optimizer.constants(missed_[m]),
                        &constants[constants_slot(missed_[m], static_cast<int>(m))]);
  constants_.assign(constants, stream);
  constants_current_ = true;
}

/// Each member that missed updates has a slot of its own, so that a graph finds its constants at a fixed
/// address.
std::size_t Strategy::constants_slot(std::int64_t missed, int first) const {
  return missed == 0 ? 0 : constants_stride_ * (1 + static_cast<std::size_t>(first));
}

}  // namespace rz
