#pragma once
/// Runs of train_lm that are stopped and resumed.

#include <algorithm>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <ostream>
#include <string>
#include <vector>

#include "sharding/io/json.h"
#include "tests/support/rzrun.h"
#include "tools/rzrun/ranks/processes.h"

namespace rz::test {

/// A model with dropout, and 25 samples in random order, of which an update has 8, in micro-batches of 2: an
/// update is several passes on one or two ranks, and every third one crosses an epoch. The rate rises for 8
/// updates.
class SmallGpt {
 public:
  SmallGpt() {
    put("model.json",
        R"({"n_layer": 2, "n_head": 2, "n_embd": 16, "n_positions": 16, "vocab_size": 256, "embd_pdrop": 0.1,)"
        R"( "attn_pdrop": 0.1, "resid_pdrop": 0.1})");
    put_config("ds.json", "");
    put("tokens.bin",
        read_text_file(RZ_SOURCE_DIR "/tests/data/gpt2_tiny/tokens.bin").substr(0, 2 * (25 * positions + 1)));
  }

  std::string operator/(const std::string& name) const { return folder_ / name; }
  void put(const std::string& name, const std::string& text) const {
    std::ofstream(*this / name, std::ios::binary) << text;
  }
  /// `more`: keys of the configuration, each with a comma before it.
  void put_config(const std::string& name, const std::string& more, int train_batch_size = 8) const {
    put(name, concat(R"({"train_batch_size": )", train_batch_size,
                     R"(, "train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.5,
                      "zero_optimization": {"stage3_param_persistence_threshold": 0},
                      "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}},
                      "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 8, "warmup_max_lr": 0.01}})",
                     more, "}"));
  }

  /// train_lm with the flags; later ones replace earlier ones.
  std::vector<std::string> program(std::vector<std::string> flags) const {
    std::vector<std::string> all{built("train_lm"),
                                 "--model",
                                 *this / "model.json",
                                 "--config",
                                 *this / "ds.json",
                                 "--tokens",
                                 *this / "tokens.bin",
                                 "--threads",
                                 "1",
                                 "--seed",
                                 "3"};
    for (std::size_t i = 0; i < flags.size(); ++i) {
      const auto at = std::ranges::find(all, flags[i] == "--data" ? "--tokens" : flags[i]);
      if (at != all.end() && flags[i].starts_with("--")) {
        *at = flags[i];
        *(at + 1) = flags[++i];
      } else {
        all.push_back(flags[i]);
      }
    }
    return all;
  }
  /// The same on ranks that rzrun starts.
  std::vector<std::string> on_ranks(int ranks, const std::vector<std::string>& flags,
                                    const std::vector<std::string>& launcher = {}) const {
    std::vector<std::string> all{built("rzrun"), "-n", concat(ranks)};
    all.insert(all.end(), launcher.begin(), launcher.end());
    const auto words = program(flags);
    all.insert(all.end(), words.begin(), words.end());
    return all;
  }

 private:
  static constexpr std::size_t positions = 16;
  Folder folder_;
};

/// What a run leaves: the bytes of its weights, and its metrics without times.
struct TrainedGpt {
  std::string weights;
  std::vector<nlohmann::json> metrics;
  bool operator==(const TrainedGpt&) const = default;
};

/// For failed expectations.
inline void PrintTo(const TrainedGpt& t, std::ostream* out) {
  *out << t.weights.size() << " bytes of hash " << std::hash<std::string>()(t.weights);
  for (const auto& update : t.metrics) *out << "\n" << update;
}

inline TrainedGpt trained_gpt(const std::string& folder, const std::string& metrics) {
  TrainedGpt found{read_text_file(folder + "/model.safetensors"), {}};
  for (const std::string& line : lines(read_text_file(metrics))) {
    auto update = nlohmann::json::parse(line);
    for (const char* key : {"tokens_per_second", "step_ms", "exposed_comm_ms"}) update.erase(key);
    found.metrics.push_back(update);
  }
  return found;
}

}  // namespace rz::test
