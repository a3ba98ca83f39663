#pragma once
/// The main function of a bench program other than the _perf programs.

#include <functional>
#include <string>

#include "bench/support/json.h"
#include "tools/command_line/command_line.h"

namespace rz::bench {

/// A bench program whose flags fill an `Options`.
template <class Options>
struct BenchProgram {
  const char* name;
  const char* purpose;  ///< one sentence, for --help
  const char* details;  ///< the rest of --help
  void (*add_options)(CommandLine&, Options&);
  void (*complete)(Options&);  ///< computes what depends on several flags; Errc::config if they are wrong
  /// Measures, prints the table and returns what --json writes besides the program's name; null on ranks that
  /// do not report.
  Json (*run)(const Options&);
};

/// bench_main() less what depends on the type of the options.
int run_bench_program(const char* name, const char* purpose, const char* details, int argc,
                      const char* const* argv, const std::function<void(CommandLine&)>& add_options,
                      const std::function<Json()>& run);

/// Parses the command line, to which --json is added, runs the program and writes its JSON. Returns the exit
/// status: 0, 2 for a wrong command line, 1 for any other error.
template <class Options>
int bench_main(const BenchProgram<Options>& program, int argc, const char* const* argv) {
  Options options;
  return run_bench_program(
      program.name, program.purpose, program.details, argc, argv,
      [&](CommandLine& line) { program.add_options(line, options); },
      [&] {
        program.complete(options);
        return program.run(options);
      });
}

}  // namespace rz::bench
