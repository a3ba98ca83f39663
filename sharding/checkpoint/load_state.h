#pragma once
/// Reading of a checkpoint into a model and its optimizer, whatever ranks and strategy wrote it.

#include <cstdint>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "autograd_lite/nn/module.h"
#include "comm/device/stream.h"
#include "sharding/checkpoint/tensor_source.h"
#include "sharding/optim/optimizer.h"
#include "sharding/strategy/strategy.h"

namespace rz {

struct StateLoaderOptions {
  /// Every tensor of the model and of its optimizer is in the checkpoint, and the reverse except for states
  /// that the optimizer has not (changed_states()). Else what is not in the checkpoint gets initial values,
  /// and a parameter that lacks a state has initial ones of all. StateSpec::substitute holds in both cases.
  bool strict = true;
  std::uint64_t seed = 0;  ///< of initial values
  /// The checkpoint was saved without parameters that were not trained. Those of the module that it lacks
  /// keep their values, and are not missing.
  bool without_frozen = false;
};

/// Reads what this rank holds, one slice at a time.
class StateLoader {
 public:
  /// Compares the checkpoint, CheckpointReader::tensors(TensorPart::all), with the model, and with the states
  /// of `optimizer` unless it is null. Nothing is read. Errc::config lists what does not fit, in one line. A
  /// checkpoint from before the first update has no states. All references must outlive this object.
  StateLoader(TensorSource, Module&, const Optimizer*, const StateLoaderOptions& = {});

  /// Names of parameters with a state that the checkpoint lacks: for the optimizer they are new.
  std::vector<std::string> without_states() const;
  /// Names of parameters and buffers that the checkpoint lacks.
  std::vector<std::string> missing() const;
  /// Names of parameters and buffers that the model lacks.
  std::vector<std::string> unexpected() const;
  /// What loading does with states that only one of checkpoint and optimizer has, as "optimizer/STATE:
  /// absent, now …"; empty if there are none.
  std::string changed_states() const;
  /// Every rank calls it, with the same checkpoint; not collective.
  void load(Strategy&, const Stream&);

 private:
  using Problems = std::vector<std::string>;

  void match_model(Problems& problems) const;
  void match_optimizer(Problems& problems) const;
  void match_names(Problems& problems) const;
  void require_some() const;
  template <class T>
  void match(const std::string& tensor, const T& expected, Problems& problems) const;
  bool is_left_out(const std::string& name, const Parameter&) const;
  bool has_optimizer() const;
  bool has_states(const std::string& name, const Parameter&) const;
  std::string stored_state(const StateSpec&, const std::string& name) const;
  std::string state_in(const std::string& tensor) const;
  std::set<std::string> known_states() const;

  void load_values(Strategy&);
  void load_optimizer(Strategy&);
  void load_buffers(const Stream&);

  TensorSource tensors_;
  const Optimizer* optimizer_;
  StateLoaderOptions options_;
  std::vector<std::pair<std::string, Parameter*>> parameters_;
  std::vector<std::pair<std::string, ModuleBuffer*>> buffers_;
};

}  // namespace rz
