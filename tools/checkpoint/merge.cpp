// merge and split: both write a folder of Hugging Face.
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "comm/core/byte_size.h"
#include "comm/core/error.h"
#include "sharding/checkpoint/open_tensors.h"
#include "sharding/checkpoint/write_weights.h"
#include "sharding/huggingface/adapter.h"
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
    "checkpoint of DeepSpeed, ZeRO stages 0 to 3, it consolidates the f32 weights of all ranks.\n"
    "\n"
    "  checkpoint merge RUN OUT\n"
    "  checkpoint merge RUN/global_step100 OUT --dtype bf16 --max-shard-size 2GB --config config.json\n"
    "  checkpoint merge BASE OUT --adapter ADAPTER        a model with its adapter of LoRA or PEFT";

constexpr const char* split_description =
    "Writes the weights IN to a new folder OUT, cut into files by another size: IN is a safetensors file, a\n"
    "state dict of torch.save(), a folder or index of Hugging Face, or a checkpoint. A large size makes one "
    "file of several.\n"
    "\n"
    "  checkpoint split model.safetensors OUT --max-shard-size 500MB\n"
    "  checkpoint split FOLDER OUT --max-shard-size 1TB";

constexpr const char* write_footer =
    "Sizes are as in Hugging Face: 5GB is 5*10^9 bytes, 5GiB is 5*2^30. A tensor that is larger has a file "
    "of\n"
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
         (ending == ".json" || ending == ".txt" || ending == ".model" || ending == ".jinja");
}

/// Those of the folder of weights; of a checkpoint without config.json that of the folder that holds it, too.
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

int run_write(const WriteOptions& o) {
  WriteWeightsOptions options;
  options.max_file_bytes = max_file_bytes(o);
  if (o.dtype) options.dtype = dtype_from_name(*o.dtype);
  options.allow_overflow = o.allow_overflow;
  TensorSource source = open_source(o.in);
  if (o.adapter) source = merge_adapter(source, *o.adapter, o.dtype.has_value());
  options.copies = copied_files(o);
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
