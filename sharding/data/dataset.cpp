#include "sharding/data/dataset.h"

#include "comm/core/error.h"
#include "sharding/data/field_names.h"

namespace rz {

std::vector<ChecksumPart> parts_of_checksum(std::size_t count, std::size_t piece) {
  constexpr std::size_t pieces = 64;
  if (count <= pieces * piece) return {{0, count}};
  std::vector<ChecksumPart> parts;
  for (std::size_t i = 0; i + 1 < pieces; ++i) {
    const std::size_t begin = (count - piece) / (pieces - 1) * i;
    parts.push_back({begin, begin + piece});
  }
  parts.push_back({count - piece, count});
  return parts;
}

std::size_t BatchRows::find(std::string_view field, DType dtype) const {
  for (std::size_t f = 0; f < fields_.size(); ++f) {
    if (fields_[f].name != field) continue;
    require(fields_[f].dtype == dtype, Errc::invalid_argument, "field ", field, " of ",
            rz::name(fields_[f].dtype), " was written as ", rz::name(dtype));
    return f;
  }
  fail_unknown_field(field, fields_);
}

std::span<std::byte> BatchRows::bytes(std::size_t field, std::size_t row) {
  const std::size_t bytes = fields_[field].shape.count() * size_of(fields_[field].dtype);
  return {memory_[field].raw() + row * bytes, bytes};
}

}  // namespace rz
