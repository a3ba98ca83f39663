#pragma once
/// A Stream is an order of execution, as a value. On CUDA it is a cudaStream_t, owned or borrowed. On the
/// host it is the calling thread's own order, with a team of threads that share the work of each kernel;
/// recording an event is free, and waiting for anything means that the calling thread waits.

#include <algorithm>
#include <cstddef>
#include <memory>

#include "comm/core/thread_team.h"
#include "comm/core/types.h"

namespace rz {

/// A point in a stream. On the host it has always been reached. Copying shares it.
class Event {
 public:
  Event() = default;
  /// Blocks the host until the point was reached.
  void synchronize() const {}
};

class Stream {
 public:
  /// The calling thread alone.
  Stream() = default;
  /// A host stream whose kernels run on `threads` threads, the caller's among them. One thread at a time may
  /// use it.
  static Stream host(int threads);
  /// The caller's cudaStream_t, never destroyed here. Errc::unsupported in a build without CUDA.
  static Stream borrow(Device device, void* native);

  Device device() const { return device_; }
  void* native() const { return native_; }
  int threads() const { return team_ ? team_->size() : 1; }

  Event record() const { return {}; }
  void wait(const Event&) const {}
  void synchronize() const {}

  /// Host only. Splits [0, n) into one contiguous range a thread, each a multiple of `grain` long but the
  /// last, and calls f(begin, end) for those that are not empty. The split depends on n, grain and threads()
  /// alone, so results repeat. f must not throw.
  template <class F>
  void parallel_for(std::size_t n, std::size_t grain, const F& f) const {
    const std::size_t most = grain ? (n + grain - 1) / grain : n;
    const std::size_t members = std::min<std::size_t>(threads(), most);
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
  Device device_{};
  void* native_ = nullptr;
  std::shared_ptr<ThreadTeam> team_;
};

}  // namespace rz
