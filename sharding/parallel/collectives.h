#pragma once
/// Collectives as operators on a tape, with their adjoints (as torch.distributed.nn.functional).
///
/// Gradients are those of the sum of all ranks' losses. Backward of each operator is collective: ranks record
/// the same operators in the same order, their inputs need gradients on all ranks or on none, and gradients
/// reach the outputs on all ranks or on none. The communicator must outlive the tape's pass and be on the
/// device of the tape's stream. Errors are those of the communicator. Calls among Mesh::layers() are counted
/// in Strategy::traffic().

#include <cstddef>
#include <vector>

#include "../../autograd_lite/nn/module.h"
#include "../../autograd_lite/tape.h"
#include "../../comm/communicator.h"
#include "mesh.h"
#include "traffic.h"

namespace rz::functional {

/// Element-wise reduction over the ranks. Backward: the same reduction of the gradients. `op` is sum or avg,
/// otherwise Errc::unsupported.
Var all_reduce(Tape&, Var x, const CountedGroup&, ReduceOp op = ReduceOp::sum);
/// x[n, …] → [size · n, …], in rank order; another dimension than the first grows alike, and a negative one
/// counts from the last. Backward: reduce-scatter, sum. One group of as many calls as there are elements of
/// the dimensions before it.
Var all_gather(Tape&, Var x, const CountedGroup&, int dimension = 0);
/// x[size · n, …] → [n, …]: part r of the sum goes to rank r. Backward: all-gather. Dimensions as in
/// all_gather(). Errc::invalid_argument names the shape if the dimension cannot be divided.
Var reduce_scatter(Tape&, Var x, const CountedGroup&, int dimension = 0);
/// The value of rank `root`; x has the same shape on every rank. Backward: the sum of the gradients at the
/// root, zeros elsewhere.
Var broadcast(Tape&, Var x, int root, Communicator&);
/// Rows of x[n, …]: the first send_rows[0] go to rank 0, and so on. The result has recv_rows[s] rows of each
/// rank s, in rank order; recv_rows[s] equals send_rows[this rank] on rank s. Backward: the gradients go the
/// way back. Errc::invalid_argument if the sum of send_rows is not n, or a list has not one entry per rank.
Var all_to_all(Tape&, Var x, std::vector<std::size_t> send_rows, std::vector<std::size_t> recv_rows,
               Communicator&);

// ---- of ranks that share a layer, and hold one loss
/// x, which has the same value on every rank and is used in a part of the work on each. Backward: the sum of
/// the gradients, with the same bits on every rank. (f of Shoeybi et al., arXiv:1909.08053.)
Var replicate(Tape&, Var x, const CountedGroup&);
/// The sum of what the ranks computed, with the same bits on every rank. Backward: the gradient, which is the
/// same on every rank. (g of the same.)
Var combine(Tape&, Var x, const CountedGroup&);
/// x of each rank as [ranks, …], in rank order. Not recorded.
Tensor gather(Tape&, const Tensor& x, const CountedGroup&);

/// Sets the statistics of all batch norms (nn::BatchNorm2d, nn::BatchNorm1d) of a module to those of the
/// batches of all ranks, as torch.nn.SyncBatchNorm.convert_sync_batchnorm: each forward in training, and each
/// backward, sums one small tensor per layer. Ranks run the same layers in the same order. The communicator
/// outlives the module's passes.
void sync_batch_norm(Module&, Communicator&);

}  // namespace rz::functional
