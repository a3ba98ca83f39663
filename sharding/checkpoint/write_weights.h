#pragma once
/// Writing of weights as a folder in the format of Hugging Face.

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "comm/core/types.h"
#include "sharding/checkpoint/safetensors.h"
#include "sharding/checkpoint/tensor_source.h"

namespace rz {

struct WriteWeightsOptions {
  /// Type of floating-point tensors: f32, f16 or bf16, rounded to nearest even; those of F64 are rounded to
  /// f32 first. Absent: every tensor keeps its dtype. Other tensors always do.
  std::optional<DType> dtype;
  /// Bytes of the tensors of a file. A larger tensor has a file of its own.
  std::uint64_t max_file_bytes = 5'000'000'000;
  bool allow_overflow = false;  ///< a finite value may become infinite
  /// Files that are copied into the folder. With `dtype`, a config.json among them names it; if `untied`, its
  /// tie_word_embeddings is false.
  std::vector<std::string> copies;
  bool untied = false;
  std::map<std::string, std::string> texts;  ///< more files, by name
  std::string stem = "model";                ///< what names of files of weights begin with
  std::function<void(std::uint64_t done, std::uint64_t all)> progress = [](auto, auto) {};  ///< in bytes
};

/// Writes model.safetensors, or model-00001-of-00003.safetensors, … and model.safetensors.index.json, whose
/// names and keys are those of Hugging Face (huggingface_hub, "split_torch_state_dict_into_shards"). The
/// folder appears complete (sharding/io/file.h). Holds a block of a tensor in memory at a time.
/// Errc::io if the folder exists; Errc::diverged names the first element that would overflow.
void write_weights(const TensorSource&, const std::string& folder, const WriteWeightsOptions& = {});

/// "model.safetensors" of one file, "model-00001-of-00003.safetensors" of several.
std::string weight_file_name(std::size_t file, std::size_t files, const std::string& stem = "model");
inline constexpr const char* weight_index_name = "model.safetensors.index.json";
/// The text of the index, from the tensors of each file.
std::string weight_index(std::span<const SafetensorsSpec>, std::span<const std::vector<std::size_t>> files);

/// The tensors of each file, in their order, for tensors of these sizes.
std::vector<std::vector<std::size_t>> cut_into_files(std::span<const std::uint64_t> bytes,
                                                     std::uint64_t max_file_bytes);

}  // namespace rz
