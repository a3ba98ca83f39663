#pragma once
/// Adapters of LoRA in the files of PEFT: adapter_model.safetensors and adapter_config.json.
///
///     rz::add_lora(*model, rz::read_adapter_config("ADAPTER"));
///     rz::load_adapter(engine.strategy(), *model, "ADAPTER");
///     rz::save_adapter("OUT", *model, engine.strategy(), rank, engine.stream());
///
/// save_pretrained() writes the model with its adapter merged; merge_adapter.h merges files.

#include <string>

#include "../../autograd_lite/nn/module.h"
#include "../../comm/device/stream.h"
#include "adapter_config.h"
#include "pretrained_weights.h"
#include "save_pretrained.h"

namespace rz {

/// Reads a folder's adapter_model.safetensors or adapter_model.bin, or a file of these kinds, into a module
/// that has LoRA: adapter_tensors(), whose names in the file begin with "base_model.model.", and what else of
/// the model the file has, as by PEFT's save_embedding_layers, which save_adapter() then writes, too
/// (LoraOptions::tensors_to_save). All else keeps its values. Every rank reads the elements that it stores.
/// Errc::config, in one line, lists tensors that are missing, misshapen or not in the model, and options of
/// adapter_config.json, if it is there, that differ from the module's. Not collective.
PretrainedWeights load_adapter(Strategy&, Module&, const std::string& folder, const LoadOptions& = {},
                               const Stream& = {});
/// The same into the module's own memory.
PretrainedWeights load_adapter(Module&, const std::string& folder, const LoadOptions& = {},
                               const Stream& = {});

struct SaveAdapterOptions {
  bool nonfinite = false;               ///< as SaveOptions::nonfinite
  std::string base_model_name_or_path;  ///< where PEFT finds the frozen model; empty: the folder as it was
                                        ///< given to language_model_from_config()
};
/// Writes both files to a folder, which is made; PeftModel.from_pretrained(base, folder) reads them.
/// Parameters are written whole, in f32, buffers in their dtypes. Collective, as save_weights(), whose errors
/// it has; Errc::invalid_argument for a module without LoRA.
void save_adapter(const std::string& folder, Module&, Strategy&, int rank, const Stream&,
                  const SaveAdapterOptions& = {});

}  // namespace rz
