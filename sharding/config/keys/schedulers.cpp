// Keys of the section "scheduler".

#include "sharding/config/keys/key_spec.h"

namespace rz::ds {
namespace {

using enum Kind;
constexpr double max_steps = 1ull << 53;

constexpr KeySpec scheduler[] = {
    applied("type", text, "",
            "in any case: WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest, CosineAnnealingLR; "
            "null: a constant rate"),
    section("params", "{}", "keys of the type"),
};

constexpr KeySpec last_batch =
    refused("last_batch_iteration", "-1", "[-1]", "a schedule resumes with the optimizer");
constexpr KeySpec warmup_steps =
    applied("warmup_num_steps", integer, "1000", "updates of the warm-up; 1 counts as 2")
        .within(1, max_steps)
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
constexpr KeySpec cosine_annealing[] = {
    applied("T_max", integer, "", "updates of half a period").within(1, max_steps),
    applied("eta_min", number, "0", "lowest rate"),
    refused("last_epoch", "-1", "[-1]", "a schedule resumes with the optimizer"),
};

constexpr ObjectSpec table[] = {
    {"scheduler", "", scheduler},
    {"scheduler.params", "WarmupLR", warmup},
    {"scheduler.params", "WarmupDecayLR", warmup_decay},
    {"scheduler.params", "WarmupCosineLR", warmup_cosine},
    {"scheduler.params", "OneCycle", one_cycle},
    {"scheduler.params", "LRRangeTest", range_test},
    {"scheduler.params", "CosineAnnealingLR", cosine_annealing},
};

}  // namespace

std::span<const ObjectSpec> scheduler_objects() { return table; }

}  // namespace rz::ds
