// Times passes of a language model of random weights whose layers all ranks share:
//
//   rzrun -n RANKS tensor_parallel_bench MODEL BATCH TOKENS ROUNDS THREADS [sequence]
//
// MODEL: small (GPT-2 of 14M parameters), gpt2 (124M) or llama (135M: SmolLM's shape with 10 heads and 2 key
// heads, which are as many parameters as its 9 and 3, and which 2 ranks divide); THREADS of each rank;
// "sequence": with sequence parallelism. Prints medians in milliseconds: of forward and backward; of an
// all_reduce of the activations between blocks, of which each block has four; of a token that continues BATCH
// texts with a cache; and of what a token exchanges: an all_reduce of its activations for the table and two
// for each block, and a gather of its logits. One rank with 2 threads beside 2 ranks with one is the
// comparison.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "autograd_lite/models/generate.h"
#include "autograd_lite/models/gpt2.h"
#include "autograd_lite/models/llama.h"
#include "autograd_lite/nn/init.h"
#include "comm/core/error.h"
#include "comm/core/integer_math.h"
#include "comm/core/text.h"
#include "sharding/parallel/parallelize.h"
#include "sharding/parallel/world.h"

namespace {

using namespace rz;

std::unique_ptr<LanguageModel> make(const std::string& name) {
  if (name == "gpt2") return std::make_unique<Gpt2>(Gpt2Config{});
  if (name == "small") {
    Gpt2Config c;
    c.n_layer = 6, c.n_head = 6, c.n_embd = 384, c.n_positions = 512, c.vocab_size = 8192;
    return std::make_unique<Gpt2>(c);
  }
  require(name == "llama", Errc::config, "the model is \"", name, "\", expected small, gpt2 or llama");
  return std::make_unique<Llama>(LlamaConfig{.vocab_size = 49152,
                                             .hidden_size = 576,
                                             .intermediate_size = 1536,
                                             .num_hidden_layers = 30,
                                             .num_attention_heads = 10,
                                             .num_key_value_heads = 2,
                                             .head_dim = 64,
                                             .tie_word_embeddings = true});
}

/// Median of the milliseconds of `rounds` calls, after two more; all ranks begin together.
double median_of(World& world, int rounds, const std::function<void()>& f) {
  std::vector<double> times;
  for (int i = -2; i < rounds; ++i) {
    world.communicator().barrier().wait();
    const auto begin = std::chrono::steady_clock::now();
    f();
    const std::chrono::duration<double, std::milli> time = std::chrono::steady_clock::now() - begin;
    if (i >= 0) times.push_back(time.count());
  }
  std::ranges::nth_element(times, times.begin() + rounds / 2);
  return times[static_cast<std::size_t>(rounds / 2)];
}

void run(World& world, int argc, char** argv) {
  require(argc == 6 || argc == 7, Errc::config, "expected MODEL BATCH TOKENS ROUNDS THREADS [sequence]");
  const auto number = [&](int i) { return std::strtoul(argv[i], nullptr, 10); };
  const std::size_t batch = number(2), tokens = number(3);
  const int rounds = static_cast<int>(number(4));
  const Stream stream = Stream::host(static_cast<int>(number(5)));
  const std::unique_ptr<LanguageModel> model = make(argv[1]);
  const Mesh mesh(world.communicator(), {.shard = 1, .tp = world.size()});
  world.print(parallelize(*model, model->parallel_plan(), mesh, {.sequence_parallel = argc == 7}));
  allocate_parameters(*model);
  init_parameters(*model, 1, stream);
  const ModelFacts facts = model->facts();
  const Tensor in = Tensor::empty({batch, tokens}, DType::i32), out = Tensor::empty(in.shape(), DType::i32);
  for (std::size_t i = 0; i < in.count(); ++i) {
    in.data<std::int32_t>()[i] = static_cast<std::int32_t>(i * 7919 % facts.vocabulary);
    out.data<std::int32_t>()[i] = static_cast<std::int32_t>((i + 1) * 7919 % facts.vocabulary);
  }
  Tape tape(stream);
  const double pass = median_of(world, rounds, [&] {
    const Var loss = model->forward(tape, in, out).loss.sum;
    tape.backward(loss, 1.0f / static_cast<float>(in.count()));
    tape.reset();
    for (Parameter* p : model->parameters()) p->grad_is_fresh = true;
  });
  const Tensor activations = Tensor::zeros({batch, tokens, facts.channels});
  const double sum =
      median_of(world, rounds, [&] { world.communicator().all_reduce(activations.buffer()).wait(); });
  const std::vector<std::vector<std::int32_t>> prompts(batch, {1, 2, 3, 4});
  constexpr std::size_t made = 32;
  const double text = median_of(world, std::min(rounds, 3), [&] {
    generate(*model, tape, prompts, {.max_new_tokens = made, .temperature = 0});
  });
  const Tensor of_token = Tensor::zeros({batch, facts.channels});
  const Tensor logits =
      Tensor::zeros({batch, ceil_div(facts.vocabulary, static_cast<std::size_t>(world.size()))});
  const Tensor all_logits =
      Tensor::zeros({static_cast<std::size_t>(world.size()) * batch, logits.shape()[1]});
  const double exchanged = median_of(world, 10 * rounds, [&] {
    for (std::size_t i = 0; i < 2 * facts.layers + 1; ++i)
      world.communicator().all_reduce(of_token.buffer()).wait();
    world.communicator().all_gather(logits.buffer(), all_logits.buffer()).wait();
  });
  world.print("forward and backward ", fixed(pass, 2), " ms, a sum of activations ", fixed(sum, 3),
              " ms, a token ", fixed(text / made, 3), " ms, of which exchanges ", fixed(exchanged, 3), " ms");
}

}  // namespace

int main(int argc, char** argv) {
  return rz::run_entrypoint([&](World& world) { run(world, argc, argv); });
}
