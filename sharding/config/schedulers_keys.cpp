// Keys of the section "scheduler".

#include "sharding/config/keys.h"

namespace rz::ds {
namespace {

using enum Kind;
constexpr double max_steps = 1ull << 53;

constexpr KeySpec scheduler[] = {
    applied<&Draft::schedule_type>(
        "type",
        "in any case: DeepSpeed's WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest; torch's "
        "StepLR, MultiStepLR, ConstantLR, LinearLR, ExponentialLR, PolynomialLR, CosineAnnealingLR, "
        "CosineAnnealingWarmRestarts, OneCycleLR, ReduceLROnPlateau; null: a constant rate")
        .required(),
    section("params", "{}", "keys of the type"),
};

constexpr KeySpec last_batch =
    refused("last_batch_iteration", "-1", "[-1]", "a schedule resumes with the optimizer");
template <class Schedule>
constexpr KeySpec warmup_steps = applied<&Schedule::num_steps>("warmup_num_steps",
                                                               "updates of the warm-up; 0 and 1 count as 2 "
                                                               "(DeepSpeed 0.19.8 refuses 0)")
                                     .within(0, max_steps)
                                     .from("warmup_steps");
template <class Schedule>
constexpr KeySpec warmup_type =
    applied<&Schedule::type>("warmup_type", "shape of the warm-up").one_of("[\"log\", \"linear\"]");
template <class Schedule>
constexpr KeySpec total = applied<&Schedule::total_num_steps>("total_num_steps", "updates of the schedule")
                              .required()
                              .within(1, max_steps)
                              .from("total_steps");
template <class Schedule>
constexpr KeySpec min_lr =
    applied<&Schedule::min_lr>("warmup_min_lr", "rate of the first two updates").from("warmup_min_lr");

constexpr KeySpec warmup[] = {
    min_lr<WarmupLr>,
    applied<&WarmupLr::max_lr>("warmup_max_lr", "rate after the warm-up; null: that of each group")
        .from("warmup_max_lr"),
    warmup_steps<WarmupLr>,
    warmup_type<WarmupLr>,
    last_batch,
};
constexpr KeySpec warmup_decay[] = {
    total<WarmupDecayLr>,
    min_lr<WarmupDecayLr>,
    applied<&WarmupDecayLr::max_lr>("warmup_max_lr", "rate after the warm-up").from("warmup_max_lr"),
    warmup_steps<WarmupDecayLr>,
    warmup_type<WarmupDecayLr>,
    last_batch,
};
constexpr KeySpec warmup_cosine[] = {
    total<WarmupCosineLr>,
    applied<&WarmupCosineLr::warmup_min_ratio>("warmup_min_ratio", "share of the rate at the start")
        .within(0, unbounded),
    warmup_steps<WarmupCosineLr>,
    applied<&WarmupCosineLr::cos_min_ratio>("cos_min_ratio", "share of the rate at the end"),
    warmup_type<WarmupCosineLr>,
    last_batch,
};
constexpr KeySpec one_cycle[] = {
    applied<&OneCycle::min_lr>("cycle_min_lr", "lowest rate of the cycle").required(),
    applied<&OneCycle::max_lr>("cycle_max_lr", "highest rate of the cycle").required(),
    applied<&OneCycle::decay_lr_rate>("decay_lr_rate", "decay of the rate after the cycle"),
    applied<&OneCycle::first_step_size>("cycle_first_step_size", "updates of the way up")
        .within(1e-300, max_steps),
    applied<&OneCycle::second_step_size>("cycle_second_step_size",
                                         "updates of the way down; null: as the way up"),
    applied<&OneCycle::first_stair_count>("cycle_first_stair_count", "stairs of the way up; 0: none")
        .within(0, max_steps),
    applied<&OneCycle::second_stair_count>("cycle_second_stair_count",
                                           "stairs of the way down; null: as the way up")
        .within(0, max_steps),
    applied<&OneCycle::decay_step_size>("decay_step_size", "updates of a unit of decay; 0: no decay"),
    applied<&OneCycle::cycle_momentum>("cycle_momentum",
                                       "beta 1 moves the opposite way, if the optimizer has betas"),
    applied<&OneCycle::min_momentum>("cycle_min_mom", "lowest beta 1"),
    applied<&OneCycle::max_momentum>("cycle_max_mom", "highest beta 1"),
    applied<&OneCycle::decay_momentum_rate>("decay_mom_rate", "growth of beta 1 after the cycle"),
    last_batch,
};
constexpr KeySpec range_test[] = {
    applied<&LrRangeTest::min_lr>("lr_range_test_min_lr", "first rate"),
    applied<&LrRangeTest::step_size>("lr_range_test_step_size", "updates of an interval")
        .within(1, max_steps),
    applied<&LrRangeTest::step_rate>("lr_range_test_step_rate", "growth in an interval"),
    applied<&LrRangeTest::staircase>("lr_range_test_staircase", "grow in whole intervals only"),
    last_batch,
};

// torch.optim.lr_scheduler
constexpr double above_zero = 1e-300;
constexpr KeySpec last_epoch = refused("last_epoch", "-1", "[-1]", "a schedule resumes with the optimizer");
template <class Schedule>
constexpr KeySpec eta_min = applied<&Schedule::eta_min>("eta_min", "lowest rate");
template <class Schedule>
constexpr KeySpec gamma = applied<&Schedule::gamma>("gamma", "factor of a step");

constexpr KeySpec step[] = {
    applied<&StepLr::step_size>("step_size", "updates of a step").required().within(1, max_steps),
    gamma<StepLr>,
    last_epoch,
};
constexpr KeySpec multi_step[] = {
    applied<&MultiStepLr::milestones>("milestones",
                                      "updates before a step; one that is listed twice counts twice")
        .required(),
    gamma<MultiStepLr>,
    last_epoch,
};
constexpr KeySpec constant[] = {
    applied<&ConstantFactorLr::factor>("factor", "factor of the rate at the start").within(above_zero, 1),
    applied<&ConstantFactorLr::total_iters>("total_iters", "updates with the factor").within(1, max_steps),
    last_epoch,
};
constexpr KeySpec linear[] = {
    applied<&LinearLr::start_factor>("start_factor", "factor of the rate at the start").within(above_zero, 1),
    applied<&LinearLr::end_factor>("end_factor", "factor of the rate at the end").within(0, 1),
    applied<&LinearLr::total_iters>("total_iters", "updates from one to the other")
        .within(1, max_steps)
        .from("schedule_steps"),
    last_epoch,
};
constexpr KeySpec exponential[] = {
    applied<&ExponentialLr::gamma>("gamma", "factor of an update").required().within(above_zero, unbounded),
    last_epoch,
};
constexpr KeySpec polynomial[] = {
    applied<&PolynomialLr::total_iters>("total_iters", "updates until the rate is 0")
        .within(1, max_steps)
        .from("schedule_steps"),
    applied<&PolynomialLr::power>("power", "of the share of updates that are left"),
    last_epoch,
};
constexpr KeySpec cosine_annealing[] = {
    applied<&CosineAnnealingLr::t_max>("T_max", "updates of half a period")
        .required()
        .within(1, max_steps)
        .from("schedule_steps"),
    eta_min<CosineAnnealingLr>,
    last_epoch,
};
constexpr KeySpec warm_restarts[] = {
    applied<&CosineAnnealingWarmRestarts::t_0>("T_0", "updates before the first restart")
        .required()
        .within(1, max_steps),
    applied<&CosineAnnealingWarmRestarts::t_mult>("T_mult", "growth of the time between restarts")
        .within(1, max_steps),
    eta_min<CosineAnnealingWarmRestarts>,
    last_epoch,
};
constexpr KeySpec torch_one_cycle[] = {
    applied<&OneCycleLr::max_lr>("max_lr", "highest rate of the cycle").required(),
    applied<&Draft::total_steps>("total_steps", "updates of the cycle; null: epochs times steps_per_epoch")
        .within(1, max_steps)
        .from("total_steps"),
    applied<&Draft::epochs>("epochs", "see total_steps").within(1, max_steps),
    applied<&Draft::steps_per_epoch>("steps_per_epoch", "see total_steps").within(1, max_steps),
    applied<&OneCycleLr::pct_start>("pct_start", "share of the way up").within(0, 1),
    applied<&OneCycleLr::anneal_strategy>("anneal_strategy", "shape of the ways")
        .one_of("[\"cos\", \"linear\"]"),
    applied<&OneCycleLr::cycle_momentum>("cycle_momentum", "momentum or beta 1 moves the opposite way"),
    applied<&OneCycleLr::base_momentum>("base_momentum", "lowest momentum"),
    applied<&OneCycleLr::max_momentum>("max_momentum", "highest momentum"),
    applied<&OneCycleLr::div_factor>("div_factor", "max_lr / first rate").within(above_zero, unbounded),
    applied<&OneCycleLr::final_div_factor>("final_div_factor", "first rate / last rate")
        .within(above_zero, unbounded),
    applied<&OneCycleLr::three_phase>("three_phase", "up, symmetrically down, then to the last rate"),
    last_epoch,
};
constexpr KeySpec plateau[] = {
    applied<&ReduceLrOnPlateau::mode>("mode", "whether a smaller or a greater metric is better")
        .one_of("[\"min\", \"max\"]"),
    applied<&ReduceLrOnPlateau::factor>("factor", "factor of a reduction; below 1").within(0, 1),
    applied<&ReduceLrOnPlateau::patience>("patience", "metrics without improvement before a reduction")
        .within(0, max_steps),
    applied<&ReduceLrOnPlateau::threshold>("threshold", "what an improvement must exceed"),
    applied<&ReduceLrOnPlateau::threshold_mode>("threshold_mode",
                                                "threshold is a share of the best metric, or a difference")
        .one_of("[\"rel\", \"abs\"]"),
    applied<&ReduceLrOnPlateau::cooldown>("cooldown", "metrics after a reduction that do not count")
        .within(0, max_steps),
    applied<&ReduceLrOnPlateau::min_lr>("min_lr", "lowest rate"),
    applied<&ReduceLrOnPlateau::eps>("eps", "a smaller reduction is not made"),
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
