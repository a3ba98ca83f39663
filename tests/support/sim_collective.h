#pragma once
/// A collective by schedule executors over a simulated network, with exact inputs and expected results.

#include <gtest/gtest.h>

#include <deque>
#include <memory>
#include <vector>

#include "comm/schedule/executor.h"
#include "tests/support/sim_transport.h"

namespace rz::test {

/// Every rank makes `calls` calls one after another, without waiting for other ranks between them; the second
/// call and every other one after it are in place where the collective allows that. Element i of rank r's
/// input is a small whole number for floating-point types, so that all sums are exact, else any number: sums
/// of unsigned integers wrap, and are exact too. `count` is that of a shard.
template <class T>
class SimCollective {
 public:
  SimCollective(SimNetwork& network, schedule::ScheduleFunction schedule, Collective kind, int root,
                std::size_t count, int calls = 2)
      : network_(network), kind_(kind), size_(network.size()), root_(root), count_(count) {
    for (int r = 0; r < size_; ++r) {
      Rank& rank = ranks_.emplace_back(network_.transport(r), r, size_);
      for (int i = 0; i < calls; ++i) prepare(rank, schedule, i);
    }
  }
  SimCollective(const SimCollective&) = delete;

  std::vector<SimProgram> programs() {
    std::vector<SimProgram> all;
    for (Rank& r : ranks_)
      all.push_back({[&r] { return r.advance(); },
                     [&r] { return r.started == r.calls.size() && r.executor.complete(); },
                     [&r] { return r.started ? r.executor.waiting_on().text : std::string("its start"); }});
    return all;
  }
  /// Runs all ranks. Throws the first error of a rank.
  void run() {
    for (const auto& e : network_.run_until_complete(programs()))
      if (e) throw *e;
  }
  /// Compares every element of every output, and the inputs of calls that are not in place.
  void expect_results() const {
    for (const Rank& r : ranks_)
      for (const Call& c : r.calls) {
        SCOPED_TRACE(testing::Message() << "rank " << r.number << (c.in_place ? ", in place" : ""));
        const T* out = static_cast<const T*>(c.call.out.data);
        for (std::size_t i = 0; i < c.call.out.count; ++i)
          ASSERT_EQ(out[i], expected(r.number, i)) << "element " << i;
        if (!c.in_place) {
          ASSERT_EQ(c.in, inputs(r.number, c.in.size())) << "the input was changed";
        }
      }
  }

 private:
  struct Call {
    CollectiveCall call;
    AllToAllVCounts counts;
    schedule::DependencyPlan plan;
    std::vector<T> in, out;  // in place: `in` is empty
    CallSignature signature;
    bool in_place = false;
  };
  struct Rank {
    Rank(Transport& transport, int rank, int size) : number(rank), executor(transport, rank, size) {}
    bool advance() {
      if (executor.complete() && started < calls.size()) {
        const Call& next = calls[started++];
        executor.start(next.call, next.plan, next.signature);
        executor.advance();
        return true;
      }
      return executor.advance();
    }
    const int number;
    std::size_t started = 0;
    std::deque<Call> calls;
    schedule::Executor executor;
  };

  static T input(int rank, std::size_t i) {
    const auto x =
        static_cast<std::uint32_t>(i) * 2'654'435'761u + static_cast<std::uint32_t>(rank) * 40'503u;
    return static_cast<T>(std::is_floating_point_v<T> ? (x >> 16) % 64 : x);
  }
  static std::vector<T> inputs(int rank, std::size_t n) {
    std::vector<T> all;
    for (std::size_t i = 0; i < n; ++i) all.push_back(input(rank, i));
    return all;
  }
  std::size_t index(int rank) const { return static_cast<std::size_t>(rank); }
  /// all_to_all_v: the elements from one rank to another, some none, and where they begin at the sender.
  std::size_t pair_count(int from, int to) const { return index(from * 2 + to * 3) % 5 * count_ / 4; }
  std::size_t pair_offset(int from, int to) const {
    std::size_t sum = 0;
    for (int r = 0; r < to; ++r) sum += pair_count(from, r);
    return sum;
  }

  T total(std::size_t i) const {
    T sum{};
    for (int r = 0; r < size_; ++r) sum = static_cast<T>(sum + input(r, i));
    return sum;
  }
  T expected(int rank, std::size_t i) const {
    switch (kind_) {
      case Collective::all_reduce:
      case Collective::reduce:
        return total(i);
      case Collective::reduce_scatter:
        return total(index(rank) * count_ + i);
      case Collective::broadcast:
        return input(root_, i);
      case Collective::scatter:
        return input(root_, index(rank) * count_ + i);
      case Collective::all_to_all:
        return input(static_cast<int>(i / count_), index(rank) * count_ + i % count_);
      case Collective::all_to_all_v: {
        int from = 0;
        for (; i >= pair_count(from, rank); ++from) i -= pair_count(from, rank);
        return input(from, pair_offset(from, rank) + i);
      }
      default:
        return input(static_cast<int>(i / count_), i % count_);
    }
  }

  std::size_t elements(Extent extent, const std::vector<std::size_t>& counts) const {
    std::size_t n = 0;
    for (const std::size_t c : counts) n += c;
    return extent == Extent::shard            ? count_
           : extent == Extent::shard_per_rank ? count_ * index(size_)
           : extent == Extent::by_counts      ? n
                                              : 0;
  }
  void fill_counts(int rank, AllToAllVCounts& c) const {
    std::size_t received = 0;
    for (int peer = 0; peer < size_; ++peer) {
      c.send_counts.push_back(pair_count(rank, peer));
      c.send_offsets.push_back(pair_offset(rank, peer));
      c.recv_counts.push_back(pair_count(peer, rank));
      c.recv_offsets.push_back(received);
      received += c.recv_counts.back();
    }
  }

  void prepare(Rank& rank, schedule::ScheduleFunction schedule, int number) {
    const CollectiveTraits& t = traits(kind_);
    const bool is_root = rank.number == root_;
    const bool has_in = !t.in_at_root || is_root, has_out = !t.out_at_root || is_root;
    const bool allows_in_place = t.in == Extent::shard || t.out == Extent::shard;
    Call& c = rank.calls.emplace_back();
    fill_counts(rank.number, c.counts);
    const std::size_t in = elements(t.in, c.counts.send_counts), out = elements(t.out, c.counts.recv_counts);
    c.in_place = number % 2 == 1 && allows_in_place && has_in && has_out;
    // The shard that a rank contributes or receives lies at its place in the larger buffer.
    const std::size_t in_at = in < out ? index(rank.number) * count_ : 0;
    const std::size_t out_at = out < in ? index(rank.number) * count_ : 0;
    c.in = inputs(rank.number, has_in ? in : 0);
    c.out.resize(c.in_place ? std::max(in, out) : has_out ? out : 0);
    T *in_data = c.in.data(), *out_data = c.out.data();
    if (c.in_place) {
      std::copy(c.in.begin(), c.in.end(), c.out.begin() + static_cast<std::ptrdiff_t>(in_at));
      in_data = c.out.data() + in_at, out_data = c.out.data() + out_at;
      c.in.clear();
    }
    c.call.kind = kind_;
    if (kind_ == Collective::all_to_all_v) c.call.counts = &c.counts;
    c.call.root = root_;
    c.call.in = has_in ? Buffer(in_data, in) : Buffer(static_cast<T*>(nullptr), 0);
    c.call.out = has_out ? Buffer(out_data, out) : Buffer(static_cast<T*>(nullptr), 0);
    const auto nodes = network_.transport(rank.number).nodes();
    c.plan = schedule::make_dependency_plan(schedule({rank.number, size_, root_, nodes}), size_, c.in_place);
    c.signature = make_signature(c.call, size_, static_cast<std::uint32_t>(number));
  }

  SimNetwork& network_;
  const Collective kind_;
  const int size_, root_;
  const std::size_t count_;
  std::deque<Rank> ranks_;
};

}  // namespace rz::test
