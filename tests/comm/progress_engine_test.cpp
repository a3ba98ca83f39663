// Runs: ci

// The progress engine with calls that the test ends: which thread drives, which wakes up, which calls fail.

#include "comm/progress/progress_engine.h"

#include <gtest/gtest.h>

#include <atomic>
#include <optional>
#include <thread>
#include <vector>

#include "comm/core/deadline.h"
#include "comm/core/error.h"
#include "tests/support/error_of.h"

namespace rz {
namespace {

using namespace std::chrono_literals;

/// Calls that end one at a time, in order, while `open`. Counts the threads inside, which must be one.
class Calls final : public Progressable {
 public:
  struct Shared {
    std::atomic<bool> open{true}, broken{false};  // a broken one throws in advance()
    std::atomic<int> inside{0}, ended{0}, polls{0}, failures{0}, closed{0};
    std::atomic<std::thread::id> driver{};
  };

  explicit Calls(Shared& shared) : shared_(shared) {}
  ~Calls() override { ++shared_.closed; }

  void accept(const std::shared_ptr<Request>& request) override {
    for (std::size_t i = 0; i < request->operations.size(); ++i) queue_.push_back(request.get());
  }
  void adopt(Request& request) { queue_.push_back(&request); }
  bool advance(bool, std::vector<Request*>& ended) override {
    const Turn turn(shared_);
    if (shared_.broken) throw Error(Errc::peer_lost, "rank 1 is lost", 1);
    if (!shared_.open || queue_.empty()) return false;
    ended.push_back(queue_.front());
    queue_.erase(queue_.begin());
    ++shared_.ended;
    return true;
  }
  void poll(Time, const Request*, bool) override {}
  void poll_idle() override { ++shared_.polls; }
  void wait(std::chrono::microseconds, bool) override { std::this_thread::yield(); }
  int begin_sleep() override { return std::this_thread::yield(), -1; }
  std::exception_ptr fail(const std::exception_ptr& error, bool) noexcept override {
    const Turn turn(shared_);
    queue_.clear();
    ++shared_.failures;
    return error;
  }

  /// Of a thread that holds the token.
  struct Turn {
    explicit Turn(Shared& shared) : shared(shared) {
      EXPECT_EQ(++shared.inside, 1) << "two threads hold the token";
      shared.driver = std::this_thread::get_id();
    }
    ~Turn() { --shared.inside; }
    Shared& shared;
  };

 private:
  Shared& shared_;
  std::vector<Request*> queue_;
};

struct Engine {
  explicit Engine(const ProgressOptions& options = {}) {
    auto made = std::make_unique<Calls>(shared);
    calls = made.get();
    engine = std::make_shared<ProgressEngine>(std::move(made), options);
    engine->start();
  }
  ~Engine() { engine->stop(); }

  Calls::Shared shared;
  Calls* calls = nullptr;
  std::shared_ptr<ProgressEngine> engine;
};

const CollectiveCall call{.kind = Collective::barrier};

TEST(ProgressEngine, AWaitingThreadDrives) {
  Engine e;
  for (int i = 0; i < 100; ++i) e.engine->submit({&call, 1})->wait();
  EXPECT_EQ(e.shared.ended, 100);
  EXPECT_EQ(e.shared.driver.load(), std::this_thread::get_id());
}

TEST(ProgressEngine, ItsThreadDrivesWhatNobodyWaitsFor) {
  Engine e;
  const auto request = e.engine->submit({&call, 1});
  for (const Deadline end = Deadline::after(10s); !request->done() && !end.expired();)
    std::this_thread::sleep_for(1ms);
  EXPECT_TRUE(request->done());
  EXPECT_NE(e.shared.driver.load(), std::this_thread::get_id());
}

TEST(ProgressEngine, WithoutAThreadDoneDrives) {
  Engine e({.thread = ProgressOptions::none});
  e.shared.open = false;
  const auto request = e.engine->submit({&call, 1});
  EXPECT_FALSE(request->done());
  e.shared.open = true;
  EXPECT_TRUE(request->done());
}

TEST(ProgressEngine, ALargeSubmissionWakesItsThread) {
  std::vector<float> x(1 << 10);
  CollectiveCall large{.kind = Collective::all_reduce};
  large.in = large.out = Buffer(x.data(), x.size());
  constexpr ProgressWaitPolicy slow{
      .inline_turns = 1, .driver_turns = 1, .active_poll = 5'000'000us, .idle_poll = 5'000'000us};
  Engine e({.wake_bytes = 4 << 10, .policy = &slow});
  e.engine->submit({&call, 1})->wait();  // its thread is active now, and polls every 5 s
  const auto request = e.engine->submit({&large, 1});
  for (const Deadline end = Deadline::after(2s); !request->done() && !end.expired();)
    std::this_thread::sleep_for(1ms);
  EXPECT_TRUE(request->done());
}

// Every thread waits for its requests while others drive, run calls inline and submit groups. A waiter that
// missed the release of the token would wait until the test's deadline.
TEST(ProgressEngine, NoWaiterMissesARelease) {
  constexpr int threads = 4, rounds = 20000;
  Engine e;
  std::atomic<int> calls = 0, inline_calls = 0;
  const std::vector<CollectiveCall> group(3, call);
  const auto work = [&](int thread) {
    for (int i = 0; i < rounds; ++i) {
      if ((i + thread) % 3 == 0) {
        e.engine->submit(group)->wait();
        calls += 3;
      } else if (e.engine->try_begin_inline()) {
        ++inline_calls;
        std::optional<Calls::Turn> turn(e.shared);
        if (i % 16 == 0) std::this_thread::yield();
        turn.reset();
        if (i % 4) {
          e.engine->end_inline();
          continue;
        }
        e.engine->continue_inline(call, [&](Request& r) { e.calls->adopt(r); })->wait();
        ++calls;
      } else {
        e.engine->submit({&call, 1})->wait();
        ++calls;
      }
    }
  };
  std::vector<std::thread> all;
  for (int t = 0; t < threads; ++t) all.emplace_back(work, t);
  for (auto& t : all) t.join();
  EXPECT_EQ(e.shared.ended, calls);
  EXPECT_GT(inline_calls, 0);
}

// The end of an inline call notifies no thread, so a waiter must not sleep for it.
TEST(ProgressEngine, AWaiterSeesTheEndOfAnInlineCall) {
  Engine e({.thread = ProgressOptions::none});
  ASSERT_TRUE(e.engine->try_begin_inline());
  std::atomic<bool> ended = false;
  std::thread waiting([&] {
    try {
      e.engine->submit({&call, 1})->wait();
      ended = true;
    } catch (const Error&) {
    }
  });
  std::this_thread::sleep_for(20ms);
  EXPECT_FALSE(ended);
  e.engine->end_inline();
  for (const Deadline end = Deadline::after(5s); !ended && !end.expired();) std::this_thread::sleep_for(1ms);
  EXPECT_TRUE(ended);
  e.engine->abort("the waiter sleeps");
  waiting.join();
}

TEST(ProgressEngine, ACallIsRunInlineOnlyIfNothingIsInFlight) {
  Engine e({.thread = ProgressOptions::none});
  e.shared.open = false;
  const auto pending = e.engine->submit({&call, 1});
  EXPECT_FALSE(e.engine->try_begin_inline());
  e.shared.open = true;
  pending->wait();
  ASSERT_TRUE(e.engine->try_begin_inline());
  EXPECT_FALSE(e.engine->try_begin_inline()) << "the token is held";
  e.engine->end_inline();
}

TEST(ProgressEngine, AnInlineFailureFailsTheGroup) {
  Engine e;
  ASSERT_TRUE(e.engine->try_begin_inline());
  const auto error = std::make_exception_ptr(Error(Errc::mismatch, "another call", 1));
  const auto request = e.engine->fail_inline(error);
  EXPECT_EQ(test::error_of([&] { request->wait(); }).code(), Errc::mismatch);
  EXPECT_FALSE(e.engine->try_begin_inline());
  EXPECT_EQ(test::error_of([&] { e.engine->submit({&call, 1}); }).code(), Errc::mismatch);
  EXPECT_EQ(e.shared.failures, 1);
}

TEST(ProgressEngine, AbortEndsWhatIsInFlight) {
  Engine e;
  e.shared.open = false;
  const auto request = e.engine->submit({&call, 1});
  std::thread aborting([&] {
    std::this_thread::sleep_for(20ms);
    e.engine->abort("enough");
  });
  EXPECT_EQ(test::error_of([&] { request->wait(); }).code(), Errc::aborted);
  aborting.join();
  EXPECT_EQ(test::error_of([&] { e.engine->check(); }).code(), Errc::aborted);
  EXPECT_EQ(e.shared.failures, 1);
}

TEST(ProgressEngine, StopEndsWhatIsInFlightAndCloses) {
  Engine e;
  e.shared.open = false;
  const auto request = e.engine->submit({&call, 1});
  e.engine->stop();
  EXPECT_EQ(test::error_of([&] { request->wait(); }).code(), Errc::aborted);
  EXPECT_EQ(e.shared.closed, 1);
}

TEST(ProgressEngine, AnAbortIsReportedBeforeItCloses) {
  Engine e;
  e.engine->abort("enough");
  e.engine->stop();
  EXPECT_EQ(e.shared.failures, 1);
  EXPECT_EQ(e.shared.closed, 1);
}

TEST(ProgressEngine, NothingRunsBesideAnExclusiveFunction) {
  Engine e;
  e.shared.open = false;
  const auto request = e.engine->submit({&call, 1});
  std::thread waiting([&] { request->wait(); });
  // A thread in wait() drives until its request has ended, so that it is released only then.
  std::this_thread::sleep_for(20ms);
  e.shared.open = true;
  e.engine->run_exclusively([&] {
    const Calls::Turn turn(e.shared);
    std::this_thread::sleep_for(20ms);
  });
  waiting.join();
}

/// Waits without driving, for another thread.
bool ends(const Request& request) {
  for (const Deadline end = Deadline::after(10s); !request.done() && !end.expired();)
    std::this_thread::sleep_for(1ms);
  return request.done();
}

TEST(ProgressEngine, OneThreadDrivesAllOfAProcess) {
  Engine engines[3];
  for (Engine& e : engines) EXPECT_TRUE(ends(*e.engine->submit({&call, 1})));
  for (const Engine& e : engines) EXPECT_EQ(e.shared.driver.load(), engines[0].shared.driver.load());
}

TEST(ProgressEngine, OneThatMakesNoProgressDoesNotDelayOthers) {
  Engine stuck, other;
  stuck.shared.open = false;
  const auto request = stuck.engine->submit({&call, 1});
  for (int i = 0; i < 10; ++i) EXPECT_TRUE(ends(*other.engine->submit({&call, 1})));
  EXPECT_FALSE(request->done());
  stuck.shared.open = true;
  EXPECT_TRUE(ends(*request));
}

TEST(ProgressEngine, AFailureEndsOnlyItsOwnRequests) {
  Engine broken, other;
  broken.shared.broken = true;
  const auto request = broken.engine->submit({&call, 1});
  EXPECT_TRUE(ends(*request));
  EXPECT_EQ(test::error_of([&] { request->wait(); }).code(), Errc::peer_lost);
  EXPECT_TRUE(ends(*other.engine->submit({&call, 1})));
  EXPECT_EQ(other.shared.failures, 0);
}

TEST(ProgressEngine, ACallerTakesOverFromTheThread) {
  Engine e;
  e.shared.open = false;
  const auto request = e.engine->submit({&call, 1});
  for (const Deadline end = Deadline::after(10s);
       e.shared.driver.load() == std::thread::id() && !end.expired();)
    std::this_thread::sleep_for(1ms);
  EXPECT_NE(e.shared.driver.load(), std::this_thread::get_id());
  std::thread opening([&] {
    std::this_thread::sleep_for(20ms);
    e.shared.open = true;
  });
  request->wait();
  opening.join();
  EXPECT_EQ(e.shared.driver.load(), std::this_thread::get_id());
}

TEST(ProgressEngine, OneWithAThreadOfItsOwnClosesInTheBackground) {
  Engine e({.thread = ProgressOptions::own});
  EXPECT_TRUE(ends(*e.engine->submit({&call, 1})));
  e.engine->stop();
  for (const Deadline end = Deadline::after(10s); e.shared.closed == 0 && !end.expired();)
    std::this_thread::sleep_for(1ms);
  EXPECT_EQ(e.shared.closed, 1);
  EXPECT_EQ(e.shared.failures, 0);
}

TEST(ProgressEngine, FailuresArePolledWhileNobodyDrives) {
  Engine e({.failure_poll = 5ms});
  for (const Deadline end = Deadline::after(10s); e.shared.polls < 3 && !end.expired();)
    std::this_thread::sleep_for(1ms);
  EXPECT_GE(e.shared.polls, 3);
}

}  // namespace
}  // namespace rz
