#include "comm/backends/backend_factory.h"
#include "comm/core/error.h"

namespace rz {

namespace {

class DeviceAndHostBackend final : public Backend {
 public:
  DeviceAndHostBackend(std::shared_ptr<Backend> host, std::unique_ptr<Backend> device, std::string why)
      : host_(std::move(host)), device_(std::move(device)), reason_(std::move(why)) {}

  Work submit(std::span<const CollectiveCall> group) override {
    if (group.empty() || on_host(group.front())) return submit_to(*host_, group, true);
    return submit_to(*device_, group, false);
  }
  void abort(const std::string& reason) noexcept override {
    device_->abort(reason);
    host_->abort(reason);
  }
  void cancel(const Error& cause) override {
    host_->cancel(cause);
    device_->cancel(cause);
  }
  void check_peers() override { host_->check_peers(); }
  void check() override {
    device_->check();
    host_->check();
  }
  std::shared_ptr<WorkState> watch_stream(const Stream& stream, std::chrono::milliseconds limit) override {
    return stream.device().kind == Device::host ? nullptr : device_->watch_stream(stream, limit);
  }
  bool capturable() const override { return device_->capturable(); }
  std::string reason_against_copies_in_graphs() const override {
    return device_->reason_against_copies_in_graphs();
  }
  std::unique_ptr<Backend> split(std::span<const int> members, int number) override {
    auto host = host_->split(members, number);
    auto device = host ? device_->split(members, number) : nullptr;
    return device ? device_and_host_backend(std::move(host), std::move(device), reason_) : nullptr;
  }
  std::shared_ptr<std::byte> allocate(std::size_t bytes) override { return device_->allocate(bytes); }
  std::shared_ptr<std::byte> allocate_symmetric(std::size_t bytes) override {
    return device_->allocate_symmetric(bytes);
  }
  AlgorithmChoice explain(Collective kind, std::size_t bytes, bool reachable, DType dtype,
                          ReduceOp op) const override {
    return device_->explain(kind, bytes, reachable, dtype, op);
  }
  std::shared_ptr<SharedMemoryAllocator> shared_memory() const override { return host_->shared_memory(); }
  std::shared_ptr<LinkMonitor> link_monitor() const override { return host_->link_monitor(); }
  Registration register_buffer(std::span<std::byte> memory) override {
    return host_->register_buffer(memory);
  }
  std::string describe() const override {
    return concat(device_->describe(), reason_.empty() ? "" : concat(" (chosen: ", reason_, ")"),
                  ", host memory ", host_->describe());
  }

 private:
  static bool on_host(const CollectiveCall& op) {
    const Device d = op.kind == Collective::send || op.in.data ? op.in.device : op.out.device;
    return d.kind == Device::host;
  }
  static Work submit_to(Backend& backend, std::span<const CollectiveCall> group, bool host) {
    for (const CollectiveCall& op : group)
      require(on_host(op) == host, Errc::invalid_argument,
              "a group has operations on host memory and on device memory; make it two groups");
    return backend.submit(group);
  }

  const std::shared_ptr<Backend> host_;
  const std::unique_ptr<Backend> device_;
  const std::string reason_;
};

}  // namespace

std::unique_ptr<Backend> device_and_host_backend(std::shared_ptr<Backend> host,
                                                 std::unique_ptr<Backend> device, std::string why) {
  return std::make_unique<DeviceAndHostBackend>(std::move(host), std::move(device), std::move(why));
}

}  // namespace rz
