#pragma once
/// Kinds of files that are neither text nor tokens, by marks in their first bytes.

#include <cstddef>
#include <string_view>

namespace rz {

struct FileKind {
  std::string_view mark, name, remedy;  ///< what makes text of it; behind "> ", a new file
  std::size_t at = 0;                   ///< of the mark
  bool is_words = false;                ///< a text may have such a mark: bytes that no text has must follow
};

/// Whether bytes may be text in some encoding of 8 bits: less than one of 64 bytes is a control, where random
/// bytes have six. "\x1b" begins colours. The last character may be cut.
bool looks_like_text(std::string_view bytes);

/// Whether the bytes are UTF-8. The last character may be cut.
bool begins_as_utf8(std::string_view bytes);

/// The kind whose mark, of `min_bytes` or more, is in the first bytes of a file; nullptr: none.
const FileKind* marked_kind(std::string_view front, std::size_t min_bytes = 2);

}  // namespace rz
