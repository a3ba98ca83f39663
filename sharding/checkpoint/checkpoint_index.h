#pragma once
/// The index of a checkpoint that several ranks wrote: which file has which elements of which tensor.
///
/// A checkpoint is a folder with a safetensors file for each rank that wrote it, and the index,
/// checkpoint.json. Tensors are known by their global shapes, so any number of ranks and any way of sharding
/// reads what any other wrote:
///
///     {"format": "ringzero-checkpoint", "version": 1,
///      "state": {…},
///      "files": [{"name": "rank_00000_of_00002.safetensors", "bytes": 73296}, …],
///      "tensors": {"model/wte.weight": {"dtype": "F32", "shape": [256, 64],
///        "slices": [{"file": 0, "range": [0, 8192], "xxh3": "9f2c…"}, …]}, …}}
///
/// A slice is a range of the elements of a tensor in row-major order, or of a box of it:
/// "box": {"offset": [0, 32], "extent": [256, 32]}. A box may have a shape of its own, of as many elements as
/// the tensor's, one for all boxes of a tensor; the version is then 2. In its file a slice is a tensor of one
/// dimension, whose name is slice_name(). The slices of a tensor hold each element once.
///
/// Names of tensors: "model/NAME" for parameters, "buffer/NAME", and "optimizer/STATE/NAME".

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tensor/box.h"

namespace rz {

struct StoredSlice {
  std::size_t file = 0;              ///< index in CheckpointIndex::files
  std::optional<Box> box;            ///< absent: the whole tensor
  std::uint64_t begin = 0, end = 0;  ///< elements of the box
  std::uint64_t checksum = 0;        ///< of its bytes in the file
  std::uint64_t count() const { return end - begin; }
  bool operator==(const StoredSlice&) const = default;
};

struct StoredTensor {
  std::string dtype;  ///< as in safetensors: "F32"
  std::vector<std::uint64_t> shape;
  std::vector<StoredSlice> slices;
  std::uint64_t count() const { return Box::whole(shape).count(); }
  bool operator==(const StoredTensor&) const = default;
};

struct StoredFile {
  std::string name;
  std::uint64_t bytes = 0;
  bool operator==(const StoredFile&) const = default;
};

struct CheckpointIndex {
  std::string state = "{}";  ///< JSON object: what is saved besides tensors
  std::vector<StoredFile> files;
  std::map<std::string, StoredTensor, std::less<>> tensors;
  bool operator==(const CheckpointIndex&) const = default;
};

/// Name of the file of the index.
inline constexpr const char* checkpoint_index_file = "checkpoint.json";
/// "rank_00002_of_00004.safetensors"
std::string rank_file(int rank, int ranks);
/// "model/wte.weight[0:8192]", with a box "model/wte.weight[0:4096]@[0,32]+[256,32]".
std::string slice_name(std::string_view tensor, const StoredSlice&);

std::string to_json(const CheckpointIndex&);

/// Whether an index has every element of its tensors, or what one rank has written of them.
enum class IndexPart { whole, of_one_rank };
/// Errc::config, "FILE: key.path: …", in one line: for another format, for a newer version, and for anything
/// that does not fit together: slices that overlap, leave elements out or lie outside their tensor, and files
/// that are not plain names. `file` is for messages.
CheckpointIndex parse_checkpoint_index(std::string_view text, const std::string& file,
                                       IndexPart = IndexPart::whole);

}  // namespace rz
