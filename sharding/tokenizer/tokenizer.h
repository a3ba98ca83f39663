#pragma once
/// Texts as tokens and back, by the files of Hugging Face's `tokenizers`, whose results these are.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace rz {

struct BpeTrainingOptions {
  /// Tokens with the first ids; texts do not become them in training. The first is that of the beginning and
  /// of the end.
  std::vector<std::string> special_tokens{"<|endoftext|>"};
  /// A pair that is there less often is not merged.
  std::int64_t min_frequency = 0;
  /// That of tokenizer_config.json, which lacks the key if it is 0.
  std::size_t model_max_length = 0;
};

/// A tokenizer with byte pair encoding: byte-level as of GPT-2, Llama 3, Qwen and GPT-NeoX, or of the form of
/// SentencePiece with bytes of unknown characters as of Llama 2, Mistral and TinyLlama. Immutable; copies
/// share it, and all calls may run concurrently.
class Tokenizer {
 public:
  /// Reads a folder with tokenizer.json, or with vocab.json and merges.txt, or such a file. A folder without
  /// them is one of the program tokenize, or one of checkpoints, whose latest counts.
  ///
  /// The class is tokenizer_class of tokenizer_config.json, else of config.json, else that of its model_type.
  /// The rules of vocab.json and merges.txt are those of the class: GPT2Tokenizer, which is also that of
  /// neither file, CodeGenTokenizer, Qwen2Tokenizer, RobertaTokenizer or BartTokenizer, each also with "Fast"
  /// behind it; Errc::config names another class or model. files() has the class.
  ///
  /// tokenizer_config.json, special_tokens_map.json and added_tokens.json count beside both, as AutoTokenizer
  /// of transformers 5 merges them: tokens of the beginning, the end, padding … (of these classes and
  /// LlamaTokenizer the defaults where no key is), added_tokens_decoder, additional_special_tokens and
  /// extra_special_tokens. New tokens get the next ids. add_prefix_space, add_bos_token and add_eos_token
  /// count beside the two files. Beside a tokenizer.json, add_prefix_space does for the classes of GPT-2's
  /// form; where versions 4 and 5 of transformers differ (add_prefix_space of Qwen2Tokenizer and
  /// LlamaTokenizer, the other two of LlamaTokenizer), Errc::config names a key that contradicts the file,
  /// and a special token of Qwen2Tokenizer that takes blanks or is normalized.
  /// `truncation` and `padding` of tokenizer.json have no effect, as in transformers. Errc::config, "FILE:
  /// key: …", for files that are missing or malformed, and for what is not supported. Supported are, each
  /// also in a Sequence,
  ///   - the model BPE, without `dropout`, prefixes and suffixes;
  ///   - normalizers: NFC, NFD, NFKC, NFKD, Lowercase, Strip, StripAccents, Prepend, Replace, ByteLevel;
  ///   - pre-tokenizers: ByteLevel, Split, Digits, Metaspace, Punctuation, Whitespace, WhitespaceSplit,
  ///     CharDelimiterSplit;
  ///   - post-processors: ByteLevel, and one TemplateProcessing, of which `single` counts;
  ///   - decoders: ByteLevel, ByteFallback, Fuse, Replace, Strip, Metaspace.
  ///
  /// Results are those of tokenizers 0.23.3, with the versions of Unicode that its parts have: 16 in regular
  /// expressions and Whitespace, 9 in normal forms and StripAccents, 8 in Punctuation, 17 in Digits and
  /// Lowercase. Of libonig alone depends which letters of later versions than its own a part (?i: … ) of an
  /// expression takes for each other. What else depends on it, such as \X, is refused, and so are properties
  /// that unicode.inc lacks.
  static Tokenizer from_pretrained(const std::string& path);
  /// The 256 bytes; the token of a byte is its value. `model_max_length`: that of tokenizer_config.json,
  /// which lacks the key if it is 0.
  static Tokenizer bytes(std::size_t model_max_length = 0);

  /// The tokens of a text. Texts of special and other added tokens are these tokens.
  /// `add_special_tokens`: with those of the post-processor, such as the beginning's of Llama. Bytes that are
  /// not UTF-8 become U+FFFD, as in Python's decode("utf-8", "replace"); bytes() keeps them.
  std::vector<std::int32_t> encode(std::string_view text, bool add_special_tokens = true) const;
  /// The tokens that encode() puts before a text.
  std::vector<std::int32_t> beginning() const;
  /// The text of tokens: UTF-8, with U+FFFD in place of bytes that are none. Ids without a token have no
  /// text. `skip_special_tokens`: special tokens have none either.
  std::string decode(std::span<const std::int32_t> ids, bool skip_special_tokens = false) const;

  /// The largest id + 1, added tokens included.
  std::size_t vocab_size() const;
  /// The same without special tokens at the end, which a model may lack: texts need not have them.
  std::size_t ordinary_vocab_size() const;
  std::optional<std::int32_t> token_to_id(std::string_view token) const;
  /// The token as the files spell it; empty if there is none of this id.
  std::string id_to_token(std::int32_t id) const;
  std::optional<std::int32_t> bos_token_id() const, eos_token_id() const, pad_token_id() const;

  /// Writes the files of the tokenizer that lay in the folder it was read from, byte for byte, each complete.
  /// After bytes() and train_bpe() these are tokenizer.json and tokenizer_config.json, which transformers
  /// reads. Files of another tokenizer that lie in the folder, and are none of these, are
  /// removed: from_pretrained() of the folder is this tokenizer. Errc::io for what cannot be written.
  void save_pretrained(const std::string& folder) const;
  /// Names and contents of these files, e.g. for TrainingCheckpoints::files().
  const std::vector<std::pair<std::string, std::string>>& files() const;
  /// Differs for other files of vocabulary and rules.
  std::uint64_t checksum() const;

 private:
  friend class DecodeStream;
  friend Tokenizer train_bpe(std::span<const std::string_view>, std::size_t, const BpeTrainingOptions&);
  struct State;
  static Tokenizer from_files(std::vector<std::pair<std::string, std::string>> files,
                              const std::string& folder);
  explicit Tokenizer(std::shared_ptr<const State> state) : state_(std::move(state)) {}

  std::shared_ptr<const State> state_;
};

/// Text of tokens that arrive one by one. Not thread-safe.
class DecodeStream {
 public:
  /// `context`: the tokens before the first one, e.g. of a prompt. Their text is not returned, but a decoder
  /// that removes a blank at the beginning of a text does not find the beginning behind them.
  explicit DecodeStream(Tokenizer, bool skip_special_tokens = true,
                        std::span<const std::int32_t> context = {});
  DecodeStream(DecodeStream&&) noexcept;
  DecodeStream& operator=(DecodeStream&&) noexcept;
  ~DecodeStream();

  /// What is certain of the text after this token, beyond what was returned before: whole characters, and
  /// nothing that a further token might change. All that push() and finish() return is, in this order,
  /// decode() of all tokens, behind decode() of the context.
  std::string push(std::int32_t id);
  /// The rest. A next token begins a new text.
  std::string finish();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// A byte-level tokenizer with GPT-2's pattern, of `vocab_size` tokens: special tokens, the 256 bytes, and
/// merges of the most frequent pairs in the texts, of several those with the lowest ids, as by the BpeTrainer
/// of Hugging Face's tokenizers with the alphabet of ByteLevel. It has fewer if no more pairs are there. A
/// pure function of its arguments. Bytes that are not UTF-8 are U+FFFD. Errc::invalid_argument if
/// `vocab_size` is less than special tokens and bytes are, or for a special token that is empty, no UTF-8, or
/// there twice.
Tokenizer train_bpe(std::span<const std::string_view> texts, std::size_t vocab_size,
                    const BpeTrainingOptions& = {});

/// Whether the folder of a model, or the latest checkpoint in a folder, has files for
/// Tokenizer::from_pretrained().
bool has_tokenizer(const std::string& folder);
/// Whether from_pretrained() reads a file of this name.
bool is_tokenizer_file(std::string_view name);

}  // namespace rz
