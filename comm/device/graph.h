#pragma once
/// CUDA graphs: stream work that is captured once and replayed with one launch.

#include <memory>

#include "stream.h"

namespace rz {

/// An executable graph; copies share it. Thread-safe, except for ordering within a stream.
class Graph {
 public:
  Graph() = default;
  bool defined() const { return handle_ != nullptr; }
  /// Enqueues one run of the graph in the stream.
  void launch(const Stream&) const;

 private:
  friend class GraphCapture;
  struct Handle;
  std::shared_ptr<Handle> handle_;
};

/// Captures the work enqueued in a CUDA stream between construction and end(), including other streams that
/// fork from it and join it again. The work is recorded, not run. Meanwhile this thread must not synchronize
/// or allocate.
class GraphCapture {
 public:
  explicit GraphCapture(const Stream&);
  /// Ends and discards a capture that an exception left open.
  ~GraphCapture();
  GraphCapture(const GraphCapture&) = delete;
  GraphCapture& operator=(const GraphCapture&) = delete;
  /// Ends the capture and instantiates the graph. Errc::system if it contains work that cannot be captured.
  Graph end();
  /// True while this thread captures. Resources obtained during a capture are used by every run of the graph.
  static bool active();

 private:
  Stream stream_;
  bool open_ = true;
};

/// The graph of the work that f() enqueues in the stream.
template <class F>
Graph capture(const Stream& stream, const F& f) {
  GraphCapture capture(stream);
  f();
  return capture.end();
}

}  // namespace rz
