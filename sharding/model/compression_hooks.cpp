// The hooks of communication_hook.h under the names of PyTorch.

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "sharding/model/communication_hook.h"
#include "sharding/model/gradient_store.h"

namespace rz {

namespace {

class WireHook final : public CommunicationHook {
 public:
  WireHook(std::string name, const WireFormat& format) : name_(std::move(name)), format_(format) {}

  std::string describe() const override { return name_; }
  void require_supported(DType, Device) const override {}
  Work start(const HookBucket& bucket, Runtime& runtime, const Stream& stream) override {
    if (!wire_) wire_.emplace(format_, ReduceOp::avg, true, runtime);
    const auto index = static_cast<std::size_t>(bucket.index);
    if (index >= running_.size()) running_.resize(index + 1);
    running_[index] = wire_->all_reduce(bucket.gradients, stream);
    return running_[index].work;
  }
  bool advance(const HookBucket& bucket, Runtime&, const Stream& stream) override {
    wire_->finish(running_[static_cast<std::size_t>(bucket.index)], bucket.gradients, stream);
    return false;
  }

 private:
  std::string name_;
  WireFormat format_;
  std::optional<GradientWire> wire_;
  std::vector<GradientWire::Reduction> running_;  // by bucket
};

std::shared_ptr<CommunicationHook> compressed(const char* name, DType type) {
  return std::make_shared<WireHook>(name,
                                    WireFormat{.communication_data_type = type, .prescale_gradients = true});
}

}  // namespace

std::shared_ptr<CommunicationHook> make_fp16_compress_hook() {
  return compressed("fp16_compress", DType::f16);
}
std::shared_ptr<CommunicationHook> make_bf16_compress_hook() {
  return compressed("bf16_compress", DType::bf16);
}

}  // namespace rz
