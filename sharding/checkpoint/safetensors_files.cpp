#include "sharding/checkpoint/safetensors_files.h"

#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "comm/core/error.h"
#include "sharding/io/json.h"
#include "sharding/io/text.h"

namespace rz {
namespace {

namespace fs = std::filesystem;

constexpr const char* single_file = "model.safetensors";
constexpr const char* index_file = "model.safetensors.index.json";

fs::path weights_in(const fs::path& folder) {
  for (const char* name : {single_file, index_file})
    if (fs::exists(folder / name)) return folder / name;
  fail(Errc::config, folder.string(), ": holds neither ", single_file, " nor ", index_file,
       fs::exists(folder / "pytorch_model.bin") ? "; save the model with safe_serialization=True" : "");
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

}  // namespace

struct SafetensorsFiles::State {
  std::string path;
  std::vector<SafetensorsFile> files;
  std::vector<SafetensorsEntry> tensors;
  struct Place {
    std::size_t tensor, file;
  };
  std::map<std::string, Place, std::less<>> places;

  const SafetensorsFile& file_of(const std::string& tensor) const { return files[places.at(tensor).file]; }
  void add_file(const SafetensorsFile&);
  void add_index();
};

void SafetensorsFiles::State::add_file(const SafetensorsFile& file) {
  for (const SafetensorsEntry& entry : file.tensors()) {
    if (const auto found = places.find(entry.name); found != places.end())
      fail(Errc::io, escaped(concat(file.path(), ": tensor '", entry.name, "' is also in ",
                                    files[found->second.file].path())));
    places[entry.name] = {tensors.size(), files.size()};
    tensors.push_back(entry);
  }
  files.push_back(file);
}

void SafetensorsFiles::State::add_index() {
  const auto weight_map = read_weight_map(path);
  std::set<std::string> names;
  for (const auto& [tensor, file] : weight_map) names.insert(file);
  for (const std::string& name : names)
    add_file(SafetensorsFile::open((fs::path(path).parent_path() / name).string()));
  for (const SafetensorsEntry& entry : tensors)
    require(weight_map.contains(entry.name), Errc::io,
            escaped(concat(file_of(entry.name).path(), ": tensor '", entry.name, "' is not in weight_map of ",
                           path)));
  for (const auto& [tensor, file] : weight_map)
    require(places.contains(tensor) && fs::path(file_of(tensor).path()).filename() == file, Errc::io,
            escaped(concat(path, ": weight_map: tensor '", tensor, "' is not in ", file)));
}

SafetensorsFiles SafetensorsFiles::open(const std::string& given) {
  auto state = std::make_shared<State>();
  state->path = fs::is_directory(given) ? weights_in(given).string() : given;
  if (state->path.ends_with(".index.json")) {
    state->add_index();
  } else {
    state->add_file(SafetensorsFile::open(state->path));
  }
  SafetensorsFiles all;
  all.state_ = std::move(state);
  return all;
}

const std::string& SafetensorsFiles::path() const { return state_->path; }
const std::vector<SafetensorsEntry>& SafetensorsFiles::tensors() const { return state_->tensors; }

const SafetensorsEntry* SafetensorsFiles::find(std::string_view name) const {
  const auto found = state_->places.find(name);
  return found == state_->places.end() ? nullptr : &state_->tensors[found->second.tensor];
}

void SafetensorsFiles::read_f32(const SafetensorsEntry& entry, std::uint64_t begin,
                                std::span<float> out) const {
  state_->file_of(entry.name).read_f32(entry, begin, out);
}

void SafetensorsFiles::read_bytes(const SafetensorsEntry& entry, std::span<std::byte> out) const {
  state_->file_of(entry.name).read_bytes(entry, out);
}

void SafetensorsFiles::read_bytes(const SafetensorsEntry& entry, std::uint64_t begin,
                                  std::span<std::byte> out) const {
  state_->file_of(entry.name).read_bytes(entry, begin, out);
}

}  // namespace rz
