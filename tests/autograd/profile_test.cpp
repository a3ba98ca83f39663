// Multiply-accumulates of passes, by module, against closed formulas.
#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <string>

#include "autograd_lite/image_ops.h"
#include "autograd_lite/models/gpt2.h"
#include "autograd_lite/models/llama.h"
#include "autograd_lite/models/lora.h"
#include "autograd_lite/nn/image_layers.h"
#include "autograd_lite/nn/init.h"

namespace rz {
namespace {

using Macs = std::uint64_t;

/// Of a part: forward and backward.
using Pair = std::pair<Macs, Macs>;

Pair macs_of(const Tape::Profile& profile, const std::string& part) {
  const auto found = profile.find(part);
  return found == profile.end() ? Pair() : Pair(found->second.forward_macs, found->second.backward_macs);
}

Pair all_macs(const Tape::Profile& profile) {
  Pair sum;
  for (const auto& [part, cost] : profile) sum.first += cost.forward_macs, sum.second += cost.backward_macs;
  return sum;
}

/// Of a pass forward and backward.
Tape::Profile profile_of(Module& model, const std::function<Var(Tape&)>& loss) {
  allocate_parameters(model);
  allocate_buffers(model);
  init_parameters(model, 1);
  Tape tape;
  Tape::Profile profile;
  tape.set_profile(&profile);
  tape.backward(loss(tape));
  return profile;
}

constexpr std::size_t B = 3, T = 7;

Tape::Profile profile_of(LanguageModel& model, const Tensor& document_starts = {}) {
  Tensor tokens = Tensor::zeros({B, T}, DType::i32);
  for (std::size_t i = 0; i < B * T; ++i) tokens.data<std::int32_t>()[i] = static_cast<std::int32_t>(i % 11);
  return profile_of(model,
                    [&](Tape& t) { return model.forward(t, tokens, tokens, document_starts).loss.sum; });
}

constexpr Gpt2Config gpt2{.n_layer = 2, .n_head = 2, .n_embd = 16, .n_positions = 8, .vocab_size = 31};

TEST(Profile, CountsTheProductsOfAGpt2) {
  Gpt2 model(gpt2);
  const Tape::Profile profile = profile_of(model);
  constexpr Macs C = 16, V = 31, tokens = B * T, pairs = T * (T + 1) / 2;
  for (const char* block : {"transformer.h.0", "transformer.h.1"}) {
    const auto layer = [&](const char* name) { return macs_of(profile, concat(block, '.', name)); };
    EXPECT_EQ(layer("attn.c_attn"), Pair(tokens * 3 * C * C, 2 * tokens * 3 * C * C));
    EXPECT_EQ(layer("attn.c_proj"), Pair(tokens * C * C, 2 * tokens * C * C));
    EXPECT_EQ(layer("mlp.c_fc"), Pair(tokens * 4 * C * C, 2 * tokens * 4 * C * C));
    EXPECT_EQ(layer("mlp.c_proj"), Pair(tokens * 4 * C * C, 2 * tokens * 4 * C * C));
    EXPECT_EQ(macs_of(profile, block), Pair(2 * B * C * pairs, 5 * B * C * pairs)) << "attention";
  }
  EXPECT_EQ(macs_of(profile, "transformer.head"), Pair(tokens * C * V, 2 * tokens * C * V));
  EXPECT_EQ(macs_of(profile, "transformer.embeddings"), Pair());
  const Macs products = tokens * (2 * 12 * C * C + C * V), attention = 2 * B * C * pairs;
  EXPECT_EQ(all_macs(profile), Pair(products + 2 * 2 * attention / 2, 2 * products + 2 * 5 * attention / 2));
}

/// 6 N operations a token (arXiv:2204.02311, appendix B), where N counts the weights that a product reads.
TEST(Profile, HasSixOperationsAWeightAndToken) {
  Gpt2 model(gpt2);
  const Pair all = all_macs(profile_of(model));
  Macs weights = 0;
  for (const Parameter* p : model.parameters())
    if (p->shape.dims() == 2) weights += p->count();
  weights -= model.facts().position_elements;
  constexpr Macs attention = 2 * 7 * B * 16 * T * (T + 1) / 2;
  EXPECT_EQ(2 * (all.first + all.second - attention), 6 * weights * B * T);
}

TEST(Profile, CountsWhatACheckpointComputesAgainInBackward) {
  Gpt2 plain(gpt2), again(gpt2);
  again.checkpoint_activations();
  const Tape::Profile kept = profile_of(plain), recomputed = profile_of(again);
  for (const auto& [part, cost] : kept) {
    const bool in_block = part.starts_with("transformer.h.");
    EXPECT_EQ(macs_of(recomputed, part),
              Pair(cost.forward_macs, cost.backward_macs + (in_block ? cost.forward_macs : 0)))
        << part;
  }
}

constexpr LlamaConfig llama{.vocab_size = 31,
                            .hidden_size = 12,
                            .intermediate_size = 20,
                            .num_hidden_layers = 2,
                            .num_attention_heads = 4,
                            .num_key_value_heads = 2,
                            .head_dim = 4,
                            .max_position_embeddings = 8,
                            .sliding_window = 3,
                            .max_window_layers = 1};

/// The second layer has a window: query i has min(i + 1, 3) keys.
TEST(Profile, CountsTheProductsOfALlama) {
  Llama model(llama);
  const Tape::Profile profile = profile_of(model);
  constexpr Macs C = 12, H = 20, Q = 16, K = 8, V = 31, tokens = B * T;
  const auto thrice = [](Macs n) { return Pair(n, 2 * n); };
  for (const int l : {0, 1}) {
    const std::string block = concat("model.layers.", l);
    const auto layer = [&](const char* name) { return macs_of(profile, concat(block, '.', name)); };
    EXPECT_EQ(layer("self_attn.q_proj"), thrice(tokens * C * Q));
    EXPECT_EQ(layer("self_attn.k_proj"), thrice(tokens * C * K));
    EXPECT_EQ(layer("self_attn.v_proj"), thrice(tokens * C * K));
    EXPECT_EQ(layer("self_attn.o_proj"), thrice(tokens * Q * C));
    for (const char* name : {"mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"})
      EXPECT_EQ(layer(name), thrice(tokens * C * H)) << name;
    const Macs pairs = l == 0 ? T * (T + 1) / 2 : 1 + 2 + 3 * (T - 2);
    EXPECT_EQ(macs_of(profile, block), Pair(2 * B * Q * pairs, 5 * B * Q * pairs));
  }
  EXPECT_EQ(macs_of(profile, "model.head"), thrice(tokens * C * V));
  const Macs products = tokens * (2 * (2 * C * Q + 2 * C * K + 3 * C * H) + C * V);
  const Macs pairs = T * (T + 1) / 2 + 3 + 3 * (T - 2);
  EXPECT_EQ(all_macs(profile), Pair(products + 2 * B * Q * pairs, 2 * products + 5 * B * Q * pairs));
}

/// A frozen weight has no gradient; a low-rank update has products of its own.
TEST(Profile, CountsFrozenLayersAndLowRankUpdates) {
  Llama model(llama);
  add_lora(model, {.target_modules = {"q_proj"}, .r = 2});
  const Tape::Profile profile = profile_of(model);
  constexpr Macs C = 12, Q = 16, R = 2, tokens = B * T;
  const std::string q = "model.layers.1.self_attn.q_proj";
  EXPECT_EQ(macs_of(profile, q), Pair(tokens * C * Q, tokens * C * Q)) << "the gradient of its input";
  EXPECT_EQ(macs_of(profile, "model.layers.0.self_attn.q_proj").second, 0u) << "nothing below it is trained";
  EXPECT_EQ(macs_of(profile, "model.layers.1.mlp.up_proj").second, tokens * C * 20);
  const Pair all = all_macs(profile);
  Llama plain(llama);
  EXPECT_EQ(all.first - all_macs(profile_of(plain)).first, 2 * tokens * R * (C + Q));
}

/// The input of the first layer has no gradient.
struct ConvNet : Module {
  nn::Conv2d first{*this, "first", 3, 8, 3, {.padding = 1}};
  nn::Conv2d second{*this, "second", 8, 6, 3, {.stride = 2, .groups = 2}};
  nn::Linear head{*this, "head", 6, 4};
  Var operator()(Tape& t, const Tensor& images) {
    const Var x = second(t, nn::relu(t, first(t, images)));
    return head(t, nn::flatten(t, nn::adaptive_avg_pool2d(t, x, 1), 1));
  }
};

TEST(Profile, CountsTheProductsOfAConvolutionalNet) {
  ConvNet net;
  const Tensor images = Tensor::zeros({5, 3, 9, 11}), classes = Tensor::zeros({5}, DType::i32);
  const auto loss = [&](Tape& t) { return nn::cross_entropy(t, net(t, images), classes).sum; };
  const Tape::Profile profile = profile_of(net, loss);
  constexpr Macs first = 5 * 8 * 9 * 11 * (3 * 3 * 3), second = 5 * 6 * 4 * 5 * (4 * 3 * 3), head = 5 * 6 * 4;
  EXPECT_EQ(macs_of(profile, "first"), Pair(first, first));
  EXPECT_EQ(macs_of(profile, "second"), Pair(second, 2 * second));
  EXPECT_EQ(macs_of(profile, "head"), Pair(head, 2 * head));
  EXPECT_EQ(all_macs(profile), Pair(first + second + head, first + 2 * (second + head)));
}

TEST(Profile, CountsProductsOfMatricesAndCrossAttention) {
  struct None : Module {
  } none;
  const auto variable = [](Tape& t, const Shape& s) { return t.variable(Tensor::zeros(s)); };
  const Tape::Profile product = profile_of(none, [&](Tape& t) {
    const Var a = variable(t, {2, 3, 5}), b = t.constant(Tensor::zeros({2, 4, 5}));
    return nn::mean(t, nn::matmul(t, a, false, b, true));
  });
  EXPECT_EQ(all_macs(product), Pair(2 * 3 * 4 * 5, 2 * 3 * 4 * 5));
  const Tape::Profile attention = profile_of(none, [&](Tape& t) {
    const Var q = variable(t, {2, 3, 8}), k = variable(t, {2, 5, 4}), v = variable(t, {2, 5, 4});
    return nn::mean(t, nn::attention(t, q, k, v, {.heads = 4, .kv_heads = 2}));
  });
  EXPECT_EQ(macs_of(attention, ""), Pair(2 * 2 * 8 * 3 * 5, 5 * 2 * 8 * 3 * 5));
}

TEST(Profile, HasTheTimesOfScopes) {
  Gpt2 model(gpt2);
  const auto start = std::chrono::steady_clock::now();
  const Tape::Profile profile = profile_of(model);
  const double whole = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  double sum = 0;
  for (const char* scope :
       {"transformer.h.0", "transformer.h.1", "transformer.head", "transformer.embeddings"}) {
    const Tape::Cost& cost = profile.at(scope);
    EXPECT_GT(cost.forward_seconds, 0) << scope;
    EXPECT_GT(cost.backward_seconds, 0) << scope;
    sum += cost.forward_seconds + cost.backward_seconds;
  }
  EXPECT_LT(sum, whole);
}

TEST(Profile, AddsPassesUntilItEnds) {
  Gpt2 model(gpt2);
  allocate_parameters(model);
  init_parameters(model, 1);
  const Tensor tokens = Tensor::zeros({B, T}, DType::i32);
  Tape tape;
  Tape::Profile profile;
  const auto pass = [&] {
    tape.backward(model.forward(tape, tokens, tokens).loss.sum);
    tape.reset();
  };
  tape.set_profile(&profile);
  pass();
  const Pair once = all_macs(profile);
  pass();
  EXPECT_EQ(all_macs(profile), Pair(2 * once.first, 2 * once.second));
  {
    const Tape::NoGrad evaluation(tape);
    model.forward(tape, tokens, tokens);
    tape.reset();
  }
  tape.set_profile(nullptr);
  pass();
  EXPECT_EQ(all_macs(profile), Pair(2 * once.first, 2 * once.second));
}

}  // namespace
}  // namespace rz
