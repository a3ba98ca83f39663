#pragma once
/// How fast training runs, beside what the devices could do.

#include <cstddef>
#include <span>
#include <string>
#include <string_view>

#include "autograd_lite/models/gpt2.h"
#include "comm/communicator.h"

namespace rz::train_gpt {

/// Floating-point operations that training takes a token, what is recomputed not counted: 6 N + 12 L H Q T
/// with N parameters but for the position embedding, L layers, H heads of Q channels, context T (Chowdhery
/// et al., PaLM, arXiv:2204.02311, appendix B).
double flops_per_token(const Gpt2Config&, std::size_t seq_len);

/// A device's dense operations a second in bf16 with sums in f32, by its name, from NVIDIA's data sheets; 0
/// if it is not known.
double bf16_peak(std::string_view device_name);

/// The middle of the values, the mean of both if there are two; 0 of none.
double median(std::span<const double>);

/// The devices that the ranks of a group train on, each counted once.
struct Devices {
  std::string name;  ///< of this rank's; empty on the host
  int count = 0;
};
/// Collective.
Devices devices_of(Communicator&);

/// "speed: 123456 tokens/s in the median, 41.2% of the bf16 peak of 1 x NVIDIA H200 (989.4 TFLOP/s each)";
/// without the share where the peak is not known.
std::string describe_throughput(double tokens_per_second, double flops_per_token, const Devices&);

}  // namespace rz::train_gpt
