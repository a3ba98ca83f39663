// Highway compiles this file once per target, without contraction to fused multiply-adds (see
// tensor/CMakeLists.txt). One loop serves all rules; a rule updates one vector.

#include "tensor/kernels/optimizer/optimizer.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tensor/kernels/optimizer/optimizer.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <cfloat>
#include <cmath>

#include "comm/core/math.h"
#include "tensor/kernels/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace rz {
namespace HWY_NAMESPACE {

using kernels::UpdateRun;
using HalfBits = hn::Rebind<std::uint16_t, Floats>;
using FloatBits = hn::RebindToUnsigned<Floats>;

// ---- loads and stores of a whole vector, f32, f16 or bf16

/// Highway's portable f16 conversions lose infinities and NaNs, so only AVX2 and later use them.
#if HWY_TARGET <= HWY_AVX2
HWY_INLINE FloatVector load_half(const f16* p) {
  const hn::Rebind<hwy::float16_t, Floats> half;
  return hn::PromoteTo(Floats(), hn::LoadU(half, reinterpret_cast<const hwy::float16_t*>(p)));
}
HWY_INLINE void store_half(FloatVector x, f16* p) {
  const hn::Rebind<hwy::float16_t, Floats> half;
  hn::StoreU(hn::DemoteTo(half, x), half, reinterpret_cast<hwy::float16_t*>(p));
}
#else
HWY_INLINE FloatVector load_half(const f16* p) {
  HWY_ALIGN float lanes[hn::MaxLanes(Floats())];
  for (std::size_t i = 0; i < hn::Lanes(Floats()); ++i) lanes[i] = to_f32(p[i]);
  return hn::Load(Floats(), lanes);
}
HWY_INLINE void store_half(FloatVector x, f16* p) {
  HWY_ALIGN float lanes[hn::MaxLanes(Floats())];
  hn::Store(x, Floats(), lanes);
  for (std::size_t i = 0; i < hn::Lanes(Floats()); ++i) p[i] = from_f32<f16>(lanes[i]);
}
#endif

HWY_INLINE FloatVector load_brain(const bf16* p) {
  const auto bits = hn::LoadU(HalfBits(), reinterpret_cast<const std::uint16_t*>(p));
  return hn::BitCast(Floats(), hn::ShiftLeft<16>(hn::PromoteTo(FloatBits(), bits)));
}

/// The arithmetic of detail::narrow_to_bf16.
HWY_INLINE void store_brain(FloatVector x, bf16* p) {
  const FloatBits d;
  const auto bits = hn::BitCast(d, x), high = hn::ShiftRight<16>(bits);
  const auto last = hn::And(high, hn::Set(d, 1u));
  const auto nearest = hn::ShiftRight<16>(hn::Add(bits, hn::Add(last, hn::Set(d, 0x7fffu))));
  const auto nan = hn::RebindMask(d, hn::IsNaN(x));
  const auto rounded = hn::IfThenElse(nan, hn::Or(high, hn::Set(d, 0x40u)), nearest);
  const auto whole = hn::BitCast(hn::RebindToSigned<FloatBits>(), rounded);  // below 2^16
  hn::StoreU(hn::DemoteTo(HalfBits(), whole), HalfBits(), reinterpret_cast<std::uint16_t*>(p));
}

HWY_INLINE FloatVector load_as(const void* p, DType t, std::size_t i) {
  if (t == DType::f32) return hn::LoadU(Floats(), static_cast<const float*>(p) + i);
  return t == DType::bf16 ? load_brain(static_cast<const bf16*>(p) + i)
                          : load_half(static_cast<const f16*>(p) + i);
}

HWY_INLINE void store_as(FloatVector x, void* p, DType t, std::size_t i) {
  if (t == DType::bf16)
    store_brain(x, static_cast<bf16*>(p) + i);
  else
    store_half(x, static_cast<f16*>(p) + i);
}

// ---- rules: `states` of them are read and written

/// NaN stays NaN.
HWY_INLINE FloatVector flush_subnormal(FloatVector x) {
  return hn::IfThenZeroElse(hn::Lt(hn::Abs(x), hn::Set(Floats(), FLT_MIN)), x);
}
HWY_INLINE FloatVector times(float a, FloatVector x) { return hn::Mul(hn::Set(Floats(), a), x); }

/// New m and v.
HWY_INLINE void adam_moments(const kernels::AdamFactors& f, FloatVector p, FloatVector g, FloatVector& m,
                             FloatVector& v) {
  g = hn::Add(times(f.scale, g), times(f.l2, p));
  m = flush_subnormal(hn::Add(times(f.beta1, m), times(f.rest1, g)));
  v = flush_subnormal(hn::Add(times(f.beta2, v), hn::Mul(times(f.rest2, g), g)));
}
HWY_INLINE FloatVector adam_step(const kernels::AdamFactors& f, FloatVector p, FloatVector m, FloatVector v) {
  const auto root = hn::Add(times(f.correction, hn::Sqrt(v)), hn::Set(Floats(), f.eps));
  return hn::Sub(times(f.keep, p), hn::Div(times(f.rate, m), root));
}

struct AdamRule {
  static constexpr int states = 2;
  kernels::AdamFactors f;
  HWY_INLINE void operator()(FloatVector& p, FloatVector g, FloatVector& m, FloatVector& v,
                             FloatVector&) const {
    adam_moments(f, p, g, m, v);
    p = adam_step(f, p, m, v);
  }
};

struct AmsgradRule {
  static constexpr int states = 3;
  kernels::AdamFactors f;
  HWY_INLINE void operator()(FloatVector& p, FloatVector g, FloatVector& m, FloatVector& v,
                             FloatVector& largest) const {
    adam_moments(f, p, g, m, v);
    // NaN in either stays.
    largest = hn::IfThenElse(hn::Or(hn::Gt(v, largest), hn::IsNaN(v)), v, largest);
    p = adam_step(f, p, m, largest);
  }
};

struct PlainSgdRule {
  static constexpr int states = 0;
  kernels::SgdFactors f;
  HWY_INLINE void operator()(FloatVector& p, FloatVector g, FloatVector&, FloatVector&, FloatVector&) const {
    p = hn::Sub(p, times(f.lr, hn::Add(times(f.scale, g), times(f.weight_decay, p))));
  }
};

template <bool nesterov>
struct MomentumRule {
  static constexpr int states = 1;
  kernels::SgdFactors f;
  HWY_INLINE void operator()(FloatVector& p, FloatVector g, FloatVector& buf, FloatVector&,
                             FloatVector&) const {
    g = hn::Add(times(f.scale, g), times(f.weight_decay, p));
    buf = flush_subnormal(hn::Add(times(f.momentum, buf), times(f.rest, g)));
    p = hn::Sub(p, times(f.lr, nesterov ? hn::Add(g, times(f.momentum, buf)) : buf));
  }
};

struct LionRule {
  static constexpr int states = 1;
  kernels::LionFactors f;
  HWY_INLINE void operator()(FloatVector& p, FloatVector g, FloatVector& m, FloatVector&,
                             FloatVector&) const {
    const Floats d;
    g = times(f.scale, g);
    const auto c = hn::Add(times(f.beta1, m), times(f.rest1, g)), zero = hn::Zero(d),
               rate = hn::Set(d, f.rate);
    // 0 and NaN stay as they are.
    const auto move =
        hn::IfThenElse(hn::Gt(c, zero), rate, hn::IfThenElse(hn::Lt(c, zero), hn::Neg(rate), c));
    p = hn::Sub(times(f.keep, p), move);
    m = flush_subnormal(hn::Add(times(f.beta2, m), times(f.rest2, g)));
  }
};

struct AdagradRule {
  static constexpr int states = 1;
  kernels::AdagradFactors f;
  HWY_INLINE void operator()(FloatVector& p, FloatVector g, FloatVector& s, FloatVector&,
                             FloatVector&) const {
    g = hn::Add(times(f.scale, g), times(f.l2, p));
    s = flush_subnormal(hn::Add(s, hn::Mul(g, g)));
    p = hn::Sub(p, hn::Div(times(f.rate, g), hn::Add(hn::Sqrt(s), hn::Set(Floats(), f.eps))));
  }
};

/// The buffer of the momentum is the state after those of the moments.
template <bool centered, bool momentum>
struct RmspropRule {
  static constexpr int states = 1 + centered + momentum;
  kernels::RmspropFactors f;
  HWY_INLINE void operator()(FloatVector& p, FloatVector g, FloatVector& s, FloatVector& second,
                             FloatVector& third) const {
    const Floats d;
    g = hn::Add(times(f.scale, g), times(f.l2, p));
    s = flush_subnormal(hn::Add(times(f.alpha, s), hn::Mul(times(f.rest, g), g)));
    auto variance = s;
    if constexpr (centered) {
      second = flush_subnormal(hn::Add(times(f.alpha, second), times(f.rest, g)));
      variance = hn::Sub(s, hn::Mul(second, second));
      variance = hn::IfThenZeroElse(hn::Lt(variance, hn::Zero(d)), variance);  // NaN stays
    }
    auto update = hn::Div(g, hn::Add(hn::Sqrt(variance), hn::Set(d, f.eps)));
    if constexpr (momentum) {
      FloatVector& buf = centered ? third : second;
      buf = flush_subnormal(hn::Add(times(f.momentum, buf), update));
      update = buf;
    }
    p = hn::Sub(p, times(f.rate, update));
  }
};

struct DecayedStepRule {
  static constexpr int states = 0;
  kernels::DecayedStepFactors f;
  HWY_INLINE void operator()(FloatVector& p, FloatVector g, FloatVector&, FloatVector&, FloatVector&) const {
    p = hn::Sub(times(f.keep, p), times(f.rate, times(f.scale, g)));
  }
};

HWY_INLINE FloatVector lamb_update(const kernels::LambFactors& f, FloatVector p, FloatVector m,
                                   FloatVector v) {
  const auto eps = hn::Set(Floats(), f.eps);
  const auto root = f.eps_inside_sqrt ? hn::Sqrt(hn::Add(v, eps)) : hn::Add(hn::Sqrt(v), eps);
  return hn::Add(hn::Div(m, root), times(f.weight_decay, p));
}

struct LambRule {
  static constexpr int states = 2;
  kernels::LambFactors f;
  HWY_INLINE void operator()(FloatVector& p, FloatVector, FloatVector& m, FloatVector& v,
                             FloatVector&) const {
    p = hn::Sub(p, times(f.rate, lamb_update(f, p, m, v)));
  }
};

/// Replaces the value by the direction.
template <bool nesterov>
struct MuonRule {
  static constexpr int states = 1;
  kernels::MuonFactors f;
  HWY_INLINE void operator()(FloatVector& direction, FloatVector g, FloatVector& m, FloatVector&,
                             FloatVector&) const {
    g = times(f.scale, g);
    m = flush_subnormal(hn::Add(times(f.beta, m), times(f.rest, g)));
    direction = nesterov ? hn::Add(times(f.rest, g), times(f.beta, m)) : m;
  }
};

// ---- the loop

/// `plain`: the gradients are f32, and there is no working copy.
template <bool plain, class Rule>
HWY_INLINE void update_vector(const UpdateRun& r, const Rule& rule, std::size_t i) {
  const Floats d;
  FloatVector p = hn::LoadU(d, r.value + i);
  FloatVector state0 = hn::Undefined(d), state1 = hn::Undefined(d), state2 = hn::Undefined(d);
  const FloatVector g = load_as(r.gradient, plain ? DType::f32 : r.gradient_dtype, i);
  if constexpr (Rule::states > 0) state0 = hn::LoadU(d, r.state0 + i);
  if constexpr (Rule::states > 1) state1 = hn::LoadU(d, r.state1 + i);
  if constexpr (Rule::states > 2) state2 = hn::LoadU(d, r.state2 + i);
  rule(p, g, state0, state1, state2);
  hn::StoreU(p, d, r.value + i);
  if constexpr (Rule::states > 0) hn::StoreU(state0, d, r.state0 + i);
  if constexpr (Rule::states > 1) hn::StoreU(state1, d, r.state1 + i);
  if constexpr (Rule::states > 2) hn::StoreU(state2, d, r.state2 + i);
  if (!plain && r.working) store_as(p, r.working, r.working_dtype, i);
}

/// Copies between a run and one that is a vector long.
template <class F>
HWY_INLINE void each_array(const UpdateRun& a, const UpdateRun& b, const F& f) {
  f(a.value, b.value, sizeof(float));
  if (a.state0) f(a.state0, b.state0, sizeof(float));
  if (a.state1) f(a.state1, b.state1, sizeof(float));
  if (a.state2) f(a.state2, b.state2, sizeof(float));
  if (a.working) f(a.working, b.working, size_of(a.working_dtype));
}

/// A run shorter than a vector, in padded memory.
template <bool plain, class Rule>
HWY_NOINLINE void update_rest(const UpdateRun& r, const Rule& rule) {
  HWY_ALIGN float padded[6][hn::MaxLanes(Floats())] = {};
  UpdateRun whole = r;
  whole.value = padded[0], whole.gradient = padded[1], whole.working = r.working ? padded[2] : nullptr;
  whole.state0 = r.state0 ? padded[3] : nullptr, whole.state1 = r.state1 ? padded[4] : nullptr;
  whole.state2 = r.state2 ? padded[5] : nullptr;
  std::memcpy(padded[1], r.gradient, r.count * size_of(r.gradient_dtype));
  each_array(r, whole,
             [&](const void* from, void* to, std::size_t size) { std::memcpy(to, from, r.count * size); });
  update_vector<plain>(whole, rule, 0);
  each_array(r, whole,
             [&](void* to, const void* from, std::size_t size) { std::memcpy(to, from, r.count * size); });
}

template <bool plain, class Rule>
HWY_INLINE void update_as(const UpdateRun& r, const Rule& rule) {
  const std::size_t lanes = hn::Lanes(Floats());
  std::size_t i = 0;
  for (; i + lanes <= r.count; i += lanes) update_vector<plain>(r, rule, i);
  if (i < r.count) update_rest<plain>(kernels::part_of(r, i, r.count), rule);
}

template <class Rule>
HWY_INLINE void update_all(const UpdateRun& r, const Rule& rule) {
  if (r.gradient_dtype == DType::f32 && !r.working)
    update_as<true>(r, rule);
  else
    update_as<false>(r, rule);
}

void adam_all(const UpdateRun& r, const kernels::AdamFactors& f) {
  if (r.state2)
    update_all(r, AmsgradRule{f});
  else
    update_all(r, AdamRule{f});
}
void lion_all(const UpdateRun& r, const kernels::LionFactors& f) { update_all(r, LionRule{f}); }
void adagrad_all(const UpdateRun& r, const kernels::AdagradFactors& f) { update_all(r, AdagradRule{f}); }
void sgd_all(const UpdateRun& r, const kernels::SgdFactors& f) {
  if (!r.state0)
    update_all(r, PlainSgdRule{f});
  else if (f.nesterov)
    update_all(r, MomentumRule<true>{f});
  else
    update_all(r, MomentumRule<false>{f});
}

void rmsprop_all(const UpdateRun& r, const kernels::RmspropFactors& f) {
  if (f.centered && r.state2)
    update_all(r, RmspropRule<true, true>{f});
  else if (f.centered)
    update_all(r, RmspropRule<true, false>{f});
  else if (r.state1)
    update_all(r, RmspropRule<false, true>{f});
  else
    update_all(r, RmspropRule<false, false>{f});
}

void decayed_step_all(const UpdateRun& r, const kernels::DecayedStepFactors& f) {
  update_all(r, DecayedStepRule{f});
}
void lamb_all(const UpdateRun& r, const kernels::LambFactors& f) { update_all(r, LambRule{f}); }
void muon_all(const UpdateRun& run, const kernels::MuonFactors& f, float* direction) {
  UpdateRun r = run;
  r.value = direction, r.working = nullptr;
  if (f.nesterov)
    update_all(r, MuonRule<true>{f});
  else
    update_all(r, MuonRule<false>{f});
}

// Sums eight columns of eight, adds these to four sums, then pairs. The order is explicit, so that it does
// not depend on the vector width.
void squares_all(const float* x, std::size_t blocks, double* out) {
  for (std::size_t b = 0; b < blocks; ++b, x += 64) {
    double column[8] = {};
    for (std::size_t row = 0; row < 64; row += 8)
      for (std::size_t j = 0; j < 8; ++j) {
        const double value = x[row + j];
        column[j] += value * value;
      }
    for (std::size_t j = 0; j < 4; ++j) column[j] += column[j + 4];
    out[b] = (column[0] + column[1]) + (column[2] + column[3]);
  }
}

void lamb_moments_all(const UpdateRun& r, const kernels::LambFactors& f, double* squares) {
  const Floats d;
  HWY_ALIGN float updates[64];
  for (std::size_t block = 0; block < r.count; block += 64, squares += 2) {
    for (std::size_t i = block; i < block + 64; i += hn::Lanes(d)) {
      const auto g = times(f.scale, load_as(r.gradient, r.gradient_dtype, i));
      const auto m = flush_subnormal(hn::Add(times(f.beta1, hn::LoadU(d, r.state0 + i)), times(f.rest1, g)));
      const auto v =
          flush_subnormal(hn::Add(times(f.beta2, hn::LoadU(d, r.state1 + i)), hn::Mul(times(f.rest2, g), g)));
      hn::StoreU(m, d, r.state0 + i), hn::StoreU(v, d, r.state1 + i);
      hn::Store(lamb_update(f, hn::LoadU(d, r.value + i), m, v), d, updates + (i - block));
    }
    squares_all(r.value + block, 1, squares);
    squares_all(updates, 1, squares + 1);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace rz
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace rz {

HWY_EXPORT(adam_all);
HWY_EXPORT(sgd_all);
HWY_EXPORT(lion_all);
HWY_EXPORT(adagrad_all);
HWY_EXPORT(rmsprop_all);
HWY_EXPORT(decayed_step_all);
HWY_EXPORT(lamb_all);
HWY_EXPORT(lamb_moments_all);
HWY_EXPORT(muon_all);
HWY_EXPORT(squares_all);

namespace kernels {

void adam(const UpdateRun& r, const AdamFactors& f) { HWY_DYNAMIC_DISPATCH(adam_all)(r, f); }
void sgd(const UpdateRun& r, const SgdFactors& f) { HWY_DYNAMIC_DISPATCH(sgd_all)(r, f); }
void lion(const UpdateRun& r, const LionFactors& f) { HWY_DYNAMIC_DISPATCH(lion_all)(r, f); }
void adagrad(const UpdateRun& r, const AdagradFactors& f) { HWY_DYNAMIC_DISPATCH(adagrad_all)(r, f); }
void rmsprop(const UpdateRun& r, const RmspropFactors& f) { HWY_DYNAMIC_DISPATCH(rmsprop_all)(r, f); }
void lamb(const UpdateRun& r, const LambFactors& f) { HWY_DYNAMIC_DISPATCH(lamb_all)(r, f); }
void decayed_step(const UpdateRun& r, const DecayedStepFactors& f) {
  HWY_DYNAMIC_DISPATCH(decayed_step_all)(r, f);
}

void lamb_moments(const UpdateRun& r, const LambFactors& f, double* squares) {
  HWY_DYNAMIC_DISPATCH(lamb_moments_all)(r, f, squares);
}

void muon_direction(const UpdateRun& r, const MuonFactors& f, float* direction) {
  HWY_DYNAMIC_DISPATCH(muon_all)(r, f, direction);
}

void sum_of_squares(const float* x, std::size_t blocks64, double* out) {
  HWY_DYNAMIC_DISPATCH(squares_all)(x, blocks64, out);
}

}  // namespace kernels
}  // namespace rz
#endif
