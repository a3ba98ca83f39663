#include "bench/lower_bound/measure.h"

#include <unistd.h>

#include <algorithm>
#include <new>

#include "comm/core/error.h"
#include "comm/core/integer_math.h"
#include "comm/core/types.h"
#include "comm/shared_memory/shared_memory.h"

namespace rz::bench::lower_bound {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t page = 4096;

/// All memory that both ranks map, created before fork().
class SharedState {
 public:
  explicit SharedState(const Plan& plan)
      : bytes_(round_up(std::ranges::max(plan.sizes), page)),
        state_memory_(SharedMemory::create(sizeof(PairState))),
        slots_(SharedMemory::create(RankMemory::slot_bytes)),
        mapped_(SharedMemory::create(4 * bytes_)) {
    for (const std::size_t s : plan.sizes)
      max_iterations_ = std::max(max_iterations_, iterations_for(plan, s));
    times_ = SharedMemory::create(2 * static_cast<std::size_t>(max_iterations_) * sizeof(double));
    state_ = new (state_memory_.data()) PairState{};
  }

  std::size_t bytes() const { return bytes_; }
  PairState& state() const { return *state_; }
  std::byte* slots() const { return slots_.data(); }
  float* mapped(int which) const {
    return reinterpret_cast<float*>(mapped_.data() + static_cast<std::size_t>(which) * bytes_);
  }
  /// Times of the last iterations of a rank, us.
  double* times(int rank) const {
    return reinterpret_cast<double*>(times_.data()) + static_cast<std::ptrdiff_t>(rank) * max_iterations_;
  }

 private:
  std::size_t bytes_;
  SharedMemory state_memory_, slots_, mapped_, times_;
  PairState* state_ = nullptr;
  int max_iterations_ = 1;
};

/// Small integers, so that sums are exact.
float input(int rank, std::size_t i) {
  return static_cast<float>(i % 8191 + static_cast<std::size_t>(rank) * 4096);
}

/// Checks and times the variants on one of the two ranks.
class RankMeasure {
 public:
  RankMeasure(const Plan& plan, const SharedState& shared, PairRank& self)
      : plan_(plan),
        shared_(shared),
        self_(self),
        own_(allocate_host(2 * shared.bytes())),
        memory_(memory_of(shared, own_.get(), self)),
        kernel_(self, memory_) {}

  std::vector<Timed> measure(std::size_t bytes) {
    const std::vector<Variant> variants = wanted(bytes);
    const std::size_t count = bytes / sizeof(float);
    for (const Variant& variant : variants) check(variant, count);
    std::vector<std::vector<double>> us(variants.size());
    for (int round = 0; round < plan_.rounds; ++round)
      for (std::size_t w = 0; w < variants.size(); ++w) time(variants[w], bytes, us[w]);
    std::vector<Timed> all;
    for (std::size_t w = 0; w < variants.size(); ++w)
      all.push_back({variants[w], summarize(std::move(us[w]))});
    return all;
  }

 private:
  static RankMemory memory_of(const SharedState& g, std::byte* own, PairRank& self) {
    auto* const in = reinterpret_cast<float*>(own);
    auto* const out = reinterpret_cast<float*>(own + g.bytes());
    self.state.buffers[self.rank] = {::getpid(), in, out};
    self.barrier();
    return {in,
            out,
            {g.mapped(0), g.mapped(1)},
            {g.mapped(2), g.mapped(3)},
            g.slots(),
            self.state.buffers[self.peer]};
  }

  std::vector<Variant> wanted(std::size_t bytes) const {
    std::vector<Variant> variants = variants_for(bytes);
    std::erase_if(variants, [&](const Variant& w) {
      if (plan_.methods.empty()) return w.kind == Variant::single_copy;  // not permitted on every machine
      return std::ranges::find(plan_.methods, w.method()) == plan_.methods.end();
    });
    return variants;
  }

  /// The input and output buffers of this rank for a variant.
  std::pair<float*, float*> buffers(const Variant& variant) const {
    float* const out = variant.mapped() ? memory_.mapped_out[self_.rank] : memory_.out;
    if (variant.in_place) return {out, out};
    return {variant.mapped() ? memory_.mapped_in[self_.rank] : memory_.in, out};
  }

  void check(const Variant& variant, std::size_t count) {
    const auto [in, out] = buffers(variant);
    if (!variant.in_place) std::fill_n(out, count, -1.f);
    for (std::size_t i = 0; i < count; ++i) in[i] = input(self_.rank, i);
    self_.barrier();
    kernel_.all_reduce(variant, count);
    self_.barrier();
    for (std::size_t i = 0; i < count; ++i)
      if (out[i] != input(0, i) + input(1, i))
        fail(Errc::io, "the sum of ", variant.name(), " is wrong on rank ", self_.rank, " at element ", i,
             " of ", count, ": ", out[i]);
  }

  /// Appends one time per iteration to the list of rank 0.
  void time(const Variant& variant, std::size_t bytes, std::vector<double>& slowest) {
    const std::size_t count = bytes / sizeof(float);
    const auto [in, out] = buffers(variant);
    std::fill_n(in, count, 0.f);  // zeros, since repeated sums in place would overflow
    std::fill_n(out, count, 0.f);
    const int iterations = iterations_for(plan_, bytes);
    self_.barrier();
    for (int i = 0; i < std::max(2, iterations / 20); ++i) kernel_.all_reduce(variant, count);
    self_.barrier();
    double* const us = shared_.times(self_.rank);
    auto last = Clock::now();
    for (int i = 0; i < iterations; ++i) {
      kernel_.all_reduce(variant, count);
      const auto end = Clock::now();
      us[i] = std::chrono::duration<double, std::micro>(end - last).count();
      last = end;
    }
    self_.barrier();
    for (int i = 0; self_.rank == 0 && i < iterations; ++i)
      slowest.push_back(std::max(us[i], shared_.times(1)[i]));
    self_.barrier();
  }

  const Plan& plan_;
  const SharedState& shared_;
  PairRank& self_;
  std::shared_ptr<std::byte> own_;
  RankMemory memory_;
  Kernel kernel_;
};

}  // namespace

int iterations_for(const Plan& plan, std::size_t bytes) {
  constexpr std::size_t KiB = 1024, MiB = 1024 * KiB;
  if (plan.iterations) return plan.iterations;
  return bytes <= 64 * KiB   ? 2000
         : bytes <= 1 * MiB  ? 200
         : bytes <= 8 * MiB  ? 100
         : bytes <= 64 * MiB ? 20
                             : 6;
}

void measure(const Plan& plan,
             const std::function<void(std::size_t bytes, const std::vector<Timed>&)>& report) {
  const SharedState shared(plan);
  run_pair(shared.state(), plan.timeout, [&](PairRank& self) {
    RankMeasure rank(plan, shared, self);
    for (const std::size_t bytes : plan.sizes) {
      const auto timed = rank.measure(bytes);
      if (self.rank == 0) report(bytes, timed);
    }
  });
}

}  // namespace rz::bench::lower_bound
