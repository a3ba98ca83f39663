#pragma once
/// A folder of files in Hugging Face's format, of a test's own.

#include <gtest/gtest.h>
#include <stdlib.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <numeric>
#include <string>
#include <vector>

#include "sharding/checkpoint/safetensors.h"
#include "tests/support/error_of.h"
#include "tests/support/folder.h"

namespace rz::test {

class HuggingFaceFolder : public testing::Test, protected Folder {
 protected:
  /// Element i of tensor t is 100·(t + first) + i.
  void put_tensors(const std::string& name, const std::vector<SafetensorsSpec>& tensors,
                   float first = 0) const {
    SafetensorsWriter writer(path(name), tensors);
    for (const auto& tensor : tensors) {
      std::uint64_t count = 1;
      for (const auto extent : tensor.shape) count *= extent;
      std::vector<float> values(count);
      std::iota(values.begin(), values.end(), 100 * first++);
      writer.write(values);
    }
    writer.finish();
  }
};

}  // namespace rz::test
