#pragma once
/// Tokens in a folder of files of equal length, with an index of what they are.

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace rz {

/// index.json of a folder of tokens.
struct TokensIndex {
  struct Shard {
    std::string file;  ///< a name in the folder
    std::uint64_t tokens = 0;
  };
  std::string path{};           ///< of index.json
  std::uint64_t tokenizer = 0;  ///< Tokenizer::checksum()
  std::uint64_t vocab_size = 0;
  std::optional<std::int32_t> eos_token_id{};  ///< that ends documents
  std::uint64_t documents = 0, tokens = 0;
  std::string dtype = "uint16";  ///< or "uint32"
  std::vector<Shard> shards{};
};

/// nullopt if the folder has no index.json. Errc::config, "FILE: key: …": not an index of tokens, numbers
/// that contradict each other, a name that is no file of the folder.
std::optional<TokensIndex> read_tokens_index(const std::string& folder);

struct TokenShardsOptions {
  std::string format = "llmc";             ///< or "npy", or "bin": without a header
  std::string dtype = "auto";              ///< uint16 if the vocabulary has at most 65536 tokens, else uint32
  std::uint64_t shard_size = 100'000'000;  ///< tokens of a file, except for the last one
};

/// Writes a folder of tokens, tokens_000000.bin or .npy and so on, and its index, which becomes visible
/// complete and durable, or not at all (DurableFolder). Memory does not depend on the number of tokens.
class TokenShards {
 public:
  /// Errc::config if the folder exists and is not empty, for a format or dtype that is none of these or too
  /// narrow for the vocabulary; Errc::io if it cannot be made.
  TokenShards(const std::string& folder, std::uint64_t vocab_size, const TokenShardsOptions& = {});
  ~TokenShards();

  /// The folder before it is visible, for other files.
  const std::string& folder() const;
  /// Appends tokens. Errc::io for what cannot be written.
  void write(std::span<const std::int32_t>);
  /// Writes the index, of which `dtype`, `vocab_size`, `tokens` and `shards` are known here, and makes the
  /// folder visible. Returns the index. Errc::config if there is no token. Call at most once.
  TokensIndex commit(TokensIndex);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace rz
