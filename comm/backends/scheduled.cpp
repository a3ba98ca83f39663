#include "comm/backends/scheduled.h"

#include "comm/backends/driver.h"

namespace rz {

namespace {

class Scheduled final : public Backend {
 public:
  explicit Scheduled(std::shared_ptr<Driver> driver) : driver_(std::move(driver)) { driver_->start_thread(); }
  ~Scheduled() override { driver_->stop(); }
  void abandon() noexcept override { driver_->abandon(); }

  Work submit(std::span<const Operation> group) override {
    std::shared_ptr<Job> job;
    if (!driver_->try_at_once(group, job)) job = driver_->submit(group);
    if (!job) return {};
    return Work(std::move(job));
  }
  bool repeat(const BriefCall& call, Work& work) override {
    std::shared_ptr<Job> job;
    if (!driver_->repeat(call, job)) return false;
    if (job) work = Work(std::move(job));
    return true;
  }
  void abort(const std::string& reason) noexcept override { driver_->abort(reason); }
  void check() override { driver_->check(); }
  std::shared_ptr<std::byte> allocate(std::size_t bytes) override { return driver_->allocate(bytes); }
  CallChoice explain(Collective kind, std::size_t bytes, bool reachable, DType dtype,
                     ReduceOp op) const override {
    return driver_->explain(kind, bytes, reachable, dtype, op);
  }
  Registration register_buffer(std::span<std::byte> memory) override {
    return driver_->register_buffer(memory);
  }
  std::string describe() const override { return driver_->describe(); }

 private:
  std::shared_ptr<Driver> driver_;
};

}  // namespace

std::unique_ptr<Backend> scheduled_backend(int rank, int size, std::unique_ptr<Transport> transport,
                                           const ScheduledOptions& options) {
  return std::make_unique<Scheduled>(std::make_shared<Driver>(rank, size, std::move(transport), options));
}

}  // namespace rz
