#include "bench/concurrent/measure.h"

#include <algorithm>
#include <exception>
#include <thread>

#include "bench/support/statistics.h"
#include "comm/core/error.h"

namespace rz::bench::concurrent {
namespace {

using Clock = std::chrono::steady_clock;
using Microseconds = std::chrono::duration<double, std::micro>;

/// The first element marks the last call of a stream; the others hold values of the rank.
constexpr float not_last = 0, last = 1;

float sum_of_ranks(int size) { return static_cast<float>(size * (size + 1) / 2); }

const float* floats(const Memory& m) { return reinterpret_cast<const float*>(m.data.get()); }
float* floats(Memory& m) { return reinterpret_cast<float*>(m.data.get()); }

Figure figure_of(std::vector<double> us, Microseconds elapsed) {
  const double calls = static_cast<double>(us.size());
  const Summary s = summarize(std::move(us));
  return {calls / elapsed.count() * 1e6, s.p50, s.p99};
}

}  // namespace

Work Measure::Caller::start(bool is_last) {
  *floats(in) = is_last ? last : not_last;
  return comm.all_reduce(ConstBuffer(floats(in), count), {floats(out), count}, ReduceOp::sum);
}

bool Measure::Caller::was_last() const { return *floats(out) != not_last; }

void Measure::Caller::check() const {
  const float want = sum_of_ranks(comm.size());
  const auto wrong = std::count_if(floats(out) + 1, floats(out) + count, [&](float v) { return v != want; });
  require(wrong == 0, Errc::io, "rank ", comm.rank(), ": ", wrong, " of ", count,
          " sums are wrong after calls of ", human_bytes(count * sizeof(float)),
          " beside those of other communicators");
}

Measure::Measure(Communicator& world, const Plan& plan) : world_(world), plan_(plan) {
  for (const std::size_t bytes : plan.bytes) {
    const std::size_t count = bytes / sizeof(float);
    auto comm = world.split(0, world.rank());
    Memory in = memory_of(*comm, plan.registered, bytes), out = memory_of(*comm, plan.registered, bytes);
    std::fill_n(floats(in), count, static_cast<float>(world.rank() + 1));
    callers_.push_back({std::move(*comm), count, std::move(in), std::move(out)});
  }
}

Clock::time_point Measure::begin() {
  world_.barrier().wait();
  return Clock::now();
}

Figure Measure::call_until(Caller& caller, Clock::time_point end) {
  std::vector<double> us;
  const auto start = Clock::now();
  auto before = start;
  do {
    caller.start(world_.rank() == 0 && before >= end).wait();
    const auto now = Clock::now();
    us.push_back(Microseconds(now - before).count());
    before = now;
  } while (!caller.was_last());
  return figure_of(std::move(us), before - start);
}

Figure Measure::alone(Caller& caller) {
  const auto start = begin();
  return call_until(caller, start + std::chrono::duration_cast<Clock::duration>(plan_.phase));
}

Phase Measure::threads() {
  Phase phase(callers_.size());
  std::vector<std::exception_ptr> errors(callers_.size());
  const auto end = begin() + std::chrono::duration_cast<Clock::duration>(plan_.phase);
  {
    std::vector<std::jthread> callers;
    for (std::size_t i = 0; i < callers_.size(); ++i)
      callers.emplace_back([&, i] {
        try {
          phase[i] = call_until(callers_[i], end);
        } catch (...) {
          errors[i] = std::current_exception();
        }
      });
  }
  for (const auto& e : errors)
    if (e) std::rethrow_exception(e);
  return phase;
}

Phase Measure::in_turn() {
  std::vector<std::vector<double>> us(callers_.size());
  std::vector<Work> works(callers_.size());
  const auto start = begin(), end = start + std::chrono::duration_cast<Clock::duration>(plan_.phase);
  auto before = start;
  do {
    const bool last = world_.rank() == 0 && before >= end;
    for (std::size_t i = 0; i < callers_.size(); ++i) works[i] = callers_[i].start(last);
    for (std::size_t i = 0; i < callers_.size(); ++i) {
      works[i].wait();
      us[i].push_back(Microseconds(Clock::now() - before).count());
    }
    before = Clock::now();
  } while (!callers_.front().was_last());
  Phase phase;
  for (auto& samples : us) phase.push_back(figure_of(std::move(samples), before - start));
  return phase;
}

std::vector<Round> Measure::run() {
  std::vector<Round> rounds;
  for (int i = -1; i < plan_.rounds; ++i) {
    Round r;
    for (Caller& c : callers_) r.alone.push_back(alone(c));
    r.threads = threads();
    r.in_turn = in_turn();
    for (const Caller& c : callers_) c.check();
    if (i >= 0) rounds.push_back(std::move(r));
  }
  return rounds;
}

}  // namespace rz::bench::concurrent
