/// Highway targets: AVX-512, AVX2 and portable. Include it first in every file that Highway compiles once per
/// target.
#ifndef HWY_DISABLED_TARGETS
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3_DL)
#endif
