#include "comm/backends/driver.h"

#include <algorithm>
#include <cstring>
#include <ranges>
#include <utility>

#include "comm/algorithms/hosts.h"
#include "comm/core/deadline.h"
#include "comm/core/error.h"
#include "comm/core/helper_thread.h"
#include "comm/cost_model.h"
#include "comm/reduce.h"
#include "comm/transports/arena.h"

namespace rz {

namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

constexpr int turns_at_once = 30, turns_before_idle = 400, turns_when_crowded = 100;
constexpr auto in_use = 1s;         // after the last call, the thread looks whether any is left to it:
constexpr auto light_sleep = 1ms;   // this often, if one was within that time,
constexpr auto sound_sleep = 16ms;  // and this often, if not: each look takes a processor from some rank
constexpr auto idle_look = 1s;      // without calls: peers may take back memory
constexpr auto on_the_way = 200us;  // from a call to the wait for it, without other work between
constexpr auto longest_wait = 10ms;
constexpr auto long_in_vain = 30ms;         // without any move: a thread looks no more, but sleeps
constexpr auto longest_of_patience = 50ms;  // at a time, since news wake it

// Min and max choose one of the contributions, and round nothing.
bool rounds(DType dtype, const ReduceOp& op) {
  const bool small = size_of(dtype) < 4 && dtype != DType::i8 && dtype != DType::u8;
  return small && op.kind != ReduceOp::min && op.kind != ReduceOp::max;
}
bool rounds(const Operation& op) { return rounds(op.out.data ? op.out.dtype : op.in.dtype, op.op); }

ScheduledOptions with_bounded_timeout(ScheduledOptions options) {
  options.timeout = bounded(options.timeout);
  return options;
}

}  // namespace

void Job::wait() {
  driver_->wait(*this);
  if (error_) std::rethrow_exception(error_);
}

Driver::Driver(int rank, int size, std::unique_ptr<Transport> transport, ScheduledOptions options)
    : rank_(rank),
      size_(size),
      options_(with_bounded_timeout(std::move(options))),
      forced_(options_.algorithm, options_.deterministic),
      tuned_(rules_for(options_.tuning, size, options_.deterministic)),
      transport_(std::move(transport)),
      crowded_(transport_->crowded()),
      one_host_(transport_->one_host()),
      host_(transport_->hosts().begin(), transport_->hosts().end()),
      hosts_(1 + *std::max_element(host_.begin(), host_.end())),
      carrier_(transport_->describe()),
      execution_(*transport_, rank, size),
      messages_(*transport_, rank, size) {
  constexpr int most_together = 256;  // ranks: a slot has a part for each
  if (!transport_->meeting().empty() && size <= most_together)
    together_ = std::make_unique<Together>(
        *transport_, rank, size,
        TogetherTable(size, tuned_, options_.tuning.name, forced_, options_.deterministic));
  for (int c = 0; c < collective_count && !together_; ++c)
    if (!forced_.of(Collective(c)).empty()) schedule_for(Collective(c), 0);  // refuses what is no schedule
}

Driver::~Driver() { stop(); }

void Driver::start_thread() {
  thread_ = helper_thread([this] { progress_thread(); });
}

void Driver::check_process() const {
  if (creator_.seems_here()) [[likely]]
    return;
  fail(Errc::invalid_argument, "the communicator of rank ", rank_, " belongs to process ", creator_.process(),
       ", and this is process ", ::getpid(),
       ", which came of it by fork(); connect a communicator in each process that uses one");
}

std::shared_ptr<Arena> Driver::arena() {
  check_process();
  const std::lock_guard lock(mutex_);
  require(transport_ != nullptr, Errc::aborted, "the communicator of rank ", rank_, " was destroyed");
  return transport_->arena();
}

// Large memory takes long: without the lock, which calls in flight need, and abort().
std::shared_ptr<std::byte> Driver::allocate(std::size_t bytes) { return allocate_zeroed(arena(), bytes); }

std::string Driver::describe() const { return "scheduled over " + carrier_; }

CallChoice Driver::explain(Collective kind, std::size_t bytes, bool reachable, DType dtype,
                           ReduceOp op) const {
  if (traits(kind).point_to_point) return {"message", carrier_, 0, "messages take no algorithm"};
  if (kind == Collective::barrier || kind == Collective::all_to_all_v) bytes = 0;  // what the tables go by
  if (together_) {
    const TogetherWay& way = together_->table().of(kind, bytes);
    CallChoice choice = explain_together(kind, bytes, size_, way, together_->room(), reachable);
    if (!way.streams) return choice;
    if (!serves(*way.streams, kind, rounds(dtype, op))) {
      choice.why += str("; not ", way.streams->name, ", which rounds ", name(dtype), " on the way");
      return choice;
    }
    return {str("streams:", way.streams->name), carrier_, way.chunk ? way.chunk : slice_bytes, way.why};
  }
  const Selection s = schedule_for(kind, bytes, rounds(dtype, op));
  const std::string why = s.rule ? words_of_source(*s.rule, options_.tuning.name) + in_words(*s.rule)
                                 : str("forced: ", name(kind), "=", forced_.of(kind));
  return {s.algorithm->name, carrier_, s.chunk ? s.chunk : slice_bytes, why};
}

// Copies without the lock, too.
Registration Driver::register_buffer(std::span<std::byte> memory) {
  const auto shared = arena();
  return shared ? shared->register_buffer(memory)
                : Registration(str("no other rank shares memory with rank ", rank_, " (", describe(), ")"));
}

std::shared_ptr<Job> Driver::submit(std::span<const Operation> group) {
  check_process();
  Fused::require_independent(group);
  const auto now = Clock::now();
  auto job = std::make_shared<Job>(shared_from_this(), group, now + options_.timeout);
  const std::lock_guard lock(mutex_);
  if (failure_) std::rethrow_exception(failure_);
  if (group.empty()) {
    job->end(nullptr);
    return job;
  }
  incoming_.push_back(job);
  ++unfinished_;
  last_use_ = now;
  const bool news = !attention_.exchange(true, std::memory_order_acq_rel);
  if (driven_) {
    if (news) transport_->wake();  // it may sleep over a message that is long in coming
  } else if (asleep_) {
    work_arrived_.notify_one();
  }
  return job;
}

bool Driver::is_quick(const Operation& op) const {
  return !traits(op.kind).point_to_point && op.op.kind != ReduceOp::premul_sum &&
         op.in.bytes() <= Together::most_at_once && op.out.bytes() <= Together::most_at_once &&
         !together_->streams(op);
}

bool Driver::repeat(const BriefCall& call, std::shared_ptr<Job>& job) {
  if (!together_) return false;
  check_process();
  std::unique_lock lock(mutex_);
  if (driven_ || unfinished_ > 0 || stopping_ || failure_ || !together_->repeats(call)) return false;
  try {
    if (!together_->repeat(call, sequence_++, crowded_ ? turns_when_crowded : turns_at_once))
      job = begin(together_->operation());
  } catch (...) {
    fail_at_once(lock, job);
  }
  return true;
}

bool Driver::try_at_once(std::span<const Operation> group, std::shared_ptr<Job>& job) {
  if (!together_ || group.size() != 1 || !is_quick(group.front())) return false;
  check_process();
  std::unique_lock lock(mutex_);
  if (failure_) std::rethrow_exception(failure_);
  if (driven_ || unfinished_ > 0 || stopping_) return false;
  try {
    together_->start(group.front(), sequence_++);
    if (!together_->spin(crowded_ ? turns_when_crowded : turns_at_once)) job = begin(group.front());
  } catch (...) {
    fail_at_once(lock, job);
  }
  return true;
}

/// What was thrown is the job's, and poisons the group.
void Driver::fail_at_once(std::unique_lock<ShortLock>& lock, std::shared_ptr<Job>& job) {
  const auto error = std::current_exception();
  driven_ = true;  // nobody else may touch what is cleared now
  lock.unlock();
  poison(error);
  lock.lock();
  driven_ = false;
  if (waiters_ > 0 || stopping_) changed_.notify_all();
  job = std::make_shared<Job>(shared_from_this(), std::span<const Operation>{}, Clock::now());
  job->end(error);
}

/// Under the lock: what did not end soon becomes a job like others.
std::shared_ptr<Job> Driver::begin(const Operation& op) {
  const auto now = Clock::now();
  auto job = std::make_shared<Job>(shared_from_this(), std::span(&op, 1), now + options_.timeout);
  together_->move(job->operations[0]);
  current_ = {job, 0};
  by_together_ = true;
  ++unfinished_;
  last_use_ = now;
  if (asleep_) work_arrived_.notify_one();
  return job;
}

void Driver::wait(Job& job) {
  if (job.done()) return;
  check_process();
  std::unique_lock lock(mutex_);
  if (const auto now = Clock::now(); now > job.deadline - options_.timeout + light_sleep) last_left_ = now;
  while (!job.done()) {
    if (driven_) {
      if (++waiters_ == 1) transport_->wake();  // the progress thread may sleep, and makes room now
      changed_.wait(lock);
      --waiters_;
      continue;
    }
    driven_ = true;
    lock.unlock();
    drive(&job);
    lock.lock();
    driven_ = false;
    if (waiters_ > 0 || stopping_) changed_.notify_all();
    if (unfinished_ > 0) work_arrived_.notify_one();
  }
}

/// Under the lock: whether the oldest call is one that nobody came to wait for, rather than one whose caller
/// is on the way.
bool Driver::was_left() const {
  const Job* const oldest = current_.job        ? current_.job.get()
                            : !queue_.empty()   ? queue_.front().job.get()
                            : incoming_.empty() ? nullptr
                                                : incoming_.front().get();
  return !oldest || Clock::now() > oldest->deadline - options_.timeout + on_the_way;
}

void Driver::progress_thread() {
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    if (unfinished_ > 0 && !driven_ && waiters_ == 0) {
      const bool left = was_left();
      driven_ = true;
      lock.unlock();
      drive(nullptr);
      lock.lock();
      driven_ = false;
      changed_.notify_all();
      if (left && waiters_ == 0) last_left_ = Clock::now();
    } else if (const auto now = Clock::now(); now - last_use_ < in_use) {
      work_arrived_.wait_for(lock, now - last_left_ < in_use ? light_sleep : sound_sleep);
    } else {
      asleep_ = true;
      const bool news = work_arrived_.wait_for(
          lock, idle_look, [&] { return stopping_ || (unfinished_ > 0 && !driven_ && waiters_ == 0); });
      asleep_ = false;
      if (!news) look_once(lock);
    }
  }
}

void Driver::abort(const std::string& reason) noexcept {
  if (!creator_.seems_here()) return;
  const std::lock_guard lock(mutex_);
  if (!transport_) return;
  transport_->abort({rank_, Errc::aborted, reason});
  transport_->wake();
  if (failure_) return;
  failure_ = std::make_exception_ptr(Error(Errc::aborted, reason, rank_));
  attention_.store(true);
  work_arrived_.notify_one();
}

void Driver::check() {
  check_process();
  std::unique_lock lock(mutex_);
  look_once(lock);
  if (failure_) std::rethrow_exception(failure_);
}

/// Under the lock: looks for news, unless somebody drives, who does so.
void Driver::look_once(std::unique_lock<ShortLock>& lock) {
  if (failure_ || driven_ || stopping_ || !transport_) return;
  driven_ = true;
  lock.unlock();
  try {
    transport_->progress();
  } catch (...) {
    poison(std::current_exception());
  }
  lock.lock();
  driven_ = false;
  if (waiters_ > 0 || stopping_) changed_.notify_all();
  if (unfinished_ > 0) work_arrived_.notify_one();
}

void Driver::stop() noexcept {
  {
    const std::lock_guard lock(mutex_);
    if (!transport_) return;
    stopping_ = true;
    attention_.store(true);
    transport_->wake();
    work_arrived_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
  std::unique_lock lock(mutex_);
  // Another thread may still drive: it has been woken, and sees stopping_ in its next step.
  if (!changed_.wait_for(lock, 5s, [&] { return !driven_; })) return;
  driven_ = true;  // a thread that comes to wait now must not drive any more
  lock.unlock();
  poison(std::make_exception_ptr(
      Error(Errc::aborted, str("the communicator of rank ", rank_, " was destroyed"), rank_)));
  lock.lock();
  transport_.reset();
  driven_ = false;
  changed_.notify_all();
}

void Driver::abandon() noexcept {
  if (mutex_.try_lock() && !driven_) transport_.reset();
}

/// The progress thread only until somebody waits: who waits drives, or every call would have two threads take
/// turns.
void Driver::drive(const Job* until) {
  while (until ? !until->done() : !nothing_left() && waiters_.load(std::memory_order_relaxed) == 0) {
    try {
      step(until != nullptr);
    } catch (...) {
      poison(std::current_exception());
      return;
    }
  }
}

/// `waited_for`: somebody waits, so that a thread has nothing better to do than to look for news; but not for
/// long.
void Driver::step(bool waited_for) {
  const bool eager = waited_for && !patient_;
  if (attention_.load(std::memory_order_acquire)) accept();
  if (!current_.job && !queue_.empty()) start_next();
  bool moved = false;
  if (current_.job) {
    moved = advance_current(eager);
    if (by_together_ ? together_->complete() : execution_.complete()) {
      end_current();
      moved = true;
    }
  }
  moved |= messages_.advance();
  finish_messages();
  if (!moved) return idle(waited_for);
  idle_since_.reset(), patient_ = false;
  if (++rounds_ % 64 != 0) return;
  const auto now = Clock::now();  // before the look, as in idle()
  look(waited_for);
  check_deadlines(now);
}

/// Where all ranks share memory the others' news come within less time than looking elsewhere takes.
bool Driver::advance_current(bool eager) {
  if (!by_together_) return execution_.advance();
  if (together_->advance()) return true;
  if (!eager || !messages_.idle()) return false;
  return together_->spin(crowded_ ? turns_when_crowded : turns_before_idle) || together_->busy();
}

void Driver::accept() {
  const std::lock_guard lock(mutex_);
  attention_.store(false, std::memory_order_relaxed);
  require(!stopping_, Errc::aborted, "the communicator of rank ", rank_, " was destroyed");
  if (failure_) std::rethrow_exception(failure_);
  for (auto& job : incoming_) {
    bool messages = false;
    for (std::size_t i = 0; i < job->operations.size(); ++i) {
      if (traits(job->operations[i].kind).point_to_point)
        messages_.add(job->operations[i], job.get()), messages = true;
      else
        queue_.push_back({job, i});
    }
    if (messages) messaging_.push_back(job);
  }
  incoming_.clear();
}

void Driver::start_next() {
  if (const std::size_t calls = coalescable(); calls > 1) return start_fused(calls);
  current_ = std::move(queue_.front());
  queue_.pop_front();
  start(current_);
}

void Driver::start(const Queued& next) {
  Operation& op = next.job->operations[next.operation];
  prepare_input(op, *next.job);
  run(op);
}

/// How many calls at the front of the queue run as one. All are of one group, whose calls stand together.
std::size_t Driver::coalescable() const {
  const std::shared_ptr<Job>& group = queue_.front().job;
  if (group->operations.size() == 1) return 1;
  return Fused::count(queue_ | std::views::take_while([&](const Queued& q) { return q.job == group; }) |
                      std::views::transform([&](const Queued& q) -> const Operation& {
                        return group->operations[q.operation];
                      }));
}

void Driver::start_fused(std::size_t calls) {
  if (!fused_memory_) fused_memory_ = transport_->allocate(Fused::max_bytes);
  current_ = queue_.front();
  calls_in_one_ = calls;
  std::vector<const Operation*> operations;
  for (; operations.size() < calls; queue_.pop_front())
    operations.push_back(&current_.job->operations[queue_.front().operation]);
  run(fused_.begin(std::move(operations), fused_memory_.get()));
}

void Driver::run(const Operation& op) {
  const TogetherWay* by_streams = streams(op);
  by_together_ = together_ && !by_streams;
  if (by_together_) return together_->start(op, sequence_++);
  if (by_streams) return run_schedule(op, *by_streams->streams, by_streams->chunk);
  const DType dtype = op.out.data ? op.out.dtype : op.in.dtype;
  const Selection s = schedule_for(
      op.kind, whole_bytes(op.kind, common_count(op, size_) * size_of(dtype), size_), rounds(op));
  run_schedule(op, *s.algorithm, s.chunk);
}

/// The schedule of streams that serves the call in a meeting place's stead; null: none does.
const TogetherWay* Driver::streams(const Operation& op) const {
  const TogetherWay* const way = together_ ? together_->streams(op) : nullptr;
  return way && serves(*way->streams, op.kind, rounds(op)) ? way : nullptr;
}

/// A line of a table may name an algorithm that, for some types, does not give the bits of all others.
bool Driver::serves(const Algorithm& algorithm, Collective kind, bool rounds) const {
  const bool depends = algorithm.is(rounds_often) && traits(kind).reduces && rounds;
  return !depends || !options_.deterministic || !forced_.of(kind).empty();
}

Selection Driver::schedule_for(Collective kind, std::size_t bytes, bool rounds) const {
  return select_by_rule({.collective = kind,
                         .bytes = bytes,
                         .size = size_,
                         .one_host = one_host_,
                         .deterministic = options_.deterministic,
                         .forced = forced_.schedule_of(kind),
                         .tuned = tuned_,
                         .hosts = hosts_,
                         .in_a_row = hosts_in_a_row(host_),
                         .rounds = rounds});
}

void Driver::run_schedule(const Operation& op, const Algorithm& algorithm, std::size_t slice) {
  const int root = op.kind == Collective::all_reduce ? 0 : op.root;
  const Plan& plan = plan_for(algorithm, root, in_place(op, rank_, size_));
  const auto number = static_cast<std::uint32_t>(&algorithm - algorithms().data()) + 1;
  execution_.start(op, plan, signature_of(op, size_, sequence_++, number), slice ? slice : slice_bytes);
}

void Driver::end_current() {
  const Queued ended = std::exchange(current_, {});
  if (calls_in_one_ > 1) fused_.end();
  for (std::size_t calls = std::exchange(calls_in_one_, 1); calls > 0; --calls) operation_ended(*ended.job);
}

// Where the input cannot be read where it lies, there is a copy: for a factor before the sum, and for the
// schedule of an all_to_all in place, whose parts change places. Letters hold such parts before others come.
void Driver::prepare_input(Operation& op, Job& job) {
  const bool scaled = op.op.kind == ReduceOp::premul_sum && op.in.count > 0;
  const bool by_schedule = !together_ || streams(op);
  const bool swapped = by_schedule && op.kind == Collective::all_to_all && op.in.data == op.out.data;
  if (!scaled && !swapped) return;
  if (scaled && op.kind == Collective::all_reduce) {
    scale(op.out.data, op.in.data, op.in.count, op.in.dtype, op.op.factor);
    op.in = op.out;
    return;
  }
  job.temporary = transport_->allocate(op.in.bytes());
  if (scaled)
    scale(job.temporary.get(), op.in.data, op.in.count, op.in.dtype, op.op.factor);
  else if (op.in.bytes() > 0)
    std::memcpy(job.temporary.get(), op.in.data, op.in.bytes());
  op.in.data = job.temporary.get();
}

const Plan& Driver::plan_for(const Algorithm& algorithm, int root, bool in_place) {
  for (const CachedPlan& c : plans_)
    if (c.algorithm == &algorithm && c.root == root && c.in_place == in_place) return *c.plan;
  auto plan =
      std::make_unique<Plan>(make_plan(algorithm.schedule({rank_, size_, root, host_}), size_, in_place));
  plans_.push_back({&algorithm, root, in_place, std::move(plan)});
  return *plans_.back().plan;
}

void Driver::finish_messages() {
  for (void* tag : messages_.finished()) {
    Job& job = *static_cast<Job*>(tag);
    const auto keep =
        std::find_if(messaging_.begin(), messaging_.end(), [&](const auto& j) { return j.get() == &job; });
    const auto held = *keep;
    operation_ended(job);
    if (job.done()) messaging_.erase(keep);
  }
  messages_.finished().clear();
}

void Driver::operation_ended(Job& job) {
  if (--job.left > 0) return;
  if (questioned_ == &job) questioned_ = nullptr;
  job.temporary.reset();
  const std::lock_guard lock(mutex_);
  job.end(nullptr);
  --unfinished_;
  if (waiters_ > 0) changed_.notify_all();
}

// The clock comes before all else that may have happened while this process slept: a rank that was stopped
// itself blames nobody, and learns what the others have agreed on.
void Driver::idle(bool waited_for) {
  const auto now = Clock::now();
  const bool eager = waited_for && !patient_;
  if (by_together_ && current_.job) together_->claim();
  look(waited_for);
  check_deadlines(now);
  if (!idle_since_) idle_since_ = now;
  patient_ = now - *idle_since_ >= long_in_vain;
  transport_->wait(patient_ ? longest_of_patience : longest_wait, eager);
}

// A message that nobody waits for holds this rank back from nothing.
void Driver::look(bool waited_for) {
  transport_->progress();
  if (!transport_->waiting().asked()) return;
  const Job* job = current_.job.get();
  if (!job && waited_for && !messaging_.empty()) job = messaging_.front().get();
  transport_->answer(wait_of(job).debtors);
}

Driver::Wait Driver::wait_of(const Job* job) const {
  if (!job) return {};
  if (job != current_.job.get())
    return {messages_.debtors(job), messages_.culprit(job), messages_.waiting_for(job)};
  if (by_together_) return {together_->debtors(), together_->culprit(), together_->waiting_for()};
  return {execution_.debtors(), execution_.culprit(), execution_.waiting_for()};
}

const Job* Driver::late(Clock::time_point by) const {
  if (current_.job && by >= current_.job->deadline) return current_.job.get();
  return !messaging_.empty() && by >= messaging_.front()->deadline ? messaging_.front().get() : nullptr;
}

// Whom a rank waits for may itself wait for the guilty one, since schedules relay: a little before the
// deadline all are asked, and whoever is in a call answers at once.
void Driver::check_deadlines(Clock::time_point now) {
  const auto doubt = std::min<Clock::duration>(options_.timeout / 4, 1s);
  const Job* const job = late(now + doubt);
  if (job == questioned_) {
    if (job && now >= judge_at_) time_out(*job);
    return;
  }
  questioned_ = job;
  if (!job) return;
  transport_->ask();
  judge_at_ = Clock::now() + doubt;
}

void Driver::time_out(const Job& job) {
  const double seconds = std::chrono::duration<double>(options_.timeout).count();
  const Wait wait = wait_of(&job);
  const int found = transport_->waiting().culprit(wait.suspect, wait.debtors);
  const int culprit = found < 0 ? wait.suspect : found;
  const std::string cause =
      found < 0 ? ""
                : str("; rank ", found,
                      transport_->waiting().silent(found) ? " does not answer" : " waits for nobody");
  const Error error(
      Errc::timeout,
      str(name(job.operations[0].kind), " did not end within ", seconds, " s on rank ", rank_,
          ": it waits for ", wait.words, cause, "; a rank may be stuck, or slower than the timeout allows"),
      culprit);
  transport_->abort({culprit, Errc::timeout, error.what()});
  throw error;
}

void Driver::poison(std::exception_ptr error) noexcept {
  try {
    std::rethrow_exception(error);
  } catch (const Error& e) {
    // What only this rank has seen, the others have to learn.
    const bool learnt = e.code() == Errc::peer_lost || e.code() == Errc::aborted || e.code() == Errc::timeout;
    if (e.code() == Errc::mismatch)
      transport_->abort({e.culprit(), e.code(), e.what()});
    else if (!learnt)
      transport_->abort({rank_, Errc::aborted, str("rank ", rank_, ": ", e.what())});
  } catch (const std::exception& e) {
    transport_->abort({rank_, Errc::aborted, str("rank ", rank_, ": ", e.what())});
  }
  const std::lock_guard lock(mutex_);
  if (!failure_) failure_ = error;
  const auto end = [&](const std::shared_ptr<Job>& job) {
    if (job && !job->done()) job->end(failure_);
  };
  end(current_.job);
  for (const Queued& q : queue_) end(q.job);
  std::for_each(messaging_.begin(), messaging_.end(), end);
  std::for_each(incoming_.begin(), incoming_.end(), end);
  current_ = {};
  calls_in_one_ = 1;
  queue_.clear();
  messaging_.clear();
  incoming_.clear();
  messages_.clear();
  unfinished_ = 0;
  changed_.notify_all();
}

}  // namespace rz
