#pragma once
/// Opens the tensors of files of any kind.

#include <string>

#include "tensor_source.h"

namespace rz {

/// The weights of a path, which is one of:
/// - a safetensors file (sharding/checkpoint/safetensors.h);
/// - a state dict that torch.save() has written, usually NAME.bin, .pt or .pth
///   (sharding/checkpoint/torch_files/torch_file.h), or a dict with one under a key, such as "model";
/// - an index of Hugging Face, NAME.index.json, whose weight_map has the file of each tensor, of one of these
///   kinds;
/// - a folder of a checkpoint of DeepSpeed, or one whose file `latest` names it: f32 weights, consolidated
///   from the files of all ranks (sharding/checkpoint/deepspeed_weights.h), also if other files of weights
///   lie beside it;
/// - a folder of a checkpoint of this library, or one whose file `latest` names it, unless weights that were
///   written later lie beside it: parameters in f32 and persistent buffers, by their names in the model;
/// - another folder that holds, in this order of preference, model.safetensors, model.safetensors.index.json,
///   pytorch_model.bin or pytorch_model.bin.index.json.
/// Weights of shape [0], which a rank of ZeRO-3 has instead of its partitioned ones, are refused. The
/// contents of a file decide on its kind. Errors name the file, in one line: those of open_safetensors(),
/// TorchFile::open(), open_deepspeed() and CheckpointReader::open(); Errc::config or Errc::io names the file
/// or tensor where index and files differ.
TensorSource open_tensors(const std::string& path);

/// A checkpoint of this library, whatever lies beside it: checkpoint_at().
TensorSource open_checkpoint(const std::string& path, TensorPart);

/// The folder of a checkpoint of this library: the path itself, or for a folder DIR of checkpoints DIR/TAG
/// with the tag of DIR/latest. Errc::config if there is none.
std::string checkpoint_at(const std::string& path);
/// Whether a path is a folder of a checkpoint of this library, or of such checkpoints.
bool has_checkpoint(const std::string& path);

}  // namespace rz
