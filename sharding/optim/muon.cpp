#include <algorithm>
#include <cctype>
#include <cmath>

#include "sharding/optim/newton_schulz.h"
#include "sharding/optim/optimizer_rules.h"
#include "sharding/optim/optimizers.h"
#include "tensor/ops.h"

namespace rz {

namespace {

void check_muon(const MuonOptions& o) {
  require_not_negative("muon", "learning_rate", o.learning_rate);
  require_not_negative("muon", "weight_decay", o.weight_decay);
  require_moment("muon", "momentum", o.momentum);
  require(o.ns_steps > 0, Errc::invalid_argument, "muon: ns_steps = ", o.ns_steps, " must be above 0");
}

/// The rule of matrices: momentum, orthogonalized, then a decayed step. Groups are those of the optimizer
/// from 0 on.
class MatrixRule {
 public:
  explicit MatrixRule(const ParameterGroups<MuonOptions>& groups) {
    for (const auto& g : groups.list) check_muon(g.options), options_.push_back(g.options);
  }

  int groups() const { return static_cast<int>(options_.size()); }
  const MuonOptions& options(int group) const { return options_[static_cast<std::size_t>(group)]; }
  std::string describe(int group, double rate) const {
    const MuonOptions& o = options(group);
    return concat("learning_rate ", all_digits(rate), ", momentum ", all_digits(o.momentum),
                  o.nesterov ? " (nesterov)" : "", ", weight_decay ", all_digits(o.weight_decay),
                  ", ns_steps ", o.ns_steps);
  }

  void direct(std::span<const UpdateSpan> spans, UpdateScale scale, const Stream& stream) const {
    if (stream.device().kind == Device::cuda) return direct_on_device(spans, scale, stream);
    for (const UpdateSpan& s : spans) {
      const kernels::MuonFactors f = direction(s.group, scale);
      const kernels::UpdateRun run = run_of(s);
      stream.parallel_for(s.count, host_grain, [&](std::size_t begin, std::size_t end) {
        kernels::muon_direction(kernels::part_of(run, begin, end), f, s.direction + begin);
      });
    }
  }
  void orthogonalize(const Tensor& direction, int group, const Workspace& workspace,
                     const Stream& stream) const {
    newton_schulz(direction, options(group).ns_steps, workspace, stream);
    const auto rows = static_cast<double>(direction.shape()[0]),
               columns = static_cast<double>(direction.shape()[1]);
    if (rows > columns)
      ops::scale(direction, direction, static_cast<float>(std::sqrt(rows / columns)), stream);
  }

  kernels::DecayedStepFactors step(int group, double rate) const {
    return {.keep = static_cast<float>(1 - rate * options(group).weight_decay),
            .rate = static_cast<float>(rate),
            .scale = 1};
  }

 private:
  kernels::MuonFactors direction(int group, const UpdateScale& scale) const {
    const MuonOptions& o = options(group);
    return {.beta = static_cast<float>(o.momentum),
            .rest = static_cast<float>(1 - o.momentum),
            .scale = scale.factor,
            .nesterov = o.nesterov};
  }
  void direct_on_device(std::span<const UpdateSpan> spans, UpdateScale scale, const Stream& stream) const {
    std::vector<UpdateSpan> own(spans.begin(), spans.end());
    for (UpdateSpan& s : own) s.value = s.direction, s.working = nullptr;
    std::vector<kernels::MuonFactors> factors;
    for (int g = 0; g < groups(); ++g) factors.push_back(direction(g, scale));
    scale.constants = nullptr;
    update_on_device(own, ops::device_ops().optimizer.muon_direction, factors, scale, stream);
  }

  std::vector<MuonOptions> options_;
};

/// Matrices by their rule, in the first groups, and the rest by AdamW.
class Muon final : public Optimizer {
 public:
  Muon(const ParameterGroups<MuonOptions>& matrices, const ParameterGroups<AdamOptions>& rest)
      : Optimizer(heads_of(matrices, rest)), matrices_(matrices) {
    for (const auto& g : rest.list) {
      check_adam("muon", g.options);
      require(!g.options.maximize, Errc::invalid_argument, "muon: maximize of the group \"", g.name,
              "\": its matrices minimize the loss; negate the loss to maximize it");
      rest_.push_back(g.options);
    }
  }

  const char* name() const override { return "muon"; }
  std::vector<StateSpec> states(int group) const override {
    if (is_matrix_group(group)) return {{.name = "momentum_buffer"}};
    return adam_states(rest(group));
  }
  Grain grain(int group) const override { return is_matrix_group(group) ? Grain::matrix : Grain::element; }
  /// The constants of updates of matrices, then those of the other groups. Directions depend on options
  /// alone.
  std::vector<std::byte> constants(std::int64_t missed) const override {
    std::vector<std::byte> out = bytes_of(all_steps());
    const std::vector<std::byte> more = bytes_of(all_adams({.missed = missed}));
    out.insert(out.end(), more.begin(), more.end());
    return out;
  }

  void direct(std::span<const UpdateSpan> spans, const UpdateScale& scale,
              const Stream& stream) const override {
    matrices_.direct(spans, scale, stream);
  }
  void orthogonalize(const Tensor& direction, int group, const Workspace& workspace,
                     const Stream& stream) const override {
    matrices_.orthogonalize(direction, group, workspace, stream);
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
          one, kernels::decayed_step, [&](int g) { return matrices_.step(g, learning_rate(g)); }, stream);
    }
  }

 protected:
  std::string describe_group(int group) const override {
    return is_matrix_group(group) ? matrices_.describe(group, learning_rate(group))
                                  : describe_adam(rest(group), learning_rate(group));
  }

 private:
  static std::vector<Group> heads_of(const ParameterGroups<MuonOptions>& matrices,
                                     const ParameterGroups<AdamOptions>& rest) {
    std::vector<Group> heads = Optimizer::heads_of(matrices);
    for (Group& g : Optimizer::heads_of(rest)) heads.push_back(std::move(g));
    return heads;
  }

  bool is_matrix_group(int group) const { return group < matrices_.groups(); }
  const AdamOptions& rest(int group) const {
    return rest_[static_cast<std::size_t>(group - matrices_.groups())];
  }
  kernels::AdamFactors adam_at(int group, const UpdateScale& scale) const {
    const auto t = static_cast<double>(updates() - scale.missed);
    kernels::AdamFactors f = adam_factors(rest(group), true, learning_rate(group), t);
    f.scale *= scale.factor;
    return f;
  }
  std::vector<kernels::DecayedStepFactors> all_steps() const {
    std::vector<kernels::DecayedStepFactors> all;
    for (int g = 0; g < matrices_.groups(); ++g) all.push_back(matrices_.step(g, learning_rate(g)));
    return all;
  }
  std::vector<kernels::AdamFactors> all_adams(const UpdateScale& scale) const {
    std::vector<kernels::AdamFactors> all;
    for (int g = matrices_.groups(); g < groups(); ++g) all.push_back(adam_at(g, scale));
    return all;
  }

  void step_on_device(std::span<const UpdateSpan> spans, const UpdateScale& scale,
                      const Stream& stream) const {
    const ops::DeviceOptimizer& kernels = ops::device_ops().optimizer;
    std::vector<UpdateSpan> matrices;
    for (UpdateSpan s : spans) {
      if (!is_matrix_group(s.group)) continue;
      s.gradient = s.direction, s.gradient_dtype = DType::f32;
      matrices.push_back(s);
    }
    // Directions are scaled already; a skipped update skips them, too.
    const auto unscaled = [&](auto runs, auto some, ops::StepInputs inputs, const Stream& on) {
      inputs.grad_scale = nullptr;
      kernels.decayed_step(runs, some, inputs, on);
    };
    const auto steps = all_steps();
    update_on_device(matrices, unscaled, steps, scale, stream);
    UpdateScale of_rest = scale;
    if (scale.constants)
      of_rest.constants = static_cast<const std::byte*>(scale.constants) + steps.size() * sizeof(steps[0]);
    update_on_device(spans, kernels.adam, all_adams(of_rest), of_rest, stream, matrices_.groups());
  }

  MatrixRule matrices_;
  std::vector<AdamOptions> rest_;
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
