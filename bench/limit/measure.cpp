#include "bench/limit/measure.h"

#include <unistd.h>

#include <algorithm>
#include <new>

#include "comm/core/error.h"
#include "comm/core/rounding.h"
#include "comm/core/types.h"
#include "comm/transports/shared_memory.h"

namespace rz::bench::limit {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t page = 4096;

/// Everything that both ranks map, made before there are two.
class Ground {
 public:
  explicit Ground(const Plan& plan)
      : bytes_(round_up(std::ranges::max(plan.sizes), page)),
        notes_(SharedMemory::create(sizeof(Meeting))),
        slots_(SharedMemory::create(Memory::slot_bytes)),
        mapped_(SharedMemory::create(4 * bytes_)) {
    for (const std::size_t s : plan.sizes)
      most_iterations_ = std::max(most_iterations_, iterations_for(plan, s));
    times_ = SharedMemory::create(2 * static_cast<std::size_t>(most_iterations_) * sizeof(double));
    meeting_ = new (notes_.data()) Meeting{};
  }

  std::size_t bytes() const { return bytes_; }
  Meeting& meeting() const { return *meeting_; }
  std::byte* slots() const { return slots_.data(); }
  float* mapped(int which) const {
    return reinterpret_cast<float*>(mapped_.data() + static_cast<std::size_t>(which) * bytes_);
  }
  /// Of the rank's last timed iterations, us.
  double* times(int rank) const {
    return reinterpret_cast<double*>(times_.data()) + static_cast<std::ptrdiff_t>(rank) * most_iterations_;
  }

 private:
  std::size_t bytes_;
  SharedMemory notes_, slots_, mapped_, times_;
  Meeting* meeting_ = nullptr;
  int most_iterations_ = 1;
};

/// Small integers, whose sums are exact.
float input(int rank, std::size_t i) {
  return static_cast<float>(i % 8191 + static_cast<std::size_t>(rank) * 4096);
}

class RankMeasure {
 public:
  RankMeasure(const Plan& plan, const Ground& ground, Seat& seat)
      : plan_(plan),
        ground_(ground),
        seat_(seat),
        own_(allocate_host(2 * ground.bytes())),
        memory_(memory_of(ground, own_.get(), seat)),
        calls_(seat, memory_) {}

  std::vector<Timed> measure(std::size_t bytes) {
    const std::vector<Way> ways = wanted(bytes);
    const std::size_t count = bytes / sizeof(float);
    for (const Way& way : ways) check(way, count);
    std::vector<std::vector<double>> us(ways.size());
    for (int round = 0; round < plan_.rounds; ++round)
      for (std::size_t w = 0; w < ways.size(); ++w) time(ways[w], bytes, us[w]);
    std::vector<Timed> all;
    for (std::size_t w = 0; w < ways.size(); ++w) all.push_back({ways[w], summarize(std::move(us[w]))});
    return all;
  }

 private:
  static Memory memory_of(const Ground& g, std::byte* own, Seat& seat) {
    auto* const in = reinterpret_cast<float*>(own);
    auto* const out = reinterpret_cast<float*>(own + g.bytes());
    seat.meeting.lying[seat.rank] = {::getpid(), in, out};
    seat.meet();
    return {in,
            out,
            {g.mapped(0), g.mapped(1)},
            {g.mapped(2), g.mapped(3)},
            g.slots(),
            seat.meeting.lying[seat.peer]};
  }

  std::vector<Way> wanted(std::size_t bytes) const {
    std::vector<Way> ways = ways_for(bytes);
    std::erase_if(ways, [&](const Way& w) {
      if (plan_.variants.empty()) return w.kind == Way::single_copy;  // not permitted everywhere
      return std::ranges::find(plan_.variants, w.variant()) == plan_.variants.end();
    });
    return ways;
  }

  /// This rank's buffers of the way: in, out.
  std::pair<float*, float*> buffers(const Way& way) const {
    float* const out = way.mapped() ? memory_.mapped_out[seat_.rank] : memory_.out;
    if (way.in_place) return {out, out};
    return {way.mapped() ? memory_.mapped_in[seat_.rank] : memory_.in, out};
  }

  void check(const Way& way, std::size_t count) {
    const auto [in, out] = buffers(way);
    if (!way.in_place) std::fill_n(out, count, -1.f);
    for (std::size_t i = 0; i < count; ++i) in[i] = input(seat_.rank, i);
    seat_.meet();
    calls_.all_reduce(way, count);
    seat_.meet();
    for (std::size_t i = 0; i < count; ++i)
      if (out[i] != input(0, i) + input(1, i))
        fail(Errc::io, "the sum of ", way.name(), " is wrong on rank ", seat_.rank, " at element ", i, " of ",
             count, ": ", out[i]);
  }

  /// Adds an entry for each iteration to rank 0's list.
  void time(const Way& way, std::size_t bytes, std::vector<double>& slowest) {
    const std::size_t count = bytes / sizeof(float);
    const auto [in, out] = buffers(way);
    std::fill_n(in, count, 0.f);  // in place, sums of anything else would grow without end
    std::fill_n(out, count, 0.f);
    const int iterations = iterations_for(plan_, bytes);
    seat_.meet();
    for (int i = 0; i < std::max(2, iterations / 20); ++i) calls_.all_reduce(way, count);
    seat_.meet();
    double* const us = ground_.times(seat_.rank);
    auto last = Clock::now();
    for (int i = 0; i < iterations; ++i) {
      calls_.all_reduce(way, count);
      const auto end = Clock::now();
      us[i] = std::chrono::duration<double, std::micro>(end - last).count();
      last = end;
    }
    seat_.meet();
    for (int i = 0; seat_.rank == 0 && i < iterations; ++i)
      slowest.push_back(std::max(us[i], ground_.times(1)[i]));
    seat_.meet();
  }

  const Plan& plan_;
  const Ground& ground_;
  Seat& seat_;
  std::shared_ptr<std::byte> own_;
  Memory memory_;
  Calls calls_;
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
  const Ground ground(plan);
  run_pair(ground.meeting(), plan.timeout, [&](Seat& seat) {
    RankMeasure rank(plan, ground, seat);
    for (const std::size_t bytes : plan.sizes) {
      const auto timed = rank.measure(bytes);
      if (seat.rank == 0) report(bytes, timed);
    }
  });
}

}  // namespace rz::bench::limit
