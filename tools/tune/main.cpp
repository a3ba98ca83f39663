// Measures the algorithms of each collective and writes a tuning table.
#include <unistd.h>

#include <cstdio>
#include <optional>

#include "comm/bootstrap.h"
#include "comm/core/environment.h"
#include "comm/core/error.h"
#include "tools/command_line/command_line.h"
#include "tools/command_line/output_file.h"
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

int run(const Options& options) {
  const LaunchInfo info = launch_info_from_environment();
  require(info.size >= 2, Errc::config,
          "one rank alone has nothing to choose; try: rzrun -n 4 tune --output ", options.output);
  const bool first = info.rank == 0;
  environment();  // a wrong variable is an error of the input, for which no file is emptied
  std::optional<OutputFile> file;
  if (first) file.emplace("--output", options.output);
  if (file) file->hold(concat("# error: ", unfinished_error, "\n"));
  const Progress progress = first && ::isatty(STDERR_FILENO) ? Progress(draw) : Progress([](auto, auto&) {});
  Measured measured;
  try {
    measured = measure(info.rank, info.size, store_for_launch(info), options, progress);
  } catch (const std::exception& e) {
    if (file) file->try_write(concat("# error: ", one_line(e), "\n"));
    throw;
  }
  if (!file) return 0;
  const tuning::Table table = make_table(measured);
  file->write(header(measured, options) + table.text());
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
