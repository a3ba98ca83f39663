#include "tools/plan/search.h"

#include <algorithm>

#include "comm/core/error.h"

namespace rz::plan {

int ranks_per_node(const Options& o, int ranks) {
  if (o.ranks_per_node == 0 || o.ranks_per_node >= ranks) return ranks;
  return ranks % o.ranks_per_node == 0 ? o.ranks_per_node : 0;
}

std::vector<MeshAlternative> meshes(const Options& o, const PlannedRun& run) {
  std::vector<MeshAlternative> all;
  const TrainingPlan& given = run.plans[0];
  if (given.strategy == StrategyKind::ddp || given.mesh.data() == 1) return all;
  for (int copies = 1; copies <= given.mesh.data(); ++copies) {
    if (given.mesh.data() % copies != 0) continue;
    train_lm::Inputs in = train_lm::read_model_inputs(o.run, run.ranks, ranks_per_node(o, run.ranks));
    in.ds.mesh = {.replicate = copies, .shard = given.mesh.data() / copies, .tp = given.mesh.tp};
    all.push_back({in.ds.mesh, {}, ""});
    try {
      all.back().plan = train_lm::plan_run(o.run, in, {0, run.ranks}, o.device);
    } catch (const Error& e) {
      if (e.code() != Errc::config && e.code() != Errc::unsupported) throw;
      all.back().reason = e.what();
    }
  }
  return all;
}

PlannedRun plan_at(const Options& o, int ranks) {
  const train_lm::Inputs in = train_lm::read_model_inputs(o.run, ranks, ranks_per_node(o, ranks));
  return {ranks, in.sizes, train_lm::plan_ranks(o.run, in, ranks, o.device)};
}

const TrainingPlan& largest(const PlannedRun& run) {
  return *std::ranges::max_element(run.plans, {}, [](const TrainingPlan& p) { return on_device(p.memory); });
}

std::vector<Alternative> alternatives(const Options& o, int ranks) {
  std::vector<Alternative> all;
  for (const bool recompute : {false, true})
    for (const StrategyKind kind :
         {StrategyKind::ddp, StrategyKind::zero1, StrategyKind::zero2, StrategyKind::zero3}) {
      train_lm::Options run = o.run;
      run.strategy = name(kind), run.recompute = recompute;
      all.push_back({kind, recompute, {}, ""});
      try {
        const train_lm::Inputs in = train_lm::read_model_inputs(run, ranks, ranks_per_node(o, ranks));
        all.back().plan = train_lm::plan_run(run, in, {0, ranks}, o.device);
      } catch (const Error& e) {  // e.g. offload_param, which zero3 has alone
        if (e.code() != Errc::config && e.code() != Errc::unsupported) throw;
        all.back().reason = e.what();
      }
    }
  return all;
}

std::int64_t largest_micro_batch(const Options& o, int ranks, std::size_t memory) {
  train_lm::Inputs in = train_lm::read_model_inputs(o.run, ranks, ranks_per_node(o, ranks));
  const auto fits = [&](std::int64_t micro) {
    const std::int64_t passes = in.sizes.train / in.sizes.micro;  // of all ranks
    in.sizes = in.ds.sizes = {micro * passes, micro, in.sizes.accumulation};
    return on_device(train_lm::plan_run(o.run, in, {0, ranks}, o.device).memory) <= memory;
  };
  constexpr std::int64_t limit = std::int64_t{1} << 20;
  std::int64_t low = 0, high = 1;
  while (high < limit && fits(high)) low = high, high *= 2;
  while (high - low > 1) {
    const std::int64_t middle = low + (high - low) / 2;
    (fits(middle) ? low : high) = middle;
  }
  return low;
}

}  // namespace rz::plan
