// Measures the algorithms of each collective and writes a tuning table.
#include <unistd.h>

#include <cstdio>
#include <fstream>

#include "comm/bootstrap.h"
#include "comm/core/error.h"
#include "tools/command_line/command_line.h"
#include "tools/command_line/progress.h"
#include "tools/tune/measure.h"

namespace rz::tune {
namespace {

/// Draws a progress bar on a terminal; later calls overwrite it.
void draw(double done, const std::string& what) {
  constexpr int width = 40;
  std::fprintf(stderr, "\r%s %3d%%  %-32s%s", progress_bar(done, width).c_str(), static_cast<int>(done * 100),
               what.c_str(), done >= 1 ? "\n" : "");
}

/// Fails early, before minutes of measurement, if the file cannot be written.
void check_writable(const std::string& path) {
  std::ofstream out(path, std::ios::app);
  require(out.good(), Errc::config, "--output '", path, "' cannot be written");
}

void write(const std::string& path, const std::string& text) {
  std::ofstream out(path);
  out << text;
  out.flush();
  if (!out) fail_errno("write", path);
}

int run(const Options& options) {
  const LaunchInfo info = launch_info_from_environment();
  require(info.size >= 2, Errc::config,
          "one rank alone has nothing to choose; try: rzrun -n 4 tune --output ", options.output);
  const bool first = info.rank == 0;
  if (first) check_writable(options.output);
  const Progress progress = first && ::isatty(STDERR_FILENO) ? Progress(draw) : Progress([](auto, auto&) {});
  const Measured measured = measure(info.rank, info.size, store_for_launch(info), options, progress);
  if (!first) return 0;
  const tuning::Table table = make_table(measured);
  write(options.output, header(measured, options) + table.text());
  std::printf("%s: %zu lines for groups of %d, %s; RZ_TUNING=%s uses it\n", options.output.c_str(),
              table.rules.size(), measured.ranks, measured.backend.c_str(), options.output.c_str());
  return 0;
}

}  // namespace
}  // namespace rz::tune

int main(int argc, char** argv) {
  const auto parse_arguments = [&] { return rz::tune::parse_options(argc, argv); };
  return rz::run_program("tune", parse_arguments, rz::tune::run);
}
