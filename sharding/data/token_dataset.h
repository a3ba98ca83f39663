#pragma once
/// Tokens as samples of a language model.

#include <string>

#include "sharding/data/dataset.h"
#include "sharding/data/tokens.h"

namespace rz {

/// Of parts_of_checksum() of the tokens.
std::uint64_t checksum(const Tokens&);

/// Sample i has the fields `inputs`, tokens i·T … i·T + T - 1, and `targets`, the token after each: i32 [T].
class TokenDataset : public Dataset {
 public:
  /// Errc::config if there are fewer than T + 1 tokens.
  TokenDataset(Tokens, std::size_t seq_len);

  std::uint64_t size() const override { return samples_; }
  std::vector<Field> fields() const override;
  /// Errc::config names a token outside the vocabulary.
  void read(std::uint64_t index, BatchRows& to, std::size_t row) const override;
  std::optional<std::uint64_t> checksum() const override { return rz::checksum(tokens_); }

 private:
  Tokens tokens_;
  std::size_t seq_len_;
  std::uint64_t samples_;
};

}  // namespace rz
