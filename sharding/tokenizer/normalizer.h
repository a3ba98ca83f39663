#pragma once
/// What is done to a text before it is split: the "normalizer" of a tokenizer.json.

#include <string>
#include <string_view>
#include <vector>

#include "sharding/tokenizer/pattern.h"

namespace rz {

/// NFC, NFD, NFKC, NFKD, Lowercase, Strip, StripAccents, Prepend, Replace, ByteLevel and Sequence. Immutable.
class Normalizer {
 public:
  Normalizer() = default;
  /// Reads a node that is null or an object. Errc::config names a key that is not supported.
  static Normalizer read(const JsonObject& owner, std::string_view key);
  static Normalizer nfc();

  bool empty() const { return stages_.empty(); }
  /// Normalizes valid UTF-8. Errc::config as for Pattern::find().
  std::string normalized(std::string text) const;

 private:
  enum class Kind { nfc, nfd, nfkc, nfkd, lowercase, strip, strip_accents, prepend, replace, byte_level };
  struct Stage {
    Kind kind;
    bool left = false, right = false;
    std::string content;
    Pattern pattern{};
  };
  void read_stage(const JsonObject& stage);
  static std::string apply(const Stage&, std::string text);

  std::vector<Stage> stages_;
};

}  // namespace rz
