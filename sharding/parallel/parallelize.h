#pragma once
/// Tensor and sequence parallelism of a model, by a table of patterns.
///
///     auto model = rz::language_model_from_config("FOLDER");
///     std::puts(rz::parallelize(*model, model->parallel_plan(), mesh).c_str());  // then a strategy
///
/// The ranks of Mesh::tp() get the same batch, hold one loss, whose bits are the same on all of them, and
/// each a part of the divided parameters (Parameter::part). Gradients of parts are those parts of the
/// gradients of one rank, up to rounding; gradients of whole parameters have the same bits on all of them.
/// Initial values, and random numbers of dropout, are those of one rank.

#include <string>

#include "../../autograd_lite/nn/module.h"
#include "../../autograd_lite/nn/parallel.h"
#include "mesh.h"

namespace rz {

struct ParallelOptions {
  /// Between row and column layers each rank has a range of the tokens, so that activations and norms there
  /// are divided too. Values without gradients (Tape::NoGrad), as in generation, are not. The number of
  /// tokens, the dimension before the last, must be divisible by the ranks. Each parameter needs a rule of
  /// the plan, and what comes before the first column layer is the output of a vocabulary layer.
  bool sequence_parallel = false;
};

/// Sets the parts of the parameters of a module, and what its layers exchange along mesh.tp(). Nothing for a
/// mesh without tp, except that the plan is checked. Call it after add_lora(), and before parameters have
/// memory, with the same arguments on all ranks; not collective. The communicator of the mesh must outlive
/// the module's passes. Returns a line on what is divided; empty without tp.
///
/// column: outputs, row: inputs, as torch's ColwiseParallel and RowwiseParallel; vocabulary: rows. Each is
/// cut as torch.chunk does (chunk_of()): ranks may have different numbers, the last ones no columns.
/// Errc::config, with the names and numbers, if a pattern matches no module, a style does not fit a layer,
/// the ranks do not divide a number of heads, some would have no rows, or a shared dropout has no
/// ParallelRule::columns where ranks have different numbers of columns. Errc::invalid_argument if a parameter
/// has memory or is a part already. The module is then unchanged.
std::string parallelize(Module&, const ParallelPlan&, const Mesh&, const ParallelOptions& = {});

}  // namespace rz
