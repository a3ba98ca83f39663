#include <algorithm>
#include <cctype>
#include <cmath>

#include "sharding/optim/adam_rule.h"
#include "sharding/optim/newton_schulz.h"
#include "sharding/optim/optimizers.h"
#include "sharding/optim/update_elements.h"
#include "tensor/ops.h"

namespace rz {

namespace {

void check_muon(const MuonOptions& o) {
  require_not_negative("muon", "learning_rate", o.learning_rate);
  require_not_negative("muon", "weight_decay", o.weight_decay);
  require_moment("muon", "momentum", o.momentum);
  require(o.ns_steps > 0, Errc::invalid_argument, "muon: ns_steps = ", o.ns_steps, " must be above 0");
}

/// The groups of matrices come first.
class Muon final : public Optimizer {
 public:
  Muon(const ParameterGroups<MuonOptions>& matrices, const ParameterGroups<AdamOptions>& rest)
      : Optimizer(heads_of(matrices, rest)) {
    for (const auto& g : matrices.list) check_muon(g.options), muon_.push_back(g.options);
    for (const auto& g : rest.list) {
      check_adam("muon", g.options);
      require(!g.options.maximize, Errc::invalid_argument, "muon: maximize of the group \"", g.name,
              "\": its matrices minimize the loss; negate the loss to maximize it");
      adam_.push_back(g.options);
    }
  }

  const char* name() const override { return "muon"; }
  std::vector<StateSpec> states(int group) const override {
    if (is_matrix_group(group)) return {{.name = "momentum_buffer"}};
    return adam_states(adam(group));
  }
  Grain grain(int group) const override { return is_matrix_group(group) ? Grain::matrix : Grain::element; }
  /// Those of updates of matrices, then those of the other groups. Directions depend on options alone.
  std::vector<std::byte> constants(std::int64_t missed) const override {
    const auto steps = all_steps();
    const auto adams = all_adams({.missed = missed});
    const auto first = std::as_bytes(std::span(steps)), second = std::as_bytes(std::span(adams));
    std::vector<std::byte> out(first.begin(), first.end());
    out.insert(out.end(), second.begin(), second.end());
    return out;
  }

  void direct(std::span<const UpdateSpan> spans, const UpdateScale& scale,
              const Stream& stream) const override {
    if (stream.device().kind == Device::cuda) return direct_on_device(spans, scale, stream);
    for (const UpdateSpan& s : spans) {
      const kernels::MuonFactors f = direction_at(s.group, scale);
      const kernels::UpdateRun run = run_of(s);
      stream.parallel_for(s.count, host_grain, [&](std::size_t begin, std::size_t end) {
        kernels::muon_direction(kernels::part_of(run, begin, end), f, s.direction + begin);
      });
    }
  }

  void orthogonalize(const Tensor& direction, int group, const Workspace& workspace,
                     const Stream& stream) const override {
    newton_schulz(direction, muon(group).ns_steps, workspace, stream);
    const auto rows = static_cast<double>(direction.shape()[0]),
               columns = static_cast<double>(direction.shape()[1]);
    if (rows > columns)
      ops::scale(direction, direction, static_cast<float>(std::sqrt(rows / columns)), stream);
  }

  void update(std::span<const UpdateSpan> spans, const UpdateScale& scale,
              const Stream& stream) const override {
    if (stream.device().kind == Device::cuda) return step_on_device(spans, scale, stream);
    for (UpdateSpan s : spans) {
      const std::span<const UpdateSpan> one(&s, 1);
      if (!is_matrix_group(s.group)) {
        update_on_host(
            one, kernels::adam, [&](int g) { return adam_at(g, scale); }, stream);
        continue;
      }
      s.gradient = s.direction, s.gradient_dtype = DType::f32;
      update_on_host(
          one, kernels::decayed_step, [&](int g) { return step_at(g); }, stream);
    }
  }

 protected:
  std::string describe_group(int group) const override {
    if (!is_matrix_group(group)) return describe_adam(adam(group), learning_rate(group));
    const MuonOptions& o = muon(group);
    return concat("learning_rate ", all_digits(learning_rate(group)), ", momentum ", all_digits(o.momentum),
                  o.nesterov ? " (nesterov)" : "", ", weight_decay ", all_digits(o.weight_decay),
                  ", ns_steps ", o.ns_steps);
  }

 private:
  static std::vector<Group> heads_of(const ParameterGroups<MuonOptions>& matrices,
                                     const ParameterGroups<AdamOptions>& rest) {
    std::vector<Group> heads;
    for (const auto& g : matrices.list) heads.push_back({g.name, g.contains, g.options.learning_rate});
    for (const auto& g : rest.list) heads.push_back({g.name, g.contains, g.options.learning_rate});
    return heads;
  }

  bool is_matrix_group(int group) const { return static_cast<std::size_t>(group) < muon_.size(); }
  const MuonOptions& muon(int group) const { return muon_[static_cast<std::size_t>(group)]; }
  const AdamOptions& adam(int group) const { return adam_[static_cast<std::size_t>(group) - muon_.size()]; }

  kernels::MuonFactors direction_at(int group, const UpdateScale& scale) const {
    const MuonOptions& o = muon(group);
    return {.beta = static_cast<float>(o.momentum),
            .rest = static_cast<float>(1 - o.momentum),
            .scale = scale.factor,
            .nesterov = o.nesterov};
  }
  std::vector<kernels::DecayedStepFactors> all_steps() const {
    std::vector<kernels::DecayedStepFactors> all;
    for (std::size_t g = 0; g < muon_.size(); ++g) all.push_back(step_at(static_cast<int>(g)));
    return all;
  }
  std::vector<kernels::AdamFactors> all_adams(const UpdateScale& scale) const {
    std::vector<kernels::AdamFactors> all;
    for (int g = static_cast<int>(muon_.size()); g < groups(); ++g) all.push_back(adam_at(g, scale));
    return all;
  }

  void direct_on_device(std::span<const UpdateSpan> spans, UpdateScale scale, const Stream& stream) const {
    std::vector<UpdateSpan> own(spans.begin(), spans.end());
    for (UpdateSpan& s : own) s.value = s.direction, s.working = nullptr;
    std::vector<kernels::MuonFactors> factors;
    for (std::size_t g = 0; g < muon_.size(); ++g)
      factors.push_back(direction_at(static_cast<int>(g), scale));
    scale.constants = nullptr;
    update_on_device(own, ops::device_ops().optimizer.muon_direction, factors, scale, stream);
  }

  void step_on_device(std::span<const UpdateSpan> spans, const UpdateScale& scale,
                      const Stream& stream) const {
    const auto matrix_groups = static_cast<int>(muon_.size());
    std::vector<UpdateSpan> matrices, rest;
    for (UpdateSpan s : spans) {
      if (is_matrix_group(s.group)) {
        s.gradient = s.direction, s.gradient_dtype = DType::f32;
        matrices.push_back(s);
      } else {
        s.group -= matrix_groups;
        rest.push_back(s);
      }
    }
    const auto steps = all_steps();
    UpdateScale of_rest = scale;
    if (scale.constants)
      of_rest.constants = static_cast<const std::byte*>(scale.constants) + steps.size() * sizeof(steps[0]);
    const ops::DeviceOptimizer& kernels = ops::device_ops().optimizer;
    // Directions are scaled already; a skipped update skips them, too.
    const auto unscaled = [&](auto runs, auto some, ops::StepInputs inputs, const Stream& on) {
      inputs.grad_scale = nullptr;
      kernels.decayed_step(runs, some, inputs, on);
    };
    update_on_device(matrices, unscaled, steps, scale, stream);
    update_on_device(rest, kernels.adam, all_adams(of_rest), of_rest, stream);
  }

  kernels::AdamFactors adam_at(int group, const UpdateScale& scale) const {
    const auto t = static_cast<double>(updates() - scale.missed);
    kernels::AdamFactors f = adam_factors(adam(group), true, learning_rate(group), t);
    f.scale *= scale.factor;
    return f;
  }
  kernels::DecayedStepFactors step_at(int group) const {
    const double rate = learning_rate(group);
    return {.keep = static_cast<float>(1 - rate * muon(group).weight_decay),
            .rate = static_cast<float>(rate),
            .scale = 1};
  }

  std::vector<MuonOptions> muon_;
  std::vector<AdamOptions> adam_;
};

}  // namespace

bool is_muon_matrix(const Parameter& p) {
  std::string low = p.name;
  std::ranges::transform(low, low.begin(), [](unsigned char c) { return std::tolower(c); });
  return is_matrix(p) && low.find("embed") == std::string::npos && low.find("lm_head") == std::string::npos;
}

std::unique_ptr<Optimizer> make_muon(const MuonOptions& o, const AdamOptions& rest,
                                     ParameterFilter matrices) {
  return make_muon(ParameterGroups<MuonOptions>({{"muon", std::move(matrices), o}}),
                   ParameterGroups<AdamOptions>({{"adam", {}, rest}}));
}
std::unique_ptr<Optimizer> make_muon(const ParameterGroups<MuonOptions>& matrices,
                                     const ParameterGroups<AdamOptions>& rest) {
  return std::make_unique<Muon>(matrices, rest);
}

}  // namespace rz
