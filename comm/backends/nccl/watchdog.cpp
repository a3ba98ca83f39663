#include "comm/backends/nccl/watchdog.h"

#include <algorithm>
#include <utility>

#include "comm/backends/nccl/run_with_timeout.h"
#include "comm/core/error.h"
#include "comm/os/helper_thread.h"

namespace rz::nccl {

namespace {

using namespace std::chrono_literals;

constexpr auto poll_interval = 50ms;         // of looks at NCCL while something is in flight
constexpr auto store_poll_delay = 1s;        // in flight for longer: other ranks may have something to say
constexpr auto store_poll_interval = 200ms;  // of looks into the store then
constexpr auto store_timeout = 1s;           // for one conversation with it
constexpr const char* claims_key = "nccl/verdict/claims";
constexpr const char* verdict_key = "nccl/verdict";
constexpr const char* alarms_key = "nccl/alarms";
std::string progress_key(int rank) { return concat("nccl/progress/", rank); }

/// As a store holds it: code, culprit, reason.
std::string encode(const Failure& f) {
  return concat(static_cast<int>(f.code), ' ', f.culprit, ' ', f.reason);
}
Failure decode(const std::string& text) {
  const std::size_t first = text.find(' '), second = text.find(' ', first + 1);
  require(second != std::string::npos, Errc::rendezvous, "key '", verdict_key, "' is damaged: ", text);
  return {std::stoi(text.substr(first + 1)), static_cast<Errc>(std::stoi(text)), text.substr(second + 1)};
}

std::string describe_group(std::span<const CollectiveCall> group) {
  std::string words;
  for (const CollectiveCall& op : group) words += concat(words.empty() ? "" : " + ", describe(op));
  return words;
}

}  // namespace

Watchdog::Watchdog(std::shared_ptr<NcclComm> link, std::shared_ptr<Store> store,
                   std::shared_ptr<Backend> host, std::shared_ptr<void> keep, const WatchdogOptions& options)
    : nccl_comm_(std::move(link)),
      store_(std::move(store)),
      host_(std::move(host)),
      kept_alive_(std::move(keep)),
      options_(options) {
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

// ---- what is in flight

std::shared_ptr<NcclRequest> Watchdog::begin(std::span<const CollectiveCall> group) {
  if (group_status_->failed()) group_status_->rethrow();
  std::string words = describe_group(group), collectives;
  const std::lock_guard lock(mutex_);
  PendingWait waiting;
  for (const CollectiveCall& op : group) {
    if (!traits(op.kind).point_to_point) {
      collectives += concat(collectives.empty() ? "" : " + ", describe(op));
      continue;
    }
    const bool sends = op.kind == Collective::send;
    auto& counter =
        (sends ? call_progress_.sent : call_progress_.received)[static_cast<std::size_t>(op.root)];
    waiting.messages.push_back({op.root, sends, counter++});
  }
  if (!collectives.empty()) {
    waiting.collective = call_progress_.called;
    call_progress_.add(std::move(collectives));
  }
  auto job =
      std::make_shared<NcclRequest>(group_status_, std::move(words), std::move(waiting), options_.timeout);
  requests_.push_back(job);
  changed_.notify_all();
  return job;
}

void Watchdog::mark_issued(const std::shared_ptr<NcclRequest>& job, Event ready, Event end, bool captured) {
  job->set_events(std::move(ready), std::move(end), captured);
  const std::lock_guard lock(mutex_);
  if (captured) std::erase(requests_, job);
  retire_completed();
}

std::shared_ptr<NcclRequest> Watchdog::watch_stream(const Stream& stream, std::chrono::milliseconds limit) {
  if (group_status_->failed()) group_status_->rethrow();
  const Event end = stream.record();
  std::shared_ptr<NcclRequest> job;
  {
    const std::lock_guard lock(mutex_);
    job = std::make_shared<NcclRequest>(group_status_,
                                        concat("what a stream of ", name(stream.device()), " holds"),
                                        PendingWait{.stream = call_progress_.waited_streams++}, limit);
    job->set_events(end, end, false);
    watched_streams_.push_back(job);
  }
  changed_.notify_all();
  return job;
}

/// Forgets what is over. A device that has failed fails whoever waits.
void Watchdog::retire_completed() {
  while (!requests_.empty() && requests_.front()->done()) requests_.pop_front();
  std::erase_if(watched_streams_, [](const auto& job) { return job->done(); });
}

/// What has to end first of all that is in flight.
std::shared_ptr<NcclRequest> Watchdog::earliest_deadline() const {
  std::shared_ptr<NcclRequest> first = requests_.empty() ? nullptr : requests_.front();
  for (const auto& job : watched_streams_)
    if (!first || job->deadline.remaining() < first->deadline.remaining()) first = job;
  return first;
}

CallProgress Watchdog::call_progress() {
  const std::lock_guard lock(mutex_);
  CallProgress s = call_progress_;
  s.started = s.issued = s.called;
  for (const auto& job : requests_) {
    if (!job->pending_on.collective) continue;
    const std::uint64_t number = *job->pending_on.collective;
    if (!job->issued()) s.issued = std::min(s.issued, number);
    try {
      if (!job->has_started()) s.started = std::min(s.started, number);
    } catch (const Error&) {  // the device has failed: its own message says so
    }
  }
  return s;
}

// ---- requests

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

void Watchdog::abort(const std::string& reason) noexcept {
  request_termination(
      {{options_.rank, Errc::aborted, concat("rank ", options_.rank, " aborted: ", reason)}, false});
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

// ---- the thread

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
    if (!request) request = check_communicator(*front);
    if (request) return terminate(*std::move(request), front);
    const auto nap = std::min<Deadline::Clock::duration>(poll_interval, front->deadline.remaining() + 1ms);
    lock.lock();
    if (!termination_ && !stopping_) changed_.wait_for(lock, nap);
  }
}

/// What the operation that all others stand behind has come to.
std::optional<Watchdog::Termination> Watchdog::check_communicator(const NcclRequest& front) {
  std::string words;
  const Result state = nccl_comm_->async_state(&words);
  const std::string who = concat("rank ", options_.rank, ": ", front.description);
  if (state != success && state != in_progress) {
    const bool by_others = state == remote_error || state == system_error;
    const Errc code = state == remote_error ? Errc::peer_lost : Errc::system;
    return Termination{{by_others ? -1 : options_.rank, code, concat(who, ": NCCL failed: ", words)},
                       by_others};
  }
  if (front.deadline.expired())
    return Termination{{-1, Errc::timeout, concat(who, " did not end within ", front.timeout.count(), " ms")},
                       true};
  const bool late = Deadline::Clock::now() - front.submitted_at > store_poll_delay;
  if (!late || !store_responsive_ || !next_store_poll_.expired()) return std::nullopt;
  next_store_poll_ = Deadline::after(store_poll_interval);
  return check_store(front);
}

/// Answers an alarm; finds another rank's verdict.
std::optional<Watchdog::Termination> Watchdog::check_store(const NcclRequest&) {
  struct Found {
    std::atomic<bool> reachable{false};
    std::optional<Failure> verdict;
  };
  const auto found = std::make_shared<Found>();
  store_responsive_ =
      run_with_timeout(store_timeout,
                       [found, store = store_, rank = options_.rank, standing = call_progress().serialize()] {
                         try {
                           if (store->add(claims_key, 0) > 0)
                             found->verdict =
                                 decode(store->get(verdict_key, Deadline::after(store_timeout / 2)));
                           else if (store->add(alarms_key, 0) > 0)
                             store->set(progress_key(rank), standing);
                           found->reachable = true;
                         } catch (const std::exception&) {  // the deadline says it all
                         }
                       }) &&
      found->reachable;
  if (!store_responsive_ || !found->verdict) return std::nullopt;
  return Termination{*found->verdict, false};
}

void Watchdog::terminate(Termination request, const std::shared_ptr<NcclRequest>& front) {
  if (request.query_ranks) request.failure = query_ranks(std::move(request.failure), front.get());
  const Failure verdict = elect_failure(request.failure);
  group_status_->fail(verdict);  // before NCCL lets go: what ends from now on has no result
  const bool aborted = nccl_comm_->abort(options_.abort_limit, kept_alive_);
  host_->abort(verdict.reason);
  group_status_->publish(aborted
                             ? ""
                             : concat("; ncclCommAbort on rank ", options_.rank, " had not returned after ",
                                      options_.abort_limit.count(), " ms and was left behind"));
}

/// Tells where this rank stands, hears the others, and says who lags.
Failure Watchdog::query_ranks(Failure failure, const NcclRequest* front) {
  struct Answers {
    std::mutex mutex;
    std::vector<std::optional<CallProgress>> of;
  };
  const auto answers = std::make_shared<Answers>();
  const auto own = static_cast<std::size_t>(options_.rank);
  answers->of.resize(static_cast<std::size_t>(options_.size));
  answers->of[own] = call_progress();
  const auto limit = options_.inquiry_limit;
  const auto listen = [answers, own, limit, store = store_, text = answers->of[own]->serialize()] {
    try {
      store->set(progress_key(static_cast<int>(own)), text);
      store->add(alarms_key, 1);
    } catch (const std::exception&) {
      return;
    }
    const Deadline end = Deadline::after(limit);
    for (std::size_t r = 0; r < answers->of.size(); ++r) try {
        if (r == own) continue;
        auto answer = CallProgress::parse(store->get(progress_key(static_cast<int>(r)), end));
        const std::lock_guard lock(answers->mutex);
        answers->of[r] = std::move(answer);
      } catch (const std::exception&) {  // no answer
      }
  };
  run_with_timeout(limit + 500ms, listen);
  const std::lock_guard lock(answers->mutex);
  const Failure blamed = find_culprit(options_.rank, front ? front->pending_on : PendingWait{}, answers->of,
                                      failure.code == Errc::system ? Errc::peer_lost : failure.code);
  failure.reason += concat(": ", blamed.reason);
  failure.culprit = blamed.culprit;
  if (blamed.culprit >= 0) failure.code = blamed.code;
  return failure;
}

/// The first verdict in the store, which this one is if there was none.
Failure Watchdog::elect_failure(const Failure& mine) {
  struct Answer {
    std::mutex mutex;
    std::optional<Failure> first;
  };
  const auto answer = std::make_shared<Answer>();
  if (!store_responsive_) return mine;
  run_with_timeout(store_timeout, [answer, mine, store = store_] {
    try {
      if (store->add(claims_key, 1) == 1) return store->set(verdict_key, encode(mine));
      const Failure first = decode(store->get(verdict_key, Deadline::after(store_timeout / 2)));
      const std::lock_guard lock(answer->mutex);
      answer->first = first;
    } catch (const std::exception&) {  // then this rank has its own
    }
  });
  const std::lock_guard lock(answer->mutex);
  return answer->first.value_or(mine);
}

}  // namespace rz::nccl
