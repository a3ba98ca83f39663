#pragma once
/// How tokens become text: the "decoder" of a tokenizer.json.

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "sharding/tokenizer/elements.h"
#include "sharding/tokenizer/pattern.h"

namespace rz {

/// ByteLevel, ByteFallback, Fuse, Replace, Strip, Metaspace and Sequence; without one, the tokens with blanks
/// between them. Immutable.
class Decoder {
 private:
  struct Stage;

 public:
  Decoder() = default;
  /// Reads a node that is null or an object. Errc::config names a key that is not supported.
  static Decoder read(const JsonObject& owner, std::string_view key);
  static Decoder byte_level();

  /// Decodes tokens that arrive in parts.
  class Stream {
   public:
    explicit Stream(const Decoder&);
    /// What is certain of the text after these tokens, beyond what was returned before; with `end` the rest.
    /// Errc::config as for Pattern::find().
    std::string next(std::vector<std::string> tokens, bool end);

   private:
    struct Progress {
      std::string held{};    ///< text or bytes whose successors decide what becomes of them
      std::size_t done = 0;  ///< characters that were removed, or tokens
      bool passed = false;   ///< the beginning is decided
    };
    void apply(std::size_t stage, std::vector<std::string>& tokens, bool end);
    static std::string byte_level_text(const Stage&, Progress&, std::span<const std::string> tokens,
                                       bool end);
    static std::vector<std::string> byte_fallback(Progress&, std::span<std::string> tokens, bool end);
    static std::vector<std::string> fused_byte_fallback(Progress&, std::span<const std::string> tokens,
                                                        bool end);
    static std::vector<std::string> replaced(const Stage&, Progress&, std::span<const std::string> tokens,
                                             bool end);
    static std::string fused_strip(const Stage&, Progress&, std::span<const std::string> tokens, bool end);

    const Decoder* decoder_;
    std::vector<Progress> progress_;
  };

 private:
  enum class Kind { byte_level, byte_fallback, fuse, replace, strip, metaspace, spaces };
  struct Stage {
    Kind kind;
    std::string character{}, content{};
    std::size_t start = 0, stop = 0;
    bool drop_first = false;
    Pattern pattern{};
    bool fused = false;  ///< what arrives is parts of one token
  };
  void read_stage(const JsonObject& stage);

  std::vector<Stage> stages_;
};

}  // namespace rz
