#include "comm/backends/nccl/watchdog.h"

#include <algorithm>
#include <utility>

#include "comm/core/error.h"
#include "comm/os/helper_thread.h"

namespace rz::nccl {

namespace {

using namespace std::chrono_literals;

constexpr auto poll_interval = 50ms;         // of NCCL's errors while operations are in flight
constexpr auto cancel_grace = 1s;            // of an operation in a cancelled group
constexpr auto store_poll_delay = 1s;        // age of an operation from which the store is polled
constexpr auto store_poll_interval = 200ms;  // of the store
constexpr auto store_timeout = 1s;           // for one exchange with the store
constexpr const char* claims_key = "nccl/verdict/claims";
constexpr const char* verdict_key = "nccl/verdict";
constexpr const char* alarms_key = "nccl/alarms";
std::string progress_key(int rank) { return concat("nccl/progress/", rank); }

/// Format in the store: "code culprit reason".
std::string encode(const Failure& f) {
  return concat(static_cast<int>(f.code), ' ', f.culprit, ' ', f.reason);
}
Failure decode(const std::string& text) {
  const std::size_t first = text.find(' '), second = text.find(' ', first + 1);
  const auto words = words_of(text);
  const auto code = words.size() < 2 ? std::nullopt : parse_number<int>(words[0]);
  const auto culprit = words.size() < 2 ? std::nullopt : parse_number<int>(words[1]);
  require(second != std::string::npos && code && culprit, Errc::rendezvous, "key '", verdict_key,
          "' is damaged: ", text);
  return {*culprit, static_cast<Errc>(*code), text.substr(second + 1)};
}

std::string describe_group(std::span<const CollectiveCall> group) {
  std::string text;
  for (const CollectiveCall& op : group) text += concat(text.empty() ? "" : " + ", describe(op));
  return text;
}

}  // namespace

Watchdog::Watchdog(std::shared_ptr<NcclComm> comm, std::shared_ptr<Store> store,
                   std::shared_ptr<Backend> host, std::shared_ptr<void> keep, const WatchdogOptions& options)
    : nccl_comm_(std::move(comm)),
      store_(std::move(store)),
      host_(std::move(host)),
      kept_alive_(std::move(keep)),
      options_(options),
      long_wait_(options.waits, options.rank, options.size) {
  call_progress_.sent.resize(static_cast<std::size_t>(options.size));
  call_progress_.received.resize(static_cast<std::size_t>(options.size));
  thread_ = helper_thread([this] { run(); });
}

Watchdog::~Watchdog() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

// ---- requests in flight

std::shared_ptr<NcclRequest> Watchdog::begin(std::span<const CollectiveCall> group) {
  if (group_status_->failed()) group_status_->rethrow();
  std::string text = describe_group(group), collectives;
  const std::lock_guard lock(mutex_);
  PendingWait pending;
  for (const CollectiveCall& op : group) {
    if (!traits(op.kind).point_to_point) {
      collectives += concat(collectives.empty() ? "" : " + ", describe(op));
      continue;
    }
    const bool sends = op.kind == Collective::send;
    auto& counter =
        (sends ? call_progress_.sent : call_progress_.received)[static_cast<std::size_t>(op.root)];
    pending.messages.push_back({op.root, sends, counter++});
  }
  if (!collectives.empty()) {
    pending.collective = call_progress_.called;
    call_progress_.add(std::move(collectives));
  }
  auto request =
      std::make_shared<NcclRequest>(group_status_, std::move(text), std::move(pending), options_.timeout);
  requests_.push_back(request);
  changed_.notify_all();
  return request;
}

void Watchdog::mark_issued(const std::shared_ptr<NcclRequest>& request, Event ready, Event end,
                           bool captured) {
  request->set_events(std::move(ready), std::move(end), captured);
  const std::lock_guard lock(mutex_);
  if (captured) std::erase(requests_, request);
  retire_completed();
}

std::shared_ptr<NcclRequest> Watchdog::watch_stream(const Stream& stream, std::chrono::milliseconds limit) {
  if (group_status_->failed()) group_status_->rethrow();
  const Event end = stream.record();
  std::shared_ptr<NcclRequest> request;
  {
    const std::lock_guard lock(mutex_);
    request = std::make_shared<NcclRequest>(group_status_,
                                            concat("what a stream of ", name(stream.device()), " holds"),
                                            PendingWait{.stream = call_progress_.waited_streams++}, limit);
    request->set_events(end, end, false);
    watched_streams_.push_back(request);
  }
  changed_.notify_all();
  return request;
}

/// Drops completed requests. A failure of the device is thrown by wait().
void Watchdog::retire_completed() {
  while (!requests_.empty() && requests_.front()->done()) requests_.pop_front();
  std::erase_if(watched_streams_, [](const auto& request) { return request->done(); });
}

/// The request in flight with the earliest deadline.
std::shared_ptr<NcclRequest> Watchdog::earliest_deadline() const {
  std::shared_ptr<NcclRequest> first = requests_.empty() ? nullptr : requests_.front();
  for (const auto& request : watched_streams_)
    if (!first || request->deadline.remaining() < first->deadline.remaining()) first = request;
  return first;
}

CallProgress Watchdog::call_progress() {
  const std::lock_guard lock(mutex_);
  CallProgress s = call_progress_;
  s.started = s.issued = s.called;
  for (const auto& request : requests_) {
    if (!request->pending_on.collective) continue;
    const std::uint64_t number = *request->pending_on.collective;
    if (!request->issued()) s.issued = std::min(s.issued, number);
    try {
      if (!request->has_started()) s.started = std::min(s.started, number);
    } catch (const Error&) {  // reported by the failed operation
    }
  }
  return s;
}

// ---- failures

void Watchdog::request_termination(Termination request) {
  {
    const std::lock_guard lock(mutex_);
    if (!termination_) termination_ = std::move(request);
  }
  changed_.notify_all();
}

void Watchdog::fail_submission(const NcclError& failed) {
  const bool by_others = failed.result == remote_error || failed.result == system_error;
  const Errc code = failed.result == remote_error ? Errc::peer_lost : Errc::system;
  request_termination(
      {{by_others ? -1 : options_.rank, code, concat("rank ", options_.rank, ": ", failed.text())},
       by_others});
  group_status_->rethrow();
}

void Watchdog::fail_submission(Failure failure) {
  request_termination({std::move(failure), false});
  group_status_->rethrow();
}

void Watchdog::abort(const Failure& failure) noexcept {
  request_termination({failure, false});
  group_status_->wait_published(900ms);
}

bool Watchdog::depart() noexcept {
  {
    const std::lock_guard lock(mutex_);
    retire_completed();
    if (requests_.empty() && !group_status_->failed()) return true;
  }
  if (!group_status_->failed())
    request_termination(
        {{options_.rank, Errc::peer_lost,
          concat("rank ", options_.rank, " destroyed its communicator with operations in flight")},
         false});
  group_status_->wait_published(10s);
  return false;
}

// ---- the watchdog thread

void Watchdog::run() {
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    retire_completed();
    const auto front = earliest_deadline();
    if (!termination_ && !front) {
      changed_.wait(lock);
      continue;
    }
    auto request = std::exchange(termination_, std::nullopt);
    lock.unlock();
    if (front) report_long_wait(*front);
    if (!request) request = check_communicator(*front);
    if (request) return terminate(*std::move(request), front);
    const auto nap = std::min<Deadline::Clock::duration>(poll_interval, front->deadline.remaining() + 1ms);
    lock.lock();
    if (!termination_ && !stopping_) changed_.wait_for(lock, nap);
  }
}

/// The ranks publish what they are in only after a deadline, so the line cannot have those that are missing.
void Watchdog::report_long_wait(const NcclRequest& front) {
  const auto now = Deadline::Clock::now();
  if (!long_wait_.is_due(now, static_cast<std::uint64_t>(front.submitted_at.time_since_epoch().count())))
    return;
  const auto& collective = front.pending_on.collective;
  long_wait_.report(
      now, concat(front.description, collective ? concat(", collective #", *collective) : ""),
      front.has_started() ? "NCCL waits for another rank, or transfers" : "the stream has not reached it");
}

/// Reason to terminate, from the state of NCCL, the request's deadline, or the store.
std::optional<Watchdog::Termination> Watchdog::check_communicator(const NcclRequest& front) {
  std::string text;
  const Result state = nccl_comm_->async_state(&text);
  const std::string prefix = concat("rank ", options_.rank, ": ", front.description);
  if (state != success && state != in_progress) {
    const bool by_others = state == remote_error || state == system_error;
    const Errc code = state == remote_error ? Errc::peer_lost : Errc::system;
    return Termination{{by_others ? -1 : options_.rank, code, concat(prefix, ": NCCL failed: ", text)},
                       by_others};
  }
  try {
    host_->check();  // it finds ranks that have ended, or were stopped
  } catch (const Error& e) {
    // In a cancelled group it may be one that the others have completed.
    if (e.code() != Errc::cancelled || Deadline::Clock::now() - front.submitted_at > cancel_grace)
      return Termination{{e.culprit(), e.code(), e.what()}, false};
  }
  if (front.deadline.expired())
    return Termination{
        {-1, Errc::timeout, concat(prefix, " did not end within ", front.timeout.count(), " ms")}, true};
  const bool late = Deadline::Clock::now() - front.submitted_at > store_poll_delay;
  if (!late || !store_responsive_ || !next_store_poll_.expired()) return std::nullopt;
  next_store_poll_ = Deadline::after(store_poll_interval);
  return check_store(front);
}

/// Replies to an alarm with this rank's progress; returns another rank's failure.
std::optional<Watchdog::Termination> Watchdog::check_store(const NcclRequest&) {
  struct Found {
    std::atomic<bool> reachable{false};
    std::optional<Failure> verdict;
  };
  const auto found = std::make_shared<Found>();
  store_responsive_ =
      run_with_timeout(store_timeout,
                       [found, store = store_, rank = options_.rank, progress = call_progress().serialize()] {
                         try {
                           if (store->add(claims_key, 0) > 0)
                             found->verdict =
                                 decode(store->get(verdict_key, Deadline::after(store_timeout / 2)));
                           else if (store->add(alarms_key, 0) > 0)
                             store->set(progress_key(rank), progress);
                           found->reachable = true;
                         } catch (const std::exception&) {  // store_responsive_ becomes false
                         }
                       }) &&
      found->reachable;
  if (!store_responsive_ || !found->verdict) return std::nullopt;
  return Termination{*found->verdict, false};
}

void Watchdog::terminate(Termination request, const std::shared_ptr<NcclRequest>& front) {
  if (request.query_ranks) request.failure = query_ranks(std::move(request.failure), front.get());
  const Failure verdict = elect_failure(request.failure);
  group_status_->fail(verdict);  // before the abort: operations that end from now on have no result
  const bool aborted = nccl_comm_->abort(options_.abort_limit, kept_alive_);
  if (verdict.code != Errc::cancelled) host_->abort(verdict.reason);
  group_status_->publish(aborted
                             ? ""
                             : concat("; ncclCommAbort on rank ", options_.rank, " had not returned after ",
                                      options_.abort_limit.count(), " ms and was left behind"));
}

/// Publishes this rank's progress, collects that of the others, and adds the culprit to the failure.
Failure Watchdog::query_ranks(Failure failure, const NcclRequest* front) {
  struct Replies {
    std::mutex mutex;
    std::vector<std::optional<CallProgress>> of;
  };
  const auto replies = std::make_shared<Replies>();
  const auto own = static_cast<std::size_t>(options_.rank);
  replies->of.resize(static_cast<std::size_t>(options_.size));
  replies->of[own] = call_progress();
  const auto limit = options_.inquiry_limit;
  const auto collect = [replies, own, limit, store = store_, text = replies->of[own]->serialize()] {
    try {
      store->set(progress_key(static_cast<int>(own)), text);
      store->add(alarms_key, 1);
    } catch (const std::exception&) {
      return;
    }
    const Deadline end = Deadline::after(limit);
    for (std::size_t r = 0; r < replies->of.size(); ++r) try {
        if (r == own) continue;
        auto reply = CallProgress::parse(store->get(progress_key(static_cast<int>(r)), end));
        const std::lock_guard lock(replies->mutex);
        replies->of[r] = std::move(reply);
      } catch (const std::exception&) {  // no reply
      }
  };
  run_with_timeout(limit + 500ms, collect);
  const std::lock_guard lock(replies->mutex);
  const Failure lag = find_culprit(options_.rank, front ? front->pending_on : PendingWait{}, replies->of,
                                   failure.code == Errc::system ? Errc::peer_lost : failure.code);
  failure.reason += concat(": ", lag.reason);
  failure.culprit = lag.culprit;
  if (lag.culprit >= 0) failure.code = lag.code;
  return failure;
}

/// Publishes `mine` if no rank has published a failure yet. Returns the group's failure.
Failure Watchdog::elect_failure(const Failure& mine) {
  struct Reply {
    std::mutex mutex;
    std::optional<Failure> first;
  };
  const auto reply = std::make_shared<Reply>();
  if (!store_responsive_) return mine;
  run_with_timeout(store_timeout, [reply, mine, store = store_] {
    try {
      if (store->add(claims_key, 1) == 1) return store->set(verdict_key, encode(mine));
      const Failure first = decode(store->get(verdict_key, Deadline::after(store_timeout / 2)));
      const std::lock_guard lock(reply->mutex);
      reply->first = first;
    } catch (const std::exception&) {  // keep this rank's failure
    }
  });
  const std::lock_guard lock(reply->mutex);
  return reply->first.value_or(mine);
}

}  // namespace rz::nccl
