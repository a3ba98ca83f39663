#pragma once
/// Base of optimizers that update each element by itself.

#include "sharding/optim/grouped_optimizer.h"
#include "sharding/optim/update_elements.h"

namespace rz {

/// A derived class computes the constants of its rule; Factors is their layout in tensor/kernels.
template <class Options, class Factors>
class ElementOptimizer : public GroupedOptimizer<Options> {
 public:
  std::vector<std::byte> constants(std::int64_t missed) const final {
    const auto all = all_factors({.missed = missed});
    const auto bytes = std::as_bytes(std::span(all));
    return {bytes.begin(), bytes.end()};
  }
  void update(std::span<const UpdateSpan> spans, const UpdateScale& scale, const Stream& stream) const final {
    if (stream.device().kind == Device::cuda)
      update_on_device(spans, ops::device_ops().optimizer.*on_device_, all_factors(scale), scale, stream);
    else
      update_on_host(
          spans, on_host_, [&](int group) { return factors_at(group, scale); }, stream);
  }

 protected:
  using OnHost = void (*)(const kernels::UpdateRun&, const Factors&);
  using OnDevice = void (*ops::DeviceOptimizer::*)(std::span<const kernels::UpdateRun>,
                                                   std::span<const Factors>, const ops::StepInputs&,
                                                   const Stream&);

  ElementOptimizer(const ParameterGroups<Options>& groups, OnHost on_host, OnDevice on_device)
      : GroupedOptimizer<Options>(groups), on_host_(on_host), on_device_(on_device) {}

  /// The constants of a group with a rate for update number t, from 1. Their `scale` is sign_of().
  virtual Factors factors(const Options&, double learning_rate, double t) const = 0;

 private:
  Factors factors_at(int group, const UpdateScale& scale) const {
    const auto t = static_cast<double>(this->updates() - scale.missed);
    Factors f = factors(this->options(group), this->learning_rate(group), t);
    f.scale *= scale.factor;
    return f;
  }
  std::vector<Factors> all_factors(const UpdateScale& scale) const {
    std::vector<Factors> all;
    for (int g = 0; g < this->groups(); ++g) all.push_back(factors_at(g, scale));
    return all;
  }

  const OnHost on_host_;
  const OnDevice on_device_;
};

}  // namespace rz
