#pragma once
/// The switch of the mutants (run.py): RZ_MUTANT in the environment.

#ifdef __cplusplus
#include <cstdlib>

[[gnu::noinline]] inline bool rz_mutant(int number) {
  static const int on = [] {
    const char* const text = std::getenv("RZ_MUTANT");
    return text ? std::atoi(text) : 0;
  }();
  return on == number;
}
#endif
