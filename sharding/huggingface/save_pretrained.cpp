#include "sharding/huggingface/save_pretrained.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "autograd_lite/models/lora.h"
#include "autograd_lite/nn/layers.h"
#include "autograd_lite/nn/module.h"
#include "comm/core/error.h"
#include "sharding/checkpoint/safetensors.h"
#include "sharding/huggingface/families.h"
#include "sharding/huggingface/weight_names.h"
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

/// Whole parameters on the host, in f32, some of them with an update.
class WholeValues {
 public:
  WholeValues(Strategy& strategy, const Stream& stream) : strategy_(strategy), stream_(stream) {}

  /// Adds the update of a layer to its weight.
  void merge(const nn::Linear& layer) { layers_[&layer.weight] = &layer; }
  /// Collective.
  Tensor operator()(const Parameter& p) const {
    const auto found = layers_.find(&p);
    if (found == layers_.end()) return whole(p);
    const nn::Linear& layer = *found->second;
    const Tensor a = copy(layer.lora->a), b = copy(layer.lora->b), weight = copy(p);
    merge_lora({.in = layer.in_features(),
                .out = layer.out_features(),
                .r = layer.lora->a.shape[0],
                .scale = layer.lora->scale,
                .in_out = layer.layout == nn::WeightLayout::in_out,
                .a = {a.data<float>(), a.count()},
                .b = {b.data<float>(), b.count()}},
               0, {weight.data<float>(), weight.count()});
    return weight;
  }

 private:
  Tensor whole(const Parameter& p) const { return strategy_.values().whole(p, stream_).on_host(stream_); }
  /// What values() may overwrite.
  Tensor copy(const Parameter& p) const {
    const Tensor value = whole(p), own = Tensor::empty(p.shape, DType::f32);
    std::copy_n(value.data<float>(), value.count(), own.data<float>());
    return own;
  }

  Strategy& strategy_;
  const Stream& stream_;
  std::map<const Parameter*, const nn::Linear*> layers_;
};

void write_file(const std::string& path, const NamedParameters& parameters, const NamedBuffers& buffers,
                const WholeValues& values_of, int rank, const Stream& stream, const SaveOptions& options) {
  check_exportable(path, parameters, buffers);
  std::unique_ptr<SafetensorsWriter> writer;
  if (rank == 0) writer = std::make_unique<SafetensorsWriter>(path, specs(parameters, buffers));
  for (const auto& [name, p] : parameters) {
    const Tensor value = values_of(*p);
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

}  // namespace

void save_weights(const std::string& path, Module& module, Strategy& strategy, int rank, const Stream& stream,
                  const SaveOptions& options) {
  NamedParameters parameters = module.named_parameters();
  NamedBuffers buffers = persistent_buffers(module);
  WholeValues values(strategy, stream);
  if (options.merge_lora)
    for (const auto& [name, layer] : lora_layers(module)) {
      values.merge(*layer);
      std::erase_if(parameters, [l = layer](const auto& named) {
        return named.second == &l->lora->a || named.second == &l->lora->b;
      });
    }
  select_only(options.only, parameters, buffers);
  write_file(path, parameters, buffers, values, rank, stream, options);
}

void save_parameters(const std::string& path, const NamedParameters& parameters, Strategy& strategy, int rank,
                     const Stream& stream, const SaveOptions& options) {
  write_file(path, parameters, {}, WholeValues(strategy, stream), rank, stream, options);
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
