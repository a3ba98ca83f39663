#include "sharding/tokenizer/added_tokens.h"

#include <algorithm>
#include <limits>

#include "comm/core/text.h"
#include "sharding/tokenizer/elements.h"

namespace rz {
namespace {

bool is_in(char32_t code, std::uint8_t set) { return (character_sets()[code] & set) != 0; }

bool begins_with(std::string_view text, std::uint8_t set) {
  return !text.empty() && is_in(first_character(text.data()).code, set);
}
bool ends_with(std::string_view text, std::uint8_t set) {
  return !text.empty() && is_in(first_character(text.data() + last_character(text)).code, set);
}

}  // namespace

AddedTokens AddedTokens::read(const JsonObject& owner, const BytePairs& model, const Normalizer& normalizer) {
  AddedTokens all;
  if (!owner.has("added_tokens") || owner.at("added_tokens").is_null()) return all;
  auto next = static_cast<std::int64_t>(model.size());
  each_object(owner, "added_tokens", [&](const JsonObject& entry) {
    AddedToken token{.id = static_cast<std::int32_t>(
                         entry.required_integer("id", 0, std::numeric_limits<std::int32_t>::max() - 1)),
                     .content = required_text(entry, "content"),
                     .single_word = entry.boolean("single_word", false),
                     .lstrip = entry.boolean("lstrip", false),
                     .rstrip = entry.boolean("rstrip", false),
                     .normalized = entry.boolean("normalized", true),
                     .special = entry.boolean("special", false)};
    if (token.content.empty()) return;
    const AddedToken* const before = all.find(token.content);
    const auto of_model = model.id_of(token.content);
    const std::int64_t id = before ? before->id : of_model ? *of_model : next++;
    if (token.id != id)
      entry.fail_at("id", concat("is ", token.id, " of ", token.content, ", but tokenizers gives it ", id,
                                 "; list the added tokens in the order of their ids"));
    all.add(std::move(token), normalizer);
  });
  return all;
}

void AddedTokens::add(AddedToken token, const Normalizer& normalizer) {
  const AddedToken* const before = of_id(token.id);
  const bool moves = before && before->normalized != token.normalized;
  if (token.special) special_.insert(token.content);
  id_of_[token.content] = token.id;
  largest_id_ = std::max(largest_id_, token.id);
  const AddedToken& added = of_id_[token.id] = std::move(token);
  if (!moves) return insert(added, normalizer);
  raw_ = after_ = Trie();
  normalized_.clear();
  for (const auto& [id, each] : of_id_) insert(each, normalizer);
}

void AddedTokens::insert(const AddedToken& token, const Normalizer& normalizer) {
  std::string text = token.normalized ? normalizer.normalized(token.content) : token.content;
  if (!text.empty()) {
    std::int32_t& id = (token.normalized ? after_ : raw_).id_of(text);
    if (id < 0) id = token.id;
  }
  if (token.normalized && text != token.content) normalized_[token.id] = std::move(text);
}

const AddedToken* AddedTokens::find(std::string_view content) const {
  const auto found = id_of_.find(std::string(content));
  return found == id_of_.end() ? nullptr : of_id(found->second);
}

const AddedToken* AddedTokens::of_id(std::int32_t id) const {
  const auto found = of_id_.find(id);
  return found == of_id_.end() ? nullptr : &found->second;
}

const std::string* AddedTokens::text_of(std::int32_t id) const {
  if (const auto found = normalized_.find(id); found != normalized_.end()) return &found->second;
  const AddedToken* const token = of_id(id);
  return token ? &token->content : nullptr;
}

std::int32_t& AddedTokens::Trie::id_of(std::string_view text) {
  begins[static_cast<unsigned char>(text[0])] = true;
  std::size_t node = 0;
  for (const char c : text) {
    const auto [found, is_new] = nodes[node].next.emplace(static_cast<unsigned char>(c), nodes.size());
    node = found->second;
    if (is_new) nodes.emplace_back();
  }
  return nodes[node].id;
}

std::size_t AddedTokens::Trie::match(std::string_view text, std::int32_t& id) const {
  std::size_t node = 0, longest = 0;
  for (std::size_t at = 0; at < text.size(); ++at) {
    const auto found = nodes[node].next.find(static_cast<unsigned char>(text[at]));
    if (found == nodes[node].next.end()) break;
    node = found->second;
    if (nodes[node].id >= 0) longest = at + 1, id = nodes[node].id;
  }
  return longest;
}

std::vector<AddedTokens::Piece> AddedTokens::split(std::string_view text, bool normalized) const {
  const Trie& trie = normalized ? after_ : raw_;
  std::vector<Piece> pieces;
  std::size_t last = 0;
  for (std::size_t at = 0; at < text.size();) {
    std::int32_t id = -1;
    const std::size_t length =
        trie.begins[static_cast<unsigned char>(text[at])] ? trie.match(text.substr(at), id) : 0;
    if (length == 0) {
      ++at;
      continue;
    }
    std::size_t begin = at, end = at + length;
    at = end;
    const AddedToken& token = of_id_.at(id);
    if (token.single_word && (ends_with(text.substr(0, begin), CharacterSet::word) ||
                              begins_with(text.substr(end), CharacterSet::word)))
      continue;
    while (token.lstrip && begin > last && ends_with(text.substr(last, begin - last), CharacterSet::space))
      begin = last + last_character(text.substr(last, begin - last));
    while (token.rstrip && begins_with(text.substr(end), CharacterSet::space))
      end += first_character(text.data() + end).length;
    if (last < begin) pieces.push_back({last, begin, -1});
    pieces.push_back({begin, end, id});
    last = end;
  }
  if (last < text.size()) pieces.push_back({last, text.size(), -1});
  return pieces;
}

}  // namespace rz
