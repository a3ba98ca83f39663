#include "sharding/checkpoint/tensor_source.h"

#include <algorithm>
#include <filesystem>
#include <map>
#include <memory>
#include <string_view>

#include "comm/core/error.h"
#include "sharding/checkpoint/checkpoint_folder.h"
#include "sharding/checkpoint/checkpoint_reader.h"
#include "sharding/checkpoint/float_values.h"
#include "sharding/checkpoint/safetensors.h"
#include "sharding/checkpoint/weight_files.h"
#include "sharding/io/disk.h"
#include "sharding/io/text.h"

namespace rz {
namespace {

namespace fs = std::filesystem;

SourceTensor source_tensor(const std::string& path, const std::string& name, const std::string& dtype,
                           const std::vector<std::uint64_t>& shape) {
  SourceTensor t{name, dtype, shape};
  for (const std::uint64_t extent : shape) t.count *= extent;
  const unsigned bits = safetensors_bits(dtype);
  require(bits > 0 && bits % 8 == 0, Errc::unsupported,
          escaped(concat(path, ": tensor '", name, "': its dtype ", dtype, " cannot be converted")));
  t.bytes = t.count * (bits / 8);
  return t;
}

/// The name in a model of a tensor of a checkpoint; empty for one of the optimizer.
std::string_view name_in_model(std::string_view tensor) {
  for (const std::string_view category : {"model/", "buffer/"})
    if (tensor.starts_with(category)) return tensor.substr(category.size());
  return {};
}

TensorSource open_checkpoint(const std::string& folder, TensorPart part) {
  const auto reader = std::make_shared<CheckpointReader>(CheckpointReader::open(folder));
  const auto stored_names = std::make_shared<std::map<std::string, std::string>>();
  TensorSource source;
  source.path = folder;
  source.state = reader->index().state;
  for (const auto& [stored, tensor] : reader->index().tensors) {
    const std::string name(part == TensorPart::all ? std::string_view(stored) : name_in_model(stored));
    if (name.empty()) continue;
    require(stored_names->emplace(name, stored).second, Errc::config,
            escaped(concat(folder, ": has a parameter and a buffer of the name '", name, "'")));
    source.tensors.push_back(source_tensor(folder, name, tensor.dtype, tensor.shape));
  }
  std::ranges::sort(source.tensors, {}, &SourceTensor::name);
  source.read_f32 = [reader, stored_names](const SourceTensor& t, std::uint64_t begin, std::span<float> out) {
    reader->read_f32(stored_names->at(t.name), begin, out);
  };
  source.read_bytes = [reader, stored_names](const SourceTensor& t, std::uint64_t begin,
                                             std::span<std::byte> out) {
    reader->read_bytes(stored_names->at(t.name), begin, out);
  };
  return source;
}

TensorSource open_weights(const std::string& path) {
  const WeightFiles files = WeightFiles::open(path);
  TensorSource source;
  source.path = files.path(), source.choice = files.choice();
  for (const WeightTensor& e : files.tensors())
    source.tensors.push_back(source_tensor(source.path, e.name, e.dtype, e.shape));
  source.read_f32 = [files](const SourceTensor& t, std::uint64_t begin, std::span<float> out) {
    files.read_f32(*files.find(t.name), begin, out);
  };
  source.read_bytes = [files](const SourceTensor& t, std::uint64_t begin, std::span<std::byte> out) {
    files.read_bytes(*files.find(t.name), begin * safetensors_bits(t.dtype) / 8, out);
  };
  return source;
}

/// Of weights beside checkpoints, or beside the one that is read, which has f32 values.
std::string choice_in(const fs::path& given, const fs::path& read) {
  std::string others;
  std::error_code problem;
  const auto time = fs::last_write_time(read / checkpoint_index_file, problem);
  for (const char* name : {"model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"}) {
    if (!path_exists((given / name).string())) continue;
    const bool newer = fs::last_write_time(given / name, problem) > time;
    others += concat(others.empty() ? "" : ", ", name, newer ? " (newer)" : "");
  }
  if (others.empty()) return "";
  return concat("read: the f32 values of ", escaped(read.string()), "; not read: ", others);
}

bool is_checkpoint(const fs::path& folder) { return path_exists((folder / checkpoint_index_file).string()); }

}  // namespace

bool is_floating_point(const SourceTensor& t) { return is_float_dtype(t.dtype); }

bool has_checkpoint(const std::string& path) {
  if (!is_folder(path)) return false;
  return is_checkpoint(path) || !checkpoint_tags(path).empty();
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

TensorSource open_tensors(const std::string& path, TensorPart part) {
  require(path_exists(path), Errc::config, path, ": no such file or folder");
  if (!has_checkpoint(path)) return open_weights(path);
  const std::string folder = checkpoint_at(path);
  TensorSource source = open_checkpoint(folder, part);
  source.choice = choice_in(path, folder);
  return source;
}

}  // namespace rz
