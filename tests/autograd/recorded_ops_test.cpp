// Every operator through the tape, a row each: its gradients against finite differences of its forward, of
// variables and of parameters, and gradients in f32 of parameters in 16 bits.

#include <cmath>
#include <functional>
#include <string_view>
#include <vector>

#include "autograd_lite/image_ops.h"
#include "autograd_lite/losses.h"
#include "autograd_lite/ops.h"
#include "tests/autograd/gradients.h"

namespace rz::nn {
namespace {

Var squared(Tape& tape, Var x) { return mul(tape, x, x); }

/// An operator, and the shapes of its inputs, all of which may be parameters.
struct Recorder {
  const char* name;
  std::vector<Shape> inputs;
  Operator run;
  double tolerance = 5e-3;
};

std::vector<Recorder> element_recorders() {
  std::vector<Recorder> all;
#define RZ_UNARY(name, saved, cast) \
  all.push_back({#name, {{3, 5}}, [](Tape& t, const auto& v) { return name(t, v[0]); }});
#define RZ_PARAMETRIC(name, saved, cast, parameter) \
  all.push_back({#name, {{3, 5}}, [](Tape& t, const auto& v) { return name(t, v[0], 0.75f); }});
#include "tensor/element_ops.inc"
#define RZ_BINARY(name) \
  all.push_back({#name, {{3, 5}, {5}}, [](Tape& t, const auto& v) { return name(t, v[0], v[1]); }});
#define RZ_COMPARISON(name)
#include "tensor/element_ops.inc"
  return all;
}

Tensor few_tokens() { return integers({2, 2}, {0, 2, 2, 1}); }

std::vector<Recorder> shape_recorders() {
  const Tensor tokens = few_tokens();
  return {{"gelu", {{3, 5}}, [](Tape& t, const auto& v) { return gelu(t, v[0]); }},
          {"swiglu", {{3, 5}, {3, 5}}, [](Tape& t, const auto& v) { return swiglu(t, v[0], v[1]); }},
          {"dropout", {{3, 5}}, [](Tape& t, const auto& v) { return dropout(t, v[0], 0.4f); }},
          {"softmax", {{3, 5}}, [](Tape& t, const auto& v) { return softmax(t, v[0]); }},
          {"log_softmax", {{3, 5}}, [](Tape& t, const auto& v) { return log_softmax(t, v[0]); }},
          {"clamp", {{3, 5}}, [](Tape& t, const auto& v) { return clamp(t, v[0], 0.5f, 1); }},
          {"neg", {{3, 5}}, [](Tape& t, const auto& v) { return neg(t, v[0]); }},
          {"affine", {{3, 5}}, [](Tape& t, const auto& v) { return sub(t, 2.0f, add(t, v[0], 1.0f)); }},
          {"contiguous", {{3, 5}}, [](Tape& t, const auto& v) { return contiguous(t, v[0]); }},
          {"cast", {{3, 5}}, [](Tape& t, const auto& v) { return cast(t, v[0], DType::f32); }},
          {"where",
           {{3, 5}, {5}},
           [](Tape& t, const auto& v) { return where(t, gt(t, v[0], 0.75f), v[0], v[1]); }},
          {"masked_fill",
           {{3, 5}},
           [](Tape& t, const auto& v) { return masked_fill(t, v[0], gt(t, v[0], 1), 2); }},
          {"sum", {{3, 5}}, [](Tape& t, const auto& v) { return sum(t, v[0]); }},
          {"mean", {{3, 5}}, [](Tape& t, const auto& v) { return mean(t, v[0], 0); }},
          {"expand",
           {{1, 5}},
           [](Tape& t, const auto& v) {
             return expand(t, v[0], {3, 5});
           }},
          {"reshape",
           {{3, 5}},
           [](Tape& t, const auto& v) {
             return reshape(t, v[0], {5, 3});
           }},
          {"permute",
           {{3, 5}},
           [](Tape& t, const auto& v) {
             return permute(t, v[0], {1, 0});
           }},
          {"cat",
           {{3, 5}, {2, 5}},
           [](Tape& t, const auto& v) {
             return cat(t, {v[0], v[1], v[0]}, 0);
           }},
          {"split",
           {{3, 5}},
           [](Tape& t, const auto& v) {
             return split(t, v[0], {2, 3}, 1)[1];
           }},
          {"select", {{3, 5}}, [](Tape& t, const auto& v) { return select(t, v[0], 0, 1); }},
          {"index_select", {{3, 5}}, [=](Tape& t, const auto& v) { return index_select(t, v[0], tokens); }},
          {"gather", {{3, 5}}, [](Tape& t, const auto& v) {
             return gather(t, v[0], integers({3}, {1, 4, 0}));
           }}};
}

std::vector<Recorder> matrix_recorders() {
  constexpr auto out_in = WeightLayout::out_in, in_out = WeightLayout::in_out;
  return {{"linear",
           {{2, 3, 5}, {4, 5}, {4}},
           [](Tape& t, const auto& v) { return linear(t, v[0], v[1], v[2], out_in); }},
          {"linear_aligned",
           {{3, 5}, {5, 4}},
           [](Tape& t, const auto& v) { return linear_aligned(t, v[0], v[1], in_out); }},
          {"activated",
           {{3, 5}, {4, 5}, {4}},
           [](Tape& t, const auto& v) { return activated(t, linear_gelu(t, v[0], v[1], v[2], out_in)); }},
          {"linear of an activation",
           {{3, 5}, {4, 5}, {4}, {2, 4}},
           [](Tape& t, const auto& v) {
             return linear(t, linear_gelu(t, v[0], v[1], v[2], out_in), v[3], Var(), out_in);
           }},
          {"activated of a parameter",
           {{3, 5}},
           [](Tape& t, const auto& v) {
             const Tensor out = t.empty({3, 5}, t.value(v[0]).dtype());
             ops::gelu(out, t.value(v[0]), t.stream());
             return activated(t, {v[0], out});
           }},
          {"linear_low_rank",
           {{3, 5}, {4, 5}, {4}, {2, 5}, {4, 2}},
           [](Tape& t, const auto& v) {
             return linear_low_rank(t, v[0], v[1], v[2], out_in, {v[0], v[3], v[4], 2});
           }},
          {"matmul",
           {{3, 5}, {5, 4}},
           [](Tape& t, const auto& v) { return matmul(t, v[0], false, v[1], false); }},
          {"matmul, transposed",
           {{5, 3}, {4, 5}},
           [](Tape& t, const auto& v) { return matmul(t, v[0], true, v[1], true); }},
          {"matmul, batched",
           {{2, 3, 5}, {2, 5, 4}},
           [](Tape& t, const auto& v) { return matmul(t, v[0], false, v[1], false); }},
          {"matmul, one factor", {{2, 3, 5}, {5, 4}}, [](Tape& t, const auto& v) {
             return matmul(t, v[0], false, v[1], false);
           }}};
}

std::vector<Recorder> token_recorders() {
  const Tensor tokens = few_tokens();
  return {
      {"layer_norm",
       {{3, 5}, {5}, {5}},
       [](Tape& t, const auto& v) { return layer_norm(t, v[0], v[1], v[2], 0.1f); }},
      {"add_layer_norm",
       {{3, 5}, {3, 5}, {5}, {5}},
       [](Tape& t, const auto& v) { return add_layer_norm(t, v[0], v[1], v[2], v[3], 0.1f).norm; }},
      {"rms_norm", {{3, 5}, {5}}, [](Tape& t, const auto& v) { return rms_norm(t, v[0], v[1], 0.1f); }},
      {"add_rms_norm",
       {{3, 5}, {3, 5}, {5}},
       [](Tape& t, const auto& v) { return add_rms_norm(t, v[0], v[1], v[2], 0.1f).norm; }},
      {"embedding", {{3, 5}}, [=](Tape& t, const auto& v) { return embedding(t, tokens, v[0]); }},
      {"embedding_with_positions",
       {{3, 5}, {2, 5}},
       [=](Tape& t, const auto& v) { return embedding_with_positions(t, tokens, v[0], v[1]); }},
      {"attention",
       {{1, 3, 8}, {1, 3, 4}, {1, 3, 4}},
       [](Tape& t, const auto& v) {
         return attention(t, v[0], v[1], v[2], {.heads = 2, .kv_heads = 1, .causal = true});
       }},
      {"causal_attention", {{1, 3, 12}}, [](Tape& t, const auto& v) { return causal_attention(t, v[0], 2); }},
      {"rotary", {{1, 3, 8}}, [](Tape& t, const auto& v) {
         return rotary(t, v[0], 2, ops::rotary_tables(4, 3));
       }}};
}

/// As if another rank had the first of two parts, of which all numbers are 1/4.
const std::function<Tensor(Tape&, const Tensor&)> second_of_two = [](Tape& t, const Tensor& x) {
  const Tensor all = t.empty({2, x.shape()[0], x.shape()[1]}, x.dtype());
  ops::fill(all, 0.25f, {});
  ops::copy(all.view(x.count(), x.shape()), x, {});
  return all;
};

std::vector<Recorder> loss_recorders() {
  const Tensor targets = integers({3}, {1, 4, -100}), later = integers({3}, {6, 2, -100});
  return {{"cross_entropy of a part",
           {{3, 5}},
           [=](Tape& t, const auto& v) {
             return cross_entropy(t, v[0], later, ClassPart{5, 10, 2, second_of_two}).sum;
           }},
          {"gather_classes",
           {{3, 5}},
           [](Tape& t, const auto& v) {
             return gather_classes(t, v[0], {5, 10, 2, second_of_two});
           }},
          {"cross_entropy",
           {{3, 5}},
           [=](Tape& t, const auto& v) { return cross_entropy(t, v[0], targets).sum; }},
          {"cross_entropy, smoothed",
           {{3, 5}},
           [=](Tape& t, const auto& v) { return cross_entropy(t, v[0], targets, ops::LabelLoss{0.1f}).sum; }},
          {"kl_div",
           {{3, 5}},
           [](Tape& t, const auto& v) {
             return kl_div(t, v[0], random({3, 5}, "y"), {.targets = ops::SoftLoss::logits}).sum;
           }},
          {"squared_error",
           {{3, 5}},
           [](Tape& t, const auto& v) {
             return squared_error(t, v[0], random({3, 5}, "y")).sum;
           }},
          {"mse",
           {{3, 5}},
           [](Tape& t, const auto& v) {
             return mse(t, v[0], t.value(cast(t, t.constant(random({3, 5}, "y")), t.value(v[0]).dtype())));
           }},
          {"a loss and a scalar", {{3, 5}, {1}}, [=](Tape& t, const auto& v) {
             return (0.5 * cross_entropy(t, v[0], targets) + v[1]).sum;
           }}};
}

std::vector<Recorder> image_recorders() {
  const ops::Pool2d pool{.kernel = {2, 2}, .stride = {1, 1}};
  return {{"conv2d",
           {{1, 2, 4, 4}, {3, 2, 3, 3}, {3}},
           [](Tape& t, const auto& v) { return conv2d(t, v[0], v[1], v[2]); }},
          {"conv2d by channel",
           {{1, 2, 4, 4}, {2, 1, 3, 3}},
           [](Tape& t, const auto& v) { return conv2d(t, v[0], v[1], Var(), {.groups = 2}); }},
          {"max_pool2d", {{1, 2, 4, 4}}, [=](Tape& t, const auto& v) { return max_pool2d(t, v[0], pool); }},
          {"avg_pool2d", {{1, 2, 4, 4}}, [=](Tape& t, const auto& v) { return avg_pool2d(t, v[0], pool); }},
          {"adaptive_avg_pool2d",
           {{1, 2, 4, 4}},
           [](Tape& t, const auto& v) {
             return adaptive_avg_pool2d(t, v[0], {2, 2});
           }},
          {"batch_norm",
           {{2, 3, 4}, {3}, {3}},
           [](Tape& t, const auto& v) { return batch_norm(t, v[0], v[1], v[2], {.epsilon = 0.1f}); }},
          {"group_norm", {{2, 4, 3}, {4}, {4}}, [](Tape& t, const auto& v) {
             return group_norm(t, v[0], 2, v[1], v[2], 0.1f);
           }}};
}

/// Inputs on both sides of 0, where operators differ from what they are beyond it.
std::vector<Recorder> of_both_signs() {
  const auto less = [](Tape& t, Var x) { return sub(t, x, 0.75f); };
  std::vector<Recorder> all{
      {"gelu of both signs", {{3, 5}}, [=](Tape& t, const auto& v) { return gelu(t, less(t, v[0])); }},
      {"swiglu of both signs",
       {{3, 5}, {3, 5}},
       [=](Tape& t, const auto& v) { return swiglu(t, less(t, v[0]), less(t, v[1])); }},
      {"softmax of both signs", {{3, 5}}, [=](Tape& t, const auto& v) { return softmax(t, less(t, v[0])); }},
      {"clamp of both signs",
       {{3, 5}},
       [=](Tape& t, const auto& v) { return clamp(t, less(t, v[0]), -0.25f, 0.125f); }},
      {"max_pool2d of numbers below 0", {{1, 1, 6, 5}}, [](Tape& t, const auto& v) {
         return max_pool2d(t, sub(t, v[0], 2.0f), {.kernel = {3, 2}, .stride = {2, 1}, .padding = {1, 1}});
       }}};
  const auto is_of_positive = [](std::string_view name) {
    return name == "log" || name == "sqrt" || name == "rsqrt" || name == "reciprocal" || name == "pow";
  };
#define RZ_UNARY(name, saved, cast) \
  if (!is_of_positive(#name))       \
    all.push_back(                  \
        {#name " of both signs", {{3, 5}}, [=](Tape& t, const auto& v) { return name(t, less(t, v[0])); }});
#define RZ_PARAMETRIC(name, saved, cast, parameter)                                \
  if (!is_of_positive(#name))                                                      \
    all.push_back({#name " of both signs", {{3, 5}}, [=](Tape& t, const auto& v) { \
                     return name(t, less(t, v[0]), 0.25f);                         \
                   }});
#include "tensor/element_ops.inc"
  return all;
}

/// Variants, and values of several uses.
std::vector<Recorder> more_elements() {
  return {
      {"mul by a number", {{3, 5}}, [](Tape& t, const auto& v) { return mul(t, v[0], -3); }},
      {"sub of a number", {{3, 5}}, [](Tape& t, const auto& v) { return sub(t, v[0], 2); }},
      {"div by a number", {{3, 5}}, [](Tape& t, const auto& v) { return div(t, v[0], 4); }},
      {"div of a number", {{3, 5}}, [](Tape& t, const auto& v) { return div(t, 2, v[0]); }, 2e-2},
      {"pow", {{3, 5}}, [](Tape& t, const auto& v) { return pow(t, v[0], 3); }},
      {"mul of one value", {{3, 4}}, [](Tape& t, const auto& v) { return mul(t, v[0], v[0]); }},
      {"swiglu of one value", {{3, 5}}, [](Tape& t, const auto& v) { return swiglu(t, v[0], v[0]); }},
      {"swiglu beside add",
       {{3, 5}, {3, 5}},
       [](Tape& t, const auto& v) { return add(t, swiglu(t, v[0], v[1]), add(t, v[0], v[1])); }},
      {"mul beside div",
       {{3, 4}, {4}},
       [](Tape& t, const auto& v) { return sub(t, mul(t, v[0], v[1]), div(t, v[0], v[1])); }},
      {"permute, negative",
       {{2, 3, 4, 5}},
       [](Tape& t, const auto& v) {
         return squared(t, permute(t, v[0], {-1, 0, -2, 1}));
       }},
      {"transpose", {{4, 5}}, [](Tape& t, const auto& v) { return transpose(t, v[0], 0, -1); }},
      {"cat along a negative dimension",
       {{2, 3, 4}, {2, 1, 4}, {2, 0, 4}},
       [](Tape& t, const auto& v) {
         return cat(t, {v[0], v[1], v[2], v[0]}, -2);
       }},
      {"cat beside its part",
       {{2, 3}},
       [](Tape& t, const auto& v) {
         return cat(t, {squared(t, v[0]), v[0]}, 0);
       }},
      {"narrow", {{3, 6, 2}}, [](Tape& t, const auto& v) { return narrow(t, v[0], 1, 2, 3); }},
      {"narrow of the last", {{3, 6, 2}}, [](Tape& t, const auto& v) { return narrow(t, v[0], -1, 1, 1); }},
      {"flatten", {{3, 4, 2, 5}}, [](Tape& t, const auto& v) { return squared(t, flatten(t, v[0], 1, 2)); }},
      {"index_select of numbers",
       {{4}},
       [](Tape& t, const auto& v) {
         return index_select(t, v[0], integers({2, 3}, {3, 1, 1, 0, 3, 3}));
       }},
      {"gather of matrices",
       {{2, 3, 5}},
       [](Tape& t, const auto& v) {
         return gather(t, v[0], integers({2, 3}, {0, 4, 2, 2, 1, 0}));
       }},
      // The second loss' backward runs first and must not overwrite the values that the first one's gelu
      // saved.
      {"cross_entropy of logits that others need", {{4, 5}}, [](Tape& t, const auto& v) {
         const Tensor targets = integers({4}, {0, 1, 2, 3});
         const Var logits = mul(t, v[0], 2);
         const Var side = cross_entropy(t, gelu(t, logits), targets).sum;
         return add(t, side, cross_entropy(t, logits, targets).sum);
       }}};
}

std::vector<Recorder> more_matrices() {
  std::vector<Recorder> all{{"linear_gelu and tanh",
                             {{2, 5}, {4, 5}},
                             [](Tape& t, const auto& v) {
                               return tanh(
                                   t, activated(t, linear_gelu(t, v[0], v[1], Var(), WeightLayout::out_in)));
                             }},
                            {"matmul, a transposed",
                             {{4, 3}, {4, 5}},
                             [](Tape& t, const auto& v) { return matmul(t, v[0], true, v[1], false); }},
                            {"matmul, b transposed",
                             {{3, 4}, {5, 4}},
                             [](Tape& t, const auto& v) { return matmul(t, v[0], false, v[1], true); }},
                            {"add_layer_norm and its sum",
                             {{3, 8}, {3, 8}, {8}, {8}},
                             [](Tape& t, const auto& v) {
                               const auto [sum, norm] = add_layer_norm(t, v[0], v[1], v[2], v[3], 1e-5f);
                               return add(t, mul(t, sum, sum), norm);
                             }},
                            {"add_rms_norm and its sum", {{3, 8}, {3, 8}, {8}}, [](Tape& t, const auto& v) {
                               const auto [sum, norm] = add_rms_norm(t, v[0], v[1], v[2], 1e-5f);
                               return add(t, mul(t, sum, sum), norm);
                             }}};
  for (const auto layout : {WeightLayout::in_out, WeightLayout::out_in}) {
    const auto weight = [&](std::size_t in, std::size_t out) {
      return layout == WeightLayout::in_out ? Shape{in, out} : Shape{out, in};
    };
    all.push_back({"linear in each layout", {{2, 3, 5}, weight(5, 4), {4}}, [=](Tape& t, const auto& v) {
                     return linear(t, v[0], v[1], v[2], layout);
                   }});
    all.push_back({"linear without a bias", {{2, 3, 5}, weight(5, 4)}, [=](Tape& t, const auto& v) {
                     return linear(t, v[0], v[1], Var(), layout);
                   }});
    all.push_back({"linear of a weight first", {weight(5, 4), {4}, {2, 3, 5}}, [=](Tape& t, const auto& v) {
                     return linear(t, v[2], v[0], v[1], layout);
                   }});
    all.push_back(
        {"two layers", {{2, 3, 5}, weight(5, 4), {4}, weight(4, 2), {2}}, [=](Tape& t, const auto& v) {
           return linear(t, linear_gelu(t, v[0], v[1], v[2], layout), v[3], v[4], layout);
         }});
    all.push_back(
        {"linear_low_rank", {{2, 3, 5}, weight(5, 4), {4}, {2, 5}, {4, 2}}, [=](Tape& t, const auto& v) {
           return linear_low_rank(t, v[0], v[1], v[2], layout, {v[0], v[3], v[4], 0.75f});
         }});
    all.push_back({"linear_low_rank of another value, without a bias",
                   {{2, 3, 5}, weight(5, 4), {2, 3, 5}, {2, 5}, {4, 2}},
                   [=](Tape& t, const auto& v) {
                     return linear_low_rank(t, v[0], v[1], Var(), layout, {v[2], v[3], v[4], 3});
                   }});
  }
  return all;
}

std::vector<Recorder> more_attention() {
  const RotaryTables tables = ops::rotary_tables(4, 9);
  std::vector<Recorder> all{
      {"causal_attention, dropped",
       {{2, 4, 3 * 6}},
       [](Tape& t, const auto& v) { return causal_attention(t, v[0], 2, 0.5f); }},
      {"attention of two values",
       {{1, 3, 4}, {1, 4, 4}},
       [](Tape& t, const auto& v) { return attention(t, v[0], v[1], v[1], {.heads = 2}); }},
      {"attention of one value",
       {{1, 3, 4}},
       [](Tape& t, const auto& v) { return attention(t, v[0], v[0], v[0], {.heads = 2}); }},
      {"rotary after 5",
       {{2, 3, 2 * 5}},
       [=](Tape& t, const auto& v) { return rotary(t, v[0], 2, tables, 5); }},
      {"rotary at positions", {{2, 3, 2 * 4}}, [=](Tape& t, const auto& v) {
         return rotary(t, v[0], 2, tables, 0, integers({2, 3}, {8, 0, 3, 1, 1, 7}));
       }}};
  AttentionOptions grouped{.heads = 4, .kv_heads = 2}, cached = grouped;
  cached.causal = true, cached.past = 1, cached.window = 2, cached.keys = 4, cached.scale = 0.7f;
  cached.key_counts = integers({2}, {4, 2});
  AttentionOptions documents = cached;
  documents.window = 0, documents.key_counts = {};
  documents.document_starts = integers({2, 3}, {0, 1, 3, 1, 2, 2});
  for (const AttentionOptions& options : {grouped, cached, documents})
    for (const float dropout : {0.0f, 0.4f})
      all.push_back(
          {"attention with options",
           {{2, 3, 4 * 3}, {2, 5, 2 * 3}, {2, 5, 2 * 3}},
           [=](Tape& t, const auto& v) { return attention(t, v[0], v[1], v[2], options, dropout); }});
  return all;
}

std::vector<Recorder> more_images() {
  struct Case {
    Shape x, weight;
    ops::Conv2d options;
  };
  std::vector<Recorder> all;
  for (const Case& c : {Case{{2, 3, 5, 6}, {4, 3, 3, 2}, {.stride = {2, 1}, .padding = {1, 0}}},
                        Case{{1, 4, 7, 5}, {2, 2, 3, 3}, {.padding = 1, .dilation = {2, 1}, .groups = 2}},
                        Case{{2, 3, 4, 4}, {6, 1, 3, 3}, {.stride = 2, .padding = 1, .groups = 3}},
                        Case{{2, 3, 4, 3}, {2, 3, 1, 1}, {}}}) {
    all.push_back({"conv2d with options", {c.x, c.weight, {c.weight[0]}}, [=](Tape& t, const auto& v) {
                     return conv2d(t, v[0], v[1], v[2], c.options);
                   }});
    all.push_back({"conv2d without a bias", {c.x, c.weight}, [=](Tape& t, const auto& v) {
                     return conv2d(t, v[0], v[1], {}, c.options);
                   }});
  }
  const ops::Pool2d pool{.kernel = {3, 2}, .stride = {2, 1}, .padding = {1, 1}};
  all.push_back({"max_pool2d, padded", {{1, 1, 6, 5}}, [=](Tape& t, const auto& v) {
                   return max_pool2d(t, v[0], pool);
                 }});
  all.push_back({"avg_pool2d, padded", {{2, 2, 5, 4}}, [=](Tape& t, const auto& v) {
                   return avg_pool2d(t, v[0], pool);
                 }});
  all.push_back({"adaptive_avg_pool2d, uneven", {{2, 2, 5, 4}}, [](Tape& t, const auto& v) {
                   return adaptive_avg_pool2d(t, v[0], {2, 3});
                 }});
  const ops::RunningStatistics running{random({4}, "mean"), Tensor::empty({4}), {}};
  std::fill_n(running.variance.data<float>(), 4, 0.5f);
  for (const Shape& shape : {Shape{3, 4, 3, 2}, Shape{6, 4}, Shape{2, 4, 5}}) {
    const std::vector<Shape> inputs{shape, {4}, {4}};
    all.push_back({"batch_norm of 4 channels", inputs, [](Tape& t, const auto& v) {
                     return batch_norm(t, v[0], v[1], v[2], {.epsilon = 0.1f});
                   }});
    all.push_back({"batch_norm, not training", inputs, [=](Tape& t, const auto& v) {
                     return batch_norm(t, v[0], v[1], v[2], {.running = running, .training = false});
                   }});
    for (const std::size_t groups : {1, 2})
      all.push_back({"group_norm of 4 channels", inputs,
                     [=](Tape& t, const auto& v) { return group_norm(t, v[0], groups, v[1], v[2], 0.1f); }});
  }
  return all;
}

/// From 1/4 to 5/4, as all types have them: different, as long as there are at most 32, by more than a step
/// of the differences, which crosses no kink.
std::vector<Tensor> inputs_of(const Recorder& of, DType dtype) {
  std::vector<Tensor> all;
  for (const Shape& shape : of.inputs) {
    const Tensor x = Tensor::empty(shape);
    const float part = 0.25f * static_cast<float>(all.size() % 3 + 1);
    for (std::size_t i = 0; i < x.count(); ++i)
      x.data<float>()[i] = 0.25f + (static_cast<float>((i * 37 + i / 32 * 5) % 32) + part) / 32;
    all.push_back(Tensor::empty(shape, dtype));
    ops::copy(all.back(), x, {});
  }
  return all;
}

void backward_of(const Recorder& of, Tape& tape, const std::vector<Var>& inputs) {
  Var loss;
  weighed(tape, cast(tape, of.run(tape, inputs), DType::f32), &loss);
  tape.backward(loss);
}

void expect_wider(const Recorder& of, DType dtype) {
  SCOPED_TRACE(concat(of.name, " of ", name(dtype)));
  const std::vector<Tensor> inputs = inputs_of(of, dtype);
  Tape tape;
  std::vector<Var> vars;
  for (const Tensor& t : inputs) vars.push_back(tape.variable(t));
  backward_of(of, tape, vars);
  std::vector<Tensor> expected;
  for (const Var v : vars) {
    expected.push_back(Tensor::empty(tape.grad(v).shape()));
    ops::copy(expected.back(), tape.grad(v), {});
  }
  for (const bool fresh : {false, true}) {  // of the first; the others are the reverse
    tape.reset();
    std::vector<Parameter> parameters(inputs.size());
    for (std::size_t k = 0; k < inputs.size(); ++k) {
      Parameter& p = parameters[k];
      p.name = concat(of.name, k), p.shape = inputs[k].shape(), p.value = inputs[k];
      p.grad = Tensor::empty(p.shape);
      std::fill_n(p.grad.data<float>(), p.count(), 0.5f);
      p.grad_is_fresh = fresh == (k == 0);
      vars[k] = tape.parameter(p);
    }
    ASSERT_NO_THROW(backward_of(of, tape, vars));
    for (std::size_t k = 0; k < inputs.size(); ++k)
      for (std::size_t i = 0; i < inputs[k].count(); ++i) {
        const double wanted = expected[k].data<float>()[i], offset = fresh == (k == 0) ? 0 : 0.5;
        ASSERT_NEAR(parameters[k].grad.data<float>()[i] - offset, wanted, 0x1p-6 * (1 + std::abs(wanted)))
            << "input " << k << ", element " << i;
      }
  }
}

/// One of the gradients of weight and bias is added to and the other one overwritten.
std::vector<Recorder> weights_first() {
  return {{"layer_norm of a weight first",
           {{8}, {8}, {3, 8}},
           [](Tape& t, const auto& v) { return layer_norm(t, v[2], v[0], v[1], 1e-5f); }},
          {"rms_norm of a weight first",
           {{8}, {3, 8}},
           [](Tape& t, const auto& v) { return rms_norm(t, v[1], v[0], 1e-5f); }},
          {"conv2d of a weight first",
           {{3, 2, 3, 3}, {3}, {1, 2, 4, 4}},
           [](Tape& t, const auto& v) { return conv2d(t, v[2], v[0], v[1]); }},
          {"batch_norm of a weight first",
           {{3}, {3}, {2, 3, 4}},
           [](Tape& t, const auto& v) { return batch_norm(t, v[2], v[0], v[1], {.epsilon = 0.1f}); }},
          {"group_norm of a weight first", {{4}, {4}, {2, 4, 3}}, [](Tape& t, const auto& v) {
             return group_norm(t, v[2], 2, v[0], v[1], 0.1f);
           }}};
}

std::vector<Recorder> recorders() {
  std::vector<Recorder> all;
  for (const auto& list : {element_recorders(), shape_recorders(), matrix_recorders(), token_recorders(),
                           loss_recorders(), image_recorders()})
    all.insert(all.end(), list.begin(), list.end());
  return all;
}

TEST(RecordedOps, HaveTheGradientsOfTheirDifferences) {
  std::vector<Recorder> all = recorders();
  for (const auto& list :
       {of_both_signs(), more_elements(), more_matrices(), more_attention(), more_images(), weights_first()})
    all.insert(all.end(), list.begin(), list.end());
  for (const Recorder& of : all) {
    SCOPED_TRACE(of.name);
    expect_gradients(of.run, inputs_of(of, DType::f32), of.tolerance);
  }
}

TEST(RecordedOps, GradientsOfParametersMayBeWider) {
  for (const Recorder& of : recorders())
    for (const DType dtype : {DType::bf16, DType::f16}) expect_wider(of, dtype);
}

}  // namespace
}  // namespace rz::nn
