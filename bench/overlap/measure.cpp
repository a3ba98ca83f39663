#include "bench/overlap/measure.h"

#include <algorithm>
#include <cmath>

#include "bench/overlap/compute.h"
#include "bench/support/statistics.h"
#include "comm/core/error.h"

namespace rz::bench::overlap {
namespace {

using Clock = std::chrono::steady_clock;
double ms_since(Clock::time_point begin) {
  return std::chrono::duration<double, std::milli>(Clock::now() - begin).count();
}

std::vector<BucketMember> members_of(const Plan& plan) {
  const std::size_t each = plan.bucket_bytes / plan.members / sizeof(float);
  std::vector<BucketMember> members;
  for (std::size_t left = plan.bytes / sizeof(float); left; left -= members.back().count)
    members.push_back({std::min(each, left), DType::f32});
  return members;
}

BucketOptions options_of(const Plan& plan) {
  // All buckets have the same size, including the first. No alignment, so that five members of a fifth fit
  // exactly.
  return {.first_bytes = plan.bucket_bytes, .cap_bytes = plan.bucket_bytes, .align = 1, .granularity = 1};
}

/// The mean of 1 to size; exact.
float mean_of_ranks(int size) { return static_cast<float>(size + 1) / 2; }

}  // namespace

Measure::Measure(Communicator& comm, const Plan& plan)
    : comm_(comm),
      plan_(plan),
      options_(options_of(plan)),
      layout_(plan_buckets(members_of(plan), options_)),
      scheduler_(layout_, options_, [this](int bucket, const Stream&) { return launch(bucket); }) {
  for (const auto& bucket : layout_.buckets) {
    memory_.push_back(memory_of(comm, plan.registered, bucket.count * sizeof(float)));
    order_.insert(order_.end(), bucket.members.begin(), bucket.members.end());
  }
  check();
  calibrate(plan.passes);
}

Work Measure::launch(int bucket) {
  const auto b = static_cast<std::size_t>(bucket);
  return comm_.all_reduce({reinterpret_cast<float*>(memory_[b].data.get()), layout_.buckets[b].count},
                          ReduceOp::avg);
}

double Measure::step(Through through, long passes) {
  Compute compute;
  std::vector<Work> works;
  double computing = 0;
  int bucket = 0;
  for (const int member : order_) {
    const auto begin = Clock::now();
    compute.run(passes);
    computing += ms_since(begin);
    if (through == Through::scheduler) {
      scheduler_.ready(member, {});
    } else if (member == layout_.buckets[static_cast<std::size_t>(bucket)].members.back()) {
      works.push_back(launch(bucket++));
    }
  }
  if (through == Through::scheduler) scheduler_.finish({});
  for (const Work& w : works) w.wait();
  return computing;
}

/// Runs a timed iteration on data whose mean is known.
void Measure::check() {
  for (const Through through : {Through::communicator, Through::scheduler}) {
    for (std::size_t b = 0; b < memory_.size(); ++b)
      std::fill_n(reinterpret_cast<float*>(memory_[b].data.get()), layout_.buckets[b].count,
                  static_cast<float>(comm_.rank() + 1));
    step(through, 1);
    for (std::size_t b = 0; b < memory_.size(); ++b) {
      const auto* values = reinterpret_cast<const float*>(memory_[b].data.get());
      const auto wrong = std::count_if(values, values + layout_.buckets[b].count,
                                       [&](float v) { return v != mean_of_ranks(comm_.size()); });
      require(wrong == 0, Errc::io, "rank ", comm_.rank(), ": ", wrong, " elements of bucket ", b,
              " are not the mean of all ranks'");
    }
  }
}

void Measure::calibrate(long wanted) {
  passes_ = wanted;
  if (passes_) return;
  std::vector<double> ms;
  for (int i = 0; i < 5; ++i) ms.push_back(max_of(communicate(Through::communicator)));
  Compute compute;
  long passes = 1;
  double took = 0;
  for (; took < 20; passes *= 2) {
    const auto begin = Clock::now();
    compute.run(passes);
    took = ms_since(begin);
  }
  const double each = max_of(took / static_cast<double>(passes / 2));  // ms per pass, on the slowest rank
  passes_ = std::max(1L, std::lround(summarize(ms).p50 / each / static_cast<double>(order_.size())));
}

double Measure::max_of(double ms) {
  comm_.all_reduce({&ms, 1}, ReduceOp::max).wait();
  return ms;
}

double Measure::compute_alone() {
  Compute compute;
  comm_.barrier().wait();
  const auto begin = Clock::now();
  for (std::size_t m = 0; m < order_.size(); ++m) compute.run(passes_);
  return ms_since(begin);
}

double Measure::communicate(Through through) {
  comm_.barrier().wait();
  const auto begin = Clock::now();
  step(through, 0);
  return ms_since(begin);
}

Times Measure::overlapped(Through through) {
  Times t;
  comm_.barrier().wait();
  const auto begin = Clock::now();
  t.lost_compute = step(through, passes_);
  t.overlapped = ms_since(begin);
  return t;
}

Times Measure::iterate(Through through) {
  const double compute = compute_alone(), communication = communicate(through);
  Times t = overlapped(through);
  t.compute = compute, t.communication = communication;
  t.exposed = t.overlapped - compute;
  t.lost_compute -= compute;
  return t;
}

void Measure::max_over_ranks(std::vector<Times>& all) {
  static_assert(sizeof(Times) == 5 * sizeof(double));
  comm_.all_reduce({reinterpret_cast<double*>(all.data()), 5 * all.size()}, ReduceOp::max).wait();
}

Measure::Results Measure::run() {
  Results r;
  for (int i = -1; i < plan_.iterations; ++i) {
    const Times direct = iterate(Through::communicator), scheduled = iterate(Through::scheduler);
    if (i >= 0) r.communicator.push_back(direct), r.scheduler.push_back(scheduled);
  }
  max_over_ranks(r.communicator);
  max_over_ranks(r.scheduler);
  return r;
}

}  // namespace rz::bench::overlap
