#include "sharding/checkpoint/sharded/shard_writer.h"

#include <algorithm>
#include <utility>

#include "comm/core/error.h"

namespace rz {
namespace {

std::vector<SafetensorsSpec> specs(std::span<const ShardSlice> slices) {
  std::vector<SafetensorsSpec> all;
  for (const ShardSlice& s : slices)
    all.push_back({slice_name(s.tensor, s.slice), {s.slice.count()}, s.dtype});
  return all;
}

}  // namespace

ShardWriter::ShardWriter(const std::string& path, std::span<const ShardSlice> slices)
    : file_(path, specs(slices)) {
  for (const ShardSlice& s : slices) bytes_.push_back(s.slice.count() * size_of(s.dtype));
}

void ShardWriter::write(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    require(slice_ < bytes_.size(), Errc::invalid_argument, "ShardWriter: more bytes than the slices have");
    const auto part = bytes.first(std::min(bytes.size(), bytes_[slice_] - written_));
    file_.write(part);
    checksum_.add(part);
    written_ += part.size();
    bytes = bytes.subspan(part.size());
    if (written_ < bytes_[slice_]) continue;
    checksums_.push_back(std::exchange(checksum_, Checksum()).value());
    ++slice_, written_ = 0;
  }
}

std::vector<std::uint64_t> ShardWriter::finish() {
  file_.finish();
  return std::move(checksums_);
}

}  // namespace rz
