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

namespace rz::test {

class HuggingFaceFolder : public testing::Test {
 protected:
  void SetUp() override {
    std::string name = (std::filesystem::temp_directory_path() / "rz_huggingface_XXXXXX").string();
    ASSERT_NE(::mkdtemp(name.data()), nullptr);
    folder_ = name;
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }
  std::string path(const std::string& name = "") const { return (folder_ / name).string(); }
  void put(const std::string& name, const std::string& text) const {
    std::ofstream(path(name), std::ios::binary) << text;
  }
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
  void expect_parts(const std::string& what, std::initializer_list<std::string> parts) const {
    for (const auto& part : parts)
      EXPECT_NE(what.find(part), std::string::npos) << "'" << what << "' lacks " << part;
    EXPECT_EQ(what.find('\n'), std::string::npos) << what;
  }
  std::filesystem::path folder_;
};

}  // namespace rz::test
