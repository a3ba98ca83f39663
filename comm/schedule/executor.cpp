#include "comm/schedule/executor.h"

#include <algorithm>
#include <cstring>

#include "comm/core/error.h"
#include "comm/reduce/reduce.h"

namespace rz {

namespace {

// An incomplete chunk is posted in pieces of at least this size, since each piece is a frame and costs a
// system call at both ends.
constexpr std::size_t min_post_bytes = 32 << 10;

std::size_t index(int i) { return static_cast<std::size_t>(i); }

}  // namespace

void ScheduleExecutor::start(const CollectiveCall& op, const DependencyPlan& plan,
                             const CallSignature& signature, std::size_t slice) {
  op_ = &op;
  plan_ = &plan;
  signature_ = signature;
  slice_ = slice;
  // The single byte that a barrier moves has no type.
  dtype_ = op.kind == Collective::barrier ? DType::u8 : op.out.data ? op.out.dtype : op.in.dtype;
  element_bytes_ = size_of(dtype_);
  layout_.emplace(op, rank_, size_, plan.schedule.chunks);
  scratch_chunk_bytes_ = (layout_->largest() + 255) / 256 * 256;
  if (const std::size_t need = scratch_chunk_bytes_ * index(plan.schedule.scratch_chunks);
      need > scratch_bytes_) {
    scratch_ = transport_.allocate(need);
    scratch_bytes_ = need;
  }
  progress_.assign(plan.steps.size(), {});
  send_head_.assign(index(size_), 0);
  receive_head_.assign(index(size_), 0);
  partial_.assign(index(size_), {});
  signature_checked_.assign(index(size_), false);
  first_unfinished_ = 0;
  remaining_ = plan.steps.size();
  for (std::size_t i = 0; i < plan.steps.size(); ++i) {
    progress_[i].size = layout_->bytes(plan.steps[i].step.slot.chunk);
  }
}

const std::byte* ScheduleExecutor::read(ChunkRef slot) const {
  return slot.region == Region::input ? layout_->input(slot.chunk) : write(slot);
}

std::byte* ScheduleExecutor::write(ChunkRef slot) const {
  return slot.region == Region::scratch ? scratch_.get() + scratch_chunk_bytes_ * index(slot.scratch_index)
                                        : layout_->output(slot.chunk);
}

// Bytes of the step's slot that dependent steps may touch.
std::size_t ScheduleExecutor::progress_of(int step) const {
  const Progress& p = progress_[index(step)];
  const Step& s = plan_->steps[index(step)].step;
  if (s.kind == Step::reduce || p.done == 0) return p.done;
  const std::uint64_t released = transport_.released(s.peer, Channel::collective);
  if (released <= p.stream_begin) return 0;
  return static_cast<std::size_t>(std::min<std::uint64_t>(p.done, released - p.stream_begin));
}

std::size_t ScheduleExecutor::available(int step) const {
  const bool sends = plan_->steps[index(step)].step.kind == Step::send;
  std::size_t limit = progress_[index(step)].size;
  for (const auto [earlier, whole] : plan_->steps[index(step)].after) {
    // A read after a read is no dependency, so all dependencies of a send are writers.
    const std::size_t got = sends ? progress_[index(earlier)].done : progress_of(earlier);
    if (whole && !(got == progress_[index(earlier)].size)) return 0;
    if (!whole) limit = std::min(limit, got);
  }
  return limit;
}

// Bytes up to which a send may post now. The verifier proves that a schedule completes even if every send
// waits until its dependencies are done entirely, so holding a small piece back cannot deadlock the group.
std::size_t ScheduleExecutor::posted_limit(int step) const {
  const Progress& p = progress_[index(step)];
  const std::size_t limit = available(step);
  return limit == p.size || limit >= p.done + min_post_bytes ? limit : p.done;
}

bool ScheduleExecutor::is_next_on_links(int step) const {
  const auto& terms = plan_->steps[index(step)].step.terms;
  return std::all_of(terms.begin(), terms.end(), [&](const Operand& t) {
    return t.peer < 0 || plan_->receives[index(t.peer)][receive_head_[index(t.peer)]] == step;
  });
}

bool ScheduleExecutor::matches(int peer) {
  if (signature_checked_[index(peer)]) return true;
  const ReceiveView incoming = transport_.peek(peer, Channel::collective);
  if (incoming.bytes.empty()) return false;
  CallSignature mine = signature_;
  if (op_->kind == Collective::all_to_all_v) mine.count = op_->counts->recv_counts[index(peer)];
  if (!(incoming.signature == mine))
    fail(Errc::mismatch, "mismatched collectives: rank ", peer, " called ", describe(incoming.signature),
         " while rank ", rank_, " called ", describe(mine),
         "; every rank must make the same calls in the same order");
  signature_checked_[index(peer)] = true;
  return true;
}

void ScheduleExecutor::finish(int step) {
  Progress& p = progress_[index(step)];
  p.finished = true;
  --remaining_;
  while (first_unfinished_ < progress_.size() && progress_[first_unfinished_].finished) ++first_unfinished_;
}

bool ScheduleExecutor::advance() {
  bool moved = false;
  for (std::size_t i = first_unfinished_; i < progress_.size(); ++i) {
    if (progress_[i].finished) continue;
    const int step = static_cast<int>(i);
    moved |= plan_->steps[i].step.kind == Step::send ? advance_send(step) : advance_local(step);
  }
  return moved;
}

bool ScheduleExecutor::advance_send(int step) {
  const Step& s = plan_->steps[index(step)].step;
  Progress& p = progress_[index(step)];
  const std::size_t peer = index(s.peer);
  bool moved = false;
  if (p.done < p.size || p.size == 0) {
    if (plan_->sends[peer].size() <= send_head_[peer] || plan_->sends[peer][send_head_[peer]] != step)
      return false;
    if (const std::size_t limit = posted_limit(step); limit > p.done) {
      CallSignature signature = signature_;
      if (op_->kind == Collective::all_to_all_v) signature.count = op_->counts->send_counts[peer];
      if (p.done == 0) p.stream_begin = posted_[peer];
      const std::size_t taken =
          transport_.post(s.peer, Channel::collective, signature, {read(s.slot) + p.done, limit - p.done});
      p.done += taken;
      posted_[peer] += taken;
      moved = taken > 0;
    }
    if (p.done < p.size) return moved;
    ++send_head_[peer];
    if (p.size == 0) {
      finish(step);
      return true;
    }
  }
  if (progress_of(step) < p.size) return moved;
  finish(step);
  return true;
}

bool ScheduleExecutor::advance_local(int step) {
  const DependencyPlan::PlannedStep& planned = plan_->steps[index(step)];
  Progress& p = progress_[index(step)];
  if (planned.remote && !is_next_on_links(step)) return false;
  bool moved = false;
  if (p.size > 0) {
    const std::size_t limit = std::min(available(step) - p.done, slice_);
    if (limit == 0) return false;
    const auto& terms = planned.step.terms;
    if (terms.size() == 1 && terms[0].peer >= 0 && divisor(planned.step) == 1) {
      moved = advance_receive(step, terms[0].peer, limit);
    } else {
      moved = advance_reduce(step, limit);
    }
    if (p.done < p.size) return moved;
  }
  for (const Operand& t : planned.step.terms)
    if (t.peer >= 0) ++receive_head_[index(t.peer)];
  finish(step);
  return true;
}

bool ScheduleExecutor::advance_receive(int step, int peer, std::size_t limit) {
  if (!matches(peer)) return false;
  Progress& p = progress_[index(step)];
  std::byte* to = write(plan_->steps[index(step)].step.slot) + p.done;
  const std::size_t taken = transport_.receive(peer, Channel::collective, {to, limit});
  p.done += taken;
  return taken > 0;
}

ScheduleExecutor::Span ScheduleExecutor::received_span(int peer) {
  PartialElement& carry = partial_[index(peer)];
  if (carry.have == 0) {
    const ReceiveView incoming = transport_.peek(peer, Channel::collective);
    if (incoming.bytes.empty() || incoming.bytes.size() >= element_bytes_)
      return {incoming.bytes.data(), incoming.bytes.size() / element_bytes_ * element_bytes_, false};
  }
  carry.have +=
      transport_.receive(peer, Channel::collective, {carry.bytes + carry.have, element_bytes_ - carry.have});
  return {carry.bytes, carry.have == element_bytes_ ? element_bytes_ : 0, true};
}

void ScheduleExecutor::consume(int peer, const Span& piece, std::size_t bytes) {
  if (piece.is_partial)
    partial_[index(peer)].have = 0;
  else
    transport_.consume(peer, Channel::collective, bytes);
}

int ScheduleExecutor::divisor(const Step& step) const {
  return step.final && op_->op.kind == ReduceOp::avg ? size_ : 1;
}

// Reduces all operands in one pass, up to the shortest of them, so that each byte of memory is touched once.
// Received bytes may end within an element; its rest arrives later.
bool ScheduleExecutor::advance_reduce(int step, std::size_t limit) {
  const Step& s = plan_->steps[index(step)].step;
  limit = limit / element_bytes_ * element_bytes_;
  if (limit == 0) return false;
  Progress& p = progress_[index(step)];
  for (const Operand& t : s.terms)
    if (t.peer >= 0 && !matches(t.peer)) return false;
  spans_.clear();
  sources_.clear();
  for (const Operand& t : s.terms) {
    spans_.push_back(t.peer < 0 ? Span{read(t.chunk) + p.done, limit} : received_span(t.peer));
    limit = std::min(limit, spans_.back().bytes);
    sources_.push_back(spans_.back().data);
  }
  if (limit == 0) return false;
  std::byte* to = write(s.slot) + p.done;
  if (s.terms.size() > 1 || divisor(s) > 1) {
    reduce(to, sources_, limit / element_bytes_, dtype_, op_->op.kind, divisor(s));
  } else if (to != sources_[0]) {
    std::memcpy(to, sources_[0], limit);
  }
  for (std::size_t i = 0; i < s.terms.size(); ++i)
    if (s.terms[i].peer >= 0) consume(s.terms[i].peer, spans_[i], limit);
  p.done += limit;
  return true;
}

// What this call waits for from a peer. None, if the peer's bytes have arrived and are unread: then another
// peer is late.
ScheduleExecutor::PeerWait ScheduleExecutor::wait_of(int peer) const {
  const std::size_t p = index(peer);
  if (receive_head_[p] < plan_->receives[p].size() &&
      transport_.peek(peer, Channel::collective).bytes.empty())
    return signature_checked_[p] ? PeerWait::partial : PeerWait::everything;
  for (const int step : plan_->sends[p]) {
    const Progress& sent = progress_[index(step)];
    if (sent.finished) continue;
    const bool next = plan_->sends[p].size() > send_head_[p] && plan_->sends[p][send_head_[p]] == step;
    if (progress_of(step) < sent.done || (next && sent.done < posted_limit(step))) return PeerWait::receiving;
  }
  return PeerWait::none;
}

WaitState ScheduleExecutor::waiting_on() const {
  WaitState state;
  PeerWait worst = PeerWait::none;
  for (int peer = 0; peer < size_; ++peer) {
    const PeerWait wait = wait_of(peer);
    if (wait == PeerWait::none) continue;
    if (index(peer) < state.waiting_on.size()) state.waiting_on.set(index(peer));
    if (wait > worst) worst = wait, state.suspect = peer;
    state.text += concat(state.text.empty() ? "" : ", ", "rank ", peer,
                         wait == PeerWait::receiving ? " to receive" : " to send");
  }
  if (state.text.empty()) state.text = "nobody";
  return state;
}

}  // namespace rz
