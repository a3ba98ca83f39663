#include "sharding/model/post_local_sgd.h"

#include <string>
#include <utility>
#include <vector>

#include "comm/core/error.h"

namespace rz {

namespace {

class PostLocalSgd final : public CommunicationHook {
 public:
  PostLocalSgd(const PostLocalSgdOptions& options, Communicator* subgroup)
      : options_(options), subgroup_(subgroup) {}

  std::string describe() const override {
    return concat("post_local_sgd, start_localSGD_iter ", options_.start_local_sgd_iter,
                  ", post_local_gradient_allreduce ", options_.post_local_gradient_allreduce);
  }
  void require_supported(DType, Device) const override {}
  /// Early and later passes differ.
  bool capturable() const override { return false; }
  Work start(const HookBucket& bucket, Runtime& runtime, const Stream& stream) override {
    if (bucket.index == 0) ++passes_;
    const auto index = static_cast<std::size_t>(bucket.index);
    if (index >= running_.size()) running_.resize(index + 1);
    return running_[index] = reduce(bucket.gradients, runtime, stream);
  }
  bool advance(const HookBucket& bucket, Runtime& runtime, const Stream&) override {
    runtime.exposed.wait(std::exchange(running_[static_cast<std::size_t>(bucket.index)], {}), runtime.stream);
    return false;
  }

 private:
  Work reduce(const Tensor& gradients, Runtime& runtime, const Stream& stream) {
    if (passes_ <= options_.start_local_sgd_iter) return runtime.all_reduce(gradients, ReduceOp::avg, stream);
    if (!subgroup_) return {};
    runtime.traffic.all_reduce.add(gradients.bytes());
    return subgroup_->all_reduce(gradients.buffer(), ReduceOp::avg, stream);
  }

  PostLocalSgdOptions options_;
  Communicator* subgroup_;  // null: each rank keeps its own gradients
  std::int64_t passes_ = 0;
  std::vector<Work> running_;  // by bucket
};

}  // namespace

std::shared_ptr<CommunicationHook> make_post_local_sgd_hook(const PostLocalSgdOptions& options,
                                                            Communicator* subgroup) {
  require(options.start_local_sgd_iter >= 0, Errc::invalid_argument,
          "post_local_sgd: start_localSGD_iter is ", options.start_local_sgd_iter, ", expected 0 or more");
  require(options.post_local_gradient_allreduce == (subgroup != nullptr), Errc::invalid_argument,
          "post_local_sgd: post_local_gradient_allreduce is ", options.post_local_gradient_allreduce,
          " with ", subgroup ? "a" : "no", " subgroup; give one if and only if the option is true");
  return std::make_shared<PostLocalSgd>(options, subgroup);
}

}  // namespace rz
