#include "tools/rzrun/accelerate/values.h"

#include <algorithm>
#include <cmath>

#include "comm/core/error.h"
#include "comm/core/text.h"
#include "tools/rzrun/hosts/hosts.h"

namespace rz::accelerate {
namespace {

using Kind = YamlNode::Kind;

std::string lowered(std::string_view text) {
  std::string lower(text);
  for (char& c : lower)
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c + 32);
  return lower;
}

/// Whether the value of a key that is refused switches nothing on.
bool is_off(const YamlNode& n) {
  if (n.kind == Kind::null) return true;
  if (n.kind == Kind::mapping) return n.entries.empty();
  if (n.kind == Kind::list) return std::ranges::all_of(n.items, is_off);
  return n.text.empty() || lowered(n.text) == "none" || truth_of(n.text) == false;
}

bool is_block(std::string_view name) { return std::ranges::count(blocks(), name) > 0; }

[[noreturn]] void refuse_unknown(const std::string& place, std::string_view block, const std::string& name) {
  const Key* const other = find_key(name);
  if (other && other->block != "flag")
    fail(Errc::config, place, hosts::quoted(name), " is a key of ",
         other->block.empty() ? "the file itself" : other->block, "; move it there",
         other->block.empty() ? "" : ", indented");
  std::vector<std::string_view> names;
  for (const Key& k : keys())
    if (k.block == block) names.push_back(k.name);
  if (block.empty()) names.insert(names.end(), blocks().begin(), blocks().end());
  const std::string nearest = nearest_name(name, names);
  fail(Errc::config, place, "unknown key ", hosts::quoted(name), block.empty() ? "" : concat(" of ", block),
       nearest.empty() ? "; remove it" : concat("; nearest: ", nearest));
}

}  // namespace

std::optional<bool> truth_of(std::string_view word) {
  const std::string lower = lowered(word);
  for (const char* yes : {"true", "yes", "on", "1"})
    if (lower == yes) return true;
  for (const char* no : {"false", "no", "off", "0"})
    if (lower == no) return false;
  return {};
}

void Values::read_file(const YamlNode& root, const std::string& file) {
  require(root.kind == Kind::mapping, Errc::config, file, ":", root.line,
          ": it must have lines KEY: VALUE, as `accelerate config` writes them");
  std::vector<std::string_view> empty;
  std::string note, block;
  int moved = 0;
  for (const auto& [name, node] : root.entries) {
    const std::string place = concat(file, ":", node.line, ": ");
    if (is_block(name)) {
      require(node.kind == Kind::mapping || node.kind == Kind::null, Errc::config, place, name,
              ": a block of lines KEY: VALUE is needed, indented");
      if (node.kind == Kind::null) empty.push_back(*std::ranges::find(blocks(), name));
      for (const auto& [inner, value] : node.entries) add(name, inner, value, file);
      continue;
    }
    const Key* const key = find_key(name);
    const bool lost = key && std::ranges::count(empty, key->block) > 0;
    if (lost && moved++ == 0) note = concat(place, name), block = key->block;
    add(lost ? key->block : "", name, node, file);
  }
  if (moved > 0)
    notes_.push_back(concat(note, moved > 1 ? concat(" and ", moved - 1, " more") : "", ": read as of ",
                            block, ", which is empty; indent what belongs to it"));
}

void Values::add(std::string_view block, const std::string& name, const YamlNode& node,
                 const std::string& file) {
  const std::string place = concat(file, ":", node.line, ": ");
  const std::string_view prefix = prefix_of(block);
  const std::string whole = name.starts_with(prefix) ? name : concat(prefix, name);
  const Key* const key = find_key(whole);
  const bool anywhere = whole == "gradient_accumulation_steps" || whole == "gradient_clipping" ||
                        whole == "dynamo_backend" || whole == "use_xpu";
  if (!key || (key->block != block && !anywhere)) refuse_unknown(place, block, name);
  require(key->treatment != Treatment::refused || is_off(node), Errc::config, place, name, ": ", key->reason);
  if (node.kind == Kind::null || key->treatment != Treatment::done) return;
  require(!has(whole), Errc::config, place, name, " is there twice; remove one");
  put({key, node, place + name});
}

void Values::set_flag(const Key& key, const std::string& text) {
  require(key.treatment != Treatment::refused || truth_of(text) == false, Errc::config, "--", key.name, ": ",
          key.reason);
  if (key.treatment != Treatment::done) return;
  YamlNode node;
  node.kind = Kind::scalar;
  node.text = text;
  put({&key, node, concat("--", key.name), true});
}

void Values::put(Value value) {
  erase(value.key->name);
  values_.push_back(std::move(value));
}

const Value* Values::find(std::string_view name) const {
  const auto found = std::ranges::find(values_, name, [](const Value& v) { return v.key->name; });
  return found == values_.end() ? nullptr : &*found;
}

const Value* Values::first_of_block(std::string_view block) const {
  for (const Value& v : values_)
    if (v.key->block == block && v.key->name != "gradient_accumulation_steps" &&
        v.key->name != "gradient_clipping")
      return &v;
  return nullptr;
}

void Values::erase(std::string_view name) {
  std::erase_if(values_, [&](const Value& v) { return v.key->name == name; });
}

std::optional<std::string> Values::text(std::string_view name) const {
  const Value* const v = find(name);
  if (!v) return {};
  require(v->node.kind == Kind::scalar, Errc::config, v->where,
          ": one value is needed, not a block or a list");
  return v->node.text;
}

std::optional<long> Values::integer(std::string_view name, long min, long max) const {
  const auto found = text(name);
  if (!found) return {};
  const auto n = parse_number<long>(*found);
  require(n && *n >= min && *n <= max, Errc::config, where(name), " ", hosts::quoted(*found),
          ": a whole number from ", min, " to ", max, " is needed");
  return *n;
}

std::optional<double> Values::number(std::string_view name) const {
  const auto found = text(name);
  if (!found) return {};
  const auto n = parse_number<double>(*found);
  require(n && std::isfinite(*n) && *n >= 0, Errc::config, where(name), " ", hosts::quoted(*found),
          ": a number from 0 is needed");
  return *n;
}

bool Values::boolean(std::string_view name) const {
  const auto found = text(name);
  if (!found) return false;
  const auto truth = truth_of(*found);
  require(truth.has_value(), Errc::config, where(name), " ", hosts::quoted(*found),
          ": true or false is needed");
  return *truth;
}

std::optional<std::string> Values::word(std::string_view name, const std::vector<std::string>& words) const {
  const auto found = text(name);
  if (!found) return {};
  std::string all;
  for (const std::string& w : words) {
    if (lowered(w) == lowered(*found)) return w;
    all += concat(all.empty() ? "" : ", ", w);
  }
  fail(Errc::config, where(name), " ", hosts::quoted(*found), ": there are ", all);
}

}  // namespace rz::accelerate
