#pragma once
/// Training throughput, compared with the peak of the devices.

#include <cstddef>
#include <span>
#include <string>
#include <string_view>

#include "autograd_lite/models/language_model.h"
#include "comm/communicator.h"

namespace rz::train_lm {

/// Floating-point operations per token in training, recomputation not counted: 6 N + 12 L H Q T with N
/// parameters without the position embedding, L layers, H heads of Q channels, context T (Chowdhery et al.,
/// PaLM, arXiv:2204.02311, appendix B).
double flops_per_token(LanguageModel&, std::size_t seq_len);

/// Dense bf16 operations per second, with f32 accumulation, of a device by its name, from NVIDIA's data
/// sheets; 0 if unknown.
double bf16_peak(std::string_view device_name);

/// The median, the mean of the two middle values if their number is even; 0 if there are none.
double median(std::span<const double>);

/// The devices used by the ranks of a group, each counted once.
struct Devices {
  std::string name;  ///< of this rank's device; empty on the host
  int count = 0;
};
/// Collective.
Devices devices_of(Communicator&);

/// "speed: 123456 tokens/s in the median, 41.2% of the bf16 peak of 1 x NVIDIA H200 (989.4 TFLOP/s each)";
/// without the percentage if the peak is unknown.
std::string describe_throughput(double tokens_per_second, double flops_per_token, const Devices&);

}  // namespace rz::train_lm
