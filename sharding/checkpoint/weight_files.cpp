#include "sharding/checkpoint/weight_files.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "comm/core/error.h"
#include "sharding/checkpoint/float_values.h"
#include "sharding/checkpoint/safetensors.h"
#include "sharding/checkpoint/state_files.h"
#include "sharding/checkpoint/torch_files/torch_file.h"
#include "sharding/checkpoint/zero_checkpoint.h"
#include "sharding/io/disk.h"
#include "sharding/io/json.h"
#include "sharding/io/text.h"

namespace rz {
namespace {

namespace fs = std::filesystem;

constexpr std::array folder_files{"model.safetensors", "model.safetensors.index.json", "pytorch_model.bin",
                                  "pytorch_model.bin.index.json"};

/// The folder of this library's checkpoint: `folder`, or the one that its file `latest` names; empty if there
/// is none. (checkpoint_index.h has their format.)
fs::path own_checkpoint(const fs::path& folder) {
  constexpr const char* index = "checkpoint.json";
  std::error_code ignored;
  if (fs::exists(folder / index, ignored)) return folder;
  const fs::path latest = folder / "latest";
  if (!fs::is_regular_file(latest, ignored) || fs::file_size(latest, ignored) > 1000) return {};
  std::string tag = read_text_file(latest.string());
  while (!tag.empty() && static_cast<unsigned char>(tag.back()) <= ' ') tag.pop_back();
  if (tag.empty() || tag.find('/') != tag.npos || !fs::exists(folder / tag / index, ignored)) return {};
  return folder / tag;
}

/// Weights in a folder, and what was chosen of several.
struct FoundWeights {
  std::string path, choice;
};

/// " (older)" or " (newer)", of a file beside the one that is read.
const char* age_of(const fs::path& file, const fs::path& read) {
  std::error_code problem;
  const auto a = fs::last_write_time(file, problem), b = fs::last_write_time(read, problem);
  return problem || a == b ? "" : a < b ? " (older)" : " (newer)";
}

void refuse_older_than_checkpoint(const fs::path& file, const fs::path& checkpoint) {
  if (checkpoint.empty()) return;
  std::error_code problem;
  const auto of_file = fs::last_write_time(file, problem);
  const auto of_checkpoint = fs::last_write_time(checkpoint / "checkpoint.json", problem);
  require(problem || of_checkpoint <= of_file, Errc::config, escaped(file.string()),
          ": is older than the checkpoint ", escaped(checkpoint.string()),
          " in its folder; give the file itself, or what `checkpoint merge ", escaped(checkpoint.string()),
          " OUT` writes");
}

/// The file of weights in a folder; the folder itself if it has a checkpoint of DeepSpeed, whose f32 weights
/// are those that the others were rounded or exported from.
FoundWeights weights_in(const fs::path& folder) {
  std::vector<fs::path> files;
  for (const char* name : folder_files)
    if (path_exists((folder / name).string())) files.push_back(folder / name);
  const auto others = [&](const fs::path& read) {
    std::string all;
    for (const fs::path& f : files)
      if (f != read) all += concat(all.empty() ? "" : ", ", f.filename().string(), age_of(f, read));
    return all;
  };
  if (is_deepspeed_checkpoint(folder.string())) {
    const fs::path read = find_deepspeed_files(folder.string()).folder;
    return {folder.string(), files.empty() ? ""
                                           : concat("read: the f32 weights of DeepSpeed in ",
                                                    escaped(read.string()), "; not read: ", others(read))};
  }
  const fs::path own = own_checkpoint(folder);
  if (files.empty()) {
    std::string names;
    for (const char* name : folder_files) names += concat(names.empty() ? "" : ", ", name);
    require(own.empty(), Errc::config, escaped(folder.string()),
            ": holds a checkpoint, not weights alone; give what `checkpoint merge ", escaped(own.string()),
            " OUT` writes");
    fail(Errc::config, escaped(folder.string()), ": holds no weights, which are one of ", names,
         ", or a checkpoint of DeepSpeed");
  }
  const fs::path& read = files[0];
  refuse_older_than_checkpoint(read, own);
  std::string rest = others(read);
  if (!own.empty())
    rest += concat(rest.empty() ? "" : ", ", "the checkpoint ", own.filename().string(), " (older)");
  if (rest.empty()) return {read.string(), ""};
  return {read.string(), concat("read: ", escaped(read.string()), "; not read: ", escaped(rest))};
}

/// File names by tensor.
std::map<std::string, std::string> read_weight_map(const std::string& path) {
  const nlohmann::json document = parse_json(read_text_file(path), path, JsonDialect::strict);
  const JsonObject map = JsonObject(document, path).object("weight_map");
  std::map<std::string, std::string> files;
  for (const std::string& tensor : map.keys()) {
    const std::string file = map.text(tensor, "");
    if (file.empty() || file.find('/') != std::string::npos)
      map.fail_at(tensor, concat("expected the name of a file in the same folder, found ",
                                 to_display(map.at(tensor))));
    files[tensor] = file;
  }
  return files;
}

/// Reads bytes of one tensor.
using ReadBytes = std::function<void(std::uint64_t begin, std::span<std::byte> out)>;

struct OpenedTensor {
  WeightTensor tensor;
  ReadBytes read;
};

std::vector<OpenedTensor> open_safetensors_file(const std::string& path) {
  const SafetensorsFile file = SafetensorsFile::open(path);
  std::vector<OpenedTensor> all;
  for (const SafetensorsEntry& e : file.tensors())
    all.push_back(
        {{e.name, e.dtype, e.shape, e.count, e.end - e.begin},
         [file, e = &e](std::uint64_t begin, std::span<std::byte> out) { file.read_bytes(*e, begin, out); }});
  return all;
}

std::vector<OpenedTensor> open_torch_file(const std::string& path, std::string& choice) {
  const TorchFile file = TorchFile::open(path);
  std::vector<OpenedTensor> all;
  const auto [key, tensors] = find_state_dict(file);
  if (!key.empty()) choice = concat("read: '", escaped(key), "' of ", escaped(path));
  for (const auto& [name, t] : tensors)
    all.push_back({{name, t.dtype, t.shape, t.count, t.count * t.element_bytes},
                   [file, t = t](std::uint64_t begin, std::span<std::byte> out) {
                     file.read(t, begin / t.element_bytes, out);
                   }});
  return all;
}

std::vector<OpenedTensor> open_deepspeed(const ZeroCheckpoint& checkpoint) {
  std::vector<OpenedTensor> all;
  for (const ZeroTensor& t : checkpoint.tensors())
    all.push_back({{t.name, t.dtype, t.shape, t.count, t.count * t.element_bytes},
                   [checkpoint, t = &t](std::uint64_t begin, std::span<std::byte> out) {
                     checkpoint.read(*t, begin / t->element_bytes, out);
                   }});
  return all;
}

/// A model that ZeRO-3 partitions is saved with tensors of shape [0] by programs that do not gather it.
void refuse_placeholders(const std::string& path, const std::vector<OpenedTensor>& all) {
  const auto is_placeholder = [](const OpenedTensor& t) {
    const std::string_view name = t.tensor.name;
    return t.tensor.shape == std::vector<std::uint64_t>{0} && is_float_dtype(t.tensor.dtype) &&
           (name.ends_with("weight") || name.ends_with("bias"));
  };
  const auto first = std::ranges::find_if(all, is_placeholder);
  if (first == all.end()) return;
  const std::string folder = fs::path(path).parent_path().string(), here = folder.empty() ? "." : folder;
  fail(Errc::config, escaped(path), ": tensor '", escaped(first->tensor.name), "' and ",
       std::ranges::count_if(all, is_placeholder) - 1,
       " others have 0 elements, as a rank of ZeRO-3 has them whose parts are elsewhere; give ",
       is_deepspeed_checkpoint(here) ? escaped(find_deepspeed_files(here).folder)
                                     : "the folder of DeepSpeed's checkpoint, global_stepN");
}

/// Sets `choice` if the file has more than weights.
std::vector<OpenedTensor> open_weight_file(const std::string& path, std::string& choice) {
  auto all = TorchFile::is_one(path) ? open_torch_file(path, choice) : open_safetensors_file(path);
  refuse_placeholders(path, all);
  return all;
}

}  // namespace

struct WeightFiles::State {
  struct Place {
    std::size_t tensor;
    std::string file;
  };
  std::string path, choice;
  std::vector<WeightTensor> tensors;
  std::vector<ReadBytes> reads;  // of each tensor
  std::map<std::string, Place, std::less<>> places;

  void add(const std::string& file, std::vector<OpenedTensor>);
  void add_index();

  const ReadBytes& read_of(const WeightTensor& t) const { return reads[places.find(t.name)->second.tensor]; }
  template <class... T>
  void check_range(bool ok, const WeightTensor& t, const T&... parts) const {
    if (!ok) fail(Errc::invalid_argument, escaped(concat(path, ": tensor '", t.name, "': ", parts...)));
  }
};

void WeightFiles::State::add(const std::string& file, std::vector<OpenedTensor> opened) {
  for (auto& [tensor, read] : opened) {
    const auto [place, is_new] = places.emplace(tensor.name, Place{tensors.size(), file});
    require(is_new, Errc::io,
            escaped(concat(file, ": tensor '", tensor.name, "' is also in ", place->second.file)));
    tensors.push_back(std::move(tensor)), reads.push_back(std::move(read));
  }
}

void WeightFiles::State::add_index() {
  const auto weight_map = read_weight_map(path);
  std::set<std::string> names;
  for (const auto& [tensor, file] : weight_map) names.insert(file);
  for (const std::string& name : names) {
    const std::string file = (fs::path(path).parent_path() / name).string();
    add(file, open_weight_file(file, choice));
  }
  for (const auto& [name, place] : places)
    require(weight_map.contains(name), Errc::io,
            escaped(concat(place.file, ": tensor '", name, "' is not in weight_map of ", path)));
  for (const auto& [tensor, file] : weight_map) {
    const auto place = places.find(tensor);
    require(place != places.end() && fs::path(place->second.file).filename() == file, Errc::io,
            escaped(concat(path, ": weight_map: tensor '", tensor, "' is not in ", file)));
  }
}

WeightFiles WeightFiles::open(const std::string& given) {
  auto state = std::make_shared<State>();
  state->path = given;
  if (is_folder(given)) {
    FoundWeights found = weights_in(given);
    state->path = std::move(found.path), state->choice = std::move(found.choice);
  }
  if (state->path.ends_with(".index.json")) {
    state->add_index();
  } else if (is_folder(state->path)) {
    const ZeroCheckpoint checkpoint = ZeroCheckpoint::open(state->path);
    state->path = checkpoint.path();
    state->add(state->path, open_deepspeed(checkpoint));
  } else {
    state->add(state->path, open_weight_file(state->path, state->choice));
  }
  WeightFiles all;
  all.state_ = std::move(state);
  return all;
}

const std::string& WeightFiles::path() const { return state_->path; }
const std::string& WeightFiles::choice() const { return state_->choice; }
const std::vector<WeightTensor>& WeightFiles::tensors() const { return state_->tensors; }

const WeightTensor* WeightFiles::find(std::string_view name) const {
  const auto found = state_->places.find(name);
  return found == state_->places.end() ? nullptr : &state_->tensors[found->second.tensor];
}

void WeightFiles::read_f32(const WeightTensor& t, std::uint64_t begin, std::span<float> out) const {
  state_->check_range(begin <= t.count && out.size() <= t.count - begin, t, "elements ", begin, " to ",
                      begin + out.size(), " requested of ", t.count);
  require(is_float_dtype(t.dtype), Errc::unsupported,
          escaped(concat(path(), ": tensor '", t.name, "': dtype ", t.dtype,
                         " cannot be read as f32; F32, F16, BF16 and F64 can")));
  const ReadBytes& read = state_->read_of(t);
  const std::uint64_t element_bytes = safetensors_bits(t.dtype) / 8;
  read_as_f32(t.dtype, begin, out, [&](std::uint64_t element, std::span<std::byte> bytes) {
    read(element * element_bytes, bytes);
  });
}

void WeightFiles::read_bytes(const WeightTensor& t, std::span<std::byte> out) const {
  state_->check_range(out.size() == t.bytes, t, out.size(), " bytes requested of ", t.bytes);
  state_->read_of(t)(0, out);
}

void WeightFiles::read_bytes(const WeightTensor& t, std::uint64_t begin, std::span<std::byte> out) const {
  state_->check_range(begin <= t.bytes && out.size() <= t.bytes - begin, t, "bytes from ", begin, " on, ",
                      out.size(), " of them, requested of ", t.bytes);
  state_->read_of(t)(begin, out);
}

}  // namespace rz
