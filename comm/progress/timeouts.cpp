#include "comm/progress/timeouts.h"

#include <algorithm>

#include "comm/core/error.h"

namespace rz {

using Clock = std::chrono::steady_clock;

const Request* Timeouts::check(Time now, const Request* current, const Request* oldest) {
  const auto margin = std::min<Clock::duration>(timeout_ / 4, std::chrono::seconds(1));
  const auto is_near = [&](const Request* r) { return r && now + margin >= r->deadline; };
  const Request* const due = is_near(current) ? current : is_near(oldest) ? oldest : nullptr;
  if (!due) return nullptr;
  if (due->deadline == queried_) return now >= decide_at_ ? due : nullptr;
  queried_ = due->deadline;
  transport_.query_waits();
  decide_at_ = Clock::now() + margin;
  return nullptr;
}

void Timeouts::fail(const Request& request, const WaitState& wait) const {
  const double seconds = std::chrono::duration<double>(timeout_).count();
  const WaitForGraph& graph = transport_.wait_graph();
  const int found = graph.culprit(wait.suspect, wait.waiting_on);
  const int culprit = found < 0 ? wait.suspect : found;
  const std::string cause =
      found < 0
          ? ""
          : concat("; rank ", found, graph.unresponsive(found) ? " sends no reply" : " waits for no rank");
  const Error error(
      Errc::timeout,
      concat(name(request.operations[0].kind), " did not end within ", seconds, " s on rank ", rank_,
             ": it waits for ", wait.text, cause, "; a rank may be stuck, or slower than the timeout allows"),
      culprit);
  transport_.abort({culprit, Errc::timeout, error.what()});
  transport_.progress();  // throws what the group has agreed on
  throw error;
}

}  // namespace rz
