#pragma once
/// Files of a test's own.

#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include "comm/core/error.h"

namespace rz::test {

/// A folder that ends with the test. A fixture that derives from it has its functions.
class Folder {
 public:
  Folder() : path_((std::filesystem::temp_directory_path() / "rz_test_XXXXXX").string()) {
    if (!::mkdtemp(path_.data())) fail_errno("mkdtemp", path_);
  }
  Folder(const Folder&) = delete;
  ~Folder() {
    std::error_code left;  // a test may have taken the permission, or the folder itself
    std::filesystem::remove_all(path_, left);
  }
  const std::string& path() const { return path_; }
  std::string path(const std::string& name) const { return path_ + "/" + name; }
  std::string operator/(const std::string& name) const { return path(name); }
  /// Writes a file, in folders that it makes.
  void put(const std::string& name, const std::string& bytes) const {
    std::filesystem::create_directories(std::filesystem::path(path(name)).parent_path());
    std::ofstream(path(name), std::ios::binary) << bytes;
  }
  std::string get(const std::string& name) const {
    std::ifstream file(path(name), std::ios::binary);
    EXPECT_TRUE(file.is_open()) << path(name);
    return {std::istreambuf_iterator<char>(file), {}};
  }

 private:
  std::string path_;
};

}  // namespace rz::test
