#pragma once
/// Orthogonalization of a matrix.

#include "comm/device/stream.h"
#include "sharding/optim/optimizer.h"
#include "tensor/tensor.h"

namespace rz {

/// Replaces a matrix X = U·S·Vᵀ by U·S'·Vᵀ with singular values S' near 1 (about 0.7 to 1.2): X / (|X| +
/// 1e-7), then `steps` times aX + (bA + cA²)X with A = X·Xᵀ and (a, b, c) = (3.4445, -4.7750, 2.0315) (Jordan
/// et al., https://kellerjordan.github.io/posts/muon/). f32, on the device of the stream. For r rows and c
/// columns, r <= c, a step is 2r²c + r³ multiply-adds, and `workspace` allocates r·c + 2r² values; a taller
/// matrix is treated as its transpose. Errc::invalid_argument unless it has two dimensions.
void newton_schulz(const Tensor& matrix, int steps, const Workspace& workspace, const Stream&);

}  // namespace rz
