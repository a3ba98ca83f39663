#pragma once
/// The switches of the mutants (run.py): RZ_MUTANT in the environment is the number of the one that is on.
/// The file RZ_MUTANT_REACHED gets the numbers of those that a process comes by.

#ifdef __cplusplus
#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>

[[gnu::noinline]] inline bool rz_mutant(int number) {
  static const int on = [] {
    const char* const text = std::getenv("RZ_MUTANT");
    return text ? std::atoi(text) : 0;
  }();
  static const char* const file = std::getenv("RZ_MUTANT_REACHED");
  static std::atomic<bool> reached[1000];
  if (file && !reached[number].exchange(true)) {
    char line[16];
    const int n = std::snprintf(line, sizeof line, "%d\n", number);
    const int out = ::open(file, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (out < 0 || ::write(out, line, static_cast<std::size_t>(n)) != n) std::abort();
    ::close(out);
  }
  return on == number;
}
#endif
