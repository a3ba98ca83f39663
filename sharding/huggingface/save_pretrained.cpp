#include "sharding/huggingface/save_pretrained.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <memory>
#include <span>
#include <vector>

#include "autograd_lite/nn/module.h"
#include "comm/core/error.h"
#include "sharding/checkpoint/safetensors.h"
#include "sharding/huggingface/families.h"
#include "sharding/io/durable_file.h"
#include "sharding/strategy/strategy.h"

namespace rz {
namespace {

using NamedParameters = std::vector<std::pair<std::string, Parameter*>>;
using NamedBuffers = std::vector<std::pair<std::string, ModuleBuffer*>>;

void check_exportable(const std::string& path, const NamedParameters& parameters,
                      const NamedBuffers& buffers) {
  for (const auto& [name, p] : parameters)
    require(p->box().is_whole(), Errc::unsupported, path, ": ", name,
            " is a part of a tensor on this rank; only whole parameters are written");
  for (const auto& [name, b] : buffers)
    require(b->value.defined(), Errc::invalid_argument, path, ": the buffer ", name,
            " has no memory; save the module of the strategy, or call allocate_buffers()");
}

std::vector<SafetensorsSpec> specs(const NamedParameters& parameters, const NamedBuffers& buffers) {
  std::vector<SafetensorsSpec> tensors;
  for (const auto& [name, p] : parameters) tensors.push_back({name, extents(p->shape), DType::f32});
  for (const auto& [name, b] : buffers)
    tensors.push_back({name, extents(b->value.shape()), b->value.dtype()});
  return tensors;
}

void require_finite(const std::string& path, const std::string& name, std::span<const float> values) {
  const auto bad = std::ranges::find_if(values, [](float x) { return !std::isfinite(x); });
  if (bad == values.end()) return;
  fail(Errc::diverged, path, ": not written: ", name, '[', bad - values.begin(), "] is ", *bad,
       "; SaveOptions::nonfinite writes such weights all the same");
}

}  // namespace

void save_weights(const std::string& path, Module& module, Strategy& strategy, int rank, const Stream& stream,
                  const SaveOptions& options) {
  const NamedParameters parameters = module.named_parameters();
  const NamedBuffers buffers = persistent_buffers(module);
  check_exportable(path, parameters, buffers);
  std::unique_ptr<SafetensorsWriter> writer;
  if (rank == 0) writer = std::make_unique<SafetensorsWriter>(path, specs(parameters, buffers));
  for (const auto& [name, p] : parameters) {
    const Tensor value = strategy.values().whole(*p, stream).on_host(stream);
    const std::span<const float> values(value.data<float>(), value.count());
    if (!options.nonfinite) require_finite(path, name, values);
    if (writer) writer->write(values);
  }
  if (!writer) return;
  for (const auto& [name, b] : buffers) {
    const Tensor value = b->value.on_host(stream);
    writer->write({value.raw(), value.bytes()});
  }
  writer->finish();
}

void save_pretrained(const std::string& folder, LanguageModel& model, Strategy& strategy, int rank,
                     const Stream& stream, const SaveOptions& options) {
  const std::filesystem::path path = folder;
  if (rank == 0) make_folders(folder);
  save_weights((path / "model.safetensors").string(), model, strategy, rank, stream, options);
  if (rank != 0) return;
  DurableFile file((path / "config.json").string());
  file.write(config_json(model));
  file.commit();
}

}  // namespace rz
