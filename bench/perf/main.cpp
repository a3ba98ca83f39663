// One of the _perf programs; the build defines the collective.
#include "bench/harness/perf_main.h"

int main(int argc, char** argv) { return rz::bench::perf_main(RZ_COLLECTIVE, argc, argv); }
