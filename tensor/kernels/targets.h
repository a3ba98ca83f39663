/// Included first by every file that Highway compiles once a target: AVX-512, AVX2 and the portable one.
#ifndef HWY_DISABLED_TARGETS
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3_DL)
#endif
