#include "sharding/engine/dropout_seeds.h"

#include "comm/device/allocate.h"
#include "comm/device/memory.h"

namespace rz {

DropoutSeeds::DropoutSeeds(std::uint64_t seed, std::size_t micro_batches, Place place, const Stream& stream)
    : seed_(seed),
      place_(place),
      next_(micro_batches),
      on_device_(std::reinterpret_pointer_cast<std::uint64_t>(
          allocate_on(stream.device(), micro_batches * sizeof(std::uint64_t)))) {}

std::uint64_t DropoutSeeds::of_pass(std::uint64_t pass) const {
  const auto rank = static_cast<std::uint64_t>(place_.rank), ranks = static_cast<std::uint64_t>(place_.ranks);
  const std::uint64_t run = pass / place_.consecutive, within = pass % place_.consecutive;
  const std::uint64_t number = (run * ranks + rank) * place_.consecutive + within;
  return seed_ ^ (number + 1) * 0x9e3779b97f4a7c15u;
}

void DropoutSeeds::draw(std::uint64_t first_pass, const Stream& stream) {
  for (std::size_t m = 0; m < next_.size(); ++m) next_[m] = of_pass(first_pass + m);
  memcpy_async(on_device_.get(), next_.data(), next_.size() * sizeof(std::uint64_t), stream);
}

}  // namespace rz
