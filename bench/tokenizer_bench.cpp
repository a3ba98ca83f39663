// Times Tokenizer::encode() on one thread, on request (bench/tokenizer.py). Reads lines "FOLDER<tab>FILE"
// from standard input, and answers each with a line of JSON: the number of tokens, and the seconds of the
// processor.

#include <time.h>

#include <cstdio>
#include <iostream>
#include <string>

#include "comm/core/error.h"
#include "sharding/io/json.h"
#include "sharding/tokenizer/tokenizer.h"

namespace {

double seconds_of_processor() {
  timespec now;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

}  // namespace

int main() try {
  for (std::string line; std::getline(std::cin, line);) {
    const std::size_t tab = line.find('\t');
    rz::require(tab != line.npos, rz::Errc::config, "expected FOLDER<tab>FILE, found ", line);
    const rz::Tokenizer tokenizer = rz::Tokenizer::from_pretrained(line.substr(0, tab));
    const std::string text = rz::read_text_file(line.substr(tab + 1), std::size_t{1} << 30);
    const double begin = seconds_of_processor();
    const std::size_t tokens = tokenizer.encode(text, false).size();
    std::printf("{\"tokens\": %zu, \"seconds\": %.6f}\n", tokens, seconds_of_processor() - begin);
    std::fflush(stdout);
  }
} catch (const std::exception& e) {
  std::fprintf(stderr, "tokenizer_bench: %s\n", rz::one_line(e).c_str());
  return 1;
}
