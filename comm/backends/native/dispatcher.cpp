#include "comm/backends/native/dispatcher.h"

#include <algorithm>
#include <cstring>
#include <ranges>
#include <utility>

#include "comm/core/deadline.h"
#include "comm/core/error.h"
#include "comm/reduce/reduce.h"
#include "comm/transport/call_signature.h"
#include "comm/transport/shared_memory_group.h"

namespace rz {

namespace {

constexpr int max_intranode_ranks = 256;  // a staged contribution may have a shard for each peer

/// Replaces the input of a call by a copy where it cannot be read in place: scaled for premul_sum, and for a
/// call `by_schedule` of all_to_all in place, which overwrites shards that are yet to be sent. The intra-node
/// engine stages those before it reads. Returns the copy, which must outlive the call; null if the input is
/// read in place or was scaled in the output.
std::shared_ptr<std::byte> stage_input(CollectiveCall& call, bool by_schedule, Transport& transport) {
  const bool scaled = call.op.kind == ReduceOp::premul_sum && call.in.count > 0;
  const bool permuted = by_schedule && call.kind == Collective::all_to_all && call.in.data == call.out.data;
  if (!scaled && !permuted) return nullptr;
  if (scaled && call.kind == Collective::all_reduce) {
    scale(call.out.data, call.in.data, call.in.count, call.in.dtype, call.op.factor);
    call.in = call.out;
    return nullptr;
  }
  std::shared_ptr<std::byte> copy = transport.allocate(call.in.bytes());
  if (scaled)
    scale(copy.get(), call.in.data, call.in.count, call.in.dtype, call.op.factor);
  else if (call.in.bytes() > 0)
    std::memcpy(copy.get(), call.in.data, call.in.bytes());
  call.in.data = copy.get();
  return copy;
}

}  // namespace

Dispatcher::Dispatcher(int rank, int size, std::unique_ptr<Transport> transport, const NativeOptions& options)
    : rank_(rank),
      size_(size),
      transport_(std::move(transport)),
      policy_(wait_policy(transport_->oversubscribed()).progress),
      schedules_(*transport_, rank, size, options),
      point_to_point_(*transport_, rank, size),
      timeouts_(*transport_, rank, bounded(options.timeout)),
      comparison_(*transport_, rank, size),
      wait_reporter_(*transport_, rank, size, options.waits),
      flight_(options.waits.communicator, rank, size) {
  const SharedMemoryGroup* const shared = transport_->shared_memory();
  if (shared && !shared->mailboxes().empty() && size <= max_intranode_ranks)
    intranode_ = std::make_unique<intranode::Engine>(*transport_, rank, size, schedules_.intranode_table());
  else
    schedules_.require_schedules();
  heartbeats_ = Heartbeats::watch(transport_->link_monitor(), options.detection);
}

// ---- starting calls

void Dispatcher::accept(const std::shared_ptr<Request>& request) {
  for (std::size_t i = 0; i < request->operations.size(); ++i) {
    const CollectiveCall& call = request->operations[i];
    if (traits(call.kind).point_to_point) {
      flight_.begin_message(call);
      point_to_point_.add(call, request.get());
    } else {
      queue_.push_back({request.get(), i});
    }
  }
}

void Dispatcher::adopt(Request& request) {
  intranode_->rebind(request.operations[0]);
  transport_->record_call(make_signature(request.operations[0], size_, sequence_ - 1));
  current_ = {.request = &request, .engine = intranode_.get()};
}

void Dispatcher::start_next() {
  if (const std::size_t calls = coalescable(); calls > 1) return start_coalesced(calls);
  const PendingCall next = queue_.front();
  queue_.pop_front();
  current_ = {.request = next.request};
  CollectiveCall& call = next.request->operations[next.index];
  const tuning::IntranodeAlgorithm* const entry = schedule_override(call);
  current_.staged_input = stage_input(call, !intranode_ || entry, *transport_);
  dispatch(call, entry);
}

/// The number of calls at the front of the queue that run as one. All are of one group, whose calls are
/// adjacent.
std::size_t Dispatcher::coalescable() const {
  Request* const group = queue_.front().request;
  if (group->operations.size() == 1) return 1;
  return Coalescer::count(queue_ |
                          std::views::take_while([&](const PendingCall& q) { return q.request == group; }) |
                          std::views::transform([&](const PendingCall& q) -> const CollectiveCall& {
                            return group->operations[q.index];
                          }));
}

void Dispatcher::start_coalesced(std::size_t calls) {
  if (!coalescing_buffer_) coalescing_buffer_ = transport_->allocate(Coalescer::max_bytes);
  current_ = {.request = queue_.front().request, .calls = calls};
  std::vector<const CollectiveCall*> operations;
  for (; operations.size() < calls; queue_.pop_front())
    operations.push_back(&current_.request->operations[queue_.front().index]);
  const CollectiveCall& whole = coalescer_.begin(std::move(operations), coalescing_buffer_.get());
  dispatch(whole, schedule_override(whole));
}

/// `entry`: schedule_override().
void Dispatcher::dispatch(const CollectiveCall& call, const tuning::IntranodeAlgorithm* entry) {
  const bool by_schedule = !intranode_ || entry;
  current_.engine = by_schedule ? static_cast<CollectiveEngine*>(&schedules_) : intranode_.get();
  const std::uint32_t sequence = begin(call);
  transport_->record_call(make_signature(call, size_, sequence));
  if (entry)
    schedules_.start(call, sequence, *entry->schedule, entry->slice);
  else
    current_.engine->start(call, sequence);
}

/// The tuning entry whose schedule runs the call instead of the intra-node engine; null: none does.
const tuning::IntranodeAlgorithm* Dispatcher::schedule_override(const CollectiveCall& call) const {
  const tuning::IntranodeAlgorithm* const entry = intranode_ ? intranode_->schedule_for(call) : nullptr;
  return entry && schedules_.is_allowed(*entry->schedule, call.kind, rounds_partial_sums(call)) ? entry
                                                                                                : nullptr;
}

// ---- progress

bool Dispatcher::advance(bool eager, std::vector<Request*>& ended) {
  if (comparison_.found()) return false;
  if (!current_.request && !queue_.empty()) start_next();
  bool moved = false;
  if (current_.request) {
    moved = advance_current(eager);
    if (current_.engine->complete()) {
      finish_current(ended);
      moved = true;
    }
  }
  moved |= point_to_point_.advance();
  if (!point_to_point_.finished().empty() && point_to_point_.idle()) flight_.end_messages();
  for (void* const tag : point_to_point_.finished()) ended.push_back(static_cast<Request*>(tag));
  point_to_point_.finished().clear();
  moved_ |= moved;
  return moved;
}

/// With the intra-node engine it spins on the peers' slots first: these change within less time than one poll
/// of the transport takes.
bool Dispatcher::advance_current(bool eager) {
  if (current_.engine != intranode_.get()) try {
      return schedules_.advance();
    } catch (const OtherCall& other) {
      comparison_.begin(other);
      return false;
    }
  if (intranode_->advance()) return true;
  if (eager && point_to_point_.idle()) return intranode_->spin(policy_.driver_turns) || intranode_->busy();
  intranode_->check_peer_alive();
  return false;
}

void Dispatcher::finish_current(std::vector<Request*>& ended) {
  const CurrentCall done = std::exchange(current_, {});
  timeouts_.end_wait();
  flight_.end(sequence_ - 1);
  if (done.calls > 1) coalescer_.end();
  ended.insert(ended.end(), done.calls, done.request);
}

// A message that no thread waits for does not block this rank, so it is not reported in the wait-for graph.
void Dispatcher::poll(Time now, const Request* oldest, bool waited_for) {
  transport_->progress(completed());
  const Request* const blocking = current_.request ? current_.request : waited_for ? oldest : nullptr;
  if (transport_->wait_graph().has_requests())
    transport_->reply_waits(
        blocking ? WaitMessage{WaitMessage::reply,
                               wait_state_of(blocking).waiting_on | timeouts_.waits_of_split_groups(),
                               signature_of(*blocking)}
                 : reply_without_call({WaitMessage::reply}));
  const bool moved = std::exchange(moved_, false);
  comparison_.poll(now, current_.request, moved);
  wait_reporter_.poll(
      now, blocking, moved,
      [&] { return describe_call(signature_of(*blocking)) + at(blocking->operations[0].origin.site); },
      [&] { return wait_state_of(blocking); });
  timeouts_.poll_wait(now, blocking, [&] { return wait_state_of(blocking); });
  timeouts_.poll_split_groups(now);
  if (const Request* const late = timeouts_.check(now, current_.request, oldest))
    timeouts_.fail(*late, wait_state_of(late));
}

void Dispatcher::poll_idle() {
  transport_->progress(completed());
  if (transport_->wait_graph().has_requests()) {
    WaitMessage idle = WaitMessage::idle_in(WaitReporter::of_process());
    if (const auto last = flight_.last_collective())
      idle.call = {.sequence = last->first, .kind = static_cast<Collective>(last->second)};
    transport_->reply_waits(reply_without_call(idle));
  }
  timeouts_.end_wait();
  timeouts_.poll_split_groups(std::chrono::steady_clock::now());
}

/// `otherwise`: if this rank is in no call of a group that is split from this one either.
WaitMessage Dispatcher::reply_without_call(const WaitMessage& otherwise) const {
  const RankSet waits = timeouts_.waits_of_split_groups();
  return waits.any() ? WaitMessage{WaitMessage::elsewhere, waits} : otherwise;
}

/// The signature of the current call, or of another request's first one.
CallSignature Dispatcher::signature_of(const Request& request) const {
  return &request == current_.request ? transport_->wait_graph().last_call()
                                      : make_signature(request.operations[0], size_, 0);
}

WaitState Dispatcher::wait_state_of(const Request* request) const {
  if (!request) return {};
  return request == current_.request ? current_.engine->waiting_on() : point_to_point_.waiting_on(request);
}

// ---- failures

/// After abort(): what all ranks throw, in numbers of the group from which this one was split.
std::exception_ptr Dispatcher::agreed_failure(const std::exception_ptr& own) noexcept {
  try {
    transport_->progress(all_calls);
  } catch (...) {
    return std::current_exception();
  }
  return own;
}

std::exception_ptr Dispatcher::fail(const std::exception_ptr& error, bool /*destroyed*/) noexcept {
  std::exception_ptr shown = error;
  try {
    std::rethrow_exception(error);
  } catch (const Error& e) {
    // A failure that only this rank has seen must be sent to the others.
    const bool shared = e.code() == Errc::peer_lost || e.code() == Errc::aborted || e.code() == Errc::timeout;
    if (e.code() == Errc::mismatch) {
      transport_->abort({e.culprit(), e.code(), e.what()});
      shown = agreed_failure(error);
    } else if (e.code() == Errc::cancelled) {
      transport_->abort({e.culprit(), e.code(), e.what(), completed()});
    } else if (!shared) {
      transport_->abort({rank_, Errc::aborted, concat("rank ", rank_, ": ", e.what())});
    }
  } catch (const std::exception& e) {
    transport_->abort({rank_, Errc::aborted, concat("rank ", rank_, ": ", e.what())});
  }
  current_ = {};
  queue_.clear();
  point_to_point_.clear();
  return shown;
}

void Dispatcher::check_peers() {
  if (const auto lost = transport_->find_lost()) throw Error(lost->code, lost->reason, lost->culprit);
}

void Dispatcher::abort(const std::string& reason) noexcept {
  transport_->abort({rank_, Errc::aborted, reason});
}

}  // namespace rz
