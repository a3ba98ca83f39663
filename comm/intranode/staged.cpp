// The one_shot and two_shot protocols: senders copy contributions into slots or their staging ring, and
// receivers read them there.

#include <algorithm>
#include <cstring>

#include "comm/intranode/engine.h"
#include "comm/reduce/nontemporal_copy.h"

namespace rz {

namespace {

/// Position of rank `to`'s shard in the contribution of rank `by`, which has one shard for each peer.
std::size_t peer_index(int by, int to) { return static_cast<std::size_t>(to < by ? to : to - 1); }

}  // namespace

// ---- one_shot

bool IntranodeEngine::advance_one_shot() {
  bool moved = false;
  // A rank without a contribution publishes empty slots, so that all mailboxes cover the same steps. It stays
  // within half the depth of its reads, since staging_offset_ holds the offsets of the last 256 steps only.
  const bool near = contributed_ < read_ + mailbox_depth / 2;
  if (contributed_ < chunks_.chunks && near && can_reserve_contribution()) {
    send_contribution(contributed_++);
    moved = true;
  }
  const std::uint32_t step = data_step_ + static_cast<std::uint32_t>(read_);
  if (read_ < contributed_ && all_arrived(next_contribution_, step)) {
    read_contributions(read_++);
    moved = true;
    if (read_ == chunks_.chunks)
      finish();
    else
      channel_.ack(step + 1);
  }
  return moved;
}

/// Copies the slots of a peer's contribution that this rank needs into one contiguous buffer. False: a slot
/// is missing; the next call resumes with it.
bool IntranodeEngine::collect_slots(int peer, std::uint32_t step) {
  const std::size_t begin = chunks_.per_peer ? peer_index(peer, rank_) * chunks_.shard_bytes : 0,
                    end = begin + chunks_.shard_bytes;
  for (next_slot_ = std::max(next_slot_, static_cast<std::uint32_t>(begin / inline_bytes));
       next_slot_ * inline_bytes < end; ++next_slot_) {
    if (!channel_.poll(peer, step + next_slot_)) return false;
    std::memcpy(contribution(peer, step) + next_slot_ * inline_bytes,
                channel_.payload(peer, step + next_slot_), inline_bytes);
  }
  next_slot_ = 0;
  return true;
}

/// Bytes of this round's chunk of a shard of `shard` bytes: fewer in the last round.
std::size_t IntranodeEngine::chunk_length(std::size_t shard, std::size_t round) const {
  const std::size_t at = round * chunks_.chunk_bytes;
  return shard > at ? std::min(chunks_.chunk_bytes, shard - at) : 0;
}

/// Bytes of rank r's shard. They differ in an all_to_all_v, and in an all_reduce in shards, whose last ones
/// are shorter or empty.
std::size_t IntranodeEngine::shard_bytes_of(int r) const {
  if (op_->kind == Collective::all_to_all_v) return op_->counts->send_counts[index(r)] * element_bytes_;
  if (chunks_.protocol == Protocol::one_shot || op_->kind != Collective::all_reduce)
    return chunks_.shard_bytes;
  const std::size_t begin = index(r) * chunks_.shard_bytes;
  return total_bytes_ > begin ? std::min(chunks_.shard_bytes, total_bytes_ - begin) : 0;
}

const std::byte* IntranodeEngine::shard_for(int r) const {
  const auto* in = static_cast<const std::byte*>(op_->in.data);
  if (op_->kind == Collective::all_to_all_v) return in + op_->counts->send_offsets[index(r)] * element_bytes_;
  return in + (chunks_.per_peer ? index(r) * chunks_.shard_bytes : 0);
}

const std::byte* IntranodeEngine::contribution_of(int peer, std::uint32_t step) const {
  return contribution(peer, step) + (chunks_.per_peer ? peer_index(peer, rank_) * chunks_.chunk_bytes : 0);
}

void IntranodeEngine::send_contribution(std::size_t round) {
  if (slots_ > 1) return send_slots();
  if (is_sender_) write_contribution(round);
  channel_.send();
}

void IntranodeEngine::send_slots() {
  if (!is_sender_) return channel_.send(slots_, nullptr, 0);
  if (!chunks_.per_peer) return channel_.send(slots_, shard_for(rank_), chunks_.shard_bytes);
  write_contribution(0);
  channel_.send(slots_, contribution(rank_, channel_.next_step()), chunks_.shard_bytes * (index(size_) - 1));
}

void IntranodeEngine::write_contribution(std::size_t round) {
  std::byte* const to = contribution(rank_, channel_.next_step());
  const std::size_t at = round * chunks_.chunk_bytes;
  if (!chunks_.per_peer) {
    if (const std::size_t n = chunk_length(chunks_.shard_bytes, round))
      std::memcpy(to, shard_for(rank_) + at, n);
    return;
  }
  for (int r = 0; r < size_; ++r) {
    if (r == rank_) continue;
    if (const std::size_t n = chunk_length(shard_bytes_of(r), round))
      std::memcpy(to + peer_index(rank_, r) * chunks_.chunk_bytes, shard_for(r) + at, n);
  }
}

void IntranodeEngine::reduce_block(std::byte* to, std::byte* too, std::size_t bytes) {
  if (bytes)
    reduce_kernel_(to, too, sources_, bytes / element_bytes_, op_->op.kind == ReduceOp::avg ? size_ : 1);
}

/// Reduces sources_ into `to`, and into `too`, from where peers read it, unless that is null. Advances
/// sources_ if stores are non-temporal.
void IntranodeEngine::reduce_to_output(std::byte* to, std::byte* too, std::size_t bytes) {
  if (!nontemporal_) return reduce_block(to, too, bytes);
  std::byte buffer[block_bytes];
  for (std::size_t at = 0; at < bytes; at += block_bytes) {
    const std::size_t n = std::min(block_bytes, bytes - at);
    std::byte* const near = too ? too + at : buffer;
    reduce_block(near, nullptr, n);
    copy_nontemporal(to + at, near, n);
    for (auto& s : sources_) s = static_cast<const std::byte*>(s) + n;
  }
}

void IntranodeEngine::copy_to_output(std::byte* to, const std::byte* bytes_of, std::size_t bytes) const {
  if (bytes == 0 || to == bytes_of) return;
  nontemporal_ ? copy_nontemporal(to, bytes_of, bytes) : void(std::memcpy(to, bytes_of, bytes));
}

void IntranodeEngine::read_contributions(std::size_t round) {
  const std::uint32_t step = data_step_ + static_cast<std::uint32_t>(round);
  const std::size_t at = round * chunks_.chunk_bytes, n = chunk_length(chunks_.shard_bytes, round);
  auto* const out = static_cast<std::byte*>(op_->out.data);
  switch (op_->kind) {
    case Collective::barrier:
      return;
    case Collective::reduce:
      if (rank_ != op_->root) return;
      [[fallthrough]];
    case Collective::all_reduce:
    case Collective::reduce_scatter:
      for (int r = 0; r < size_; ++r)
        sources_[index(r)] = r == rank_ ? shard_for(rank_) + at : contribution_of(r, step);
      return reduce_to_output(out + at, nullptr, n);
    case Collective::broadcast:
    case Collective::scatter:
      return copy_to_output(out + at,
                            rank_ == op_->root ? shard_for(rank_) + at : contribution_of(op_->root, step), n);
    case Collective::gather:
      if (rank_ != op_->root) return;
      [[fallthrough]];
    default:
      for (int r = 0; r < size_; ++r) read_from(r, round, step);
  }
}

/// Copies rank r's chunk for this rank to r's place in the output.
void IntranodeEngine::read_from(int r, std::size_t round, std::uint32_t step) {
  const bool pairs = op_->kind == Collective::all_to_all_v;
  const std::size_t whole = pairs ? op_->counts->recv_counts[index(r)] * element_bytes_ : chunks_.shard_bytes;
  const std::size_t begin =
      pairs ? op_->counts->recv_offsets[index(r)] * element_bytes_ : index(r) * chunks_.shard_bytes;
  if (chunk_length(whole, round) == 0) return;  // the pointers may be null
  copy_to_output(static_cast<std::byte*>(op_->out.data) + begin + round * chunks_.chunk_bytes,
                 r == rank_ ? shard_for(rank_) + round * chunks_.chunk_bytes : contribution_of(r, step),
                 chunk_length(whole, round));
}

// ---- two_shot: rank r reduces shard r, then all ranks gather the shards

// Steps of contributions (A) and results (B) alternate: A0, A1, B0, A2, B1, …, so that a rank reduces one
// chunk while its peers read the one before.
std::uint32_t IntranodeEngine::contribution_step(std::size_t k) const {
  return data_step_ + static_cast<std::uint32_t>(k + (k > 0 ? k - 1 : 0));
}
std::uint32_t IntranodeEngine::result_step(std::size_t k) const {
  return data_step_ + static_cast<std::uint32_t>(std::min(k + 2, chunks_.chunks) + k);
}

bool IntranodeEngine::advance_two_shot() {
  bool moved = false;
  if (contributed_ < chunks_.chunks && channel_.next_step() == contribution_step(contributed_) &&
      can_reserve(contribution_bytes())) {
    write_contribution(contributed_++);
    channel_.send();
    moved = true;
  }
  if (reduced_ < contributed_ && channel_.next_step() == result_step(reduced_) &&
      all_arrived(next_contribution_, contribution_step(reduced_)) && can_reserve(chunks_.chunk_bytes)) {
    reduce_shard(reduced_++);
    channel_.send();
    moved = true;
  }
  if (read_ < reduced_ && all_arrived(next_result_, result_step(read_))) {
    gather_shards(read_++);
    moved = true;
    if (read_ == chunks_.chunks) {
      finish();
      return true;
    }
  }
  if (moved) {
    const std::uint32_t b = result_step(read_),
                        a = reduced_ < chunks_.chunks ? contribution_step(reduced_) : b;
    channel_.ack(MailboxChannel::is_after(a, b) ? b : a);
  }
  return moved;
}

void IntranodeEngine::reduce_shard(std::size_t round) {
  const std::size_t at = round * chunks_.chunk_bytes, n = chunk_length(shard_bytes_of(rank_), round);
  for (int r = 0; r < size_; ++r)
    sources_[index(r)] = r == rank_ ? shard_for(rank_) + at : contribution_of(r, contribution_step(round));
  reduce_to_output(static_cast<std::byte*>(op_->out.data) + index(rank_) * chunks_.shard_bytes + at,
                   contribution(rank_, channel_.next_step()), n);
}

void IntranodeEngine::gather_shards(std::size_t round) {
  for (int r = 0; r < size_; ++r) {
    if (r == rank_) continue;
    copy_to_output(
        static_cast<std::byte*>(op_->out.data) + index(r) * chunks_.shard_bytes + round * chunks_.chunk_bytes,
        channel_.bytes(r, result_step(round)), chunk_length(shard_bytes_of(r), round));
  }
}

}  // namespace rz
