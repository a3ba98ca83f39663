#pragma once
/// What a strategy holds in memory on this rank.

#include <cstddef>
#include <string>

namespace rz {

/// Bytes, padding counted. With Ψ trainable parameters in f32 on N ranks and AdamW, up to padding
/// (Rajbhandari et al., ZeRO, doi:10.1109/SC41405.2020.00024):
///
///             parameters   gradients   optimizer state
///     ddp         4Ψ          4Ψ             8Ψ
///     zero1       4Ψ          4Ψ             8Ψ/N
///     zero2       4Ψ          4Ψ/N           8Ψ/N
///     zero3       4Ψ/N        4Ψ/N           8Ψ/N
///
/// In mixed precision parameters are 2Ψ and 2Ψ/N, gradients too unless they are kept in f32, and `masters`,
/// the f32 values of what a rank updates, are 4Ψ in ddp and 4Ψ/N in the others.
///
/// `transient` is memory that zero2 and zero3 take and give back within a step: whole buckets of gradients
/// until they are reduced, and gathered scopes. It is kept for the next step, and counted here while it is.
struct MemoryReport {
  std::size_t parameters = 0;
  std::size_t gradients = 0;
  std::size_t masters = 0;
  std::size_t optimizer_state = 0;   ///< 0 before the first step: state is made when it is first needed
  std::size_t transient = 0;         ///< held now, in use or not
  std::size_t transient_in_use = 0;  ///< of it
  std::size_t transient_peak = 0;    ///< most ever in use at once
  std::size_t total() const { return parameters + gradients + masters + optimizer_state + transient; }
  bool operator==(const MemoryReport&) const = default;
};

/// "parameters 474.7 MiB, gradients …": one line.
std::string describe(const MemoryReport&);

}  // namespace rz
