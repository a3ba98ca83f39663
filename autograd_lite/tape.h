#pragma once
/// Reverse-mode differentiation over a recorded list of operators.
///
/// A tape is used for one forward and one backward pass, then reset; its memory is kept, so that from the
/// third pass on nothing is allocated. One thread at a time.

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "autograd_lite/parameter.h"
#include "comm/core/stream.h"
#include "tensor/pool.h"
#include "tensor/tensor.h"

namespace rz {

/// A value on a tape. A plain handle: cheap to copy, valid until Tape::reset().
struct Var {
  int index = -1;
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
  /// `parameters[i]->value` must be defined between the two. Scopes nest and may share parameters.
  std::function<void(const Scope&, Pass)> enter, leave;
  /// Before a gradient is first written in this backward pass: `grad` must be defined on return.
  std::function<void(Parameter&)> before_grad;
  /// The parameter's gradient is complete: all of its uses on this tape have run backward.
  std::function<void(Parameter&, const Stream&)> grad_ready;
};

class Tape {
 public:
  explicit Tape(Stream stream = {}, BufferPool pool = BufferPool());
  ~Tape();
  Tape(const Tape&) = delete;
  Tape& operator=(const Tape&) = delete;

  const Stream& stream() const;
  BufferPool& pool();
  void set_hooks(TapeHooks);

  /// Memory from the pool.
  Tensor empty(const Shape&, DType = DType::f32);

  // ---- leaves
  Var constant(Tensor);
  /// A leaf whose gradient can be read after backward().
  Var variable(Tensor);
  Var parameter(Parameter&);

  /// A parameter's current value, or the recorded tensor.
  const Tensor& value(Var) const;
  bool needs_grad(Var) const;

  // ---- recording, for operators
  /// Appends an operator. `backward(tape, d_out)` runs once, if a gradient reaches the output; it captures
  /// what it needs by value (it is stored in the tape's own memory: no heap allocation) and hands gradients
  /// on with the calls below.
  template <class F>
  Var record(Tensor output, std::initializer_list<Var> inputs, F backward);

  /// In backward: where an input's gradient is to be written, and whether to overwrite or to add. For a
  /// parameter it is Parameter::grad. Each place must be written before the next call.
  struct GradTarget {
    Tensor tensor;  ///< undefined: not wanted
    bool accumulate = false;
  };
  GradTarget grad_target(Var);
  /// In backward: takes over a gradient that was computed anyway, or adds it to what is there.
  void give_grad(Var, Tensor);

  // ---- structure
  /// Runs body() with the scope's parameters in place, now and again around the backward of what it recorded.
  Var scope(const Scope&, const std::function<Var()>& body);
  /// Like scope(), but keeps only `input`: body is run a second time in backward (Chen et al.,
  /// arXiv:1604.06174).
  Var recompute(const Scope&, Var input, const std::function<Var(Var)>& body);
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
  std::uint64_t seed() const;
  std::uint64_t take_random(std::uint64_t count);  ///< start of a range of `count` draws

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace rz
