#pragma once
/// Callbacks by which the owner of parameters follows a pass.

#include <functional>
#include <string>
#include <vector>

#include "autograd_lite/parameter.h"
#include "comm/device/stream.h"

namespace rz {

/// Parameters that are used together, e.g. those of a transformer block: the unit that ZeRO-3 gathers. Must
/// live as long as its module.
struct Scope {
  std::string name;
  std::vector<Parameter*> parameters;
};

enum class Pass : bool { forward, backward };

/// Parameter::hooks points to the hooks of its owner, e.g. a strategy. So parameters of several owners may be
/// on one tape.
struct ParameterHooks {
  /// `enter` is called before the first operator of a scope that contains a parameter of these hooks runs (or
  /// runs backward), `leave` after the last one. `parameters[i]->value` must be defined in between. Scopes
  /// nest and may share parameters. A scope without operators that need a gradient is not entered in
  /// backward. If an operator throws, its scopes are not left.
  std::function<void(const Scope&, Pass)> enter, leave;
  /// Called before a parameter's gradient is first written in a backward pass. `grad` must be defined on
  /// return.
  std::function<void(Parameter&)> before_grad;
  /// Called when a parameter's gradient is complete: all its uses on this tape have run backward.
  std::function<void(Parameter&, const Stream&)> grad_ready;
  /// The owner, for messages: "a zero2 strategy".
  std::string owner;
};

}  // namespace rz
