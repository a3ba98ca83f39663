#include "tests/support/shared_fixture.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <numbers>
#include <random>

#include "sharding/checkpoint/safetensors.h"
#include "sharding/io/json.h"

namespace rz::test::shared_fixture {
namespace {

/// torch.Tensor.normal_ of doubles on the CPU: uniform draws of 53 bits, turned into normal ones by Box and
/// Muller in blocks of 16.
class TorchNormal {
 public:
  explicit TorchNormal(std::uint32_t seed) : engine_(seed) {}

  std::vector<float> draw(std::size_t count, double deviation, double mean) {
    std::vector<float> out(count);
    for (std::size_t b = 0; b < count; b += 16) {
      double u[16];
      for (double& x : u) x = uniform();
      for (int j = 0; j < 8; ++j) {
        const double radius = std::sqrt(-2 * std::log(1 - u[j])), angle = 2 * std::numbers::pi * u[j + 8];
        out[b + j] = static_cast<float>(radius * std::cos(angle) * deviation + mean);
        out[b + j + 8] = static_cast<float>(radius * std::sin(angle) * deviation + mean);
      }
    }
    return out;
  }

 private:
  double uniform() {
    const std::uint64_t high = engine_(), bits = high << 32 | engine_();
    return static_cast<double>(bits & ((std::uint64_t{1} << 53) - 1)) * 0x1p-53;
  }
  std::mt19937 engine_;
};

}  // namespace

std::string folder() {
  const std::filesystem::path path = std::filesystem::path(RZ_SOURCE_DIR) / "../shared/fixtures/gpt2_tiny";
  return std::filesystem::exists(path / "tokens.bin") ? path.string() : "";
}

ReferenceConfig config() {
  return {.layers = 4,
          .heads = 4,
          .channels = 128,
          .positions = 64,
          .vocabulary = 256,
          .beta2 = 0.95,
          .weight_decay = 0.1};
}

std::vector<NamedTensor> start() {
  constexpr std::uint64_t c = 128, vocabulary = 256, positions = 64;
  TorchNormal normal(1);
  std::vector<NamedTensor> out;
  const auto add = [&](const std::string& name, std::vector<std::uint64_t> shape) {
    std::uint64_t count = 1;
    for (const auto extent : shape) count *= extent;
    const bool norm = name.find("ln_") != std::string::npos && name.ends_with("weight");
    const double deviation = norm ? 0.05 : name.ends_with("c_proj.weight") ? 0.02 / std::sqrt(8.0) : 0.02;
    out.push_back({"transformer." + name, std::move(shape), normal.draw(count, deviation, norm ? 1 : 0)});
  };
  const auto add_both = [&](const std::string& name, std::vector<std::uint64_t> shape) {
    const std::uint64_t last = shape.back();
    add(name + ".weight", std::move(shape));
    add(name + ".bias", {last});
  };
  add("wte.weight", {vocabulary, c});
  add("wpe.weight", {positions, c});
  for (int layer = 0; layer < 4; ++layer) {
    const std::string h = "h." + std::to_string(layer) + ".";
    add_both(h + "ln_1", {c});
    add_both(h + "attn.c_attn", {c, 3 * c});
    add_both(h + "attn.c_proj", {c, c});
    add_both(h + "ln_2", {c});
    add_both(h + "mlp.c_fc", {c, 4 * c});
    add_both(h + "mlp.c_proj", {4 * c, c});
  }
  add_both("ln_f", {c});
  return out;
}

ReferenceParameters as_reference(const std::vector<NamedTensor>& tensors) {
  ReferenceParameters out;
  for (const auto& t : tensors) out[t.name].assign(t.values.begin(), t.values.end());
  return out;
}

void write_start(const std::string& path) {
  const auto tensors = start();
  std::vector<SafetensorsSpec> shapes;
  for (const auto& t : tensors) shapes.push_back({t.name, t.shape});
  SafetensorsWriter writer(path, shapes);
  for (const auto& t : tensors) writer.write(t.values);
  writer.finish();
}

Expected expected() {
  const std::string path = folder() + "/expected.json";
  const nlohmann::json node = parse_json(read_text_file(path), path, JsonDialect::strict);
  const auto list = [&](const char* precision, const char* what) {
    return node.at(precision).at(what).get<std::vector<double>>();
  };
  return {list("float64", "loss"), list("float64", "grad_norm"), list("float32", "grad_norm")};
}

Bound bound(const Expected& expected, std::size_t update) {
  constexpr std::size_t spike = 15;
  constexpr double draws = 10;  // four standard deviations of our runs at the spike
  const double pytorchs = std::abs(expected.grad_norm_float32.at(update) / expected.grad_norm.at(update) - 1);
  const bool before = update < spike;
  return {before ? 1e-6 : 5e-6, std::max(before ? 1e-6 : 1e-5, draws * pytorchs)};
}

std::vector<std::vector<int>> samples(int first, int count) {
  const std::string bytes = read_text_file(folder() + "/tokens.bin");
  std::vector<std::vector<int>> out(static_cast<std::size_t>(count));
  for (int i = 0; i < count; ++i)
    for (int t = 0; t <= sequence_length; ++t) {
      const std::size_t at = 2 * (static_cast<std::size_t>(first + i) * sequence_length + t);
      out[i].push_back(static_cast<unsigned char>(bytes[at]) | static_cast<unsigned char>(bytes[at + 1])
                                                                   << 8);
    }
  return out;
}

}  // namespace rz::test::shared_fixture
