#pragma once
/// Interface of update rules. An Optimizer holds hyperparameters and the number of updates. The strategy owns
/// the optimizer state (moments), for the elements that this rank updates only.

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "../../autograd_lite/parameter.h"
#include "../../comm/core/types.h"
#include "../../comm/device/stream.h"

namespace rz {

class ExactSum;
struct StepOutcome;

// ---- groups of parameters that an optimizer updates with options of their own

/// Returns whether a parameter belongs to a group.
using ParameterFilter = std::function<bool(const Parameter&)>;

template <class Options>
struct ParameterGroup {
  std::string name;
  ParameterFilter contains;  ///< empty: every parameter
  Options options;
};

/// Groups in the order in which they are tried: a parameter belongs to the first one that contains it.
template <class Options>
struct ParameterGroups {
  explicit ParameterGroups(std::vector<ParameterGroup<Options>> groups) : list(std::move(groups)) {}
  std::vector<ParameterGroup<Options>> list;
};

/// True for parameters of two or more dimensions.
inline bool is_matrix(const Parameter& p) { return p.shape.dims() >= 2; }

/// One group, as DeepSpeed makes it: weight decay acts on all parameters.
template <class Options>
ParameterGroups<Options> all_parameters(const Options& options) {
  return ParameterGroups<Options>({{"all", {}, options}});
}

/// Two groups, as recipes for GPT have it: "matrices" with weight decay, and "rest" (biases, norms) without.
template <class Options>
ParameterGroups<Options> matrices_and_rest(Options options) {
  const ParameterGroup<Options> matrices{"matrices", is_matrix, options};
  options.weight_decay = 0;
  return ParameterGroups<Options>({matrices, {"rest", {}, options}});
}

// ---- state and update

/// One value of state for each element of a parameter.
struct StateSpec {
  /// As in PyTorch: "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "sum", …
  std::string name;
  DType dtype = DType::f32;
  float initial = 0;  ///< value before the first update
  /// In a checkpoint that lacks this state, its values are those of the state of this name; empty: none.
  std::string substitute{};
  bool operator==(const StateSpec&) const = default;
};

/// What an update must know at once of a parameter.
enum class Grain {
  element,    ///< nothing but the element: update()
  parameter,  ///< norms of the whole parameter: measure(), then update()
  matrix      ///< the whole matrix: direct(), orthogonalize(), then update()
};

/// Squared L2 norms of a whole parameter.
struct SquaredNorms {
  double values = 0, updates = 0;
};

/// Sums of squares, two per member: of its values and of its updates.
struct NormSums {
  ExactSum* on_host = nullptr;
  std::int64_t* on_device = nullptr;  ///< ExactLayout::words each
};

/// Largest number of states.
inline constexpr std::size_t max_states = 3;

/// A run of elements of one group, with equal update settings. Gradients are means over the ranks, before
/// clipping.
struct UpdateSpan {
  float* value = nullptr;
  const void* gradient = nullptr;
  std::array<float*, max_states> state{};  ///< those of Optimizer::states() are set
  /// A multiple of 64; zero padding between parameters is updated too, and stays zero.
  std::size_t count = 0;
  int group = 0;                      ///< index of the parameter group
  int member = 0;                     ///< index of the parameter, which is the only one unless Grain::element
  float* direction = nullptr;         ///< Grain::matrix: from direct() and orthogonalize() to update()
  DType gradient_dtype = DType::f32;  ///< f32, f16 or bf16
  void* working = nullptr;            ///< 16-bit copy of the values, updated too; may be null
  DType working_dtype = DType::bf16;
};

/// How an update reads its gradients.
struct UpdateScale {
  float factor = 1;  ///< multiplies the gradients
  /// In device memory: replaces factor, and may skip the update.
  const StepOutcome* device_outcome = nullptr;
  /// In device memory: a result of constants(), replaces the current settings.
  const void* constants = nullptr;
  std::int64_t missed = 0;                     ///< earlier updates that skipped these elements
  std::span<const SquaredNorms> norms{};       ///< Grain::parameter: by member, for update()
  const SquaredNorms* device_norms = nullptr;  ///< on a device in place of norms
};

/// Allocates f32 memory for a part of an update.
using Workspace = std::function<Tensor(const Shape&)>;

/// Interface of update rules. The result for an element does not depend on how elements are split into spans,
/// so all strategies produce the same bits. Not thread-safe.
///
/// Learning rates may change from one update to the next, for each group. Updates in a device graph read them
/// from constants().
class Optimizer {
 public:
  virtual ~Optimizer() = default;

  /// "sgd", "adam", "adamw", "lion", "adagrad", "rmsprop", "lamb", "muon".
  virtual const char* name() const = 0;
  /// The states that the strategy keeps for the elements of a group.
  virtual std::vector<StateSpec> states(int group) const = 0;
  virtual Grain grain(int /*group*/) const { return Grain::element; }

  // ---- an update
  /// Grain::parameter: advances the state of the spans, and adds the squares of their values and updates to
  /// sums 2 · member and 2 · member + 1. Spans begin at multiples of norm_block of their parameter.
  virtual void measure(std::span<const UpdateSpan>, const UpdateScale&, const NormSums&, const Stream&) const;
  /// Grain::matrix: advances the state of the spans and writes their direction.
  virtual void direct(std::span<const UpdateSpan>, const UpdateScale&, const Stream&) const;
  /// Grain::matrix: replaces the direction of a whole parameter of a group, in the shape of the parameter.
  /// `workspace` allocates f32 memory on the device of the stream.
  virtual void orthogonalize(const Tensor& direction, int group, const Workspace& workspace,
                             const Stream&) const;
  /// Applies update number updates() - missed to the spans, with gradient · factor as the gradient. The spans
  /// are on the device of the stream, where all of them are one kernel launch for each 8 groups. State that
  /// would be subnormal becomes 0.
  virtual void update(std::span<const UpdateSpan>, const UpdateScale&, const Stream&) const = 0;
  /// The constants of all groups that differ from one update to the next, in the layout read by the device,
  /// for elements that missed `missed` earlier updates. Used by updates in a graph.
  virtual std::vector<std::byte> constants(std::int64_t missed) const = 0;

  /// The name and all options of each group, with all digits. Ranks with different descriptions would make
  /// different updates.
  std::string describe() const;

  /// Differs from that of every other optimizer of this process.
  std::uint64_t serial() const { return serial_; }

  // ---- groups
  int groups() const { return static_cast<int>(groups_.size()); }
  const std::string& group_name(int group) const { return at(group).name; }
  /// Index of the group to which a parameter belongs. Errc::invalid_argument names a parameter of no group.
  int group_of(const Parameter&) const;
  double learning_rate(int group = 0) const { return at(group).learning_rate; }
  /// Sets the rate of every group. Errc::invalid_argument unless the rate is finite in f32.
  void set_learning_rate(double rate);
  void set_learning_rate(int group, double rate);
  /// Whether the rule of a group has decay rates of two moments.
  virtual bool has_betas(int /*group*/) const { return false; }
  /// Zeros without betas.
  virtual std::array<double, 2> betas(int /*group*/) const { return {}; }
  /// Errc::unsupported without betas; Errc::invalid_argument unless both are in [0, 1).
  virtual void set_betas(int group, std::array<double, 2> betas);
  /// Whether the rule of a group has a momentum that is not 0, or betas: beta 1 is then the momentum.
  virtual bool has_momentum(int group) const { return has_betas(group); }
  /// Errc::unsupported without one; Errc::invalid_argument unless it is in [0, 1), and above 0 without betas.
  virtual void set_momentum(int group, double momentum);

  // ---- updates
  /// Counts an update; the strategy calls it once before update().
  void begin_update() { ++updates_; }
  std::int64_t updates() const { return updates_; }
  void set_updates(std::int64_t n) { updates_ = n; }  ///< of a checkpoint, or without one that was dropped

 protected:
  struct Group {
    std::string name;
    ParameterFilter contains;
    double learning_rate;
  };
  template <class Options>
  static std::vector<Group> heads_of(const ParameterGroups<Options>& groups) {
    std::vector<Group> heads;
    for (const auto& g : groups.list) heads.push_back({g.name, g.contains, g.options.learning_rate});
    return heads;
  }
  /// Errc::invalid_argument if there is no group, or two have the same name.
  explicit Optimizer(std::vector<Group>);
  /// The options of a group but its name, with all digits.
  virtual std::string describe_group(int group) const = 0;

 private:
  const Group& at(int group) const { return groups_[static_cast<std::size_t>(group)]; }

  const std::uint64_t serial_;
  std::vector<Group> groups_;
  std::int64_t updates_ = 0;
};

/// Errc::invalid_argument unless the value of an option is finite in f32, in which updates are computed.
void require_finite(const char* optimizer, const char* option, double value);

}  // namespace rz
