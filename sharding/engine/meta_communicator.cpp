#include "sharding/engine/meta_communicator.h"

#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "comm/backend.h"
#include "comm/core/error.h"
#include "comm/device/meta.h"

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
  MetaBackend(int rank, int ranks) : rank_(rank), ranks_(ranks) {}

  Work submit(std::span<const CollectiveCall> group) override {
    for (const CollectiveCall& call : group)
      require(is_known(call.kind), Errc::unsupported, name(call.kind), " in a run on the meta device");
    return Work(
        std::make_shared<MetaCalls>(std::vector<CollectiveCall>(group.begin(), group.end()), rank_, ranks_));
  }
  void abort(const std::string&) noexcept override {}
  std::shared_ptr<std::byte> allocate(std::size_t bytes) override { return allocate_meta(bytes); }
  std::string describe() const override { return "meta"; }

 private:
  int rank_, ranks_;
};

}  // namespace

Communicator meta_communicator(int rank, int ranks) {
  CommOptions options;
  options.device = meta_device;
  return Communicator::from_backend(rank, ranks, std::make_unique<MetaBackend>(rank, ranks),
                                    std::move(options));
}

}  // namespace rz
