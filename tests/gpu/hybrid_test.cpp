// Runs: ci long operators

// Replicas of shards on devices: the host's course, and the same bits for every stage of a mesh.

#include <memory>

#include "autograd_lite/models/generate.h"
#include "autograd_lite/models/gpt2.h"
#include "autograd_lite/models/llama.h"
#include "autograd_lite/nn/init.h"
#include "autograd_lite/nn/layers.h"
#include "comm/device/cuda_runtime.h"
#include "sharding/optim/optimizers.h"
#include "sharding/parallel/parallelize.h"
#include "sharding/strategy/strategy.h"
#include "tests/gpu/on_card.h"
#include "tests/gpu/on_device.h"
#include "tests/lab/training.h"
#include "tests/support/ranks.h"
#include "tests/support/reference.h"

namespace rz::test {
namespace {

constexpr std::size_t rows = 6;

struct HybridNet final : Module {
  nn::Linear first{*this, "first", 24, 10}, last{*this, "last", 10, 17};
  Var loss(Tape& tape, const Tensor& x, const Tensor& targets) {
    return nn::mse(tape, last(tape, nn::tanh(tape, first(tape, tape.constant(x)))), targets);
  }
};

/// The values after three updates of two passes each, of which both synchronise if `often`.
std::vector<double> train(StrategyKind kind, const Mesh& mesh, bool often = false, int hpz = 1) {
  HybridNet net;
  const auto strategy = make_strategy(
      kind, net, mesh, {.reduce_bucket_size = 200, .first_bucket_size = 100, .zero_hpz_partition_size = hpz});
  Tape tape(Stream::create(mesh.communicator().options().device));
  const Stream& stream = tape.stream();
  strategy->attach(tape);
  strategy->values().fill([](const Parameter& p, Range r, float* out) {
    const Values all = random_values(p.count(), static_cast<unsigned>(p.count()), 0.3);
    for (std::size_t i = 0; i < r.count(); ++i) out[i] = static_cast<float>(all[r.begin + i]);
  });
  const auto adamw = make_adamw({.learning_rate = 0.01});
  for (unsigned update = 0; update < 3; ++update) {
    strategy->zero_grad();
    for (unsigned pass = 0; pass < 2; ++pass) {
      const unsigned seed = static_cast<unsigned>(mesh.data().rank()) + 100 * (2 * update + pass);
      const Tensor x = to_device(random_values(rows * 24, seed), {rows, 24}, DType::f32, stream),
                   targets = to_device(random_values(rows * 17, seed + 50), {rows, 17}, DType::f32, stream);
      const Var loss = net.loss(tape, x, targets);
      strategy->begin_backward(often || pass == 1);
      tape.backward(loss);
      tape.reset();
      if (often || pass == 1) strategy->finish_gradients(stream);
    }
    strategy->clip_and_step(*adamw, {.max_norm = 0.03}, stream);
    EXPECT_FALSE(strategy->outcome(*adamw, stream).skipped);
  }
  const std::vector<float> values = lab::values_of(*strategy, net, stream);
  return {values.begin(), values.end()};
}

class HybridOnDevice : public OnDevice, public testing::WithParamInterface<const char*> {};
INSTANTIATE_TEST_SUITE_P(Backends, HybridOnDevice, testing::Values("peer_cuda", "native"),
                         [](const auto& test) { return std::string(test.param); });

TEST_P(HybridOnDevice, FollowsTheHost) {
  constexpr int ranks = 4;
  run_ranks(ranks, [&](int rank, std::shared_ptr<Store> store) {
    auto on_host = Communicator::connect(rank, ranks, prefix_store(store, "host"));
    auto on_device =
        Communicator::connect(rank, ranks, prefix_store(store, "device"), on_card(rank, GetParam()));
    for (const MeshSizes& sizes : {MeshSizes{2, 2}, MeshSizes{4, 1}}) {
      const Mesh mesh(on_device, sizes);
      for (const bool often : {false, true}) {
        const std::vector<double> expected = train(StrategyKind::ddp, Mesh(on_host, sizes), often);
        const std::vector<double> first = train(StrategyKind::ddp, mesh, often);
        ASSERT_EQ(first.size(), expected.size());
        for (std::size_t i = 0; i < first.size(); ++i) ASSERT_NEAR(first[i], expected[i], 1e-4) << i;
        for (const StrategyKind kind : {StrategyKind::zero1, StrategyKind::zero2, StrategyKind::zero3})
          EXPECT_EQ(train(kind, mesh, often), first) << name(kind) << " on " << describe(sizes);
      }
    }
    EXPECT_EQ(train(StrategyKind::zero3, Mesh(on_device, {2, 2}), false, 2),
              train(StrategyKind::zero3, on_device));
  });
}

// ---- ranks that share layers

/// Two heads, and 11 rows of the vocabulary, which ranks share as 6 and 5.
std::unique_ptr<LanguageModel> small_gpt2() {
  Gpt2Config c;
  c.n_layer = 1, c.n_head = 2, c.n_embd = 8, c.n_positions = 8, c.vocab_size = 11;
  c.embd_pdrop = c.attn_pdrop = c.resid_pdrop = 0.1;
  return std::make_unique<Gpt2>(c);
}
std::unique_ptr<LanguageModel> small_llama() {
  LlamaConfig c;
  c.vocab_size = 11, c.hidden_size = 8, c.intermediate_size = 12, c.num_hidden_layers = 1;
  c.num_attention_heads = 4, c.num_key_value_heads = 2, c.head_dim = 2, c.max_position_embeddings = 8;
  return std::make_unique<Llama>(c);
}
using ModelMaker = std::unique_ptr<LanguageModel> (*)();

/// Losses and norms of two updates, then tokens that continue a prompt.
struct SharedRun {
  std::vector<double> numbers;
  std::vector<std::vector<std::int32_t>> tokens;
};

SharedRun train_shared(ModelMaker make, StrategyKind kind, const Mesh& mesh, bool sequence) {
  const auto model = make();
  parallelize(*model, model->parallel_plan(), mesh, {.sequence_parallel = sequence});
  const auto strategy = make_strategy(kind, *model, mesh);
  strategy->values().fill([](const Parameter& p, Range elements, float* out) {
    init_slice(p, {out, elements.count()}, elements.begin, 1);
  });
  Tape tape(Stream::create(mesh.communicator().options().device));
  const Stream& stream = tape.stream();
  strategy->attach(tape);
  const auto optimizer = make_sgd({.learning_rate = 0.5});
  SharedRun run;
  for (int update = 0; update < 2; ++update) {
    std::vector<std::int32_t> text(16);
    for (int i = 0; i < 16; ++i)
      text[static_cast<std::size_t>(i)] = (i * i + update + mesh.data().rank()) % 11;
    tape.seed(static_cast<std::uint64_t>(7 + update));
    strategy->zero_grad();
    const Tensor tokens = to_device(text, {2, 8}, stream);
    const nn::Loss loss = model->forward(tape, tokens, tokens).loss;
    run.numbers.push_back(loss.read(stream).sum);
    strategy->backward(tape, loss);
    tape.reset();
    strategy->finish_gradients(stream);
    strategy->clip_and_step(*optimizer, {.max_norm = 0.5}, stream);
    run.numbers.push_back(strategy->outcome(*optimizer, stream).norm);
  }
  const std::vector<std::vector<std::int32_t>> prompts{{3, 1, 4}};
  run.tokens = generate(*model, tape, prompts, {.max_new_tokens = 4, .temperature = 0});
  return run;
}

TEST_P(HybridOnDevice, SharesLayersAsOnTheHost) {
  for (const MeshSizes& sizes : {MeshSizes{1, 1, 2}, MeshSizes{1, 2, 2}})
    run_ranks(sizes.ranks(), [&](int rank, std::shared_ptr<Store> store) {
      const int ranks = sizes.ranks();
      auto on_host = Communicator::connect(rank, ranks, prefix_store(store, "host"));
      auto on_device =
          Communicator::connect(rank, ranks, prefix_store(store, "device"), on_card(rank, GetParam()));
      for (const ModelMaker make : {small_gpt2, small_llama})
        for (const StrategyKind kind : {StrategyKind::ddp, StrategyKind::zero3}) {
          const bool sequence = (make == small_gpt2) == (kind == StrategyKind::ddp);
          const SharedRun expected = train_shared(make, kind, Mesh(on_host, sizes), sequence),
                          run = train_shared(make, kind, Mesh(on_device, sizes), sequence);
          for (std::size_t i = 0; i < expected.numbers.size(); ++i)
            EXPECT_NEAR(run.numbers[i], expected.numbers[i], 1e-5 * expected.numbers[i])
                << name(kind) << " on " << describe(sizes);
          EXPECT_EQ(run.tokens, expected.tokens) << name(kind) << " on " << describe(sizes);
        }
    });
}

}  // namespace
}  // namespace rz::test
