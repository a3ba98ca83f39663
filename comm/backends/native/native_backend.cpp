#include "comm/backends/native/native_backend.h"

#include "comm/backends/native/progress_engine.h"

namespace rz {

namespace {

class NativeBackend final : public Backend {
 public:
  explicit NativeBackend(std::shared_ptr<ProgressEngine> engine) : engine_(std::move(engine)) {
    engine_->start_thread();
  }
  ~NativeBackend() override { engine_->stop(); }
  void abandon() noexcept override { engine_->abandon(); }

  Work submit(std::span<const CollectiveCall> group) override {
    std::shared_ptr<Request> request;
    if (!engine_->try_inline(group, request)) request = engine_->submit(group);
    if (!request) return {};
    return Work(std::move(request));
  }
  bool try_fast_path(const CallKey& call, Work& work) override {
    std::shared_ptr<Request> request;
    if (!engine_->try_fast_path(call, request)) return false;
    if (request) work = Work(std::move(request));
    return true;
  }
  void abort(const std::string& reason) noexcept override { engine_->abort(reason); }
  void check() override { engine_->check(); }
  std::shared_ptr<std::byte> allocate(std::size_t bytes) override { return engine_->allocate(bytes); }
  AlgorithmChoice explain(Collective kind, std::size_t bytes, bool reachable, DType dtype,
                          ReduceOp op) const override {
    return engine_->explain(kind, bytes, reachable, dtype, op);
  }
  Registration register_buffer(std::span<std::byte> memory) override {
    return engine_->register_buffer(memory);
  }
  std::string describe() const override { return engine_->describe(); }

 private:
  std::shared_ptr<ProgressEngine> engine_;
};

}  // namespace

std::unique_ptr<Backend> make_native_backend(int rank, int size, std::unique_ptr<Transport> transport,
                                             const NativeOptions& options) {
  return std::make_unique<NativeBackend>(
      std::make_shared<ProgressEngine>(rank, size, std::move(transport), options));
}

}  // namespace rz
