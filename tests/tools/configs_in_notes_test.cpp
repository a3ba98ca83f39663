// Configurations in notes of users train, with the arguments that their scripts have.

#include "tests/support/configs_in_notes.h"

#include <gtest/gtest.h>

#include "tests/lab/training.h"

namespace rz::lm {
namespace {

using namespace test;  // NOLINT: the test's own
using Updates = std::vector<UpdateReport>;

/// A few updates on two ranks; without a section "optimizer", AdamW from the arguments.
Updates train_by(const char* config, const TrainingArguments& arguments) {
  return lab::train({.model = lab::gpt(),
                     .ranks = 2,
                     .updates = 6,
                     .options =
                         [&](EngineOptions& o) {
                           o.ds_config =
                               parse_ds_config(config, "ds.json", arguments,
                                               {.ranks = 2, .hidden_size = 16, .adamw_by_default = true});
                           o.expected_terms.reset();
                         }})
      .updates;
}

void expect_falling_loss(const Updates& updates) {
  EXPECT_LT(updates.back().loss, updates.front().loss - 0.01);
  for (const UpdateReport& r : updates) EXPECT_FALSE(r.skipped || !r.diverged.empty()) << "update " << r.step;
}

TEST(ConfigsInNotes, OfATrainerTrains) {
  expect_falling_loss(train_by(trainer_config, {.learning_rate = 3e-3}));
  const Updates half = train_by(trainer_config, {.learning_rate = 3e-3, .precision = DType::f16});
  EXPECT_EQ(half.front().loss_scale, 65536) << "2 to the power of initial_scale_power";
}

TEST(ConfigsInNotes, OfAStudentTrains) {
  const TrainingArguments arguments{
      .per_device_train_batch_size = 2, .learning_rate = 3e-3, .warmup_steps = 2};
  const Updates updates = train_by(student_config, arguments);
  EXPECT_EQ(updates[0].lr, 0) << "a warm-up";
  EXPECT_EQ(updates.back().lr, 3e-3);
  expect_falling_loss(updates);
}

TEST(ConfigsInNotes, OfATeacherTrainsIfThereIsARate) {
  expect_falling_loss(train_by(teacher_config, {.learning_rate = 3e-3, .precision = DType::bf16}));
}

TEST(ConfigsInNotes, OfAccelerateTrains) {
  expect_falling_loss(train_by(accelerate_config, {.per_device_train_batch_size = 2, .learning_rate = 3e-3}));
}

}  // namespace
}  // namespace rz::lm
