// Models whose layers several ranks share, against one rank: values, loss, gradients, dropout, generation.

#include "sharding/parallel/parallelize.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "autograd_lite/models/generate.h"
#include "autograd_lite/models/gpt2.h"
#include "autograd_lite/models/gpt_neox.h"
#include "autograd_lite/models/llama.h"
#include "autograd_lite/models/lora.h"
#include "autograd_lite/nn/init.h"
#include "comm/core/integer_math.h"
#include "sharding/huggingface/families.h"
#include "sharding/huggingface/pretrained_weights.h"
#include "sharding/io/json.h"
#include "sharding/optim/optimizers.h"
#include "sharding/strategy/strategy.h"
#include "tests/lab/group.h"
#include "tests/support/error_of.h"
#include "tests/support/reference_gpt2.h"

namespace rz {
namespace {

using enum ParallelStyle;

constexpr std::size_t batch = 2, length = 12, vocab = 51;  // 51 = 26 + 25 = 17 · 3 = 13 · 3 + 12

using Maker = std::function<std::unique_ptr<LanguageModel>()>;

/// Twelve heads: 2, 3 and 4 ranks divide them. The rates are those of all dropouts.
Maker gpt2(bool tied, double dropout = 0) {
  return [=] {
    Gpt2Config c;
    c.n_layer = 2, c.n_head = 12, c.n_embd = 48, c.n_positions = 16, c.vocab_size = vocab;
    c.tie_word_embeddings = tied;
    c.embd_pdrop = c.attn_pdrop = c.resid_pdrop = dropout;
    return std::make_unique<Gpt2>(c);
  };
}

/// A group of query heads for each key head; with biases, and norms of heads, as the families have them.
Maker llama(std::size_t kv_heads, bool tied, double dropout = 0, bool variants = false,
            std::size_t width = 60) {
  return [=] {
    LlamaConfig c;
    c.vocab_size = vocab, c.hidden_size = 40, c.intermediate_size = width, c.num_hidden_layers = 2;
    c.num_attention_heads = 12, c.num_key_value_heads = kv_heads, c.head_dim = 4;
    c.max_position_embeddings = 16, c.tie_word_embeddings = tied, c.attention_dropout = dropout;
    c.qkv_bias = c.o_bias = c.mlp_bias = c.qk_norm = variants;
    return std::make_unique<Llama>(c);
  };
}

Maker gpt_neox(bool parallel_residual, double dropout = 0, std::size_t width = 60) {
  return [=] {
    GptNeoxConfig c;
    c.vocab_size = vocab, c.hidden_size = 96, c.intermediate_size = width, c.num_hidden_layers = 2;
    c.num_attention_heads = 12, c.max_position_embeddings = 16, c.use_parallel_residual = parallel_residual;
    c.attention_dropout = c.hidden_dropout = dropout;
    return std::make_unique<GptNeox>(c);
  };
}

/// 61 = 31 + 30 = 21 + 21 + 19 = 16 · 3 + 13
constexpr std::size_t uneven = 61;

struct Division {
  Maker make;
  bool sequence = false, recompute = false, lora = false;
  bool next_tokens = false;  ///< the targets are the tokens one further on, of samples()
  double lora_dropout = 0;
  std::string transport = "auto";
};

/// Of one rank: whole gradients of what it has.
struct Outcome {
  float loss = 0;
  double terms = 0;
  std::map<std::string, std::vector<float>> gradients, values;
  std::map<std::string, bool> is_part;
};

void set_up(LanguageModel& model, const Division& run, const Mesh& mesh) {
  if (run.lora) add_lora(model, {.target_modules = "all-linear", .r = 3, .lora_dropout = run.lora_dropout});
  for (Parameter* p : model.parameters())  // a bias that is added twice, or on one rank, is then seen
    if (p->initial.kind == Initial::constant && p->initial.scale == 0) p->initial = {Initial::normal, 0.1f};
  model.checkpoint_activations(run.recompute);
  parallelize(model, model.parallel_plan(), mesh, {.sequence_parallel = run.sequence});
  allocate_parameters(model);
  init_parameters(model, 7);
}

Tensor tokens_of(std::size_t stride, std::size_t shift, bool ignore = false) {
  const Tensor t = Tensor::empty({batch, length}, DType::i32);
  for (std::size_t i = 0; i < t.count(); ++i)
    t.data<std::int32_t>()[i] =
        ignore && i % 7 == 3 ? -100 : static_cast<std::int32_t>((i * stride + shift) % vocab);
  return t;
}

std::vector<float> whole_of(const Parameter& p, const Tensor& t) {
  std::vector<float> whole(p.global_shape().count(), 0.0f);
  p.box().for_each_run(0, p.count(), [&](std::uint64_t element, std::uint64_t index, std::uint64_t n) {
    std::copy_n(t.data<float>() + element, n, whole.begin() + static_cast<std::ptrdiff_t>(index));
  });
  return whole;
}

std::vector<std::vector<int>> samples() {
  std::vector<std::vector<int>> all(batch);
  for (std::size_t b = 0; b < batch; ++b)
    for (std::size_t t = 0; t <= length; ++t)
      all[b].push_back(static_cast<int>((b * 17 + t * 5 + t * t) % vocab));
  return all;
}

Tensor tokens_of(const std::vector<std::vector<int>>& samples, std::size_t first) {
  const Tensor t = Tensor::empty({batch, length}, DType::i32);
  for (std::size_t i = 0; i < t.count(); ++i)
    t.data<std::int32_t>()[i] = samples[i / length][first + i % length];
  return t;
}

Outcome train(LanguageModel& model, const Division& run) {
  Tape tape;
  tape.seed(99);
  const auto out = run.next_tokens ? model.forward(tape, tokens_of(samples(), 0), tokens_of(samples(), 1))
                                   : model.forward(tape, tokens_of(5, 1), tokens_of(7, 2, true));
  Outcome o;
  o.loss = *tape.value(out.loss.sum).data<float>();
  o.terms = static_cast<double>(out.loss.read(tape.stream()).count);
  tape.backward(out.loss.sum, 1.0f / static_cast<float>(o.terms));
  for (const Parameter* p : model.parameters()) {
    o.is_part[p->name] = p->part.has_value();
    o.values[p->name] = whole_of(*p, p->value);
    if (p->requires_grad) o.gradients[p->name] = whole_of(*p, p->grad);
  }
  return o;
}

std::vector<Outcome> outcomes(int ranks, const Division& run) {
  std::vector<Outcome> all(static_cast<std::size_t>(ranks));
  lab::group(ranks, {.transport = run.transport}, [&](Communicator& comm) {
    const Mesh mesh(comm, {.shard = 1, .tp = ranks});
    if (ranks > 1) {
      EXPECT_EQ(mesh.layers().overlaps, run.transport == "tcp");
    }
    const auto model = run.make();
    set_up(*model, run, mesh);
    all[static_cast<std::size_t>(comm.rank())] = train(*model, run);
  });
  return all;
}

double norm(const std::vector<float>& x) {
  double sum = 0;
  for (const double v : x) sum += v * v;
  return std::sqrt(sum);
}

/// The parts of all ranks; unsplit ones must have the same bits on all.
std::vector<float> joined(const std::vector<Outcome>& all, const std::string& name,
                          std::map<std::string, std::vector<float>> Outcome::*of) {
  std::vector<float> whole = (all[0].*of).at(name);
  for (std::size_t r = 1; r < all.size(); ++r) {
    const std::vector<float>& part = (all[r].*of).at(name);
    if (!all[0].is_part.at(name)) {
      EXPECT_EQ(part, whole) << name << " of rank " << r;
      continue;
    }
    for (std::size_t i = 0; i < whole.size(); ++i) whole[i] += part[i];  // where another has it, it is 0
  }
  return whole;
}

/// A value is the end of at most 20 products with sums and roundings in between, each of which adds a
/// relative error, of the whole tensor, of about `ranks` roundings: partial sums are added in another order.
/// 8: the products before it multiply the error, by the condition of norms and softmax. A gradient that is 0
/// in exact arithmetic, such as that of the bias of keys, has rounding of the others' size.
void expect_as_one_rank(const std::vector<Outcome>& all, const Outcome& one) {
  const double bound = 8.0 * 20 * static_cast<double>(all.size()) * 0x1p-24;
  double total = 0;
  for (const auto& [name, gradient] : one.gradients) total += norm(gradient) * norm(gradient);
  for (const Outcome& o : all) {
    EXPECT_EQ(o.loss, all[0].loss) << "the same bits on all ranks";
    EXPECT_EQ(o.terms, one.terms);
  }
  EXPECT_NEAR(all[0].loss, one.loss, bound * std::abs(one.loss));
  for (const auto& [name, value] : one.values) EXPECT_EQ(joined(all, name, &Outcome::values), value) << name;
  for (const auto& [name, gradient] : one.gradients) {
    std::vector<float> error = joined(all, name, &Outcome::gradients);
    for (std::size_t i = 0; i < error.size(); ++i) error[i] -= gradient[i];
    EXPECT_LE(norm(error), bound * std::max(norm(gradient), 0.01 * std::sqrt(total))) << name;
  }
}

void expect_as_one_rank(const Division& run, std::initializer_list<int> ranks) {
  const Outcome one = outcomes(1, {run.make, false, run.recompute, run.lora, false, run.lora_dropout})[0];
  for (const int t : ranks) {
    SCOPED_TRACE(testing::Message() << "tp " << t << (run.sequence ? ", sequence parallel" : ""));
    expect_as_one_rank(outcomes(t, run), one);
  }
}

// ---- families

TEST(TensorParallel, Gpt2IsThatOfOneRank) {
  for (const bool tied : {true, false})
    for (const bool sequence : {false, true}) expect_as_one_rank({gpt2(tied), sequence}, {2, 3, 4});
}

/// Against a GPT-2 in double that shares nothing with the library.
TEST(TensorParallel, Gpt2HasTheGradientsOfDouble) {
  Division run{gpt2(true)};
  run.next_tokens = true;
  Outcome one = outcomes(1, run)[0];
  test::ReferenceParameters values;
  for (const auto& [name, value] : one.values) values[name] = {value.begin(), value.end()};
  test::ReferenceGpt2 reference(
      {.layers = 2, .heads = 12, .channels = 48, .positions = 16, .vocabulary = static_cast<int>(vocab)},
      values);
  one.loss = static_cast<float>(reference.forward_backward(samples()) * one.terms);
  for (auto& [name, gradient] : one.gradients) {
    const std::vector<double>& exact = reference.gradients().at(name);
    gradient.assign(exact.begin(), exact.end());
  }
  for (const bool sequence : {false, true})
    for (const int ranks : {1, 2, 3, 4}) {
      run.sequence = sequence;
      SCOPED_TRACE(ranks);
      expect_as_one_rank(outcomes(ranks, run), one);
    }
}

TEST(TensorParallel, LlamaIsThatOfOneRank) {
  for (const bool sequence : {false, true}) {
    expect_as_one_rank({llama(6, false), sequence}, {2, 3});
    expect_as_one_rank({llama(4, true), sequence}, {4});
    expect_as_one_rank({llama(6, true, 0, true), sequence}, {2, 3});  // biases, norms of heads
  }
}

TEST(TensorParallel, GptNeoxIsThatOfOneRank) {
  for (const bool sequence : {false, true})
    for (const bool parallel_residual : {false, true})
      expect_as_one_rank({gpt_neox(parallel_residual), sequence}, {2, 3});
}

TEST(TensorParallel, WidthsThatRanksDoNotDivideAreThoseOfOneRank) {
  for (const bool sequence : {false, true}) {
    expect_as_one_rank({llama(12, true, 0, true, uneven), sequence}, {2, 3, 4});
    expect_as_one_rank({gpt_neox(true, 0.2, uneven), sequence}, {2, 3, 4});
    expect_as_one_rank({llama(6, false, 0, false, uneven), sequence, true}, {3});  // recomputed
    for (const double dropout : {0.0, 0.3})
      expect_as_one_rank({llama(6, false, 0, true, uneven), sequence, false, true, false, dropout}, {2, 3});
  }
}

/// 5 columns are 2, 2, 1 and none.
TEST(TensorParallel, ARankMayHaveNoColumns) {
  for (const bool sequence : {false, true})
    for (const bool lora : {false, true}) {
      expect_as_one_rank({llama(12, true, 0, true, 5), sequence, lora, lora, false, 0.3}, {4});
      expect_as_one_rank({gpt_neox(false, 0, 5), sequence, false, lora}, {4});
    }
}

TEST(TensorParallel, RecomputedBlocksCommunicateAgain) {
  for (const bool sequence : {false, true}) {
    expect_as_one_rank({gpt2(true, 0.2), sequence, true}, {2});
    expect_as_one_rank({llama(6, false), sequence, true}, {3});
  }
}

TEST(TensorParallel, DropoutHasTheMasksOfOneRank) {
  for (const bool sequence : {false, true}) {
    expect_as_one_rank({gpt2(true, 0.2), sequence}, {2, 3, 4});
    expect_as_one_rank({llama(6, false, 0.3), sequence}, {2});
    expect_as_one_rank({gpt_neox(false, 0.2), sequence}, {3});
  }
}

TEST(TensorParallel, LoraIsThatOfOneRank) {
  for (const bool sequence : {false, true})
    for (const double dropout : {0.0, 0.3}) {
      expect_as_one_rank({gpt2(true), sequence, false, true, false, dropout}, {2, 3});
      expect_as_one_rank({llama(6, false), sequence, false, true, false, dropout}, {2});
    }
}

// ---- parts

/// torch cuts a weight [out, in] of a ColwiseParallel layer by chunk(dim 0), of a RowwiseParallel one by
/// chunk(dim 1), and an embedding's by chunk(dim 0).
TEST(TensorParallel, PartsOfALlamaAreThoseThatTorchCuts) {
  const Division run{llama(6, false)};
  const Outcome one = outcomes(1, run)[0];
  lab::group(2, [&](Communicator& comm) {
    const auto model = run.make();
    set_up(*model, run, Mesh(comm, {.shard = 1, .tp = 2}));
    const auto expect = [&](const std::string& name, Shape shape, bool columns) {
      const Parameter& p = *model->find(name);
      const std::vector<float>& whole = one.values.at(name);
      ASSERT_EQ(p.shape, shape) << name;
      const std::size_t width = columns ? 2 * shape[1] : shape[1];
      const std::size_t first_row = !columns && comm.rank() ? ceil_div(p.global_shape()[0], 2) : 0;
      for (std::size_t r = 0; r < shape[0]; ++r)
        for (std::size_t c = 0; c < shape[1]; ++c) {
          const std::size_t column = c + (columns && comm.rank() ? shape[1] : 0);
          ASSERT_EQ(p.value.data<float>()[r * shape[1] + c], whole[(first_row + r) * width + column]) << name;
        }
    };
    expect("model.layers.1.self_attn.q_proj.weight", {24, 40}, false);
    expect("model.layers.1.self_attn.k_proj.weight", {12, 40}, false);
    expect("model.layers.1.self_attn.v_proj.weight", {12, 40}, false);
    expect("model.layers.1.self_attn.o_proj.weight", {40, 24}, true);
    expect("model.layers.1.mlp.gate_proj.weight", {30, 40}, false);
    expect("model.layers.1.mlp.down_proj.weight", {40, 30}, true);
    expect("model.embed_tokens.weight", {comm.rank() ? 25u : 26u, 40}, false);
    expect("lm_head.weight", {comm.rank() ? 25u : 26u, 40}, false);
    EXPECT_FALSE(model->find("model.norm.weight")->part);
  });
}

/// Each rank has the columns of its heads of q, of k and of v.
TEST(TensorParallel, FusedProjectionsAreCutInBlocks) {
  lab::group(2, [&](Communicator& comm) {
    const auto model = gpt2(true)();
    const std::string line = parallelize(*model, model->parallel_plan(), Mesh(comm, {.shard = 1, .tp = 2}));
    const Parameter& p = *model->find("transformer.h.0.attn.c_attn.weight");
    EXPECT_EQ(p.shape, Shape({48, 72}));
    EXPECT_EQ(p.global_shape(), Shape({48, 144}));
    EXPECT_EQ(p.box().index(0), comm.rank() ? 24u : 0u);
    EXPECT_EQ(p.box().index(24), 48u + (comm.rank() ? 24u : 0u)) << "the first column of k";
    EXPECT_TRUE(
        line.starts_with("tp 2: transformer.wte (vocabulary), transformer.h.*.attn.c_attn (column, 2 "
                         "layers), "))
        << line;
    EXPECT_NE(line.find("on this rank"), line.npos);
  });
}

// ---- logits and generation

/// With a loss of the user's own, the gradient of the head is that of one rank.
TEST(TensorParallel, LogitsWithoutTargetsAreWhole) {
  struct Result {
    std::vector<float> logits, gradient;
  };
  const auto run = [](int ranks, bool sequence) {
    Result result;
    std::mutex mutex;
    lab::group(ranks, [&](Communicator& comm) {
      const auto model = gpt2(false)();
      set_up(*model, {.make = {}, .sequence = sequence}, Mesh(comm, {.shard = 1, .tp = ranks}));
      Tape tape;
      const Var out = model->forward(tape, tokens_of(5, 1)).logits;
      const Tensor t = tape.value(out);
      ASSERT_EQ(t.shape(), Shape({batch, length, vocab}));
      tape.backward(nn::mean(tape, nn::mul(tape, out, out)));
      const Parameter& head = *model->find("lm_head.weight");
      const std::vector<float> part = whole_of(head, head.grad);
      const std::lock_guard lock(mutex);
      result.logits.assign(t.data<float>(), t.data<float>() + t.count());
      result.gradient.resize(part.size());
      for (std::size_t i = 0; i < part.size(); ++i) result.gradient[i] += part[i];
    });
    return result;
  };
  const Result one = run(1, false);
  for (const bool sequence : {false, true}) {
    const Result three = run(3, sequence);
    ASSERT_EQ(three.logits.size(), one.logits.size());
    for (std::size_t i = 0; i < one.logits.size(); ++i)
      ASSERT_NEAR(three.logits[i], one.logits[i], 2e-5) << i;
    for (std::size_t i = 0; i < one.gradient.size(); ++i)
      ASSERT_NEAR(three.gradient[i], one.gradient[i], 1e-6) << i;
  }
}

/// The likeliest tokens, and those that a seed draws of all or of some, with 51 rows of the vocabulary.
TEST(TensorParallel, GenerationHasTheTokensOfOneRank) {
  const std::vector<std::vector<std::int32_t>> prompts{{3, 1, 4}, {5}};
  const std::vector<GenerationConfig> ways{{.max_new_tokens = 7, .temperature = 0},
                                           {.max_new_tokens = 7, .temperature = 1.5, .seed = 3},
                                           {.max_new_tokens = 7, .top_k = 20, .top_p = 0.9, .seed = 4}};
  using Texts = std::vector<std::vector<std::int32_t>>;
  for (const Maker& make : {gpt2(true), llama(6, false, 0, false, uneven), gpt_neox(true, 0, uneven)})
    for (const bool sequence : {false, true}) {
      std::vector<std::vector<Texts>> made;  // by run and rank, one for each way
      for (const int ranks : {1, 2, 3})
        for (const bool use_cache : {true, false}) {
          std::mutex mutex;
          lab::group(ranks, [&](Communicator& comm) {
            const auto model = make();
            set_up(*model, {.make = {}, .sequence = sequence}, Mesh(comm, {.shard = 1, .tp = ranks}));
            Tape tape;
            std::vector<Texts> texts;
            for (GenerationConfig way : ways) {
              way.use_cache = use_cache;
              texts.push_back(generate(*model, tape, prompts, way));
            }
            const std::lock_guard lock(mutex);
            made.push_back(texts);
          });
        }
      for (const auto& texts : made) EXPECT_EQ(texts, made[0]);
      EXPECT_NE(made[0][0], made[0][1]);
      EXPECT_NE(made[0][1], made[0][2]);
    }
}

/// As tests/data/llama_tiny/make_tensor_parallel.py has it.
std::uint64_t weighted_bits(const Tensor& t) {
  std::uint64_t sum = 0;
  for (std::size_t i = 0; i < t.count(); ++i)
    sum += (i + 1) * std::bit_cast<std::uint32_t>(t.data<float>()[i]);
  return sum;
}

TEST(TensorParallel, PartsAreThoseOfTorch) {
  const std::string data = RZ_SOURCE_DIR "/tests/data/llama_tiny/tensor_parallel.json";
  const std::string folder = RZ_SOURCE_DIR "/../shared/fixtures/llama_tiny";
  if (!std::filesystem::exists(folder)) GTEST_SKIP() << folder << " is not here";
  const auto parts = nlohmann::json::parse(read_text_file(data)).at("parts");
  lab::group(2, [&](Communicator& comm) {
    const Mesh mesh(comm, {.shard = 1, .tp = 2});
    const auto model = language_model_from_config(folder);
    parallelize(*model, model->parallel_plan(), mesh);
    allocate_parameters(*model);
    load_pretrained(*model, folder);
    std::size_t compared = 0;
    for (const auto& [name, p] : model->named_parameters()) {
      const auto& torch = parts.at(name).at(static_cast<std::size_t>(comm.rank()));
      EXPECT_EQ(nlohmann::json(extents(p->shape)), torch.at("shape")) << name;
      EXPECT_EQ(nlohmann::json(weighted_bits(p->value)), torch.at("bits")) << name;
      ++compared;
    }
    EXPECT_EQ(compared, parts.size());
  });
}

// ---- with ZeRO on the other dimension

/// Values of a rank after two updates by the gradients of two data ranks, each with a batch of its own.
std::vector<Outcome> trained(int tp, StrategyKind kind, bool sequence) {
  const int ranks = 2 * tp;
  std::vector<Outcome> all(static_cast<std::size_t>(tp));
  lab::group(ranks, [&](Communicator& comm) {
    const Mesh mesh(comm, {.shard = 2, .tp = tp});
    const auto model = llama(6, true, 0, true, uneven)();
    set_up(*model, {.make = {}, .sequence = sequence, .lora = false}, mesh);
    const auto strategy = make_strategy(kind, *model, mesh.data());
    const auto optimizer = make_sgd({.learning_rate = 0.1});
    Tape tape;
    strategy->attach(tape);
    for (std::size_t update = 0; update < 2; ++update) {
      const std::size_t data = static_cast<std::size_t>(mesh.data().rank());
      const auto out = model->forward(tape, tokens_of(5, data + update), tokens_of(7, data, true));
      strategy->backward(tape, out.loss);
      tape.reset();
      strategy->finish_gradients();
      strategy->step(*optimizer);
    }
    Outcome o;
    for (const Parameter* p : model->parameters()) {
      o.is_part[p->name] = p->part.has_value();
      o.values[p->name] = whole_of(*p, strategy->values().whole(*p));
    }
    if (mesh.data().rank() == 0) all[static_cast<std::size_t>(mesh.part().rank)] = std::move(o);
  });
  return all;
}

/// Whole parameters that are used on a part are read outside of products too: their memory is released.
TEST(TensorParallel, EveryStageOfZeroHasTheSameBits) {
  const Outcome one = trained(1, StrategyKind::ddp, false)[0];
  for (const bool sequence : {false, true}) {
    const std::vector<Outcome> ddp = trained(2, StrategyKind::ddp, sequence);
    for (const StrategyKind kind : {StrategyKind::zero1, StrategyKind::zero2, StrategyKind::zero3}) {
      const std::vector<Outcome> sharded = trained(2, kind, sequence);
      for (std::size_t r = 0; r < ddp.size(); ++r) EXPECT_EQ(sharded[r].values, ddp[r].values);
    }
    for (const auto& [name, value] : one.values) {
      std::vector<float> error = joined(ddp, name, &Outcome::values);
      for (std::size_t i = 0; i < error.size(); ++i) error[i] -= value[i];
      EXPECT_LE(norm(error), 1e-5 * norm(value)) << name;
    }
  }
}

// ---- a module of one's own

/// Of one update of a net with a loss of its own.
template <class Net>
std::vector<Outcome> outcomes_of(const ParallelPlan& plan, int ranks) {
  std::vector<Outcome> all(static_cast<std::size_t>(ranks));
  lab::group(ranks, [&](Communicator& comm) {
    Net net;
    parallelize(net, plan, Mesh(comm, {.shard = 1, .tp = ranks}));
    allocate_parameters(net);
    init_parameters(net, 3);
    Tape tape;
    tape.seed(5);
    const Tensor x = Tensor::empty({batch, length, 10}), y = Tensor::zeros({batch, length, 4});
    for (std::size_t i = 0; i < x.count(); ++i)
      x.data<float>()[i] = static_cast<float>(i * 37 % 101) / 50 - 1;
    const Var loss = nn::mse(tape, net(tape, tape.constant(x)), y);
    Outcome& o = all[static_cast<std::size_t>(comm.rank())];
    o.loss = *tape.value(loss).data<float>();
    tape.backward(loss);
    for (const Parameter* p : net.parameters()) {
      o.is_part[p->name] = p->part.has_value();
      o.values[p->name] = whole_of(*p, p->value), o.gradients[p->name] = whole_of(*p, p->grad);
    }
  });
  return all;
}

struct OwnNet : Module {
  OwnNet() { attention.in_proj_bias.initial = {Initial::normal, 0.5f}; }
  nn::Linear in{*this, "in", 10, 24};
  nn::RmsNorm norm{*this, "norm", 24};
  nn::MultiheadAttention attention{*this, "attention", 24, 6, 0.25};
  nn::Linear up{*this, "up", 24, 18}, down{*this, "down", 18, 24};
  nn::Dropout drop{*this, "drop", 0.25};
  nn::Linear out{*this, "out", 24, 4};

  Var operator()(Tape& tape, Var x) {
    const Var a = norm(tape, in(tape, x));
    const Var b = nn::add(tape, a, attention(tape, a, a, a));
    const Var c = nn::add(tape, b, attention(tape, b, a, a));  // projected one by one
    const Var d = down(tape, drop(tape, nn::relu(tape, up(tape, c))));
    return out(tape, nn::add(tape, c, d));
  }
};

TEST(TensorParallel, AModuleOfOnesOwnIsDividedByATable) {
  const ParallelPlan plan{
      {"attention", column}, {"attention.out_proj", row}, {"up", column}, {"down", row}, {"drop", shared}};
  const Outcome one = outcomes_of<OwnNet>(plan, 1)[0];
  for (const int ranks : {2, 3, 6}) {
    SCOPED_TRACE(ranks);
    const auto all = outcomes_of<OwnNet>(plan, ranks);
    EXPECT_TRUE(all[0].is_part.at("attention.in_proj_weight"));
    expect_as_one_rank(all, one);
  }
}

/// Widths that no number of ranks divides, with biases: of two layers in one, and of weights [in, out].
struct UnevenNet : Module {
  static constexpr std::size_t width = 17;
  nn::Linear in{*this, "in", 10, 24};
  nn::Linear gate_up{*this, "gate_up", 24, 2 * width}, down{*this, "down", width, 24};
  nn::Dropout drop{*this, "drop", 0.25};
  nn::Linear fc{*this, "fc", 24, 13, ops::WeightLayout::in_out};
  nn::Linear proj{*this, "proj", 13, 24, ops::WeightLayout::in_out};
  nn::Dropout drop_all{*this, "drop_all", 0.25};
  nn::Linear out{*this, "out", 24, 4};

  Var operator()(Tape& tape, Var x) {
    const Var a = in(tape, x), both = gate_up(tape, a);
    const std::size_t own = tape.value(both).shape()[-1] / 2;
    const std::vector<Var> halves = nn::split(tape, both, {own, own}, -1);
    const Var b = nn::add(tape, a, down(tape, drop(tape, nn::swiglu(tape, halves[0], halves[1]))));
    const Var c = nn::add(tape, b, proj(tape, fc.gelu(tape, b)));
    return out(tape, drop_all(tape, c));  // whose masks come after those of parts
  }
};

ParallelPlan uneven_plan(std::size_t columns) {
  return {{"gate_up", column, 2},
          {"{down,proj}", row},
          {"fc", column},
          {.pattern = "drop", .style = shared, .columns = columns}};
}

TEST(TensorParallel, ColumnsOfAModuleOfOnesOwnNeedNotDivide) {
  const ParallelPlan plan = uneven_plan(UnevenNet::width);
  const Outcome one = outcomes_of<UnevenNet>(plan, 1)[0];
  for (const int ranks : {2, 3, 4, 6}) {  // the last of six has no columns of fc
    SCOPED_TRACE(ranks);
    const auto all = outcomes_of<UnevenNet>(plan, ranks);
    EXPECT_TRUE(all[0].is_part.at("gate_up.bias"));
    expect_as_one_rank(all, one);
  }
}

TEST(ParallelizeErrors, ColumnsOfADropoutAreThoseOfItsInput) {
  lab::group(2, [](Communicator& comm) {
    UnevenNet net;
    parallelize(net, uneven_plan(20), Mesh(comm, {.shard = 1, .tp = 2}));
    allocate_parameters(net);
    Tape tape;
    const Error e = test::error_of([&] { net(tape, tape.constant(Tensor::zeros({1, 2, 10}))); });
    EXPECT_EQ(e.code(), Errc::invalid_argument);
    EXPECT_EQ(e.what(), concat("drop: its input has ", comm.rank() ? 8 : 9, " columns on rank ", comm.rank(),
                               " of 2, and would have 10 of the 20 that its ParallelRule::columns is; "
                               "correct it"));
  });
}

/// Rows of a column layer and columns of a row layer, by ranks.
TEST(TensorParallel, ColumnsAreCutAsTorchChunks) {
  struct Pair : Module {
    Pair(std::size_t width) : up(*this, "up", 6, width), down(*this, "down", width, 6) {}
    nn::Linear up, down;
  };
  const std::vector<std::pair<std::size_t, std::vector<std::size_t>>> cuts{
      {136, {46, 46, 44}}, {7, {2, 2, 2, 1}}, {8, {2, 2, 2, 2}}, {5, {2, 2, 1, 0}}};
  for (const auto& [width, counts] : cuts) {
    const int ranks = static_cast<int>(counts.size());
    lab::group(ranks, [&, width = width, counts = counts](Communicator& comm) {
      Pair pair(width);
      parallelize(pair, {{"up", column}, {"down", row}}, Mesh(comm, {.shard = 1, .tp = ranks}));
      const std::size_t own = counts[static_cast<std::size_t>(comm.rank())],
                        first = std::min(width, counts[0] * static_cast<std::size_t>(comm.rank()));
      EXPECT_EQ(pair.up.weight.shape, Shape({own, 6}));
      EXPECT_EQ(pair.up.bias.shape, Shape({own}));
      EXPECT_EQ(pair.down.weight.shape, Shape({6, own}));
      if (own == 0) return;
      EXPECT_EQ(pair.up.weight.box().index(0), 6 * first);
      EXPECT_EQ(pair.up.bias.box().index(0), first);
      EXPECT_EQ(pair.down.weight.box().index(own), width + first) << "the first of the second row";
    });
  }
}

// ---- errors

TEST(ParallelizeErrors, HaveTheNamesAndTheNumbers) {
  lab::group(4, [&](Communicator& comm) {
    const Mesh mesh(comm, {.shard = 1, .tp = 4});
    const auto expect = [&](Module& module, const ParallelPlan& plan, Errc code, const std::string& what,
                            const ParallelOptions& options = {}) {
      const Error e = test::error_of([&] { parallelize(module, plan, mesh, options); });
      EXPECT_EQ(e.code(), code);
      EXPECT_EQ(std::string(e.what()).find('\n'), std::string::npos);
      EXPECT_NE(std::string(e.what()).find(what), std::string::npos) << e.what();
      for (const Parameter* p : module.parameters()) EXPECT_FALSE(p->part) << p->name;
    };
    const auto grouped = llama(6, false)();
    expect(*grouped, grouped->parallel_plan(), Errc::config,
           "tp 4 does not divide 6 heads of 4 of model.layers.0.self_attn.k_proj.weight; use a divisor of 6");
    OwnNet net;
    expect(net, {{"drop", shared}, {"up", column}}, Errc::config,
           "drop (shared by \"drop\"): tp 4 does not divide the 18 columns of up.weight, so that ranks drop "
           "different numbers of columns; give the rule the number of all: columns = …");
    expect(net, {{"up", column, 1, 1}}, Errc::config,
           "tp 4 does not divide 18 heads of 1 of up.weight; use a divisor of 18");
    expect(net, {{"upp", column}}, Errc::config,
           "the pattern \"upp\" (column) matches no module; there are in");
    expect(net, {{"{up", column}}, Errc::invalid_argument, "pattern {up");
    expect(net, {{"drop", column}}, Errc::config, "drop (column by \"drop\"): expected an nn::Linear");
    expect(net, {{"norm", row}}, Errc::config, "expected an nn::Linear");
    expect(net, {{"up", vocabulary}}, Errc::config, "expected an nn::Embedding");
    expect(net, {{"in", column, 5}}, Errc::config, "in.weight has 24 of them, which 5 blocks");
    expect(net, {{"{in,out}", replicated}, {"up", replicated}}, Errc::config,
           "sequence_parallel needs a rule for each parameter, and norm.weight has none",
           {.sequence_parallel = true});
    nn::Linear one(net, "one", 4, 1);
    expect(net, {{"one", column}}, Errc::config,
           "tp 4 has one column of one.weight to share; leave its layers whole (replicated)");
    nn::Embedding table(net, "table", 5, 4);
    expect(net, {{"table", vocabulary}}, Errc::config, "tp 4 leaves ranks without any of the 5 rows");
    net.in.weight.value = Tensor::zeros(net.in.weight.shape);
    expect(net, {{"in", column}}, Errc::invalid_argument, "parameter in.weight has memory already");
  });
}

TEST(ParallelizeErrors, LoraComesBefore) {
  lab::group(2, [&](Communicator& comm) {
    const auto model = llama(6, false)();
    parallelize(*model, model->parallel_plan(), Mesh(comm, {.shard = 1, .tp = 2}));
    const Error e = test::error_of([&] { add_lora(*model, {.target_modules = "all-linear"}); });
    EXPECT_NE(std::string(e.what()).find("call add_lora() before parallelize()"), std::string::npos)
        << e.what();
  });
}

/// One rank has no layers to share: the plan is checked, and nothing is set.
TEST(ParallelizeErrors, WithoutTpNothingChanges) {
  auto comm = Communicator::connect(0, 1, memory_store());
  const auto model = gpt2(true)();
  EXPECT_EQ(parallelize(*model, model->parallel_plan(), Mesh(comm)), "");
  for (const Parameter* p : model->parameters()) EXPECT_FALSE(p->part);
  EXPECT_EQ(test::error_of([&] { parallelize(*model, {{"h.9", row}}, Mesh(comm)); }).code(), Errc::config);
}

/// Between hosts layers compute beside the sums.
TEST(TensorParallel, OverlapsHaveTheBitsOfOneNode) {
  for (const Maker& make : {gpt2(true, 0.2), llama(6, false), gpt_neox(false)})
    for (const bool sequence : {false, true})
      for (const bool recompute : {false, true}) {
        Division run{make, sequence, recompute};
        const std::vector<Outcome> one_node = outcomes(2, run);
        run.transport = "tcp";
        const std::vector<Outcome> hosts = outcomes(2, run);
        for (std::size_t r = 0; r < 2; ++r) {
          EXPECT_EQ(hosts[r].loss, one_node[r].loss);
          EXPECT_EQ(hosts[r].gradients, one_node[r].gradients);
        }
      }
}

/// One product for weights, at least, runs beside each sum of the input gradient of column layers.
TEST(TensorParallel, ColumnLayersComputeBesideTheSum) {
  for (const Maker& make : {gpt2(true), llama(6, false), gpt_neox(false)}) {
    const auto model = make();
    allocate_parameters(*model);
    init_parameters(*model, 7);
    std::size_t sums = 0, beside = 0;
    const auto written = [&] {
      return std::ranges::count_if(model->parameters(), [](const Parameter* p) { return !p->grad_is_fresh; });
    };
    const Exchange::Function input = [&](Tape& tape, Var x) {
      const Var out = tape.record(tape.value(x), {x}, [&, x](Tape& t, const Tensor& d) {
        const auto before = written();
        t.run_deferred();
        ++sums, beside += written() > before;
        t.accumulate_grad(x, d);
      });
      tape.mark_overlaps(out);
      return out;
    };
    const auto plan = model->parallel_plan();
    for (Module* m : model->modules())
      if (auto* const layer = dynamic_cast<nn::Linear*>(m))
        for (const ParallelRule& rule : plan)
          if (rule.style == ParallelStyle::column && matches_name(layer->path(), rule.pattern))
            layer->exchange.input = input;
    train(*model, {make});
    EXPECT_GE(sums, 4u) << "two for each of two layers";
    EXPECT_EQ(beside, sums);
  }
}

/// The first rule applies; a later one is for the rest of what it matches.
TEST(Parallelize, TheFirstRuleThatMatchesApplies) {
  lab::group(2, [&](Communicator& comm) {
    const auto model = llama(6, false)();
    parallelize(*model,
                {{"layers.0.mlp.*", replicated}, {"mlp.{gate,up}_proj", column}, {"mlp.down_proj", row}},
                Mesh(comm, {.shard = 1, .tp = 2}));
    EXPECT_FALSE(model->find("model.layers.0.mlp.up_proj.weight")->part);
    EXPECT_TRUE(model->find("model.layers.1.mlp.up_proj.weight")->part);
  });
}

}  // namespace
}  // namespace rz
