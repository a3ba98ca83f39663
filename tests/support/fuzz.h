#pragma once
/// Random inputs of a parser, the same in each run. RZ_FUZZ_SECONDS=N: for N seconds, with what was tried on
/// standard output. RZ_FUZZ_SEED=S: other inputs.

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <random>
#include <string>

namespace rz::test {

class Fuzz {
 public:
  /// `min_turns`: those without RZ_FUZZ_SECONDS.
  explicit Fuzz(long min_turns) : min_turns_(min_turns) {
    if (const char* const seed = std::getenv("RZ_FUZZ_SEED"))
      random.seed(static_cast<unsigned>(std::atoi(seed)));
    if (const char* const time = std::getenv("RZ_FUZZ_SECONDS")) seconds_ = std::atoi(time);
    end_ = std::chrono::steady_clock::now() + std::chrono::seconds(seconds_);
  }
  ~Fuzz() {
    if (seconds_) std::printf("%ld inputs in %d s\n", tried_, seconds_);
  }
  Fuzz(const Fuzz&) = delete;

  /// For the head of a loop: whether there is one more turn.
  bool next() {
    if (tried_ >= min_turns_ && std::chrono::steady_clock::now() >= end_) return false;
    ++tried_;
    return true;
  }
  long tried() const { return tried_; }

  /// Changes up to `max` bytes of a part of the text.
  std::string changed(std::string text, unsigned max = 4, std::size_t from = 0,
                      std::size_t size = std::numeric_limits<std::size_t>::max()) {
    size = std::min(size, text.size() - from);
    for (auto n = random() % (max + 1); n > 0; --n)
      text[from + random() % size] = static_cast<char>(random());
    return text;
  }

  std::mt19937 random{7};

 private:
  long min_turns_, tried_ = 0;
  int seconds_ = 0;
  std::chrono::steady_clock::time_point end_;
};

}  // namespace rz::test
