#include "sharding/wire/power_sgd.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>

#include "comm/core/error.h"

namespace rz {

namespace {

/// A row-major matrix within other memory.
struct MatrixView {
  float* data;
  std::size_t rows, columns;
};

/// Uniform in [-1, 1), by SplitMix64 (Steele et al., doi:10.1145/2660193.2660195) of a counter.
float random_number(std::uint64_t seed, std::uint64_t counter) {
  std::uint64_t z = seed + (counter + 1) * 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return static_cast<float>(static_cast<double>((z ^ (z >> 31)) >> 40) * 0x1p-23 - 1);
}

/// p = m q, where q has `rank` columns.
void multiply(const MatrixView& m, const float* q, int rank, float* p) {
  const auto r = static_cast<std::size_t>(rank);
  for (std::size_t i = 0; i < m.rows; ++i)
    for (std::size_t k = 0; k < r; ++k) {
      double sum = 0;
      for (std::size_t j = 0; j < m.columns; ++j) sum += double{m.data[i * m.columns + j]} * q[j * r + k];
      p[i * r + k] = static_cast<float>(sum);
    }
}

/// q = mᵀ p
void multiply_transposed(const MatrixView& m, const float* p, int rank, float* q) {
  const auto r = static_cast<std::size_t>(rank);
  std::vector<double> sums(m.columns * r);
  for (std::size_t i = 0; i < m.rows; ++i)
    for (std::size_t j = 0; j < m.columns; ++j)
      for (std::size_t k = 0; k < r; ++k) sums[j * r + k] += double{m.data[i * m.columns + j]} * p[i * r + k];
  std::ranges::transform(sums, q, [](double sum) { return static_cast<float>(sum); });
}

/// m = p qᵀ
void multiply_outer(const MatrixView& m, const float* p, const float* q, int rank) {
  const auto r = static_cast<std::size_t>(rank);
  for (std::size_t i = 0; i < m.rows; ++i)
    for (std::size_t j = 0; j < m.columns; ++j) {
      double sum = 0;
      for (std::size_t k = 0; k < r; ++k) sum += double{p[i * r + k]} * q[j * r + k];
      m.data[i * m.columns + j] = static_cast<float>(sum);
    }
}

/// Modified Gram-Schmidt on the columns. A column that depends on the others becomes small, not random.
void orthogonalize(float* p, std::size_t rows, int rank) {
  constexpr double epsilon = 1e-8;
  const auto r = static_cast<std::size_t>(rank);
  const auto dot = [&](std::size_t a, std::size_t b) {
    double sum = 0;
    for (std::size_t i = 0; i < rows; ++i) sum += double{p[i * r + a]} * p[i * r + b];
    return sum;
  };
  for (std::size_t k = 0; k < r; ++k) {
    for (std::size_t before = 0; before < k; ++before) {
      const double part = dot(before, k);
      for (std::size_t i = 0; i < rows; ++i)
        p[i * r + k] = static_cast<float>(p[i * r + k] - part * p[i * r + before]);
    }
    const double norm = std::sqrt(dot(k, k)) + epsilon;
    for (std::size_t i = 0; i < rows; ++i) p[i * r + k] = static_cast<float>(p[i * r + k] / norm);
  }
}

class PowerSgd final : public CommunicationHook {
 public:
  explicit PowerSgd(const PowerSgdOptions& options) : options_(options) {}

  std::string describe() const override {
    return concat("powersgd, rank ", options_.matrix_approximation_rank, ", start_iter ", options_.start_iter,
                  ", error feedback ", options_.use_error_feedback, ", warm start ", options_.warm_start,
                  ", min_compression_rate ", options_.min_compression_rate, ", seed ", options_.random_seed);
  }
  void require_supported(DType dtype, Device device) const override {
    require(dtype == DType::f32 && device.kind == Device::host, Errc::unsupported,
            "the communication hook powersgd works on f32 gradients in host memory, not on ", name(dtype),
            " on the ", name(device));
  }
  Work start(const HookBucket&, Runtime&, const Stream&) override;
  bool advance(const HookBucket&, Runtime&, const Stream&) override;

 private:
  /// Of a compressed parameter, between passes.
  struct Memory {
    std::vector<float> q, error;
  };
  /// Of a bucket, in a pass.
  struct Running {
    enum Stage { exact, first_factor, second_factor } stage = exact;
    Work work;
    Tensor factors;  ///< those of all compressed parameters, then, in the first, what is not compressed
    Tensor p;        ///< the orthogonal first factors
  };
  bool compresses(const HookBucket::Part&) const;
  std::size_t rank() const { return static_cast<std::size_t>(options_.matrix_approximation_rank); }
  Work reduce_first_factors(const HookBucket&, Runtime&, const Stream&, Running&);
  Work reduce_second_factors(const HookBucket&, Runtime&, const Stream&, Running&);
  void finish(const HookBucket&, Running&);
  Memory& prepared(const HookBucket::Part&, const MatrixView&);
  template <class F>
  void for_each(const HookBucket&, const F& f) const;

  PowerSgdOptions options_;
  std::int64_t passes_ = 0;
  std::map<int, Memory> memory_;  // by member
  std::vector<Running> running_;  // by bucket
};

std::size_t rows_of(const Shape& shape) { return shape[0]; }

bool PowerSgd::compresses(const HookBucket::Part& part) const {
  if (part.shape.dims() < 2 || part.shape.count() == 0) return false;
  const std::size_t rows = rows_of(part.shape), columns = part.shape.count() / rows;
  return static_cast<double>((rows + columns) * rank()) * options_.min_compression_rate <
         static_cast<double>(rows * columns);
}

/// f(part, matrix, whether it is compressed)
template <class F>
void PowerSgd::for_each(const HookBucket& bucket, const F& f) const {
  for (const auto& part : bucket.parts) {
    if (part.shape.count() == 0) continue;
    const bool compressed = compresses(part);
    const std::size_t rows = compressed ? rows_of(part.shape) : 1;
    f(part, MatrixView{bucket.gradients.data<float>() + part.offset, rows, part.shape.count() / rows},
      compressed);
  }
}

/// The start factor is in Memory::q, and the error of the last pass is added to the gradients.
PowerSgd::Memory& PowerSgd::prepared(const HookBucket::Part& part, const MatrixView& m) {
  Memory& memory = memory_[part.member];
  const std::size_t count = m.rows * m.columns;
  if (memory.q.empty() || !options_.warm_start) {
    memory.q.resize(m.columns * rank());
    const std::uint64_t first = static_cast<std::uint64_t>(options_.warm_start ? 0 : passes_) << 48 |
                                static_cast<std::uint64_t>(part.member) << 32;
    for (std::size_t i = 0; i < memory.q.size(); ++i)
      memory.q[i] = random_number(options_.random_seed, first + i);
    orthogonalize(memory.q.data(), m.columns, options_.matrix_approximation_rank);
  }
  if (options_.use_error_feedback) {
    memory.error.resize(count);
    for (std::size_t i = 0; i < count; ++i) memory.error[i] = m.data[i] += memory.error[i];
  }
  return memory;
}

Work PowerSgd::reduce_first_factors(const HookBucket& bucket, Runtime& runtime, const Stream& stream,
                                    Running& running) {
  std::size_t count = 0;
  for_each(bucket, [&](const auto&, const MatrixView& m, bool compressed) {
    count += compressed ? m.rows * rank() : m.columns;
  });
  running.factors = runtime.transient.allocate({count});
  float* next = running.factors.data<float>();
  for_each(bucket, [&](const auto& part, const MatrixView& m, bool compressed) {
    if (compressed)
      multiply(m, prepared(part, m).q.data(), options_.matrix_approximation_rank, next);
    else
      std::copy_n(m.data, m.columns, next);
    next += compressed ? m.rows * rank() : m.columns;
  });
  return runtime.all_reduce(running.factors, ReduceOp::avg, stream);
}

Work PowerSgd::reduce_second_factors(const HookBucket& bucket, Runtime& runtime, const Stream& stream,
                                     Running& running) {
  running.p = running.factors;
  std::size_t count = 0;
  for_each(bucket, [&](const auto&, const MatrixView& m, bool compressed) {
    count += compressed ? m.columns * rank() : 0;
  });
  running.factors = runtime.transient.allocate({count});
  float *p = running.p.data<float>(), *q = running.factors.data<float>();
  for_each(bucket, [&](const auto&, const MatrixView& m, bool compressed) {
    if (compressed) {
      orthogonalize(p, m.rows, options_.matrix_approximation_rank);
      multiply_transposed(m, p, options_.matrix_approximation_rank, q);
      q += m.columns * rank();
    } else {
      std::copy_n(p, m.columns, m.data);
    }
    p += compressed ? m.rows * rank() : m.columns;
  });
  return runtime.all_reduce(running.factors, ReduceOp::avg, stream);
}

void PowerSgd::finish(const HookBucket& bucket, Running& running) {
  const float *p = running.p.data<float>(), *q = running.factors.data<float>();
  for_each(bucket, [&](const auto& part, const MatrixView& m, bool compressed) {
    if (compressed) {
      Memory& memory = memory_[part.member];
      multiply_outer(m, p, q, options_.matrix_approximation_rank);
      for (std::size_t i = 0; i < memory.error.size(); ++i) memory.error[i] -= m.data[i];
      std::copy_n(q, memory.q.size(), memory.q.begin());
      q += memory.q.size();
    }
    p += compressed ? m.rows * rank() : m.columns;
  });
  running = {};
}

Work PowerSgd::start(const HookBucket& bucket, Runtime& runtime, const Stream& stream) {
  if (bucket.index == 0) ++passes_;
  const auto index = static_cast<std::size_t>(bucket.index);
  if (index >= running_.size()) running_.resize(index + 1);
  Running& running = running_[index];
  const bool any = std::ranges::any_of(bucket.parts, [&](const auto& part) { return compresses(part); });
  running.stage = any && passes_ > options_.start_iter ? Running::first_factor : Running::exact;
  return running.work = running.stage == Running::exact
                            ? runtime.all_reduce(bucket.gradients, ReduceOp::avg, stream)
                            : reduce_first_factors(bucket, runtime, stream, running);
}

bool PowerSgd::advance(const HookBucket& bucket, Runtime& runtime, const Stream& stream) {
  Running& running = running_[static_cast<std::size_t>(bucket.index)];
  runtime.exposed.wait(std::exchange(running.work, {}), runtime.stream);
  if (running.stage == Running::first_factor) {
    running.work = reduce_second_factors(bucket, runtime, stream, running);
    running.stage = Running::second_factor;
    return true;
  }
  if (running.stage == Running::second_factor) finish(bucket, running);
  return false;
}

}  // namespace

std::shared_ptr<CommunicationHook> make_power_sgd(const PowerSgdOptions& options) {
  require(options.matrix_approximation_rank >= 1, Errc::invalid_argument, "powersgd: the rank is ",
          options.matrix_approximation_rank, ", expected 1 or more");
  require(options.start_iter >= 2, Errc::invalid_argument, "powersgd: start_iter is ", options.start_iter,
          ", expected 2 or more");
  require(options.min_compression_rate > 0 && std::isfinite(options.min_compression_rate),
          Errc::invalid_argument, "powersgd: min_compression_rate is ", options.min_compression_rate,
          ", expected a finite number above 0");
  return std::make_shared<PowerSgd>(options);
}

}  // namespace rz
