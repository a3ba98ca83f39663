#include "sharding/data/tokens/token_dataset.h"

#include <algorithm>
#include <utility>

namespace rz {

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
