#pragma once
/// Fast path: a small call with the plan of the last one, run by the caller's thread as straight-line code.
/// It takes the same steps as OneShotCall, or as HandleExchange and ZeroCopyCall, which continue if a peer is
/// late. fast_path.cpp has the whole protocol.

#include "comm/intranode/handle_exchange.h"
#include "comm/intranode/staged.h"
#include "comm/intranode/zero_copy.h"

namespace rz::intranode {

class FastPath {
 public:
  FastPath(MailboxChannel& channel, Contributions& contributions, OneShotCall& one_shot,
           HandleExchange& handles, ZeroCopyCall& zero_copy, bool oversubscribed)
      : channel_(channel),
        contributions_(contributions),
        one_shot_(one_shot),
        handles_(handles),
        zero_copy_(zero_copy),
        oversubscribed_(oversubscribed) {}

  /// Largest message, in bytes, that the caller's own thread tries before the progress engine gets it.
  static constexpr std::size_t max_bytes = 256 << 10;

  /// A plan was made for calls like this one.
  void plan(const PlannedCall&);
  /// A call of this plan ran, or runs, by that protocol, after an exchange of handles.
  void chosen(const PlannedCall&, Protocol);
  /// The plan's calls may be run again by their shape alone.
  bool eligible() const { return eligible_; }

  /// Where run() has left the call.
  enum class End : std::uint8_t {
    declined,             ///< not begun
    complete,             ///< done
    waits_contributions,  ///< this rank's is sent; OneShotCall::resume() from peer() on
    waits_handles,        ///< this rank's is sent; HandleExchange continues
    waits_ends            ///< this rank's accesses have ended; ZeroCopyCall continues
  };
  /// Runs a call that has begun at channel.next_step(), for `turns` polls at most; on an oversubscribed node
  /// one poll, since a peer may need this processor.
  End run(const PlannedCall&, int& turns);
  /// The peer to poll next, after waits_contributions.
  int peer() const { return peer_; }

 private:
  enum class Form : std::uint8_t { none, one_shot, zero_copy };

  End run_one_shot(const PlannedCall&, int& turns);
  void send(const PlannedCall&, StepNumber);
  void read(const PlannedCall&, std::span<const void*> operands, StepNumber);
  End run_zero_copy(const PlannedCall&, int& turns);
  template <class F>
  bool poll(const F& arrived, int& turns);

  MailboxChannel& channel_;
  Contributions& contributions_;
  OneShotCall& one_shot_;
  HandleExchange& handles_;
  ZeroCopyCall& zero_copy_;
  const bool oversubscribed_;
  bool eligible_ = false;
  Form form_ = Form::none;
  int peer_ = 0;
};

}  // namespace rz::intranode
