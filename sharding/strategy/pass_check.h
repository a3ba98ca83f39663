#pragma once
/// Rules about the gradients that a pass computes.

#include <cstdint>
#include <span>
#include <vector>

#include "comm/communicator.h"
#include "sharding/model/model_parameters.h"

namespace rz {

/// StrategyOptions of the same names.
struct PassRules {
  bool find_unused_parameters = true;
  bool static_graph = false;
};

/// Follows the gradients of this rank's passes. A rank without data breaks no rule. `used`: by member,
/// whether this rank has computed its gradient since zero_grad(). Not thread-safe.
class PassCheck {
 public:
  /// The parameters must outlive this object.
  PassCheck(const PassRules&, const ModelParameters&);

  void begin_pass();
  /// The gradient of a member is complete, in a pass that synchronises.
  void ready(int member) { order_.push_back(member); }
  /// This rank has no data for the pass.
  void set_without_data() { without_data_ = true; }
  bool without_data() const { return without_data_; }

  /// Whether this rank's pass breaks a rule.
  bool is_broken(std::span<const std::uint8_t> used) const;
  /// Throws the same error on all ranks; call it on all if one breaks a rule. Errc::invalid_argument names
  /// the parameters without a gradient and their ranks; Errc::mismatch the parameter and the rank that left
  /// the static graph, its culprit. Collective.
  [[noreturn]] void fail(std::span<const std::uint8_t> used, Communicator&) const;

  /// Whether the graph is to be recorded: after the first update with static_graph.
  bool records() const { return rules_.static_graph && !recorded_; }
  /// Makes the last pass the graph. `anywhere`: by member, whether any rank has used it.
  void record(std::span<const std::uint8_t> used, std::span<const std::uint8_t> anywhere);
  /// False for a member that no rank uses in the static graph.
  bool may_be_used(int member) const { return !recorded_ || anywhere_[static_cast<std::size_t>(member)]; }

 private:
  /// How a rank's pass breaks a rule; four words on the wire.
  struct Finding {
    enum Kind : std::int32_t { none, unused, added, missing, reordered };
    std::int32_t kind = none, member = 0, expected = 0, position = 0;
  };
  Finding find(std::span<const std::uint8_t> used) const;
  Finding difference(std::span<const std::uint8_t> used) const;
  [[noreturn]] void fail_static(const Finding&, int rank) const;
  [[noreturn]] void fail_unused(std::span<const std::uint8_t> used, Communicator&) const;

  PassRules rules_;
  const ModelParameters& parameters_;
  std::vector<int> order_;  // members of the last pass, as they became ready
  bool without_data_ = false, recorded_ = false;
  // The static graph: order_ and `used` of this rank, empty if it had no data, and what any rank used.
  std::vector<int> static_order_;
  std::vector<std::uint8_t> static_used_, anywhere_;
};

}  // namespace rz
