#pragma once
/// The main function of the _perf programs.

namespace rz::bench {

/// Runs the program of `collective`, a name of the table, and returns the exit status.
int perf_main(const char* collective, int argc, char** argv);

}  // namespace rz::bench
