#include <cstdio>
#include <filesystem>
#include <optional>
#include <string_view>
#include <vector>

#include "comm/core/error.h"
#include "sharding/checkpoint/deepspeed_weights.h"
#include "sharding/io/disk.h"
#include "sharding/io/json.h"
#include "sharding/io/text.h"

namespace rz {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view model_ending = "_model_states.pt", optimizer_ending = "_optim_states.pt";

std::vector<std::string> names_in(const fs::path& folder) {
  std::vector<std::string> names;
  std::error_code problem;
  for (fs::directory_iterator entry(folder, problem), end; !problem && entry != end; entry.increment(problem))
    names.push_back(entry->path().filename().string());
  return names;
}

bool is_state_file(std::string_view name) {
  return name.ends_with(model_ending) || name.ends_with(optimizer_ending);
}

bool has_state_files(const fs::path& folder) {
  for (const std::string& name : names_in(folder))
    if (is_state_file(name)) return true;
  return false;
}

/// The folder of a checkpoint; empty if there is none.
fs::path checkpoint_folder(const std::string& path) {
  if (has_state_files(path)) return path;
  const fs::path latest = fs::path(path) / "latest";
  std::error_code problem;
  if (!fs::is_regular_file(latest, problem) || fs::file_size(latest, problem) > 1000) return {};
  std::string tag = read_text_file(latest.string());
  while (!tag.empty() && (tag.back() == '\n' || tag.back() == '\r' || tag.back() == ' ')) tag.pop_back();
  if (tag.empty() || tag[0] == '.' || tag.find_first_of(std::string_view("/\0", 2)) != tag.npos) return {};
  const fs::path folder = fs::path(path) / tag;
  return has_state_files(folder) ? folder : fs::path();
}

struct StateFile {
  unsigned rank = 0, model_rank = 0;
  bool optimizer = false;
};

/// Whether a name has the numbers of a format, and nothing else.
template <class... T>
bool matches(const std::string& name, const char* format, T*... numbers) {
  int length = -1;
  return std::sscanf(name.c_str(), format, numbers..., &length) == sizeof...(T) &&
         length == static_cast<int>(name.size());
}

std::optional<StateFile> state_file(std::string name) {
  StateFile f;
  if (matches(name, "mp_rank_%9u_model_states.pt%n", &f.model_rank)) return f;
  if (matches(name, "zero_pp_rank_%9u_mp_rank_%9u_model_states.pt%n", &f.rank, &f.model_rank)) return f;
  for (const char* front : {"bf16_", "fp16_"})
    if (name.starts_with(front)) name = name.substr(5);
  f.optimizer = true;
  if (matches(name, "zero_pp_rank_%9u_mp_rank_%9u_optim_states.pt%n", &f.rank, &f.model_rank)) return f;
  return std::nullopt;
}

/// What a file belongs to that is not read; null if it is read.
const char* unsupported_part(const std::string& name) {
  if (name.find("expert_") != name.npos || name.starts_with("expp_rank_")) return "experts (MoE)";
  if (name.starts_with("layer_")) return "pipeline parallelism";
  const auto file = state_file(name);
  if (!file) return "an unknown kind of checkpoint";
  return file->model_rank > 0 ? "tensor parallelism" : nullptr;
}

void check_parts(const fs::path& folder, const std::vector<std::string>& names) {
  require(!is_folder((folder / "zero").string()), Errc::unsupported, escaped(folder.string()),
          ": is a universal checkpoint of DeepSpeed; read the checkpoint that it was made of");
  for (const std::string& name : names) {
    if (!is_state_file(name)) continue;
    if (const char* part = unsupported_part(name))
      fail(Errc::unsupported, escaped((folder / name).string()), ": belongs to ", part,
           ", which is not read; write the weights with DeepSpeed");
  }
}

void check_ranks(const fs::path& folder, const std::map<std::size_t, std::string>& files,
                 const char* format) {
  std::size_t expected = 0;
  for (const auto& [rank, path] : files) {
    char name[80];
    std::snprintf(name, sizeof name, format, expected);
    require(rank == expected++, Errc::config, escaped((folder / name).string()),
            ": is missing; the checkpoint has a file of each rank, up to rank ", files.rbegin()->first);
  }
}

}  // namespace

bool is_deepspeed_checkpoint(const std::string& path) { return !checkpoint_folder(path).empty(); }

DeepSpeedFiles find_deepspeed_files(const std::string& path) {
  const fs::path folder = checkpoint_folder(path);
  require(!folder.empty(), Errc::config, escaped(path), ": holds no checkpoint of DeepSpeed");
  const auto names = names_in(folder);
  check_parts(folder, names);
  DeepSpeedFiles files{.folder = folder.string(), .models = {}, .optimizers = {}};
  for (const std::string& name : names)
    if (const auto file = is_state_file(name) ? state_file(name) : std::nullopt) {
      auto& of_kind = file->optimizer ? files.optimizers : files.models;
      const auto [place, is_new] = of_kind.emplace(file->rank, (folder / name).string());
      require(is_new, Errc::config, escaped((folder / name).string()), ": is of the same rank as ",
              escaped(place->second), "; remove what belongs to another checkpoint");
    }
  require(!files.models.empty(), Errc::config, escaped(folder.string()), ": holds no file of the name *",
          model_ending);
  check_ranks(folder, files.models, "zero_pp_rank_%zu_mp_rank_00_model_states.pt");
  check_ranks(folder, files.optimizers, "zero_pp_rank_%zu_mp_rank_00_optim_states.pt");
  return files;
}

}  // namespace rz
