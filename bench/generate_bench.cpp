// Times the tokens that a language model of random weights generates with a cache, in turn with a read of its
// weights from memory:
//
//   generate_bench MODEL DTYPE THREADS TEXTS TOKENS ROUNDS
//
// MODEL: llama (135M parameters, SmolLM's shape) or gpt2 (124M). TEXTS are continued at once, from 16 tokens
// each, by TOKENS tokens. A time is that of a pass, which computes a token for each text. Prints the medians
// over all passes of all rounds, and their ratio: of the time of the processor with one thread, of the wall
// otherwise.

#include <time.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "autograd_lite/models/generate.h"
#include "autograd_lite/models/gpt2.h"
#include "autograd_lite/models/llama.h"
#include "autograd_lite/nn/init.h"
#include "comm/core/error.h"

namespace {

using namespace rz;

/// Processor time with one thread, which other programs disturb less; otherwise wall time.
double milliseconds(const Stream& stream) {
  timespec t{};
  clock_gettime(stream.threads() == 1 ? CLOCK_PROCESS_CPUTIME_ID : CLOCK_MONOTONIC, &t);
  return static_cast<double>(t.tv_sec) * 1e3 + static_cast<double>(t.tv_nsec) * 1e-6;
}

double median(std::vector<double> v) {
  std::nth_element(v.begin(), v.begin() + static_cast<std::ptrdiff_t>(v.size() / 2), v.end());
  return v[v.size() / 2];
}

std::unique_ptr<LanguageModel> make(const std::string& name) {
  if (name == "gpt2") return std::make_unique<Gpt2>(Gpt2Config{});
  require(name == "llama", Errc::invalid_argument, "the model is \"", name, "\", expected llama or gpt2");
  return std::make_unique<Llama>(LlamaConfig{.vocab_size = 49152,
                                             .hidden_size = 576,
                                             .intermediate_size = 1536,
                                             .num_hidden_layers = 30,
                                             .num_attention_heads = 9,
                                             .num_key_value_heads = 3,
                                             .head_dim = 64,
                                             .tie_word_embeddings = true});
}

/// A sum of words, for which several cache lines are on their way.
std::uint64_t sum_of(const std::uint64_t* words, std::size_t n) {
  constexpr std::size_t line = 8, ahead = 512;
  std::uint64_t sums[line] = {};
  std::size_t i = 0;
  for (; i + line <= n; i += line) {
    __builtin_prefetch(words + i + ahead);
    for (std::size_t j = 0; j < line; ++j) sums[j] += words[i + j];
  }
  for (; i < n; ++i) sums[0] += words[i];
  std::uint64_t total = 0;
  for (const std::uint64_t s : sums) total += s;
  return total;
}

/// Reads all weights once. The sum keeps the compiler from leaving the reads out.
std::uint64_t read(LanguageModel& model, const Stream& stream) {
  std::atomic<std::uint64_t> total{0};
  for (const Parameter* p : model.parameters()) {
    const auto* const words = reinterpret_cast<const std::uint64_t*>(p->value.raw());
    stream.parallel_for(
        p->value.bytes() / sizeof(std::uint64_t), 4096,
        [&](std::size_t begin, std::size_t end) { total += sum_of(words + begin, end - begin); });
  }
  return total;
}

void run(int argc, char** argv) {
  require(argc == 7, Errc::invalid_argument, "expected MODEL DTYPE THREADS TEXTS TOKENS ROUNDS");
  const std::unique_ptr<LanguageModel> model = make(argv[1]);
  const DType dtype = dtype_from_name(argv[2]);
  const auto number = [&](int i) { return std::strtoul(argv[i], nullptr, 10); };
  const Stream stream = Stream::host(static_cast<int>(number(3)));
  allocate_parameters(*model);
  init_parameters(*model, 1, stream);
  std::size_t bytes = 0;
  for (Parameter* p : model->parameters()) {
    const Tensor value = Tensor::empty(p->shape, dtype);
    ops::copy(value, p->value, stream);
    p->value = value;
    bytes += value.bytes();
  }
  std::vector<std::vector<std::int32_t>> prompts(number(4));
  for (std::size_t b = 0; b < prompts.size(); ++b)
    for (std::size_t t = 0; t < 16; ++t)
      prompts[b].push_back(static_cast<std::int32_t>((b * 977 + t * 331) % 40000));
  Tape tape(stream);
  std::vector<double> tokens, reads;
  std::uint64_t sum = 0;
  for (std::size_t round = 0; round < number(6); ++round) {
    double before = 0;
    std::size_t made = 0;
    GenerationConfig config{.max_new_tokens = number(5), .temperature = 0};
    config.on_token = [&](std::size_t text, std::int32_t) {
      if (text != 0) return;
      const double now = milliseconds(stream);
      if (made++ > 1) tokens.push_back(now - before);
      before = now;
    };
    generate(*model, tape, prompts, config);
    for (int i = 0; i < 5; ++i) {
      const double begin = milliseconds(stream);
      sum += read(*model, stream);
      reads.push_back(milliseconds(stream) - begin);
    }
  }
  const double token = median(tokens), once = median(reads);
  const double best = *std::ranges::min_element(tokens), best_read = *std::ranges::min_element(reads);
  std::printf(
      "%s %s, %s threads, %zu texts: %.2f ms a pass, weights read in %.2f ms (%.1f GB/s): %.2f; fastest "
      "%.2f, %.2f: %.2f%s\n",
      argv[1], argv[2], argv[3], prompts.size(), token, once, static_cast<double>(bytes) / once / 1e6,
      token / once, best, best_read, best / best_read, sum == 1 ? " " : "");
}

}  // namespace

int main(int argc, char** argv) try { run(argc, argv); } catch (const std::exception& e) {
  std::fprintf(stderr, "generate_bench: %s\n", rz::one_line(e).c_str());
  return 1;
}
