#include "tools/plan/search.h"

#include <algorithm>
#include <utility>

#include "comm/core/error.h"
#include "comm/core/text.h"

namespace rz::plan {

int ranks_per_node(const Options& o, int ranks) {
  if (o.ranks_per_node == 0 || o.ranks_per_node >= ranks) return ranks;
  return ranks % o.ranks_per_node == 0 ? o.ranks_per_node : 0;
}

namespace {

/// The inputs of the run on another mesh of the same data ranks, or of others, which change its batches.
lm::Inputs inputs_on(const MeshSizes& mesh, const Options& o, const PlannedRun& run) {
  lm::Options other = o.run;
  const bool same_batches = mesh.data() == run.plans[0].mesh.data();
  if (!same_batches) {
    TrainingArguments& a = other.arguments;
    a.mesh_replicate = mesh.replicate, a.mesh_shard = mesh.shard, a.mesh_tp = mesh.tp;
    for (const char* name : {"mesh_replicate", "mesh_shard", "mesh_tp"})
      a.flags.insert_or_assign(name, concat("--mesh ", flag_of(mesh)));
  }
  lm::Inputs in = lm::read_model_inputs(other, run.ranks, ranks_per_node(o, run.ranks));
  in.ds.mesh = mesh;
  return in;
}

MeshAlternative planned_on(const MeshSizes& mesh, const Options& o, const PlannedRun& run) {
  MeshAlternative found{mesh, {}, ""};
  try {
    found.plan = lm::plan_run(o.run, inputs_on(mesh, o, run), {0, run.ranks}, o.device);
  } catch (const Error& e) {
    if (e.code() == Errc::system) throw;  // such as tokens that tp does not divide
    found.reason = e.what();
  }
  return found;
}

/// With a limit of memory also those that fill a part of a node; otherwise that of the run.
std::vector<int> sizes_of_tp(const Options& o, const PlannedRun& run) {
  const int given = run.plans[0].mesh.tp, node = ranks_per_node(o, run.ranks);
  std::vector<int> all;
  for (int tp = 1; tp <= std::max(given, node); ++tp)
    if (tp == given || (o.memory && node % tp == 0 && tp <= node)) all.push_back(tp);
  return all;
}

}  // namespace

std::string flag_of(const MeshSizes& mesh) {
  return concat("replicate=", mesh.replicate, ",shard=", mesh.shard,
                mesh.tp > 1 ? concat(",tp=", mesh.tp) : "");
}

std::vector<MeshAlternative> meshes(const Options& o, const PlannedRun& run) {
  std::vector<MeshAlternative> all;
  const TrainingPlan& given = run.plans[0];
  for (const int tp : sizes_of_tp(o, run)) {
    const int data = run.ranks / tp;
    for (int copies = 1; copies <= (given.strategy == StrategyKind::ddp ? 1 : data); ++copies) {
      if (data % copies != 0) continue;
      MeshAlternative found = planned_on({copies, data / copies, tp}, o, run);
      const bool refused = tp != given.mesh.tp && !found.plan;
      all.push_back(std::move(found));
      if (refused) break;
    }
  }
  if (all.size() == 1) all.clear();
  return all;
}

PlannedRun plan_at(const Options& o, int ranks) {
  const lm::Inputs in = lm::read_model_inputs(o.run, ranks, ranks_per_node(o, ranks));
  return {ranks, in.sizes, lm::plan_ranks(o.run, in, ranks, o.device)};
}

const TrainingPlan& largest(const PlannedRun& run) {
  return *std::ranges::max_element(run.plans, {}, [](const TrainingPlan& p) { return on_device(p.memory); });
}

std::vector<Alternative> alternatives(const Options& o, int ranks) {
  std::vector<Alternative> all;
  for (const bool recompute : {false, true})
    for (const StrategyKind kind :
         {StrategyKind::ddp, StrategyKind::zero1, StrategyKind::zero2, StrategyKind::zero3}) {
      lm::Options run = o.run;
      run.strategy = name(kind), run.recompute = recompute;
      all.push_back({kind, recompute, {}, ""});
      try {
        const lm::Inputs in = lm::read_model_inputs(run, ranks, ranks_per_node(o, ranks));
        all.back().plan = lm::plan_run(run, in, {0, ranks}, o.device);
      } catch (const Error& e) {  // e.g. offload_param, which zero3 has alone
        if (e.code() != Errc::config && e.code() != Errc::unsupported) throw;
        all.back().reason = e.what();
      }
    }
  return all;
}

std::int64_t largest_micro_batch(const Options& o, int ranks, std::size_t memory) {
  lm::Inputs in = lm::read_model_inputs(o.run, ranks, ranks_per_node(o, ranks));
  const auto fits = [&](std::int64_t micro) {
    const std::int64_t passes = in.sizes.train / in.sizes.micro;  // of all ranks
    in.sizes = in.ds.sizes = {micro * passes, micro, in.sizes.accumulation};
    return on_device(lm::plan_run(o.run, in, {0, ranks}, o.device).memory) <= memory;
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
