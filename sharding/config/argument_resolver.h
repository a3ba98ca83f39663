#pragma once
/// What "auto" stands for, and which arguments were used.

#include <set>

#include "sharding/config/settings.h"
#include "sharding/config/training_arguments.h"

namespace rz::ds {

/// The arguments of a run, for a SettingsReader. Refers to them, and they must outlive it.
class ArgumentResolver {
 public:
  ArgumentResolver(const TrainingArguments& arguments, const RunFacts& facts, const Settings& settings,
                   const ConfigErrors& errors, const std::string& file)
      : arguments_(arguments), facts_(facts), settings_(settings), errors_(errors), file_(file) {}

  std::optional<ArgumentValue> given(Argument);
  std::optional<ArgumentValue> automatic(Argument);
  /// Errors name the arguments that no key had a use for.
  void require_all_used(ConfigErrors&) const;

 private:
  std::optional<ArgumentValue> max_rate();
  std::optional<ArgumentValue> warmup_by_ratio();
  std::optional<ArgumentValue> total_steps() const;
  std::optional<ArgumentValue> by_hidden_size(Argument) const;

  const TrainingArguments& arguments_;
  const RunFacts& facts_;
  const Settings& settings_;
  const ConfigErrors& errors_;
  const std::string& file_;
  std::set<Argument> used_;
  bool ratio_used_ = false;
};

/// The batch sizes among the settings.
BatchConfig batch_of(const Settings&);
/// With Hugging Face's micro batch of 8 if "auto" cannot be derived from another size.
BatchConfig with_batch_defaults(BatchConfig, const Settings&);

}  // namespace rz::ds
