#include "tools/train_lm/report/throughput.h"

#include <algorithm>
#include <cstdio>
#include <set>
#include <vector>

#include "comm/device/cuda_runtime.h"

namespace rz::train_lm {

double flops_per_token(LanguageModel& model, std::size_t seq_len) {
  const ModelFacts facts = model.facts();
  std::size_t parameters = 0;
  for (const Parameter* p : model.parameters()) parameters += p->shape.count();
  const auto attention = static_cast<double>(facts.layers * facts.heads * facts.head_size);
  return 6 * static_cast<double>(parameters - facts.position_elements) +
         12 * attention * static_cast<double>(seq_len);
}

double bf16_peak(std::string_view device_name) {
  // Searched in order; the first name contained in the device name applies.
  static constexpr struct {
    std::string_view name;
    double flops;
  } peaks[] = {{"H100 PCIe", 756e12}, {"H100 NVL", 835e12}, {"H200 NVL", 835e12}, {"H200", 989.4e12},
               {"H100", 989.4e12},    {"A100", 312e12},     {"L40S", 362e12}};
  for (const auto& p : peaks)
    if (device_name.find(p.name) != device_name.npos) return p.flops;
  return 0;
}

double median(std::span<const double> values) {
  if (values.empty()) return 0;
  std::vector<double> sorted(values.begin(), values.end());
  std::sort(sorted.begin(), sorted.end());
  const std::size_t middle = sorted.size() / 2;
  return sorted.size() % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}

Devices devices_of(Communicator& comm) {
  const Device device = comm.options().device;
  if (device.kind == Device::host) return {};
  cuda::DeviceProperties card;
  cuda::check(cuda::runtime().get_properties(&card, device.index), "cudaGetDeviceProperties", device);
  constexpr std::size_t bytes = 16;
  std::string mine = card.uuid;
  mine.resize(bytes);
  std::string all(bytes * static_cast<std::size_t>(comm.size()), '\0');
  comm.all_gather(ConstBuffer(reinterpret_cast<const std::uint8_t*>(mine.data()), bytes),
                  Buffer(reinterpret_cast<std::uint8_t*>(all.data()), all.size()))
      .wait();
  std::set<std::string> cards;
  for (std::size_t at = 0; at < all.size(); at += bytes) cards.insert(all.substr(at, bytes));
  return {card.name, static_cast<int>(cards.size())};
}

std::string describe_throughput(double tokens_per_second, double flops_per_token, const Devices& devices) {
  char text[256];
  int length = std::snprintf(text, sizeof text, "speed: %.0f tokens/s in the median", tokens_per_second);
  const double peak = bf16_peak(devices.name);
  if (peak > 0)
    std::snprintf(text + length, sizeof text - static_cast<std::size_t>(length),
                  ", %.1f%% of the bf16 peak of %d x %.100s (%.1f TFLOP/s each)",
                  100 * tokens_per_second * flops_per_token / (peak * devices.count), devices.count,
                  devices.name.c_str(), peak * 1e-12);
  return text;
}

}  // namespace rz::train_lm
