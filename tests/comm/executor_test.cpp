// Runs: ci
// Not under sanitizers: NoBuiltInScheduleReduces
// Not under the thread sanitizer: SomeRanksMayCallInPlace AFinalStepOfOneOperandDivides

// Verified schedules that no algorithm of the list has: the executor runs them too.

#include "comm/schedule/executor.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "comm/backends/native/native_backend.h"
#include "comm/core/error.h"
#include "comm/core/math.h"
#include "comm/schedule/algorithms/algorithm.h"
#include "comm/schedule/chunk_layout.h"
#include "tests/proof/verify.h"
#include "tests/support/elements.h"
#include "tests/support/error_of.h"
#include "tests/support/sim_transport.h"

namespace rz {
namespace {

/// A peer whose bytes arrive one element at a time without a pause: the call always progresses.
class Trickle final : public Transport {
 public:
  std::size_t post(int, Channel, const CallSignature& signature, std::span<const std::byte> bytes) override {
    signature_ = signature;
    posted_ += bytes.size();
    return bytes.size();
  }
  std::uint64_t released(int, Channel) override { return posted_; }
  ReceiveView peek(int, Channel) override {
    return {signature_, {element_, posted_ > 0 ? sizeof element_ : 0}};
  }
  void consume(int, Channel, std::size_t) override {}
  std::size_t receive(int, Channel, std::span<std::byte> into) override {
    const std::size_t n = std::min(into.size(), sizeof element_);
    std::memcpy(into.data(), element_, n);
    return n;
  }
  void progress(std::uint32_t) override {}
  void wait(std::chrono::microseconds, bool) override {}
  void wake() noexcept override {}
  void abort(const Failure&) noexcept override {}
  void query_waits() override {}
  void query_calls(std::uint32_t, int) override {}
  void record_call(const CallSignature&) override {}
  void reply_waits(const WaitMessage&) override {}
  const WaitForGraph& wait_graph() const override { return wait_graph_; }
  std::span<const int> nodes() const override { return nodes_; }
  std::string describe() const override { return "trickle"; }

 private:
  CallSignature signature_;
  std::uint64_t posted_ = 0;
  std::byte element_[sizeof(float)]{};
  const std::vector<int> nodes_{0, 1};
  WaitForGraph wait_graph_{0};
};

TEST(ProgressEngine, ASlowCallEndsAtItsDeadline) {
  const auto backend =
      make_native_backend(0, 2, std::make_unique<Trickle>(), {.timeout = std::chrono::milliseconds(20)});
  std::vector<float> x(8 << 20);
  CollectiveCall op{.kind = Collective::all_reduce};
  op.in = Buffer(x.data(), x.size()), op.out = Buffer(x.data(), x.size());
  const Work work = backend->submit({&op, 1});
  const Error e = test::error_of([&] { work.wait(); });
  EXPECT_EQ(e.code(), Errc::timeout) << e.what();
}

/// Pieces of at most 13 bytes, mostly not a whole number of elements.
constexpr test::SimJitter in_pieces{.max_piece_bytes = 13, .max_unread_bytes = 1 << 20};

/// An all_reduce of `count` elements; those of rank r are 1 + (i + r) % 7. Returns the result of every rank.
/// Ranks for which `in_place` is true call in place.
template <class T>
std::vector<std::vector<T>> run(schedule::ScheduleFunction schedule, ReduceOp op, std::size_t count,
                                std::vector<bool> in_place) {
  const int size = static_cast<int>(in_place.size());
  struct Rank {
    std::vector<T> in, out;
    CollectiveCall call;
    schedule::DependencyPlan plan;
    std::unique_ptr<schedule::Executor> executor;
  };
  test::SimNetwork network(size, {.jitter = in_pieces});
  std::vector<Rank> ranks(in_place.size());
  std::vector<test::SimProgram> programs;
  for (int r = 0; r < size; ++r) {
    Rank& me = ranks[static_cast<std::size_t>(r)];
    const bool same = in_place[static_cast<std::size_t>(r)];
    for (std::size_t i = 0; i < count; ++i)
      me.in.push_back(test::rounded<T>(static_cast<double>(1 + (i + static_cast<std::size_t>(r)) % 7)));
    me.out = same ? me.in : std::vector<T>(count);
    me.call.kind = Collective::all_reduce;
    me.call.in = Buffer(same ? me.out.data() : me.in.data(), count);
    me.call.out = Buffer(me.out.data(), count);
    me.call.op = op;
    me.plan = schedule::make_dependency_plan(schedule({r, size, 0}), size, rz::in_place(me.call, r, size));
    me.executor = std::make_unique<schedule::Executor>(network.transport(r), r, size);
    me.executor->start(me.call, me.plan, make_signature(me.call, size, 0));
    programs.push_back({[&me] { return me.executor->advance(); }, [&me] { return me.executor->complete(); },
                        [&me] { return me.executor->waiting_on().text; }});
  }
  for (const auto& e : network.run_until_complete(programs)) EXPECT_FALSE(e) << e->what();
  std::vector<std::vector<T>> out;
  for (Rank& r : ranks) out.push_back(std::move(r.out));
  return out;
}

template <class T>
std::vector<T> sums_of_two(std::size_t count, double divisor = 1) {
  std::vector<T> all;
  for (std::size_t i = 0; i < count; ++i)
    all.push_back(test::rounded<T>(static_cast<double>(2 + i % 7 + (i + 1) % 7) / divisor));
  return all;
}

template <class T>
std::size_t wrong(const std::vector<T>& got, const std::vector<T>& want) {
  std::size_t n = 0;
  for (std::size_t i = 0; i < want.size(); ++i) n += !(got[i] == want[i]);
  return n;
}

constexpr std::size_t count = 10'007;

schedule::Schedule receives_then_adds_two_chunks(schedule::RankContext context) {
  if (context.rank == 0)
    return {.steps = {schedule::send(1, schedule::input(0)), schedule::recv(schedule::output(0), 1)}};
  return {.scratch_cells = 1,
          .steps = {schedule::recv(schedule::scratch(0, 0), 0),
                    schedule::reduce_step(schedule::output(0),
                                          {schedule::local(schedule::scratch(0, 0), false),
                                           schedule::local(schedule::input(0))},
                                          true),
                    schedule::send(0, schedule::output(0))}};
}

TEST(ScheduleExecutor, ASumOfTwoChunksThatFollowsAReceiveGoesByWholeElements) {
  ASSERT_TRUE(
      schedule::verify(receives_then_adds_two_chunks, Collective::all_reduce, 2, 0, schedule::InPlace::none));
  for (const bool in_place : {false, true}) {
    const auto out = run<double>(receives_then_adds_two_chunks, ReduceOp::sum, count, {in_place, in_place});
    for (const auto& rank : out) EXPECT_EQ(wrong(rank, sums_of_two<double>(count)), 0u);
  }
}

/// In place, rank 0's sum overwrites data that rank 1 reads, a few bytes at a time.
schedule::Schedule overwrites_what_it_sent(schedule::RankContext context) {
  if (context.rank == 0)
    return {.steps = {schedule::send(1, schedule::input(0)),
                      schedule::reduce_step(schedule::output(0),
                                            {schedule::local(schedule::input(0)), schedule::from(1)}, true)}};
  return {.scratch_cells = 1,
          .steps = {schedule::recv(schedule::scratch(0, 0), 0), schedule::send(0, schedule::input(0)),
                    schedule::reduce_step(schedule::output(0),
                                          {schedule::local(schedule::scratch(0, 0), false),
                                           schedule::local(schedule::input(0))},
                                          true)}};
}

TEST(ScheduleExecutor, ASumOverWhatIsStillBeingSentGoesByWholeElements) {
  ASSERT_TRUE(
      schedule::verify(overwrites_what_it_sent, Collective::all_reduce, 2, 0, schedule::InPlace::all));
  const auto out = run<double>(overwrites_what_it_sent, ReduceOp::sum, count, {true, true});
  for (const auto& rank : out) EXPECT_EQ(wrong(rank, sums_of_two<double>(count)), 0u);
}

/// A separate step averages data that both ranks receive with data of rank 1.
schedule::Schedule divides_in_a_step_of_one_operand(schedule::RankContext context) {
  if (context.rank == 0)
    return {.steps = {schedule::send(1, schedule::input(0)),
                      schedule::reduce_step(schedule::output(0), {schedule::from(1, true)}, true)}};
  return {.scratch_cells = 1,
          .steps = {
              schedule::reduce_step(schedule::scratch(0, 0),
                                    {schedule::from(0), schedule::local(schedule::input(0))}),
              schedule::send(0, schedule::scratch(0, 0)),
              schedule::reduce_step(schedule::output(0), {schedule::local(schedule::scratch(0, 0))}, true)}};
}

template <class T>
void expect_averages() {
  const auto out = run<T>(divides_in_a_step_of_one_operand, ReduceOp::avg, count, {false, false});
  for (const auto& rank : out) EXPECT_EQ(wrong(rank, sums_of_two<T>(count, 2)), 0u) << name(dtype_of<T>);
}

TEST(ScheduleExecutor, AFinalStepOfOneOperandDivides) {
  ASSERT_TRUE(schedule::verify(divides_in_a_step_of_one_operand, Collective::all_reduce, 2, 0,
                               schedule::InPlace::none));
  expect_averages<float>();
  expect_averages<double>();
  expect_averages<bf16>();
  expect_averages<f16>();
  expect_averages<std::int32_t>();
  expect_averages<std::int64_t>();
  const auto out = run<float>(divides_in_a_step_of_one_operand, ReduceOp::sum, count, {false, false});
  for (const auto& rank : out) EXPECT_EQ(wrong(rank, sums_of_two<float>(count)), 0u);
}

// The verifier proves this for all group sizes; these run.
TEST(ScheduleExecutor, SomeRanksMayCallInPlace) {
  constexpr std::size_t few = 211;
  for (const schedule::Algorithm& a : schedule::algorithms()) {
    if (a.collective != Collective::all_reduce) continue;
    for (int size = 2; size <= 4; ++size) {
      std::vector<float> want(few);
      for (int r = 0; r < size; ++r)
        for (std::size_t i = 0; i < few; ++i)
          want[i] += static_cast<float>(1 + (i + static_cast<std::size_t>(r)) % 7);
      for (unsigned mask = 0; mask < 1u << size; ++mask) {
        std::vector<bool> in_place;
        for (int r = 0; r < size; ++r) in_place.push_back(mask >> r & 1);
        for (const auto& rank : run<float>(a.schedule, ReduceOp::sum, few, in_place))
          ASSERT_EQ(wrong(rank, want), 0u) << a.name << ", " << testing::PrintToString(in_place);
      }
    }
  }
}

/// A step advances by whole elements, unless it copies bytes as they arrive.
bool moves_by_elements(const schedule::DependencyPlan& plan, int step) {
  const schedule::DependencyPlan::PlannedStep& s = plan.steps[static_cast<std::size_t>(step)];
  if (s.step.kind == schedule::Step::send) return false;
  if (s.step.operands.size() > 1) return true;
  return !s.remote &&
         std::all_of(s.after.begin(), s.after.end(), [&](const schedule::DependencyPlan::Dependency& d) {
           return d.complete || moves_by_elements(plan, d.step);
         });
}

/// The first step of a plan that reduces while an operand or its target advances by bytes, or that is final
/// and has one operand; -1: none.
int depends_on_the_executor(const schedule::DependencyPlan& plan) {
  for (std::size_t i = 0; i < plan.steps.size(); ++i) {
    const schedule::DependencyPlan::PlannedStep& s = plan.steps[i];
    if (s.step.kind != schedule::Step::reduce) continue;
    if (s.step.operands.size() == 1 && !s.step.final) continue;
    const bool odd =
        std::any_of(s.after.begin(), s.after.end(), [&](const schedule::DependencyPlan::Dependency& d) {
          return !d.complete && !moves_by_elements(plan, d.step);
        });
    if (odd || s.step.operands.size() == 1) return static_cast<int>(i);
  }
  return -1;
}

// So none of them ever had wrong sums when the executor counted bytes there.
TEST(ScheduleExecutor, NoBuiltInScheduleReducesPartialElements) {
  for (const schedule::ScheduleFunction f : {receives_then_adds_two_chunks, divides_in_a_step_of_one_operand})
    EXPECT_GE(depends_on_the_executor(schedule::make_dependency_plan(f({1, 2, 0}), 2, false)), 0);
  EXPECT_GE(
      depends_on_the_executor(schedule::make_dependency_plan(overwrites_what_it_sent({0, 2, 0}), 2, true)),
      0);
  for (const schedule::Algorithm& a : schedule::algorithms())
    for (int size = 2; size <= 9; ++size)
      for (const int root : {0, size - 1})
        for (const int per_node : {1, 2, 3, size}) {
          std::vector<int> node;
          for (int r = 0; r < size; ++r) node.push_back(r / per_node);
          for (int r = 0; r < size; ++r)
            for (const bool in_place : {false, true}) {
              const schedule::DependencyPlan plan =
                  schedule::make_dependency_plan(a.schedule({r, size, root, node}), size, in_place);
              EXPECT_EQ(depends_on_the_executor(plan), -1)
                  << name(a.collective) << ' ' << a.name << ", rank " << r << " of " << size << ", root "
                  << root << ", " << per_node << " a node" << (in_place ? ", in place" : "");
            }
        }
}

}  // namespace
}  // namespace rz
