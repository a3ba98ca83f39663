#include "sharding/tokenizer/decoder.h"

#include <algorithm>
#include <limits>
#include <span>
#include <utility>

#include "comm/core/text.h"
#include "sharding/io/text.h"
#include "sharding/tokenizer/characters.h"

namespace rz {
namespace {

/// The byte of a token "<0x41>"; -1 if it is none.
int byte_of_token(std::string_view token) {
  if (token.size() != 6 || !token.starts_with("<0x") || token[5] != '>') return -1;
  if (token[3] == '+') return parse_number<int>(token.substr(4, 1), 16).value_or(-1);
  if (token[3] == '-') return -1;
  return parse_number<int>(token.substr(3, 2), 16).value_or(-1);
}

/// Bytes of "<0x41>" in a row are characters, or each is U+FFFD.
std::string characters_of_fallback(std::string bytes) {
  if (is_utf8(bytes)) return bytes;
  std::string out;
  for (std::size_t i = 0; i < bytes.size(); ++i) out += replacement_character;
  return out;
}

/// How many characters `c` the text begins with, at most `max`.
std::size_t leading(std::string_view text, std::string_view c, std::size_t max) {
  std::size_t count = 0;
  for (; count < max && text.starts_with(c); ++count) text.remove_prefix(c.size());
  return count;
}
std::size_t trailing(std::string_view text, std::string_view c, std::size_t max) {
  std::size_t count = 0;
  for (; count < max && text.ends_with(c); ++count) text.remove_suffix(c.size());
  return count;
}

/// Moves `held` to `out` with all texts replaced, except for an end that may be the beginning of one.
void replace_in_part(const std::string& searched, std::string_view by, bool end, std::string& held,
                     std::string& out) {
  std::size_t last = 0;
  for (std::size_t at = held.find(searched); at != held.npos; at = held.find(searched, last)) {
    out.append(held, last, at - last);
    out += by;
    last = at + searched.size();
  }
  std::size_t kept = end ? 0 : std::min(held.size() - last, searched.size() - 1);
  while (kept > 0 && !std::string_view(held).ends_with(std::string_view(searched).substr(0, kept))) --kept;
  out.append(held, last, held.size() - kept - last);
  held.erase(0, held.size() - kept);
}

}  // namespace

Decoder Decoder::byte_level() {
  Decoder decoder;
  decoder.stages_.push_back({.kind = Kind::byte_level});
  return decoder;
}

Decoder Decoder::read(const JsonObject& owner, std::string_view key) {
  Decoder decoder;
  if (owner.has(key) && !owner.at(key).is_null())
    decoder.read_stage(owner.object(key));
  else
    decoder.stages_.push_back({.kind = Kind::spaces});
  bool fused = false;
  for (Stage& stage : decoder.stages_) {
    stage.fused = fused;
    fused = fused || stage.kind == Kind::fuse || stage.kind == Kind::byte_level;
  }
  return decoder;
}

void Decoder::read_stage(const JsonObject& stage) {
  const std::string type = required_text(stage, "type");
  constexpr auto max = std::numeric_limits<std::int32_t>::max();
  if (type == "Sequence") {
    each_object(stage, "decoders", [&](const JsonObject& s) { read_stage(s); });
  } else if (type == "ByteLevel") {
    stages_.push_back({.kind = Kind::byte_level});
  } else if (type == "ByteFallback") {
    stages_.push_back({.kind = Kind::byte_fallback});
  } else if (type == "Fuse") {
    stages_.push_back({.kind = Kind::fuse});
  } else if (type == "Replace") {
    stages_.push_back(
        {.kind = Kind::replace, .content = required_text(stage, "content"), .pattern = Pattern::read(stage)});
  } else if (type == "Strip") {
    stages_.push_back({.kind = Kind::strip,
                       .character = required_character(stage, "content"),
                       .start = static_cast<std::size_t>(stage.required_integer("start", 0, max)),
                       .stop = static_cast<std::size_t>(stage.required_integer("stop", 0, max))});
  } else if (type == "Metaspace") {
    stages_.push_back({.kind = Kind::metaspace,
                       .drop_first = prepend_scheme(stage) != PrependScheme::never,
                       .pattern = Pattern::text(required_character(stage, "replacement"))});
  } else {
    stage.fail_at("type", type + " is no decoder that is supported");
  }
}

Decoder::Stream::Stream(const Decoder& decoder) : decoder_(&decoder), progress_(decoder.stages_.size()) {}

std::string Decoder::Stream::next(std::vector<std::string> tokens, bool end) {
  for (std::size_t stage = 0; stage < progress_.size(); ++stage) apply(stage, tokens, end);
  std::string text;
  for (const std::string& token : tokens) text += token;
  if (end) progress_.assign(progress_.size(), {});
  return text;
}

namespace {

/// What has arrived of a token, of which more may follow.
void append(std::string& held, std::span<const std::string> parts) {
  for (const std::string& part : parts) held += part;
}

}  // namespace

void Decoder::Stream::apply(std::size_t number, std::vector<std::string>& tokens, bool end) {
  const Stage& stage = decoder_->stages_[number];
  Progress& progress = progress_[number];
  std::vector<std::string> out;
  switch (stage.kind) {
    case Kind::byte_level: {
      std::string text = byte_level_text(stage, progress, tokens, end);
      if (!stage.fused || end) out.push_back(std::move(text));
      break;
    }
    case Kind::byte_fallback:
      out = stage.fused ? fused_byte_fallback(progress, tokens, end) : byte_fallback(progress, tokens, end);
      break;
    case Kind::fuse:
      return;
    case Kind::replace:
      out = replaced(stage, progress, tokens, end);
      break;
    case Kind::strip:
      if (stage.fused) {
        out.push_back(fused_strip(stage, progress, tokens, end));
        break;
      }
      for (std::string& token : tokens) {
        const std::size_t width = stage.character.size();
        token.erase(0, width * leading(token, stage.character, stage.start));
        token.erase(token.size() - width * trailing(token, stage.character, stage.stop));
      }
      return;
    case Kind::metaspace:
      for (const std::string& token : tokens) {
        const bool first = stage.fused || progress.done == 0;
        out.push_back(stage.pattern.replaced(token, first && stage.drop_first ? "" : " "));
        ++progress.done;
      }
      break;
    case Kind::spaces:
      for (const std::string& token : tokens) out.push_back(progress.done++ > 0 ? " " + token : token);
      break;
  }
  tokens = std::move(out);
}

/// Parts of one token wait for its end; tokens are text up to their last whole character.
std::string Decoder::Stream::byte_level_text(const Stage& stage, Progress& progress,
                                             std::span<const std::string> tokens, bool end) {
  std::string bytes, text;
  const auto as_bytes = [&](const std::string& token) {
    return bytes_of_characters(token, bytes) ? bytes : token;
  };
  if (stage.fused) {
    append(progress.held, tokens);
    if (!end) return "";
    std::string all = as_bytes(std::exchange(progress.held, {}));
    take_characters(all, text);
    return text.append(all.empty() ? "" : replacement_character);
  }
  for (const std::string& token : tokens) progress.held += as_bytes(token);
  take_characters(progress.held, text);
  if (end && !progress.held.empty()) text += replacement_character;
  return text;
}

std::vector<std::string> Decoder::Stream::byte_fallback(Progress& progress, std::span<std::string> tokens,
                                                        bool end) {
  std::vector<std::string> out;
  std::string& held = progress.held;
  for (std::string& token : tokens) {
    if (const int byte = byte_of_token(token); byte >= 0) {
      held += static_cast<char>(byte);
      continue;
    }
    if (!held.empty()) out.push_back(characters_of_fallback(std::exchange(held, {})));
    out.push_back(std::move(token));
  }
  if (end && !held.empty()) out.push_back(characters_of_fallback(std::exchange(held, {})));
  return out;
}

/// One token is a byte if it is that and no more; its parts wait until that is decided.
std::vector<std::string> Decoder::Stream::fused_byte_fallback(Progress& progress,
                                                              std::span<const std::string> tokens, bool end) {
  auto& [held, done, passed] = progress;
  append(held, tokens);
  if (end && !passed && byte_of_token(held) >= 0)
    held = characters_of_fallback(std::string(1, static_cast<char>(byte_of_token(held))));
  passed = passed || held.size() > 6;
  if (passed || end) return {std::exchange(held, {})};
  return {};
}

std::vector<std::string> Decoder::Stream::replaced(const Stage& stage, Progress& progress,
                                                   std::span<const std::string> tokens, bool end) {
  std::vector<std::string> out;
  if (!stage.fused) {
    for (const std::string& token : tokens) out.push_back(stage.pattern.replaced(token, stage.content));
    return out;
  }
  append(progress.held, tokens);
  if (const std::string* const searched = stage.pattern.as_text())
    replace_in_part(*searched, stage.content, end, progress.held, out.emplace_back());
  else if (end)
    out.push_back(stage.pattern.replaced(std::exchange(progress.held, {}), stage.content));
  return out;
}

/// The beginning is cut where it arrives; an end that may be cut is held.
std::string Decoder::Stream::fused_strip(const Stage& stage, Progress& progress,
                                         std::span<const std::string> tokens, bool end) {
  const std::size_t width = stage.character.size();
  auto& [held, done, passed] = progress;
  std::string text = std::exchange(held, {});
  append(text, tokens);
  if (!passed) {
    const std::size_t cut = leading(text, stage.character, stage.start - done);
    text.erase(0, width * cut);
    done += cut;
    passed = done == stage.start || !text.empty();
  }
  const std::size_t tail = width * trailing(text, stage.character, stage.stop);
  if (!end) held = text.substr(text.size() - tail);
  text.erase(text.size() - tail);
  return text;
}

}  // namespace rz
