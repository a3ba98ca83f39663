#include "comm/backends/native/native_backend.h"

#include "comm/backends/native/dispatcher.h"
#include "comm/core/error.h"
#include "comm/progress/progress_engine.h"
#include "comm/shared_memory/allocator.h"
#include "comm/transport/shared_memory_group.h"

namespace rz {

namespace {

class NativeBackend final : public Backend {
 public:
  NativeBackend(int rank, std::unique_ptr<Dispatcher> dispatcher, const NativeOptions& options)
      : rank_(rank),
        dispatcher_(*dispatcher),
        intranode_(dispatcher->intranode()),
        turns_(dispatcher->policy().inline_turns),
        engine_(std::make_shared<ProgressEngine>(
            std::move(dispatcher),
            ProgressOptions{.rank = rank, .timeout = options.timeout, .policy = &dispatcher_.policy()})) {
    engine_->start();
  }
  ~NativeBackend() override { engine_->stop(); }
  void abandon() noexcept override { engine_->abandon(); }

  Work submit(std::span<const CollectiveCall> group) override;
  void abort(const std::string& reason) noexcept override { engine_->abort(reason); }
  void cancel(const Error& cause) override { engine_->cancel(cause); }
  void check_peers() override { engine_->check_peers(); }
  void check() override { engine_->check(); }
  /// Without the token: a large allocation takes long.
  std::shared_ptr<std::byte> allocate(std::size_t bytes) override {
    return allocate_zeroed(shared_memory(), bytes);
  }
  AlgorithmChoice explain(Collective kind, std::size_t bytes, bool reachable, DType dtype,
                          ReduceOp op) const override {
    return dispatcher_.explain(kind, bytes, reachable, dtype, op);
  }
  Registration register_buffer(std::span<std::byte>) override;
  std::shared_ptr<SharedMemoryAllocator> shared_memory() const override {
    engine_->check_process();
    SharedMemoryGroup* const shared = dispatcher_.shared_memory();
    return shared ? shared->allocator() : nullptr;
  }
  std::shared_ptr<LinkMonitor> link_monitor() const override {
    return dispatcher_.transport().link_monitor();
  }
  std::string describe() const override { return "native over " + dispatcher_.transport().describe(); }

 private:
  bool try_inline(const CollectiveCall&, Work&);
  bool is_small(const CollectiveCall&) const;
  template <class Run>
  Work run_inline(const Run& run);

  const int rank_;
  Dispatcher& dispatcher_;  // engine_ owns it
  intranode::Engine* const intranode_;
  const int turns_;
  const std::shared_ptr<ProgressEngine> engine_;
};

Work NativeBackend::submit(std::span<const CollectiveCall> group) {
  if (Work work; group.size() == 1 && intranode_ && try_inline(group.front(), work)) return work;
  Coalescer::require_independent(group);
  return Work(engine_->submit(group));
}

/// Runs a small call on the calling thread, with the plan of the last one if it has its shape. False: not
/// begun.
bool NativeBackend::try_inline(const CollectiveCall& call, Work& work) {
  engine_->check_process();
  if (!engine_->try_begin_inline()) return false;
  if (intranode_->matches_last(call)) {
    work =
        run_inline([&] { return intranode_->run_fast_path(call, dispatcher_.begin_inline(call), turns_); });
    return true;
  }
  if (!is_small(call)) {
    engine_->end_inline();
    return false;
  }
  work = run_inline([&] {
    intranode_->start(call, dispatcher_.begin_inline(call));
    return intranode_->spin(turns_);
  });
  return true;
}

bool NativeBackend::is_small(const CollectiveCall& call) const {
  return !traits(call.kind).point_to_point && call.op.kind != ReduceOp::premul_sum &&
         call.in.bytes() <= intranode::Engine::max_inline_bytes &&
         call.out.bytes() <= intranode::Engine::max_inline_bytes && !intranode_->schedule_for(call);
}

/// Requires the progress token and releases it. `run` returns whether the call is complete.
template <class Run>
Work NativeBackend::run_inline(const Run& run) {
  try {
    if (!run())
      return Work(engine_->continue_inline(intranode_->call(), [this](Request& r) { dispatcher_.adopt(r); }));
  } catch (...) {
    return Work(engine_->fail_inline(std::current_exception()));
  }
  dispatcher_.end_inline();
  engine_->end_inline();
  return {};
}

// Without the token, since it copies.
Registration NativeBackend::register_buffer(std::span<std::byte> memory) {
  const auto shared = shared_memory();
  return shared
             ? shared->register_buffer(memory)
             : Registration(concat("no other rank shares memory with rank ", rank_, " (", describe(), ")"));
}

}  // namespace

std::unique_ptr<Backend> make_native_backend(int rank, int size, std::unique_ptr<Transport> transport,
                                             const NativeOptions& options) {
  return std::make_unique<NativeBackend>(
      rank, std::make_unique<Dispatcher>(rank, size, std::move(transport), options), options);
}

}  // namespace rz
