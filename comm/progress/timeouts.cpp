#include "comm/progress/timeouts.h"

#include <algorithm>

#include "comm/core/error.h"

namespace rz {

using Clock = std::chrono::steady_clock;

namespace {

/// How long a rank that is in no call of the group may take to reply: it polls once a second, as this one
/// may.
constexpr std::chrono::milliseconds max_idle_reply_time{2200};

std::string describe(const WaitForGraph& graph, int culprit, bool is_short) {
  const WaitMessage* const state = graph.state_of(culprit);
  if (!state) return is_short ? " has sent no reply yet" : " sends no reply";
  if (state->kind != WaitMessage::idle) return " waits for no rank";
  std::string text = " is in no call of this communicator";
  if (state->call.sequence != WaitMessage::no_call)
    text += concat("; its last was ", name(state->call.kind), " #", state->call.sequence);
  return text;
}

}  // namespace

Clock::duration Timeouts::margin() const {
  return std::min<Clock::duration>(timeout_ / 4, std::chrono::seconds(1));
}

/// Ranks in no call may reply later than a short timeout allows.
bool Timeouts::is_short() const { return query_time() < std::chrono::seconds(1); }

Clock::duration Timeouts::query_time() const {
  return timeout_ < std::chrono::seconds(2) ? margin()
                                            : std::min<Clock::duration>(timeout_ / 2, max_idle_reply_time);
}

/// Ranks that are in calls reply at once, those in none within a second; where groups are split from this
/// one, they may be in calls of these.
const Request* Timeouts::check(Time now, const Request* current, const Request* oldest) {
  const auto is_near = [&](const Request* r) { return r && now + query_time() >= r->deadline; };
  const Request* const due = is_near(current) ? current : is_near(oldest) ? oldest : nullptr;
  if (!due) return nullptr;
  if (due->deadline == queried_) return now >= decide_at_ ? due : nullptr;
  queried_ = due->deadline;
  transport_.query_waits();
  const bool others = monitor_ && monitor_->split_waits().has_groups();
  decide_at_ =
      Clock::now() + (others ? std::max<Clock::duration>(query_time(), max_idle_reply_time) : query_time());
  return nullptr;
}

void Timeouts::fail(const Request& request, const WaitState& wait) {
  const double seconds = std::chrono::duration<double>(timeout_).count();
  const WaitForGraph& graph = transport_.wait_graph();
  const int found = graph.culprit(wait.suspect, wait.waiting_on);
  const int culprit = found < 0 ? wait.suspect : found;
  const std::string what = concat(name(request.operations[0].kind), at(request.operations[0].origin.site),
                                  " did not end within ", seconds, " s on rank ", rank_, ": it waits for ",
                                  wait.text),
                    advice = "; a rank may be stuck, or slower than the timeout allows";
  const Failure failure{
      culprit, Errc::timeout,
      concat(what, found < 0 ? "" : concat("; rank ", found, describe(graph, found, is_short())), advice)};
  if (monitor_ && monitor_->expire_in_parent(failure, what + advice, wait.waiting_on)) {
    decide_at_ = Time::max();
    return;
  }
  transport_.abort(failure);
  transport_.progress(all_calls);  // throws what the group has agreed on
  throw Error(failure.code, failure.reason, failure.culprit);
}

void Timeouts::poll_split_groups(Time now) {
  if (!monitor_) return;
  const auto expired = monitor_->split_waits().expired();
  if (!expired) return;
  if (split_decide_at_ == Time{}) {
    transport_.query_waits();
    split_decide_at_ = now + max_idle_reply_time;
  }
  if (now < split_decide_at_) return;
  const WaitForGraph& graph = transport_.wait_graph();
  const int found = graph.culprit(expired->suspect, expired->waiting_on | waits_of_split_groups());
  Failure failure = expired->failure;
  failure.culprit = found < 0 ? expired->suspect : found;
  if (found >= 0)
    failure.reason = concat("rank ", found, describe(graph, found, false), ": ", failure.reason);
  transport_.abort(failure);
  transport_.progress(all_calls);  // throws what the group has agreed on
}

}  // namespace rz
