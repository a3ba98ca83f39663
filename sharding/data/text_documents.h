#pragma once
/// Documents of text in files: a file of text is one, and so is each record of a file of JSON, one object per
/// line (.jsonl, .ndjson, in upper case too).

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "../tokenizer/tokenizer.h"

namespace rz {

/// What has been read so far.
struct TextProgress {
  std::uint64_t bytes = 0, all_bytes = 0;  ///< of the files
  std::uint64_t documents = 0, tokens = 0;
};

/// How documents become tokens.
struct TextOptions {
  /// None: the tokens are the bytes of the text. Pairs need one (Tokenizer::bytes()).
  std::optional<Tokenizer> tokenizer{};
  std::string text_key = "text";  ///< of a record's text
  /// Keys of a record's prompt and answer, both or none; only the answer is learnt. Files of text have none.
  /// The texts have the marks of a chat template, which is not run here; the token of the beginning may be
  /// among them.
  std::string prompt_key{}, answer_key{};
  /// Each document ends with eos_token_id, unless its tokens do already. Without one (bytes) a line break is
  /// between documents, and behind each answer.
  bool append_eos = true;
  std::optional<std::int32_t> eos_token_id{};  ///< default: the tokenizer's
  /// A prompt with its answer and end has at most so many tokens, or the record is an error; 0: any number.
  std::uint64_t max_pair_tokens = 0;
  int threads = 1;                     ///< that encode; the tokens are the same for any number
  std::vector<std::string> outputs{};  ///< files and folders that the run itself writes: skipped in folders
  /// Called on the thread of the caller. What it throws ends the reading.
  std::function<void(const TextProgress&)> on_progress{};
};

/// The token that ends a document; none if line breaks are between them, or nothing.
std::optional<std::int32_t> end_token(const TextOptions&);

struct TextFile {
  std::string path;
  std::uint64_t bytes = 0;
  bool has_records = false;
};

/// The paths that match a pattern with `*`, `?` or `[`, in the order of their names. Errc::config if none
/// does.
std::vector<std::string> paths_matching(const std::string& pattern);

/// The files of `data`: a file, every text file and file of records below a folder, those whose names match a
/// pattern with `*`, `?` or `[`, or several such, "A,B", in the order given, else in the order of their
/// names. Links in folders are followed, and each file is read once. Skipped in folders are .git and other
/// hidden names, directories of generated files (those with a CMakeCache.txt or CACHEDIR.TAG, node_modules,
/// __pycache__), `outputs`, empty files, and, in a line of `left_out` for each folder, with their number and
/// some of the names: files with a zero byte in their first 8 MiB, or of bytes that no text has, or of a kind
/// that file_kinds.h or UTF-16 tells, those named .json, or that begin with two values of JSON or are one;
/// further names of a file, and links to nothing, or to folders that are read anyway or lie around the
/// folder. Errc::config names a path that is missing, a pipe or device, or a file of such a kind, and what
/// reads it; and a folder that has such files alone.
std::vector<TextFile> text_files(const std::string& data, std::span<const std::string> outputs = {},
                                 std::vector<std::string>* left_out = nullptr);

/// A prompt and its answer: tokens [begin, begin + prompt), and the following ones up to begin + tokens.
struct TokenPair {
  std::uint64_t begin = 0;
  std::uint32_t prompt = 0, tokens = 0;
};

/// Documents, or a part of a long one, in the order of the files.
struct EncodedText {
  std::vector<std::int32_t> tokens;
  std::vector<TokenPair> pairs;  ///< their `begin` counts from these tokens
  std::string text;              ///< if it was requested, with a line break between documents
  std::uint64_t documents = 0;   ///< that begin here; empty ones do not count
};

/// Encodes documents on threads and calls `use` with their tokens, in order, on the caller's. A document
/// begins with the tokenizer's beginning of text, if it adds one. A byte order mark is dropped in front of
/// records, and of text for a tokenizer. With a tokenizer, a text of many MiB is encoded in parts where that
/// yields the same tokens. Memory is bounded by the longest record, or text that cannot be divided, of at
/// most 1 GiB, times the threads. `with_text`: `text` is filled; without a tokenizer it always is, and
/// `tokens` is not.
/// Errc::config, "FILE:LINE: …": a line that is no JSON object, with a duplicate key, more than 64 levels, or
/// invalid UTF-8; a record without a key; a value that is no string. Errc::invalid_argument for pairs without
/// a tokenizer.
void encode_documents(std::span<const TextFile>, const TextOptions&, bool with_text,
                      const std::function<void(EncodedText&)>& use);

}  // namespace rz
