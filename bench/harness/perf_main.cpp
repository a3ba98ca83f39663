// Main function of the _perf programs; the build defines the collective of each.
#include <cstdio>
#include <cstdlib>

#include "bench/harness/harness.h"
#include "comm/core/text.h"
#include "tools/command_line/command_line.h"

int main(int argc, char** argv) {
  using namespace rz;
  using namespace rz::bench;
  constexpr const char* name = RZ_COLLECTIVE;
  // Must precede CUDA initialisation: ranks may be threads that share a card
  // (comm/backends/peer_cuda/peer_cuda_backend.h).
  ::setenv("CUDA_MODULE_LOADING", "EAGER", 0);
  ::setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
  const auto& collective = collective_from_name(name);
  const auto parse = [&] { return parse_options(collective, argc, argv); };
  return run_program(concat(name, "_perf").c_str(), parse, [&](const Options& options) {
    std::setvbuf(stdout, nullptr, _IOLBF, BUFSIZ);
    return run(collective, options, [](const std::string& text) { std::fputs(text.c_str(), stdout); });
  });
}
