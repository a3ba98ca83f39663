#include "sharding/tokenizer/pre_tokenizer.h"

#include <utility>

#include "comm/core/text.h"
#include "sharding/tokenizer/characters.h"

namespace rz {
namespace {

/// Matches of each character for which `f` holds.
template <class F>
std::vector<Part> parts_by(std::string_view text, const F& f) {
  std::vector<Pattern::Match> matches;
  for (std::size_t at = 0; at < text.size();) {
    const auto [code, length] = first_character(text.data() + at);
    if (f(code)) matches.push_back({at, at + length});
    at += length;
  }
  return parts_of_matches(matches, text.size());
}

/// \w+|[^\w\s]+. Whether the first word is at the beginning.
bool split_words(std::string_view text, std::vector<std::string_view>& out) {
  const auto kind_of = [sets = character_sets()](char32_t code) {
    return sets[code] & (CharacterSet::word | CharacterSet::space);
  };
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t begin = at;
    const int kind = kind_of(first_character(text.data() + at).code);
    while (at < text.size()) {
      const auto [code, length] = first_character(text.data() + at);
      if (kind_of(code) != kind) break;
      at += length;
    }
    if (!(kind & CharacterSet::space)) out.push_back(text.substr(begin, at - begin));
  }
  return !(kind_of(first_character(text.data()).code) & CharacterSet::space);
}

std::string_view stored(std::deque<std::string>& storage, std::string text) {
  return storage.emplace_back(std::move(text));
}

}  // namespace

PreTokenizer PreTokenizer::read(const JsonObject& owner, std::string_view key) {
  PreTokenizer all;
  if (owner.has(key) && !owner.at(key).is_null()) all.read_stage(owner.object(key));
  return all;
}

PreTokenizer PreTokenizer::byte_level(bool add_prefix_space, bool use_regex) {
  PreTokenizer all;
  all.stages_.push_back({.kind = Kind::byte_level,
                         .add_prefix_space = add_prefix_space,
                         .use_regex = use_regex,
                         .known = KnownPattern::gpt2});
  return all;
}

PreTokenizer PreTokenizer::byte_level(bool add_prefix_space, KnownPattern known) {
  if (known == KnownPattern::gpt2) return byte_level(add_prefix_space);
  PreTokenizer all = byte_level(add_prefix_space, false);
  all.stages_.insert(all.stages_.begin(), {.kind = Kind::split, .known = known});
  return all;
}

bool PreTokenizer::set_prefix_space(bool add) {
  return stages_.size() == 1 && spells_bytes() && std::exchange(stages_[0].add_prefix_space, add) != add;
}

void PreTokenizer::read_stage(const JsonObject& stage) {
  const std::string type = required_text(stage, "type");
  if (type == "Sequence") {
    each_object(stage, "pretokenizers", [&](const JsonObject& s) { read_stage(s); });
  } else if (type == "ByteLevel") {
    stages_.push_back(
        byte_level(stage.boolean("add_prefix_space", true), stage.boolean("use_regex", true)).stages_[0]);
  } else if (type == "Split") {
    Stage split{.kind = Kind::split,
                .invert = stage.boolean("invert", false),
                .behavior = split_behavior(stage, "behavior", SplitBehavior::isolated),
                .pattern = Pattern::read(stage)};
    if (!split.pattern.as_text() && !split.invert && split.behavior == SplitBehavior::isolated)
      split.known = known_pattern(stage.object("pattern").text("Regex", ""));
    stages_.push_back(std::move(split));
  } else if (type == "Digits") {
    stages_.push_back({.kind = Kind::digits,
                       .behavior = stage.boolean("individual_digits", false) ? SplitBehavior::isolated
                                                                             : SplitBehavior::contiguous});
  } else if (type == "Metaspace") {
    const bool split = !stage.has("split") || stage.at("split").is_null() || stage.boolean("split", true);
    const std::string character = required_character(stage, "replacement");
    stages_.push_back({.kind = Kind::metaspace,
                       .individual = split,
                       .prepend = prepend_scheme(stage),
                       .character = character,
                       .behavior = SplitBehavior::merged_with_next,
                       .pattern = Pattern::text(character)});
  } else if (type == "Punctuation") {
    stages_.push_back({.kind = Kind::characters,
                       .set = CharacterSet::punctuation,
                       .behavior = split_behavior(stage, "behavior", SplitBehavior::isolated)});
  } else if (type == "CharDelimiterSplit") {
    stages_.push_back({.kind = Kind::split,
                       .behavior = SplitBehavior::removed,
                       .pattern = Pattern::text(required_character(stage, "delimiter"))});
  } else if (type == "Whitespace") {
    stages_.push_back({.kind = Kind::whitespace});
  } else if (type == "WhitespaceSplit") {
    stages_.push_back(
        {.kind = Kind::characters, .set = CharacterSet::space, .behavior = SplitBehavior::removed});
  } else {
    stage.fail_at("type", type + " is no pre-tokenizer that is supported");
  }
}

bool PreTokenizer::is_identity_of_bytes() const {
  return stages_.size() == 1 && spells_bytes() && !stages_[0].use_regex && !stages_[0].add_prefix_space;
}

bool PreTokenizer::apply(const Stage& stage, bool last, std::string_view text, bool first,
                         std::deque<std::string>& storage, std::vector<std::string_view>& out) {
  bool from_beginning = true;
  const auto add = [&](const std::vector<Part>& parts) {
    const std::vector<Part> kept = rz::apply(stage.behavior, parts);
    from_beginning = !kept.empty() && kept[0].begin == 0;
    for (const Part& part : kept)
      if (part.begin < part.end) out.push_back(text.substr(part.begin, part.end - part.begin));
  };
  const auto has = [sets = character_sets()](char32_t code, std::uint8_t set) {
    return (sets[code] & set) != 0;
  };
  switch (stage.kind) {
    case Kind::byte_level: {
      if (stage.add_prefix_space && !text.starts_with(' ')) text = stored(storage, concat(" ", text));
      const std::size_t before = out.size();
      if (stage.use_regex)
        rz::split(KnownPattern::gpt2, text, out);
      else
        out.push_back(text);
      for (std::size_t i = before; i < out.size() && !last; ++i)
        out[i] = stored(storage, characters_of_bytes(out[i]));
      break;
    }
    case Kind::split: {
      if (stage.known != KnownPattern::none) {
        rz::split(stage.known, text, out);
        break;
      }
      std::vector<Part> parts = parts_of_matches(stage.pattern.find(text), text.size());
      for (Part& part : parts) part.match = part.match != stage.invert;
      add(parts);
      break;
    }
    case Kind::digits:
      add(parts_by(text, [&](char32_t code) { return has(code, CharacterSet::numeric); }));
      break;
    case Kind::characters:
      add(parts_by(text, [&](char32_t code) { return has(code, stage.set); }));
      break;
    case Kind::whitespace:
      from_beginning = split_words(text, out);
      break;
    case Kind::metaspace: {
      std::string marked;
      for (const char c : text) c == ' ' ? marked += stage.character : marked += c;
      const bool prepend =
          stage.prepend == PrependScheme::always || (stage.prepend == PrependScheme::first && first);
      if (prepend && !marked.starts_with(stage.character)) marked.insert(0, stage.character);
      text = stored(storage, std::move(marked));
      if (stage.individual)
        add(parts_of_matches(stage.pattern.find(text), text.size()));
      else
        out.push_back(text);
      break;
    }
  }
  return from_beginning;
}

std::vector<std::string_view> PreTokenizer::split(std::string_view text, bool first,
                                                  std::deque<std::string>& storage) const {
  std::vector<std::string_view> now{text}, next;
  for (const Stage& stage : stages_) {
    next.clear();
    bool from_beginning = false;
    for (std::size_t i = 0; i < now.size(); ++i) {
      const bool begins = apply(stage, &stage == &stages_.back(), now[i], first && i == 0, storage, next);
      if (i == 0) from_beginning = begins;
    }
    first = first && from_beginning;
    now.swap(next);
  }
  return now;
}

}  // namespace rz
