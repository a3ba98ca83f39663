#include "comm/progress/wait_reporter.h"

#include <algorithm>
#include <mutex>
#include <utility>

#include "comm/core/text.h"
#include "comm/os/process.h"

namespace rz {

namespace {

using namespace std::chrono_literals;

// A rank that is in no call polls its messages once a second (ProgressOptions::failure_poll).
constexpr auto max_reply_time = 1200ms;
constexpr auto reply_poll = 5ms;
constexpr int max_named_ranks = 4;

constinit ProcessMutex list_mutex;
constinit WaitReporter* first_of_process = nullptr;  // those with a long wait
constinit std::uint64_t generation_of_list = 0;

std::string ranks_of(const RankSet& ranks) {
  std::string text;
  int named = 0;
  for (std::size_t r = 0; r < ranks.size() && named < max_named_ranks; ++r)
    if (ranks[r]) text += concat(named++ ? ", " : "", r);
  return ranks.count() > max_named_ranks ? text + ", …" : text;
}

}  // namespace

std::string describe_call(const CallSignature& call) {
  return traits(call.kind).point_to_point ? name(call.kind) : describe(call);
}

WaitReporter::WaitReporter(Transport& transport, int rank, int size, WaitReportOptions options)
    : transport_(transport), rank_(rank), size_(size), options_(std::move(options)) {}

WaitReporter::~WaitReporter() { set_long_wait({}); }

void WaitReporter::restart(Time now, const void* request) {
  request_ = request;
  since_ = now, next_ = request ? now + options_.after : Time::max();
  if (std::exchange(queried_, false)) set_long_wait({});
}

/// Lists the wait in the process; an empty text removes it. A child of fork() has no wait of its parent.
void WaitReporter::set_long_wait(std::string text) {
  const std::lock_guard lock(list_mutex);
  if (generation_of_list != fork_generation()) first_of_process = nullptr;
  generation_of_list = fork_generation();
  WaitReporter** at = &first_of_process;
  while (*at && *at != this) at = &(*at)->next_of_process_;
  if (*at) *at = next_of_process_;
  long_wait_ = std::move(text);
  if (!long_wait_.empty()) next_of_process_ = std::exchange(first_of_process, this);
}

std::string WaitReporter::of_process(const WaitReporter* but) {
  const std::lock_guard lock(list_mutex);
  std::string text;
  if (generation_of_list != fork_generation()) return text;
  for (const WaitReporter* r = first_of_process; r; r = r->next_of_process_)
    if (r != but) text += concat(text.empty() ? "" : ", and ", r->long_wait_);
  return text;
}

/// Whether every rank that the call waits for has replied.
bool WaitReporter::replied(const WaitState& wait) const {
  const WaitForGraph& graph = transport_.wait_graph();
  for (std::size_t r = 0; r < wait.waiting_on.size(); ++r)
    if (wait.waiting_on[r] && !graph.state_of(static_cast<int>(r))) return false;
  return wait.waiting_on.any();
}

void WaitReporter::advance(Time now, const std::string& call, const WaitState& wait) {
  if (!queried_) {
    queried_ = true;
    set_long_wait(
        concat(call, " of ", options_.communicator, " on rank ", rank_, " (waits for ", wait.text, ")"));
    transport_.query_waits();
    next_ = now + reply_poll, decide_at_ = now + max_reply_time;
    return;
  }
  if (now < decide_at_ && !replied(wait)) {
    next_ = now + reply_poll;
    return;
  }
  next_ = Time::max();
  LongWait::report(options_, rank_, size_, call, now - since_, reason(wait));
}

std::string WaitReporter::reason(const WaitState& wait) const {
  std::string text = concat("it waits for ", wait.text);
  int named = 0;
  for (std::size_t r = 0; r < wait.waiting_on.size() && named < max_named_ranks; ++r) {
    if (!wait.waiting_on[r]) continue;
    ++named;
    text += concat("; rank ", r);
    const WaitMessage* const state = transport_.wait_graph().state_of(static_cast<int>(r));
    if (!state)
      text += " sends no reply";
    else if (state->kind == WaitMessage::idle && state->text().empty())
      text += " is in no call of this communicator";
    else if (state->kind == WaitMessage::elsewhere)
      text += concat(" is in no call of this communicator; in one that is split from it, it waits for rank ",
                     ranks_of(state->waits_for));
    else if (state->kind == WaitMessage::idle)
      text += concat(" is in no call of this communicator; its process is in ", state->text());
    else
      text += concat(" is in ", describe_call(state->call),
                     state->waits_for.none() ? std::string(" and waits for no rank")
                                             : concat(" and waits for rank ", ranks_of(state->waits_for)));
  }
  if (const std::string others = of_process(this); !others.empty())
    text += concat("; this process is also in ", others);
  return text;
}

}  // namespace rz
