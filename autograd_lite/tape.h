#pragma once
/// Reverse-mode automatic differentiation over a recorded list of operators.
///
/// A tape runs one forward and one backward pass, then reset(). It keeps its memory: from the third identical
/// pass on nothing is allocated (tensor/pool.h specifies what is kept if passes differ). Not thread-safe.

#include <cstdint>
#include <initializer_list>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "../tensor/pool.h"
#include "../tensor/tensor.h"
#include "parameter.h"

namespace rz::ops {
struct DropoutMask;
}

namespace rz {

class Tape;

/// Handle of a value on a tape. Cheap to copy; valid until Tape::reset(). A default Var means "none", e.g. no
/// bias.
struct Var {
  int index = -1;
  std::uint32_t pass = 0;  ///< the recording to which it belongs
  Tape* tape = nullptr;    ///< for a + b and the like (autograd_lite/element_ops.h)
  bool defined() const { return index >= 0; }
};

class Tape {
 public:
  /// Allocates from a new pool on the stream's device.
  explicit Tape(const Stream& stream = {});
  Tape(Stream stream, BufferPool pool);
  ~Tape();
  Tape(const Tape&) = delete;
  Tape& operator=(const Tape&) = delete;

  const Stream& stream() const;
  BufferPool& pool();

  /// An uninitialized tensor from the pool.
  Tensor empty(const Shape&, DType = DType::f32);

  // ---- leaves
  /// A leaf without a gradient.
  Var constant(Tensor);
  /// A leaf whose gradient grad() returns after backward().
  Var variable(Tensor);
  /// A leaf whose gradient accumulates in Parameter::grad.
  Var parameter(Parameter&);

  /// A parameter's current value, or the recorded tensor. The reference is valid until the next value is
  /// recorded. Backward frees the outputs of operators, except the loss; reading one afterwards is
  /// Errc::invalid_argument.
  const Tensor& value(Var) const;
  bool needs_grad(Var) const;

  // ---- recording, for operators
  /// Appends an operator. `backward(tape, d_out)` runs at most once, if a gradient reaches the output. It
  /// captures by value, is stored in the tape's own memory (no heap allocation), and propagates gradients
  /// with the functions below. It must not write to d_out, which may be shared.
  template <class F>
  Var record(Tensor output, std::initializer_list<Var> inputs, F backward);
  /// The same for any number of inputs, which `backward(tape, d_out, inputs)` receives.
  template <class F>
  Var record(Tensor output, std::span<const Var> inputs, F backward);

  /// In backward: the memory for an input's gradient, and whether to overwrite it or add to it. For a
  /// parameter it is Parameter::grad. Write it before the next call for the same input.
  struct GradTarget {
    Tensor tensor;  ///< undefined: no gradient needed
    bool accumulate = false;
  };
  GradTarget grad_target(Var);
  /// A tensor in the dtype of a gradient, which may be f32 for a parameter in 16 bits.
  Tensor converted_for(const GradTarget&, const Tensor&);
  /// Writes a tensor of any dtype to a target, or adds it.
  void write_grad(const GradTarget&, const Tensor&);
  /// In backward: uses a tensor as an input's gradient, possibly without a copy, or adds it to the existing
  /// gradient.
  void accumulate_grad(Var, Tensor);
  /// In backward: the gradient of another operator's output, which then does not run, as if it had none;
  /// undefined if it has none. Complete if that operator was recorded immediately before the caller, as one
  /// of several that share their backward.
  Tensor take_grad(Var output);
  /// True if the value is a parameter's memory, which may be moved or released outside the parameter's
  /// scopes: backward must read value() again, and objects that outlive forward must not keep the tensor.
  bool is_parameter_memory(Var) const;
  /// Declares that `output` is `input`, a parameter's memory, in another shape or dtype. value() recreates it
  /// on demand. A view in another dtype is a copy, which is kept while the parameter has memory.
  void mark_view(Var output, Var input);
  /// Declares that backward of the operator recorded last, whose output this is, calls run_deferred() beside
  /// something that it waits for, such as a sum over ranks.
  void mark_overlaps(Var output);
  /// In backward: whether the operator that runs next has the output `input` and was marked so.
  bool can_defer(Var input) const;
  /// If can_defer(): f(tape) runs within the next operator, or after it, before any other; the gradients of
  /// the caller's parameters are complete then. As record() stores it. Once in an operator.
  template <class F>
  void defer(F f);
  /// Runs what the operator before has deferred; nothing if there is nothing.
  void run_deferred();
  /// In backward: true if the input is an operator's output and only the tape and one copy captured by the
  /// calling operator refer to its memory. A gradient may then overwrite it.
  bool can_reuse(Var) const;

  // ---- autocast
  /// The dtype, f16 or bf16, in which nn::linear, linear_gelu, matmul and attention compute, as with
  /// torch.autocast; none (the default): operators compute in the dtype of their inputs. See
  /// autograd_lite/ops.h. Holds for the recomputation of a checkpoint() that began with it. Applies until it
  /// is set again; Errc::invalid_argument for another dtype.
  void set_autocast(std::optional<DType>);
  std::optional<DType> autocast() const;
  /// Sets autocast() during its lifetime.
  class Autocast {
   public:
    Autocast(Tape& tape, std::optional<DType> dtype) : tape_(tape), before_(tape.autocast()) {
      tape.set_autocast(dtype);
    }
    ~Autocast() { tape_.restore_autocast(before_); }
    Autocast(const Autocast&) = delete;

   private:
    Tape& tape_;
    std::optional<DType> before_;
  };
  /// For operators: the cast of this parameter to `dtype` that cache_cast() has kept since the innermost
  /// scope was entered, so that each scope casts a parameter once, and its gradient is complete when backward
  /// leaves the scope. Undefined if there is none, or none with the gradient that is needed here.
  /// set_autocast() forgets those of the scope.
  Var cached_cast(Var parameter, DType) const;
  void cache_cast(Var parameter, Var cast);

  // ---- structure
  /// Returns body() with the scope's parameters available, both now and around the backward of the operators
  /// that it records.
  template <class F>
  auto scope(const Scope&, const F& body);
  /// Whether the scope was entered and not yet left.
  bool is_open(const Scope&) const;
  /// Whether a scope of the parameter is open.
  bool is_open(const Parameter&) const;
  /// Like scope(), but keeps only `input` and runs body(input) -> Var again in backward; its inner scopes are
  /// then entered as in forward (Chen et al., arXiv:1604.06174). `body` is stored in the tape's own memory
  /// and must capture by value everything that does not outlive backward(). Handles made in `body`, except
  /// its result, become invalid when it returns.
  template <class F>
  Var checkpoint(const Scope&, Var input, F body);
  /// Disables recording during its lifetime.
  class NoGrad {
   public:
    explicit NoGrad(Tape& tape);
    ~NoGrad();
    NoGrad(const NoGrad&) = delete;

   private:
    Tape& tape_;
    bool before_;
  };

  /// False while a NoGrad lives, as torch.is_grad_enabled(). True in a checkpoint(), which records later.
  bool is_grad_enabled() const;

  // ---- profiles
  /// What operators have computed.
  struct Cost {
    /// Multiply-accumulates, two floating-point operations each, of products, convolutions and attention.
    /// What backward computes again, such as the scores of attention or a checkpoint(), is in those of
    /// backward.
    std::uint64_t forward_macs = 0, backward_macs = 0;
    double forward_seconds = 0, backward_seconds = 0;
    bool operator==(const Cost&) const = default;
  };
  /// Costs by the name of a scope, or of a module of it whose weight an operator has multiplied; "": outside
  /// of scopes. None includes another. Times are those of scopes, with the hooks of their parameters.
  using Profile = std::map<std::string, Cost>;
  /// Adds the costs of operators to a profile from now on, except while a NoGrad lives; null: nothing is
  /// measured. On a device scopes then wait for the stream, at their begin and end: such a pass cannot be
  /// captured.
  void set_profile(Profile*);
  /// Whether they are added now.
  bool profiles() const;
  /// For operators, forward and backward: multiply-accumulates with a weight, or without one. Nothing without
  /// a profile.
  void count_macs(std::uint64_t, Var weight = {});

  // ---- running
  /// Computes the gradients of `factor` · loss, a scalar, into parameters and variables. Once per recording;
  /// Errc::invalid_argument otherwise. Parameters that were not used are not changed.
  void backward(Var loss, float factor = 1);
  /// The same with the factor in f32 memory of the stream's device, for runs of a captured graph. It must
  /// keep its value until the pass has run.
  void backward(Var loss, Tensor factor);
  /// The gradient of a variable(); undefined before backward().
  Tensor grad(Var) const;
  /// Discards the recording. Handles become invalid; memory returns to the pool.
  void reset();

  /// Seed of the counter-based generator for dropout, to be set per micro-batch. Every dropout of a pass uses
  /// a range of its own; a recomputed scope uses the same ranges again.
  void seed(std::uint64_t);
  /// Reads the seed from memory of the stream's device when a dropout runs, forward or backward, so that each
  /// run of a captured graph may use a new seed.
  void seed_at(const std::uint64_t*);
  /// Parameters of a dropout of `count` elements; consumes their random numbers. Of a tensor that is divided
  /// into equal parts, `run` elements of each part after the other, it is the mask of one part, and consumes
  /// the random numbers of all: the masks of all parts are those of the whole tensor.
  ops::DropoutMask next_dropout_mask(float p, std::uint64_t count, RankOf part = {}, std::uint64_t run = 0);
  std::uint64_t next_random_range(std::uint64_t count);  ///< start of a new range of `count` random numbers

 private:
  struct State;
  /// A captured backward function, type-erased.
  struct Captured {
    void* object;
    void (*run)(void*, Tape&, const Tensor&);
    void (*destroy)(void*);
  };
  /// State of the first run of a recomputed scope.
  struct CheckpointForward {
    const Scope* scope;
    std::size_t values;
    std::uint64_t random;
  };
  /// State of its second run, in backward.
  struct CheckpointBackward {
    const Scope* scope;
    std::size_t values, nodes;
    std::uint64_t random;
    std::optional<DType> autocast;
  };

  void* allocate(std::size_t bytes, std::size_t alignment);
  template <class F>
  Captured capture(F);
  void set_deferred(const Captured&);
  bool needs_node(std::span<const Var>) const;
  Var add_value(Tensor output);
  /// A copy in the memory of the node that is added next.
  std::span<const Var> keep(std::span<const Var>);
  /// `inputs` are kept.
  Var add_node(Tensor output, std::span<const Var> inputs, const Captured&);
  void open_scope(const Scope&);
  void close_scope(const Scope&);
  CheckpointForward begin_checkpoint_forward(const Scope&);
  /// Ends the first run. Returns the result, the only value that is kept, and in `inputs` the parameters that
  /// it used.
  Tensor end_checkpoint_forward(const CheckpointForward&, Var result, Var input, std::vector<Var>& inputs);
  std::vector<Var>& checkpoint_inputs();
  CheckpointBackward begin_checkpoint_backward(const Scope&, std::uint64_t random,
                                               std::optional<DType> autocast);
  void end_checkpoint_backward(const CheckpointBackward&, Var result, const Tensor& d_out);
  void restore_autocast(std::optional<DType>);
  void run_backward(std::size_t down_to);
  void run_node(int output, const Captured&);

  std::unique_ptr<State> state_;
};

// ---- templates

template <class F>
Tape::Captured Tape::capture(F f) {
  return {new (allocate(sizeof(F), alignof(F))) F(std::move(f)),
          [](void* object, Tape& tape, const Tensor& d_out) { (*static_cast<F*>(object))(tape, d_out); },
          [](void* object) { static_cast<F*>(object)->~F(); }};
}

template <class F>
void Tape::defer(F f) {
  set_deferred(capture([f = std::move(f)](Tape& tape, const Tensor&) { f(tape); }));
}

template <class F>
Var Tape::record(Tensor output, std::initializer_list<Var> inputs, F backward) {
  const std::span<const Var> all(inputs.begin(), inputs.size());
  if (!needs_node(all)) return add_value(std::move(output));
  return add_node(std::move(output), keep(all), capture(std::move(backward)));
}

template <class F>
Var Tape::record(Tensor output, std::span<const Var> inputs, F backward) {
  if (!needs_node(inputs)) return add_value(std::move(output));
  const std::span<const Var> kept = keep(inputs);
  return add_node(std::move(output), kept,
                  capture([kept, backward = std::move(backward)](Tape& tape, const Tensor& d_out) mutable {
                    backward(tape, d_out, kept);
                  }));
}

template <class F>
auto Tape::scope(const Scope& scope, const F& body) {
  open_scope(scope);
  auto result = body();
  close_scope(scope);
  return result;
}

template <class F>
Var Tape::checkpoint(const Scope& scope, Var input, F body) {
  const CheckpointForward first_run = begin_checkpoint_forward(scope);
  const Var result = body(input);
  std::vector<Var>& inputs = checkpoint_inputs();
  Tensor output = end_checkpoint_forward(first_run, result, input, inputs);
  if (!needs_node(inputs)) return add_value(std::move(output));
  auto again = [&scope, input, random = first_run.random, autocast = autocast(), body = std::move(body)](
                   Tape& tape, const Tensor& d_out) mutable {
    const CheckpointBackward second_run = tape.begin_checkpoint_backward(scope, random, autocast);
    const Var second = body(input);
    tape.end_checkpoint_backward(second_run, second, d_out);
  };
  return add_node(std::move(output), keep(inputs), capture(std::move(again)));
}

}  // namespace rz
