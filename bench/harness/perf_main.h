#pragma once
/// Main function of the _perf programs.

namespace rz::bench {

/// Runs the program for `collective`, a name in the table, and returns the exit status.
int perf_main(const char* collective, int argc, char** argv);

}  // namespace rz::bench
