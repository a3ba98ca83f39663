#include <cstdio>

#include "tools/command_line/command_line.h"
#include "tools/rzrun/options.h"
#include "tools/rzrun/supervisor.h"

int main(int argc, char** argv) {
  return rz::run_program("rzrun", [&] {
    const auto parsed = rz::rzrun::parse_options(argc, argv);
    if (!parsed.help.empty()) return std::fputs(parsed.help.c_str(), stdout) < 0 ? 1 : 0;
    return rz::rzrun::supervise(parsed.options);
  });
}
