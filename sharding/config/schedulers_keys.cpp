// Keys of the section "scheduler".

#include "sharding/config/key_spec.h"

namespace rz::ds {
namespace {

using enum Kind;
constexpr double max_steps = 1ull << 53;

constexpr KeySpec scheduler[] = {
    applied(
        "type", text, "",
        "in any case: DeepSpeed's WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest; torch's "
        "StepLR, MultiStepLR, ConstantLR, LinearLR, ExponentialLR, PolynomialLR, CosineAnnealingLR, "
        "CosineAnnealingWarmRestarts, OneCycleLR, ReduceLROnPlateau; null: a constant rate"),
    section("params", "{}", "keys of the type"),
};

constexpr KeySpec last_batch =
    refused("last_batch_iteration", "-1", "[-1]", "a schedule resumes with the optimizer");
constexpr KeySpec warmup_steps =
    applied("warmup_num_steps", integer, "1000", "updates of the warm-up; 0 and 1 count as 2")
        .within(0, max_steps)
        .from(Argument::warmup_steps);
constexpr KeySpec warmup_type =
    applied("warmup_type", choice, "\"log\"", "shape of the warm-up").one_of("[\"log\", \"linear\"]");
constexpr KeySpec total = applied("total_num_steps", integer, "", "updates of the schedule")
                              .within(1, max_steps)
                              .from(Argument::total_steps);
constexpr KeySpec min_lr =
    applied("warmup_min_lr", per_group, "0", "rate of the first two updates").from(Argument::warmup_min_lr);

constexpr KeySpec warmup[] = {
    min_lr,
    applied("warmup_max_lr", per_group, "null", "rate after the warm-up; null: that of each group")
        .from(Argument::warmup_max_lr),
    warmup_steps,
    warmup_type,
    last_batch,
};
constexpr KeySpec warmup_decay[] = {
    total,
    min_lr,
    applied("warmup_max_lr", per_group, "0.001", "rate after the warm-up").from(Argument::warmup_max_lr),
    warmup_steps,
    warmup_type,
    last_batch,
};
constexpr KeySpec warmup_cosine[] = {
    total,
    applied("warmup_min_ratio", number, "0", "share of the rate at the start").within(0, unbounded),
    warmup_steps,
    applied("cos_min_ratio", number, "0.0001", "share of the rate at the end"),
    warmup_type,
    last_batch,
};
constexpr KeySpec one_cycle[] = {
    applied("cycle_min_lr", per_group, "", "lowest rate of the cycle"),
    applied("cycle_max_lr", per_group, "", "highest rate of the cycle"),
    applied("decay_lr_rate", number, "0", "decay of the rate after the cycle"),
    applied("cycle_first_step_size", number, "2000", "updates of the way up").within(1e-300, max_steps),
    applied("cycle_second_step_size", number, "null", "updates of the way down; null: as the way up"),
    applied("cycle_first_stair_count", integer, "0", "stairs of the way up; 0: none").within(0, max_steps),
    applied("cycle_second_stair_count", integer, "null", "stairs of the way down; null: as the way up")
        .within(0, max_steps),
    applied("decay_step_size", number, "0", "updates of a unit of decay; 0: no decay"),
    applied("cycle_momentum", boolean, "true", "beta 1 moves the opposite way, if the optimizer has betas"),
    applied("cycle_min_mom", per_group, "0.8", "lowest beta 1"),
    applied("cycle_max_mom", per_group, "0.9", "highest beta 1"),
    applied("decay_mom_rate", number, "0", "growth of beta 1 after the cycle"),
    last_batch,
};
constexpr KeySpec range_test[] = {
    applied("lr_range_test_min_lr", per_group, "0.001", "first rate"),
    applied("lr_range_test_step_size", integer, "2000", "updates of an interval").within(1, max_steps),
    applied("lr_range_test_step_rate", number, "1.0", "growth in an interval"),
    applied("lr_range_test_staircase", boolean, "false", "grow in whole intervals only"),
    last_batch,
};

// torch.optim.lr_scheduler
constexpr double above_zero = 1e-300;
constexpr KeySpec last_epoch = refused("last_epoch", "-1", "[-1]", "a schedule resumes with the optimizer");
constexpr KeySpec eta_min = applied("eta_min", number, "0", "lowest rate");
constexpr KeySpec gamma = applied("gamma", number, "0.1", "factor of a step");

constexpr KeySpec step[] = {
    applied("step_size", integer, "", "updates of a step").within(1, max_steps),
    gamma,
    last_epoch,
};
constexpr KeySpec multi_step[] = {
    applied("milestones", integers, "", "updates before a step; one that is listed twice counts twice"),
    gamma,
    last_epoch,
};
constexpr KeySpec constant[] = {
    applied("factor", number, "0.3333333333333333", "factor of the rate at the start").within(above_zero, 1),
    applied("total_iters", integer, "5", "updates with the factor").within(1, max_steps),
    last_epoch,
};
constexpr KeySpec linear[] = {
    applied("start_factor", number, "0.3333333333333333", "factor of the rate at the start")
        .within(above_zero, 1),
    applied("end_factor", number, "1.0", "factor of the rate at the end").within(0, 1),
    applied("total_iters", integer, "5", "updates from one to the other")
        .within(1, max_steps)
        .from(Argument::schedule_steps),
    last_epoch,
};
constexpr KeySpec exponential[] = {
    applied("gamma", number, "", "factor of an update").within(above_zero, unbounded),
    last_epoch,
};
constexpr KeySpec polynomial[] = {
    applied("total_iters", integer, "5", "updates until the rate is 0")
        .within(1, max_steps)
        .from(Argument::schedule_steps),
    applied("power", number, "1.0", "of the share of updates that are left"),
    last_epoch,
};
constexpr KeySpec cosine_annealing[] = {
    applied("T_max", integer, "", "updates of half a period")
        .within(1, max_steps)
        .from(Argument::schedule_steps),
    eta_min,
    last_epoch,
};
constexpr KeySpec warm_restarts[] = {
    applied("T_0", integer, "", "updates before the first restart").within(1, max_steps),
    applied("T_mult", integer, "1", "growth of the time between restarts").within(1, max_steps),
    eta_min,
    last_epoch,
};
constexpr KeySpec torch_one_cycle[] = {
    applied("max_lr", per_group, "", "highest rate of the cycle"),
    applied("total_steps", integer, "null", "updates of the cycle; null: epochs times steps_per_epoch")
        .within(1, max_steps)
        .from(Argument::total_steps),
    applied("epochs", integer, "null", "see total_steps").within(1, max_steps),
    applied("steps_per_epoch", integer, "null", "see total_steps").within(1, max_steps),
    applied("pct_start", number, "0.3", "share of the way up").within(0, 1),
    applied("anneal_strategy", choice, "\"cos\"", "shape of the ways").one_of("[\"cos\", \"linear\"]"),
    applied("cycle_momentum", boolean, "true", "momentum or beta 1 moves the opposite way"),
    applied("base_momentum", per_group, "0.85", "lowest momentum"),
    applied("max_momentum", per_group, "0.95", "highest momentum"),
    applied("div_factor", number, "25.0", "max_lr / first rate").within(above_zero, unbounded),
    applied("final_div_factor", number, "10000.0", "first rate / last rate").within(above_zero, unbounded),
    applied("three_phase", boolean, "false", "up, symmetrically down, then to the last rate"),
    last_epoch,
};
constexpr KeySpec plateau[] = {
    applied("mode", choice, "\"min\"", "whether a smaller or a greater metric is better")
        .one_of("[\"min\", \"max\"]"),
    applied("factor", number, "0.1", "factor of a reduction; below 1").within(0, 1),
    applied("patience", integer, "10", "metrics without improvement before a reduction").within(0, max_steps),
    applied("threshold", number, "0.0001", "what an improvement must exceed"),
    applied("threshold_mode", choice, "\"rel\"", "threshold is a share of the best metric, or a difference")
        .one_of("[\"rel\", \"abs\"]"),
    applied("cooldown", integer, "0", "metrics after a reduction that do not count").within(0, max_steps),
    applied("min_lr", per_group, "0", "lowest rate"),
    applied("eps", number, "1e-08", "a smaller reduction is not made"),
};

constexpr ObjectSpec table[] = {
    {"scheduler", "", scheduler},
    {"scheduler.params", "WarmupLR", warmup},
    {"scheduler.params", "WarmupDecayLR", warmup_decay},
    {"scheduler.params", "WarmupCosineLR", warmup_cosine},
    {"scheduler.params", "OneCycle", one_cycle},
    {"scheduler.params", "LRRangeTest", range_test},
    {"scheduler.params", "StepLR", step},
    {"scheduler.params", "MultiStepLR", multi_step},
    {"scheduler.params", "ConstantLR", constant},
    {"scheduler.params", "LinearLR", linear},
    {"scheduler.params", "ExponentialLR", exponential},
    {"scheduler.params", "PolynomialLR", polynomial},
    {"scheduler.params", "CosineAnnealingLR", cosine_annealing},
    {"scheduler.params", "CosineAnnealingWarmRestarts", warm_restarts},
    {"scheduler.params", "OneCycleLR", torch_one_cycle},
    {"scheduler.params", "ReduceLROnPlateau", plateau},
};

}  // namespace

std::span<const ObjectSpec> scheduler_objects() { return table; }

}  // namespace rz::ds
