#pragma once
/// The calls of a native communicator: queues them and runs each by the engine that serves it. Collectives
/// run one at a time, in order; messages run beside them.

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "comm/backends/native/native_options.h"
#include "comm/backends/native/schedule_engine.h"
#include "comm/collective.h"
#include "comm/intranode/engine.h"
#include "comm/os/flight_recorder.h"
#include "comm/os/wait_policy.h"
#include "comm/progress/call_comparison.h"
#include "comm/progress/coalescer.h"
#include "comm/progress/point_to_point.h"
#include "comm/progress/progressable.h"
#include "comm/progress/timeouts.h"
#include "comm/progress/wait_reporter.h"
#include "comm/transport/heartbeats.h"
#include "comm/transport/transport.h"

namespace rz {

class Dispatcher final : public Progressable {
 public:
  /// Errc::config if options.algorithm does not fit the group.
  Dispatcher(int rank, int size, std::unique_ptr<Transport>, const NativeOptions&);
  ~Dispatcher() {
    heartbeats_.reset();
    transport_->close();
  }

  void accept(const std::shared_ptr<Request>&) override;
  bool advance(bool eager, std::vector<Request*>& ended) override;
  void poll(Time now, const Request* oldest, bool waited_for) override;
  void poll_idle() override;
  void wait(std::chrono::microseconds max, bool eager) override { transport_->wait(max, eager); }
  int begin_sleep() override { return transport_->begin_sleep(); }
  void end_sleep() override { transport_->end_sleep(); }
  void wake() noexcept override { transport_->wake(); }
  std::exception_ptr fail(const std::exception_ptr&, bool destroyed) noexcept override;
  void abort(const std::string& reason) noexcept override;
  void check_peers() override;
  void abandon() noexcept override { transport_.reset(); }

  /// The calling thread begins a collective in the intra-node engine. Returns its number; the calls of the
  /// group are numbered in order. Requires the progress token.
  std::uint32_t begin_inline(const CollectiveCall& call) { return begin(call); }
  /// It is complete; otherwise adopt() follows.
  void end_inline() { flight_.end(sequence_ - 1); }
  /// The call of the request, the only one, has begun in the intra-node engine. Requires the progress token.
  void adopt(Request&);

  // Thread safe.
  const ProgressWaitPolicy& policy() const { return policy_; }
  const Transport& transport() const { return *transport_; }
  /// Null if no other rank shares memory with this one.
  SharedMemoryGroup* shared_memory() const { return transport_->shared_memory(); }
  /// Backend::explain(). `bytes`: of the larger of a rank's input and output.
  AlgorithmChoice explain(Collective, std::size_t bytes, bool reachable, DType, ReduceOp) const;
  /// Null unless all ranks share memory. The progress token is required to run calls.
  intranode::Engine* intranode() const { return intranode_.get(); }

 private:
  struct PendingCall {
    Request* request = nullptr;
    std::size_t index = 0;
  };
  struct CurrentCall {
    Request* request = nullptr;
    std::size_t calls = 1;  // of the request that run coalesced
    CollectiveEngine* engine = nullptr;
    std::shared_ptr<std::byte> staged_input;
  };

  std::uint32_t begin(const CollectiveCall& call) {
    flight_.begin(sequence_, call);
    return sequence_++;
  }
  void start_next();
  std::size_t coalescable() const;
  void start_coalesced(std::size_t calls);
  const tuning::IntranodeAlgorithm* schedule_override(const CollectiveCall&) const;
  void dispatch(const CollectiveCall&, const tuning::IntranodeAlgorithm*);
  bool advance_current(bool eager);
  void finish_current(std::vector<Request*>& ended);
  WaitState wait_state_of(const Request*) const;
  WaitMessage reply_without_call(const WaitMessage& otherwise) const;
  std::exception_ptr agreed_failure(const std::exception_ptr& own) noexcept;
  CallSignature signature_of(const Request&) const;
  /// The collectives of this rank that have ended.
  std::uint32_t completed() const { return current_.request ? sequence_ - 1 : sequence_; }

  const int rank_, size_;
  std::unique_ptr<Transport> transport_;  // null after abandon()
  const ProgressWaitPolicy& policy_;
  ScheduleEngine schedules_;
  std::unique_ptr<intranode::Engine> intranode_;
  PointToPoint point_to_point_;
  Timeouts timeouts_;
  CallComparison comparison_;
  WaitReporter wait_reporter_;
  bool moved_ = false;  // since the last poll
  std::deque<PendingCall> queue_;
  CurrentCall current_;
  Coalescer coalescer_;
  std::shared_ptr<std::byte> coalescing_buffer_;
  std::uint32_t sequence_ = 0;
  flight::Recorder flight_;
  std::unique_ptr<Heartbeats::Watch> heartbeats_;
};

}  // namespace rz
