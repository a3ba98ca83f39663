// Configurations in notes of users train, with the arguments that their scripts have.

#include "tests/support/configs_in_notes.h"

#include <gtest/gtest.h>

#include "tests/support/train_tiny.h"

namespace rz::lm {
namespace {

using namespace test;  // NOLINT: the test's own

/// A few updates on two ranks; without a section "optimizer", AdamW from the arguments.
Reports train_by(const char* config, const TrainingArguments& arguments) {
  const Folder folder;
  TinyRun run = smallest_run(StrategyKind::ddp, 2, folder);
  TinyOptions& o = run.options;
  o.ds = parse_ds_config(
      config, "ds.json", arguments,
      {.ranks = 2, .hidden_size = static_cast<std::int64_t>(run.c.config.n_embd), .adamw_by_default = true});
  o.strategy = strategy_kind(o.ds);
  o.strategy_options = strategy_options(o.ds, o.strategy);
  return train(run, 6);
}

void expect_falling_loss(const Reports& reports) {
  EXPECT_LT(reports.back().loss, reports.front().loss - 0.01);
  for (const UpdateReport& r : reports) EXPECT_FALSE(r.skipped || !r.diverged.empty()) << "update " << r.step;
}

TEST(ConfigsInNotes, OfATrainerTrains) {
  expect_falling_loss(train_by(trainer_config, {.learning_rate = 3e-3}));
  const Reports half = train_by(trainer_config, {.learning_rate = 3e-3, .precision = DType::f16});
  EXPECT_EQ(half.front().loss_scale, 65536) << "2 to the power of initial_scale_power";
}

TEST(ConfigsInNotes, OfAStudentTrains) {
  const TrainingArguments arguments{
      .per_device_train_batch_size = 2, .learning_rate = 3e-3, .warmup_steps = 2};
  const Reports reports = train_by(student_config, arguments);
  EXPECT_EQ(reports[0].lr, 0) << "a warm-up";
  EXPECT_EQ(reports.back().lr, 3e-3);
  expect_falling_loss(reports);
}

TEST(ConfigsInNotes, OfATeacherTrainsIfThereIsARate) {
  expect_falling_loss(train_by(teacher_config, {.learning_rate = 3e-3, .precision = DType::bf16}));
}

TEST(ConfigsInNotes, OfAccelerateTrains) {
  expect_falling_loss(train_by(accelerate_config, {.per_device_train_batch_size = 2, .learning_rate = 3e-3}));
}

}  // namespace
}  // namespace rz::lm
