#include <cstdio>

#include "comm/core/error.h"
#include "sharding/checkpoint/compare.h"
#include "sharding/io/text.h"
#include "tools/checkpoint/commands.h"
#include "tools/command_line/command_line.h"
#include "tools/command_line/progress.h"

namespace rz::checkpoint {
namespace {

constexpr const char* diff_description =
    "Compares two checkpoints, tensor by tensor and state by state, whatever ranks and strategies wrote\n"
    "them; or weights of any kind: a checkpoint, safetensors, a state dict of torch.save(), a folder of\n"
    "Hugging Face or DeepSpeed.\n\n"
    "  checkpoint diff A/global_step100 B/global_step100\n"
    "  checkpoint diff RUN merged --tolerance 1e-2";

constexpr const char* diff_footer =
    "An element differs if a bit does, or with --tolerance if its values differ by more; dtypes may then\n"
    "differ too. The table has max |A - B| and the number of elements that differ. If A or B is no\n"
    "checkpoint, parameters and persistent buffers only are compared.\n\n"
    "Exit status: 0 equal, 1 different, 2 any error.";

struct DiffOptions {
  std::string a, b;
  double tolerance = 0;
  bool weights_only = false;
};

void print_names(const char* heading, const std::vector<std::string>& names) {
  for (const std::string& name : names) std::printf("%s %s\n", heading, escaped(name).c_str());
}

std::string number(double x) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3g", x);
  return text;
}

void print_tensors(const std::vector<TensorDifference>& tensors) {
  if (tensors.empty()) return;
  TextTable table({"tensor", "A", "B", "max |A - B|", "differing", "of"});
  for (const TensorDifference& d : tensors)
    table.add({escaped(d.name), d.a, d.b == d.a ? "same" : d.b, d.comparable ? number(d.max_difference) : "-",
               d.comparable ? concat(d.differing) : "-", concat(d.count)});
  std::fputs(table.text().c_str(), stdout);
}

SourceDifferences differences(const DiffOptions& o) {
  const bool checkpoints = has_checkpoint(o.a) && has_checkpoint(o.b);
  const TensorPart part = checkpoints && !o.weights_only ? TensorPart::all : TensorPart::weights;
  const TensorSource a = open_source(o.a, part), b = open_source(o.b, part);
  ProgressLine progress;
  SourceDifferences d =
      compare(a, b, o.tolerance, [&](std::uint64_t done, std::uint64_t all) { progress.show(done, all); });
  if (o.weights_only) d.state.clear();
  return d;
}

int run_diff(const DiffOptions& o) {
  const SourceDifferences d = differences(o);
  print_names("only in A:", d.only_in_a);
  print_names("only in B:", d.only_in_b);
  print_names("state:", d.state);
  print_tensors(d.tensors);
  std::printf("%llu tensors %s, %zu different, %zu only in A, %zu only in B\n",
              static_cast<unsigned long long>(d.equal), o.tolerance > 0 ? "within the tolerance" : "equal",
              d.tensors.size(), d.only_in_a.size(), d.only_in_b.size());
  return d.none() ? 0 : 1;
}

}  // namespace

int diff(int argc, const char* const* argv) {
  DiffOptions o;
  CommandLine line(diff_description, "checkpoint diff", diff_footer);
  line.add_option("A", o.a, "A checkpoint, a folder of them, or weights").type_name("").required();
  line.add_option("B", o.b, "What it is compared with").type_name("").required();
  line.add_option("--tolerance", o.tolerance,
                  "Largest |A - B| of equal elements; default 0: their bits are equal")
      .within(0.0, 1e300);
  line.add_flag("--weights-only", o.weights_only, "Compare neither state nor the optimizer's tensors");
  const std::string help = line.parse(argc, argv);
  return help.empty() ? run_diff(o) : print_help(help);
}

}  // namespace rz::checkpoint
