#include "tests/support/mirrored_backend.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "comm/core/error.h"
#include "comm/device/memory.h"

namespace rz::test {

class MirroredCall final : public WorkState {
 public:
  MirroredCall(CollectiveCall operation, int rank, int size)
      : operation_(std::move(operation)), rank_(rank), size_(size) {}

  bool done() const noexcept override { return ended_; }
  void wait() override {
    if (!std::exchange(ended_, true)) run();
  }
  CallRecord::Call described() const {
    return {operation_.kind, operation_.out.dtype, std::max(operation_.in.count, operation_.out.count)};
  }

 private:
  void run() const {
    const auto* in = static_cast<const std::byte*>(operation_.in.data);
    auto* out = static_cast<std::byte*>(operation_.out.data);
    const std::size_t in_bytes = operation_.in.bytes(), out_bytes = operation_.out.bytes();
    switch (operation_.kind) {
      case Collective::all_gather:
        for (int r = 0; r < size_; ++r)
          std::memmove(out + static_cast<std::size_t>(r) * in_bytes, in, in_bytes);
        return;
      case Collective::reduce_scatter:
        std::memmove(out, in + static_cast<std::size_t>(rank_) * out_bytes, out_bytes);
        return;
      case Collective::all_reduce:
      case Collective::broadcast:
        if (in && out) std::memmove(out, in, out_bytes);
        if (in && operation_.kind == Collective::all_reduce && operation_.op.kind == ReduceOp::sum &&
            operation_.out.dtype == DType::i64)
          for (std::size_t i = 0; i < operation_.out.count; ++i)
            static_cast<std::int64_t*>(operation_.out.data)[i] *= size_;
        return;
      default:  // a barrier
        return;
    }
  }

  CollectiveCall operation_;
  int rank_, size_;
  bool ended_ = false;
};

class MirroredBackend final : public Backend {
 public:
  MirroredBackend(int rank, int size, std::shared_ptr<CallRecord> record)
      : rank_(rank), size_(size), record_(std::move(record)) {}

  Work submit(std::span<const CollectiveCall> group) override {
    require(group.size() == 1, Errc::unsupported, "a mirrored communicator takes one call at a time");
    static constexpr Collective known[] = {Collective::all_gather, Collective::reduce_scatter,
                                           Collective::all_reduce, Collective::broadcast,
                                           Collective::barrier};
    require(std::ranges::find(known, group[0].kind) != std::end(known), Errc::unsupported,
            name(group[0].kind), " is not mirrored");
    return Work(record_->calls_.emplace_back(std::make_shared<MirroredCall>(group[0], rank_, size_)));
  }
  void abort(const std::string&) noexcept override {}
  std::shared_ptr<std::byte> allocate(std::size_t bytes) override { return allocate_host(bytes); }
  std::string describe() const override { return "mirrored"; }

 private:
  int rank_, size_;
  std::shared_ptr<CallRecord> record_;
};

std::vector<CallRecord::Call> CallRecord::launched(const Filter& filter) const {
  std::vector<Call> out;
  for (const auto& call : calls_)
    if (filter(call->described())) out.push_back(call->described());
  return out;
}

std::vector<CallRecord::Call> CallRecord::in_flight(const Filter& filter) const {
  std::vector<Call> out;
  for (const auto& call : calls_)
    if (!call->done() && filter(call->described())) out.push_back(call->described());
  return out;
}

Communicator mirrored_communicator(int rank, int size, std::shared_ptr<CallRecord> record) {
  return Communicator::from_backend(rank, size,
                                    std::make_unique<MirroredBackend>(rank, size, std::move(record)));
}

}  // namespace rz::test
