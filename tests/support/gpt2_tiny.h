#pragma once
/// tests/data/gpt2_tiny: tokens, initial weights by the formula in its make_expected.py, and what PyTorch
/// computes in float64.

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "autograd_lite/models/gpt2.h"
#include "sharding/lm/update_report.h"

namespace rz::test {

/// Numbers in [0, 1) that belong to a name, as the scripts of tests/data make them (FNV-1a, splitmix64).
class NamedUniform {
 public:
  explicit NamedUniform(std::string_view name) {
    for (const unsigned char c : name) seed_ = (seed_ ^ c) * 0x100000001b3;
  }
  double operator[](std::size_t i) const {
    std::uint64_t z = seed_ + i + 0x9e3779b97f4a7c15;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return static_cast<double>((z ^ (z >> 31)) >> 40) / (1 << 24);
  }

 private:
  std::uint64_t seed_ = 0xcbf29ce484222325;
};

/// Initial values of a parameter of a GPT-2 with `n_layer` layers: elements of the whole one.
void gpt2_tiny_weights(const Parameter&, std::int64_t n_layer, Range, float* out);

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
