// merge, split and adapter: all write a folder of Hugging Face.
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>

#include "comm/core/byte_size.h"
#include "comm/core/error.h"
#include "sharding/checkpoint/open_tensors.h"
#include "sharding/checkpoint/write_weights.h"
#include "sharding/huggingface/adapter_config.h"
#include "sharding/huggingface/merge_adapter.h"
#include "sharding/io/disk.h"
#include "sharding/io/text.h"
#include "tools/checkpoint/commands.h"
#include "tools/command_line/command_line.h"
#include "tools/command_line/progress.h"

namespace rz::checkpoint {
namespace {

namespace fs = std::filesystem;

constexpr const char* merge_description =
    "Writes a checkpoint's parameters and persistent buffers to a new folder OUT as from_pretrained() of\n"
    "Hugging Face reads them: model.safetensors, or several files with model.safetensors.index.json. Of a\n"
    "run with LoRA it writes the model with its adapter merged, as train_lm --save does. Of a checkpoint\n"
    "of DeepSpeed, ZeRO stages 0 to 3, it consolidates the f32 weights of all ranks.\n\n"
    "  checkpoint merge RUN OUT\n"
    "  checkpoint merge RUN/global_step100 OUT --dtype bf16 --max-shard-size 2GB --config config.json\n"
    "  checkpoint merge BASE OUT --adapter ADAPTER        a model with its adapter of LoRA or PEFT";

constexpr const char* split_description =
    "Writes the weights IN to a new folder OUT, cut into files by another size: IN is a safetensors file,\n"
    "a state dict of torch.save(), a folder or index of Hugging Face, or a checkpoint. A large size makes\n"
    "one file of several.\n\n"
    "  checkpoint split model.safetensors OUT --max-shard-size 500MB\n"
    "  checkpoint split FOLDER OUT --max-shard-size 1TB";

constexpr const char* adapter_description =
    "Writes the adapter of a run with LoRA to a new folder OUT as PeftModel.from_pretrained() reads it:\n"
    "adapter_model.safetensors and adapter_config.json.\n"
    "\n"
    "  checkpoint adapter RUN OUT\n"
    "  checkpoint merge BASE MERGED --adapter OUT";

constexpr const char* adapter_footer =
    "OUT appears complete or not at all; it must not exist, unless it is an empty folder.";

constexpr const char* write_footer =
    "Sizes are as in Hugging Face: 5GB is 5*10^9 bytes, 5GiB is 5*2^30. A larger tensor has a file of\n"
    "its own. OUT appears complete or not at all; it must not exist, unless it is an empty folder.";

struct WriteOptions {
  std::string in, out, max_shard_size = "5GB";
  std::optional<std::string> dtype, config, adapter;
  bool allow_overflow = false;
};

std::uint64_t max_file_bytes(const WriteOptions& o) {
  return byte_size_of_flag("--max-shard-size", escaped(o.max_shard_size), 1);
}

/// Files beside weights that belong to a model: its configuration, its tokenizer, its chat template.
bool is_of_model(const fs::path& file) {
  const std::string name = file.filename().string(), ending = file.extension().string();
  return fs::is_regular_file(file) && !name.ends_with(".index.json") && name != checkpoint_index_file &&
         name != adapter_config_name &&
         (ending == ".json" || ending == ".txt" || ending == ".model" || ending == ".jinja");
}

/// The files of the folder of weights; for a checkpoint without config.json also that of the folder above.
std::vector<std::string> files_beside(const std::string& in) {
  const bool checkpoint = has_checkpoint(in);
  const fs::path folder = checkpoint ? checkpoint_at(in) : in;
  std::vector<std::string> files;
  if (fs::is_directory(folder))
    for (const auto& entry : fs::directory_iterator(folder))
      if (is_of_model(entry.path())) files.push_back(entry.path().string());
  const fs::path shared = fs::path(folder_of(folder.string())) / "config.json";
  if (checkpoint && !fs::exists(folder / "config.json") && fs::exists(shared))
    files.push_back(shared.string());
  return files;
}

std::vector<std::string> copied_files(const WriteOptions& o) {
  std::vector<std::string> files = files_beside(o.in);
  if (!o.config) return files;
  require(fs::path(*o.config).filename() == "config.json", Errc::config, "--config ", escaped(*o.config),
          ": give a file of the name config.json");
  std::erase_if(files, [](const std::string& f) { return fs::path(f).filename() == "config.json"; });
  files.push_back(*o.config);
  return files;
}

/// "; without frozen weights, which are those of 'base'", if a checkpoint has none.
std::string left_out(const std::string& in) {
  if (!has_checkpoint(in)) return "";
  const nlohmann::json state = read_stored_checkpoint(checkpoint_at(in)).state;
  if (!state.value("exclude_frozen_parameters", false)) return "";
  std::string names;
  for (const auto& name : state.value("base", nlohmann::json::array()))
    names +=
        concat(names.empty() ? ", which are those of '" : " and '", escaped(name.get<std::string>()), '\'');
  return concat("; without frozen weights", names);
}

bool has_config(const std::vector<std::string>& files) {
  return std::ranges::any_of(files,
                             [](const std::string& f) { return fs::path(f).filename() == "config.json"; });
}

/// The weights with the adapters of their run and of --adapter.
TensorSource merged_source(const WriteOptions& o, WriteWeightsOptions& options) {
  const TensorSource run = open_source(o.in);
  require_no_peft_model(run);
  if (o.adapter) require_no_adapter(run);
  const TensorSource source = merge_checkpoint(run);
  if (!o.adapter) {
    if (const std::string line = adapter_beside(o.in); !line.empty())
      std::fprintf(stderr, "checkpoint: warning: %s\n", line.c_str());
    return source;
  }
  MergedAdapter merged = merge_adapter(source, *o.adapter, o.dtype.has_value());
  options.untied = merged.untied;
  require(
      has_config(options.copies) || merged.weights.tensors().size() == source.tensors().size(), Errc::config,
      "--adapter ", escaped(*o.adapter),
      ": gives the model a table of embeddings and a head, which were one tensor; config.json must say so "
      "(tie_word_embeddings false), and there is none: give --config FILE");
  return std::move(merged.weights);
}

int run_write(const WriteOptions& o) {
  WriteWeightsOptions options;
  options.max_file_bytes = max_file_bytes(o);
  if (o.dtype) options.dtype = dtype_from_name(*o.dtype);
  options.allow_overflow = o.allow_overflow;
  options.copies = copied_files(o);
  const TensorSource source = merged_source(o, options);
  {
    ProgressLine progress;
    options.progress = [&](std::uint64_t done, std::uint64_t all) {
      progress.show(done, all, concat(human_bytes(done), " of ", human_bytes(all)));
    };
    write_weights(source, o.out, options);
  }
  std::uint64_t bytes = 0, files = 0;
  for (const auto& entry : fs::directory_iterator(o.out))
    if (entry.path().extension() == ".safetensors") ++files, bytes += entry.file_size();
  std::printf("%s: %zu tensors in %llu file%s, %s%s\n", escaped(o.out).c_str(), source.tensors().size(),
              static_cast<unsigned long long>(files), files == 1 ? "" : "s", human_bytes(bytes).c_str(),
              left_out(o.in).c_str());
  return 0;
}

void add_dtype(CommandLine& line, WriteOptions& o) {
  line.add_option("--dtype", o.dtype,
                  "Convert floating-point tensors, rounded to nearest even; default: as they are")
      .one_of({"f32", "bf16", "f16"});
  line.add_flag("--allow-overflow", o.allow_overflow, "Values beyond the range of --dtype become infinite");
  line.add_option("--config", o.config, "config.json to copy; default: that of the checkpoint")
      .type_name("FILE");
}

}  // namespace

int merge(int argc, const char* const* argv) {
  WriteOptions o;
  CommandLine line(merge_description, "checkpoint merge", write_footer);
  line.add_option("CHECKPOINT", o.in, "A checkpoint, a folder with a file latest, or other weights")
      .type_name("")
      .required();
  line.add_option("OUT", o.out, "The folder to make").type_name("").required();
  line.add_option("--max-shard-size", o.max_shard_size, "Bytes of tensors in a file; default 5GB")
      .type_name("SIZE");
  line.add_option("--adapter", o.adapter,
                  "Merge this adapter of LoRA, a folder with adapter_config.json, into the weights")
      .type_name("FOLDER");
  add_dtype(line, o);
  const std::string help = line.parse(argc, argv);
  if (!help.empty()) return print_help(help);
  return run_write(o);
}

int adapter(int argc, const char* const* argv) {
  std::string in, out;
  CommandLine line(adapter_description, "checkpoint adapter", adapter_footer);
  line.add_option("CHECKPOINT", in, "A checkpoint, or a folder with a file latest").type_name("").required();
  line.add_option("OUT", out, "The folder to make").type_name("").required();
  const std::string help = line.parse(argc, argv);
  if (!help.empty()) return print_help(help);
  const TensorSource run = open_source(in);
  require_no_peft_model(run);
  const StoredAdapter stored = adapter_of_checkpoint(run);
  WriteWeightsOptions options;
  options.max_file_bytes = std::numeric_limits<std::uint64_t>::max();
  options.stem = "adapter_model";
  options.texts["adapter_config.json"] = stored.config;
  write_weights(stored.tensors, out, options);
  std::uint64_t bytes = 0;
  for (const TensorInfo& t : stored.tensors.tensors()) bytes += t.bytes;
  std::printf("%s: %zu tensors of the adapter, %s\n", escaped(out).c_str(), stored.tensors.tensors().size(),
              human_bytes(bytes).c_str());
  return 0;
}

int split(int argc, const char* const* argv) {
  WriteOptions o;
  CommandLine line(split_description, "checkpoint split", write_footer);
  line.add_option("IN", o.in, "Weights").type_name("").required();
  line.add_option("OUT", o.out, "The folder to make").type_name("").required();
  line.add_option("--max-shard-size", o.max_shard_size, "Bytes of tensors in a file")
      .type_name("SIZE")
      .required();
  const std::string help = line.parse(argc, argv);
  return help.empty() ? run_write(o) : print_help(help);
}

}  // namespace rz::checkpoint
