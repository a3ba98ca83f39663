#include "sharding/strategy/join.h"

#include <numeric>
#include <string>
#include <vector>

#include "comm/core/error.h"

namespace rz {

namespace {

[[noreturn]] void throw_uneven(const std::vector<std::int32_t>& has_data, std::int64_t batches) {
  std::string out;
  int culprit = -1;
  for (std::size_t r = 0; r < has_data.size(); ++r) {
    if (has_data[r]) continue;
    if (culprit < 0) culprit = static_cast<int>(r);
    out += concat(out.empty() ? "" : ", ", r);
  }
  throw Error(Errc::mismatch,
              concat("uneven inputs: rank ", out, " has no batch number ", batches,
                     ", other ranks have one; train the same number of batches on every rank "
                     "(drop_last), or join without throw_on_early_termination"),
              culprit);
}

}  // namespace

bool Join::next(bool has_data) {
  const std::int32_t mine = has_data;
  std::vector<std::int32_t> all(static_cast<std::size_t>(communicator_.size()));
  communicator_.all_gather(ConstBuffer(&mine, 1), Buffer(all.data(), all.size())).wait();
  active_ = has_data;
  active_ranks_ = std::accumulate(all.begin(), all.end(), 0);
  if (options_.throw_on_early_termination && active_ranks_ > 0 && active_ranks_ < communicator_.size())
    throw_uneven(all, batches_);
  batches_ += active_;
  return active_ranks_ > 0;
}

float Join::loss_factor() const {
  if (options_.divide_by_initial_world_size || active_ranks_ == 0) return 1;
  return static_cast<float>(communicator_.size()) / static_cast<float>(active_ranks_);
}

}  // namespace rz
