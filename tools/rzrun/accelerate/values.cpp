#include "tools/rzrun/accelerate/values.h"

#include <algorithm>
#include <utility>

#include "comm/core/error.h"
#include "sharding/io/text.h"
#include "tools/rzrun/hosts/hosts.h"

namespace rz::accelerate {
namespace {

nlohmann::json json_of(const YamlNode& n) {
  using enum YamlNode::Kind;
  if (n.kind == null) return nullptr;
  if (n.kind == scalar) return n.text;
  nlohmann::json all = n.kind == list ? nlohmann::json::array() : nlohmann::json::object();
  for (const YamlNode& item : n.items) all.push_back(json_of(item));
  for (const auto& [name, value] : n.entries) all[name] = json_of(value);
  return all;
}

/// Whether the value of a key that is refused switches nothing on, also as a text.
bool is_unset(const nlohmann::json& value) {
  if (value.is_array()) return std::ranges::all_of(value, is_unset);
  if (!value.is_string()) return is_off(value);
  const auto word = value.get<std::string>();
  return word.empty() || lower_case(word) == "none" || truth_of(word) == false;
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
  fail(Errc::config, place, block, block.empty() ? "" : ".", escaped(name), ": ", unknown_key(name, names));
}

}  // namespace

void Values::read_file(const YamlNode& root, const std::string& file) {
  require(root.kind == YamlNode::Kind::mapping, Errc::config, file, ":", root.line,
          ": it must have lines KEY: VALUE, as `accelerate config` writes them");
  std::vector<std::string_view> empty;
  std::string note, block;
  int moved = 0;
  for (const auto& [name, node] : root.entries) {
    const std::string place = concat(file, ":", node.line, ": ");
    if (is_block(name)) {
      require(node.kind == YamlNode::Kind::mapping || node.kind == YamlNode::Kind::null, Errc::config, place,
              name, ": a block of lines KEY: VALUE is needed, indented");
      if (node.kind == YamlNode::Kind::null) empty.push_back(*std::ranges::find(blocks(), name));
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
  nlohmann::json value = json_of(node);
  require(key->treatment != Treatment::refused || is_unset(value), Errc::config, place, name, ": ",
          key->note);
  if (value.is_null() || key->treatment != Treatment::applied) return;
  require(!has(whole), Errc::config, place, name, " is there twice; remove one");
  put({key, std::move(value), place + name});
}

void Values::set_flag(const Key& key, const std::string& text) {
  require(key.treatment != Treatment::refused || truth_of(text) == false, Errc::config, "--", key.name, ": ",
          key.note);
  if (key.treatment == Treatment::applied) put({&key, text, concat("--", key.name), true});
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
  require(v->value.is_string(), Errc::config, v->where, ": one value is needed, not a block or a list");
  return v->value.get<std::string>();
}

std::optional<long> Values::integer(std::string_view name, long min, long max) const {
  return read<long>(
      name, {.kind = ValueKind::integer, .min = static_cast<double>(min), .max = static_cast<double>(max)});
}

}  // namespace rz::accelerate
