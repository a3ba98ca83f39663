/// Registration: names, parameters, scopes, buffers and modes are found from the tree of modules.
#include "autograd_lite/nn/module.h"

#include <gtest/gtest.h>

#include <string>
#include <type_traits>
#include <vector>

#include "autograd_lite/nn/containers.h"
#include "autograd_lite/nn/init.h"
#include "autograd_lite/nn/layers.h"
#include "tests/support/error_of.h"

namespace rz {
namespace {

using Names = std::vector<std::string>;

Names names_of(const std::vector<Parameter*>& parameters) {
  Names out;
  for (const Parameter* p : parameters) out.push_back(p->name);
  return out;
}

Names names_of(const std::vector<const Scope*>& scopes) {
  Names out;
  for (const Scope* s : scopes) out.push_back(s->name);
  return out;
}

/// A residual layer, one scope.
struct Residual : Module {
  Residual(Module& parent, const std::string& name, std::size_t n, double p = 0)
      : Module(parent, name), norm(*this, "norm", n), layer(*this, "layer", n, n), drop(*this, "drop", p) {
    one_scope();
  }
  Var operator()(Tape& tape, Var x) {
    return in_scope(tape, [&] { return nn::add(tape, x, drop(tape, layer(tape, norm(tape, x)))); });
  }
  nn::LayerNorm norm;
  nn::Linear layer;
  nn::Dropout drop;
};

struct Net : Module {
  Net() {
    register_buffer(calls, "calls", {}, DType::f32, 5);
    blocks.append(4u, 0.5);
  }
  Var operator()(Tape& tape, const Tensor& x) {
    Var y = first(tape, x);
    for (Residual& block : blocks) y = block(tape, y);
    y = in_scope(tape, [&] { return nn::mul(tape, y, tape.parameter(scale)); });
    return out(tape, y);
  }
  nn::Linear first{*this, "first", 3, 4};
  nn::ModuleList<Residual> blocks{*this, "blocks", 1, 4u};
  nn::Linear out{*this, "out", 4, 1, nn::WeightLayout::out_in, false};
  Parameter scale{*this, "scale", {4}, {Initial::constant, 2}};
  ModuleBuffer calls;
};

TEST(Module, NamesParametersAndBuffersFollowFromTheTree) {
  Net net;
  EXPECT_EQ(names_of(net.parameters()),
            (Names{"scale", "first.weight", "first.bias", "blocks.0.norm.weight", "blocks.0.norm.bias",
                   "blocks.0.layer.weight", "blocks.0.layer.bias", "blocks.1.norm.weight",
                   "blocks.1.norm.bias", "blocks.1.layer.weight", "blocks.1.layer.bias", "out.weight"}));
  EXPECT_EQ(net.blocks[1].named_parameters()[2].first, "layer.weight");
  EXPECT_EQ(net.blocks[1].named_parameters()[2].second, &net.blocks[1].layer.weight);
  ASSERT_EQ(net.buffers().size(), 1u);
  EXPECT_EQ(net.buffers()[0], &net.calls);
  EXPECT_EQ(net.calls.name, "calls");
  EXPECT_EQ(net.modules().size(), 12u);  // the root, first, blocks, two blocks of four, out
  EXPECT_EQ(net.modules()[2]->path(), "blocks");
}

TEST(Module, FindsByNamesFromItself) {
  Net net;
  EXPECT_EQ(net.find("blocks.0.layer.bias"), &net.blocks[0].layer.bias);
  EXPECT_EQ(net.blocks.find("0.layer.bias"), &net.blocks[0].layer.bias);
  EXPECT_EQ(net.find("blocks.0.layer"), nullptr);
  EXPECT_EQ(net.find_module("blocks.0.layer"), &net.blocks[0].layer);
  EXPECT_EQ(net.blocks[0].find_module("layer"), &net.blocks[0].layer);
  EXPECT_EQ(net.find_module("layer"), nullptr);
}

TEST(Module, LeavesAreScopesUnlessAModuleAboveThemIsOne) {
  Net net;
  EXPECT_EQ(names_of(net.scopes()), (Names{"model", "first", "blocks.0", "blocks.1", "out"}));
  EXPECT_EQ(names_of(net.scopes()[0]->parameters), (Names{"scale"}));
  EXPECT_EQ(names_of(net.scopes()[2]->parameters), (Names{"blocks.0.norm.weight", "blocks.0.norm.bias",
                                                          "blocks.0.layer.weight", "blocks.0.layer.bias"}));
  EXPECT_EQ(&net.blocks[0].layer.scope(), net.scopes()[2]);
}

/// Two scopes of one scope, and parameters that are registered after the declaration.
struct Nested : Module {
  Nested() {
    one_scope();
    register_parameter(late, "late", {1});
  }
  Residual inner{*this, "inner", 2};
  nn::Linear layer{*this, "layer", 2, 2};
  Parameter late;
};

TEST(Module, ADeclaredScopeWithinAnotherKeepsItsParameters) {
  Nested net;
  ASSERT_EQ(names_of(net.scopes()), (Names{"model", "inner"}));
  EXPECT_EQ(names_of(net.scopes()[0]->parameters), (Names{"layer.weight", "layer.bias", "late"}));
  EXPECT_EQ(net.scopes()[1]->parameters.size(), 4u);
}

TEST(Module, ModulesMayFormAScopeTogether) {
  struct Tied : Module {
    nn::Embedding table{*this, "table", 5, 2}, positions{*this, "positions", 3, 2};
    nn::LayerNorm norm{*this, "norm", 2};
  } net;
  // Each takes the place of its first module.
  net.register_scope("head", std::vector<Module*>{&net.norm}).parameters.push_back(&net.table.weight);
  net.register_scope("embeddings", std::vector<Module*>{&net.table, &net.positions});
  ASSERT_EQ(names_of(net.scopes()), (Names{"embeddings", "head"}));
  EXPECT_EQ(names_of(net.scopes()[1]->parameters), (Names{"norm.weight", "norm.bias", "table.weight"}));
  EXPECT_EQ(net.parameters().size(), 4u);
  const Error e = test::error_of([&] { net.register_scope("again", std::vector<Module*>{&net.norm}); });
  EXPECT_STREQ(e.what(), "module norm cannot be in scope again: it is in scope head");
}

/// A layer that registers a parameter and a part, and then refuses an argument.
struct Refusing : Module {
  Refusing(Module& parent, const std::string& name, bool refuses) : Module(parent, name) {
    require(!refuses, Errc::invalid_argument, path(), ": refused");
  }
  Parameter scale{*this, "scale", {2}};
  nn::Linear layer{*this, "layer", 2, 2};
};

TEST(Module, APartWhoseConstructorThrowsIsNotInTheTree) {
  struct Net : Module {
    Net() { one_scope(); }
    nn::Linear first{*this, "first", 2, 2};
    nn::ModuleList<Refusing> list{*this, "list"};
    nn::Linear last{*this, "last", 2, 2};
  } net;
  struct Loose : Module {
    nn::ModuleList<Refusing> list{*this, "list"};
  } loose;
  const Names before = names_of(net.scopes()[0]->parameters);
  EXPECT_STREQ(test::error_of([&] { net.list.append(true); }).what(), "list.0: refused");
  EXPECT_STREQ(test::error_of([&] { loose.list.append(true); }).what(), "list.0: refused");
  EXPECT_EQ(names_of(net.scopes()[0]->parameters), before);
  EXPECT_EQ(net.modules().size(), 4u);
  EXPECT_TRUE(loose.scopes().empty());
  net.list.append(false);
  EXPECT_EQ(names_of(net.parameters()),
            (Names{"first.weight", "first.bias", "list.0.scale", "list.0.layer.weight", "list.0.layer.bias",
                   "last.weight", "last.bias"}));
  EXPECT_EQ(net.scopes()[0]->parameters.size(), 7u);

  // Nor is a scope that is refused.
  loose.list.append(false);
  loose.register_scope("one", std::vector<Module*>{&loose.list[0].layer});
  test::error_of([&] {
    loose.register_scope("two", std::vector<Module*>{&loose.list, &loose.list[0].layer});
  });
  EXPECT_EQ(names_of(loose.scopes()), (Names{"list.0", "one"}));
}

/// Records the scopes that a pass enters.
Names scopes_entered(Module& module, const std::function<void()>& pass) {
  Names entered;
  ParameterHooks hooks;
  hooks.enter = [&](const Scope& scope, Pass) { entered.push_back(scope.name); };
  for (Parameter* p : module.parameters()) p->hooks = &hooks;
  pass();
  for (Parameter* p : module.parameters()) p->hooks = nullptr;
  return entered;
}

TEST(Module, ALayerEntersItsScopeUnlessItIsOpen) {
  Net net;
  allocate_parameters(net);
  init_parameters(net, 1);
  net.eval();
  Tape tape;
  const Tensor x = Tensor::zeros({1, 3}), y = Tensor::zeros({1, 4});
  const Tape::NoGrad no_grad(tape);
  // blocks.1 is called within its scope, its layer alone outside of it.
  EXPECT_EQ(scopes_entered(net, [&] { net(tape, x); }),
            (Names{"first", "blocks.0", "blocks.1", "model", "out"}));
  EXPECT_EQ(scopes_entered(net, [&] { net.blocks[1].layer(tape, y); }), (Names{"blocks.1"}));
}

TEST(Module, ModesReachEveryPartAndAGuardRestoresEach) {
  Net net;
  net.blocks[0].eval();
  EXPECT_TRUE(net.training());
  EXPECT_FALSE(net.blocks[0].drop.training());
  EXPECT_TRUE(net.blocks[1].drop.training());
  {
    const EvalMode evaluating(net);
    for (const Module* m : net.modules()) EXPECT_FALSE(m->training()) << m->path();
  }
  EXPECT_TRUE(net.training());
  EXPECT_FALSE(net.blocks[0].drop.training());
  EXPECT_TRUE(net.blocks[1].drop.training());
  net.train();
  for (const Module* m : net.modules()) EXPECT_TRUE(m->training()) << m->path();
}

TEST(Module, DropoutActsInTrainingOnly) {
  Module root;
  nn::Dropout drop(root, "drop", 0.5);
  Tape tape;
  const Var x = tape.constant(Tensor::zeros({64}));
  EXPECT_NE(drop(tape, x).index, x.index);
  root.eval();
  EXPECT_EQ(drop(tape, x).index, x.index);
}

TEST(Module, ASubtreeCanBeFrozen) {
  Net net;
  net.blocks.requires_grad_(false);
  for (const Parameter* p : net.parameters())
    EXPECT_EQ(p->requires_grad, !p->name.starts_with("blocks")) << p->name;
  net.blocks[1].requires_grad_(true);
  EXPECT_TRUE(net.blocks[1].layer.weight.requires_grad);
  EXPECT_FALSE(net.blocks[0].layer.weight.requires_grad);
}

TEST(Module, BuffersStartAtTheirInitialValues) {
  Net net;
  ModuleBuffer counter;
  net.register_buffer(counter, "counter", {2}, DType::i64);
  EXPECT_FALSE(net.calls.value.defined());
  allocate_buffers(net);
  EXPECT_EQ(*net.calls.value.data<float>(), 5);
  EXPECT_EQ(counter.value.data<std::int64_t>()[1], 0);
  *net.calls.value.data<float>() = 7;
  allocate_parameters(net);  // keeps it
  EXPECT_EQ(*net.calls.value.data<float>(), 7);
  EXPECT_EQ(test::error_of([&] { net.register_buffer(counter, "c", {}, DType::i64, 1); }).code(),
            Errc::invalid_argument);
}

TEST(Sequential, CallsItsModulesInOrder) {
  struct Stack : Module {
    nn::Sequential layers{*this, "layers"};
  } net;
  net.layers.append<nn::Linear>(2u, 3u).append<nn::Relu>().append<nn::Linear>(3u, 1u);
  EXPECT_EQ(names_of(net.parameters()),
            (Names{"layers.0.weight", "layers.0.bias", "layers.2.weight", "layers.2.bias"}));
  allocate_parameters(net);
  for (Parameter* p : net.parameters()) std::fill_n(p->value.data<float>(), p->count(), 1.0f);
  net.find("layers.0.bias")->value.data<float>()[2] = -9;
  Tape tape;
  const Tensor x = Tensor::empty({1, 2});
  x.data<float>()[0] = 2, x.data<float>()[1] = 3;
  // Each hidden value is 2 + 3 + 1, the last one relu(5 - 9); their sum and 1.
  EXPECT_EQ(*tape.value(net.layers(tape, tape.constant(x))).data<float>(), 13);
}

TEST(Flatten, LeavesTheFirstDimension) {
  Module root;
  nn::Flatten flatten(root, "flatten");
  Tape tape;
  EXPECT_EQ(tape.value(flatten(tape, tape.constant(Tensor::zeros({2, 3, 4, 5})))).shape(), (Shape{2, 60}));
}

TEST(Module, PatternsMatchTheEndsOfNames) {
  const std::string name = "h.0.attn.c_attn";
  for (const char* pattern :
       {"h.0.attn.c_attn", "attn.c_attn", "c_attn", "c_*", "*", "h.*.attn.*", "*.c_attn"})
    EXPECT_TRUE(matches_name(name, pattern)) << pattern;
  for (const char* pattern :
       {"", "attn", "_attn", "0.attn", "h.*.c_attn", "c_attn.", "c", "h.0.attn.c_attn.x"})
    EXPECT_FALSE(matches_name(name, pattern)) << pattern;
  for (const char* pattern : {"h", "h.0", "0.attn", "attn", "c_attn", "h.*"})
    EXPECT_TRUE(matches_part(name, pattern)) << pattern;
  for (const char* pattern : {"", "h.1", "0.c_attn", "att"})
    EXPECT_FALSE(matches_part(name, pattern)) << pattern;
}

TEST(Module, IsNeitherCopiedNorMoved) {
  static_assert(!std::is_copy_constructible_v<Net> && !std::is_move_constructible_v<Net>);
  static_assert(!std::is_copy_assignable_v<nn::Linear> && !std::is_move_assignable_v<nn::Linear>);
  Module root;
  EXPECT_EQ(test::error_of([&] { nn::LayerNorm(root, "", 3); }).code(), Errc::invalid_argument);
}

}  // namespace
}  // namespace rz
