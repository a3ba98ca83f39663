#include "tools/checkpoint/commands.h"

#include <sys/stat.h>

#include <algorithm>
#include <cstdio>
#include <ctime>
#include <filesystem>

#include "comm/core/error.h"
#include "sharding/checkpoint/checkpoint_folder.h"
#include "sharding/checkpoint/checkpoint_reader.h"
#include "sharding/io/disk.h"
#include "sharding/io/json.h"

namespace rz::checkpoint {
namespace {

namespace fs = std::filesystem;

std::string time_of(const fs::path& file) {
  struct stat info {};
  if (::stat(file.c_str(), &info) != 0) return "";
  std::tm time{};
  ::gmtime_r(&info.st_mtime, &time);
  char text[64];
  return std::strftime(text, sizeof text, "%Y-%m-%d %H:%M:%S UTC", &time) ? text : "";
}

/// A broken file of a tag is left to whatever needs it.
bool is_tag_in(const std::string& dir, const char* file, const std::string& tag) {
  try {
    return read_tag_file(dir, file) == tag;
  } catch (const Error&) {
    return false;
  }
}

fs::path without_slash(const std::string& path) {
  const fs::path p = fs::path(path).lexically_normal();
  return p.has_filename() ? p : p.parent_path();
}

bool is_number(const std::string& cell) {
  return !cell.empty() && cell.find_first_not_of("0123456789") == cell.npos;
}

/// Characters, of which those of UTF-8 after a first byte are no part.
std::size_t width_of(const std::string& cell) {
  return static_cast<std::size_t>(std::ranges::count_if(cell, [](char c) { return (c & 0xc0) != 0x80; }));
}

}  // namespace

StoredCheckpoint read_stored_checkpoint(const std::string& path) {
  const CheckpointReader reader = CheckpointReader::open(path);
  const fs::path folder = without_slash(path);
  const std::string dir = folder_of(folder.string()), index = (folder / checkpoint_index_file).string();
  StoredCheckpoint c{.path = folder.string(), .tag = folder.filename().string(), .written = time_of(index)};
  c.latest = is_tag_in(dir, latest_file, c.tag), c.best = is_tag_in(dir, best_file, c.tag);
  c.index = reader.index();
  c.state = parse_json(c.index.state, index, JsonDialect::strict);
  for (const StoredFile& f : c.index.files) c.bytes += f.bytes;
  return c;
}

std::vector<std::string> checkpoints_at(const std::string& path) {
  require(path_exists(path), Errc::config, path, ": no such folder");
  if (path_exists((fs::path(path) / checkpoint_index_file).string())) return {path};
  std::vector<std::string> folders;
  for (const std::string& tag : checkpoint_tags(path)) folders.push_back((fs::path(path) / tag).string());
  require(!folders.empty(), Errc::config, path, ": holds no checkpoint: neither ", checkpoint_index_file,
          " nor folders with one");
  return folders;
}

TensorSource open_source(const std::string& path, TensorPart part) {
  require(path_exists(path), Errc::config, path, ": no such file or folder");
  if (has_checkpoint(path)) return open_checkpoint(path, part);  // the one that `latest` names
  const TensorSource source = open_tensors(path);
  if (!source.choice().empty()) std::fprintf(stderr, "checkpoint: %s\n", source.choice().c_str());
  return source;
}

std::uint64_t bytes_of(const StoredTensor& t) { return t.count() * safetensors_bits(t.dtype) / 8; }

std::string TextTable::text() const {
  std::vector<std::size_t> width(rows_.front().size());
  for (const auto& row : rows_)
    for (std::size_t c = 0; c < row.size(); ++c) width[c] = std::max(width[c], width_of(row[c]));
  std::string text;
  for (const auto& row : rows_) {
    std::string line;
    for (std::size_t c = 0; c < row.size(); ++c) {
      const std::string gap(width[c] - width_of(row[c]), ' ');
      line += (c == 0 ? "" : "  ") + (is_number(row[c]) ? gap + row[c] : row[c] + gap);
    }
    text += line.substr(0, line.find_last_not_of(' ') + 1) + "\n";
  }
  return text;
}

}  // namespace rz::checkpoint
