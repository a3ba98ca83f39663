#include "sharding/engine/dry_run.h"

#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "comm/backend.h"
#include "comm/core/error.h"
#include "comm/device/allocate.h"
#include "comm/device/meta.h"
#include "sharding/optim/optimizer.h"
#include "sharding/strategy/strategy.h"

namespace rz {

namespace {

/// Gives `out` what equal ranks would.
void run(const CollectiveCall& call, int rank, int ranks) {
  if (is_meta(call.in.device) || is_meta(call.out.device)) return;
  const auto* in = static_cast<const std::byte*>(call.in.data);
  auto* out = static_cast<std::byte*>(call.out.data);
  const std::size_t in_bytes = call.in.bytes(), out_bytes = call.out.bytes();
  if (out == nullptr || out_bytes == 0) return;
  if (call.kind == Collective::all_gather)
    for (int r = 0; r < ranks; ++r) std::memmove(out + static_cast<std::size_t>(r) * in_bytes, in, in_bytes);
  else if (call.kind == Collective::reduce_scatter)
    std::memmove(out, in + static_cast<std::size_t>(rank) * out_bytes, out_bytes);
  else if (in)
    std::memmove(out, in, out_bytes);
}

bool is_known(Collective kind) {
  return kind == Collective::all_gather || kind == Collective::reduce_scatter ||
         kind == Collective::all_reduce || kind == Collective::broadcast || kind == Collective::barrier;
}

class MetaCalls final : public WorkState {
 public:
  MetaCalls(std::vector<CollectiveCall> calls, int rank, int ranks)
      : calls_(std::move(calls)), rank_(rank), ranks_(ranks) {}
  bool done() const noexcept override { return ended_; }
  void wait() override {
    if (std::exchange(ended_, true)) return;
    for (const CollectiveCall& call : calls_) run(call, rank_, ranks_);
  }

 private:
  std::vector<CollectiveCall> calls_;
  int rank_, ranks_;
  bool ended_ = false;
};

class MetaBackend final : public Backend {
 public:
  MetaBackend(int rank, int ranks, std::string transport)
      : rank_(rank), ranks_(ranks), transport_(std::move(transport)) {}

  Work submit(std::span<const CollectiveCall> group) override {
    for (const CollectiveCall& call : group)
      require(is_known(call.kind), Errc::unsupported, name(call.kind), " in a run on the meta device");
    return Work(
        std::make_shared<MetaCalls>(std::vector<CollectiveCall>(group.begin(), group.end()), rank_, ranks_));
  }
  void abort(const std::string&) noexcept override {}
  std::shared_ptr<std::byte> allocate(std::size_t bytes) override { return allocate_meta(bytes); }
  AlgorithmChoice explain(Collective, std::size_t, bool, DType, ReduceOp) const override {
    return {"none", transport_, 0, "nothing is sent"};
  }
  std::string describe() const override { return "meta"; }

 private:
  int rank_, ranks_;
  std::string transport_;
};

}  // namespace

Communicator meta_communicator(int rank, int ranks, std::string transport) {
  CommOptions options;
  options.device = meta_device;
  return Communicator::from_backend(
      rank, ranks, std::make_unique<MetaBackend>(rank, ranks, std::move(transport)), std::move(options));
}

Mesh meta_mesh(const MeshSizes& sizes, int rank, const std::string& transport) {
  const MeshCoordinates at = coordinates(sizes, rank);
  Mesh::Groups groups;
  groups.all = std::make_shared<Communicator>(meta_communicator(rank, sizes.ranks(), transport));
  const auto group = [&](RankOf of) {
    if (of.ranks == sizes.ranks()) return groups.all;
    return std::make_shared<Communicator>(meta_communicator(of.rank, of.ranks, transport));
  };
  groups.data = sizes.tp == 1 ? groups.all : group(at.data());
  groups.shard = sizes.replicate == 1 ? groups.data : group(at.shard);
  if (sizes.replicate > 1) groups.replicas = sizes.shard == 1 ? groups.data : group(at.replica);
  if (sizes.tp > 1) groups.tp = group(at.part);
  return {sizes, std::move(groups)};
}

namespace {

/// The states of an optimizer, which it does not change.
class StatesOf final : public Optimizer {
 public:
  explicit StatesOf(const Optimizer& of) : Optimizer(groups_of(of)), of_(of) {}

  const char* name() const override { return of_.name(); }
  std::vector<StateSpec> states(int group) const override { return of_.states(group); }
  Grain grain(int group) const override { return of_.grain(group); }
  void measure(std::span<const UpdateSpan>, const UpdateScale&, const NormSums&,
               const Stream&) const override {}
  void direct(std::span<const UpdateSpan>, const UpdateScale&, const Stream&) const override {}
  void orthogonalize(const Tensor& direction, int group, const Workspace& workspace,
                     const Stream& stream) const override {
    of_.orthogonalize(direction, group, workspace, stream);
  }
  void update(std::span<const UpdateSpan>, const UpdateScale&, const Stream&) const override {}
  std::vector<std::byte> constants(std::int64_t missed) const override { return of_.constants(missed); }

 protected:
  std::string describe_group(int) const override { return of_.describe(); }

 private:
  static std::vector<Group> groups_of(const Optimizer& of) {
    std::vector<Group> out;
    for (int g = 0; g < of.groups(); ++g)
      out.push_back({of.group_name(g), [&of, g](const Parameter& p) { return of.group_of(p) == g; },
                     of.learning_rate(g)});
    return out;
  }

  const Optimizer& of_;
};

/// A module while it is on the meta device.
class OnMeta {
 public:
  explicit OnMeta(Module& module) : module_(module) {
    for (const Parameter* p : module.parameters())
      require(!p->value.defined(), Errc::invalid_argument, "a dry run of a model whose parameter ", p->name,
              " has a value: make another model for it");
  }
  ~OnMeta() {
    for (Parameter* p : module_.parameters()) p->value = p->grad = {};
    for (ModuleBuffer* b : module_.buffers()) b->value = {};
  }
  OnMeta(const OnMeta&) = delete;

  std::size_t buffer_bytes() const {
    std::size_t bytes = 0;
    for (const ModuleBuffer* b : module_.buffers()) bytes += b->value.bytes();
    return bytes;
  }

 private:
  Module& module_;
};

/// The loop of an engine.
class Updates {
 public:
  Updates(Strategy& strategy, Tape& tape, const std::function<nn::Loss(Tape&)>& record, int accumulation)
      : strategy_(strategy), tape_(tape), record_(record), accumulation_(accumulation) {}

  void run(Optimizer& optimizer) {
    strategy_.zero_grad();
    losses_.clear();
    for (int m = 1; m <= accumulation_; ++m) {
      losses_.push_back(record_(tape_));
      strategy_.backward(tape_, losses_.back(), m == accumulation_);
      tape_.reset();
    }
    strategy_.finish_gradients(tape_.stream());
    strategy_.clip_and_step(optimizer, {}, tape_.stream());
  }

 private:
  Strategy& strategy_;
  Tape& tape_;
  const std::function<nn::Loss(Tape&)>& record_;
  int accumulation_;
  std::vector<nn::Loss> losses_;  // of an update, as an engine keeps them
};

constexpr int settling_updates = 3;  // from the third on, all updates are alike

}  // namespace

std::pair<MemoryUse, MeshTraffic> dry_run(Module& module, const Optimizer& optimizer,
                                          const std::function<nn::Loss(Tape&)>& record,
                                          const DryRunOptions& o) {
  require(o.accumulation > 0, Errc::invalid_argument, "an update of ", o.accumulation, " micro-batches");
  const OnMeta on_meta(module);
  Tape tape(Stream::create(meta_device), BufferPool(allocator_on(meta_device)));
  const auto strategy = make_strategy(o.strategy, module, o.mesh, o.options);
  strategy->attach(tape);
  tape.set_autocast(o.autocast);
  StatesOf states(optimizer);
  Updates updates(*strategy, tape, record, o.accumulation);
  for (int i = 1; i < settling_updates; ++i) updates.run(states);
  const MeshTraffic before = strategy->traffic();
  updates.run(states);
  const BufferPool::Statistics pool = tape.pool().statistics();
  return {{strategy->memory(), pool.bytes, pool.peak, on_meta.buffer_bytes()}, strategy->traffic() - before};
}

}  // namespace rz
