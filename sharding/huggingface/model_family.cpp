#include "sharding/huggingface/model_family.h"

#include <filesystem>

#include "sharding/io/json.h"

namespace rz {

std::string config_file(const std::string& given) {
  namespace fs = std::filesystem;
  if (!fs::is_directory(given)) return given;
  const fs::path own = fs::path(given) / "config.json", latest = fs::path(given) / "latest";
  if (fs::exists(own) || !fs::is_regular_file(latest)) return own.string();
  const std::string tag = read_text_file(latest.string());
  return (fs::path(given) / fs::path(tag.substr(0, tag.find_first_of("\r\n"))).filename() / "config.json")
      .string();
}

}  // namespace rz
