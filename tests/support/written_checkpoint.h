#pragma once
/// Checkpoints of tensors whose elements are known: element i of a tensor is `first` + i.

#include <filesystem>
#include <fstream>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "sharding/checkpoint/checkpoint_index.h"
#include "sharding/checkpoint/open_tensors.h"
#include "sharding/checkpoint/owned_state.h"
#include "tests/support/folder.h"

namespace rz::test {

struct WrittenTensor {
  std::string name;
  std::vector<std::uint64_t> shape;
  std::vector<StoredSlice> slices;  ///< without checksums
  float first = 0;
  DType dtype = DType::f32;  ///< or i64

  StoredTensor stored() const { return {safetensors_name(dtype), shape, slices}; }
};

/// Ranges of equal sizes or nearly so, one for each file.
inline std::vector<StoredSlice> equal_ranges(std::uint64_t count, std::size_t files) {
  std::vector<StoredSlice> slices;
  for (std::size_t f = 0; f < files; ++f)
    if (const StoredSlice s{f, {}, count * f / files, count * (f + 1) / files, 0}; s.begin < s.end)
      slices.push_back(s);
  return slices;
}

/// The values of a slice, as bytes.
template <class T>
std::vector<std::byte> bytes_of_slice(const WrittenTensor& t, const StoredSlice& s) {
  const Box box = s.box.value_or(Box::whole(t.shape));
  std::vector<T> values;
  for (std::uint64_t e = s.begin; e < s.end; ++e)
    values.push_back(static_cast<T>(t.first + static_cast<float>(box.index(e))));
  const auto bytes = std::as_bytes(std::span(values));
  return {bytes.begin(), bytes.end()};
}

/// Writes the files of a checkpoint to a folder that exists. Returns its index, with checksums.
inline CheckpointIndex write_shards(const std::string& folder, std::vector<WrittenTensor> tensors,
                                    std::size_t files) {
  CheckpointIndex index;
  for (std::size_t f = 0; f < files; ++f) {
    const std::string name = rank_file(static_cast<int>(f), static_cast<int>(files));
    std::vector<ShardSlice> slices;
    std::vector<StoredSlice*> places;
    std::vector<std::byte> bytes;
    for (WrittenTensor& t : tensors)
      for (StoredSlice& s : t.slices) {
        if (s.file != f) continue;
        slices.push_back({t.name, t.shape, t.dtype, s});
        places.push_back(&s);
        const auto part =
            t.dtype == DType::f32 ? bytes_of_slice<float>(t, s) : bytes_of_slice<std::int64_t>(t, s);
        bytes.insert(bytes.end(), part.begin(), part.end());
      }
    const std::string path = (std::filesystem::path(folder) / name).string();
    ShardWriter writer(path, slices);
    writer.write(bytes);
    const auto checksums = writer.finish();
    for (std::size_t i = 0; i < checksums.size(); ++i) places[i]->checksum = checksums[i];
    index.files.push_back({name, std::filesystem::file_size(path)});
  }
  for (const WrittenTensor& t : tensors) index.tensors[t.name] = t.stored();
  return index;
}

/// Writes files and index to a folder, which is made.
inline CheckpointIndex write_checkpoint(const std::string& folder, std::vector<WrittenTensor> tensors,
                                        std::size_t files, const std::string& state = "{}") {
  std::filesystem::create_directories(folder);
  CheckpointIndex index = write_shards(folder, std::move(tensors), files);
  index.state = state;
  std::ofstream(std::filesystem::path(folder) / checkpoint_index_file) << to_json(index);
  return index;
}

/// Changes one byte of a file.
inline void flip_byte(const std::string& path, std::uint64_t at) {
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekg(static_cast<std::streamoff>(at));
  const int byte = file.get();
  file.seekp(static_cast<std::streamoff>(at));
  file.put(static_cast<char>(byte ^ 1));
}

/// The elements of each tensor of a file or folder, in f32.
inline std::map<std::string, std::vector<float>> values_in(const std::string& path) {
  const TensorSource source = open_tensors(path);
  std::map<std::string, std::vector<float>> all;
  for (const TensorInfo& t : source.tensors()) {
    all[t.name].resize(t.count);
    source.read_f32(t, 0, all[t.name]);
  }
  return all;
}

}  // namespace rz::test
