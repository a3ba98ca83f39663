#include "sharding/config/key_spec.h"

#include <algorithm>
#include <vector>

#include "comm/core/lazy.h"

namespace rz::ds {
namespace {

std::vector<ObjectSpec> all_objects() {
  std::vector<ObjectSpec> all;
  for (const auto part : {general_objects(), ringzero_objects(), optimizer_objects(), scheduler_objects(),
                          precision_objects(), zero_objects(), reporting_objects()})
    all.insert(all.end(), part.begin(), part.end());
  return all;
}

/// Distance of Damerau and Levenshtein, in which no part of a text is edited twice.
std::size_t edits_between(std::string_view a, std::string_view b) {
  std::vector<std::size_t> before(b.size() + 1), last(b.size() + 1), row(b.size() + 1);
  for (std::size_t j = 0; j <= b.size(); ++j) last[j] = j;
  for (std::size_t i = 1; i <= a.size(); ++i) {
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      row[j] = std::min({last[j] + 1, row[j - 1] + 1, last[j - 1] + (a[i - 1] != b[j - 1])});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
        row[j] = std::min(row[j], before[j - 2] + 1);
    }
    std::swap(before, last);
    std::swap(last, row);
  }
  return last[b.size()];
}

}  // namespace

std::span<const ObjectSpec> objects() {
  static constinit Lazy<std::vector<ObjectSpec>> all;
  return all.get(all_objects);
}

const ObjectSpec* find_object(std::string_view path, std::string_view variant) {
  const auto found = std::ranges::find_if(
      objects(), [&](const ObjectSpec& o) { return o.path == path && o.variant == variant; });
  return found == objects().end() ? nullptr : &*found;
}

const char* name(Treatment treatment) {
  constexpr const char* names[] = {"applied", "no effect", "always so", "not applied yet", "refused"};
  return names[static_cast<std::size_t>(treatment)];
}

const char* name(Argument argument) {
  constexpr const char* names[] = {"none",
                                   "train_batch_size",
                                   "per_device_train_batch_size",
                                   "gradient_accumulation_steps",
                                   "learning_rate",
                                   "adam_beta1 and adam_beta2",
                                   "adam_epsilon",
                                   "weight_decay",
                                   "max_grad_norm",
                                   "precision",
                                   "precision",
                                   "0",
                                   "the learning rate",
                                   "warmup_steps",
                                   "total_steps",
                                   "total_steps",
                                   "the model's hidden size",
                                   "the model's hidden size",
                                   "the model's hidden size",
                                   "ddp_find_unused_parameters",
                                   "ddp_static_graph",
                                   "ddp_broadcast_buffers",
                                   "ddp_comm_hook",
                                   "gradient_checkpointing",
                                   "dataloader_drop_last",
                                   "logging_steps",
                                   "output_dir",
                                   "save_steps",
                                   "save_minutes",
                                   "save_total_limit",
                                   "async_save",
                                   "resume_from_checkpoint",
                                   "eval_steps",
                                   "metric_for_best_model",
                                   "greater_is_better",
                                   "load_best_model_at_end",
                                   "early_stopping_patience",
                                   "early_stopping_threshold"};
  static_assert(std::size(names) == static_cast<std::size_t>(Argument::early_stopping_threshold) + 1);
  return names[static_cast<std::size_t>(argument)];
}

std::string_view nearest_key(std::string_view word, std::span<const KeySpec> keys) {
  std::string_view best;
  std::size_t least = word.size();
  for (const KeySpec& k : keys) {
    const std::string_view key = k.key;
    const std::size_t edits = edits_between(word, key);
    if (4 * edits <= std::max(word.size(), key.size()) && edits < least) least = edits, best = key;
  }
  return best;
}

}  // namespace rz::ds
