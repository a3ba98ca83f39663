#pragma once
/// Numbers somewhere in memory of a device.

#include <memory>
#include <vector>

#include "comm/core/types.h"
#include "comm/device/memory.h"
#include "comm/device/stream.h"

namespace rz::test {

/// `count` of them from element `at` of the memory on.
struct Floats {
  Floats(std::shared_ptr<std::byte> m, std::size_t count, std::size_t at = 0)
      : memory(std::move(m)), data(reinterpret_cast<float*>(memory.get()) + at), count(count) {}
  void set(const std::vector<float>& values, const Stream& s) const {
    memcpy_async(data, values.data(), count * sizeof(float), s);
  }
  std::vector<float> get(const Stream& s) const {
    std::vector<float> values(count);
    memcpy_async(values.data(), data, count * sizeof(float), s);
    s.synchronize();
    return values;
  }
  Buffer on(const Stream& s) const { return {data, count, s.device()}; }
  std::shared_ptr<std::byte> memory;
  float* data;
  std::size_t count;
};

}  // namespace rz::test
