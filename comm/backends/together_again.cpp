// Calls like the last one: the same steps, without what was found out then.

#include "comm/backends/together.h"

namespace rz {

bool Together::repeat(const BriefCall& call, std::uint32_t sequence, int turns) {
  again_.in.data = call.in, again_.out.data = call.out;
  op_ = &again_;
  letters_.begin_again(sequence);
  if (!short_way_ || !has_room_to_offer()) {
    if (direct_again_ && has_room(0)) return repeat_direct(turns);
    rewind(letters_.next());
    return spin(turns);
  }
  base_ = letters_.next();
  offer_again();
  prepare_to_take();
  int peer = 0;
  while (!all_arrived(peer, base_)) {
    if (crowded_ || turns-- == 0) return stay(peer, crowded_ ? turns : 0);
    letters_.look_out();
  }
  take_again();
  inline_ && !traits(again_.kind).rooted() ? letters_.have_read_by(letters_.next()) : end();
  return true;
}

/// offer_and_publish(0), of what takes longest in comparison.
void Together::offer_again() {
  if (lines_ > 1) return publish_lines();
  if (gives_ && inline_ && !plan_.split)
    copy_few(letters_.payload(rank_, base_), static_cast<const std::byte*>(again_.in.data), plan_.part);
  else if (gives_)
    offer(0);
  letters_.publish();
}

/// What take_again() needs and no peer says: done while letters are on their way.
void Together::prepare_to_take() {
  if (again_.kind != Collective::all_reduce) return;
  for (int r = 0; r < size_; ++r) sources_[index(r)] = r == rank_ ? again_.in.data : place(r, base_);
}

/// take(0), likewise.
void Together::take_again() {
  if (again_.kind == Collective::all_reduce) {
    if (const std::size_t count = letters_.call().count)
      reduction_(again_.out.data, nullptr, sources_, count, again_.op.kind == ReduceOp::avg ? size_ : 1);
  } else if (again_.kind == Collective::broadcast && inline_ && rank_ != again_.root) {
    copy_few(static_cast<std::byte*>(again_.out.data), letters_.payload(again_.root, base_), plan_.part);
  } else {
    taken_ = 0;
    take(0);
  }
}

/// A call that repeat() began goes on as others do.
bool Together::stay(int peer, int turns) {
  complete_ = false;
  asks_ = counts_ = false;
  first_ = base_;
  offered_ = 1, taken_ = 0;
  waits_a_ = peer;
  return spin(turns);
}

/// advance() of a call whose last one was direct, as a row of steps. What has changed since, or takes long,
/// is left to advance() itself.
bool Together::repeat_direct(int turns) {
  const std::uint32_t first = letters_.next();
  if (const OwnMemory own = own_memory(); !memory_.is_still_true(own)) make_offer(own);
  memory_.write(letters_.payload(rank_, first));
  letters_.publish();
  rewind(first);
  if (!all_write_soon(waits_a_, first_, turns) || !hear_again()) return spin(turns);
  asks_ = false;
  cut_ = direct_;
  take_direct(taken_++);
  letters_.publish();
  if (!all_write_soon(waits_b_, base_, turns)) return spin(turns);
  letters_.have_read_by(letters_.next());  // all wait for all, so the next call's letter says so, too
  complete_ = true;
  return true;
}

/// Looks for what is left of the turns, unless who is waited for may need this processor.
bool Together::all_write_soon(int& next, std::uint32_t step, int& turns) {
  for (; !all_wrote(next, step); --turns) {
    if (crowded_ || turns == 0) return false;
    letters_.look_out();
  }
  return true;
}

/// Whether all that is needed can be reached again; mostly it lies where it did.
bool Together::hear_again() {
  if (!is_reachable(rank_)) return false;
  for (int r = 0; r < size_; ++r) {
    if (r == rank_) continue;
    if (!memory_.hear(r, letters_.payload(r, first_))) continue;
    if (!is_reachable(r)) return false;
    reach(r);
  }
  return true;
}

}  // namespace rz
