#include "tools/rzrun/ranks/first_failure.h"

#include <signal.h>

#include <algorithm>
#include <functional>
#include <map>

#include "comm/core/error.h"
#include "comm/transport/failure.h"

namespace rz::rzrun {
namespace {

/// The other ranks have so long to print why they end, after one has failed. All ranks usually
/// exit with 2 when an input is wrong, and one of them prints the reason.
std::chrono::milliseconds time_to_report(const ExitStatus& s) {
  return std::chrono::milliseconds(!s.signal && s.exit_code == 2 ? 3000 : 1000);
}

std::string on_host(const RankEnd& end) { return end.host.empty() ? "" : concat(" on host ", end.host); }

constexpr std::size_t max_calls = 3;  // in a line

bool has_signal_of_rzrun(const RankEnd& end) {
  return end.status.signal == SIGTERM || end.status.signal == SIGKILL;
}

/// What a rank was about that the others waited for.
std::string describe_state(char state) {
  switch (state) {
    case 'T':
      return "was stopped (state T, as by SIGSTOP)";
    case 't':
      return "was stopped by a debugger (state t)";
    case 'D':
      return "waited in the kernel (state D, as for a file system)";
    default:
      return concat("held up others (state ", state, state == 'R' ? ", it ran)" : ", it slept)");
  }
}

std::string describe_loss(const RankEnd& end) {
  return end.has_left ? concat("host ", end.host, " has left (", end.lost, ")")
                      : concat("host ", end.host, " is lost: ", end.lost);
}

}  // namespace

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
  if (first_) {
    const bool was_ended = is_ending && has_signal_of_rzrun(end);
    const bool explains = !end.lost.empty() && first_->error.find(lost_link) != std::string::npos;
    if ((end.is_of(first_->culprit) || explains) && (!was_ended || end.state) && cause_ == 0)
      cause_ = failed_.size() - 1;
    return;
  }
  if (is_ending) return;
  first_ = news_ = end;
  report_until_ = now + time_to_report(end.status);
}

std::optional<FirstFailure::Clock::time_point> FirstFailure::next() const {
  return suspects_.empty() ? report_until_ : std::optional(decide_at_);
}

std::string FirstFailure::stack() const {
  if (!first_ || cause().stack.empty()) return "";
  return concat("the stack of rank ", cause().rank, ":\n", cause().stack);
}

std::vector<std::string> FirstFailure::later() const {
  std::vector<std::string> lines;
  std::map<std::string, std::vector<const RankEnd*>> by_end;
  for (const RankEnd& end : failed_) {
    if (&end == &failed_.front() || &end == &cause()) continue;
    if (!end.status.failed()) continue;
    if (!end.lost.empty())
      lines.push_back(describe_loss(end));
    else if (!has_signal_of_rzrun(end) && end.status != first_->status)
      by_end[describe(end.status)].push_back(&end);
  }
  for (const auto& [how, ends] : by_end) {
    std::vector<int> ranks;
    for (const RankEnd* end : ends) ranks.push_back(end->rank);
    lines.push_back(concat(list_ranks(ranks), ends.size() == 1 ? on_host(*ends[0]) : "", " ", how));
  }
  return lines;
}

/// Ranks that had not come to the call of `end`, as far as recorders of all ranks show.
std::string FirstFailure::waited_for(const RankEnd& end) const {
  const auto number_of = [&](const RankEnd& e) -> std::optional<std::uint32_t> {
    std::optional<std::uint32_t> number;
    for (const auto& [group, last] : e.last_calls)
      if (group == end.group && std::exchange(number, last)) return {};  // two of one name
    return number;
  };
  const auto own = end.group.empty() ? std::nullopt : number_of(end);
  std::vector<int> missing;
  for (const RankEnd& e : failed_)
    if (const auto number = number_of(e); own && number && static_cast<std::int32_t>(*own - *number) > 0)
      missing.push_back(e.rank);
  return missing.empty() ? "" : list_ranks(missing);
}

std::string FirstFailure::waits() const {
  if (!first_) return "";
  std::vector<std::pair<const RankEnd*, std::vector<int>>> calls;  // a rank in the call, and all of them
  for (const RankEnd& end : failed_) {
    if (end.call.empty() || &end == &cause()) continue;
    const auto same = std::ranges::find(calls, end.call, [](const auto& c) { return c.first->call; });
    (same == calls.end() ? calls.emplace_back(&end, std::vector<int>{}) : *same).second.push_back(end.rank);
  }
  std::ranges::stable_sort(calls, std::greater(), [](const auto& c) { return c.second.size(); });
  std::string text;
  std::size_t others = 0;
  for (std::size_t i = 0; i < calls.size(); ++i) {
    const auto& [end, ranks] = calls[i];
    if (i >= max_calls) others += ranks.size();
    if (i >= max_calls) continue;
    const std::string late = waited_for(*end);
    text += concat(i ? "; " : "", list_ranks(ranks),
                   !late.empty()       ? " waited in "
                   : ranks.size() == 1 ? " was in "
                                       : " were in ",
                   end->call, late.empty() ? "" : " for " + late);
  }
  return others ? concat(text, "; ", others, " more in other calls") : text;
}

std::string FirstFailure::line(int ranks) const {
  if (!first_) return "";
  const RankEnd& end = cause();
  // Its own reason counts more than what it was about; one that was stopped has none.
  const bool is_late = cause_ > 0 && end.state && (end.error.empty() || end.state == 'T');
  const std::string who = concat("rank ", end.rank, " of ", ranks, on_host(end), " ");
  std::string line =
      !end.lost.empty() ? describe_loss(end)
      : is_late ? concat(who, describe_state(end.state), "; rank ", first_->rank, " ", describe_end(*first_))
                : who + describe_end(end);
  if (const std::string& error = (is_late ? *first_ : end).error; !error.empty()) line += ": " + error;
  std::ranges::replace(line, '\n', ' ');
  return line;
}

}  // namespace rz::rzrun
