#include "comm/backends/paired.h"

#include "comm/core/error.h"

namespace rz {

namespace {

class Paired final : public Backend {
 public:
  Paired(std::shared_ptr<Backend> host, std::unique_ptr<Backend> device, std::string why)
      : host_(std::move(host)), device_(std::move(device)), why_(std::move(why)) {}

  Work submit(std::span<const Operation> group) override {
    if (group.empty() || on_host(group.front())) return submit_to(*host_, group, true);
    return submit_to(*device_, group, false);
  }
  void abort(const std::string& reason) noexcept override {
    device_->abort(reason);
    host_->abort(reason);
  }
  void check() override {
    device_->check();
    host_->check();
  }
  std::shared_ptr<WorkState> follow(const Stream& stream, std::chrono::milliseconds limit) override {
    return stream.device().kind == Device::host ? nullptr : device_->follow(stream, limit);
  }
  bool capturable() const override { return device_->capturable(); }
  std::unique_ptr<Backend> split(std::span<const int> members) override {
    auto host = host_->split(members);
    auto device = host ? device_->split(members) : nullptr;
    return device ? paired_backend(std::move(host), std::move(device), why_) : nullptr;
  }
  std::shared_ptr<std::byte> allocate(std::size_t bytes) override { return device_->allocate(bytes); }
  std::shared_ptr<std::byte> allocate_symmetric(std::size_t bytes) override {
    return device_->allocate_symmetric(bytes);
  }
  CallChoice explain(Collective kind, std::size_t bytes, bool reachable, DType dtype,
                     ReduceOp op) const override {
    return device_->explain(kind, bytes, reachable, dtype, op);
  }
  Registration register_buffer(std::span<std::byte> memory) override {
    return host_->register_buffer(memory);
  }
  std::string describe() const override {
    return str(device_->describe(), why_.empty() ? "" : str(" (chosen: ", why_, ")"), ", host memory ",
               host_->describe());
  }

 private:
  static bool on_host(const Operation& op) {
    const Device d = op.kind == Collective::send || op.in.data ? op.in.device : op.out.device;
    return d.kind == Device::host;
  }
  static Work submit_to(Backend& backend, std::span<const Operation> group, bool host) {
    for (const Operation& op : group)
      require(on_host(op) == host, Errc::invalid_argument,
              "a group has operations on host memory and on device memory; make it two groups");
    return backend.submit(group);
  }

  const std::shared_ptr<Backend> host_;
  const std::unique_ptr<Backend> device_;
  const std::string why_;
};

}  // namespace

std::unique_ptr<Backend> paired_backend(std::shared_ptr<Backend> host, std::unique_ptr<Backend> device,
                                        std::string why) {
  return std::make_unique<Paired>(std::move(host), std::move(device), std::move(why));
}

}  // namespace rz
