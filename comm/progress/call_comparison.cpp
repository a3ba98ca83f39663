#include "comm/progress/call_comparison.h"

#include <algorithm>

namespace rz {

namespace {

using namespace std::chrono_literals;

constexpr auto first_query = 1s;   // waits of ranks that are merely late are mostly shorter
constexpr auto max_interval = 8s;  // a peer may make its call long after the first query
// A first query of all ranks by all ranks would take seconds on hosts with many ranks, which then wait
// longer. Where calls differ, those of two ranks in a row do.
constexpr int first_queried = 16;
constexpr auto decision_time = 2s;  // an idle rank polls its messages once a second
constexpr auto comparison_poll = 5ms;

/// The properties that calls of one number have in common: the counts of all_to_all_v are those of a pair,
/// and calls without frames have no algorithm.
CallSignature common(CallSignature call) {
  if (call.kind == Collective::all_to_all_v) call.count = 0;
  call.algorithm = 0;
  return call;
}

}  // namespace

void CallComparison::restart(Time now, const void* request) {
  request_ = request;
  interval_ = first_query;
  query_at_ = next_ = request ? now + interval_ : Time::max();
}

void CallComparison::begin(const OtherCall& other) {
  if (difference_) return;
  const std::uint32_t mine = transport_.wait_graph().last_call().sequence;
  difference_ = {std::min(mine, other.theirs.sequence), other,
                 std::chrono::steady_clock::now() + decision_time};
  next_ = {};
  transport_.query_calls(difference_->number, size_ - 1);
}

void CallComparison::advance(Time now) {
  if (difference_) return decide(now);
  const std::uint32_t number = transport_.wait_graph().last_call().sequence;
  if (now >= query_at_) {
    transport_.query_calls(number, interval_ == first_query ? std::min(first_queried, size_ - 1) : size_ - 1);
    replies_until_ = now + decision_time;
    interval_ = std::min<std::chrono::seconds>(2 * interval_, max_interval);
    query_at_ = now + interval_;
  }
  next_ = now < replies_until_ ? now + comparison_poll : query_at_;
  const CallsOfRanks calls = calls_of(number);
  if (const auto& mine = calls[static_cast<std::size_t>(rank_)];
      mine && rank_that_differs(calls, *mine) >= 0) {
    const bool all_queried = size_ - 1 <= first_queried || interval_ > 2 * first_query;
    difference_ = {number, std::nullopt, all_queried ? replies_until_ : now + decision_time};
    if (!all_queried) transport_.query_calls(number, size_ - 1);
    next_ = {};
    decide(now);
  }
}

/// The calls of each rank, as far as they are known here.
CallsOfRanks CallComparison::calls_of(std::uint32_t number) const {
  const WaitForGraph& graph = transport_.wait_graph();
  CallsOfRanks calls(static_cast<std::size_t>(size_));
  for (int r = 0; r < size_; ++r) {
    std::optional<CallSignature>& call = calls[static_cast<std::size_t>(r)];
    if (r == rank_)
      call = graph.call(number);
    else if (const WaitMessage* const state = graph.state_of(r))
      call = state->numbered;
    if (!call && difference_ && difference_->frame && difference_->frame->peer == r)
      call = difference_->frame->theirs;
    if (!call) continue;
    if (call->sequence == number)
      call = common(*call);
    else
      call.reset();
  }
  return calls;
}

void CallComparison::decide(Time now) const {
  const CallsOfRanks calls = calls_of(difference_->number);
  const int majority = rank_of_majority(calls);
  if (majority >= 0 && rank_that_differs(calls, *calls[static_cast<std::size_t>(majority)]) >= 0)
    fail_mismatched(calls, rank_);
  const bool all = std::ranges::all_of(calls, [](const auto& call) { return call.has_value(); });
  if (!all && now < difference_->decide_at) return;
  const auto& mine = calls[static_cast<std::size_t>(rank_)];
  if (mine && rank_that_differs(calls, *mine) >= 0) fail_mismatched(calls, rank_);
  if (difference_->frame) throw Error(*difference_->frame);
}

}  // namespace rz
