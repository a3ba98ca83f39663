#include "sharding/checkpoint/shard_writer.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
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

/// Exponents of all ones, by a loop without branches.
void require_finite(const std::string& tensor, std::span<const std::byte> floats) {
  constexpr std::uint32_t exponent = 0x7f800000;
  std::uint32_t found = 0;
  for (std::size_t at = 0; at + sizeof found <= floats.size(); at += sizeof found) {
    std::uint32_t bits;
    std::memcpy(&bits, floats.data() + at, sizeof bits);
    found |= (bits & exponent) == exponent;
  }
  require(!found, Errc::diverged, tensor,
          " has an element that is not finite; nothing is saved, and earlier "
          "checkpoints are as before (SaveCheckpointOptions::nonfinite, --save-nonfinite)");
}

}  // namespace

ShardWriter::ShardWriter(const std::string& path, std::span<const ShardSlice> slices)
    : file_(path, specs(slices)) {
  for (const ShardSlice& s : slices) {
    bytes_.push_back(s.slice.count() * size_of(s.dtype));
    finite_.push_back(s.finite && s.dtype == DType::f32 ? s.tensor : "");
  }
}

void ShardWriter::write(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    require(slice_ < bytes_.size(), Errc::invalid_argument, "ShardWriter: more bytes than the slices have");
    const auto part = bytes.first(std::min(bytes.size(), bytes_[slice_] - written_));
    check(part);
    file_.write(part);
    written_ += part.size();
    bytes = bytes.subspan(part.size());
    if (written_ < bytes_[slice_]) continue;
    checksums_.push_back(std::exchange(checksum_, Checksum()).value());
    ++slice_, written_ = 0;
  }
}

/// In parts that stay in the cache between the two.
void ShardWriter::check(std::span<const std::byte> bytes) {
  constexpr std::size_t max = std::size_t{64} << 10;
  while (!bytes.empty()) {
    const auto part = bytes.first(std::min(bytes.size(), max));
    if (!finite_[slice_].empty()) require_finite(finite_[slice_], part);
    checksum_.add(part);
    bytes = bytes.subspan(part.size());
  }
}

std::vector<std::uint64_t> ShardWriter::finish() {
  file_.finish();
  return std::move(checksums_);
}

}  // namespace rz
