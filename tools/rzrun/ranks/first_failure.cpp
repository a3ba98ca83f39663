#include "tools/rzrun/ranks/first_failure.h"

#include <signal.h>

#include <algorithm>

#include "comm/core/error.h"

namespace rz::rzrun {
namespace {

/// The other ranks have so long to print why they end, after one has exited with an error. All ranks usually
/// exit with 2 when an input is wrong, and one of them prints the reason.
std::chrono::milliseconds time_to_report(const ExitStatus& s) {
  return std::chrono::milliseconds(s.signal ? 0 : s.exit_code == 2 ? 3000 : 1000);
}

std::string on_host(const RankEnd& end) { return end.host.empty() ? "" : concat(" on host ", end.host); }

std::string describe_loss(const RankEnd& end) { return concat("host ", end.host, " is lost: ", end.lost); }

}  // namespace

std::string describe_first(const RankEnd& end, int ranks) {
  if (!end.lost.empty()) return describe_loss(end);
  return concat("rank ", end.rank, " of ", ranks, on_host(end), " failed first: ", describe_end(end));
}

void FirstFailure::add(const RankEnd& end, bool is_ending, Clock::time_point now) {
  if (!has_several_hosts_ || first_ || is_ending) return report(end, is_ending, now);
  if (suspects_.empty()) decide_at_ = now + time_to_report(end.status);
  suspects_.push_back(end);
  if (end.status.signal || !end.lost.empty()) decide(false, is_ending, now);
}

void FirstFailure::decide(bool any_running, bool is_ending, Clock::time_point now) {
  if (suspects_.empty() || (any_running && now < decide_at_)) return;
  const auto score = [](const RankEnd& e) { return !e.lost.empty() ? 2 : e.status.signal ? 1 : 0; };
  const auto first = std::ranges::max_element(suspects_, {}, score);  // of equal ones the earliest
  std::rotate(suspects_.begin(), first, first + 1);
  for (const RankEnd& end : std::exchange(suspects_, {})) report(end, is_ending, now);
  if (report_until_ && now >= decide_at_) report_until_ = now;  // they have had their time
}

void FirstFailure::report(const RankEnd& end, bool is_ending, Clock::time_point now) {
  failed_.push_back(end);
  if (!first_) {
    if (is_ending) return;
    first_ = news_ = end;
    report_until_ = now + time_to_report(end.status);
    return;
  }
  const bool ended = end.status.signal == SIGTERM || end.status.signal == SIGKILL;
  if (!end.lost.empty())
    later_.push_back(concat(describe_loss(end), " after that"));
  else if (!ended && end.status != first_->status)
    later_.push_back(concat("rank ", end.rank, on_host(end), " ", describe(end.status), " after that"));
}

std::optional<FirstFailure::Clock::time_point> FirstFailure::next() const {
  return suspects_.empty() ? report_until_ : std::optional(decide_at_);
}

const RankEnd& FirstFailure::cause() const {
  const RankEnd& first = failed_.front();
  const auto blamed = std::ranges::find(failed_, first.culprit, &RankEnd::rank);
  return first.culprit >= 0 && blamed != failed_.end() ? *blamed : first;
}

bool FirstFailure::has_story() const {
  return !failed_.empty() &&
         (!cause().error.empty() || !cause().activity.empty() || (failed_.size() > 1 && has_several_hosts_));
}

std::string FirstFailure::stack() const {
  if (failed_.empty() || cause().stack.empty()) return "";
  return concat("the stack of rank ", cause().rank, ":\n", cause().stack);
}

std::string FirstFailure::story(int ranks) const {
  if (failed_.empty()) return "";
  const RankEnd& end = cause();
  std::string line = end.lost.empty()
                         ? concat("rank ", end.rank, " of ", ranks, on_host(end), " ", describe_end(end))
                         : describe_loss(end);
  if (!end.error.empty()) line += ": " + end.error;
  std::ranges::replace(line, '\n', ' ');
  return line;
}

}  // namespace rz::rzrun
