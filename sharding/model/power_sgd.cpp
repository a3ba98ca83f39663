#include "sharding/model/power_sgd.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>

#include "comm/core/error.h"
#include "comm/device/allocate.h"
#include "tensor/ops.h"

namespace rz {

namespace {

/// Uniform in [-1, 1), by SplitMix64 (Steele et al., doi:10.1145/2660193.2660195) of a counter.
float random_number(std::uint64_t seed, std::uint64_t counter) {
  std::uint64_t z = seed + (counter + 1) * 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return static_cast<float>(static_cast<double>((z ^ (z >> 31)) >> 40) * 0x1p-23 - 1);
}

constexpr float epsilon = 1e-8f;
constexpr auto overwrite = ops::Into::overwrite;

/// Gradients that are compressed as one matrix.
struct MatrixView {
  Tensor values;  ///< [rows, columns]
  std::size_t rows() const { return values.shape()[0]; }
  std::size_t columns() const { return values.shape()[1]; }
};

class PowerSgd final : public CommunicationHook {
 public:
  PowerSgd(const PowerSgdOptions& options, bool batched) : options_(options), batched_(batched) {}

  std::string describe() const override {
    return concat(batched_ ? "batched " : "", "powersgd, rank ", options_.matrix_approximation_rank,
                  ", start_iter ", options_.start_iter, ", error feedback ", options_.use_error_feedback,
                  ", warm start ", options_.warm_start, ", min_compression_rate ",
                  options_.min_compression_rate, ", seed ", options_.random_seed);
  }
  void require_supported(DType dtype, Device device) const override {
    require(dtype == DType::f32, Errc::unsupported,
            "the communication hook powersgd works on f32 gradients, not on ", name(dtype), " on the ",
            name(device));
  }
  /// Passes before and after start_iter differ.
  bool capturable() const override { return false; }
  Work start(const HookBucket&, Runtime&, const Stream&) override;
  bool advance(const HookBucket&, Runtime&, const Stream&) override;
  void restart() override { passes_ = 0, memory_.clear(), running_.clear(); }

 private:
  /// What a matrix keeps between passes.
  struct Memory {
    Tensor q, error;
  };
  /// The state of a bucket in a pass.
  struct Running {
    enum Stage { exact, first_factor, second_factor } stage = exact;
    Work work;
    HookBucket parts;  ///< the bucket, or all of it as one square matrix
    Tensor factors;    ///< those of all compressed parameters, then, in the first, what is not compressed
    Tensor p;          ///< the orthogonal first factors
  };
  bool compresses(const HookBucket::Part&) const;
  std::size_t rank() const { return static_cast<std::size_t>(options_.matrix_approximation_rank); }
  HookBucket as_square(const HookBucket&, Runtime&, const Stream&) const;
  Work reduce_first_factors(Runtime&, const Stream&, Running&);
  Work reduce_second_factors(Runtime&, const Stream&, Running&);
  void finish(const HookBucket&, const Stream&, Running&);
  Memory& prepared(const HookBucket::Part&, const MatrixView&, const Stream&);
  Tensor random_factor(const HookBucket::Part&, std::size_t columns, const Stream&) const;
  template <class F>
  void for_each(const HookBucket&, const F& f) const;

  PowerSgdOptions options_;
  bool batched_;
  std::int64_t passes_ = 0;
  std::map<int, Memory> memory_;  // by member, or by bucket
  std::vector<Running> running_;  // by bucket
};

bool PowerSgd::compresses(const HookBucket::Part& part) const {
  if (part.shape.dims() < 2 || part.shape.count() == 0) return false;
  if (batched_) return true;
  const std::size_t rows = part.shape[0], columns = part.shape.count() / rows;
  return static_cast<double>((rows + columns) * rank()) * options_.min_compression_rate <
         static_cast<double>(rows * columns);
}

/// f(part, matrix, whether it is compressed)
template <class F>
void PowerSgd::for_each(const HookBucket& bucket, const F& f) const {
  for (const auto& part : bucket.parts) {
    if (part.shape.count() == 0) continue;
    const bool compressed = compresses(part);
    const std::size_t rows = compressed ? part.shape[0] : 1;
    f(part, MatrixView{bucket.gradients.view(part.offset, {rows, part.shape.count() / rows})}, compressed);
  }
}

/// The last rows may be padding, which is zero.
HookBucket PowerSgd::as_square(const HookBucket& bucket, Runtime& runtime, const Stream& stream) const {
  const std::size_t count = bucket.gradients.count();
  auto side = static_cast<std::size_t>(std::sqrt(static_cast<double>(count)));
  while (side * side < count) ++side;
  const Tensor square = runtime.transient.allocate({side * side});
  ops::copy(square.view(0, {count}), bucket.gradients, stream);
  if (const std::size_t rest = side * side - count) ops::fill(square.view(count, {rest}), 0, stream);
  return {bucket.index, square, {{bucket.index, 0, {side, side}}}};
}

Tensor PowerSgd::random_factor(const HookBucket::Part& part, std::size_t columns,
                               const Stream& stream) const {
  const Tensor on_host = Tensor::empty({columns, rank()});
  const std::uint64_t first = static_cast<std::uint64_t>(options_.warm_start ? 0 : passes_) << 48 |
                              static_cast<std::uint64_t>(part.member) << 32;
  for (std::size_t i = 0; i < on_host.count(); ++i)
    on_host.data<float>()[i] = random_number(options_.random_seed, first + i);
  ops::orthogonalize_columns(on_host, epsilon, {});
  if (stream.device().kind == Device::host) return on_host;
  const Tensor q = Tensor::empty(on_host.shape(), DType::f32, allocator_on(stream.device()));
  q.assign(std::span<const float>(on_host.data<float>(), on_host.count()), stream);
  return q;
}

/// The start factor is in Memory::q, and the error of the last pass is added to the gradients.
PowerSgd::Memory& PowerSgd::prepared(const HookBucket::Part& part, const MatrixView& m,
                                     const Stream& stream) {
  Memory& memory = memory_[part.member];
  if (!memory.q.defined() || !options_.warm_start) memory.q = random_factor(part, m.columns(), stream);
  if (!options_.use_error_feedback) return memory;
  if (memory.error.defined())
    ops::add(m.values, m.values, memory.error, stream);
  else
    memory.error = Tensor::empty(m.values.shape(), DType::f32, allocator_on(stream.device()));
  ops::copy(memory.error, m.values, stream);
  return memory;
}

Work PowerSgd::reduce_first_factors(Runtime& runtime, const Stream& stream, Running& running) {
  std::size_t count = 0, next = 0;
  for_each(running.parts, [&](const auto&, const MatrixView& m, bool compressed) {
    count += compressed ? m.rows() * rank() : m.columns();
  });
  running.factors = runtime.transient.allocate({count});
  for_each(running.parts, [&](const auto& part, const MatrixView& m, bool compressed) {
    const Tensor out = running.factors.view(next, {m.rows(), compressed ? rank() : m.columns()});
    if (compressed)
      ops::matmul(out, m.values, false, prepared(part, m, stream).q, false, overwrite, stream);
    else
      ops::copy(out, m.values, stream);
    next += out.count();
  });
  return runtime.counted(runtime.data).all_reduce(running.factors, ReduceOp::avg, stream);
}

Work PowerSgd::reduce_second_factors(Runtime& runtime, const Stream& stream, Running& running) {
  running.p = running.factors;
  std::size_t count = 0, at = 0, next = 0;
  for_each(running.parts, [&](const auto&, const MatrixView& m, bool compressed) {
    count += compressed ? m.columns() * rank() : 0;
  });
  running.factors = runtime.transient.allocate({count});
  for_each(running.parts, [&](const auto&, const MatrixView& m, bool compressed) {
    const Tensor p = running.p.view(at, {m.rows(), compressed ? rank() : m.columns()});
    at += p.count();
    if (!compressed) return ops::copy(m.values, p, stream);
    ops::orthogonalize_columns(p, epsilon, stream);
    const Tensor q = running.factors.view(next, {m.columns(), rank()});
    ops::matmul(q, m.values, true, p, false, overwrite, stream);
    next += q.count();
  });
  return runtime.counted(runtime.data).all_reduce(running.factors, ReduceOp::avg, stream);
}

/// The gradients become the approximation; what it lacks is kept.
void PowerSgd::finish(const HookBucket& bucket, const Stream& stream, Running& running) {
  std::size_t at = 0, next = 0;
  for_each(running.parts, [&](const auto& part, const MatrixView& m, bool compressed) {
    const Tensor p = running.p.view(at, {m.rows(), compressed ? rank() : m.columns()});
    at += p.count();
    if (!compressed) return;
    const Tensor q = running.factors.view(next, {m.columns(), rank()});
    next += q.count();
    Memory& memory = memory_[part.member];
    ops::matmul(m.values, p, false, q, true, overwrite, stream);
    if (options_.use_error_feedback) ops::add_scaled(memory.error, m.values, -1, stream);
    if (options_.warm_start) ops::copy(memory.q, q, stream);
  });
  if (batched_)
    ops::copy(bucket.gradients, running.parts.gradients.view(0, {bucket.gradients.count()}), stream);
  running = {};
}

Work PowerSgd::start(const HookBucket& bucket, Runtime& runtime, const Stream& stream) {
  if (bucket.index == 0) ++passes_;
  const auto index = static_cast<std::size_t>(bucket.index);
  if (index >= running_.size()) running_.resize(index + 1);
  Running& running = running_[index];
  const bool any =
      batched_ || std::ranges::any_of(bucket.parts, [&](const auto& p) { return compresses(p); });
  running.stage = any && passes_ > options_.start_iter ? Running::first_factor : Running::exact;
  if (running.stage == Running::exact)
    return running.work = runtime.counted(runtime.data).all_reduce(bucket.gradients, ReduceOp::avg, stream);
  running.parts = batched_ ? as_square(bucket, runtime, stream) : bucket;
  return running.work = reduce_first_factors(runtime, stream, running);
}

bool PowerSgd::advance(const HookBucket& bucket, Runtime& runtime, const Stream& stream) {
  Running& running = running_[static_cast<std::size_t>(bucket.index)];
  runtime.exposed.wait(std::exchange(running.work, {}), runtime.stream);
  if (running.stage == Running::first_factor) {
    running.work = reduce_second_factors(runtime, stream, running);
    running.stage = Running::second_factor;
    return true;
  }
  if (running.stage == Running::second_factor) finish(bucket, stream, running);
  return false;
}

}  // namespace

namespace {

void check(const PowerSgdOptions& options) {
  require(options.matrix_approximation_rank >= 1, Errc::invalid_argument, "powersgd: the rank is ",
          options.matrix_approximation_rank, ", expected 1 or more");
  require(options.start_iter >= 2, Errc::invalid_argument, "powersgd: start_iter is ", options.start_iter,
          ", expected 2 or more");
  require(options.min_compression_rate > 0 && std::isfinite(options.min_compression_rate),
          Errc::invalid_argument, "powersgd: min_compression_rate is ", options.min_compression_rate,
          ", expected a finite number above 0");
}

}  // namespace

std::shared_ptr<CommunicationHook> make_power_sgd(const PowerSgdOptions& options) {
  check(options);
  return std::make_shared<PowerSgd>(options, false);
}

std::shared_ptr<CommunicationHook> make_batched_power_sgd(const PowerSgdOptions& options) {
  check(options);
  return std::make_shared<PowerSgd>(options, true);
}

}  // namespace rz
