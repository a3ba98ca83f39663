#include "sharding/checkpoint/write_weights.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "comm/core/error.h"
#include "comm/core/math.h"
#include "sharding/checkpoint/safetensors.h"
#include "sharding/io/file.h"
#include "sharding/io/json.h"
#include "sharding/io/text.h"

namespace rz {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t written_elements = std::size_t{1} << 20;

bool is_converted(const TensorInfo& t, const WriteWeightsOptions& options) {
  return options.dtype && is_float_dtype(t.dtype) && t.dtype != safetensors_name(*options.dtype);
}

/// A config.json for the weights. Their dtype has its names in transformers 5 and 4, where from_pretrained()
/// would otherwise convert them.
std::string config_of_weights(const std::string& path, const WriteWeightsOptions& options) {
  nlohmann::json config = parse_json(read_text_file(path), path, JsonDialect::relaxed);
  require(config.is_object(), Errc::config, path, ": must be an object");
  if (options.dtype)
    config["dtype"] = config["torch_dtype"] = *options.dtype == DType::bf16  ? "bfloat16"
                                              : *options.dtype == DType::f16 ? "float16"
                                                                             : "float32";
  if (options.untied) config["tie_word_embeddings"] = false;
  return config.dump(2) + "\n";
}

/// A type of the library with elements as large as those of a dtype in files.
DType type_of_size(const TensorInfo& t) {
  switch (safetensors_bits(t.dtype) / 8) {
    case 1:
      return DType::u8;
    case 2:
      return DType::bf16;
    case 4:
      return DType::u32;
    default:
      return DType::u64;
  }
}

SafetensorsSpec written_spec(const TensorInfo& t, const WriteWeightsOptions& options) {
  if (is_converted(t, options)) return {t.name, t.shape, *options.dtype};
  return {t.name, t.shape, type_of_size(t), t.dtype};
}

/// Writes the tensors of one file.
class WeightFileWriter {
 public:
  WeightFileWriter(const TensorSource& source, const WriteWeightsOptions& options, const std::string& path,
                   const std::vector<SafetensorsSpec>& specs)
      : source_(source), options_(options), file_(path, specs) {}

  void write(const TensorInfo& t, const std::function<void(std::uint64_t)>& written) {
    for (std::uint64_t at = 0, n; at < t.count; at += n) {
      n = std::min<std::uint64_t>(written_elements, t.count - at);
      written(is_converted(t, options_) ? write_converted(t, at, n) : write_bytes(t, at, n));
    }
  }
  void finish() { file_.finish(); }

 private:
  std::uint64_t write_bytes(const TensorInfo& t, std::uint64_t at, std::uint64_t n) {
    const std::uint64_t size = t.bytes / t.count;
    bytes_.resize(n * size);
    source_.read_bytes(t, at * size, bytes_);
    file_.write(std::span<const std::byte>(bytes_));
    return bytes_.size();
  }

  std::uint64_t write_converted(const TensorInfo& t, std::uint64_t at, std::uint64_t n) {
    values_.resize(n);
    source_.read_f32(t, at, values_);
    if (*options_.dtype == DType::f16) return write_narrow<f16>(t, at);
    if (*options_.dtype == DType::bf16) return write_narrow<bf16>(t, at);
    file_.write(std::span<const float>(values_));
    return n * sizeof(float);
  }

  template <class T>
  std::uint64_t write_narrow(const TensorInfo& t, std::uint64_t at) {
    std::vector<T> narrow(values_.size());
    for (std::size_t i = 0; i < narrow.size(); ++i) {
      narrow[i] = from_f32<T>(values_[i]);
      if (std::isfinite(values_[i]) && !std::isfinite(to_f32(narrow[i]))) overflow(t, at + i, values_[i]);
    }
    file_.write(std::as_bytes(std::span(narrow)));
    return narrow.size() * sizeof(T);
  }

  void overflow(const TensorInfo& t, std::uint64_t element, float value) const {
    require(options_.allow_overflow, Errc::diverged,
            escaped(concat(source_.path(), ": tensor '", t.name, "': element ", element, " is ", value,
                           ", which overflows ", name(*options_.dtype),
                           "; choose bf16 or f32, or allow the overflow to infinity")));
  }

  const TensorSource& source_;
  const WriteWeightsOptions& options_;
  SafetensorsWriter file_;
  std::vector<std::byte> bytes_;
  std::vector<float> values_;
};

/// What is written: every tensor's place, and bytes.
struct WritePlan {
  WritePlan(const TensorSource& source, const WriteWeightsOptions& options) {
    for (const TensorInfo& t : source.tensors()) {
      require(!options.dtype || !(t.dtype.starts_with("F8") || t.dtype.starts_with("F4")), Errc::unsupported,
              escaped(source.path()), ": tensor '", escaped(t.name), "' is ", escaped(t.dtype),
              ", which is not converted in this build yet: its scales are other tensors; write it without "
              "--dtype");
      specs.push_back(written_spec(t, options));
      bytes.push_back(t.count * size_of(specs.back().dtype));
      all += bytes.back();
    }
    files = cut_into_files(bytes, options.max_file_bytes);
    // Larger elements lie first, as Hugging Face writes them, so that all are aligned.
    for (auto& tensors : files)
      std::ranges::stable_sort(tensors, std::greater(),
                               [&](std::size_t t) { return size_of(specs[t].dtype); });
  }

  std::vector<SafetensorsSpec> specs;
  std::vector<std::uint64_t> bytes;
  std::uint64_t all = 0;
  std::vector<std::vector<std::size_t>> files;
};

}  // namespace

std::string weight_file_name(std::size_t file, std::size_t files, const std::string& stem) {
  if (files == 1) return stem + ".safetensors";
  char name[64];
  std::snprintf(name, sizeof name, "-%05zu-of-%05zu.safetensors", file + 1, files);
  return stem + name;
}

std::string weight_index(std::span<const SafetensorsSpec> specs,
                         std::span<const std::vector<std::size_t>> files) {
  nlohmann::json map = nlohmann::json::object();
  std::uint64_t all = 0;
  for (std::size_t f = 0; f < files.size(); ++f)
    for (const std::size_t t : files[f]) {
      map[specs[t].name] = weight_file_name(f, files.size());
      std::uint64_t bytes = size_of(specs[t].dtype);
      for (const std::uint64_t extent : specs[t].shape) bytes *= extent;
      all += bytes;
    }
  return nlohmann::json{{"metadata", {{"total_size", all}}}, {"weight_map", std::move(map)}}.dump(2) + "\n";
}

std::vector<std::vector<std::size_t>> cut_into_files(std::span<const std::uint64_t> bytes,
                                                     std::uint64_t max_file_bytes) {
  std::vector<std::vector<std::size_t>> files;
  std::vector<std::size_t> file;
  std::uint64_t used = 0;
  for (std::size_t t = 0; t < bytes.size(); ++t) {
    if (bytes[t] > max_file_bytes) {
      files.push_back({t});
      continue;
    }
    if (used + bytes[t] > max_file_bytes) files.push_back(std::exchange(file, {})), used = 0;
    file.push_back(t), used += bytes[t];
  }
  if (!file.empty() || files.empty()) files.push_back(file);
  return files;
}

void write_weights(const TensorSource& source, const std::string& folder,
                   const WriteWeightsOptions& options) {
  require_whole_bytes(source);
  const WritePlan plan(source, options);
  DurableFolder out(folder);
  const fs::path path = out.folder();
  std::uint64_t done = 0;
  for (std::size_t f = 0; f < plan.files.size(); ++f) {
    std::vector<SafetensorsSpec> specs;
    for (const std::size_t t : plan.files[f]) specs.push_back(plan.specs[t]);
    const std::string name = weight_file_name(f, plan.files.size(), options.stem);
    WeightFileWriter file(source, options, (path / name).string(), specs);
    for (const std::size_t t : plan.files[f])
      file.write(source.tensors()[t], [&](std::uint64_t n) { options.progress(done += n, plan.all); });
    file.finish();
  }
  if (plan.files.size() > 1)
    write_durably((path / weight_index_name).string(), weight_index(plan.specs, plan.files));
  for (const std::string& copy : options.copies) {
    require(fs::exists(copy), Errc::config, copy, ": cannot be opened");
    const fs::path name = fs::path(copy).filename();
    if (name == "config.json" && (options.dtype || options.untied))
      write_durably((path / name).string(), config_of_weights(copy, options));
    else
      copy_durably(copy, (path / name).string());
  }
  for (const auto& [name, text] : options.texts) write_durably((path / name).string(), text);
  out.commit();
}

}  // namespace rz
