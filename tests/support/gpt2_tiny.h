#pragma once
/// tests/data/gpt2_tiny: tokens, initial weights by the formula in its make_expected.py, and what PyTorch
/// computes in float64.

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "autograd_lite/models/gpt2.h"
#include "sharding/lm/update_report.h"

namespace rz::test {

inline std::uint64_t fnv1a64(std::string_view text) {
  std::uint64_t h = 0xcbf29ce484222325;
  for (const unsigned char c : text) h = (h ^ c) * 0x100000001b3;
  return h;
}

inline std::uint64_t splitmix64(std::uint64_t x) {
  std::uint64_t z = x + 0x9e3779b97f4a7c15;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  return z ^ (z >> 31);
}

/// Element `i` of the parameter `name` of a GPT-2 with `n_layer` layers; `dims` is the number of its extents.
inline float gpt2_tiny_weight(std::string_view name, int dims, int n_layer, std::size_t i) {
  if (dims == 1) return name.ends_with(".weight") ? 1.0f : 0.0f;
  const double std = name.ends_with("c_proj.weight") ? 0.02 / std::sqrt(2.0 * n_layer) : 0.02;
  const double u = static_cast<double>(splitmix64(fnv1a64(name) + i) >> 40) / (1 << 24);
  return static_cast<float>(std * (2 * u - 1) * std::sqrt(3.0));
}

inline std::string tiny_tokens() { return RZ_SOURCE_DIR "/tests/data/gpt2_tiny/tokens.bin"; }

/// The initial weights as a checkpoint.
void write_tiny_start(const Gpt2Config&, const std::string& path);

/// A case: "tiny", "tiny_batch12", "untied".
struct TinyCase {
  Gpt2Config config;
  std::int64_t batch = 0, steps = 0;
  std::vector<double> loss, grad_norm;
  std::vector<double> loss_spread, relative_norm_spread;  ///< tests/support/rounding_bound.h
};
TinyCase tiny_case(const std::string& name);
/// Losses within 2e-5, norms within 1e-4 of themselves, or more where the case amplifies rounding.
void expect_close(const std::vector<lm::UpdateReport>&, const TinyCase&);

}  // namespace rz::test
