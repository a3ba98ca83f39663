#include "sharding/model/runtime.h"

#include <algorithm>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include "comm/core/error.h"

namespace rz {

// ---- transient memory

struct TransientMemory::State {
  struct Block {
    std::shared_ptr<std::byte> memory;
    std::size_t bytes = 0;
  };

  State(Allocator u, std::function<void()> s) : upstream(std::move(u)), synchronize(std::move(s)) {}

  Block acquire(std::size_t bytes) {
    const std::lock_guard lock(mutex);
    in_use += bytes;
    peak = std::max(peak, in_use);
    const bool room = held + bytes <= peak + (on_device() ? released : 0);
    if (const auto best = best_fit(bytes); best != free.end() && (best->bytes <= 2 * bytes || !room)) {
      const Block block = std::move(*best);
      free.erase(best);
      return block;
    }
    if (!room) {
      if (synchronize && !free.empty()) synchronize();
      for (const Block& b : free) held -= b.bytes, released += b.bytes;
      free.clear();
    }
    held += bytes;
    ++allocations;
    return {upstream(bytes), bytes};
  }

  bool on_device() const { return upstream.device.kind != Device::host; }

  std::vector<Block>::iterator best_fit(std::size_t bytes) {
    auto best = free.end();
    for (auto b = free.begin(); b != free.end(); ++b)
      if (b->bytes >= bytes && (best == free.end() || b->bytes < best->bytes)) best = b;
    return best;
  }

  void release(Block block, std::size_t bytes) {
    const std::lock_guard lock(mutex);
    in_use -= bytes;
    free.push_back(std::move(block));
  }

  const Allocator upstream;
  const std::function<void()> synchronize;
  std::mutex mutex;
  std::vector<Block> free;
  std::size_t held = 0, in_use = 0, peak = 0, released = 0, allocations = 0;
};

TransientMemory::TransientMemory(Allocator upstream, std::function<void()> synchronize)
    : state_(std::make_shared<State>(std::move(upstream), std::move(synchronize))) {}

Tensor TransientMemory::allocate(const Shape& shape, DType dtype) {
  const std::size_t bytes = shape.count() * size_of(dtype);
  State::Block block = state_->acquire(bytes);
  std::byte* data = block.memory.get();
  const std::shared_ptr<std::byte> memory(
      data, [state = state_, block = std::move(block), bytes](std::byte*) mutable {
        state->release(std::move(block), bytes);
      });
  return Tensor::share(memory, 0, shape, dtype, state_->upstream.device);
}

std::size_t TransientMemory::held() const {
  const std::lock_guard lock(state_->mutex);
  return state_->held;
}
std::size_t TransientMemory::in_use() const {
  const std::lock_guard lock(state_->mutex);
  return state_->in_use;
}
std::size_t TransientMemory::peak() const {
  const std::lock_guard lock(state_->mutex);
  return state_->peak;
}
std::size_t TransientMemory::allocations() const {
  const std::lock_guard lock(state_->mutex);
  return state_->allocations;
}

// ---- runtime

Runtime::Runtime(Mesh ranks, bool offloads, bool divides_again)
    : mesh(std::move(ranks)),
      place(divides_again ? MeshCoordinates({0, 1}, mesh.place().data(), mesh.part()) : mesh.place()),
      communicator(mesh.communicator()),
      data(mesh.data()),
      shard_group(divides_again ? mesh.data() : mesh.shard()),
      secondary(divides_again && mesh.sizes().replicate > 1 ? &mesh.shard() : nullptr),
      replicas(divides_again ? nullptr : mesh.replicas()),
      stream(Stream::create(communicator.options().device)),
      to_device(offloads ? Stream::create(communicator.options().device) : Stream()),
      to_host(offloads ? Stream::create(communicator.options().device) : Stream()),
      between(replicas && communicator.options().device.kind == Device::cuda
                  ? Stream::create(communicator.options().device)
                  : Stream()),
      transient(communicator.allocator(),
                [this] {
                  require(!stream.capturing(), Errc::invalid_argument,
                          "an update that is captured in a graph needs other memory than those before; run "
                          "more updates without capture first");
                  stream.synchronize();
                }),
      exposed(mesh.meter()->exposed),
      traffic(mesh.meter()->traffic) {
  *mesh.meter() = {};
}

const Stream& Runtime::stream_for(const Stream& given) const {
  const bool named = given.device().kind == Device::cuda || given.threads() > 1;
  return named && given.device() == stream.device() ? given : stream;
}

Tensor Runtime::allocate_flat(std::size_t count, DType dtype) const {
  return Tensor::empty({count}, dtype, communicator.allocator());
}

Traffic& Runtime::traffic_of(const Communicator& group) {
  if (&group == &mesh.shard()) return traffic.shard;
  if (&group == mesh.replicas()) return traffic.replicate;
  if (&group == mesh.tp()) return traffic.tp;
  return &group == &data ? traffic.data : traffic.all;
}

void Runtime::abort(const std::string& reason) noexcept {
  for (Communicator* group : {&communicator, &data, &shard_group, &mesh.shard(), replicas, mesh.tp()})
    if (group) group->abort(reason);
}

}  // namespace rz
