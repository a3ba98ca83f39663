#include "comm/backends/native/schedule_engine.h"

#include <algorithm>

#include "comm/core/error.h"
#include "comm/schedule/algorithms/node_map.h"
#include "comm/tuning/tuning.h"

namespace rz {

bool rounds_partial_sums(DType dtype, const ReduceOp& op) {
  const bool small = size_of(dtype) < 4 && dtype != DType::i8 && dtype != DType::u8;
  return small && op.kind != ReduceOp::min && op.kind != ReduceOp::max;
}

bool rounds_partial_sums(const CollectiveCall& call) { return rounds_partial_sums(call.dtype(), call.op); }

ScheduleEngine::ScheduleEngine(Transport& transport, int rank, int size, const NativeOptions& options)
    : rank_(rank),
      size_(size),
      deterministic_(options.deterministic),
      order_(options.order),
      tuning_name_(options.tuning.name),
      overrides_(options.algorithm, options.deterministic, options.order),
      file_rules_(tuning::rules_for(options.tuning, size)),
      intra_node_(transport.one_node()),
      node_of_rank_(transport.nodes().begin(), transport.nodes().end()),
      nodes_(1 + *std::max_element(node_of_rank_.begin(), node_of_rank_.end())),
      executor_(transport, rank, size) {}

void ScheduleEngine::require_schedules() const {
  for (int c = 0; c < collective_count; ++c) {
    const auto kind = Collective(c);
    if (size_ == 1 || overrides_.of(kind).empty()) continue;
    require(!overrides_.is_of_a_node(kind), Errc::config, "the algorithm ", name(kind), "=",
            overrides_.of(kind), " requires that all ranks share memory; choose one of ",
            tuning::algorithm_choices(kind, tuning::Scope::inter_node));
    schedule_for(kind, 0, false);
  }
}

tuning::IntranodeTable ScheduleEngine::intranode_table() const {
  return tuning::IntranodeTable(size_, file_rules_, tuning_name_, overrides_, deterministic_, order_);
}

std::string ScheduleEngine::reason(Collective kind, const tuning::SelectedAlgorithm& selected) const {
  return selected.rule
             ? tuning::source_prefix(*selected.rule, tuning_name_) + tuning::to_string(*selected.rule)
             : concat("forced: ", name(kind), "=", overrides_.of(kind));
}

bool ScheduleEngine::is_allowed(const schedule::Algorithm& algorithm, Collective kind, bool rounds) const {
  const bool depends = algorithm.is(schedule::rounds_partials) && traits(kind).reduces && rounds;
  return !depends || !deterministic_ || !overrides_.of(kind).empty();
}

tuning::SelectedAlgorithm ScheduleEngine::schedule_for(Collective kind, std::size_t bytes,
                                                       bool rounds) const {
  return tuning::select_by_rule({.collective = kind,
                                 .bytes = bytes,
                                 .size = size_,
                                 .intra_node = intra_node_,
                                 .deterministic = deterministic_,
                                 .override_name = size_ == 1 ? "" : overrides_.schedule_of(kind),
                                 .file_rules = file_rules_,
                                 .nodes = nodes_,
                                 .contiguous_nodes = schedule::ranks_contiguous_by_node(node_of_rank_),
                                 .rounds_partials = rounds,
                                 .order = order_});
}

void ScheduleEngine::start(const CollectiveCall& call, std::uint32_t sequence) {
  const std::size_t shard = count_per_rank(call, size_) * size_of(call.dtype());
  const tuning::SelectedAlgorithm selected =
      schedule_for(call.kind, message_bytes(call.kind, shard, size_), rounds_partial_sums(call));
  start(call, sequence, *selected.algorithm, selected.slice);
}

void ScheduleEngine::start(const CollectiveCall& call, std::uint32_t sequence,
                           const schedule::Algorithm& algorithm, std::size_t slice) {
  const int root = call.kind == Collective::all_reduce ? 0 : call.root;
  const schedule::DependencyPlan& plan = plan_for(algorithm, root, in_place(call, rank_, size_));
  const auto number = static_cast<std::uint32_t>(&algorithm - schedule::algorithms().data()) + 1;
  executor_.start(call, plan, make_signature(call, size_, sequence, number),
                  slice ? slice : schedule::default_slice_bytes);
}

const schedule::DependencyPlan& ScheduleEngine::plan_for(const schedule::Algorithm& algorithm, int root,
                                                         bool in_place) {
  for (const CachedPlan& c : plans_)
    if (c.algorithm == &algorithm && c.root == root && c.in_place == in_place) return *c.plan;
  auto plan = std::make_unique<schedule::DependencyPlan>(schedule::make_dependency_plan(
      algorithm.schedule({rank_, size_, root, node_of_rank_, order_}), size_, in_place));
  plans_.push_back({&algorithm, root, in_place, std::move(plan)});
  return *plans_.back().plan;
}

}  // namespace rz
