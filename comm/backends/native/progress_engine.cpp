#include "comm/backends/native/progress_engine.h"

#include <algorithm>
#include <cstring>
#include <ranges>
#include <utility>

#include "comm/core/deadline.h"
#include "comm/core/error.h"
#include "comm/intranode/explain.h"
#include "comm/os/helper_thread.h"
#include "comm/reduce/reduce.h"
#include "comm/schedule/algorithms/node_map.h"
#include "comm/shared_memory/allocator.h"
#include "comm/tuning/group_size.h"

namespace rz {

namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

constexpr int inline_spins = 30, spins_before_idle = 400, oversubscribed_spins = 100;
// Progress thread:
constexpr auto active_window = 1s;      // poll while a call was made this recently
constexpr auto active_poll = 1ms;       // period, if a request was unattended within active_window
constexpr auto idle_poll = 16ms;        // period otherwise
constexpr auto idle_failure_poll = 1s;  // period without calls, for failures and memory that peers free
constexpr auto attended_grace = 200us;  // a request this young counts as attended: its caller may yet wait
// Driving thread:
constexpr auto max_wait = 10ms;    // of one Transport::wait(), before spin_limit
constexpr auto spin_limit = 30ms;  // without progress; then sleep
constexpr auto max_sleep = 50ms;   // of one Transport::wait(), after spin_limit

// Min and max select one contribution and do not round.
bool rounds_partial_sums(DType dtype, const ReduceOp& op) {
  const bool small = size_of(dtype) < 4 && dtype != DType::i8 && dtype != DType::u8;
  return small && op.kind != ReduceOp::min && op.kind != ReduceOp::max;
}
bool rounds_partial_sums(const CollectiveCall& op) {
  return rounds_partial_sums(op.out.data ? op.out.dtype : op.in.dtype, op.op);
}

NativeOptions with_bounded_timeout(NativeOptions options) {
  options.timeout = bounded(options.timeout);
  return options;
}

}  // namespace

void Request::wait() {
  engine_->wait(*this);
  if (error_) std::rethrow_exception(error_);
}

ProgressEngine::ProgressEngine(int rank, int size, std::unique_ptr<Transport> transport,
                               NativeOptions options)
    : rank_(rank),
      size_(size),
      options_(with_bounded_timeout(std::move(options))),
      overrides_(options_.algorithm, options_.deterministic),
      file_rules_(rules_for(options_.tuning, size)),
      transport_(std::move(transport)),
      oversubscribed_(transport_->oversubscribed()),
      intra_node_(transport_->one_host()),
      node_of_rank_(transport_->hosts().begin(), transport_->hosts().end()),
      nodes_(1 + *std::max_element(node_of_rank_.begin(), node_of_rank_.end())),
      transport_name_(transport_->describe()),
      executor_(*transport_, rank, size),
      point_to_point_(*transport_, rank, size) {
  constexpr int max_intranode_ranks = 256;  // a staged contribution may have a shard for each peer
  const SharedMemoryGroup* const shared = transport_->shared_memory();
  if (shared && !shared->mailboxes().empty() && size <= max_intranode_ranks)
    intranode_ = std::make_unique<IntranodeEngine>(
        *transport_, rank, size,
        IntranodeTuningTable(size, file_rules_, options_.tuning.name, overrides_, options_.deterministic));
  for (int c = 0; c < collective_count && !intranode_; ++c)
    if (!overrides_.of(Collective(c)).empty())
      schedule_for(Collective(c), 0);  // Errc::config for no schedule
}

ProgressEngine::~ProgressEngine() { stop(); }

void ProgressEngine::start_thread() {
  thread_ = helper_thread([this] { progress_thread(); });
}

void ProgressEngine::check_process() const {
  if (creator_.is_this_generation()) [[likely]]
    return;
  fail(Errc::invalid_argument, "the communicator of rank ", rank_, " belongs to process ", creator_.process(),
       ", and this is process ", ::getpid(),
       ", which came of it by fork(); connect a communicator in each process that uses one");
}

std::shared_ptr<SharedMemoryAllocator> ProgressEngine::arena() {
  check_process();
  const std::lock_guard lock(mutex_);
  require(transport_ != nullptr, Errc::aborted, "the communicator of rank ", rank_, " was destroyed");
  SharedMemoryGroup* const shared = transport_->shared_memory();
  return shared ? shared->allocator() : nullptr;
}

// Without the lock: a large allocation takes long, and calls in flight and abort() need the lock.
std::shared_ptr<std::byte> ProgressEngine::allocate(std::size_t bytes) {
  return allocate_zeroed(arena(), bytes);
}

std::string ProgressEngine::describe() const { return "native over " + transport_name_; }

AlgorithmChoice ProgressEngine::explain(Collective kind, std::size_t bytes, bool reachable, DType dtype,
                                        ReduceOp op) const {
  if (traits(kind).point_to_point) return {"message", transport_name_, 0, "messages take no algorithm"};
  if (kind == Collective::barrier || kind == Collective::all_to_all_v) bytes = 0;  // as in the tables
  if (intranode_) {
    const IntranodeAlgorithm& entry = intranode_->table().find(kind, bytes);
    AlgorithmChoice choice = explain_intranode(kind, bytes, size_, entry, intranode_->limits(), reachable);
    if (!entry.schedule) return choice;
    if (!is_allowed(*entry.schedule, kind, rounds_partial_sums(dtype, op))) {
      choice.reason += concat("; not ", entry.schedule->name, ", which rounds ", name(dtype), " on the way");
      return choice;
    }
    return {concat("schedule:", entry.schedule->name), transport_name_,
            entry.slice ? entry.slice : default_slice_bytes, entry.reason};
  }
  const SelectedAlgorithm s = schedule_for(kind, bytes, rounds_partial_sums(dtype, op));
  const std::string why = s.rule ? source_prefix(*s.rule, options_.tuning.name) + to_string(*s.rule)
                                 : concat("forced: ", name(kind), "=", overrides_.of(kind));
  return {s.algorithm->name, transport_name_, s.slice ? s.slice : default_slice_bytes, why};
}

// Without the lock, since it copies.
Registration ProgressEngine::register_buffer(std::span<std::byte> memory) {
  const auto shared = arena();
  return shared
             ? shared->register_buffer(memory)
             : Registration(concat("no other rank shares memory with rank ", rank_, " (", describe(), ")"));
}

std::shared_ptr<Request> ProgressEngine::submit(std::span<const CollectiveCall> group) {
  check_process();
  Coalescer::require_independent(group);
  const auto now = Clock::now();
  auto request = std::make_shared<Request>(shared_from_this(), group, now + options_.timeout);
  const std::lock_guard lock(mutex_);
  if (failure_) std::rethrow_exception(failure_);
  if (group.empty()) {
    request->end(nullptr);
    return request;
  }
  incoming_.push_back(request);
  ++unfinished_;
  last_use_ = now;
  const bool first = !inbox_changed_.exchange(true, std::memory_order_acq_rel);
  if (has_owner_) {
    if (first) transport_->wake();  // the driving thread may sleep in Transport::wait()
  } else if (sleeping_) {
    work_arrived_.notify_one();
  }
  return request;
}

bool ProgressEngine::is_inline_eligible(const CollectiveCall& op) const {
  return !traits(op.kind).point_to_point && op.op.kind != ReduceOp::premul_sum &&
         op.in.bytes() <= IntranodeEngine::max_inline_bytes &&
         op.out.bytes() <= IntranodeEngine::max_inline_bytes && !intranode_->schedule_for(op);
}

bool ProgressEngine::try_fast_path(const CallKey& call, std::shared_ptr<Request>& request) {
  if (!intranode_) return false;
  check_process();
  std::unique_lock lock(mutex_);
  if (has_owner_ || unfinished_ > 0 || stopping_ || failure_ || !intranode_->matches_last(call)) return false;
  try {
    if (!intranode_->run_fast_path(call, sequence_++, oversubscribed_ ? oversubscribed_spins : inline_spins))
      request = enqueue_started(intranode_->call());
  } catch (...) {
    fail_inline(lock, request);
  }
  return true;
}

bool ProgressEngine::try_inline(std::span<const CollectiveCall> group, std::shared_ptr<Request>& request) {
  if (!intranode_ || group.size() != 1 || !is_inline_eligible(group.front())) return false;
  check_process();
  std::unique_lock lock(mutex_);
  if (failure_) std::rethrow_exception(failure_);
  if (has_owner_ || unfinished_ > 0 || stopping_) return false;
  try {
    intranode_->start(group.front(), sequence_++);
    if (!intranode_->spin(oversubscribed_ ? oversubscribed_spins : inline_spins))
      request = enqueue_started(group.front());
  } catch (...) {
    fail_inline(lock, request);
  }
  return true;
}

/// Ends the request with the current exception, and poisons the group with it.
void ProgressEngine::fail_inline(std::unique_lock<SpinFutexLock>& lock, std::shared_ptr<Request>& request) {
  const auto error = std::current_exception();
  has_owner_ = true;  // poison() clears state of the driving thread
  lock.unlock();
  poison(error);
  lock.lock();
  has_owner_ = false;
  if (waiters_ > 0 || stopping_) changed_.notify_all();
  request = std::make_shared<Request>(shared_from_this(), std::span<const CollectiveCall>{}, Clock::now());
  request->end(error);
}

/// Requires mutex_. Turns a call that intranode_ has begun into a queued request.
std::shared_ptr<Request> ProgressEngine::enqueue_started(const CollectiveCall& op) {
  const auto now = Clock::now();
  auto request = std::make_shared<Request>(shared_from_this(), std::span(&op, 1), now + options_.timeout);
  intranode_->rebind(request->operations[0]);
  current_ = {request, 0};
  current_is_intranode_ = true;
  ++unfinished_;
  last_use_ = now;
  if (sleeping_) work_arrived_.notify_one();
  return request;
}

void ProgressEngine::wait(Request& request) {
  if (request.done()) return;
  check_process();
  std::unique_lock lock(mutex_);
  if (const auto now = Clock::now(); now > request.deadline - options_.timeout + active_poll)
    last_unattended_ = now;
  while (!request.done()) {
    if (has_owner_) {
      if (++waiters_ == 1) transport_->wake();  // a progress thread that drives yields to this one
      changed_.wait(lock);
      --waiters_;
      continue;
    }
    has_owner_ = true;
    lock.unlock();
    progress(&request);
    lock.lock();
    has_owner_ = false;
    if (waiters_ > 0 || stopping_) changed_.notify_all();
    if (unfinished_ > 0) work_arrived_.notify_one();
  }
}

/// Requires mutex_. True if the oldest request is older than attended_grace, so that its caller probably does
/// not wait for it, or if there is none.
bool ProgressEngine::is_unattended() const {
  const Request* const oldest = current_.request    ? current_.request.get()
                                : !queue_.empty()   ? queue_.front().request.get()
                                : incoming_.empty() ? nullptr
                                                    : incoming_.front().get();
  return !oldest || Clock::now() > oldest->deadline - options_.timeout + attended_grace;
}

void ProgressEngine::progress_thread() {
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    if (unfinished_ > 0 && !has_owner_ && waiters_ == 0) {
      const bool unattended = is_unattended();
      has_owner_ = true;
      lock.unlock();
      progress(nullptr);
      lock.lock();
      has_owner_ = false;
      changed_.notify_all();
      if (unattended && waiters_ == 0) last_unattended_ = Clock::now();
    } else if (const auto now = Clock::now(); now - last_use_ < active_window) {
      work_arrived_.wait_for(lock, now - last_unattended_ < active_window ? active_poll : idle_poll);
    } else {
      sleeping_ = true;
      const bool has_work = work_arrived_.wait_for(lock, idle_failure_poll, [&] {
        return stopping_ || (unfinished_ > 0 && !has_owner_ && waiters_ == 0);
      });
      sleeping_ = false;
      if (!has_work) poll_once(lock);
    }
  }
}

void ProgressEngine::abort(const std::string& reason) noexcept {
  if (!creator_.is_this_generation()) return;
  const std::lock_guard lock(mutex_);
  if (!transport_) return;
  transport_->abort({rank_, Errc::aborted, reason});
  transport_->wake();
  if (failure_) return;
  failure_ = std::make_exception_ptr(Error(Errc::aborted, reason, rank_));
  inbox_changed_.store(true);
  work_arrived_.notify_one();
}

void ProgressEngine::check() {
  check_process();
  std::unique_lock lock(mutex_);
  poll_once(lock);
  if (failure_) std::rethrow_exception(failure_);
}

/// Requires mutex_, and releases it meanwhile. Polls the transport once, unless another thread drives and
/// does so.
void ProgressEngine::poll_once(std::unique_lock<SpinFutexLock>& lock) {
  if (failure_ || has_owner_ || stopping_ || !transport_) return;
  has_owner_ = true;
  lock.unlock();
  try {
    transport_->progress();
  } catch (...) {
    poison(std::current_exception());
  }
  lock.lock();
  has_owner_ = false;
  if (waiters_ > 0 || stopping_) changed_.notify_all();
  if (unfinished_ > 0) work_arrived_.notify_one();
}

void ProgressEngine::stop() noexcept {
  {
    const std::lock_guard lock(mutex_);
    if (!transport_) return;
    stopping_ = true;
    inbox_changed_.store(true);
    transport_->wake();
    work_arrived_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
  std::unique_lock lock(mutex_);
  // Another thread may still drive: it was woken and sees stopping_ in its next step.
  if (!changed_.wait_for(lock, 5s, [&] { return !has_owner_; })) return;
  has_owner_ = true;  // a thread that enters wait() now must not drive
  lock.unlock();
  poison(std::make_exception_ptr(
      Error(Errc::aborted, concat("the communicator of rank ", rank_, " was destroyed"), rank_)));
  lock.lock();
  transport_.reset();
  has_owner_ = false;
  changed_.notify_all();
}

void ProgressEngine::abandon() noexcept {
  if (mutex_.try_lock() && !has_owner_) transport_.reset();
}

/// Drives until that request is done; for null (the progress thread), until there is nothing to do or a
/// thread waits. Without the latter two threads would alternate during every call.
void ProgressEngine::progress(const Request* until) {
  while (until ? !until->done() : !is_idle() && waiters_.load(std::memory_order_relaxed) == 0) {
    try {
      progress_step(until != nullptr);
    } catch (...) {
      poison(std::current_exception());
      return;
    }
  }
}

/// `waited_for`: the driving thread is in wait(), so it may spin, for spin_limit at most.
void ProgressEngine::progress_step(bool waited_for) {
  const bool eager = waited_for && !may_sleep_;
  if (inbox_changed_.load(std::memory_order_acquire)) accept();
  if (!current_.request && !queue_.empty()) start_next();
  bool moved = false;
  if (current_.request) {
    moved = advance_current(eager);
    if (current_is_intranode_ ? intranode_->complete() : executor_.complete()) {
      finish_current();
      moved = true;
    }
  }
  moved |= point_to_point_.advance();
  finish_point_to_point();
  if (!moved) return on_idle(waited_for);
  idle_since_.reset(), may_sleep_ = false;
  if (++steps_ % 64 != 0) return;
  const auto now = Clock::now();  // before poll_control(), as in on_idle()
  poll_control(waited_for);
  check_deadlines(now);
}

/// Advances the current call. With the intra-node engine it spins on the peers' slots first: these change
/// within less time than one poll of the transport takes.
bool ProgressEngine::advance_current(bool eager) {
  if (!current_is_intranode_) return executor_.advance();
  if (intranode_->advance()) return true;
  if (!eager || !point_to_point_.idle()) return false;
  return intranode_->spin(oversubscribed_ ? oversubscribed_spins : spins_before_idle) || intranode_->busy();
}

void ProgressEngine::accept() {
  const std::lock_guard lock(mutex_);
  inbox_changed_.store(false, std::memory_order_relaxed);
  require(!stopping_, Errc::aborted, "the communicator of rank ", rank_, " was destroyed");
  if (failure_) std::rethrow_exception(failure_);
  for (auto& request : incoming_) {
    bool messages = false;
    for (std::size_t i = 0; i < request->operations.size(); ++i) {
      if (traits(request->operations[i].kind).point_to_point)
        point_to_point_.add(request->operations[i], request.get()), messages = true;
      else
        queue_.push_back({request, i});
    }
    if (messages) point_to_point_requests_.push_back(request);
  }
  incoming_.clear();
}

void ProgressEngine::start_next() {
  if (const std::size_t calls = coalescable(); calls > 1) return start_coalesced(calls);
  current_ = std::move(queue_.front());
  queue_.pop_front();
  start(current_);
}

void ProgressEngine::start(const PendingCall& next) {
  CollectiveCall& op = next.request->operations[next.index];
  prepare_input(op, *next.request);
  dispatch(op);
}

/// The number of calls at the front of the queue that run as one. All are of one group, whose calls are
/// adjacent.
std::size_t ProgressEngine::coalescable() const {
  const std::shared_ptr<Request>& group = queue_.front().request;
  if (group->operations.size() == 1) return 1;
  return Coalescer::count(queue_ |
                          std::views::take_while([&](const PendingCall& q) { return q.request == group; }) |
                          std::views::transform([&](const PendingCall& q) -> const CollectiveCall& {
                            return group->operations[q.index];
                          }));
}

void ProgressEngine::start_coalesced(std::size_t calls) {
  if (!coalescing_buffer_) coalescing_buffer_ = transport_->allocate(Coalescer::max_bytes);
  current_ = queue_.front();
  calls_in_one_ = calls;
  std::vector<const CollectiveCall*> operations;
  for (; operations.size() < calls; queue_.pop_front())
    operations.push_back(&current_.request->operations[queue_.front().index]);
  dispatch(coalescer_.begin(std::move(operations), coalescing_buffer_.get()));
}

void ProgressEngine::dispatch(const CollectiveCall& op) {
  const IntranodeAlgorithm* entry = schedule_override(op);
  current_is_intranode_ = intranode_ && !entry;
  if (current_is_intranode_) return intranode_->start(op, sequence_++);
  if (entry) return run_schedule(op, *entry->schedule, entry->slice);
  const DType dtype = op.out.data ? op.out.dtype : op.in.dtype;
  const SelectedAlgorithm s =
      schedule_for(op.kind, message_bytes(op.kind, count_per_rank(op, size_) * size_of(dtype), size_),
                   rounds_partial_sums(op));
  run_schedule(op, *s.algorithm, s.slice);
}

/// The tuning entry whose schedule runs the call instead of the intra-node engine; null: none does.
const IntranodeAlgorithm* ProgressEngine::schedule_override(const CollectiveCall& op) const {
  const IntranodeAlgorithm* const entry = intranode_ ? intranode_->schedule_for(op) : nullptr;
  return entry && is_allowed(*entry->schedule, op.kind, rounds_partial_sums(op)) ? entry : nullptr;
}

/// False if the algorithm rounds partial sums of this type, so that its bits differ from other algorithms',
/// although `deterministic` is set and the algorithm is not forced. A tuning rule may name such an algorithm.
bool ProgressEngine::is_allowed(const Algorithm& algorithm, Collective kind, bool rounds) const {
  const bool depends = algorithm.is(rounds_partials) && traits(kind).reduces && rounds;
  return !depends || !options_.deterministic || !overrides_.of(kind).empty();
}

SelectedAlgorithm ProgressEngine::schedule_for(Collective kind, std::size_t bytes, bool rounds) const {
  return select_by_rule({.collective = kind,
                         .bytes = bytes,
                         .size = size_,
                         .intra_node = intra_node_,
                         .deterministic = options_.deterministic,
                         .override_name = overrides_.schedule_of(kind),
                         .file_rules = file_rules_,
                         .nodes = nodes_,
                         .contiguous_nodes = ranks_contiguous_by_node(node_of_rank_),
                         .rounds_partials = rounds});
}

void ProgressEngine::run_schedule(const CollectiveCall& op, const Algorithm& algorithm, std::size_t slice) {
  const int root = op.kind == Collective::all_reduce ? 0 : op.root;
  const DependencyPlan& plan = plan_for(algorithm, root, in_place(op, rank_, size_));
  const auto number = static_cast<std::uint32_t>(&algorithm - algorithms().data()) + 1;
  executor_.start(op, plan, make_signature(op, size_, sequence_++, number),
                  slice ? slice : default_slice_bytes);
}

void ProgressEngine::finish_current() {
  const PendingCall ended = std::exchange(current_, {});
  if (calls_in_one_ > 1) coalescer_.end();
  for (std::size_t calls = std::exchange(calls_in_one_, 1); calls > 0; --calls) call_ended(*ended.request);
}

// Copies the input where it cannot be read in place: scaled for premul_sum, and for the schedule of an
// in-place all_to_all, which overwrites shards that are yet to be sent. The intra-node engine stages those
// before it reads.
void ProgressEngine::prepare_input(CollectiveCall& op, Request& request) {
  const bool scaled = op.op.kind == ReduceOp::premul_sum && op.in.count > 0;
  const bool by_schedule = !intranode_ || schedule_override(op);
  const bool swapped = by_schedule && op.kind == Collective::all_to_all && op.in.data == op.out.data;
  if (!scaled && !swapped) return;
  if (scaled && op.kind == Collective::all_reduce) {
    scale(op.out.data, op.in.data, op.in.count, op.in.dtype, op.op.factor);
    op.in = op.out;
    return;
  }
  request.staged_input = transport_->allocate(op.in.bytes());
  if (scaled)
    scale(request.staged_input.get(), op.in.data, op.in.count, op.in.dtype, op.op.factor);
  else if (op.in.bytes() > 0)
    std::memcpy(request.staged_input.get(), op.in.data, op.in.bytes());
  op.in.data = request.staged_input.get();
}

const DependencyPlan& ProgressEngine::plan_for(const Algorithm& algorithm, int root, bool in_place) {
  for (const CachedPlan& c : plans_)
    if (c.algorithm == &algorithm && c.root == root && c.in_place == in_place) return *c.plan;
  auto plan = std::make_unique<DependencyPlan>(
      make_dependency_plan(algorithm.schedule({rank_, size_, root, node_of_rank_}), size_, in_place));
  plans_.push_back({&algorithm, root, in_place, std::move(plan)});
  return *plans_.back().plan;
}

void ProgressEngine::finish_point_to_point() {
  for (void* tag : point_to_point_.finished()) {
    Request& request = *static_cast<Request*>(tag);
    const auto keep = std::find_if(point_to_point_requests_.begin(), point_to_point_requests_.end(),
                                   [&](const auto& j) { return j.get() == &request; });
    const auto held = *keep;
    call_ended(request);
    if (request.done()) point_to_point_requests_.erase(keep);
  }
  point_to_point_.finished().clear();
}

void ProgressEngine::call_ended(Request& request) {
  if (--request.remaining > 0) return;
  if (queried_request_ == &request) queried_request_ = nullptr;
  request.staged_input.reset();
  const std::lock_guard lock(mutex_);
  request.end(nullptr);
  --unfinished_;
  if (waiters_ > 0) changed_.notify_all();
}

// Reads the clock before it polls: a process that was stopped for longer than the timeout then receives the
// failure that the others have agreed on, instead of reporting a timeout of its own.
void ProgressEngine::on_idle(bool waited_for) {
  const auto now = Clock::now();
  const bool eager = waited_for && !may_sleep_;
  if (current_is_intranode_ && current_.request) intranode_->check_peer_alive();
  poll_control(waited_for);
  check_deadlines(now);
  if (!idle_since_) idle_since_ = now;
  may_sleep_ = now - *idle_since_ >= spin_limit;
  transport_->wait(may_sleep_ ? max_sleep : max_wait, eager);
}

// An unattended point-to-point request does not block this rank, so it is not reported in the wait-for graph.
void ProgressEngine::poll_control(bool waited_for) {
  transport_->progress();
  if (!transport_->wait_graph().has_requests()) return;
  const Request* request = current_.request.get();
  if (!request && waited_for && !point_to_point_requests_.empty())
    request = point_to_point_requests_.front().get();
  transport_->reply_waits(wait_state_of(request).waiting_on);
}

WaitState ProgressEngine::wait_state_of(const Request* request) const {
  if (!request) return {};
  if (request != current_.request.get()) return point_to_point_.waiting_on(request);
  return current_is_intranode_ ? intranode_->waiting_on() : executor_.waiting_on();
}

const Request* ProgressEngine::overdue_request(Clock::time_point by) const {
  if (current_.request && by >= current_.request->deadline) return current_.request.get();
  return !point_to_point_requests_.empty() && by >= point_to_point_requests_.front()->deadline
             ? point_to_point_requests_.front().get()
             : nullptr;
}

// The peer that this rank waits for may itself wait for the culprit, since schedules relay. So the wait-for
// graph is requested shortly before the deadline; every rank that is in a call replies at once.
void ProgressEngine::check_deadlines(Clock::time_point now) {
  const auto margin = std::min<Clock::duration>(options_.timeout / 4, 1s);
  const Request* const request = overdue_request(now + margin);
  if (request == queried_request_) {
    if (request && now >= decide_at_) fail_timeout(*request);
    return;
  }
  queried_request_ = request;
  if (!request) return;
  transport_->query_waits();
  decide_at_ = Clock::now() + margin;
}

void ProgressEngine::fail_timeout(const Request& request) {
  const double seconds = std::chrono::duration<double>(options_.timeout).count();
  const WaitState wait = wait_state_of(&request);
  const int found = transport_->wait_graph().culprit(wait.suspect, wait.waiting_on);
  const int culprit = found < 0 ? wait.suspect : found;
  const std::string cause =
      found < 0
          ? ""
          : concat("; rank ", found,
                   transport_->wait_graph().unresponsive(found) ? " does not answer" : " waits for nobody");
  const Error error(
      Errc::timeout,
      concat(name(request.operations[0].kind), " did not end within ", seconds, " s on rank ", rank_,
             ": it waits for ", wait.text, cause, "; a rank may be stuck, or slower than the timeout allows"),
      culprit);
  transport_->abort({culprit, Errc::timeout, error.what()});
  throw error;
}

void ProgressEngine::poison(std::exception_ptr error) noexcept {
  try {
    std::rethrow_exception(error);
  } catch (const Error& e) {
    // A failure that only this rank has seen must be sent to the others.
    const bool shared = e.code() == Errc::peer_lost || e.code() == Errc::aborted || e.code() == Errc::timeout;
    if (e.code() == Errc::mismatch)
      transport_->abort({e.culprit(), e.code(), e.what()});
    else if (!shared)
      transport_->abort({rank_, Errc::aborted, concat("rank ", rank_, ": ", e.what())});
  } catch (const std::exception& e) {
    transport_->abort({rank_, Errc::aborted, concat("rank ", rank_, ": ", e.what())});
  }
  const std::lock_guard lock(mutex_);
  if (!failure_) failure_ = error;
  const auto end = [&](const std::shared_ptr<Request>& request) {
    if (request && !request->done()) request->end(failure_);
  };
  end(current_.request);
  for (const PendingCall& q : queue_) end(q.request);
  std::for_each(point_to_point_requests_.begin(), point_to_point_requests_.end(), end);
  std::for_each(incoming_.begin(), incoming_.end(), end);
  current_ = {};
  calls_in_one_ = 1;
  queue_.clear();
  point_to_point_requests_.clear();
  incoming_.clear();
  point_to_point_.clear();
  unfinished_ = 0;
  changed_.notify_all();
}

}  // namespace rz
