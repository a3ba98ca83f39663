#include "tests/operators/operator.h"

#include <hwy/targets.h>

#include <algorithm>
#include <cmath>
#include <cstring>

namespace rz::test {

using ops::Into;

Values units(std::size_t n, unsigned seed) {
  Values values = random_values(n, seed, 1.5);
  for (double& v : values) v = std::round(v);
  return values;
}

void each_target(const std::function<void()>& f) {
  if (tested_device.kind != Device::host) return f();
  const auto use = [](std::int64_t targets) {
    hwy::SetSupportedTargetsForTest(targets);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  };
  for (std::int64_t rest = hwy::SupportedTargets() & HWY_TARGETS; rest != 0; rest &= rest - 1) {
    SCOPED_TRACE(hwy::TargetName(rest & -rest));
    use(rest & -rest);
    f();
  }
  use(0);
}

Values moved(const Values& x, const std::vector<std::size_t>& places) {
  Values out;
  for (const std::size_t p : places) out.push_back(x[p]);
  return out;
}

Values moved_back(const Values& d_out, const std::vector<std::size_t>& places, std::size_t n) {
  Values d(n);
  for (std::size_t i = 0; i < places.size(); ++i) d[places[i]] += d_out[i];
  return d;
}

Tensor Operators::place(const Values& values, const Shape& shape, DType t, std::size_t shift) const {
  Values shifted(shift, NAN);
  shifted.insert(shifted.end(), values.begin(), values.end());
  return to_device(shifted, {shifted.size()}, t, stream).view(shift, shape);
}

Values Operators::sum_of(const Values& a, const Values& b) const {
  Values sum = a;
  for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += b[i];
  return rounded(sum);
}

void Operators::expect_close(DType t, const Values& values, const Values& expected, const Bound& bound,
                             const std::string& what) const {
  ASSERT_EQ(values.size(), expected.size()) << what;
  const bool exact = bound.of_largest == 0 && bound.of_each == 0 && bound.absolute == 0;
  const Values bits = exact ? get(place(expected, {expected.size()}, t)) : Values();
  double max = 1e-30;
  for (const double e : expected) max = std::max(max, std::abs(e));
  for (std::size_t i = 0; i < values.size(); ++i) {
    const double size = std::abs(expected[i]);
    const double error = bound.of_largest * max + bound.of_each * size + bound.absolute;
    const double wanted = exact ? bits[i] : expected[i];
    if (exact && (values[i] == wanted || (std::isnan(values[i]) && std::isnan(wanted)))) continue;
    ASSERT_LE(std::abs(values[i] - wanted),
              exact ? 0 : error + rounding_of(t) * (size + error) + smallest_of(t))
        << what << " in " << name(t) << ": element " << i << " is " << values[i] << ", expected " << wanted;
  }
}

namespace {

/// The gradient of <value, d_out> by central differences.
Values differences(const Operator& op, const Gradient& g, std::vector<Values> in, const Values& d_out) {
  const Values x = in[g.of];
  Values gradient(x.size());
  const std::size_t steps = g.reach.element ? g.reach.steps : x.size();
  const auto step_at = [&](std::size_t i) { return 1e-5 * std::max(std::abs(x[i]), 0.1); };
  for (std::size_t k = 0; k < steps; ++k) {
    const auto element = [&](std::size_t o) { return g.reach.element ? g.reach.element(o, k) : k; };
    const auto moved = [&](double sign) {
      in[g.of] = x;
      for (std::size_t o = 0; o < d_out.size(); ++o)
        in[g.of][element(o)] = x[element(o)] + sign * step_at(element(o));
      return op.value(in);
    };
    const Values above = moved(1), below = moved(-1);
    for (std::size_t o = 0; o < d_out.size(); ++o)
      gradient[element(o)] += (above[o] - below[o]) / (2 * step_at(element(o))) * d_out[o];
  }
  return gradient;
}

/// Whether all these are the same bits, where NaN is equal to NaN.
bool same_bits(const std::vector<Values>& a, const std::vector<Values>& b) {
  return std::ranges::equal(a, b, [](const Values& x, const Values& y) {
    return x.size() == y.size() &&
           (x.empty() || std::memcmp(x.data(), y.data(), x.size() * sizeof(double)) == 0);
  });
}

/// The gradient by its formula, which differences confirm in f32 where the input is small and finite; without
/// a formula the differences. A call whose value was the last one's has its gradient.
void find_gradient(Values& gradient, const Operator& op, const Gradient& g, const std::vector<Values>& in,
                   const Values& out, const Values& last_out, const Values& d_out, DType dtype) {
  if (!gradient.empty() && (!g.formula || same_bits({out}, {last_out}))) return;
  gradient = g.formula ? g.formula(in, out, d_out) : differences(op, g, in, d_out);
  const Values& x = in[g.of];
  const auto finite = [](double v) { return std::isfinite(v); };
  if (!g.formula || dtype != DType::f32 || x.size() > 300 || out.size() > 3000) return;
  if (!std::ranges::all_of(x, finite)) return;
  const Values by_differences = differences(op, g, in, d_out);
  double largest = 1e-30;
  for (const double d : by_differences) largest = std::max(largest, std::abs(d));
  for (std::size_t i = 0; i < by_differences.size(); ++i)
    ASSERT_NEAR(gradient[i], by_differences[i], 2e-6 * largest + 1e-8)
        << "formula of the gradient of input " << g.of << ": " << i;
}

}  // namespace

/// How the tensors of a call lie in memory.
struct Operators::Way {
  const char* name;
  std::size_t shift;  ///< which inputs are shifted: bit k for input k
  std::size_t by;     ///< elements
  std::size_t gap;    ///< NaN between rows
  Into into;
  bool in_place;
};

/// Found so far, of the value `at`.
struct Operators::Gradients {
  std::vector<Values> of;
  Values at;
};

/// Tensors between NaN, which nobody writes.
struct Operators::Places {
  const Operators& test;
  std::size_t gap;
  std::vector<std::pair<Tensor, std::size_t>> wholes = {};

  Tensor operator()(const Values& values, const Shape& shape, DType t, std::size_t shift) {
    if (gap == 0 || shape.dims() < 2 || values.empty()) return test.place(values, shape, t, shift);
    const std::size_t columns = shape[-1], stride = columns + gap + wholes.size();
    Values all(values.size() / columns * stride, NAN);
    for (std::size_t i = 0; i < values.size(); ++i) all[i / columns * stride + 1 + i % columns] = values[i];
    wholes.emplace_back(to_device(all, shape.with_last(stride), t, test.stream), columns);
    return wholes.back().first.columns(1, columns);
  }
  void expect_gaps() const {
    for (const auto& [whole, columns] : wholes) {
      const Values all = test.get(whole);
      for (std::size_t i = 0; i < all.size(); ++i) {
        const std::size_t j = i % whole.shape()[-1];
        ASSERT_TRUE((j > 0 && j <= columns) || std::isnan(all[i])) << "between rows: " << i;
      }
    }
  }
};

void Operators::call(const Operator& op, const Way& way, const std::vector<Values>& in, const Values& out,
                     const Values& d_out, Gradients& gradients, std::vector<Values>& results) {
  SCOPED_TRACE(way.name);
  Places put{*this, way.gap};
  const auto shift = [&](std::size_t k) { return (way.shift >> k) % 2 * way.by; };
  const DType out_type = op.f32_out ? DType::f32 : dtype;
  Operands o{.stream = stream, .in = {}, .kept = {}, .out = {}, .d_out = {}};
  for (std::size_t k = 0; k < in.size(); ++k)
    o.in.push_back(put(in[k], op.in[k].shape, op.in[k].f32 ? DType::f32 : dtype, shift(k)));
  for (const Kept& k : op.kept) o.kept.push_back(statistics(k.shape, k.type));
  o.out = put(Values(out.size(), NAN), op.out, out_type, shift(1));
  if (op.slope == 0) o.d_out = put(d_out, op.out, out_type, shift(0));
  const auto expect = [&](const Tensor& got, const Values& expected, const Bound& bound,
                          const std::string& what) {
    results.push_back(get(got));
    expect_close(got.dtype(), results.back(), expected, bound, what);
  };
  op.forward(o);
  expect(o.out, out, op.bound, "value");
  const Values stored_out = results.back();
  for (std::size_t k = 0; k < op.gradients.size() && !HasFatalFailure(); ++k) {
    const Gradient& g = op.gradients[k];
    const std::string what = concat("gradient of input ", g.of);
    Values& gradient = gradients.of[k];
    find_gradient(gradient, op, g, in, stored_out, gradients.at, d_out, dtype);
    if (HasFatalFailure()) return;
    if (way.in_place) {
      if (g.alias == Alias::none) continue;
      // Another call may need what this one overwrites.
      Operands own = o;
      Tensor& target = g.alias == Alias::d_out ? own.d_out : own.in[g.of];
      target = put(get(target), target.shape(), target.dtype(), 0);
      g.backward(own, target, Into::overwrite);
      expect(target, gradient, g.bound, what);
      continue;
    }
    const Into into = g.adds ? way.into : Into::overwrite;
    for (const DType t : {dtype, DType::f32}) {
      if (t == DType::f32 ? t != dtype && !g.parameter : g.f32_alone) continue;
      const Values before = random_values(gradient.size(), 99);
      const Tensor d =
          put(into == Into::accumulate ? before : Values(before.size(), NAN), op.in[g.of].shape, t, shift(0));
      Values expected = into == Into::accumulate ? get(d) : Values(before.size());
      for (std::size_t i = 0; i < expected.size(); ++i) expected[i] += gradient[i];
      g.backward(o, d, into);
      Bound bound = g.bound;  // before is at most 1, so the gradient at most 1 more than the sum
      if (into == Into::accumulate) bound.absolute += bound.of_each;
      expect(d, expected, bound, what);
      if (t == DType::f32) break;
    }
  }
  gradients.at = stored_out;
  if (way.in_place && op.in_place) {
    o.out = o.in[0];
    op.forward(o);
    expect(o.out, out, op.bound, "value in place");
  }
  put.expect_gaps();
}

void Operators::expect_right(const Operator& op) {
  SCOPED_TRACE(op.name);
  bool in_place = op.in_place;
  for (const Gradient& g : op.gradients) in_place = in_place || g.alias != Alias::none;
  std::vector<Way> ways{{"aligned", 0, 0, 0, Into::overwrite, false},
                        {"shifted", ~std::size_t{0}, 1, 0, Into::accumulate, false}};
  if (op.in.size() > 1 && (on_host() || op.gradients.empty()))
    ways.push_back({"mixed", 5, 4, 0, Into::overwrite, false});
  if (op.strides) ways.push_back({"strided", 0, 0, 3, Into::accumulate, false});
  if (in_place) ways.push_back({"in place", 0, 0, op.strides ? std::size_t{3} : 0, Into::overwrite, true});
  std::vector<Values> in, first;
  Gradients gradients{std::vector<Values>(op.gradients.size()), {}};
  for (const Input& i : op.in)
    in.push_back(get(place(i.values, {i.values.size()}, i.f32 ? DType::f32 : dtype)));
  const Values out = op.value(in), d_out = op.slope != 0    ? Values(out.size(), op.slope)
                                           : op.unit_slopes ? units(out.size(), 4)
                                                            : random(out.size(), 4);
  const std::vector<std::uint64_t> seeds =
      on_host() ? std::vector<std::uint64_t>{3, 2} : std::vector<std::uint64_t>{1};
  for (const std::uint64_t seed : seeds) {  // of the host: 1 thread, and 3
    reschedule(seed);
    std::vector<Values> results;
    for (const Way& way : ways) {
      call(op, way, in, out, d_out, gradients, results);
      if (HasFatalFailure()) return;
    }
    if (op.bits_of_threads && !first.empty()) {
      EXPECT_TRUE(same_bits(results, first)) << "the bits depend on the threads";
    }
    first = std::move(results);
  }
}

}  // namespace rz::test
