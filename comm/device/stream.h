#pragma once
/// Streams and events as values. On CUDA a Stream is a cudaStream_t, owned or borrowed. On the host it is the
/// calling thread's order of execution, with a thread team for the kernels: recording an event is free, and
/// waiting blocks the calling thread.

#include <algorithm>
#include <cstddef>
#include <memory>

#include "../core/types.h"
#include "../os/thread_team.h"

namespace rz {

/// A point in a stream; copies share it. A default event, and any event of a host stream, has been reached.
class Event {
 public:
  Event() = default;
  /// True once the point has been reached. Never blocks. Errc::system if the device has failed.
  bool done() const;
  /// Blocks the host until the point has been reached. Errc::system if the device has failed.
  void synchronize() const;

 private:
  friend class Stream;
  struct Handle;
  std::shared_ptr<Handle> handle_;
};

/// Thread-safe on CUDA, as CUDA's streams are. A host stream may be used by one thread at a time.
class Stream {
 public:
  /// A host stream with the calling thread only.
  Stream() = default;
  /// When kernels on a host stream repeat a result bit for bit: in every run with as many threads, or with
  /// any number of threads.
  enum class Reproducible : bool { run_to_run, for_any_threads };
  /// A host stream whose kernels run on `threads` threads, including the caller's. Errc::invalid_argument if
  /// less than 1.
  static Stream host(int threads, Reproducible = Reproducible::run_to_run);
  enum class Priority : bool { normal, high };
  /// A new CUDA stream that does not synchronize with the null stream; destroyed with the last copy. For the
  /// host, a default Stream. Errc::config if there is no such device.
  static Stream create(Device, Priority = Priority::normal);
  /// Wraps the caller's cudaStream_t (null: the device's default stream) without taking ownership.
  static Stream borrow(Device, void* native);

  Device device() const { return device_; }
  void* native() const { return native_; }
  int threads() const { return team_ ? team_->size() : 1; }
  Reproducible reproducible() const { return reproducible_; }

  /// The point after all work that is in the stream now.
  Event record() const;
  /// Later work in this stream runs after the event. A host stream blocks until the event is reached.
  void wait(const Event&) const;
  /// Blocks the host until all work in the stream has run. Errc::system if any of it failed.
  void synchronize() const;

  /// True while work in this stream is captured into a graph (comm/device/graph.h).
  bool capturing() const;

  /// CUDA only. Uninitialized device memory, aligned to 256 bytes, for passing data between consecutive
  /// kernels of this stream: each call returns the same buffer, so the next user overwrites it. Belongs to
  /// this Stream and its copies (for a borrowed stream, those of one borrow() call) and is freed with the
  /// last of them, since a graph may refer to it: launch a graph captured here in this stream, during its
  /// lifetime. A call that exceeds all previous sizes allocates, which a capture forbids: run once before
  /// capturing. One thread at a time may use the memory.
  void* workspace(std::size_t bytes) const;

  /// Host only. Splits [0, n) into one contiguous range per thread, with lengths that are multiples of
  /// `grain` except the last, and calls f(begin, end) for the non-empty ranges. The split depends only on n,
  /// grain and threads(), so results are reproducible. f must not throw.
  template <class F>
  void parallel_for(std::size_t n, std::size_t grain, const F& f) const {
    const std::size_t max_members = grain ? (n + grain - 1) / grain : n;
    const std::size_t members = std::min(static_cast<std::size_t>(threads()), max_members);
    if (members <= 1) {
      if (n) f(std::size_t{0}, n);
      return;
    }
    const auto cut = [&](std::size_t i) {
      return std::min(n, max_members * i / members * (grain ? grain : 1));
    };
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
  Reproducible reproducible_ = Reproducible::run_to_run;
  std::shared_ptr<DeviceState> device_state_;
};

}  // namespace rz
