#include "comm/backends/mpi/mpi_engine.h"

#include <algorithm>

#include "comm/core/deadline.h"
#include "comm/core/error.h"
#include "comm/device/cuda_runtime.h"
#include "comm/os/helper_thread.h"
#include "comm/os/spin.h"
#include "comm/schedule/chunk_layout.h"
#include "comm/transport/call_signature.h"

namespace rz::mpi {

namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

constexpr std::size_t min_thread_wake_bytes = 1 << 20;  // below this, the caller usually waits at once
constexpr auto active_window = 1s;  // polls at active_poll for so long after the last call
constexpr auto active_poll = 1ms;
constexpr auto control_poll_interval = 1ms;      // of control messages, while operations are in flight
constexpr auto idle_poll_interval = 100ms;       // of control messages, while there are none
constexpr auto inquiry_timeout = 1s;             // idle ranks reply within idle_poll_interval
constexpr auto catch_up_time = 200ms;            // to complete calls that the failed rank had completed
constexpr std::size_t max_agreements_ahead = 8;  // verifications in flight
constexpr std::size_t max_remembered_calls = 8;  // completed calls, to reply to queries
constexpr int first_split_tag = ControlChannel::tag + 1,
              split_tag_count = 32000;  // MPI guarantees 32,767 tags

bool should_wake_thread(std::span<const CollectiveCall> group) {
  std::size_t bytes = 0;
  for (const CollectiveCall& op : group) bytes += std::max(op.in.bytes(), op.out.bytes());
  return bytes >= min_thread_wake_bytes;
}

// Distinct calls collide with probability 2^-64.
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

MpiEngine::MpiEngine(MpiRuntime& runtime, CommPair comms, int rank, int size, const MpiOptions& options)
    : runtime_(runtime),
      comms_(comms),
      rank_(rank),
      size_(size),
      options_(with_bounded_timeout(options)),
      context_{comms.data, rank, size, options.deterministic, options.max_call_bytes},
      control_(comms.control, rank, size),
      point_to_point_(comms.data, rank, size, options.max_call_bytes),
      departed_(static_cast<std::size_t>(size)) {}

// ---- progress

void MpiEngine::start() {
  if (has_progress_thread()) helper_thread([self = shared_from_this()] { self->progress_thread(); }).detach();
}

std::shared_ptr<MpiRequest> MpiEngine::submit(std::span<const CollectiveCall> group) {
  const auto now = Clock::now();
  auto request = std::make_shared<MpiRequest>(shared_from_this(), group, now + options_.timeout);
  {
    const std::lock_guard lock(mutex_);
    if (failure_) std::rethrow_exception(failure_);
    if (group.empty()) {
      request->complete(nullptr);
      return request;
    }
    incoming_.push_back(request);
    ++unfinished_;
    last_use_ = now;
    inbox_changed_.store(true, std::memory_order_release);
    if (!progress_held_ && should_wake_thread(group)) work_arrived_.notify_one();
  }
  if (!has_progress_thread()) progress();
  return request;
}

void MpiEngine::wait(const MpiRequest& request) {
  std::unique_lock lock(mutex_);
  while (!request.is_complete()) {
    if (progress_held_) {
      changed_.wait(lock);
      continue;
    }
    progress_held_ = true;
    lock.unlock();
    progress_until(&request);
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
    const cuda::DeviceGuard device(options_.device);  // device that CUDA-aware MPI uses
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
  // A waiting thread may still hold progress_held_: its progress_once() sees stopping_.
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

// ---- collectives and point-to-point

void MpiEngine::progress_once() {
  require(runtime_.is_open(), Errc::aborted, "MPI was finalised while the communicator of rank ", rank_,
          " was in use");
  if (inbox_changed_.load(std::memory_order_acquire)) accept_submitted();
  bool moved = advance_front();
  moved |= point_to_point_.advance([this](MpiRequest& request) { complete_operation(request); });
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
  for (const auto& request : incoming_)
    for (std::size_t i = 0; i < request->operations.size(); ++i) {
      const CollectiveCall& op = request->operations[i];
      if (traits(op.kind).point_to_point) {
        point_to_point_.add(op, request);
        continue;
      }
      Call& call = queue_.emplace_back();
      call.request = request;
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

// All ranks post the verifications in the same order, that of their calls.
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
  const auto request = std::move(call.request);
  recent_calls_.push_back(call.signature);
  if (recent_calls_.size() > max_remembered_calls) recent_calls_.pop_front();
  queue_.pop_front();
  inquiry_.reset();
  complete_operation(*request);
  return true;
}

bool MpiEngine::check_agreement(Call& call) {
  int done = 0;
  check(MPI_Test(&call.agreement_request, &done, MPI_STATUS_IGNORE), "MPI_Test");
  if (!done) return false;
  if (call.reduced[0] == ~call.reduced[1]) return true;
  // All ranks have made a call, but not the same: query which rank differs.
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

void MpiEngine::complete_operation(MpiRequest& request) {
  if (--request.remaining > 0) return;
  const std::lock_guard lock(mutex_);
  request.complete(nullptr);
  --unfinished_;
  changed_.notify_all();
}

// ---- control messages

void MpiEngine::receive_control() {
  control_.poll([this](int peer, const ControlMessage& message) { handle_control(peer, message); });
}

void MpiEngine::handle_control(int peer, const ControlMessage& message) {
  switch (message.kind) {
    case ControlMessage::query:
      return control_.send(peer, reply_to(message));
    case ControlMessage::reply:
      if (inquiry_ && inquiry_->sequence == message.sequence &&
          !inquiry_->replies[static_cast<std::size_t>(peer)]) {
        inquiry_->replies[static_cast<std::size_t>(peer)] = message;
        --inquiry_->pending_replies;
      }
      return;
    case ControlMessage::departure:
      departed_[static_cast<std::size_t>(peer)] = message;
      return;
    case ControlMessage::failure:
      failure_is_remote_ = true;
      if (!remote_failure_)
        remote_failure_ = RemoteFailure{
            .error = Error(static_cast<Errc>(message.code), message.get_text(), message.culprit),
            .calls = message.calls,
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
  ControlMessage reply{.kind = ControlMessage::reply, .calls = next_sequence_, .sequence = query.sequence};
  const auto match = [&](const CallSignature& s) {
    if (s.sequence != query.sequence) return;
    reply.found = 1;
    reply.signature = s;
  };
  std::for_each(recent_calls_.begin(), recent_calls_.end(), match);
  for (const Call& call : queue_) match(call.signature);
  return reply;
}

// A departed rank has completed all its calls and makes no others, so calls and messages that it lacks never
// complete.
void MpiEngine::check_departed() const {
  for (int peer = 0; peer < size_; ++peer) {
    const auto& message = departed_[static_cast<std::size_t>(peer)];
    if (!message) continue;
    const bool missed = !queue_.empty() && queue_.front().signature.sequence >= message->calls;
    if (missed || point_to_point_.can_never_complete(peer, message->sent, message->received))
      throw Error(Errc::peer_lost,
                  concat("rank ", peer, " destroyed its communicator, but rank ", rank_, " called ",
                         missed ? describe(queue_.front().signature) : "a message that it should share",
                         "; every rank must make the same calls"),
                  peer);
  }
}

// ---- idle waiting and deadlines

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
  std::vector<int> unresponsive, late;
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    const auto& reply = inquiry_->replies[static_cast<std::size_t>(peer)];
    if (!reply) {
      unresponsive.push_back(peer);
    } else if (!reply->found && reply->calls <= mine.sequence) {
      late.push_back(peer);
    } else if (reply->found && !(reply->signature == mine)) {
      fail(Errc::mismatch, "mismatched collectives: rank ", peer, " called ", describe(reply->signature),
           " while rank ", rank_, " called ", describe(mine),
           "; every rank must make the same calls in the same order");
    }
  }
  std::string reason;
  if (!late.empty()) reason = ranks_text(late) + " did not call it";
  if (!unresponsive.empty())
    reason += concat(reason.empty() ? "" : ", and ", ranks_text(unresponsive), " did not answer");
  if (reason.empty()) reason = "every rank called it, but MPI did not end it";
  fail_timeout(reason,
               !late.empty()           ? late[0]
               : !unresponsive.empty() ? unresponsive[0]
                                       : -1,
               describe(mine));
}

void MpiEngine::fail_timeout(const std::string& reason, int culprit, const std::string& operation) const {
  throw Error(Errc::timeout,
              concat(operation, " did not end within ", to_seconds(options_.timeout), " s on rank ", rank_,
                     ": ", reason, "; a rank may be stuck, or slower than the timeout allows"),
              culprit);
}

// ---- shutdown

// Memory that MPI still uses is leaked, since MPI cannot cancel a collective.
void MpiEngine::poison(std::exception_ptr error) noexcept {
  ControlMessage message{.kind = ControlMessage::failure,
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
    if (shared) message.code = static_cast<int>(e.code()), message.culprit = e.culprit();
    message.set_text(shared ? e.what() : concat("rank ", rank_, ": ", e.what()));
  } catch (const std::exception& e) {
    message.set_text(concat("rank ", rank_, ": ", e.what()));
  }
  if (destroyed) {
    message.code = static_cast<int>(Errc::peer_lost);
    message.culprit = rank_;
  }
  runtime_.mark_failed();
  try {
    if (!failure_is_remote_ && runtime_.is_open()) control_.broadcast(message);
    control_.flush(500ms);
  } catch (const Error&) {  // MPI is broken here; the other ranks have their deadlines
  }
  control_.abandon();
  operators_.abandon();
  const std::lock_guard lock(mutex_);
  if (!failure_) failure_ = error;
  const auto end = [&](MpiRequest& request) {
    if (!request.is_complete()) request.complete(failure_);
  };
  for (const Call& call : queue_) end(*call.request);
  for (const auto& request : incoming_) end(*request);
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

// A rank's departure is its last message. Once all departures have arrived, no message can be received by a
// later communicator that reuses the context id.
void MpiEngine::depart() noexcept {
  try {
    accept_submitted();
    for (int peer = 0; peer < size_; ++peer)
      if (peer != rank_)
        control_.send(peer, {.kind = ControlMessage::departure,
                             .calls = next_sequence_,
                             .sent = point_to_point_.sent(peer),
                             .received = point_to_point_.received(peer)});
    const auto limit =
        has_progress_thread() ? options_.timeout : std::min<std::chrono::milliseconds>(options_.timeout, 1s);
    const Deadline end = Deadline::after(limit);
    const auto all_left = [&] {
      return std::count_if(departed_.begin(), departed_.end(),
                           [](const auto& message) { return message.has_value(); }) == size_ - 1;
    };
    for (auto pause = 10us; !all_left() && !end.expired();
         pause = std::min<std::chrono::microseconds>(pause * 2, 10ms)) {
      receive_control();
      if (!all_left()) std::this_thread::sleep_for(pause);
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
    MPI_Group all, subset;
    check(MPI_Comm_group(comms_.control, &all), "MPI_Comm_group");
    const int chosen = MPI_Group_incl(all, static_cast<int>(members.size()), members.data(), &subset);
    MPI_Group_free(&all);
    check(chosen, "MPI_Group_incl");
    MPI_Comm comm = MPI_COMM_NULL;
    const int made = MPI_Comm_create_group(comms_.control, subset,
                                           first_split_tag + split_count_++ % split_tag_count, &comm);
    MPI_Group_free(&subset);
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
