#pragma once
/// Files that torch.save() writes (PyTorch's documentation, "Serialization semantics", and the format notes
/// in torch/serialization.py): a zip file with data.pkl and a stored entry data/KEY for each storage, and the
/// format before version 1.6, pickles one after the other and then the storages. Nothing in them is executed
/// (sharding/checkpoint/torch_files/pickle.h).

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "sharding/checkpoint/torch_files/pickle.h"
#include "sharding/checkpoint/torch_files/strided_read.h"

namespace rz {

/// What a file may contain besides the values of every file: `weights` nothing, `deepspeed` objects of
/// DeepSpeed's classes, which are not made.
enum class TorchContents { weights, deepspeed };

/// A file open for reading. Copies share the file; concurrent reads are safe.
class TorchFile {
 public:
  /// Whether a file begins as torch.save() begins it. Safetensors do not.
  static bool is_one(const std::string& path);
  /// Reads the pickle and the places of the storages. Errors are one line, "FILE: …": Errc::unsupported names
  /// a type, an opcode or an entry that is not read, TorchScript, files with big-endian numbers, and the tar
  /// files before version 0.1; Errc::io what is damaged.
  static TorchFile open(const std::string& path, TorchContents = TorchContents::weights);

  const std::string& path() const;
  const Pickle& pickle() const;
  /// A value as a tensor or parameter; nullopt if it is neither. Errc::io if it does not fit its storage,
  /// with `name` in the message; Errc::unsupported for a dtype that safetensors lack, and for a view of more
  /// than 1 GiB and 64 times its storage.
  std::optional<TorchTensor> tensor(PickleId, const std::string& name) const;
  /// A value as a shape, which is a torch.Size, a tuple or a list; nullopt if it is none, or larger than any
  /// memory.
  std::optional<std::vector<std::uint64_t>> shape(PickleId) const;
  /// Reads elements [begin, begin + out.size() / element_bytes) in row-major order, whatever the strides are.
  /// Only their range of the storage is read. Errc::invalid_argument unless the tensor has them.
  void read(const TorchTensor&, std::uint64_t begin, std::span<std::byte> out) const;

 private:
  struct State;
  std::shared_ptr<const State> state_;
};

/// Pickle::items() of a file, whose name is in the message of its error.
std::vector<std::pair<PickleId, PickleId>> items_of(const TorchFile&, PickleId dict);

struct NamedTorchTensor {
  std::string name;
  TorchTensor tensor;
};
/// The tensors of a dict of tensors, a state dict, in its order. Values of keys that end with "_extra_state"
/// are left out if they are no tensors. Errc::config names another value that is no tensor.
std::vector<NamedTorchTensor> state_dict_of(const TorchFile&, PickleId dict);

struct FoundStateDict {
  std::string key;  ///< empty: the file holds nothing else
  std::vector<NamedTorchTensor> tensors;
};
/// The state dict of a file: all that it holds, or the value of a key of a dict without tensors of its own,
/// as training loops save it: {"model": …, "optimizer": …}. Errc::config names the keys if there are several.
FoundStateDict find_state_dict(const TorchFile&);

}  // namespace rz
