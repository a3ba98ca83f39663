#include "sharding/huggingface/save_pretrained.h"

#include <algorithm>
#include <cmath>
#include <exception>
#include <filesystem>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <regex>
#include <span>
#include <vector>

#include "autograd_lite/models/lora.h"
#include "autograd_lite/nn/layers.h"
#include "autograd_lite/nn/module.h"
#include "comm/core/error.h"
#include "sharding/checkpoint/safetensors.h"
#include "sharding/checkpoint/write_weights.h"
#include "sharding/huggingface/adapter_config.h"
#include "sharding/huggingface/families.h"
#include "sharding/huggingface/weight_names.h"
#include "sharding/io/file.h"
#include "sharding/io/json.h"
#include "sharding/io/text.h"
#include "sharding/parallel/rank_agreement.h"
#include "sharding/strategy/strategy.h"
#include "sharding/tokenizer/tokenizer.h"
#include "tensor/ops.h"

namespace rz {
namespace {

namespace fs = std::filesystem;

using NamedParameters = std::vector<std::pair<std::string, Parameter*>>;
using NamedBuffers = std::vector<std::pair<std::string, ModuleBuffer*>>;

/// `joins`: the parts of parameters are on the ranks of a tp group.
void check_exportable(const std::string& path, const NamedParameters& parameters, const NamedBuffers& buffers,
                      DType dtype, bool joins) {
  require(dtype == DType::f32 || dtype == DType::f16 || dtype == DType::bf16, Errc::invalid_argument, path,
          ": SaveOptions::dtype is ", name(dtype), ", expected f32, f16 or bf16");
  for (const auto& [name, p] : parameters)
    require(joins || p->box().is_whole(), Errc::unsupported, path, ": ", name,
            " is a part of a tensor on this rank, whose other parts no rank of the mesh has; name tp in it");
  for (const auto& [name, b] : buffers)
    require(b->value.defined(), Errc::invalid_argument, path, ": the buffer ", name,
            " has no memory; save the module of the strategy, or call allocate_buffers()");
}

/// A parameter or a buffer of the files.
struct Saved {
  std::string name;
  const Parameter* parameter = nullptr;
  const ModuleBuffer* buffer = nullptr;
  DType dtype;
};

/// Larger elements lie first where there are several sizes, as Hugging Face writes them.
std::vector<Saved> saved_tensors(const NamedParameters& parameters, const NamedBuffers& buffers,
                                 DType dtype) {
  std::vector<Saved> all;
  for (const auto& [name, p] : parameters) all.push_back({name, p, nullptr, dtype});
  for (const auto& [name, b] : buffers) all.push_back({name, nullptr, b, b->value.dtype()});
  if (dtype != DType::f32)
    std::ranges::stable_sort(all, std::greater(), [](const Saved& s) { return size_of(s.dtype); });
  return all;
}

std::vector<SafetensorsSpec> specs(const std::vector<Saved>& saved) {
  std::vector<SafetensorsSpec> all;
  for (const Saved& s : saved)
    all.push_back(
        {s.name, extents(s.parameter ? s.parameter->global_shape() : s.buffer->value.shape()), s.dtype});
  return all;
}

std::vector<std::uint64_t> sizes_of(const std::vector<SafetensorsSpec>& specs) {
  std::vector<std::uint64_t> all;
  for (const SafetensorsSpec& s : specs) {
    all.push_back(size_of(s.dtype));
    for (const std::uint64_t extent : s.shape) all.back() *= extent;
  }
  return all;
}

void refuse_nonfinite(const std::string& path, const std::string& name, std::span<const float> values) {
  const auto bad = std::ranges::find_if(values, [](float x) { return !std::isfinite(x); });
  if (bad == values.end()) return;
  fail(Errc::diverged, path, ": not written: ", name, '[', bad - values.begin(), "] is ", *bad,
       "; SaveOptions::nonfinite writes such weights all the same");
}

/// In the dtype of the files.
Tensor narrowed(const std::string& path, const std::string& name, const Tensor& value, DType dtype,
                bool allow_overflow) {
  if (dtype == DType::f32) return value;
  const Tensor narrow = Tensor::empty(value.shape(), dtype), again = Tensor::empty(value.shape());
  ops::copy(narrow, value, {});
  ops::copy(again, narrow, {});
  const std::span<const float> before(value.data<float>(), value.count()),
      now(again.data<float>(), again.count());
  for (std::size_t i = 0; i < now.size() && !allow_overflow; ++i)
    require(std::isfinite(now[i]) || !std::isfinite(before[i]), Errc::diverged, path, ": not written: ", name,
            '[', i, "] is ", before[i], ", which overflows ", rz::name(dtype), "; choose bf16 or f32");
  return narrow;
}

/// Whole parameters on the host, in f32, some of them with an update.
class WholeValues {
 public:
  WholeValues(Strategy& strategy, const Stream& stream) : strategy_(strategy), stream_(stream) {}

  /// Adds the update of a layer to its weight.
  void merge(const nn::Linear& layer) { layers_[&layer.weight] = &layer; }
  /// Whether the parts of a tensor on several ranks are joined.
  bool joins() const { return strategy_.mesh().tp() != nullptr; }
  /// Collective.
  Tensor operator()(const Parameter& p) const {
    const auto found = layers_.find(&p);
    if (found == layers_.end()) return whole(p);
    const nn::Linear& layer = *found->second;
    const Tensor a = copy(layer.lora->a), b = copy(layer.lora->b), weight = copy(p);
    merge_lora({.in = a.shape()[1],
                .out = b.shape()[0],
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
    const Tensor value = whole(p), own = Tensor::empty(value.shape(), DType::f32);
    std::copy_n(value.data<float>(), value.count(), own.data<float>());
    return own;
  }

  Strategy& strategy_;
  const Stream& stream_;
  std::map<const Parameter*, const nn::Linear*> layers_;
};

using Cut = std::vector<std::vector<std::size_t>>;  // the tensors of each file
using PathOf = std::function<std::string(std::size_t file, std::size_t files)>;

/// Files of rank 0; the calls of other ranks do nothing. Rank 0 keeps its first error, so that it takes part
/// in what the ranks do until they agree.
class Files {
 public:
  Files(Communicator& communicator, int rank) : communicator_(communicator), writes_(rank == 0) {}

  template <class F>
  void run(const F& f) {
    if (!writes_ || error_) return;
    try {
      f();
    } catch (...) {
      error_ = std::current_exception();
    }
  }
  void open(const std::vector<SafetensorsSpec>& specs, const Cut& cut, const PathOf& path_of) {
    writer_of_.resize(specs.size());
    for (std::size_t f = 0; f < cut.size(); ++f)
      run([&] {
        std::vector<SafetensorsSpec> own;
        for (const std::size_t t : cut[f]) own.push_back(specs[t]);
        writers_.push_back(std::make_unique<SafetensorsWriter>(path_of(f, cut.size()), own));
        for (const std::size_t t : cut[f]) writer_of_[t] = writers_.back().get();
      });
  }
  void write(std::size_t tensor, const Tensor& value) {
    run([&] { writer_of_[tensor]->write({value.raw(), value.bytes()}); });
  }
  void finish() {
    for (const auto& writer : writers_) run([&] { writer->finish(); });
  }
  /// Throws the error of rank 0 on every rank. Collective.
  void agree() {
    check_on_all_ranks(communicator_, [&] {
      if (error_) std::rethrow_exception(error_);
    });
  }

 private:
  Communicator& communicator_;
  bool writes_;
  std::exception_ptr error_;
  std::vector<std::unique_ptr<SafetensorsWriter>> writers_;
  std::vector<SafetensorsWriter*> writer_of_;  // of each tensor
};

/// What is written, and how.
struct Contents {
  NamedParameters parameters;
  NamedBuffers buffers;
  const WholeValues& values_of;
  const Stream& stream;
  const SaveOptions& options;
};

/// Rank 0 calls `complete` when the files are there. Collective.
void write_files(const Contents& of, const PathOf& path_of, std::uint64_t max_file_bytes,
                 Communicator& communicator, int rank,
                 const std::function<void(const std::vector<SafetensorsSpec>&, const Cut&)>& complete = {}) {
  const std::string path = path_of(0, 1);  // in messages
  check_on_all_ranks(communicator, [&] {
    check_exportable(path, of.parameters, of.buffers, of.options.dtype, of.values_of.joins());
  });
  const std::vector<Saved> saved = saved_tensors(of.parameters, of.buffers, of.options.dtype);
  const std::vector<SafetensorsSpec> all = specs(saved);
  const Cut cut = cut_into_files(sizes_of(all), max_file_bytes);
  Files files(communicator, rank);
  files.open(all, cut, path_of);
  files.agree();  // before the weights are gathered
  for (std::size_t t = 0; t < saved.size(); ++t) {
    const auto& [name, parameter, buffer, dtype] = saved[t];
    if (buffer) {
      files.run([&] { files.write(t, buffer->value.on_host(of.stream)); });
      continue;
    }
    const Tensor wide = of.values_of(*parameter);
    if (!of.options.nonfinite) refuse_nonfinite(path, name, {wide.data<float>(), wide.count()});
    files.write(t, narrowed(path, name, wide, dtype, of.options.nonfinite));
  }
  files.finish();
  if (complete) files.run([&] { complete(all, cut); });
  files.agree();
}

Contents contents_of(Module& module, WholeValues& values, const Stream& stream, const SaveOptions& options) {
  Contents all{module.named_parameters(), persistent_buffers(module), values, stream, options};
  if (options.merge_lora)
    for (const auto& [name, layer] : lora_layers(module)) {
      values.merge(*layer);
      std::erase_if(all.parameters, [l = layer](const auto& named) {
        return named.second == &l->lora->a || named.second == &l->lora->b;
      });
    }
  select_only(options.only, all.parameters, all.buffers);
  return all;
}

// ---- what lies beside the weights

/// Whether a file beside the weights belongs to a model: of its tokenizer, of how it generates.
bool is_of_model(const std::string& name) {
  return is_tokenizer_file(name) || name == "generation_config.json" ||
         (name.starts_with("chat_template.") && !name.ends_with('~'));
}

/// Files of a model's folder that are copied.
std::vector<fs::path> copied_files(const std::string& folder) {
  std::vector<fs::path> all;
  std::error_code absent;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder, absent)) {
    const std::string name = entry.path().filename().string();
    if (is_of_model(name) && entry.is_regular_file()) all.push_back(entry.path());
  }
  std::ranges::sort(all);
  return all;
}

/// config.json, with the dtype of the weights under its names of transformers 5 and 4, and the tokenizer's
/// class of the folder whose tokenizer is copied.
std::string config_text(const LanguageModel& model, DType dtype, const std::vector<fs::path>& copied) {
  auto config = nlohmann::ordered_json::parse(config_json(model));
  if (dtype != DType::f32)
    config["dtype"] = config["torch_dtype"] = dtype == DType::bf16 ? "bfloat16" : "float16";
  const auto is_tokenizer = [](const fs::path& p) { return is_tokenizer_file(p.filename().string()); };
  if (std::ranges::any_of(copied, is_tokenizer)) {
    const std::string path = (fs::path(model.origin().folder) / "config.json").string();
    const auto before = fs::exists(path) ? parse_json(read_text_file(path), path, JsonDialect::relaxed)
                                         : nlohmann::json::object();
    if (const auto found = before.find("tokenizer_class"); found != before.end())
      config["tokenizer_class"] = *found;
    else
      config.erase("tokenizer_class");
  }
  return config.dump(2) + "\n";
}

/// Removes weights of an earlier model: a reader would prefer one file to several.
void remove_other_weights(const fs::path& folder, std::size_t files) {
  std::vector<std::string> names{files > 1 ? weight_index_name : ""};
  for (std::size_t f = 0; f < files; ++f) names.push_back(weight_file_name(f, files));
  const std::regex shard("model-[0-9]{5}-of-[0-9]{5}\\.safetensors");
  std::vector<fs::path> others;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder)) {
    const std::string name = entry.path().filename().string();
    const bool weights =
        name == weight_file_name(0, 1) || name == weight_index_name || std::regex_match(name, shard);
    if (weights && std::ranges::find(names, name) == names.end()) others.push_back(entry.path());
  }
  for (const fs::path& path : others) fs::remove(path);
}

/// Removes what an earlier model had beside its weights and this one has not: it would be taken for this
/// one's.
void remove_other_files(const fs::path& folder, const std::map<std::string, std::string>& own) {
  std::vector<fs::path> others;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder)) {
    const std::string name = entry.path().filename().string();
    if (is_of_model(name) && !own.contains(name) && entry.is_regular_file()) others.push_back(entry.path());
  }
  for (const fs::path& path : others) fs::remove(path);
}

}  // namespace

std::map<std::string, std::string> files_beside_weights(const LanguageModel& model, DType dtype) {
  constexpr std::size_t max_bytes = std::size_t{512} << 20;
  const std::vector<fs::path> copied = copied_files(model.origin().folder);
  std::map<std::string, std::string> files{{"config.json", config_text(model, dtype, copied)}};
  for (const fs::path& from : copied) files[from.filename()] = read_text_file(from.string(), max_bytes);
  return files;
}

void require_no_adapter_in(const std::string& folder) {
  require(!fs::exists(fs::path(folder) / adapter_config_name), Errc::config, escaped(folder),
          ": holds an adapter (", adapter_config_name,
          "), which from_pretrained() of transformers would apply to the model; name another folder, or move "
          "the adapter away");
}

void save_weights(const std::string& path, Module& module, Strategy& strategy, int rank, const Stream& stream,
                  const SaveOptions& options) {
  WholeValues values(strategy, stream);
  write_files(
      contents_of(module, values, stream, options), [&](auto, auto) { return path; },
      std::numeric_limits<std::uint64_t>::max(), strategy.communicator(), rank);
}

void save_tensors(const std::string& path, const NamedParameters& parameters, const NamedBuffers& buffers,
                  Strategy& strategy, int rank, const Stream& stream, const SaveOptions& options) {
  const WholeValues values(strategy, stream);
  write_files(
      {parameters, buffers, values, stream, options}, [&](auto, auto) { return path; },
      std::numeric_limits<std::uint64_t>::max(), strategy.communicator(), rank);
}

void save_pretrained(const std::string& folder, LanguageModel& model, Strategy& strategy, int rank,
                     const Stream& stream, const SaveOptions& options) {
  const fs::path path = folder;
  check_on_all_ranks(strategy.communicator(), [&] {
    if (rank != 0) return;
    require_no_adapter_in(folder);
    make_folders(folder);
  });
  WholeValues values(strategy, stream);
  write_files(
      contents_of(model, values, stream, options),
      [&](std::size_t file, std::size_t files) { return (path / weight_file_name(file, files)).string(); },
      options.max_shard_size, strategy.communicator(), rank,
      [&](const std::vector<SafetensorsSpec>& tensors, const Cut& files) {
        if (files.size() > 1)
          write_durably((path / weight_index_name).string(), weight_index(tensors, files));
        const std::map<std::string, std::string> beside = files_beside_weights(model, options.dtype);
        for (const auto& [name, text] : beside) write_durably((path / name).string(), text);
        if (!options.only.empty()) return;
        remove_other_weights(path, files.size());
        remove_other_files(path, beside);
      });
}

}  // namespace rz
