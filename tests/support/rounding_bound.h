#pragma once
/// How far a run in f32 may be from the same run in double.
///
/// Training amplifies rounding, most where the norm of the gradients jumps. The spread of it is measured: the
/// standard deviation, at each update, of ten runs in double in which every value that a model in f32 stores
/// is rounded up or down at random (tests/data/gpt2_tiny/make_expected.py,
/// tests/data/deepspeed/make_runs.py). Those runs have exact sums, ours have sums in f32. In 24 of ours, nine
/// of them different (BLAS kernels Haswell, SkylakeX, Cooperlake, Sandybridge, Nehalem, Prescott, Core2 and
/// Atom, 1 to 3 threads), the root mean square was 1.3 to 2 times the spread at updates that amplify rounding
/// in the case "tiny" of gpt2_tiny, and 4 times in "tiny_batch12" and "untied". Five deviations of the latter
/// are 20 times the spread.

#include <algorithm>

namespace rz::test {

/// The bound for an update: 20 times the spread of its loss or norm, and at least `floor`.
inline double rounding_bound(double spread, double floor) { return std::max(floor, 20 * spread); }

}  // namespace rz::test
