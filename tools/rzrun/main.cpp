#include "tools/command_line/command_line.h"
#include "tools/rzrun/flags/flags.h"
#include "tools/rzrun/supervisor.h"

int main(int argc, char** argv) {
  const auto parse_arguments = [&] { return rz::rzrun::parse_options(argc, argv); };
  return rz::run_program("rzrun", parse_arguments, rz::rzrun::supervise);
}
