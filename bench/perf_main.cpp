// One of the _perf programs; which one is a definition of the build.
#include <cstdio>
#include <cstdlib>

#include "bench/harness/harness.h"
#include "tools/command_line/command_line.h"

int main(int argc, char** argv) {
  using namespace rz::bench;
  const Collective& collective = collective_from_name(RZ_COLLECTIVE);
  // Before CUDA starts: ranks may be threads that share a card (comm/backends/peer_cuda.h).
  ::setenv("CUDA_MODULE_LOADING", "EAGER", 0);
  ::setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
  const auto parse = [&] { return parse_options(collective, argc, argv); };
  return rz::run_program(RZ_COLLECTIVE "_perf", parse, [&](const Options& options) {
    std::setvbuf(stdout, nullptr, _IOLBF, BUFSIZ);
    return run(collective, options, [](const std::string& text) { std::fputs(text.c_str(), stdout); });
  });
}
