#include "comm/backends/mpi/mpi_engine.h"

#include <algorithm>

#include "comm/core/deadline.h"
#include "comm/core/error.h"
#include "comm/device/cuda_runtime.h"
#include "comm/os/helper_thread.h"
#include "comm/os/spin.h"
#include "comm/schedule/chunk_layout.h"
#include "comm/schedule/executor.h"

namespace rz::mpi {

namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

constexpr std::size_t min_thread_wake_bytes = 1 << 20;  // bytes: below, the caller mostly waits at once
constexpr auto active_window = 1s;  // after the last call, the thread looks once a millisecond
constexpr auto active_poll = 1ms;
constexpr auto control_poll_interval = 1ms;      // between looks for notes while operations are in flight
constexpr auto idle_poll_interval = 100ms;       // and while there are none
constexpr auto inquiry_timeout = 1s;             // an idle rank answers within idle_poll_interval
constexpr auto catch_up_time = 200ms;            // for calls that others have ended
constexpr std::size_t max_agreements_ahead = 8;  // agreements under way
constexpr std::size_t max_remembered_calls = 8;  // ended calls, for ranks that ask
constexpr int first_split_tag = ControlChannel::tag + 1,
              split_tag_count = 32000;  // of 32,767 that MPI promises

bool should_wake_thread(std::span<const CollectiveCall> group) {
  std::size_t bytes = 0;
  for (const CollectiveCall& op : group) bytes += std::max(op.in.bytes(), op.out.bytes());
  return bytes >= min_thread_wake_bytes;
}

// Two different calls get the same number once in 2^64 times.
std::uint64_t signature_hash(const CallSignature& s) {
  std::uint64_t h = 0x9e3779b97f4a7c15u;
  for (const std::uint64_t field :
       {std::uint64_t{s.sequence}, static_cast<std::uint64_t>(s.root), s.count,
        static_cast<std::uint64_t>(s.kind), static_cast<std::uint64_t>(s.dtype),
        static_cast<std::uint64_t>(s.op), static_cast<std::uint64_t>(s.algorithm)}) {
    h = (h ^ field) * 0xff51afd7ed558ccdu;
    h ^= h >> 32;
  }
  return h;
}

double to_seconds(std::chrono::milliseconds t) { return std::chrono::duration<double>(t).count(); }

std::string ranks_text(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank" : "ranks";
  for (std::size_t i = 0; i < ranks.size(); ++i) text += concat(i ? ", " : " ", ranks[i]);
  return text;
}

MpiOptions with_bounded_timeout(MpiOptions options) {
  options.timeout = bounded(options.timeout);
  return options;
}

MPI_Comm idup(MPI_Comm comm, std::chrono::milliseconds timeout) {
  MPI_Comm copy = MPI_COMM_NULL;
  MPI_Request request = MPI_REQUEST_NULL;
  check(MPI_Comm_idup(comm, &copy, &request), "MPI_Comm_idup");
  int done = 0;
  for (const Deadline end = Deadline::after(timeout);;) {
    check(MPI_Test(&request, &done, MPI_STATUS_IGNORE), "MPI_Test");
    if (done) break;
    require(!end.expired(), Errc::timeout, "the MPI communicator could not be duplicated within ",
            to_seconds(timeout), " s; does every rank of it connect?");
    std::this_thread::sleep_for(50us);
  }
  check(MPI_Comm_set_errhandler(copy, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  return copy;
}

}  // namespace

CommPair duplicate(MPI_Comm comm, std::chrono::milliseconds timeout) {
  return adopt(idup(comm, timeout), timeout);
}

CommPair adopt(MPI_Comm comm, std::chrono::milliseconds timeout) {
  check(MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  return {comm, idup(comm, timeout)};
}

bool MpiRequest::done() const noexcept {
  if (!is_complete() && !engine_->has_progress_thread()) engine_->progress();
  return is_complete();
}

void MpiRequest::wait() {
  engine_->wait(*this);
  if (error_) std::rethrow_exception(error_);
}

MpiEngine::MpiEngine(MpiRuntime& session, CommPair comms, int rank, int size, const MpiOptions& options)
    : runtime_(session),
      comms_(comms),
      rank_(rank),
      size_(size),
      options_(with_bounded_timeout(options)),
      context_{comms.data, rank, size, options.deterministic, options.max_call_bytes},
      control_(comms.control, rank, size),
      point_to_point_(comms.data, rank, size, options.max_call_bytes),
      departed_(static_cast<std::size_t>(size)) {}

// ---- who drives

void MpiEngine::start() {
  if (has_progress_thread()) helper_thread([self = shared_from_this()] { self->progress_thread(); }).detach();
}

std::shared_ptr<MpiRequest> MpiEngine::submit(std::span<const CollectiveCall> group) {
  const auto now = Clock::now();
  auto job = std::make_shared<MpiRequest>(shared_from_this(), group, now + options_.timeout);
  {
    const std::lock_guard lock(mutex_);
    if (failure_) std::rethrow_exception(failure_);
    if (group.empty()) {
      job->complete(nullptr);
      return job;
    }
    incoming_.push_back(job);
    ++unfinished_;
    last_use_ = now;
    inbox_changed_.store(true, std::memory_order_release);
    if (!progress_held_ && should_wake_thread(group)) work_arrived_.notify_one();
  }
  if (!has_progress_thread()) progress();
  return job;
}

void MpiEngine::wait(const MpiRequest& job) {
  std::unique_lock lock(mutex_);
  while (!job.is_complete()) {
    if (progress_held_) {
      changed_.wait(lock);
      continue;
    }
    progress_held_ = true;
    lock.unlock();
    progress_until(&job);
    lock.lock();
    release_progress(lock);
  }
}

void MpiEngine::release_progress(std::unique_lock<std::mutex>&) {
  progress_held_ = false;
  changed_.notify_all();
  if (unfinished_ > 0) work_arrived_.notify_one();
}

bool MpiEngine::acquire_progress(std::unique_lock<std::mutex>& lock) {
  changed_.wait_for(lock, 5s, [&] { return !progress_held_; });
  if (progress_held_) return false;
  return progress_held_ = true;
}

void MpiEngine::progress() noexcept {
  std::unique_lock lock(mutex_);
  if (progress_held_) return;
  progress_held_ = true;
  lock.unlock();
  try {
    const cuda::DeviceGuard device(options_.device);  // as MPI wants it
    progress_once();
  } catch (...) {
    poison(std::current_exception());
  }
  lock.lock();
  release_progress(lock);
}

void MpiEngine::progress_thread() {
  std::unique_lock lock(mutex_);
  while (!stopping_ && !poisoned_) {
    if (!progress_held_ && (unfinished_ > 0 || inbox_changed_.load() || Clock::now() >= next_control_poll_)) {
      progress_held_ = true;
      lock.unlock();
      progress_until(nullptr);
      lock.lock();
      progress_held_ = false;
      changed_.notify_all();
    } else if (Clock::now() - last_use_ < active_window) {
      work_arrived_.wait_for(lock, active_poll);
    } else {
      work_arrived_.wait_for(lock, idle_poll_interval);
    }
  }
  if (poisoned_) {
    if (departing_) runtime_.end_departure();
    return;
  }
  // A thread that waits may still drive: its step sees stopping_.
  const bool mine = acquire_progress(lock);
  lock.unlock();
  if (mine) depart();
}

void MpiEngine::progress_until(const MpiRequest* until) {
  try {
    const cuda::DeviceGuard device(options_.device);
    do progress_once();
    while (until ? !until->is_complete() : !is_idle());
  } catch (...) {
    poison(std::current_exception());
  }
}

void MpiEngine::abort(const std::string& reason) noexcept {
  {
    const std::lock_guard lock(mutex_);
    if (failure_) return;
    failure_ = std::make_exception_ptr(Error(Errc::aborted, reason, rank_));
    inbox_changed_.store(true, std::memory_order_release);
    work_arrived_.notify_one();
  }
  if (!has_progress_thread()) progress();
}

void MpiEngine::stop() noexcept {
  std::unique_lock lock(mutex_);
  stopping_ = true;
  inbox_changed_.store(true, std::memory_order_release);
  if (poisoned_) return;
  departing_ = true;
  runtime_.begin_departure();
  work_arrived_.notify_all();
  if (has_progress_thread()) {
    changed_.wait_for(lock, 2s, [&] { return unfinished_ == 0; });
    return;
  }
  const bool mine = acquire_progress(lock);
  lock.unlock();
  if (mine) depart();
}

// ---- collectives and messages

void MpiEngine::progress_once() {
  require(runtime_.is_open(), Errc::aborted, "MPI was finalised while the communicator of rank ", rank_,
          " was in use");
  if (inbox_changed_.load(std::memory_order_acquire)) accept_submitted();
  bool moved = advance_front();
  moved |= point_to_point_.advance([this](MpiRequest& job) { complete_operation(job); });
  check_remote_failure();
  const auto now = Clock::now();
  if (now >= next_control_poll_) {
    next_control_poll_ =
        now + (queue_.empty() && point_to_point_.is_idle() ? idle_poll_interval : control_poll_interval);
    receive_control();
    check_departed();
    check_deadlines();
  }
  if (!moved) return on_idle();
  idle_spins_ = 0;
}

void MpiEngine::accept_submitted() {
  const std::lock_guard lock(mutex_);
  inbox_changed_.store(false, std::memory_order_relaxed);
  if (failure_) std::rethrow_exception(failure_);
  require(!stopping_ || unfinished_ == 0, Errc::aborted, "the communicator of rank ", rank_,
          " was destroyed");
  for (const auto& job : incoming_)
    for (std::size_t i = 0; i < job->operations.size(); ++i) {
      const CollectiveCall& op = job->operations[i];
      if (traits(op.kind).point_to_point) {
        point_to_point_.add(op, job);
        continue;
      }
      Call& call = queue_.emplace_back();
      call.request = job;
      call.operation_index = i;
      call.signature = {.sequence = next_sequence_++,
                        .root = op.root,
                        .count = count_per_rank(op, size_),
                        .kind = op.kind,
                        .dtype = op.out.data ? op.out.dtype : op.in.dtype,
                        .op = op.op.kind,
                        .algorithm = uses_messages(op)};
    }
  incoming_.clear();
}

// The order is the same on every rank, as the calls' is.
void MpiEngine::propose() {
  for (std::size_t i = 0; i < std::min(queue_.size(), max_agreements_ahead); ++i) {
    Call& call = queue_[i];
    if (call.proposed) continue;
    call.proposal[0] = signature_hash(call.signature);
    call.proposal[1] = ~call.proposal[0];
    check(MPI_Iallreduce(call.proposal, call.reduced, 2, MPI_UINT64_T, MPI_MAX, comms_.control,
                         &call.agreement_request),
          "MPI_Iallreduce");
    call.proposed = true;
  }
}

bool MpiEngine::advance_front() {
  if (queue_.empty()) return false;
  propose();
  Call& call = queue_.front();
  if (!call.started) {
    if (!check_agreement(call)) return false;
    call.stages = plan_stages(call.request->operations[call.operation_index], context_, operators_);
    call.started = true;
    if (!call.stages.empty()) call.stages[0].post(call.mpi_requests);
  }
  if (!advance_stages(call)) return false;
  const auto job = std::move(call.request);
  recent_calls_.push_back(call.signature);
  if (recent_calls_.size() > max_remembered_calls) recent_calls_.pop_front();
  queue_.pop_front();
  inquiry_.reset();
  complete_operation(*job);
  return true;
}

bool MpiEngine::check_agreement(Call& call) {
  int done = 0;
  check(MPI_Test(&call.agreement_request, &done, MPI_STATUS_IGNORE), "MPI_Test");
  if (!done) return false;
  if (call.reduced[0] == ~call.reduced[1]) return true;
  // All have come, but not to the same call: now it is asked who.
  if (!inquiry_) start_inquiry(call);
  return false;
}

bool MpiEngine::advance_stages(Call& call) {
  for (; call.stage_index < call.stages.size(); ++call.stage_index) {
    int done = 0;
    check(MPI_Testall(static_cast<int>(call.mpi_requests.size()), call.mpi_requests.data(), &done,
                      MPI_STATUSES_IGNORE),
          "MPI_Testall");
    if (!done) return false;
    if (const auto& finish = call.stages[call.stage_index].finish) finish();
    call.mpi_requests.clear();
    if (call.stage_index + 1 < call.stages.size()) call.stages[call.stage_index + 1].post(call.mpi_requests);
  }
  return true;
}

void MpiEngine::complete_operation(MpiRequest& job) {
  if (--job.remaining > 0) return;
  const std::lock_guard lock(mutex_);
  job.complete(nullptr);
  --unfinished_;
  changed_.notify_all();
}

// ---- notes

void MpiEngine::receive_control() {
  control_.poll([this](int peer, const ControlMessage& note) { handle_control(peer, note); });
}

void MpiEngine::handle_control(int peer, const ControlMessage& note) {
  switch (note.kind) {
    case ControlMessage::query:
      return control_.send(peer, reply_to(note));
    case ControlMessage::reply:
      if (inquiry_ && inquiry_->sequence == note.sequence &&
          !inquiry_->replies[static_cast<std::size_t>(peer)]) {
        inquiry_->replies[static_cast<std::size_t>(peer)] = note;
        --inquiry_->pending_replies;
      }
      return;
    case ControlMessage::departure:
      departed_[static_cast<std::size_t>(peer)] = note;
      return;
    case ControlMessage::failure:
      failure_is_remote_ = true;
      if (!remote_failure_)
        remote_failure_ =
            RemoteFailure{.error = Error(static_cast<Errc>(note.code), note.get_text(), note.culprit),
                          .calls = note.calls,
                          .until = Clock::now() + catch_up_time};
      return check_remote_failure();
  }
}

void MpiEngine::check_remote_failure() const {
  if (!remote_failure_) return;
  const bool behind = !queue_.empty() && queue_.front().signature.sequence < remote_failure_->calls;
  if (!behind || Clock::now() >= remote_failure_->until) throw remote_failure_->error;
}

ControlMessage MpiEngine::reply_to(const ControlMessage& query) const {
  ControlMessage answer{.kind = ControlMessage::reply, .calls = next_sequence_, .sequence = query.sequence};
  const auto look = [&](const CallSignature& s) {
    if (s.sequence != query.sequence) return;
    answer.found = 1;
    answer.signature = s;
  };
  std::for_each(recent_calls_.begin(), recent_calls_.end(), look);
  for (const Call& call : queue_) look(call.signature);
  return answer;
}

// Whoever left had ended all its calls, and no other ones will come: those are ended here, too.
void MpiEngine::check_departed() const {
  for (int peer = 0; peer < size_; ++peer) {
    const auto& note = departed_[static_cast<std::size_t>(peer)];
    if (!note) continue;
    const bool missed = !queue_.empty() && queue_.front().signature.sequence >= note->calls;
    if (missed || point_to_point_.can_never_complete(peer, note->sent, note->received))
      throw Error(Errc::peer_lost,
                  concat("rank ", peer, " destroyed its communicator, but rank ", rank_, " called ",
                         missed ? describe(queue_.front().signature) : "a message that it should share",
                         "; every rank must make the same calls"),
                  peer);
  }
}

// ---- waiting, and deadlines

void MpiEngine::on_idle() {
  check_deadlines();
  if (queue_.empty() && point_to_point_.is_idle()) return;
  if (++idle_spins_ < 64) return cpu_pause();
  if (idle_spins_ < 256) return std::this_thread::yield();
  std::this_thread::sleep_for(std::min<Clock::duration>(500us, 10us * (1 + (idle_spins_ - 256) / 16)));
}

void MpiEngine::check_deadlines() {
  const auto now = Clock::now();
  if (inquiry_) {
    if (inquiry_->pending_replies == 0 || now >= inquiry_->until) conclude_inquiry();
  } else if (!queue_.empty() && now >= queue_.front().request->deadline) {
    start_inquiry(queue_.front());
  }
  if (point_to_point_.is_idle()) return;
  const auto late = point_to_point_.earliest_deadline();
  if (now < late.request->deadline) return;
  fail_timeout(concat("rank ", late.peer), late.peer,
               concat(late.sending ? "send to" : "recv from", " rank ", late.peer));
}

void MpiEngine::start_inquiry(const Call& call) {
  inquiry_ =
      TimeoutInquiry{.sequence = call.signature.sequence,
                     .until = Clock::now() + inquiry_timeout,
                     .replies = std::vector<std::optional<ControlMessage>>(static_cast<std::size_t>(size_)),
                     .pending_replies = size_ - 1};
  control_.broadcast({.kind = ControlMessage::query, .sequence = call.signature.sequence});
}

void MpiEngine::conclude_inquiry() {
  const CallSignature& mine = queue_.front().signature;
  std::vector<int> silent, late;
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    const auto& answer = inquiry_->replies[static_cast<std::size_t>(peer)];
    if (!answer) {
      silent.push_back(peer);
    } else if (!answer->found && answer->calls <= mine.sequence) {
      late.push_back(peer);
    } else if (answer->found && !(answer->signature == mine)) {
      fail(Errc::mismatch, "mismatched collectives: rank ", peer, " called ", describe(answer->signature),
           " while rank ", rank_, " called ", describe(mine),
           "; every rank must make the same calls in the same order");
    }
  }
  std::string who;
  if (!late.empty()) who = ranks_text(late) + " did not call it";
  if (!silent.empty()) who += concat(who.empty() ? "" : ", and ", ranks_text(silent), " did not answer");
  if (who.empty()) who = "every rank called it, but MPI did not end it";
  fail_timeout(who, !late.empty() ? late[0] : !silent.empty() ? silent[0] : -1, describe(mine));
}

void MpiEngine::fail_timeout(const std::string& who, int culprit, const std::string& what) const {
  throw Error(Errc::timeout,
              concat(what, " did not end within ", to_seconds(options_.timeout), " s on rank ", rank_, ": ",
                     who, "; a rank may be stuck, or slower than the timeout allows"),
              culprit);
}

// ---- the end

// What MPI still holds stays in memory for ever: it has no way to withdraw a collective.
void MpiEngine::poison(std::exception_ptr error) noexcept {
  ControlMessage note{.kind = ControlMessage::failure,
                      .code = static_cast<int>(Errc::aborted),
                      .culprit = rank_,
                      .calls = queue_.empty() ? next_sequence_ : queue_.front().signature.sequence};
  bool destroyed = false;
  {
    const std::lock_guard lock(mutex_);
    destroyed = stopping_ && !failure_ && !failure_is_remote_;
  }
  try {
    std::rethrow_exception(error);
  } catch (const Error& e) {
    const bool shared = e.code() == Errc::timeout || e.code() == Errc::mismatch ||
                        e.code() == Errc::peer_lost || e.code() == Errc::aborted;
    if (shared) note.code = static_cast<int>(e.code()), note.culprit = e.culprit();
    note.set_text(shared ? e.what() : concat("rank ", rank_, ": ", e.what()));
  } catch (const std::exception& e) {
    note.set_text(concat("rank ", rank_, ": ", e.what()));
  }
  if (destroyed) {
    note.code = static_cast<int>(Errc::peer_lost);
    note.culprit = rank_;
  }
  runtime_.mark_failed();
  try {
    if (!failure_is_remote_ && runtime_.is_open()) control_.broadcast(note);
    control_.flush(500ms);
  } catch (const Error&) {  // MPI is broken here; the others have their deadlines
  }
  control_.abandon();
  operators_.abandon();
  const std::lock_guard lock(mutex_);
  if (!failure_) failure_ = error;
  const auto end = [&](MpiRequest& job) {
    if (!job.is_complete()) job.complete(failure_);
  };
  for (const Call& call : queue_) end(*call.request);
  for (const auto& job : incoming_) end(*job);
  incoming_.clear();
  point_to_point_.abandon(end);
  if (!queue_.empty()) new std::deque<Call>(std::move(queue_));
  queue_.clear();
  inquiry_.reset();
  unfinished_ = 0;
  poisoned_ = true;
  changed_.notify_all();
  work_arrived_.notify_all();
}

// The last note of each rank says that no other will follow: once all have come, no message can meet a later
// communicator of the same number.
void MpiEngine::depart() noexcept {
  try {
    accept_submitted();
    for (int peer = 0; peer < size_; ++peer)
      if (peer != rank_)
        control_.send(peer, {.kind = ControlMessage::departure,
                             .calls = next_sequence_,
                             .sent = point_to_point_.sent(peer),
                             .received = point_to_point_.received(peer)});
    const auto patience =
        has_progress_thread() ? options_.timeout : std::min<std::chrono::milliseconds>(options_.timeout, 1s);
    const Deadline end = Deadline::after(patience);
    const auto all_left = [&] {
      return std::count_if(departed_.begin(), departed_.end(),
                           [](const auto& note) { return note.has_value(); }) == size_ - 1;
    };
    for (auto nap = 10us; !all_left() && !end.expired();
         nap = std::min<std::chrono::microseconds>(nap * 2, 10ms)) {
      receive_control();
      if (!all_left()) std::this_thread::sleep_for(nap);
    }
    if (all_left() && control_.flush(1s)) free_comms();
    control_.abandon();
    const std::lock_guard lock(mutex_);
    failure_ = std::make_exception_ptr(
        Error(Errc::aborted, concat("the communicator of rank ", rank_, " was destroyed"), rank_));
  } catch (...) {
    poison(std::current_exception());
  }
  runtime_.end_departure();
}

void MpiEngine::free_comms() {
  CommPair comms = comms_;
  check(MPI_Comm_free(&comms.data), "MPI_Comm_free");
  check(MPI_Comm_free(&comms.control), "MPI_Comm_free");
}

CommPair MpiEngine::split(std::span<const int> members) {
  std::unique_lock lock(mutex_);
  if (failure_) std::rethrow_exception(failure_);
  require(acquire_progress(lock), Errc::timeout, "rank ", rank_,
          ": another thread kept the communicator busy");
  lock.unlock();
  CommPair comms;
  std::exception_ptr error;
  try {
    MPI_Group all, some;
    check(MPI_Comm_group(comms_.control, &all), "MPI_Comm_group");
    const int chosen = MPI_Group_incl(all, static_cast<int>(members.size()), members.data(), &some);
    MPI_Group_free(&all);
    check(chosen, "MPI_Group_incl");
    MPI_Comm comm = MPI_COMM_NULL;
    const int made = MPI_Comm_create_group(comms_.control, some,
                                           first_split_tag + split_count_++ % split_tag_count, &comm);
    MPI_Group_free(&some);
    check(made, "MPI_Comm_create_group");
    comms = adopt(comm, options_.rendezvous_timeout);
  } catch (...) {
    error = std::current_exception();
  }
  lock.lock();
  release_progress(lock);
  if (error) std::rethrow_exception(error);
  return comms;
}

}  // namespace rz::mpi
