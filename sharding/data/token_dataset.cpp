#include "sharding/data/token_dataset.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "sharding/io/checksum.h"

namespace rz {

std::uint64_t checksum(const Tokens& tokens) {
  constexpr std::size_t piece = 1 << 16;
  std::vector<std::int32_t> read(piece);
  Checksum checksum;
  for (const ChecksumPart part : parts_of_checksum(tokens.count(), piece))
    for (std::size_t at = part.begin; at < part.end; at += piece) {
      const std::span<std::int32_t> some = std::span(read).first(std::min(piece, part.end - at));
      tokens.read(at, some);
      checksum.add(std::as_bytes(some));
    }
  return checksum.value();
}

TokenDataset::TokenDataset(Tokens tokens, std::size_t seq_len)
    : tokens_(std::move(tokens)), seq_len_(seq_len), samples_(tokens_.samples(seq_len)) {}

std::vector<Field> TokenDataset::fields() const {
  return {{"inputs", DType::i32, {seq_len_}}, {"targets", DType::i32, {seq_len_}}};
}

void TokenDataset::read(std::uint64_t index, BatchRows& to, std::size_t row) const {
  std::vector<std::int32_t> sample(seq_len_ + 1);
  tokens_.read(index * seq_len_, sample);
  std::copy_n(sample.begin(), seq_len_, to.row<std::int32_t>("inputs", row).begin());
  std::copy_n(sample.begin() + 1, seq_len_, to.row<std::int32_t>("targets", row).begin());
}

}  // namespace rz
