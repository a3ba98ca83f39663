#include "comm/tuning/select_cuda.h"

#include <algorithm>

#include "comm/core/error.h"
#include "comm/tuning/tuning.h"

namespace rz::tuning {

namespace {

constexpr std::size_t KiB = 1024, MiB = 1024 * KiB;

constexpr Collective all_reduce = Collective::all_reduce;
constexpr Scope intra_node = Scope::intra_node;

// Derived, not measured: a step (signal out, signal in) takes about 3 us over NVLink, which moves 450 GB/s
// each way. One-shot reads (p - 1) n bytes in one step, two-shot 2 (p - 1) / p n bytes in two: they break
// even where (p - 1) (p - 2) / p n bytes cost 3 us. With two ranks the traffic is equal, but one-shot copies
// to a slot first.
constexpr Rule table[] = {
    {.collective = all_reduce,
     .scope = intra_node,
     .algorithm = "one_shot",
     .max_ranks = 2,
     .max_bytes = MiB},
    {.collective = all_reduce,
     .scope = intra_node,
     .algorithm = "one_shot",
     .max_ranks = 4,
     .max_bytes = 512 * KiB},
    {.collective = all_reduce,
     .scope = intra_node,
     .algorithm = "one_shot",
     .max_ranks = 8,
     .max_bytes = 256 * KiB},
    {.collective = all_reduce, .scope = intra_node, .algorithm = "one_shot", .max_bytes = 64 * KiB},
};
// Up to this size, copying to a slot costs less than an additional step; not measured.
constexpr std::size_t max_staged_bytes = 256 * KiB;
constexpr std::size_t bytes_per_block = 16 * KiB;

bool is_two_shot(const CudaSelectionQuery& q) {
  if (q.collective != Collective::all_reduce) return false;
  require(q.override_name.empty() || q.override_name == "one_shot" || q.override_name == "two_shot",
          Errc::config, "the all_reduce algorithm '", q.override_name,
          "' is not one of the backend 'peer_cuda'; choose one_shot or two_shot");
  if (!q.override_name.empty()) return q.override_name == "two_shot";
  return !find_rule(table, {q.collective, intra_node, q.bytes, q.size}, true);
}

}  // namespace

CudaLaunchPlan select_cuda_launch(const CudaSelectionQuery& q) {
  CudaLaunchPlan choice;
  choice.two_shot = is_two_shot(q);
  choice.zero_copy = q.collective == Collective::all_reduce ? choice.two_shot : q.bytes > max_staged_bytes;
  // The counts of the other ranks are unknown here.
  if (q.collective == Collective::all_to_all_v) choice.zero_copy = true;
  const std::size_t bytes = q.collective == Collective::all_to_all_v ? MiB : q.bytes;
  choice.blocks = static_cast<int>(std::clamp<std::size_t>(
      bytes / bytes_per_block, 1, static_cast<std::size_t>(std::max(q.max_blocks, 1))));
  choice.threads = bytes / static_cast<std::size_t>(choice.blocks) < 4 * KiB ? 128 : 512;
  return choice;
}

}  // namespace rz::tuning
