#pragma once
/// Adapters of LoRA in the files of PEFT: adapter_model.safetensors and adapter_config.json.
///
///     rz::add_lora(*model, rz::read_adapter_config("ADAPTER"));
///     rz::load_adapter(engine.strategy(), *model, "ADAPTER");
///     rz::save_adapter("OUT", *model, engine.strategy(), rank, engine.stream());
///
/// save_pretrained() writes the model with its adapter merged.

#include <string>

#include "../../autograd_lite/models/lora.h"
#include "../../autograd_lite/nn/module.h"
#include "../../comm/device/stream.h"
#include "../checkpoint/tensor_source.h"
#include "pretrained_weights.h"
#include "save_pretrained.h"

namespace rz {

/// The options of an adapter: of FOLDER/adapter_config.json, or of the file itself. Errc::config, "FILE: key:
/// reason", names a key that is wrong, or that requests what add_lora() lacks. Keys that are null, false or
/// empty, and those about its making, are ignored.
LoraOptions read_adapter_config(const std::string& path);

/// Reads a folder's adapter_model.safetensors, or a file of this kind, into a module that has LoRA:
/// adapter_parameters(), whose names in the file begin with "base_model.model.". The other parameters keep
/// their values. Every rank reads the elements that it stores. Errc::config, in one line, lists tensors that
/// are missing, misshapen or not in the adapter, and options of adapter_config.json, if it is there, that
/// differ from the module's. Not collective.
PretrainedWeights load_adapter(Strategy&, Module&, const std::string& folder, const LoadOptions& = {},
                               const Stream& = {});
/// The same into the module's own memory.
PretrainedWeights load_adapter(Module&, const std::string& folder, const LoadOptions& = {},
                               const Stream& = {});

struct SaveAdapterOptions {
  bool nonfinite = false;               ///< as SaveOptions::nonfinite
  std::string base_model_name_or_path;  ///< where PEFT finds the frozen model; empty: the folder of a
                                        ///< language_model_from_config()
};
/// Writes both files to a folder, which is made; PeftModel.from_pretrained(base, folder) reads them. Tensors
/// are written whole, in f32. Collective, as save_weights(), whose errors it has; Errc::invalid_argument for
/// a module without LoRA.
void save_adapter(const std::string& folder, Module&, Strategy&, int rank, const Stream&,
                  const SaveAdapterOptions& = {});

/// The tensors of `base` with an adapter merged: those of its layers become weight + scale · B · A
/// (merge_lora()), rounded once to their dtype, or in f32 if `wide`, and those of modules_to_save its own.
/// Names of the base may lack the adapter's first parts, such as "transformer.". Nothing but A and B is held.
/// Errc::config names a layer that the base lacks, or whose shape differs.
TensorSource merge_adapter(const TensorSource& base, const std::string& folder, bool wide = false);

/// The text of adapter_config.json for a module with LoRA.
std::string adapter_config_json(Module&, const std::string& base_model_name_or_path = "");

}  // namespace rz
