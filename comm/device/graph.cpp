#include "comm/device/graph.h"

#include "comm/core/error.h"
#include "comm/device/cuda_runtime.h"

namespace rz {

using cuda::runtime;

namespace {
thread_local int open_captures = 0;  // of this thread
}

struct Graph::Handle {
  Handle(void* graph, Device device) : device(device) {
    const cuda::Status status = runtime().instantiate(&executable, graph);
    runtime().destroy_graph(graph);
    cuda::check(status, "cudaGraphInstantiate", device);
  }
  ~Handle() {
    const cuda::DeviceGuard guard(device, std::nothrow);
    runtime().destroy_executable(executable);
  }
  Handle(const Handle&) = delete;

  const Device device;
  void* executable = nullptr;
};

void Graph::launch(const Stream& stream) const {
  require(handle_ != nullptr, Errc::invalid_argument, "a graph that was never captured was launched");
  require(stream.device() == handle_->device, Errc::invalid_argument, "a graph of ", name(handle_->device),
          " was launched in a stream of ", name(stream.device()));
  const cuda::DeviceGuard guard(handle_->device);
  cuda::check(runtime().launch_graph(handle_->executable, stream.native()), "cudaGraphLaunch",
              handle_->device);
}

GraphCapture::GraphCapture(const Stream& stream) : stream_(stream) {
  require(stream.device().kind == Device::cuda, Errc::invalid_argument, "host streams have no graphs");
  const cuda::DeviceGuard guard(stream_.device());
  cuda::check(runtime().begin_capture(stream_.native()), "cudaStreamBeginCapture", stream_.device());
  ++open_captures;
}

bool GraphCapture::active() { return open_captures > 0; }

GraphCapture::~GraphCapture() {
  if (!open_) return;
  --open_captures;
  const cuda::DeviceGuard guard(stream_.device(), std::nothrow);
  void* graph = nullptr;
  if (runtime().end_capture(stream_.native(), &graph) == cuda::success && graph)
    runtime().destroy_graph(graph);
}

Graph GraphCapture::end() {
  open_ = false;
  --open_captures;
  const cuda::DeviceGuard guard(stream_.device());
  void* graph = nullptr;
  cuda::check(runtime().end_capture(stream_.native(), &graph), "cudaStreamEndCapture", stream_.device());
  Graph result;
  result.handle_ = std::make_shared<Graph::Handle>(graph, stream_.device());
  return result;
}

}  // namespace rz
