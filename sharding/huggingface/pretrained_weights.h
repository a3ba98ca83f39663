#pragma once
/// Weights in files of Hugging Face and PyTorch, with their names, read by element range.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "../../autograd_lite/nn/module.h"
#include "../../comm/device/stream.h"

namespace rz {

class Strategy;

struct LoadOptions {
  /// Parameters and buffers without a tensor, and tensors without one of them, are errors. Else such
  /// parameters and buffers keep their values, and such tensors are not read; parameters without values get
  /// initial ones. Files of which nothing is in the module are errors all the same.
  bool strict = true;
  /// Only tensors whose names begin with it are read, by their names without it: "encoder.".
  std::string prefix{};
  /// Only parameters and buffers that one of these patterns matches are read, by matches_part() of their
  /// names from the module: {"lora_A", "h.0"}. The others keep their values, or get initial ones if they have
  /// none; tensors of the files for them are left out. Empty: all. Errc::config names a pattern without a
  /// match.
  std::vector<std::string> only{};
  /// The parameters and buffers that `only` leaves out are read where the files have them.
  bool others_if_present = false;
  std::uint64_t seed = 0;  ///< of initial values
  bool nonfinite = false;  ///< parameters may be read that are not finite
};

/// Maps the parameters and persistent buffers of a module to tensors of files. Names are those from the
/// module. One rule holds for all names of the files: a prefix that all of them have and the module lacks is
/// left out, "module." or "model."; so are "_orig_mod.", "_fsdp_wrapped_module." and
/// "_checkpoint_wrapped_module." anywhere; and names may lack that of the module's family (NameTable) in the
/// files or in the module. A module that is no LanguageModel has the names of GPT-2: the prefix
/// "transformer.", attention masks (attn.bias of four dimensions and attn.masked_bias, beside a layer
/// attn.c_attn) that are ignored unless the module has them as buffers, and lm_head.weight, which is ignored
/// for a module without it if it equals wte, to which it is tied. Low-rank updates of LoRA, of which the
/// files have none, get initial values unless LoadOptions::only names them, so that the model is that of the
/// files. A buffer is of the dtype that the file has; one of f32 may be of another floating-point type there.
/// A parameter that is a part of a tensor reads that part. A checkpoint of a run with LoRA is read with its
/// adapter merged (merge_checkpoint()), unless the module has LoRA itself.
class PretrainedWeights {
 public:
  /// `path` as for open_tensors(). Compares names, shapes and dtypes. Errc::config lists, in one
  /// line, all missing, misshapen and, if strict, unexpected tensors.
  PretrainedWeights(const std::string& path, Module&, const LoadOptions& = {});

  /// Names of parameters and buffers that are not in the files.
  const std::vector<std::string>& missing_keys() const;
  /// Names of tensors in the files that are not in the module.
  const std::vector<std::string>& unexpected_keys() const;
  /// Number of parameters that are in the files.
  std::size_t tensors() const;
  bool contains(const Parameter&) const;
  /// Names of parameters and buffers that LoadOptions::others_if_present has added.
  const std::vector<std::string>& others() const;
  /// Whether loading changes a parameter that has a value: it is in the files, or it is a low-rank update
  /// that they lack.
  bool writes(const Parameter&) const;
  /// What is worth a line, without a line end, else empty: which of several sources was read
  /// (TensorSource::choice()), a prefix that was left out, names that are missing or unexpected.
  std::string describe() const;

  /// Writes elements of a parameter to out[0, elements.count()): from the files, or the initial values.
  /// Reads only those bytes. Errc::invalid_argument unless it is one of the module; Errc::diverged names an
  /// element that is not finite.
  void read(const Parameter&, Range elements, float* out) const;
  /// Writes the buffers that are in the files to their memory, in the order of the stream, on whose device it
  /// is. Errc::invalid_argument names a buffer without memory.
  void read_buffers(const Stream& = {}) const;

 private:
  struct State;
  std::shared_ptr<const State> state_;
};

/// Loads a model that a strategy shards, or a part of it, whose other parameters keep their values: every
/// rank reads the elements that it stores, and all buffers, which the stream is for. A strategy without
/// values (ParameterValues::filled()) gets initial ones for what is not read. Not collective. Returns the
/// names that are missing and unexpected, which are empty if options are strict.
PretrainedWeights load_pretrained(Strategy&, Module&, const std::string& path, const LoadOptions& = {},
                                  const Stream& = {});
/// Loads a module into its own memory; parameters are rounded to its dtype. Missing ones get initial values.
PretrainedWeights load_pretrained(Module&, const std::string& path, const LoadOptions& = {},
                                  const Stream& = {});

}  // namespace rz
