// Runs: long

// Random calls, random delays, random ways to wait: nothing may hang, and every result is exact.

#include <gtest/gtest.h>

#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "comm/communicator.h"
#include "comm/core/error.h"
#include "tests/lab/group.h"

namespace rz {
namespace {

using namespace std::chrono_literals;
using Numbers = std::vector<std::int64_t>;

/// One call in flight: its memory and its expected result.
struct Call {
  Work work;
  std::shared_ptr<Numbers> in, out;
  std::function<std::int64_t(std::size_t)> expected;  // element of out; empty: not checked
};

/// A rank's part of a sequence of calls that `seed` determines alike on every rank.
class Sequence {
 public:
  Sequence(Communicator& comm, unsigned seed)
      : comm_(comm),
        size_(static_cast<std::size_t>(comm.size())),
        rank_(static_cast<std::size_t>(comm.rank())),
        common_random_(seed),
        own_random_(seed * 1000 + static_cast<unsigned>(comm.rank()) + 1) {}

  void run(int calls) {
    std::deque<Call> pending;
    const int long_pause = static_cast<int>(rank_ + 1) * calls / 4;
    for (call_ = 0; call_ < calls; ++call_) {
      pause(call_ == long_pause);
      pending.push_back(make());
      while (pending.size() > own_random_() % 6) finish(pending.front()), pending.pop_front();
    }
    for (Call& c : pending) finish(c);
  }

 private:
  /// Once, longer than a progress thread polls an idle communicator.
  void pause(bool long_one) {
    if (long_one) std::this_thread::sleep_for(1200ms);
    if (own_random_() % 16 == 0) std::this_thread::sleep_for(std::chrono::microseconds(own_random_() % 3000));
  }

  std::int64_t value(std::size_t rank, std::size_t i) const {
    return static_cast<std::int64_t>(rank * 1000003 + i * 7) + call_;
  }
  std::int64_t sum(std::size_t i) const {
    std::int64_t all = 0;
    for (std::size_t r = 0; r < size_; ++r) all += value(r, i);
    return all;
  }

  Call make() {
    constexpr std::size_t counts[] = {0, 1, 5, 300, 9000, 60000};
    const std::size_t n = counts[common_random_() % 6];
    const auto root = static_cast<std::size_t>(common_random_() % size_);
    const unsigned kind = common_random_() % 8;
    const bool whole_in = kind == 1 || kind == 5, whole_out = kind == 2 || kind == 5;
    Call c;
    c.in = std::make_shared<Numbers>(whole_in ? n * size_ : n);
    c.out = std::make_shared<Numbers>(whole_out ? n * size_ : n, -1);
    for (std::size_t i = 0; i < c.in->size(); ++i) (*c.in)[i] = value(rank_, i);
    const ConstBuffer in(c.in->data(), c.in->size());
    const Buffer out(c.out->data(), c.out->size());
    const auto start = [&](Work work, std::function<std::int64_t(std::size_t)> expected) {
      c.work = std::move(work);
      c.expected = std::move(expected);
    };
    const auto at = [now = *this](std::size_t rank, std::size_t i) { return now.value(rank, i); };
    const auto total = [now = *this](std::size_t i) { return now.sum(i); };
    const std::size_t me = rank_, all = size_;
    const int to = static_cast<int>(root);
    switch (kind) {
      case 0:
        start(comm_.all_reduce(in, out, ReduceOp::sum), total);
        break;
      case 1:
        start(comm_.reduce_scatter(in, out), [=](std::size_t i) { return total(me * n + i); });
        break;
      case 2:
        start(comm_.all_gather(in, out), [=](std::size_t i) { return at(i / n, i % n); });
        break;
      case 3:
        start(comm_.broadcast(in, out, to), [=](std::size_t i) { return at(root, i); });
        break;
      case 4:
        start(comm_.reduce(in, out, to), nullptr);
        if (me == root) c.expected = total;
        break;
      case 5:
        start(comm_.all_to_all(in, out), [=](std::size_t i) { return at(i / n, me * n + i % n); });
        break;
      case 6:
        start(comm_.barrier(), nullptr);
        break;
      default: {  // messages around a ring of ranks
        Group both = comm_.group();
        const std::size_t before = (me + all - 1) % all;
        both.send(in, static_cast<int>((me + 1) % all)).recv(out, static_cast<int>(before));
        start(both.launch(), [=](std::size_t i) { return at(before, i); });
      }
    }
    return c;
  }

  void finish(Call& c) {
    switch (own_random_() % 4) {
      case 0:
        std::thread([&] { c.work.wait(); }).join();
        break;
      case 1:
        while (!c.work.done()) std::this_thread::sleep_for(100us);
        [[fallthrough]];
      default:
        c.work.wait();
    }
    for (std::size_t i = 0; c.expected && i < c.out->size(); ++i) ASSERT_EQ((*c.out)[i], c.expected(i)) << i;
  }

  Communicator& comm_;
  std::size_t size_, rank_;
  std::mt19937 common_random_, own_random_;
  int call_ = 0;
};

class Soak : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Over, Soak, testing::Values("auto", "tcp"),
                         [](const auto& info) { return info.param; });

TEST_P(Soak, RandomCallsEndRight) {
  for (const unsigned seed : {1u, 2u}) {
    lab::group(3, {.timeout = 20s, .transport = GetParam()},
               [&](Communicator& comm) { Sequence(comm, seed).run(120); });
  }
}

// Two communicators of a rank, each used by its own thread.
TEST_P(Soak, TwoCommunicatorsSideBySide) {
  lab::group(2, {.timeout = 20s, .transport = GetParam()}, [&](Communicator& first) {
    auto second = first.split(0, -first.rank());
    std::thread other([&] { Sequence(*second, 5).run(80); });
    Sequence(first, 4).run(80);
    other.join();
  });
}

}  // namespace
}  // namespace rz
