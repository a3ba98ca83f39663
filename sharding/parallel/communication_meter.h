#pragma once
/// What counts the collectives of training on a mesh, and the time in which a rank waits for them.

#include <chrono>
#include <cstddef>
#include <functional>

#include "comm/communicator.h"
#include "sharding/parallel/traffic.h"
#include "tensor/tensor.h"

namespace rz {

/// Exposed communication, the time in which the thread of a rank waits for communication: counts the waits of
/// one step after the other.
class ExposedTime {
 public:
  /// Waits for `work` in the order of the stream.
  void wait(const Work& work, const Stream& stream) {
    measure([&] { work.wait_on(stream); });
  }
  /// Runs f, which waits.
  template <class F>
  void measure(const F& f) {
    const auto start = std::chrono::steady_clock::now();
    f();
    add(std::chrono::steady_clock::now() - start);
  }
  /// Counts a wait that was measured elsewhere.
  void add(std::chrono::nanoseconds wait) {
    now_ += wait, total_ += wait;
    if (!waited) return;
    const auto end = std::chrono::steady_clock::now();
    waited(end - wait, end);
  }
  /// The next wait belongs to the next step.
  void end_step() {
    last_ = now_;
    now_ = {};
  }
  /// The time of all steps.
  std::chrono::nanoseconds total() const { return total_; }
  /// Seconds in the last step that has ended.
  double last_step() const { return std::chrono::duration<double>(last_).count(); }

  /// CommunicationObserver::waited.
  std::function<void(std::chrono::steady_clock::time_point, std::chrono::steady_clock::time_point)> waited;

 private:
  std::chrono::nanoseconds now_{}, last_{}, total_{};
};

/// The meter of a mesh, whose copies share it. The strategy that trains on the mesh begins it anew, and
/// counts what it sends; layers count what they exchange.
struct CommunicationMeter {
  MeshTraffic traffic;
  ExposedTime exposed;
  /// Called with each collective that start() counts; may be empty. Its time counts as a wait.
  std::function<void(const StartedCollective&)> started;

  /// Counts a collective among `ranks` ranks in `group`, which f starts: `calls` of `bytes` each.
  template <class F>
  Work start(Collective kind, Traffic& group, std::size_t bytes, int ranks, const Stream& on, const F& f,
             std::size_t calls = 1) {
    group.of(kind) += {calls, calls * bytes};
    if (!started) return f();
    const auto now = std::chrono::steady_clock::now();
    const Work work = f();
    exposed.measure([&] { started({kind, calls * bytes, ranks, now, work, on}); });
    return work;
  }
};

/// Collectives of a strategy among the ranks of a group, which a meter counts. All parts outlive it.
struct MeteredGroup {
  Work all_reduce(const Tensor& in_out, ReduceOp op, const Stream& on) const {
    return start(Collective::all_reduce, in_out, on,
                 [&] { return communicator.all_reduce(in_out.buffer(), op, on); });
  }
  Work reduce_scatter(const Tensor& in, const Tensor& out, ReduceOp op, const Stream& on) const {
    return start(Collective::reduce_scatter, in, on,
                 [&] { return communicator.reduce_scatter(in.buffer(), out.buffer(), op, on); });
  }
  Work all_gather(const Tensor& in, const Tensor& out, const Stream& on) const {
    return start(Collective::all_gather, out, on,
                 [&] { return communicator.all_gather(in.buffer(), out.buffer(), on); });
  }
  Work broadcast(const Tensor& in_out, int root, const Stream& on) const {
    return start(Collective::broadcast, in_out, on,
                 [&] { return communicator.broadcast(in_out.buffer(), root, on); });
  }

  Communicator& communicator;
  CommunicationMeter& meter;
  Traffic& traffic;

 private:
  /// `larger`: of a rank's two buffers.
  template <class F>
  Work start(Collective kind, const Tensor& larger, const Stream& on, const F& f) const {
    return meter.start(kind, traffic, larger.bytes(), communicator.size(), on, f);
  }
};

/// Starts a collective of layers by f, runs `beside`, and waits for it in the order of the stream. Arguments
/// as those of CommunicationMeter::start().
template <class F, class Beside>
void run_counted(const CountedGroup& group, Collective kind, std::size_t bytes, const Stream& on, const F& f,
                 std::size_t calls, const Beside& beside) {
  if (!group.meter) {
    const Work work = f();
    beside();
    return work.wait_on(on);
  }
  CommunicationMeter& meter = *group.meter;
  const Work work = meter.start(kind, meter.traffic.tp, bytes, group.communicator->size(), on, f, calls);
  beside();
  meter.exposed.wait(work, on);
}

}  // namespace rz
