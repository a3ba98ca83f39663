#include <cstdio>

#include "comm/core/error.h"
#include "tools/rzrun/options.h"
#include "tools/rzrun/supervisor.h"

int main(int argc, char** argv) {
  try {
    const auto parsed = rz::rzrun::parse_options(argc, argv);
    if (!parsed.help.empty()) return std::fputs(parsed.help.c_str(), stdout) < 0;
    return rz::rzrun::supervise(parsed.options);
  } catch (const rz::Error& e) {
    std::fprintf(stderr, "rzrun: %s\n", e.what());
    return e.code() == rz::Errc::config ? 2 : 1;
  }
}
