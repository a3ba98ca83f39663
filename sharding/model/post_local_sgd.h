#pragma once
/// Post-local SGD: after some updates gradients are averaged within groups of ranks only (Lin et al.,
/// arXiv:1808.07217).

#include <cstdint>
#include <memory>

#include "comm/communicator.h"
#include "sharding/model/communication_hook.h"

namespace rz {

/// Names as in PyTorch's PostLocalSGDState.
struct PostLocalSgdOptions {
  std::int64_t start_local_sgd_iter = 100;    ///< reduced passes in which all ranks form the mean
  bool post_local_gradient_allreduce = true;  ///< false: later each rank keeps its own gradients
};

/// The mean over all ranks in the first passes, over `subgroup` in later ones. The subgroup must be made by
/// split() of the strategy's communicator, and outlive the hook; null if each rank keeps its own gradients.
/// Replicas then differ: PeriodicModelAverager (sharding/strategy/model_averager.h) averages them.
///
/// A loss with terms still counts those of all ranks: the gradient of a group of g of n ranks is n / g times
/// the sum over its terms, divided by the terms of all ranks. Norms, and with them clipping, mix the
/// gradients of the ranks, as each rank adds the squares of its shard. An update with the hook is not
/// captured in a graph.
///
/// Errc::invalid_argument for a negative number of passes, or if subgroup and option contradict each other.
std::shared_ptr<CommunicationHook> make_post_local_sgd_hook(const PostLocalSgdOptions&,
                                                            Communicator* subgroup);

}  // namespace rz
