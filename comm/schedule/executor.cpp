#include "comm/schedule/executor.h"

#include <algorithm>
#include <cstring>

#include "comm/core/error.h"
#include "comm/reduce/reduce.h"

namespace rz::schedule {

namespace {

// An incomplete chunk is posted in pieces of at least this size, since each piece is a frame and costs a
// system call at both ends.
constexpr std::size_t min_post_bytes = 32 << 10;

}  // namespace

CallSignature Executor::ScheduledCall::signature_of_send(int peer) const {
  CallSignature s = signature;
  if (op->kind == Collective::all_to_all_v) s.count = op->counts->send_counts[static_cast<std::size_t>(peer)];
  return s;
}

CallSignature Executor::ScheduledCall::signature_of_receive(int peer) const {
  CallSignature s = signature;
  if (op->kind == Collective::all_to_all_v) s.count = op->counts->recv_counts[static_cast<std::size_t>(peer)];
  return s;
}

Executor::Executor(Transport& transport, int rank, int size)
    : transport_(transport), rank_(rank), size_(size) {
  for (int peer = 0; peer < size; ++peer) peers_.push_back({ReceiveStream(transport, rank, peer)});
}

void Executor::start(const CollectiveCall& op, const DependencyPlan& plan, const CallSignature& signature,
                     std::size_t slice) {
  // The single byte that a barrier moves has no type.
  const DType dtype = op.kind == Collective::barrier ? DType::u8 : op.dtype();
  call_ = {&op, &plan, signature, dtype, size_of(dtype), slice};
  memory_.start(op, rank_, size_, plan.schedule, transport_);
  steps_.start(plan.steps.size());
  for (int i = 0; i < steps_.size(); ++i) steps_[i].size = memory_.bytes(call_.step(i).chunk.number);
  for (Peer& p : peers_) {
    p.incoming.start();
    p.next_send = p.next_receive = 0;
  }
}

// Bytes of the step's chunk that dependent steps may touch.
std::size_t Executor::progress_of(int step) const {
  const StepProgress& p = steps_[step];
  const Step& s = call_.step(step);
  if (s.kind == Step::reduce || p.done == 0) return p.done;
  const std::uint64_t released = transport_.released(s.peer, Channel::collective);
  if (released <= p.stream_begin) return 0;
  return static_cast<std::size_t>(std::min<std::uint64_t>(p.done, released - p.stream_begin));
}

std::size_t Executor::available(int step) const {
  const DependencyPlan::PlannedStep& planned = call_.plan->steps[static_cast<std::size_t>(step)];
  const bool sends = planned.step.kind == Step::send;
  std::size_t limit = steps_[step].size;
  for (const auto [earlier, whole] : planned.after) {
    // A read after a read is no dependency, so all dependencies of a send are writers.
    const std::size_t got = sends ? steps_[earlier].done : progress_of(earlier);
    if (whole && got != steps_[earlier].size) return 0;
    if (!whole) limit = std::min(limit, got);
  }
  return limit;
}

// A reduction of one operand, unless it divides.
bool Executor::copies(const Step& s) const {
  return s.operands.size() == 1 && !(s.final && call_.op->op.kind == ReduceOp::avg && size_ > 1);
}

// Bytes up to which a send may post now. The verifier proves that a schedule completes even if every send
// waits until its dependencies are done entirely, so holding a small piece back cannot deadlock the group.
std::size_t Executor::posted_limit(int step) const {
  const StepProgress& p = steps_[step];
  const std::size_t limit = available(step);
  return limit == p.size || limit >= p.done + min_post_bytes ? limit : p.done;
}

bool Executor::is_next_send(int step, int to) const {
  const std::vector<int>& sends = call_.plan->sends[static_cast<std::size_t>(to)];
  const std::size_t next = peer(to).next_send;
  return next < sends.size() && sends[next] == step;
}

// The messages of a reduction are the next ones of all their peers.
bool Executor::is_next_receive(const Step& s, int step) const {
  return std::all_of(s.operands.begin(), s.operands.end(), [&](const Operand& t) {
    return t.peer < 0 ||
           call_.plan->receives[static_cast<std::size_t>(t.peer)][peer(t.peer).next_receive] == step;
  });
}

bool Executor::match(int from) {
  ReceiveStream& incoming = peer(from).incoming;
  return incoming.matched() || incoming.match(call_.signature_of_receive(from));
}

bool Executor::advance() {
  bool moved = false;
  for (int step = steps_.first_unfinished(); step < steps_.size(); ++step) {
    if (steps_[step].finished) continue;
    moved |= call_.step(step).kind == Step::send ? advance_send(step) : advance_local(step);
  }
  return moved;
}

bool Executor::advance_send(int step) {
  const Step& s = call_.step(step);
  StepProgress& p = steps_[step];
  Peer& to = peer(s.peer);
  bool moved = false;
  if (p.done < p.size || p.size == 0) {
    if (!is_next_send(step, s.peer)) return false;
    if (const std::size_t limit = posted_limit(step); limit > p.done) {
      if (p.done == 0) p.stream_begin = to.posted;
      const std::size_t taken = transport_.post(s.peer, Channel::collective, call_.signature_of_send(s.peer),
                                                {memory_.read(s.chunk) + p.done, limit - p.done});
      p.done += taken;
      to.posted += taken;
      moved = taken > 0;
    }
    if (p.done < p.size) return moved;
    ++to.next_send;
    if (p.size == 0) {
      steps_.finish(step);
      return true;
    }
  }
  if (progress_of(step) < p.size) return moved;
  steps_.finish(step);
  return true;
}

bool Executor::advance_local(int step) {
  const DependencyPlan::PlannedStep& planned = call_.plan->steps[static_cast<std::size_t>(step)];
  const auto& operands = planned.step.operands;
  if (planned.remote && !is_next_receive(planned.step, step)) return false;
  const StepProgress& p = steps_[step];
  bool moved = false;
  if (p.size > 0) {
    const std::size_t limit = std::min(available(step) - p.done, call_.slice_bytes);
    if (limit == 0) return false;
    if (operands[0].peer >= 0 && copies(planned.step)) {
      moved = advance_receive(step, operands[0].peer, limit);
    } else {
      moved = advance_reduce(step, limit);
    }
    if (p.done < p.size) return moved;
  }
  for (const Operand& t : operands)
    if (t.peer >= 0) ++peer(t.peer).next_receive;
  steps_.finish(step);
  return true;
}

bool Executor::advance_receive(int step, int from, std::size_t limit) {
  if (!match(from)) return false;
  StepProgress& p = steps_[step];
  const std::size_t taken =
      peer(from).incoming.receive({memory_.write(call_.step(step).chunk) + p.done, limit});
  p.done += taken;
  return taken > 0;
}

// Reduces all operands in one pass, up to the shortest of them, so that each byte of memory is touched once.
// Received bytes may end within an element; its rest arrives later.
bool Executor::advance_reduce(int step, std::size_t limit) {
  const Step& s = call_.step(step);
  limit = limit / call_.element_bytes * call_.element_bytes;
  if (limit == 0) return false;
  StepProgress& p = steps_[step];
  for (const Operand& t : s.operands)
    if (t.peer >= 0 && !match(t.peer)) return false;
  sources_.clear(), partial_.clear();
  for (const Operand& t : s.operands) {
    partial_.push_back(t.partial);
    if (t.peer < 0) {
      sources_.push_back(memory_.read(t.chunk) + p.done);
      continue;
    }
    const std::span<const std::byte> received = peer(t.peer).incoming.peek_elements(call_.element_bytes);
    limit = std::min(limit, received.size());
    sources_.push_back(received.data());
  }
  if (limit == 0) return false;
  std::byte* to = memory_.write(s.chunk) + p.done;
  if (!copies(s)) {
    reduce(to, sources_, limit / call_.element_bytes, call_.dtype, call_.op->op.kind,
           {size_, s.final, partial_}, s.order);
  } else if (to != sources_[0]) {
    std::memcpy(to, sources_[0], limit);
  }
  for (const Operand& t : s.operands)
    if (t.peer >= 0) peer(t.peer).incoming.consume(limit);
  p.done += limit;
  return true;
}

// What this call waits for from a peer. None, if the peer's bytes have arrived and are unread: then another
// peer is late.
Executor::PeerWait Executor::wait_of(int number) const {
  const Peer& p = peer(number);
  const auto i = static_cast<std::size_t>(number);
  if (p.next_receive < call_.plan->receives[i].size() && !p.incoming.has_bytes())
    return p.incoming.matched() ? PeerWait::partial : PeerWait::everything;
  for (const int step : call_.plan->sends[i]) {
    const StepProgress& sent = steps_[step];
    if (sent.finished) continue;
    if (progress_of(step) < sent.done || (is_next_send(step, number) && sent.done < posted_limit(step)))
      return PeerWait::receiving;
  }
  return PeerWait::none;
}

WaitState Executor::waiting_on() const {
  WaitState state;
  PeerWait worst = PeerWait::none;
  for (int peer = 0; peer < size_; ++peer) {
    const PeerWait wait = wait_of(peer);
    if (wait == PeerWait::none) continue;
    if (const auto i = static_cast<std::size_t>(peer); i < state.waiting_on.size()) state.waiting_on.set(i);
    if (wait > worst) worst = wait, state.suspect = peer;
    state.text += concat(state.text.empty() ? "" : ", ", "rank ", peer,
                         wait == PeerWait::receiving ? " to receive" : " to send");
  }
  if (state.text.empty()) state.text = "no rank";
  return state;
}

}  // namespace rz::schedule
