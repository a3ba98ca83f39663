#include "comm/backends/nccl/watchdog.h"

#include <algorithm>
#include <utility>

#include "comm/backends/nccl/bounded.h"
#include "comm/core/error.h"
#include "comm/core/helper_thread.h"

namespace rz::nccl {

namespace {

using namespace std::chrono_literals;

constexpr auto pace = 50ms;         // of looks at NCCL while something is in flight
constexpr auto patience = 1s;       // in flight for longer: other ranks may have something to say
constexpr auto store_pace = 200ms;  // of looks into the store then
constexpr auto store_limit = 1s;    // for one conversation with it
constexpr const char* claims_key = "nccl/verdict/claims";
constexpr const char* verdict_key = "nccl/verdict";
constexpr const char* alarms_key = "nccl/alarms";
std::string standing_key(int rank) { return str("nccl/standing/", rank); }

/// As a store holds it: code, culprit, reason.
std::string encoded(const Failure& f) { return str(static_cast<int>(f.code), ' ', f.culprit, ' ', f.reason); }
Failure decoded(const std::string& text) {
  const std::size_t first = text.find(' '), second = text.find(' ', first + 1);
  require(second != std::string::npos, Errc::rendezvous, "key '", verdict_key, "' is damaged: ", text);
  return {std::stoi(text.substr(first + 1)), static_cast<Errc>(std::stoi(text)), text.substr(second + 1)};
}

std::string words_of(std::span<const Operation> group) {
  std::string words;
  for (const Operation& op : group) words += str(words.empty() ? "" : " + ", describe(op));
  return words;
}

}  // namespace

Watchdog::Watchdog(std::shared_ptr<Link> link, std::shared_ptr<Store> store, std::shared_ptr<Backend> host,
                   std::shared_ptr<void> keep, const WatchdogOptions& options)
    : link_(std::move(link)),
      store_(std::move(store)),
      host_(std::move(host)),
      keep_(std::move(keep)),
      options_(options) {
  standing_.sent.resize(static_cast<std::size_t>(options.size));
  standing_.received.resize(static_cast<std::size_t>(options.size));
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

std::shared_ptr<Job> Watchdog::begin(std::span<const Operation> group) {
  if (fate_->failed()) fate_->raise();
  std::string words = words_of(group), collectives;
  const std::lock_guard lock(mutex_);
  Waiting waiting;
  for (const Operation& op : group) {
    if (!traits(op.kind).point_to_point) {
      collectives += str(collectives.empty() ? "" : " + ", describe(op));
      continue;
    }
    const bool sends = op.kind == Collective::send;
    auto& counter = (sends ? standing_.sent : standing_.received)[static_cast<std::size_t>(op.root)];
    waiting.messages.push_back({op.root, sends, counter++});
  }
  if (!collectives.empty()) {
    waiting.collective = standing_.called;
    standing_.add(std::move(collectives));
  }
  auto job = std::make_shared<Job>(fate_, std::move(words), std::move(waiting), options_.timeout);
  jobs_.push_back(job);
  changed_.notify_all();
  return job;
}

void Watchdog::issued(const std::shared_ptr<Job>& job, Event ready, Event end, bool captured) {
  job->issue(std::move(ready), std::move(end), captured);
  const std::lock_guard lock(mutex_);
  if (captured) std::erase(jobs_, job);
  retire();
}

std::shared_ptr<Job> Watchdog::follow(const Stream& stream, std::chrono::milliseconds limit) {
  if (fate_->failed()) fate_->raise();
  const Event end = stream.record();
  std::shared_ptr<Job> job;
  {
    const std::lock_guard lock(mutex_);
    job = std::make_shared<Job>(fate_, str("what a stream of ", name(stream.device()), " holds"),
                                Waiting{.stream = standing_.streams++}, limit);
    job->issue(end, end, false);
    streams_.push_back(job);
  }
  changed_.notify_all();
  return job;
}

/// Forgets what is over. A device that has failed fails whoever waits.
void Watchdog::retire() {
  while (!jobs_.empty() && jobs_.front()->done()) jobs_.pop_front();
  std::erase_if(streams_, [](const auto& job) { return job->done(); });
}

/// What has to end first of all that is in flight.
std::shared_ptr<Job> Watchdog::most_urgent() const {
  std::shared_ptr<Job> first = jobs_.empty() ? nullptr : jobs_.front();
  for (const auto& job : streams_)
    if (!first || job->deadline.remaining() < first->deadline.remaining()) first = job;
  return first;
}

Standing Watchdog::standing() {
  const std::lock_guard lock(mutex_);
  Standing s = standing_;
  s.begun = s.issued = s.called;
  for (const auto& job : jobs_) {
    if (!job->waiting.collective) continue;
    const std::uint64_t number = *job->waiting.collective;
    if (!job->issued()) s.issued = std::min(s.issued, number);
    try {
      if (!job->ready()) s.begun = std::min(s.begun, number);
    } catch (const Error&) {  // the device has failed: its own message says so
    }
  }
  return s;
}

// ---- requests

void Watchdog::ask(Request request) {
  {
    const std::lock_guard lock(mutex_);
    if (!request_) request_ = std::move(request);
  }
  changed_.notify_all();
}

void Watchdog::broken(const CallFailed& failed) {
  const bool by_others = failed.result == remote_error || failed.result == system_error;
  const Errc code = failed.result == remote_error ? Errc::peer_lost : Errc::system;
  ask({{by_others ? -1 : options_.rank, code, str("rank ", options_.rank, ": ", failed.text())}, by_others});
  fate_->raise();
}

void Watchdog::broken(Failure failure) {
  ask({std::move(failure), false});
  fate_->raise();
}

void Watchdog::abort(const std::string& reason) noexcept {
  ask({{options_.rank, Errc::aborted, str("rank ", options_.rank, " aborted: ", reason)}, false});
  fate_->settled_within(900ms);
}

bool Watchdog::leave() noexcept {
  {
    const std::lock_guard lock(mutex_);
    retire();
    if (jobs_.empty() && !fate_->failed()) return true;
  }
  if (!fate_->failed())
    ask({{options_.rank, Errc::peer_lost,
          str("rank ", options_.rank, " destroyed its communicator with operations in flight")},
         false});
  fate_->settled_within(10s);
  return false;
}

// ---- the thread

void Watchdog::run() {
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    retire();
    const auto front = most_urgent();
    if (!request_ && !front) {
      changed_.wait(lock);
      continue;
    }
    auto request = std::exchange(request_, std::nullopt);
    lock.unlock();
    if (!request) request = look(*front);
    if (request) return end(*std::move(request), front);
    const auto nap = std::min<Deadline::Clock::duration>(pace, front->deadline.remaining() + 1ms);
    lock.lock();
    if (!request_ && !stopping_) changed_.wait_for(lock, nap);
  }
}

/// What the operation that all others stand behind has come to.
std::optional<Watchdog::Request> Watchdog::look(const Job& front) {
  std::string words;
  const Result state = link_->state(&words);
  const std::string who = str("rank ", options_.rank, ": ", front.words);
  if (state != success && state != in_progress) {
    const bool by_others = state == remote_error || state == system_error;
    const Errc code = state == remote_error ? Errc::peer_lost : Errc::system;
    return Request{{by_others ? -1 : options_.rank, code, str(who, ": NCCL failed: ", words)}, by_others};
  }
  if (front.deadline.expired())
    return Request{{-1, Errc::timeout, str(who, " did not end within ", front.timeout.count(), " ms")}, true};
  const bool late = Deadline::Clock::now() - front.began > patience;
  if (!late || !store_answers_ || !next_look_into_store_.expired()) return std::nullopt;
  next_look_into_store_ = Deadline::after(store_pace);
  return look_into_store(front);
}

/// Answers an alarm; finds another rank's verdict.
std::optional<Watchdog::Request> Watchdog::look_into_store(const Job&) {
  struct Found {
    std::atomic<bool> reachable{false};
    std::optional<Failure> verdict;
  };
  const auto found = std::make_shared<Found>();
  store_answers_ =
      returns_within(store_limit,
                     [found, store = store_, rank = options_.rank, standing = standing().text()] {
                       try {
                         if (store->add(claims_key, 0) > 0)
                           found->verdict =
                               decoded(store->get(verdict_key, Deadline::after(store_limit / 2)));
                         else if (store->add(alarms_key, 0) > 0)
                           store->set(standing_key(rank), standing);
                         found->reachable = true;
                       } catch (const std::exception&) {  // the deadline says it all
                       }
                     }) &&
      found->reachable;
  if (!store_answers_ || !found->verdict) return std::nullopt;
  return Request{*found->verdict, false};
}

void Watchdog::end(Request request, const std::shared_ptr<Job>& front) {
  if (request.inquire) request.failure = inquire(std::move(request.failure), front.get());
  const Failure verdict = agree(request.failure);
  fate_->fail(verdict);  // before NCCL lets go: what ends from now on has no result
  const bool aborted = link_->abort(options_.abort_limit, keep_);
  host_->abort(verdict.reason);
  fate_->settle(aborted ? ""
                        : str("; ncclCommAbort on rank ", options_.rank, " had not returned after ",
                              options_.abort_limit.count(), " ms and was left behind"));
}

/// Tells where this rank stands, hears the others, and says who lags.
Failure Watchdog::inquire(Failure failure, const Job* front) {
  struct Answers {
    std::mutex mutex;
    std::vector<std::optional<Standing>> of;
  };
  const auto answers = std::make_shared<Answers>();
  const auto own = static_cast<std::size_t>(options_.rank);
  answers->of.resize(static_cast<std::size_t>(options_.size));
  answers->of[own] = standing();
  const auto limit = options_.inquiry_limit;
  const auto listen = [answers, own, limit, store = store_, text = answers->of[own]->text()] {
    try {
      store->set(standing_key(static_cast<int>(own)), text);
      store->add(alarms_key, 1);
    } catch (const std::exception&) {
      return;
    }
    const Deadline end = Deadline::after(limit);
    for (std::size_t r = 0; r < answers->of.size(); ++r) try {
        if (r == own) continue;
        auto answer = Standing::of(store->get(standing_key(static_cast<int>(r)), end));
        const std::lock_guard lock(answers->mutex);
        answers->of[r] = std::move(answer);
      } catch (const std::exception&) {  // no answer
      }
  };
  returns_within(limit + 500ms, listen);
  const std::lock_guard lock(answers->mutex);
  const Failure blamed = blame(options_.rank, front ? front->waiting : Waiting{}, answers->of,
                               failure.code == Errc::system ? Errc::peer_lost : failure.code);
  failure.reason += str(": ", blamed.reason);
  failure.culprit = blamed.culprit;
  if (blamed.culprit >= 0) failure.code = blamed.code;
  return failure;
}

/// The first verdict in the store, which this one is if there was none.
Failure Watchdog::agree(const Failure& mine) {
  struct Answer {
    std::mutex mutex;
    std::optional<Failure> first;
  };
  const auto answer = std::make_shared<Answer>();
  if (!store_answers_) return mine;
  returns_within(store_limit, [answer, mine, store = store_] {
    try {
      if (store->add(claims_key, 1) == 1) return store->set(verdict_key, encoded(mine));
      const Failure first = decoded(store->get(verdict_key, Deadline::after(store_limit / 2)));
      const std::lock_guard lock(answer->mutex);
      answer->first = first;
    } catch (const std::exception&) {  // then this rank has its own
    }
  });
  const std::lock_guard lock(answer->mutex);
  return answer->first.value_or(mine);
}

}  // namespace rz::nccl
