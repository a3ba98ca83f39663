#pragma once
/// CUDA graphs: work that was put into a stream once and is then run many times at the cost of one launch.

#include <memory>

#include "comm/device/stream.h"

namespace rz {

/// Copies share one graph. Thread-safe but for a stream's own order.
class Graph {
 public:
  Graph() = default;
  bool defined() const { return handle_ != nullptr; }
  /// Puts a run of the whole graph into the stream.
  void launch(const Stream&) const;

 private:
  friend class GraphCapture;
  struct Handle;
  std::shared_ptr<Handle> handle_;
};

/// From construction to end(), what is put into a CUDA stream, and into others that wait for it and that it
/// waits for again, is recorded and not run. Nothing may be waited for or allocated by this thread meanwhile.
class GraphCapture {
 public:
  explicit GraphCapture(const Stream&);
  /// Ends a capture that an exception left, and throws it away.
  ~GraphCapture();
  GraphCapture(const GraphCapture&) = delete;
  GraphCapture& operator=(const GraphCapture&) = delete;
  /// Errc::system if something happened that cannot be captured.
  Graph end();
  /// Whether this thread captures now: what it takes, a graph uses whenever it runs.
  static bool active();

 private:
  Stream stream_;
  bool open_ = true;
};

/// The graph of what f() puts into the stream.
template <class F>
Graph capture(const Stream& stream, const F& f) {
  GraphCapture capture(stream);
  f();
  return capture.end();
}

}  // namespace rz
