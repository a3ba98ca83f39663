#pragma once
/// Named trainable tensors, ranges of their elements, the scopes that use them, and callbacks by which their
/// owner follows a pass.

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "../comm/core/range.h"
#include "../comm/device/stream.h"
#include "../tensor/box.h"
#include "../tensor/tensor.h"

namespace rz {

class Module;
struct ParameterHooks;

/// Initial distribution of a parameter's elements; see autograd_lite/nn/init.h.
struct Initial {
  enum Kind { constant, normal, uniform };
  Kind kind = constant;
  /// The constant, the standard deviation of a normal distribution with mean 0, or the bound of uniform
  /// [-scale, scale).
  float scale = 0;
};

/// A parameter. Strategies replace its memory: `value` may be undefined outside the scopes that use it
/// (ZeRO-3), and `grad` may be a view of a bucket. Code that runs in backward must read `value` at that time
/// and must not keep a copy.
struct Parameter {
  Parameter() = default;
  /// Module::register_parameter(): a member, as in
  ///
  ///     rz::Parameter scale{*this, "scale", {64}, {rz::Initial::constant, 1}};
  Parameter(Module&, const std::string& name, const Shape&, const Initial& = {});

  std::string name;  ///< "transformer.h.0.attn.c_attn.weight"
  Shape shape;       ///< of the elements on this rank
  /// The part of the named tensor that has these elements; none: the whole. Set with set_part().
  std::optional<Box> part;
  Shape whole_shape;  ///< of the named tensor, if it is a part
  bool requires_grad = true;
  Tensor value;
  Tensor grad;
  /// True between zero_grad() and the first accumulation, which then overwrites `grad`. Gradients are never
  /// zero-filled.
  bool grad_is_fresh = true;
  Initial initial{};
  /// The file or folder whose values it has, as it was given to load_pretrained(), PretrainedWeights or
  /// load_checkpoint(); empty: initial ones, or the program's.
  std::string loaded_from{};
  ParameterHooks* hooks = nullptr;  ///< of its owner, not owned; null: none

  std::size_t count() const { return shape.count(); }
  /// Shape of the named tensor.
  Shape global_shape() const { return part ? whole_shape : shape; }
  /// Elements of the parameter as those of the named tensor.
  Box box() const { return part ? *part : Box::whole(extents(shape)); }
  /// Makes the parameter a part of a tensor. A shape of as many elements as those of the box's is that of the
  /// tensor, otherwise the box's; `local` is the shape of the part, otherwise the extents of the box. Call
  /// before it has memory. Errc::invalid_argument otherwise, unless the box lies within its shape, and unless
  /// `local` has its elements.
  void set_part(const Box& of, std::optional<Shape> local = {}) {
    require(!value.defined() && !grad.defined(), Errc::invalid_argument, "parameter ", name,
            " became a part after it got memory; set its part in the constructor of its module");
    require(of.is_valid(), Errc::invalid_argument, "parameter ", name, ": its part does not lie within ",
            rz::name(Shape(of.shape)));
    require(!local || local->count() == of.count(), Errc::invalid_argument, "parameter ", name,
            ": its part has ", of.count(), " elements, and its shape ", local ? local->count() : 0);
    whole_shape = shape.count() == Shape(of.shape).count() ? shape : Shape(of.shape);
    part = of;
    shape = local.value_or(Shape(of.extent));
  }
};

/// A range of the elements of a flat parameter.
struct ParameterElements {
  const Parameter* parameter;
  Range elements;
};

/// Writes `elements` of the flat parameter to out[0, elements.count()), in f32.
using FillParameter = std::function<void(const Parameter&, Range elements, float* out)>;

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
