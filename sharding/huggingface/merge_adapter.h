#pragma once
/// Adapters of LoRA and the models that they change, as files: nothing but A and B is held in memory.

#include <string>

#include "../checkpoint/tensor_source.h"

namespace rz {

class Module;
struct LoraOptions;

struct MergedAdapter {
  TensorSource weights;
  /// The adapter has a table of embeddings, or a head, of its own: they are two tensors, though the model may
  /// tie them, and config.json needs tie_word_embeddings false.
  bool untied = false;
};
/// The weights of an adapter, of a folder or a file, as these options describe them. Errc::config, in one
/// line: A without its B, shapes that are not of rank r, a layer that target_modules does not name (PEFT
/// would leave it out), and a value that is not finite, unless `nonfinite`. Errc::unsupported for what is
/// neither A, B nor a tensor of the model.
TensorSource open_adapter(const std::string& path, const LoraOptions&, bool nonfinite = false);

/// The tensors of `base` with an adapter of PEFT merged, as merge_and_unload() computes: those of its layers
/// become weight + scale · B · A (merge_lora()), rounded once to their dtype, or in f32 if `wide`; what the
/// adapter has whole replaces the base's. A square weight is [in, out] where the layers beside it are, and
/// fan_in_fan_out counts only if none tells, as PEFT corrects it by the kind of layer. All names may lack the
/// same first parts, such as "transformer.", in the base or in the adapter. A head that is the table of
/// embeddings gets a tensor of its own if the adapter changes one of the two. Errc::config names a tensor
/// that the base lacks, or whose shape differs, two that change one, and a layer of target_modules that is
/// missing; and all that open_adapter() refuses.
MergedAdapter merge_adapter(const TensorSource& base, const std::string& folder, bool wide = false);

// ---- checkpoints of runs with LoRA

/// What a checkpoint keeps of a module's adapter, JSON; empty without LoRA. merge_checkpoint() needs it, and
/// tensors_to_save of a module that loads the checkpoint are set by it.
std::string adapter_state(Module&);
void restore_adapter_state(Module&, const std::string& state);

/// The weights of a checkpoint with its adapter merged, as save_pretrained() writes them; those of any other
/// source are as they are. Errc::config in one line for a checkpoint of an earlier version, which has not the
/// options of its adapter, and for one without frozen weights.
TensorSource merge_checkpoint(const TensorSource&);

struct StoredAdapter {
  TensorSource tensors;
  std::string config;  ///< the text of adapter_config.json
};
/// The adapter of a checkpoint as save_adapter() writes it. Errc::config if there is none, and as
/// merge_checkpoint().
StoredAdapter adapter_of_checkpoint(const TensorSource&);

/// Errc::config if the weights are those of a run with LoRA, to which another adapter would be added, or if
/// they are of a model of PEFT, with layers of A and B whose options the file has not.
void require_no_adapter(const TensorSource&);
void require_no_adapter(const std::string& path);
void require_no_peft_model(const TensorSource&);

/// Errc::config if a checkpoint has an adapter with other options than the module's.
void require_same_adapter(const TensorSource& checkpoint, Module&);

}  // namespace rz
