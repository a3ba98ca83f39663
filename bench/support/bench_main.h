#pragma once
/// Main function of the bench programs other than the _perf programs.

#include <functional>
#include <nlohmann/json.hpp>
#include <string>

#include "tools/command_line/command_line.h"

namespace rz::bench {

/// The JSON of the bench programs: keys in the order of insertion.
using Json = nlohmann::ordered_json;

/// A bench program whose flags fill an `Options`.
template <class Options>
struct BenchProgram {
  const char* name;
  const char* purpose;  ///< one sentence for --help
  const char* details;  ///< the rest of --help
  void (*add_options)(CommandLine&, Options&);
  void (*complete)(
      Options&);  ///< computes values that depend on several flags; Errc::config if they are invalid
  /// Measures, prints the table and returns the content of --json except for the name of the program; null on
  /// ranks that do not report.
  Json (*run)(const Options&);
};

/// The part of bench_main() that does not depend on the type of the options.
int run_bench_program(const char* name, const char* purpose, const char* details, int argc,
                      const char* const* argv, const std::function<void(CommandLine&)>& add_options,
                      const std::function<void()>& complete, const std::function<Json()>& run);

/// Parses the command line, including --json, runs the program and writes its JSON; if the run fails, this
/// has the error in the list `errors`. Returns the exit status: 0, 2 for a wrong command line, 1 for any
/// other error.
template <class Options>
int bench_main(const BenchProgram<Options>& program, int argc, const char* const* argv) {
  Options options;
  return run_bench_program(
      program.name, program.purpose, program.details, argc, argv,
      [&](CommandLine& line) { program.add_options(line, options); }, [&] { program.complete(options); },
      [&] { return program.run(options); });
}

}  // namespace rz::bench
