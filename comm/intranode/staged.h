#pragma once
/// The staged protocols: senders copy contributions into slots or their staging ring, and receivers read them
/// there. Not thread safe.

#include "comm/intranode/contributions.h"
#include "comm/intranode/plan/rounds.h"

namespace rz::intranode {

/// Every rank reads the contributions that it needs.
class OneShotCall {
 public:
  OneShotCall(MailboxChannel& channel, Contributions& contributions)
      : channel_(channel), contributions_(contributions) {}

  /// Begins a call whose first contribution has that step.
  void start(const PlannedCall&, StepNumber first);
  /// Begins a call whose contribution was sent; `peer` is the one to poll next.
  void resume(const PlannedCall& c, StepNumber first, int peer) {
    start(c, first);
    rounds_.done.contributed = 1;
    next_ = peer;
  }
  /// Moves data without blocking; true on any progress.
  bool advance(const PlannedCall&);
  bool complete() const { return rounds_.complete(); }
  /// Reduces or copies the contributions of one round, at that step, into the output.
  void read(const PlannedCall&, std::size_t round, StepNumber);

 private:
  MailboxChannel& channel_;
  Contributions& contributions_;
  OneShotRounds rounds_;
  int next_ = 0;  // the peer that polling resumes with
};

/// An all_reduce: rank r reduces shard r, then all ranks gather the shards.
class TwoShotCall {
 public:
  TwoShotCall(MailboxChannel& channel, Contributions& contributions)
      : channel_(channel), contributions_(contributions) {}

  void start(const PlannedCall&, StepNumber first);
  /// Moves data without blocking; true on any progress.
  bool advance(const PlannedCall&);
  bool complete() const { return rounds_.complete(); }

 private:
  bool try_contribute(const PlannedCall&);
  bool try_reduce(const PlannedCall&);
  bool try_gather(const PlannedCall&);
  void reduce(const PlannedCall&, std::size_t round);
  void gather(const PlannedCall&, std::size_t round);

  MailboxChannel& channel_;
  Contributions& contributions_;
  TwoShotRounds rounds_;
  int next_contribution_ = 0, next_result_ = 0;  // the peers that polling resumes with
};

/// A call by either protocol, as planned.
class StagedCall {
 public:
  StagedCall(MailboxChannel& channel, int size)
      : contributions_(channel, size),
        one_shot_(channel, contributions_),
        two_shot_(channel, contributions_) {}

  void start(const PlannedCall&, StepNumber first);
  bool advance(const PlannedCall& c) { return is_two_shot_ ? two_shot_.advance(c) : one_shot_.advance(c); }
  bool complete() const { return is_two_shot_ ? two_shot_.complete() : one_shot_.complete(); }
  /// Begins a one_shot call whose contribution was sent; `peer` is the one to poll next.
  void resume_one_shot(const PlannedCall& c, StepNumber first, int peer) {
    is_two_shot_ = false;
    one_shot_.resume(c, first, peer);
  }

  Contributions& contributions() { return contributions_; }
  OneShotCall& one_shot() { return one_shot_; }

 private:
  Contributions contributions_;
  OneShotCall one_shot_;
  TwoShotCall two_shot_;
  bool is_two_shot_ = false;  // the current call is two_shot_
};

}  // namespace rz::intranode
