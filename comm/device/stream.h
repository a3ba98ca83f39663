#pragma once
/// A Stream is an order of execution, as a value. On CUDA it is a cudaStream_t, owned or borrowed. On the
/// host it is the calling thread's own order, with a team of threads that share the work of each kernel;
/// recording an event is free, and waiting for anything means that the calling thread waits.

#include <algorithm>
#include <cstddef>
#include <memory>

#include "comm/core/integer_math.h"
#include "comm/core/types.h"
#include "comm/os/thread_team.h"

namespace rz {

/// A point in a stream. Copying shares it. A default one, and every one of a host stream, has been reached.
class Event {
 public:
  Event() = default;
  /// True once the point was reached. Never blocks. Errc::system if the device has failed.
  bool done() const;
  /// Blocks the host until the point was reached. Errc::system if the device has failed.
  void synchronize() const;

 private:
  friend class Stream;
  struct Handle;
  std::shared_ptr<Handle> handle_;
};

/// Thread-safe on CUDA, as CUDA's streams are; one thread at a time on the host.
class Stream {
 public:
  /// The calling thread alone.
  Stream() = default;
  /// A host stream whose kernels run on `threads` threads, the caller's among them. One thread at a time may
  /// use it.
  static Stream host(int threads);
  enum class Priority : bool { normal, high };
  /// A CUDA stream of its own, destroyed with the last copy; on the host the calling thread's order.
  /// Errc::config if there is no such device.
  static Stream create(Device, Priority = Priority::normal);
  /// The caller's cudaStream_t (null: the device's default stream), never destroyed here.
  static Stream borrow(Device, void* native);

  Device device() const { return device_; }
  void* native() const { return native_; }
  int threads() const { return team_ ? team_->size() : 1; }

  /// The point after everything that was put into the stream so far.
  Event record() const;
  /// What is put into the stream from now on runs after the event. A host stream blocks until then.
  void wait(const Event&) const;
  /// Blocks the host until everything in the stream has run. Errc::system if something failed.
  void synchronize() const;

  /// Whether what is put into it now becomes a part of a graph (comm/device/graph.h).
  bool capturing() const;

  /// CUDA only: memory of the device, not initialised, aligned to 256 bytes, for what kernels of this stream
  /// hand to those right behind them: whoever calls next gets the same bytes. Belongs to the copies of this
  /// Stream (of a borrowed one: of what that call of `borrow` returned) and is given back with the last of
  /// them, not before, since a graph may refer to it: run what was captured here in this stream, and while it
  /// lives. A call that asks for more than all before it allocates, which no capture allows: run once, then
  /// capture. One thread at a time may use what it gets.
  void* workspace(std::size_t bytes) const;

  /// Host only. Splits [0, n) into one contiguous range a thread, each a multiple of `grain` long but the
  /// last, and calls f(begin, end) for those that are not empty. The split depends on n, grain and threads()
  /// alone, so results repeat. f must not throw.
  template <class F>
  void parallel_for(std::size_t n, std::size_t grain, const F& f) const {
    const std::size_t most = grain ? ceil_div(n, grain) : n;
    const std::size_t members = std::min(static_cast<std::size_t>(threads()), most);
    if (members <= 1) {
      if (n) f(std::size_t{0}, n);
      return;
    }
    const auto cut = [&](std::size_t i) { return std::min(n, most * i / members * (grain ? grain : 1)); };
    team_->run([&](int member) {
      const auto i = static_cast<std::size_t>(member);
      if (i < members && cut(i) < cut(i + 1)) f(cut(i), cut(i + 1));
    });
  }

 private:
  struct DeviceState;
  Device device_{};
  void* native_ = nullptr;
  std::shared_ptr<ThreadTeam> team_;
  std::shared_ptr<DeviceState> device_state_;
};

}  // namespace rz
