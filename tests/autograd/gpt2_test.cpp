#include "autograd_lite/models/gpt2.h"

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "autograd_lite/nn/init.h"

namespace rz {
namespace {

Gpt2Config small() {
  Gpt2Config c;
  c.n_layer = 2;
  c.n_head = 2;
  c.n_embd = 16;
  c.n_positions = 12;
  c.vocab_size = 11;
  return c;
}

std::vector<float> draw(const Parameter& p, std::size_t begin, std::size_t count, std::uint64_t seed) {
  std::vector<float> out(count);
  init_slice(p, out, begin, seed);
  return out;
}

Parameter of_kind(Initial initial, std::size_t n = 10001) {
  Parameter p;
  p.name = "layer.weight";
  p.shape = {n};
  p.initial = initial;
  return p;
}

TEST(Init, ASliceEqualsThatPartOfTheWhole) {
  for (const auto kind : {Initial::normal, Initial::uniform, Initial::constant}) {
    const Parameter p = of_kind({kind, 0.02f});
    const auto whole = draw(p, 0, p.count(), 5);
    for (const std::size_t begin : {0, 1, 2, 3, 4, 777, 10000}) {
      for (const std::size_t count : {0, 1, 5, 1000}) {
        const std::size_t n = std::min<std::size_t>(count, p.count() - begin);
        const std::vector<float> slice(whole.begin() + static_cast<std::ptrdiff_t>(begin),
                                       whole.begin() + static_cast<std::ptrdiff_t>(begin + n));
        EXPECT_EQ(draw(p, begin, n, 5), slice) << begin << " + " << count;
      }
    }
  }
}

TEST(Init, HasTheRequestedMoments) {
  const auto moments = [](const std::vector<float>& x) {
    double sum = 0, squares = 0;
    for (const double v : x) sum += v, squares += v * v;
    const double mean = sum / static_cast<double>(x.size());
    return std::pair(mean, std::sqrt(squares / static_cast<double>(x.size()) - mean * mean));
  };
  const Parameter normal = of_kind({Initial::normal, 0.02f}, 400000);
  const auto [mean, deviation] = moments(draw(normal, 0, normal.count(), 9));
  EXPECT_NEAR(mean, 0, 0.02 * 5 / std::sqrt(4e5));
  EXPECT_NEAR(deviation, 0.02, 0.02 * 5 / std::sqrt(8e5));
  const Parameter uniform = of_kind({Initial::uniform, 0.5f}, 400000);
  EXPECT_NEAR(moments(draw(uniform, 0, uniform.count(), 9)).second, 0.5 / std::sqrt(3), 2e-3);
}

TEST(Init, DependsOnSeedAndName) {
  Parameter p = of_kind({Initial::normal, 1}, 8);
  const auto first = draw(p, 0, 8, 1);
  EXPECT_NE(first, draw(p, 0, 8, 2));
  p.name = "another.weight";
  EXPECT_NE(first, draw(p, 0, 8, 1));
  EXPECT_THROW(draw(p, 4, 5, 1), Error);
}

TEST(Gpt2, ParametersAreNamedAsInCheckpointsInOrderOfUse) {
  Gpt2Config c = small();
  c.n_layer = 1;
  Gpt2 model(c);
  std::vector<std::string> names;
  for (const Parameter* p : model.parameters()) names.push_back(p->name + " " + name(p->shape));
  const std::string h = "transformer.h.0.";
  EXPECT_EQ(names,
            (std::vector<std::string>{
                "transformer.wte.weight [11, 16]", "transformer.wpe.weight [12, 16]", h + "ln_1.weight [16]",
                h + "ln_1.bias [16]", h + "attn.c_attn.weight [16, 48]", h + "attn.c_attn.bias [48]",
                h + "attn.c_proj.weight [16, 16]", h + "attn.c_proj.bias [16]", h + "ln_2.weight [16]",
                h + "ln_2.bias [16]", h + "mlp.c_fc.weight [16, 64]", h + "mlp.c_fc.bias [64]",
                h + "mlp.c_proj.weight [64, 16]", h + "mlp.c_proj.bias [16]", "transformer.ln_f.weight [16]",
                "transformer.ln_f.bias [16]"}));
  c.tie_word_embeddings = false;
  Gpt2 untied(c);
  EXPECT_EQ(untied.parameters().back()->name, "lm_head.weight");
  EXPECT_EQ(untied.parameters().back()->shape, Shape({11, 16}));
}

TEST(Gpt2, ScopesAreEmbeddingsBlocksAndHead) {
  Gpt2 model(small());
  const auto scopes = model.scopes();
  ASSERT_EQ(scopes.size(), 4u);
  EXPECT_EQ(scopes[1]->name, "transformer.h.0");
  EXPECT_EQ(scopes[1]->parameters.size(), 12u);
  EXPECT_EQ(scopes[0]->parameters[0], scopes[3]->parameters.back());  // the tied table
}

TEST(Gpt2, ProjectionsIntoTheResidualStreamStartSmaller) {
  Gpt2 model(small());
  for (const Parameter* p : model.parameters()) {
    const float scale = p->initial.scale;
    if (p->name.ends_with("c_proj.weight")) {
      EXPECT_FLOAT_EQ(scale, 0.01f) << p->name;
    } else if (p->shape.dims() == 2) {
      EXPECT_FLOAT_EQ(scale, 0.02f) << p->name;
    } else {
      EXPECT_EQ(scale, p->name.ends_with(".weight") ? 1 : 0) << p->name;
    }
  }
}

TEST(Gpt2, TheInitializerRangeIsTheDeviationOfFreshWeights) {
  Gpt2Config c = small();
  c.initializer_range = 0.1;
  c.tie_word_embeddings = false;
  Gpt2 model(c);
  for (const Parameter* p : model.parameters()) {
    if (p->shape.dims() != 2) continue;
    EXPECT_FLOAT_EQ(p->initial.scale, p->name.ends_with("c_proj.weight") ? 0.05f : 0.1f) << p->name;
  }
}

TEST(Gpt2, WrongConfigurationsNameTheKey) {
  const auto expect_error = [](const char* part, auto change) {
    Gpt2Config c = small();
    change(c);
    try {
      Gpt2 model(c);
      ADD_FAILURE() << "accepted, expected: " << part;
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Errc::config);
      EXPECT_NE(std::string(e.what()).find(part), std::string::npos) << e.what();
      EXPECT_EQ(std::string(e.what()).find('\n'), std::string::npos);
    }
  };
  expect_error("n_embd is 17, which n_head 2 does not divide", [](Gpt2Config& c) { c.n_embd = 17; });
  expect_error("n_layer is 0", [](Gpt2Config& c) { c.n_layer = 0; });
  expect_error("n_head is 0", [](Gpt2Config& c) { c.n_head = 0; });
  expect_error("vocab_size is 0", [](Gpt2Config& c) { c.vocab_size = 0; });
  expect_error("layer_norm_epsilon", [](Gpt2Config& c) { c.layer_norm_epsilon = -1; });
  expect_error("initializer_range is -0.1", [](Gpt2Config& c) { c.initializer_range = -0.1; });
  expect_error("resid_pdrop is 1", [](Gpt2Config& c) { c.resid_pdrop = 1; });
  expect_error("attn_pdrop is -0.1", [](Gpt2Config& c) { c.attn_pdrop = -0.1; });
}

struct Ready {
  explicit Ready(const Gpt2Config& c) : model(c) {
    allocate_parameters(model);
    init_parameters(model, 3);
  }
  Gpt2 model;
  Tape tape;
};

Tensor tokens_of(std::size_t batch, std::size_t length) {
  Tensor t = Tensor::empty({batch, length}, DType::i32);
  for (std::size_t i = 0; i < t.count(); ++i)
    t.data<std::int32_t>()[i] = static_cast<std::int32_t>(i * i % 11);
  return t;
}

TEST(Gpt2, TooManyTokensAreRefused) {
  Ready r(small());
  try {
    r.model.forward(r.tape, tokens_of(1, 13));
    FAIL();
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("tokens are [1, 13], expected [batch, at most 12]"),
              std::string::npos)
        << e.what();
  }
}

TEST(Gpt2, LogitsAtAPositionAreThoseOfTheWhole) {
  Ready r(small());
  const Tensor tokens = tokens_of(2, 9);
  const Tensor all = r.tape.value(r.model.forward(r.tape, tokens).logits);
  for (const std::size_t t : {0, 4, 8}) {
    const Tensor one = r.tape.value(r.model.logits_at(r.tape, tokens, t));
    ASSERT_EQ(one.shape(), Shape({2, 1, 11}));
    for (std::size_t b = 0; b < 2; ++b) {
      for (std::size_t v = 0; v < 11; ++v) {
        EXPECT_NEAR(one.data<float>()[b * 11 + v], all.data<float>()[(b * 9 + t) * 11 + v], 1e-6);
      }
    }
  }
}

TEST(Gpt2, LogitsAtAPositionHaveTheGradientOfTheWhole) {
  const Tensor tokens = tokens_of(2, 9);
  Tensor all = Tensor::empty({2, 9}, DType::i32), one = Tensor::empty({2, 1}, DType::i32);
  std::fill_n(all.data<std::int32_t>(), all.count(), -100);
  for (std::size_t b = 0; b < 2; ++b)
    one.data<std::int32_t>()[b] = all.data<std::int32_t>()[b * 9 + 5] = static_cast<std::int32_t>(3 + b);
  Ready whole(small()), at(small());
  whole.tape.backward(whole.model.forward(whole.tape, tokens, all).loss.sum);
  at.tape.backward(nn::cross_entropy(at.tape, at.model.logits_at(at.tape, tokens, 5), one).sum);
  const auto expected = whole.model.parameters(), got = at.model.parameters();
  for (std::size_t p = 0; p < got.size(); ++p) {
    ASSERT_TRUE(got[p]->grad.defined()) << got[p]->name;
    for (std::size_t i = 0; i < got[p]->count(); ++i)
      EXPECT_NEAR(got[p]->grad.data<float>()[i], expected[p]->grad.data<float>()[i], 1e-6) << got[p]->name;
  }
}

TEST(Gpt2, DropoutStopsOutsideOfTraining) {
  for (double Gpt2Config::*p : {&Gpt2Config::embd_pdrop, &Gpt2Config::attn_pdrop, &Gpt2Config::resid_pdrop}) {
    Gpt2Config c = small();
    c.*p = 0.5;
    Ready dropped(c), plain(small());
    const auto loss = [](Ready& r) {
      return r.model.forward(r.tape, tokens_of(1, 8), tokens_of(1, 8)).loss.read({}).sum;
    };
    EXPECT_NE(loss(dropped), loss(plain));
    dropped.model.eval();
    EXPECT_EQ(loss(dropped), loss(plain));
  }
}

}  // namespace
}  // namespace rz
