#include "sharding/huggingface/adapter.h"

#include <filesystem>

#include "comm/core/error.h"
#include "sharding/huggingface/merge_adapter.h"
#include "sharding/io/file.h"
#include "sharding/io/text.h"
#include "sharding/parallel/rank_agreement.h"
#include "sharding/strategy/strategy.h"

namespace rz {
namespace {

namespace fs = std::filesystem;

/// What is read: the adapter's own, and what else of the model the file has, which PEFT applies, too.
LoadOptions options_of(Module& module, const std::string& folder, LoadOptions options) {
  const LoraOptions* own = lora_options(module);
  require(own != nullptr, Errc::invalid_argument, escaped(folder),
          ": the model has no LoRA; call add_lora(model, read_adapter_config(FOLDER)) first");
  LoraOptions stored{.target_modules = {}, .r = own->r};  // a file alone: the module says which layers
  if (fs::is_directory(folder)) {
    stored = read_adapter_config(folder);
    require_same_options(stored, *own, fs::path(folder) / adapter_config_name);
  }
  open_adapter(folder, stored, true);  // load_pretrained() refuses what is not finite
  options.prefix = adapter_prefix;
  options.only.clear();
  const AdapterTensors tensors = adapter_tensors(module);
  for (const auto& [name, p] : tensors.parameters) options.only.push_back(name);
  for (const auto& [name, b] : tensors.buffers) options.only.push_back(name);
  options.others_if_present = true;
  return options;
}

}  // namespace

PretrainedWeights load_adapter(Strategy& strategy, Module& module, const std::string& folder,
                               const LoadOptions& options, const Stream& stream) {
  PretrainedWeights weights =
      load_pretrained(strategy, module, adapter_weights(folder), options_of(module, folder, options), stream);
  save_with_adapter(module, weights.others());
  return weights;
}

PretrainedWeights load_adapter(Module& module, const std::string& folder, const LoadOptions& options,
                               const Stream& stream) {
  PretrainedWeights weights =
      load_pretrained(module, adapter_weights(folder), options_of(module, folder, options), stream);
  save_with_adapter(module, weights.others());
  return weights;
}

void save_adapter(const std::string& folder, Module& module, Strategy& strategy, int rank,
                  const Stream& stream, const SaveAdapterOptions& options) {
  const std::string config = adapter_config_json(module, options.base_model_name_or_path);
  check_on_all_ranks(strategy.communicator(), [&] {
    if (rank == 0) make_folders(folder);
  });
  AdapterTensors tensors = adapter_tensors(module);
  for (auto& [name, p] : tensors.parameters) name = concat(adapter_prefix, name);
  for (auto& [name, b] : tensors.buffers) name = concat(adapter_prefix, name);
  save_tensors((fs::path(folder) / adapter_weights_name).string(), tensors.parameters, tensors.buffers,
               strategy, rank, stream, {.nonfinite = options.nonfinite});
  check_on_all_ranks(strategy.communicator(), [&] {
    if (rank == 0) write_durably((fs::path(folder) / adapter_config_name).string(), config);
  });
}

}  // namespace rz
