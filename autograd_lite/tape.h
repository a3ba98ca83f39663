#pragma once
/// Reverse-mode differentiation over a recorded list of operators.
///
/// A tape is used for one forward and one backward pass, then reset; its memory is kept, so that from the
/// third identical pass on nothing is allocated (tensor/pool.h says how much is kept of passes that differ).
/// One thread at a time.

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "autograd_lite/parameter.h"
#include "comm/device/stream.h"
#include "tensor/pool.h"
#include "tensor/tensor.h"

namespace rz::ops {
struct DropoutMask;
}

namespace rz {

/// A value on a tape. A plain handle: cheap to copy, valid until Tape::reset(). A default one stands for
/// "none" (a layer without bias).
struct Var {
  int index = -1;
  std::uint32_t pass = 0;  ///< the recording it belongs to
  bool defined() const { return index >= 0; }
};

/// Parameters that are used together, e.g. a transformer block: the unit that ZeRO-3 gathers. Lives as long
/// as its module.
struct Scope {
  std::string name;
  std::vector<Parameter*> parameters;
};

enum class Pass : bool { forward, backward };

/// What a strategy wants to be told.
struct TapeHooks {
  /// Before the first operator of a scope runs (or runs backward), and after the last one.
  /// `parameters[i]->value` must be defined between the two. Scopes nest and may share parameters. A scope
  /// that recorded nothing that needs a gradient is not entered in backward. When an operator throws, the
  /// scopes it stood in are not left.
  std::function<void(const Scope&, Pass)> enter, leave;
  /// Before a gradient is first written in this backward pass: `grad` must be defined on return.
  std::function<void(Parameter&)> before_grad;
  /// The parameter's gradient is complete: all of its uses on this tape have run backward.
  std::function<void(Parameter&, const Stream&)> grad_ready;
  /// Whose hooks they are, for messages ("a zero2 strategy"), and what lives as long as their owner.
  std::string owner;
  std::weak_ptr<const void> alive;
};

class Tape {
 public:
  /// Memory comes from a pool of its own on the stream's device.
  explicit Tape(const Stream& stream = {});
  Tape(Stream stream, BufferPool pool);
  ~Tape();
  Tape(const Tape&) = delete;
  Tape& operator=(const Tape&) = delete;

  const Stream& stream() const;
  BufferPool& pool();
  /// Errc::invalid_argument while the owner of earlier hooks, another one, lives.
  void set_hooks(TapeHooks);

  /// Memory from the pool.
  Tensor empty(const Shape&, DType = DType::f32);

  // ---- leaves
  Var constant(Tensor);
  /// A leaf whose gradient can be read after backward().
  Var variable(Tensor);
  Var parameter(Parameter&);

  /// A parameter's current value, or the recorded tensor; the reference holds until the next value is made.
  /// Backward frees what operators recorded, except for the loss; reading it then is Errc::invalid_argument.
  const Tensor& value(Var) const;
  bool needs_grad(Var) const;

  // ---- recording, for operators
  /// Appends an operator. `backward(tape, d_out)` runs once, if a gradient reaches the output; it captures
  /// what it needs by value (it is stored in the tape's own memory: no heap allocation) and hands gradients
  /// on with the calls below. d_out may be shared with others: it is only read.
  template <class F>
  Var record(Tensor output, std::initializer_list<Var> inputs, F backward);

  /// In backward: where an input's gradient is to be written, and whether to overwrite or to add. For a
  /// parameter it is Parameter::grad. Each place must be written before the next call for the same input.
  struct GradTarget {
    Tensor tensor;  ///< undefined: not wanted
    bool accumulate = false;
  };
  GradTarget grad_target(Var);
  /// In backward: takes over a gradient that was computed anyway, or adds it to what is there.
  void accumulate_grad(Var, Tensor);
  /// Whether the value is a parameter's memory, which may be elsewhere, or gone, outside of the parameter's
  /// scopes: backward reads value() again, and nothing that outlives forward keeps it.
  bool is_parameter_memory(Var) const;
  /// `output` is `input`, a parameter's memory, in another shape: value() makes it anew where it is needed.
  void mark_view(Var output, Var input);
  /// In backward: true if the input is an operator's output whose memory nobody but the tape and the calling
  /// operator's one captured copy holds, so that a gradient may be written over it.
  bool can_reuse(Var) const;

  // ---- structure
  /// Runs body() -> Var with the scope's parameters in place, now and again around the backward of what it
  /// recorded.
  template <class F>
  Var scope(const Scope&, const F& body);
  /// Like scope(), but keeps only `input`: body(input) -> Var is run a second time in backward, as if its
  /// scopes inside were entered in forward (Chen et al., arXiv:1604.06174). `body` is stored in the tape's
  /// own memory and must capture by value what does not outlive backward(); apart from its result, handles
  /// made in it end with it.
  template <class F>
  Var checkpoint(const Scope&, Var input, F body);
  /// While it lives nothing is recorded.
  class NoGrad {
   public:
    explicit NoGrad(Tape& tape);
    ~NoGrad();
    NoGrad(const NoGrad&) = delete;

   private:
    Tape& tape_;
    bool before_;
  };

  // ---- running
  /// Gradients of `factor` · loss, a scalar, into parameters and variables. Once between resets. Parameters
  /// that require a gradient and were not used are left alone.
  void backward(Var loss, float factor = 1);
  /// Of a variable(); undefined before backward.
  Tensor grad(Var) const;
  /// Forgets the recording. Handles become invalid, memory goes back to the pool.
  void reset();

  /// Base of the counter-based generator for dropout: set per micro-batch; every dropout of a pass takes its
  /// own range, and a recomputed scope takes the same ones again.
  void seed(std::uint64_t);
  /// The same, but what stands there when a dropout runs, forward or backward, so that a captured graph draws
  /// anew: memory of the stream's device.
  void seed_at(const std::uint64_t*);
  /// A dropout of `count` elements.
  ops::DropoutMask next_dropout_mask(float p, std::uint64_t count);
  std::uint64_t next_random_range(std::uint64_t count);  ///< start of a range of `count` draws

 private:
  struct State;
  /// A captured backward function, type-erased.
  struct Captured {
    void* object;
    void (*run)(void*, Tape&, const Tensor&);
    void (*destroy)(void*);
  };
  /// A recomputed scope's first run.
  struct CheckpointForward {
    const Scope* scope;
    std::size_t values, parameters;
    std::uint64_t random;
  };
  /// Its second run, in backward.
  struct CheckpointBackward {
    const Scope* scope;
    std::size_t values, nodes;
    std::uint64_t random;
  };

  void* allocate(std::size_t bytes, std::size_t alignment);
  template <class F>
  Captured capture(F);
  bool needs_node(std::span<const Var>) const;
  Var add_value(Tensor output);
  Var add_node(Tensor output, std::span<const Var> inputs, const Captured&);
  void open_scope(const Scope&);
  void close_scope(const Scope&);
  CheckpointForward begin_checkpoint_forward(const Scope&);
  /// Ends the first run and gives the result, which alone is kept, and the parameters that it used.
  Tensor end_checkpoint_forward(const CheckpointForward&, Var result, Var input, std::vector<Var>& inputs);
  std::vector<Var>& checkpoint_inputs();
  CheckpointBackward begin_checkpoint_backward(const Scope&, std::uint64_t random);
  void end_checkpoint_backward(const CheckpointBackward&, Var result, const Tensor& d_out);
  void run_backward(std::size_t down_to);
  void run_node(int output, const Captured&);

  std::unique_ptr<State> state_;
};

// ---- the templates

template <class F>
Tape::Captured Tape::capture(F f) {
  return {new (allocate(sizeof(F), alignof(F))) F(std::move(f)),
          [](void* object, Tape& tape, const Tensor& d_out) { (*static_cast<F*>(object))(tape, d_out); },
          [](void* object) { static_cast<F*>(object)->~F(); }};
}

template <class F>
Var Tape::record(Tensor output, std::initializer_list<Var> inputs, F backward) {
  const std::span<const Var> all(inputs.begin(), inputs.size());
  if (!needs_node(all)) return add_value(std::move(output));
  return add_node(std::move(output), all, capture(std::move(backward)));
}

template <class F>
Var Tape::scope(const Scope& scope, const F& body) {
  open_scope(scope);
  const Var result = body();
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
  auto again = [&scope, input, random = first_run.random, body = std::move(body)](
                   Tape& tape, const Tensor& d_out) mutable {
    const CheckpointBackward second_run = tape.begin_checkpoint_backward(scope, random);
    const Var second = body(input);
    tape.end_checkpoint_backward(second_run, second, d_out);
  };
  return add_node(std::move(output), inputs, capture(std::move(again)));
}

}  // namespace rz
