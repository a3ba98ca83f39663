#include "comm/backends/mpi/mpi_calls.h"

#include <algorithm>
#include <thread>

#include "comm/core/deadline.h"
#include "comm/device/cuda_runtime.h"
#include "comm/os/wait_policy.h"

namespace rz::mpi {

namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

constexpr auto control_poll = 1ms;     // period of control messages, while calls are in flight
constexpr auto verdict_margin = 2s;    // how much longer than the first member the others wait in split()
constexpr auto catch_up_time = 200ms;  // to complete calls that the failed rank had completed
constexpr int first_split_tag = ControlChannel::tag + 1,
              split_tag_count = 32000;  // MPI guarantees 32,767 tags

MpiOptions with_bounded_timeout(MpiOptions options) {
  options.timeout = bounded(options.timeout);
  return options;
}

}  // namespace

MpiCalls::MpiCalls(MpiRuntime& runtime, CommPair comms, int rank, int size, const MpiOptions& options)
    : runtime_(runtime),
      comms_(comms),
      rank_(rank),
      size_(size),
      options_(with_bounded_timeout(options)),
      control_(comms.control, rank, size),
      collectives_(comms.control, {comms.data, rank, size, options.deterministic, options.max_call_bytes}),
      point_to_point_(comms.data, rank, size, options.max_call_bytes),
      long_wait_(options.waits, rank, size),
      flight_(options.waits.communicator, rank, size),
      departed_(static_cast<std::size_t>(size)),
      gatherings_(static_cast<std::size_t>(size)) {}

// ---- progress

void MpiCalls::require_open(const MpiRuntime::Use& mpi) const {
  require(static_cast<bool>(mpi), Errc::aborted, "MPI was finalised while the communicator of rank ", rank_,
          " was in use");
}

void MpiCalls::accept(const std::shared_ptr<Request>& request) {
  for (const CollectiveCall& call : request->operations) {
    if (traits(call.kind).point_to_point) {
      flight_.begin_message(call);
      point_to_point_.add(call, request.get());
    } else {
      collectives_.add(request, call);
    }
  }
}

bool MpiCalls::advance(bool /*eager*/, std::vector<Request*>& ended) {
  const MpiRuntime::Use mpi(runtime_);
  require_open(mpi);
  const cuda::DeviceGuard device(options_.device);  // device that CUDA-aware MPI uses
  record_front();
  const bool collective_ended = collectives_.advance(ended);
  if (collective_ended) inquiry_.reset(), flight_.end(recorded_ - 1);
  const bool messages_moved = point_to_point_.advance(ended), moved = messages_moved || collective_ended;
  if (messages_moved && point_to_point_.is_idle()) flight_.end_messages();
  if (moved) idle_turns_ = 0;
  check_remote_failure();
  return moved;
}

void MpiCalls::record_front() {
  if (collectives_.is_idle() || recorded_ == collectives_.front().sequence + 1) return;
  recorded_ = collectives_.front().sequence + 1;
  flight_.begin(recorded_ - 1, collectives_.front_call());
}

void MpiCalls::poll(Time now, const Request* /*oldest*/, bool /*waited_for*/) {
  const MpiRuntime::Use mpi(runtime_);
  require_open(mpi);
  if (now >= next_control_poll_) {
    next_control_poll_ = now + control_poll;
    receive_control();
    check_departed();
  }
  check_long_waits(now);
  check_deadlines(now);
}

void MpiCalls::poll_idle() {
  const MpiRuntime::Use mpi(runtime_);
  require_open(mpi);
  receive_control();
  check_departed();
  check_remote_failure();
}

void MpiCalls::wait(std::chrono::microseconds /*max*/, bool /*eager*/) {
  if (!is_idle()) mpi_backoff.wait(idle_turns_++);
}

CommPair MpiCalls::split(std::span<const int> members, int number) {
  const MpiRuntime::Use mpi(runtime_);
  require_open(mpi);
  const auto gathering = static_cast<std::uint32_t>(number);
  members[0] == rank_ ? gather_members(members, gathering) : follow(members[0], gathering);
  const int tag = first_split_tag + number % split_tag_count;
  try {
    return mpi::split(runtime_, comms_.control, members, tag, options_.rendezvous_timeout);
  } catch (const Error& e) {
    split_hangs_ |= e.code() == Errc::timeout;
    throw;
  }
}

const ControlMessage* MpiCalls::gathering_of(int peer, std::uint32_t number) const {
  const auto& last = gatherings_[static_cast<std::size_t>(peer)];
  return last && last->sequence == number ? &*last : nullptr;
}

/// On the first member: asks the others until all have answered, then starts them.
void MpiCalls::gather_members(std::span<const int> members, std::uint32_t number) {
  ControlMessage message{.kind = ControlMessage::gathering, .sequence = number};
  const auto tell = [&](ControlMessage::Stage stage) {
    message.stage = stage;
    for (const int peer : members.subspan(1)) control_.send(peer, message);
  };
  const auto refuse = [&](Errc code, int culprit, const std::string& why) {
    message.code = static_cast<int>(code), message.culprit = culprit;
    message.set_text(why);
    tell(ControlMessage::refusal);
    throw Error(code, concat("split() on rank ", rank_, ": ", why), culprit);
  };
  tell(ControlMessage::question);
  for (const Deadline end = Deadline::after(options_.rendezvous_timeout);;) {
    receive_control();
    check_remote_failure();
    std::vector<int> missing;
    for (const int peer : members.subspan(1)) {
      const ControlMessage* const last = gathering_of(peer, number);
      if (last && last->stage == ControlMessage::answer) continue;
      if (departed_[static_cast<std::size_t>(peer)])
        refuse(Errc::peer_lost, peer, concat("rank ", peer, " has destroyed its communicator"));
      missing.push_back(peer);
    }
    if (missing.empty()) return tell(ControlMessage::start);
    if (end.expired())
      refuse(Errc::timeout, missing.front(),
             concat(ranks_text(missing), " did not come within ", seconds(options_.rendezvous_timeout),
                    "; every rank of the new group must call it"));
    std::this_thread::sleep_for(poll_period::mpi_comm_dup);
  }
}

/// On the others: answers the first member, and returns when it starts them.
void MpiCalls::follow(int first, std::uint32_t number) {
  const auto limit = bounded(options_.rendezvous_timeout);
  bool answered = false;
  for (Deadline end = Deadline::after(limit);;) {
    receive_control();
    check_remote_failure();
    const ControlMessage* const last = gathering_of(first, number);
    if (last && last->stage == ControlMessage::start) return;
    if (last && last->stage == ControlMessage::refusal)
      throw Error(static_cast<Errc>(last->code),
                  concat("split() on rank ", rank_, ": rank ", first, " says: ", last->get_text()),
                  last->culprit);
    if (last && !answered) {
      control_.send(first,
                    {.kind = ControlMessage::gathering, .stage = ControlMessage::answer, .sequence = number});
      answered = true;
      end = Deadline::after(limit + verdict_margin);
    }
    if (!last && departed_[static_cast<std::size_t>(first)])
      throw Error(Errc::peer_lost,
                  concat("split() on rank ", rank_, ": rank ", first, " has destroyed its communicator"),
                  first);
    if (end.expired())
      throw Error(Errc::timeout,
                  concat("split() on rank ", rank_, ": rank ", first, " did not ",
                         answered ? "start it" : "come", " within ", seconds(options_.rendezvous_timeout),
                         "; every rank of the new group must call it"),
                  first);
    std::this_thread::sleep_for(poll_period::mpi_comm_dup);
  }
}

// ---- control messages

void MpiCalls::receive_control() {
  control_.poll([this](int peer, const ControlMessage& message) { handle_control(peer, message); });
}

void MpiCalls::handle_control(int peer, const ControlMessage& message) {
  switch (message.kind) {
    case ControlMessage::query:
      return control_.send(peer, reply_to(message));
    case ControlMessage::reply:
      if (inquiry_) inquiry_->receive(peer, message);
      return;
    case ControlMessage::gathering:
      gatherings_[static_cast<std::size_t>(peer)] = message;
      return;
    case ControlMessage::departure:
      departed_[static_cast<std::size_t>(peer)] = message;
      return;
    case ControlMessage::failure:
      if (!remote_failure_)
        remote_failure_ = RemoteFailure{
            .error = Error(static_cast<Errc>(message.code), message.get_text(), message.culprit),
            .calls = message.calls,
            .until = Clock::now() + catch_up_time};
      return check_remote_failure();
  }
}

ControlMessage MpiCalls::reply_to(const ControlMessage& query) const {
  ControlMessage reply{
      .kind = ControlMessage::reply, .calls = collectives_.made(), .sequence = query.sequence};
  if (const auto found = collectives_.find(query.sequence)) {
    reply.found = 1;
    reply.signature = *found;
  }
  return reply;
}

void MpiCalls::check_remote_failure() const {
  if (!remote_failure_) return;
  const bool behind = !collectives_.is_idle() && collectives_.ended() < remote_failure_->calls;
  if (!behind || Clock::now() >= remote_failure_->until) throw remote_failure_->error;
}

// A departed rank has completed all its calls and makes no others, so calls and messages that it lacks never
// complete.
void MpiCalls::check_departed() const {
  for (int peer = 0; peer < size_; ++peer) {
    const auto& message = departed_[static_cast<std::size_t>(peer)];
    if (!message) continue;
    const bool missed = !collectives_.is_idle() && collectives_.ended() >= message->calls;
    if (missed || point_to_point_.can_never_complete(peer, message->sent, message->received))
      throw Error(Errc::peer_lost,
                  concat("rank ", peer, " destroyed its communicator, but rank ", rank_, " called ",
                         missed ? describe(collectives_.front()) : "a message that it should share",
                         "; every rank must make the same calls"),
                  peer);
  }
}

/// A collective whose wait is long is reported with the ranks that an inquiry finds missing.
void MpiCalls::check_long_waits(Time now) {
  const bool collective = !collectives_.is_idle();
  const auto message = collective ? MpiPointToPoint::Overdue{} : point_to_point_.earliest_deadline();
  const std::uint64_t number = collective        ? collectives_.front().sequence + std::uint64_t{1}
                               : message.request ? reinterpret_cast<std::uintptr_t>(message.request)
                                                 : 0;
  if (reports_ && inquiry_ && inquiry_->is_over(now)) {
    long_wait_.report(now, describe(inquiry_->call()), inquiry_->reason());
    inquiry_.reset();
  }
  if (!inquiry_) reports_ = false;
  if (!long_wait_.is_due(now, number)) return;
  if (!collective) {
    long_wait_.report(
        now, message.sending ? "send" : "recv",
        concat("rank ", message.peer, message.sending ? " did not receive it" : " did not send it"));
  } else if (!inquiry_) {
    inquiry_.emplace(control_, rank_, size_, collectives_.front());
    reports_ = true;
  }
}

void MpiCalls::check_deadlines(Time now) {
  const bool due = collectives_.front_differs() ||
                   (!collectives_.is_idle() && now >= collectives_.front_request().deadline);
  if (due) reports_ = false;  // an inquiry that has begun serves the deadline
  if (inquiry_ && !reports_ && inquiry_->is_over(now)) inquiry_->conclude(options_.timeout);
  if (!inquiry_ && due) inquiry_.emplace(control_, rank_, size_, collectives_.front());
  if (point_to_point_.is_idle()) return;
  const auto late = point_to_point_.earliest_deadline();
  if (now < late.request->deadline) return;
  fail_timeout(concat(late.sending ? "send to" : "recv from", " rank ", late.peer), rank_, options_.timeout,
               concat("rank ", late.peer, late.sending ? " did not receive it" : " did not send it"),
               late.peer);
}

// ---- the end

// Memory that MPI still uses is leaked, since MPI cannot cancel a collective.
void MpiCalls::leak(bool open) noexcept {
  control_.abandon();
  point_to_point_.abandon(open);
  collectives_.abandon();
  inquiry_.reset();
  failed_ = true;
}

std::exception_ptr MpiCalls::fail(const std::exception_ptr& error, bool destroyed) noexcept {
  const MpiRuntime::Use mpi(runtime_);
  if (!mpi) {
    leak(false);
    return error;
  }
  ControlMessage message{.kind = ControlMessage::failure,
                         .code = static_cast<int>(Errc::aborted),
                         .culprit = rank_,
                         .calls = collectives_.ended()};
  try {
    std::rethrow_exception(error);
  } catch (const Error& e) {
    const bool shared = e.code() == Errc::timeout || e.code() == Errc::mismatch ||
                        e.code() == Errc::peer_lost || e.code() == Errc::aborted ||
                        e.code() == Errc::cancelled;
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
    if (!remote_failure_) control_.broadcast(message);
    control_.flush(500ms);
  } catch (const Error&) {  // MPI is broken here; the other ranks have their deadlines
  }
  leak(true);
  return error;
}

// The communicator of a rank may outlive MPI, as an object in the scope that calls MPI_Finalize does.
void MpiCalls::close() noexcept {
  try {
    const MpiRuntime::Use mpi(runtime_);
    if (!mpi)
      leak(false);
    else if (!failed_)
      depart();
  } catch (...) {
    fail(std::current_exception(), false);
  }
  runtime_.end_departure();
}

bool MpiCalls::all_departed() const {
  return std::ranges::count_if(departed_, [](const auto& message) { return message.has_value(); }) ==
         size_ - 1;
}

// A rank's departure is its last message. Once all departures have arrived, no message can be received by a
// later communicator that reuses the context id.
void MpiCalls::depart() {
  for (int peer = 0; peer < size_; ++peer)
    if (peer != rank_)
      control_.send(peer, {.kind = ControlMessage::departure,
                           .calls = collectives_.made(),
                           .sent = point_to_point_.sent(peer),
                           .received = point_to_point_.received(peer)});
  const auto limit = runtime_.thread_multiple() ? options_.timeout
                                                : std::min<std::chrono::milliseconds>(options_.timeout, 1s);
  const Deadline end = Deadline::after(limit);
  for (unsigned polls = 0; !all_departed() && !end.expired(); ++polls) {
    receive_control();
    if (!all_departed()) mpi_departure_backoff.wait(polls);
  }
  collectives_.free_operators();
  if (all_departed() && control_.flush(1s) && !split_hangs_) free(comms_);
  control_.abandon();
}

}  // namespace rz::mpi
