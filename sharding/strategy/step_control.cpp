#include "sharding/strategy/step_control.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <utility>

#include "comm/core/error.h"
#include "comm/device/allocate.h"
#include "comm/device/memory.h"
#include "comm/device/meta.h"
#include "tensor/kernels/device_ops.h"
#include "tensor/loss_ops.h"
#include "tensor/ops.h"

namespace rz {

// ---- settings

void UpdateSettings::set_expected_terms(double terms) {
  require(terms > 0 && std::isfinite(terms), Errc::invalid_argument, "set_expected_terms(", terms,
          "): the number must be positive and finite");
  expected_terms_ = terms;
}

void UpdateSettings::set_loss_scale(double scale) {
  require(scale > 0 && std::isfinite(scale), Errc::invalid_argument, "set_loss_scale(", scale,
          "): the factor must be positive and finite");
  loss_scale_ = scale;
}

void UpdateSettings::set_policy(const Policy& policy) {
  require(policy.max_norm >= 0, Errc::invalid_argument, "clip_and_step(): max_norm is ", policy.max_norm,
          ", expected 0 (none) or more");
  policy_ = policy;
}

float UpdateSettings::loss_gradient(int ranks) const {
  return static_cast<float>(loss_scale_ * ranks / expected_terms_);
}

StepLimits UpdateSettings::limits() const {
  return {policy_.max_norm, loss_scale_, policy_.skip_overflow, expected_terms_};
}

// ---- weights of losses

void LossTerms::require_may_follow(bool has_terms, bool same_micro_batch) const {
  require(!(has_terms && same_micro_batch && by_scalar_), Errc::invalid_argument,
          "backward() of a loss a with terms after a loss b without, in one micro-batch: b has entered with "
          "weight 1, not with the terms of a; propagate a before b, or their sum, a + b");
}

const Tensor& LossTerms::one(const Stream& stream) {
  if (one_.defined()) return one_;
  constexpr double sum_count[] = {0, 1};
  one_ = Tensor::empty({2}, DType::f64, allocator_on(stream.device()));
  one_.assign(std::span<const double>(sum_count), stream);
  return one_;
}

Tensor LossTerms::ratio(const Tensor& sum_count, const Tensor& floats, const Tensor& sums,
                        const Stream& stream) {
  if (!weight_.defined()) return {};
  const Tensor ratio = floats.view(0, {});
  ops::add_losses(floats.view(1, {}), sums, ratio, weight_, sum_count.defined() ? sum_count : one(stream),
                  stream);
  return ratio;
}

void LossTerms::count(const Tensor& sum_count, const Stream& stream) {
  weight_ = sum_count;
  by_scalar_ = !sum_count.defined();
  begin(by_scalar_ ? Counted::scalars : Counted::terms, stream);
  add(by_scalar_ ? one(stream) : sum_count, stream);
}

void LossTerms::begin(Counted counted, const Stream& stream) {
  const bool first = counted_ == Counted::nothing;
  counted_ = std::max(counted_, counted);
  if (!first) return;
  if (stream.device().kind == Device::host) {
    sum_ = {};
    return;
  }
  if (!words_.defined())
    words_ = Tensor::empty({ExactLayout::words}, DType::i64, allocator_on(stream.device()));
  memset_async(words_.raw(), 0, words_.bytes(), stream);
}

void LossTerms::add(const Tensor& sum_count, const Stream& stream) {
  const double* const count = sum_count.data<double>() + 1;
  if (stream.device().kind == Device::host)
    sum_.add(*count);
  else
    ops::device_ops().optimizer.add_exact(words_.data<std::int64_t>(), count, stream);
}

void LossTerms::check(const Tensor& value, const Stream& stream) {
  if (is_meta(value.device()) || value.count() != 1) return;  // Tape::backward() refuses other shapes
  if (stream.device().kind == Device::host) {
    float loss = 0;
    ops::copy(Tensor::borrow(&loss, value.shape()), value, stream);
    finite_ = finite_ && std::isfinite(loss);
    return;
  }
  if (!checked_.defined())
    checked_ = Tensor::empty({norm_block + 1}, DType::f32, allocator_on(stream.device()));
  if (!std::exchange(checks_, true)) memset_async(checked_.raw(), 0, checked_.bytes(), stream);
  const Tensor sum = checked_.view(0, {}), product = checked_.view(norm_block, {});
  ops::copy(product.reshape(value.shape()), value, stream);
  ops::scale(product, product, 0, stream);
  ops::binary(sum, sum, product, ops::Binary::add, stream);
}

void LossTerms::add_not_finite(SquareSum& sum) const {
  if (checks_) sum.add(checked_.view(0, {norm_block}));
}

void LossTerms::add_ones(std::int64_t micro_batches, const Stream& stream) {
  begin(Counted::scalars, stream);
  for (std::int64_t m = 0; m < micro_batches; ++m) add(one(stream), stream);
}

void LossTerms::add_none(const Stream& stream) { begin(Counted::terms, stream); }

void LossTerms::reset() {
  counted_ = Counted::nothing;
  weight_ = {};
  by_scalar_ = false;
  finite_ = true;
  checks_ = false;
}

ExactSum LossTerms::read(const Stream& stream) const {
  if (counted_ == Counted::nothing || stream.device().kind == Device::host)
    return counted_ == Counted::nothing ? ExactSum() : sum_;
  const Tensor words = words_.on_host(stream);
  ExactSum sum;
  sum.add(std::span<const std::int64_t, ExactLayout::words>(words.data<std::int64_t>(), ExactLayout::words));
  return sum;
}

void LossTerms::copy_to(const Tensor& words, const Stream& stream) const {
  memcpy_async(words.raw(), words_.raw(), words_.bytes(), stream);
}

// ---- control

StepControl::StepControl(const ShardedModel& model, Runtime& runtime) : model_(model), runtime_(runtime) {}

/// Sums in pairwise order are not divided by the number of ranks.
float StepControl::loss_gradient() const {
  const bool sums = model_.options().pairwise_passes > 0;
  return settings_.loss_gradient(sums ? 1 : runtime_.data.size());
}

void StepControl::write_settings(const Stream& stream) {
  const DeviceSettings now{settings_.limits(), loss_gradient()};
  if (written_ == now) return;
  require(!stream.capturing(), Errc::invalid_argument,
          "loss scale, expected terms or policy changed in an update that is captured in a graph; call "
          "next_update() after a change");
  if (!device_settings_.defined())
    device_settings_ = Tensor::empty({sizeof now}, DType::u8, allocator_on(stream.device()));
  device_settings_.assign(std::as_bytes(std::span(&now, 1)), stream);
  written_ = now;
}

Tensor StepControl::device_loss_gradient(const Stream& stream) {
  write_settings(stream);
  return Tensor::borrow(device_settings_.raw() + offsetof(DeviceSettings, loss_gradient), {}, DType::f32,
                        device_settings_.device());
}

// ---- hashes

/// n · Σh² = (Σh)² where all h are equal; both are compared modulo 2^64.
std::array<std::int64_t, 2> compared_words(std::uint64_t hash, int ranks) {
  const int bits = (62 - std::bit_width(static_cast<unsigned>(ranks))) / 2;
  const auto h = static_cast<std::int64_t>((hash ^ (hash >> 32)) & ((std::uint64_t{1} << bits) - 1));
  return {h, h * h};
}

bool hashes_are_equal(const std::array<std::int64_t, 2>& sums, int ranks) {
  const auto sum = static_cast<std::uint64_t>(sums[0]), squares = static_cast<std::uint64_t>(sums[1]);
  return static_cast<std::uint64_t>(ranks) * squares == sum * sum;
}

// ---- an update

/// Adds each element exactly once over all ranks.
void StepControl::add_squares(SquareSum& sum) const {
  const FlatLayout& layout = model_.layout();
  for (int b = 0; b < layout.size(); ++b) {
    const Range own = layout.owned(b);
    const auto add = [&](Range range) {
      if (range.count())
        sum.add(model_.gradients().mean(b).view(range.begin - layout.updated(b).begin, {range.count()}));
    };
    const std::vector<int>& members = layout.bucket(b).members;
    if (runtime_.place.part.rank == 0) {
      add(own);
      continue;
    }
    for (std::size_t i = 0; i < members.size(); ++i)
      if (is_split(model_.parameters().member(members[i])))
        add(intersect(padded_extent(layout.buckets(), b, i), own));
  }
}

/// The ranks of a tp group have the same losses.
ExactSum StepControl::terms(const Stream& stream) const {
  return runtime_.place.part.rank == 0 ? terms_.read(stream) : ExactSum();
}

bool StepControl::all_reduce(std::span<ExactSum> sums, std::optional<std::uint64_t> hash) {
  const int ranks = runtime_.communicator.size();
  std::array<std::int64_t, 2> compared = compared_words(hash.value_or(0), ranks);
  const std::span more(compared.data(), hash ? compared.size() : 0);
  if (ranks == 1 || (sums.empty() && more.empty())) return true;
  runtime_.exposed.measure([&] { ExactSum::all_reduce(sums, exact_words_, runtime_.communicator, more); });
  runtime_.traffic_of(runtime_.communicator).control.add(exact_words_.size() * sizeof(exact_words_[0]));
  return is_meta() || hashes_are_equal(compared, ranks);
}

/// Its losses have no data, and its communicator sums nothing.
bool StepControl::is_meta() const { return rz::is_meta(runtime_.communicator.options().device); }

StepOutcome StepControl::outcome_of(std::span<ExactSum, 2> sums, const StepLimits& limits) const {
  const bool counted = is_counted() && !is_meta();
  return step_outcome(sums[0].value(), counted ? sums[1].value() : uncounted_terms, limits);
}

double StepControl::norm(const Stream& stream) {
  SquareSum sum(stream, norm_words_);
  add_squares(sum);
  std::array sums{sum.read(), terms(stream)};
  all_reduce({sums.data(), summed()}, {});
  return outcome_of(sums, settings_.limits()).norm;
}

double StepControl::clip(double max_norm, const Stream& stream) {
  const double before = norm(stream);
  clip_factor_ = clip_factor(before, max_norm);
  return before;
}

StepControl::Decision StepControl::scale(std::uint64_t hash, const Stream& stream) {
  ExactSum sum = terms(stream);
  std::optional<std::uint64_t> compared;  // on a device hashes were compared before
  if (stream.device().kind == Device::host) compared = hash;
  const bool equal = all_reduce({&sum, is_counted() ? std::size_t{1} : 0}, compared);
  const StepLimits limits = settings_.limits();
  const double factor = clip_factor_ * term_factor(sum.value(), limits) / limits.loss_scale;
  return {.differs = !equal, .scale = {.factor = static_cast<float>(factor)}};
}

StepControl::Decision StepControl::decide(std::uint64_t hash, const Stream& stream) {
  if (stream.device().kind != Device::host) return decide_on_device(stream);
  SquareSum sum(stream, norm_words_);
  add_squares(sum);
  std::array sums{sum.read(), terms(stream)};
  if (settings_.limits().skip_overflow && !terms_.finite()) sums[0].add(std::nan(""));
  const bool equal = all_reduce({sums.data(), summed()}, hash);
  outcome_ = outcome_of(sums, settings_.limits());
  return {.differs = !equal, .skip = outcome_.skip != 0, .scale = {.factor = outcome_.grad_scale}};
}

StepControl::Decision StepControl::decide_on_device(const Stream& stream) {
  constexpr std::size_t words = ExactLayout::words;
  write_settings(stream);
  if (!sums_.defined()) {
    sums_ = Tensor::empty({2 * words}, DType::i64, allocator_on(stream.device()));
    device_outcome_ = Tensor::empty({sizeof(StepOutcome)}, DType::u8, allocator_on(stream.device()));
  }
  Tensor squares = sums_.view(0, {words});
  SquareSum sum(stream, squares);
  add_squares(sum);
  sum.words();  // zeros if there are no gradients
  if (settings_.limits().skip_overflow) terms_.add_not_finite(sum);
  const Tensor terms = is_counted() ? sums_.view(words, {words}) : Tensor();
  if (terms.defined()) terms_.copy_to(terms, stream);
  if (terms.defined() && runtime_.place.part.rank > 0) memset_async(terms.raw(), 0, terms.bytes(), stream);
  const Tensor used = terms.defined() ? sums_ : squares;
  runtime_.traffic_of(runtime_.communicator).control.add(used.bytes());
  runtime_.exposed.wait(runtime_.communicator.all_reduce(used.buffer(), ReduceOp::sum, stream), stream);
  const auto* const limits =
      reinterpret_cast<const StepLimits*>(device_settings_.raw() + offsetof(DeviceSettings, limits));
  auto* const decided = reinterpret_cast<StepOutcome*>(device_outcome_.raw());
  ops::device_ops().optimizer.decide_step(decided, squares.data<std::int64_t>(),
                                          terms.defined() ? terms.data<std::int64_t>() : nullptr, limits,
                                          stream);
  return {.scale = {.device_outcome = decided}};
}

StepOutcome StepControl::outcome(const Stream& stream) {
  if (stream.device().kind == Device::host) return outcome_;
  require(device_outcome_.defined(), Errc::invalid_argument, "outcome() before the first clip_and_step()");
  runtime_.communicator.synchronize(stream);
  const Tensor bytes = device_outcome_.on_host(stream);
  StepOutcome made;
  std::memcpy(&made, bytes.raw(), sizeof made);
  return made;
}

}  // namespace rz
