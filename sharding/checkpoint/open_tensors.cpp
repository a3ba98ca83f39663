#include "sharding/checkpoint/open_tensors.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "comm/core/error.h"
#include "sharding/checkpoint/checkpoint_folder.h"
#include "sharding/checkpoint/checkpoint_reader.h"
#include "sharding/checkpoint/deepspeed_weights.h"
#include "sharding/checkpoint/safetensors.h"
#include "sharding/checkpoint/torch_files/torch_file.h"
#include "sharding/io/disk.h"
#include "sharding/io/json.h"
#include "sharding/io/text.h"

namespace rz {
namespace {

namespace fs = std::filesystem;

constexpr std::array folder_files{"model.safetensors", "model.safetensors.index.json", "pytorch_model.bin",
                                  "pytorch_model.bin.index.json"};

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

TensorSource open_torch_file(const std::string& path) {
  const TorchFile file = TorchFile::open(path);
  TensorSource source(path);
  const auto [key, tensors] = find_state_dict(file);
  if (!key.empty()) source.set_choice(concat("read: '", escaped(key), "' of ", escaped(path)));
  for (const auto& [name, t] : tensors)
    source.add({name, t.dtype, t.shape, t.count, t.count * t.element_bytes},
               [file, t = t](std::uint64_t begin, std::span<std::byte> out) {
                 file.read(t, begin / t.element_bytes, out);
               });
  return source;
}

/// A model that ZeRO-3 partitions is saved with tensors of shape [0] by programs that do not gather it.
void refuse_placeholders(const TensorSource& source) {
  const auto is_placeholder = [](const TensorInfo& t) {
    return t.shape == std::vector<std::uint64_t>{0} && is_float_dtype(t.dtype) &&
           (t.name.ends_with("weight") || t.name.ends_with("bias"));
  };
  const auto first = std::ranges::find_if(source.tensors(), is_placeholder);
  if (first == source.tensors().end()) return;
  const std::string here = folder_of(source.path());
  fail(Errc::config, escaped(source.path()), ": tensor '", escaped(first->name), "' and ",
       std::ranges::count_if(source.tensors(), is_placeholder) - 1,
       " others have 0 elements, as a rank of ZeRO-3 has them whose parts are elsewhere; give ",
       is_deepspeed_checkpoint(here) ? escaped(find_deepspeed_files(here).folder)
                                     : "the folder of DeepSpeed's checkpoint, global_stepN");
}

TensorSource open_weight_file(const std::string& path) {
  const TensorSource source = TorchFile::is_one(path) ? open_torch_file(path) : open_safetensors(path);
  refuse_placeholders(source);
  return source;
}

TensorSource open_index(const std::string& path) {
  const auto weight_map = read_weight_map(path);
  std::set<std::string> names;
  for (const auto& [tensor, file] : weight_map) names.insert(file);
  TensorSource source(path);
  for (const std::string& name : names)
    source.add(open_weight_file((fs::path(path).parent_path() / name).string()));
  std::map<std::string_view, const TensorInfo*> by_name;
  for (const TensorInfo& t : source.tensors()) by_name[t.name] = &t;
  for (const auto& [name, t] : by_name)
    require(weight_map.contains(t->name), Errc::io,
            escaped(concat(source.path_of(*t), ": tensor '", name, "' is not in weight_map of ", path)));
  for (const auto& [tensor, file] : weight_map) {
    const TensorInfo* t = source.find(tensor);
    require(t && fs::path(source.path_of(*t)).filename() == file, Errc::io,
            escaped(concat(path, ": weight_map: tensor '", tensor, "' is not in ", file)));
  }
  return source;
}

// ---- folders

/// " (older)" or " (newer)", of a file beside the one that is read.
const char* age_of(const fs::path& file, const fs::path& read) {
  std::error_code problem;
  const auto a = fs::last_write_time(file, problem), b = fs::last_write_time(read, problem);
  return problem || a == b ? "" : a < b ? " (older)" : " (newer)";
}

bool is_checkpoint(const fs::path& folder) { return path_exists((folder / checkpoint_index_file).string()); }

/// The folder of this library's checkpoint: `folder`, or the one that its file `latest` names; empty if there
/// is none.
fs::path own_checkpoint(const std::string& folder) {
  if (is_checkpoint(folder)) return folder;
  try {
    const auto tag = read_tag_file(folder, latest_file);
    return tag && is_checkpoint(fs::path(folder) / *tag) ? fs::path(folder) / *tag : fs::path();
  } catch (const Error&) {  // a file of another program
    return {};
  }
}

std::vector<fs::path> weight_files_in(const fs::path& folder) {
  std::vector<fs::path> files;
  for (const char* name : folder_files)
    if (path_exists((folder / name).string())) files.push_back(folder / name);
  return files;
}

/// What lies in `given` besides what is read, with its age; empty if nothing does.
std::string others_than(const fs::path& read, const fs::path& given) {
  const fs::path own = own_checkpoint(given.string());
  const fs::path dated = is_checkpoint(read) ? read / checkpoint_index_file : read;
  std::string all;
  const auto add = [&](const std::string& what, const fs::path& file) {
    all += concat(all.empty() ? "" : ", ", what, age_of(file, dated));
  };
  for (const fs::path& f : weight_files_in(given))
    if (f != read) add(f.filename().string(), f);
  if (!own.empty() && own != read)
    add(concat("the checkpoint ", own.filename().string()), own / checkpoint_index_file);
  if (is_checkpoint(read) && read != given)
    for (const std::string& tag : checkpoint_tags(given.string()))
      if (tag != read.filename()) add(concat("the checkpoint ", tag), given / tag / checkpoint_index_file);
  return all;
}

void note_choice(TensorSource& source, const char* what, const fs::path& read, const std::string& given) {
  if (!source.choice().empty()) return;  // of the file that is read
  if (const std::string others = others_than(read, given); !others.empty())
    source.set_choice(concat("read: ", what, escaped(read.string()), "; not read: ", escaped(others)));
}

/// Whether the weights of a folder are those of its own checkpoint, which has f32 values: unless a file of
/// weights was written after it.
bool has_newest(const fs::path& own, const std::vector<fs::path>& files) {
  if (own.empty() || files.empty()) return !own.empty();
  std::error_code problem;
  const auto of_file = fs::last_write_time(files[0], problem);
  return fs::last_write_time(own / checkpoint_index_file, problem) > of_file && !problem;
}

[[noreturn]] void refuse_folder(const std::string& folder) {
  std::string names;
  for (const char* name : folder_files) names += concat(names.empty() ? "" : ", ", name);
  fail(Errc::config, escaped(folder), ": holds no weights, which are one of ", names,
       ", or a checkpoint of DeepSpeed or of this library");
}

TensorSource open_folder(const std::string& folder) {
  // The f32 weights are those that others were rounded or exported from.
  if (is_deepspeed_checkpoint(folder)) {
    TensorSource source = open_deepspeed(folder);
    note_choice(source, "the f32 weights of DeepSpeed in ", source.path(), folder);
    return source;
  }
  const auto files = weight_files_in(folder);
  if (has_newest(own_checkpoint(folder), files) || (files.empty() && has_checkpoint(folder)))
    return open_checkpoint(folder, TensorPart::weights);
  if (files.empty()) refuse_folder(folder);
  TensorSource source = open_tensors(files[0].string());
  note_choice(source, "", files[0], folder);
  return source;
}

}  // namespace

bool has_checkpoint(const std::string& path) {
  return is_folder(path) && (is_checkpoint(path) || !checkpoint_tags(path).empty());
}

std::string checkpoint_at(const std::string& path) {
  require(path_exists(path), Errc::config, path, ": no such folder");
  if (is_checkpoint(path)) return path;
  const auto tag = read_tag_file(path, latest_file);
  require(tag.has_value(), Errc::config, path, ": holds neither ", checkpoint_index_file, " nor a file ",
          latest_file, "; give the folder of a checkpoint");
  const fs::path folder = fs::path(path) / *tag;
  require(is_checkpoint(folder), Errc::config, path, ": ", latest_file, " names ", *tag,
          ", which is no checkpoint in this folder");
  return folder.string();
}

TensorSource open_checkpoint(const std::string& path, TensorPart part) {
  const std::string folder = checkpoint_at(path);
  TensorSource source = CheckpointReader::open(folder).tensors(part);
  note_choice(source, "the f32 values of ", folder, path);
  return source;
}

TensorSource open_tensors(const std::string& path) {
  if (is_folder(path)) return open_folder(path);
  return path.ends_with(".index.json") ? open_index(path) : open_weight_file(path);
}

}  // namespace rz
