#include "autograd_lite/tape.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <new>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "autograd_lite/models/gpt2.h"
#include "autograd_lite/models/lora.h"
#include "autograd_lite/nn/init.h"
#include "tests/support/error_of.h"

namespace {
std::atomic<std::size_t> heap_allocations{0};
void* counted(std::size_t bytes, std::size_t alignment) {
  ++heap_allocations;
  void* p = alignment ? std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment)
                      : std::malloc(bytes ? bytes : 1);
  if (!p) throw std::bad_alloc();
  return p;
}
}  // namespace

// When inlined, g++ would report malloc() with delete, or new with free(), as a mismatched pair.
[[gnu::noinline]] void* operator new(std::size_t n) { return counted(n, 0); }
[[gnu::noinline]] void* operator new[](std::size_t n) { return counted(n, 0); }
[[gnu::noinline]] void* operator new(std::size_t n, std::align_val_t a) {
  return counted(n, static_cast<std::size_t>(a));
}
[[gnu::noinline]] void* operator new[](std::size_t n, std::align_val_t a) {
  return counted(n, static_cast<std::size_t>(a));
}
[[gnu::noinline]] void operator delete(void* p) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete[](void* p) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete(void* p, std::size_t) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete[](void* p, std::size_t) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete(void* p, std::align_val_t) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete[](void* p, std::align_val_t) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete(void* p, std::size_t, std::align_val_t) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete[](void* p, std::size_t, std::align_val_t) noexcept { std::free(p); }

namespace rz {
namespace {

Tensor filled(const Shape& shape, float value) {
  Tensor t = Tensor::empty(shape);
  std::fill_n(t.data<float>(), t.count(), value);
  return t;
}

Parameter make(const char* name, const Shape& shape, float value) {
  Parameter p;
  p.name = name;
  p.shape = shape;
  p.value = filled(shape, value);
  return p;
}

std::vector<float> values(const Tensor& t) { return {t.data<float>(), t.data<float>() + t.count()}; }

/// The sum of all elements, as a matrix product with ones.
Var total(Tape& tape, Var x) {
  const std::size_t n = tape.value(x).count();
  const Var ones = tape.constant(filled({n, 1}, 1));
  return nn::matmul(tape, nn::reshape(tape, x, {1, n}), false, ones, false);
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST(Tape, GradientsOfSeveralUsesAddUp) {
  Tape tape;
  const Var x = tape.variable(filled({2}, 3));
  // y = x·x + x + x: dy/dx = 2x + 2
  const Var y = nn::add(tape, nn::add(tape, nn::mul(tape, x, x), x), x);
  tape.backward(total(tape, y), 0.5f);
  EXPECT_EQ(values(tape.grad(x)), (std::vector<float>{4, 4}));
}

TEST(Tape, AGradientThatTwoShareIsNotWrittenOver) {
  Tape tape;
  const Var a = tape.variable(filled({2}, 1)), b = tape.variable(filled({2}, 1));
  const Var sum = nn::add(tape, a, b);        // passes the same memory to both
  const Var more = nn::relu(tape, a);         // recorded later, so it comes first in backward
  const Var tail = nn::add(tape, sum, more);  // shares once more
  tape.backward(total(tape, tail));
  EXPECT_EQ(values(tape.grad(a)), (std::vector<float>{2, 2}));
  EXPECT_EQ(values(tape.grad(b)), (std::vector<float>{1, 1}));
}

TEST(Tape, GradientsAccumulateOverPassesUntilFresh) {
  Parameter p = make("p", {3}, 2);
  Tape tape;
  for (float expected : {2.0f, 4.0f, 6.0f}) {
    tape.backward(total(tape, nn::mul(tape, tape.parameter(p), 2)));
    tape.reset();
    EXPECT_EQ(values(p.grad), std::vector<float>(3, expected));
  }
  p.grad_is_fresh = true;
  tape.backward(total(tape, nn::mul(tape, tape.parameter(p), 2)));
  EXPECT_EQ(values(p.grad), std::vector<float>(3, 2));
}

/// Every call of a hook of its parameters, one line per event.
struct Recorder {
  explicit Recorder(std::initializer_list<Parameter*> parameters) {
    ParameterHooks& h = hooks;
    h.enter = [this](const Scope& s, Pass p) { events.push_back("enter " + s.name + side(p)); };
    h.leave = [this](const Scope& s, Pass p) { events.push_back("leave " + s.name + side(p)); };
    h.before_grad = [this](Parameter& p) {
      events.push_back("before " + p.name);
      if (!p.grad.defined()) p.grad = Tensor::empty(p.shape);
    };
    h.grad_ready = [this](Parameter& p, const Stream&) { events.push_back("ready " + p.name); };
    for (Parameter* p : parameters) p->hooks = &hooks;
  }
  Recorder(const Recorder&) = delete;
  ParameterHooks hooks;
  std::vector<std::string> events;
  static std::string side(Pass p) { return p == Pass::forward ? " forward" : " backward"; }
};

TEST(Tape, ScopesAndReadinessFollowTheRecording) {
  Parameter a = make("a", {2}, 1), b = make("b", {2}, 2), unused = make("unused", {2}, 1),
            frozen = make("frozen", {2}, 3);
  frozen.requires_grad = false;
  const Scope outer{"outer", {&a, &unused}}, inner{"inner", {&b, &frozen}}, last{"last", {&a}};
  Recorder record{&a, &b, &unused, &frozen};
  Tape tape;
  const Var y = tape.scope(outer, [&] {
    const Var x = nn::mul(tape, tape.parameter(a), 2);
    return tape.scope(
        inner, [&] { return nn::mul(tape, nn::mul(tape, x, tape.parameter(b)), tape.parameter(frozen)); });
  });
  const Var z = tape.scope(last, [&] { return nn::add(tape, y, tape.parameter(a)); });
  tape.backward(total(tape, z));
  const std::vector<std::string> expected{"enter outer forward",
                                          "enter inner forward",
                                          "leave inner forward",
                                          "leave outer forward",
                                          "enter last forward",
                                          "leave last forward",
                                          "enter last backward",
                                          "before a",
                                          "leave last backward",
                                          "enter outer backward",
                                          "enter inner backward",
                                          "before b",
                                          "ready b",
                                          "leave inner backward",
                                          "ready a",
                                          "leave outer backward"};
  // The inner scope ends where the outer one ends: both are entered before the first operator runs backward.
  EXPECT_EQ(record.events, expected);
  EXPECT_EQ(values(a.grad), (std::vector<float>{13, 13}));  // 2·b·frozen + 1
  EXPECT_EQ(values(b.grad), (std::vector<float>{6, 6}));
  EXPECT_FALSE(unused.grad.defined());
  EXPECT_FALSE(frozen.grad.defined());
}

TEST(Tape, ALayerDefersTheProductForItsWeightToAnOverlap) {
  Parameter w = make("w", {2, 2}, 3), unused = make("unused", {1}, 1);
  std::iota(w.value.data<float>(), w.value.data<float>() + 4, 1.0f);
  Recorder record{&w};
  const Scope scope{"scope", {&unused}};
  const auto pass = [&](bool overlaps, bool in_scope) {
    record.events.clear();
    w.grad_is_fresh = true;
    Tape tape;
    const Var x = tape.variable(filled({3, 2}, 0.5f));
    const Var in = tape.record(tape.value(x), {x}, [&record, x](Tape& t, const Tensor& d) {
      record.events.push_back("begin");
      t.run_deferred();
      record.events.push_back("end");
      t.accumulate_grad(x, d);
    });
    if (overlaps) tape.mark_overlaps(in);
    const auto layer = [&] {
      return nn::linear(tape, in, tape.parameter(w), Var(), nn::WeightLayout::out_in);
    };
    const Var y = in_scope ? tape.scope(scope, layer) : layer();
    tape.backward(total(tape, nn::mul(tape, y, y)));
    return std::pair(values(w.grad), values(tape.grad(x)));
  };
  const std::vector<std::string> in_turn{"before w", "ready w", "begin", "end"};
  const auto expected = pass(false, false);
  EXPECT_EQ(record.events, in_turn);
  EXPECT_EQ(pass(true, false), expected);
  EXPECT_EQ(record.events, (std::vector<std::string>{"begin", "before w", "end", "ready w"}));
  EXPECT_EQ(pass(true, true), expected) << "the scope ends before the overlap";
  EXPECT_EQ(record.events, in_turn);
}

TEST(Tape, AUseWithoutGradientNeitherDelaysReadinessNorMakesReady) {
  Parameter p = make("p", {2}, 1), unreached = make("unreached", {2}, 1);
  Recorder record{&p, &unreached};
  Tape tape;
  const Var used = nn::mul(tape, tape.parameter(p), 2);
  nn::mul(tape, tape.parameter(p), 5);  // leads nowhere
  nn::mul(tape, tape.parameter(unreached), 5);
  const Var loss = total(tape, used);
  nn::mul(tape, loss, 3);  // nor does this
  tape.backward(loss);
  EXPECT_EQ(record.events, (std::vector<std::string>{"before p", "ready p"}));
  EXPECT_EQ(values(p.grad), (std::vector<float>{2, 2}));
  EXPECT_FALSE(unreached.grad.defined());
}

TEST(Tape, AScopeThatNeedsNoGradientIsNotEnteredBackward) {
  Parameter teacher = make("teacher", {2}, 2), student = make("student", {2}, 1);
  teacher.requires_grad = false;
  const Scope first{"first", {&teacher}}, second{"second", {&student}};
  Recorder record{&teacher, &student};
  Tape tape;
  const Var x = tape.scope(first, [&] { return nn::mul(tape, tape.parameter(teacher), 2); });
  const Var y = tape.scope(second, [&] { return nn::mul(tape, x, tape.parameter(student)); });
  record.events.clear();
  tape.backward(total(tape, y));
  EXPECT_EQ(record.events, (std::vector<std::string>{"enter second backward", "before student",
                                                     "ready student", "leave second backward"}));
}

TEST(Tape, NoGradRecordsNothing) {
  Parameter p = make("p", {2}, 1);
  Tape tape;
  Var y;
  {
    const Tape::NoGrad no_grad(tape);
    y = nn::mul(tape, tape.parameter(p), 2);
    EXPECT_FALSE(tape.needs_grad(y));
  }
  const Var loss = total(tape, nn::mul(tape, y, tape.parameter(p)));
  tape.backward(loss);
  EXPECT_EQ(values(p.grad), (std::vector<float>{2, 2}));  // y is a constant
}

TEST(Tape, ActivationsAreFreedAsBackwardGoes) {
  Tape tape;
  const Tensor input = filled({1000}, 0.5f);
  Var y = tape.variable(input);
  for (int i = 0; i < 20; ++i) y = nn::tanh(tape, y);
  const Var loss = total(tape, y);
  const std::size_t recorded = tape.pool().statistics().in_use;
  EXPECT_GE(recorded, 20 * 4000u);
  tape.backward(loss);
  EXPECT_LE(tape.pool().statistics().in_use, recorded / 8);
  // At any time at most two gradients and a sum exist beside the recorded tensors.
  EXPECT_LE(tape.pool().statistics().peak, recorded + 4 * 5000);
  EXPECT_EQ(tape.value(loss).count(), 1u);
  EXPECT_TRUE(contains(test::refusal([&] { tape.value(y); }), "backward() had freed it"));
}

TEST(Tape, ErrorsNameTheCause) {
  Parameter p = make("layer.weight", {2}, 1);
  Tape tape;
  const Var x = nn::mul(tape, tape.parameter(p), 2);
  EXPECT_TRUE(contains(test::refusal([&] { tape.backward(x); }), "from a scalar, not from [2]"));
  EXPECT_TRUE(contains(test::refusal([&] { tape.backward(tape.constant(filled({1}, 1))); }),
                       "depends on nothing that requires a gradient"));
  const Var loss = total(tape, x);
  tape.backward(loss);
  EXPECT_TRUE(contains(test::refusal([&] { tape.backward(loss); }), "ran twice"));
  tape.reset();
  EXPECT_TRUE(contains(test::refusal([&] { tape.value(x); }), "another pass"));
  Tape other;
  const Var there = other.constant(filled({1}, 1));
  tape.constant(filled({1}, 1));
  EXPECT_TRUE(contains(test::refusal([&] { tape.value(there); }), "another pass or tape"));
  EXPECT_TRUE(contains(test::refusal([&] { tape.value(Var()); }), "stands for no value"));
}

TEST(Tape, AParameterWithoutValueIsNamedWithItsScope) {
  Parameter p = make("h.0.weight", {2}, 1);
  p.value = {};
  const Scope scope{"h.1", {}};
  Tape tape;
  EXPECT_TRUE(contains(test::refusal([&] { nn::mul(tape, tape.parameter(p), 2); }),
                       "parameter h.0.weight has no value outside of any scope"));
  EXPECT_TRUE(
      contains(test::refusal([&] { tape.scope(scope, [&] { return nn::mul(tape, tape.parameter(p), 2); }); }),
               "h.0.weight has no value in scope h.1"));
}

TEST(Tape, AnErrorInABodyLeavesATapeThatCanBeReset) {
  Parameter p = make("p", {2}, 1);
  const Scope scope{"s", {&p}};
  Tape tape;
  const Var x = tape.variable(filled({2}, 1));
  EXPECT_THROW(tape.checkpoint(scope, x,
                               [&](Var in) -> Var {
                                 nn::mul(tape, in, tape.parameter(p));
                                 throw Error(Errc::invalid_argument, "boom");
                               }),
               Error);
  tape.reset();
  tape.backward(total(tape, nn::mul(tape, tape.parameter(p), 2)));
  EXPECT_EQ(values(p.grad), (std::vector<float>{2, 2}));
}

// ---- recomputation and memory, on a small GPT-2

Gpt2Config small() {
  Gpt2Config c;
  c.n_layer = 3;
  c.n_head = 2;
  c.n_embd = 16;
  c.n_positions = 8;
  c.vocab_size = 19;
  c.embd_pdrop = c.resid_pdrop = 0.25;
  return c;
}

struct Tokens {
  Tokens() {
    for (std::size_t i = 0; i < inputs.count(); ++i) {
      inputs.data<std::int32_t>()[i] = static_cast<std::int32_t>(i * 7 % 19);
      targets.data<std::int32_t>()[i] = static_cast<std::int32_t>(i * 7 % 17);
    }
  }
  Tensor inputs = Tensor::empty({2, 8}, DType::i32), targets = Tensor::empty({2, 8}, DType::i32);
};

struct Gradients {
  double loss;
  std::vector<std::vector<float>> of;
  std::vector<std::string> ready;
  std::size_t peak;
};

Gradients one_pass(bool recompute) {
  Gpt2 model(small());
  allocate_parameters(model);
  init_parameters(model, 7);
  model.checkpoint_activations(recompute);
  Gradients result;
  Tape tape;
  tape.seed(42);
  ParameterHooks hooks;
  hooks.grad_ready = [&](Parameter& p, const Stream&) { result.ready.push_back(p.name); };
  for (Parameter* p : model.parameters()) p->hooks = &hooks;
  const Tokens tokens;
  const auto out = model.forward(tape, tokens.inputs, tokens.targets);
  result.loss = out.loss.read(tape.stream()).sum;
  tape.backward(out.loss.sum);
  for (const Parameter* p : model.parameters()) result.of.push_back(values(p->grad));
  result.peak = tape.pool().statistics().peak;
  return result;
}

TEST(ActivationCheckpoint, GradientsAreBitIdenticalAlsoWithDropout) {
  const Gradients plain = one_pass(false), again = one_pass(true);
  EXPECT_EQ(plain.loss, again.loss);
  EXPECT_EQ(plain.of, again.of);
  EXPECT_EQ(plain.ready, again.ready);
  EXPECT_EQ(plain.ready.size(), plain.of.size());
  EXPECT_LT(again.peak, plain.peak);
}

TEST(ActivationCheckpoint, NestsAndEntersScopes) {
  Parameter a = make("a", {2}, 2), b = make("b", {2}, 3);
  const Scope outer{"outer", {&a}}, inner{"inner", {&b}};
  Recorder record{&a, &b};
  Tape tape;
  const Var x = tape.variable(filled({2}, 5));
  const Var y = tape.checkpoint(outer, x, [&](Var in) {
    const Var scaled = nn::mul(tape, in, tape.parameter(a));
    return tape.checkpoint(inner, scaled, [&](Var v) { return nn::mul(tape, v, tape.parameter(b)); });
  });
  record.events.clear();
  tape.backward(total(tape, y));
  EXPECT_EQ(record.events,
            (std::vector<std::string>{"enter outer backward", "enter inner forward", "leave inner forward",
                                      "enter inner backward", "before b", "ready b", "leave inner backward",
                                      "before a", "ready a", "leave outer backward"}));
  EXPECT_EQ(values(tape.grad(x)), (std::vector<float>{6, 6}));
  EXPECT_EQ(values(a.grad), (std::vector<float>{15, 15}));
  EXPECT_EQ(values(b.grad), (std::vector<float>{10, 10}));
}

TEST(ActivationCheckpoint, AParameterIsReadyWhenItsUsesInsideHaveRunToo) {
  Parameter p = make("p", {2}, 2);
  const Scope scope{"scope", {&p}};
  Recorder record{&p};
  Tape tape;
  const Var x = tape.variable(filled({2}, 5));
  const Var y = tape.checkpoint(scope, x, [&](Var in) { return nn::mul(tape, in, tape.parameter(p)); });
  record.events.clear();
  tape.backward(total(tape, nn::mul(tape, y, tape.parameter(p))));
  EXPECT_EQ(record.events, (std::vector<std::string>{"before p", "enter scope backward", "ready p",
                                                     "leave scope backward"}));
  EXPECT_EQ(values(p.grad), (std::vector<float>{20, 20}));
}

TEST(ActivationCheckpoint, RandomNumbersGoOnAfterBackwardAsWithoutIt) {
  Parameter p = make("p", {2}, 1);
  const Scope scope{"scope", {&p}};
  const auto next = [&](bool recompute) {
    Tape tape;
    const auto body = [&](Var v) { return nn::dropout(tape, nn::mul(tape, v, tape.parameter(p)), 0.5f); };
    const Var x = tape.variable(filled({2}, 5));
    const Var once = recompute ? tape.checkpoint(scope, x, body) : body(x);
    tape.backward(total(tape, nn::dropout(tape, once, 0.5f)));
    return tape.next_dropout_mask(0.5f, 1).offset;
  };
  EXPECT_EQ(next(true), next(false));
}

void expect_no_allocation_from_the_third_pass_on(bool recompute, const LoraOptions& lora = {}) {
  Gpt2 model(small());
  if (!lora.target_modules.empty()) add_lora(model, lora);
  allocate_parameters(model);
  init_parameters(model, 7);
  model.checkpoint_activations(recompute);
  Tape tape;
  const Tokens tokens;
  std::size_t heap = 0, pool = 0;
  for (int pass = 0; pass < 5; ++pass) {
    heap = heap_allocations;
    pool = tape.pool().statistics().allocations;
    const auto out = model.forward(tape, tokens.inputs, tokens.targets);
    tape.backward(out.loss.sum);
    tape.reset();
    if (pass < 2) continue;
    EXPECT_EQ(heap_allocations - heap, 0u) << "pass " << pass;
    EXPECT_EQ(tape.pool().statistics().allocations - pool, 0u) << "pass " << pass;
  }
}

/// Batches whose lengths all differ.
TEST(Tape, MemoryIsBoundedForPassesThatDiffer) {
  Tape tape;
  std::size_t held = 0;
  for (std::size_t length = 1; length <= 200; ++length) {
    Var y = tape.variable(filled({length * 1000}, 0.5f));
    for (int i = 0; i < 3; ++i) y = nn::tanh(tape, y);
    tape.backward(total(tape, y));
    tape.reset();
    held = std::max(held, tape.pool().statistics().bytes);
  }
  EXPECT_LE(held, 3 * tape.pool().statistics().peak);
}

TEST(Tape, NothingIsAllocatedFromTheThirdPassOn) { expect_no_allocation_from_the_third_pass_on(false); }
TEST(ActivationCheckpoint, NothingIsAllocatedFromTheThirdPassOn) {
  expect_no_allocation_from_the_third_pass_on(true);
}
TEST(Lora, NothingIsAllocatedFromTheThirdPassOn) {
  for (const bool recompute : {false, true})
    expect_no_allocation_from_the_third_pass_on(
        recompute, {.target_modules = "all-linear", .r = 2, .lora_dropout = 0.1});
}

}  // namespace
}  // namespace rz
