#include "sharding/io/temporary_name.h"

#include <algorithm>
#include <filesystem>
#include <random>

#include "sharding/io/disk.h"

namespace rz {
namespace {

constexpr std::string_view mark = ".ringzero-", alphabet = "abcdefghijklmnopqrstuvwxyz0123456789";
constexpr std::size_t digits = 6;

}  // namespace

TemporaryName::TemporaryName(const std::string& path, std::string_view ending)
    : folder_(folder_of(path) + "/"),
      front_("." + std::filesystem::path(path).filename().string() + std::string(mark)),
      ending_(ending) {}

bool TemporaryName::matches(std::string_view name) const {
  return name.size() == front_.size() + digits + ending_.size() && name.starts_with(front_) &&
         name.ends_with(ending_);
}

std::string TemporaryName::fresh() const {
  std::random_device random;
  std::string name = front_;
  for (std::size_t i = 0; i < digits; ++i) name += alphabet[random() % alphabet.size()];
  return in_folder(name + ending_);
}

std::string_view name_of_temporary(std::string_view temporary, std::string_view ending) {
  const std::size_t around = 1 + mark.size() + digits + ending.size();
  if (temporary.size() <= around || temporary.front() != '.' || !temporary.ends_with(ending)) return {};
  const std::string_view name = temporary.substr(1, temporary.size() - around);
  const std::string_view rest = temporary.substr(1 + name.size());
  const bool random = std::ranges::all_of(rest.substr(mark.size(), digits),
                                          [](char c) { return alphabet.find(c) != std::string_view::npos; });
  return rest.starts_with(mark) && random ? name : std::string_view();
}

}  // namespace rz
