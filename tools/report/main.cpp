// Draws what train_lm --metrics writes.
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "comm/core/error.h"
#include "comm/core/text.h"
#include "sharding/io/file.h"
#include "tools/command_line/command_line.h"
#include "tools/report/chart.h"
#include "tools/report/runs.h"

namespace rz::report {
namespace {

constexpr const char* description =
    "Prints a table of runs that train_lm --metrics has written, and draws loss, norm, learning rate, "
    "tokens/s\n"
    "and exposed communication of all of them as one picture.\n\n"
    "  report runs/a/metrics.jsonl                                        the table\n"
    "  report runs/a/metrics.jsonl runs/b/metrics.jsonl --output runs.svg\n"
    "  report a.jsonl=before b.jsonl=after --log --output runs.svg        with names of one's own";

constexpr const char* footer =
    "An outlier is a loss or a norm that is not finite, or that exceeds the median of the 50 updates before "
    "by\n"
    "more than 6 scaled median absolute deviations (1.4826 MAD) and by more than 2 %.\n\n"
    "Exit status: 0 done; 2 an input is wrong, in one line, and nothing was written; 1 anything else.";

struct Options {
  std::vector<std::string> metrics;
  std::string output;
  ChartOptions chart{.title = "Training runs"};
};

Parsed<Options> parse(int argc, const char* const* argv) {
  Parsed<Options> parsed;
  Options& o = parsed.options;
  CommandLine line(description, "report METRICS…", footer);
  line.add_option("METRICS", o.metrics, "Files of train_lm --metrics, one for each run: FILE or FILE=NAME")
      .type_name("")
      .required();
  line.add_option("--output", o.output, "Write the picture to this file").type_name("FILE.svg");
  line.add_option("--title", o.chart.title, "Of the picture").type_name("TEXT");
  line.add_option("--smoothing", o.chart.smoothing,
                  "Weight of the past in the curves, as in TensorBoard, beside what was measured; 0: none; "
                  "default 0.6")
      .type_name("X")
      .within(0.0, 0.999);
  line.add_flag("--log", o.chart.logarithmic, "Logarithmic axes of loss and norm");
  parsed.help = line.parse(argc, argv);
  return parsed;
}

/// Nothing is written without commit().
std::unique_ptr<DurableFile> open_picture(const std::string& path) {
  if (path.empty()) return nullptr;
  try {
    return std::make_unique<DurableFile>(path);
  } catch (const Error& e) {
    fail(Errc::config, "--output ", e.what());
  }
}

int run(const Options& o) {
  const std::unique_ptr<DurableFile> picture = open_picture(o.output);
  std::vector<Run> runs;
  for (const std::string& word : o.metrics) runs.push_back(read_run(word));
  if (picture) {
    picture->write(draw(runs, o.chart));
    picture->commit();
  }
  std::fputs(table_of(runs).c_str(), stdout);
  if (picture) std::printf("drawn: %s\n", o.output.c_str());
  return 0;
}

}  // namespace
}  // namespace rz::report

int main(int argc, char** argv) {
  return rz::run_program(
      "report", [&] { return rz::report::parse(argc, argv); },
      [](const rz::report::Options& o) { return rz::report::run(o); });
}
