// The tables of keys, each key by itself.

#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>

#include "comm/core/error.h"
#include "sharding/config/arguments.h"
#include "sharding/config/ds_config.h"
#include "sharding/config/keys.h"
#include "sharding/io/json.h"
#include "tests/support/error_of.h"

namespace rz::ds {
namespace {

using nlohmann::json;

/// The smallest configuration with an object in which all required keys have a value.
json around(const ObjectSpec& object, json keys) {
  const std::string path = object.path;
  for (const KeySpec& k : object.keys)
    if (k.is_required() && !keys.contains(k.key))
      keys[k.key] = k.kind == Kind::text       ? json("AdamW")
                    : k.kind == Kind::integers ? json::array({1, 2})
                    : k.kind == Kind::any      ? json("all-linear")
                                               : json(100000);
  if (std::string_view(object.variant) == "OneCycleLR")  // one of total_steps, and the others, is required
    for (const char* key : {"total_steps", "epochs", "steps_per_epoch"})
      if (!keys.contains(key)) keys[key] = 10;
  if (path == "scheduler" && keys["type"] == "AdamW") keys["type"] = "WarmupLR";
  if (path.ends_with(".params")) keys = {{"type", object.variant}, {"params", keys}};
  json document = json::object();
  const std::string section = path.ends_with(".params") ? path.substr(0, path.size() - 7) : path;
  if (section.empty()) return keys;
  const auto dot = section.find('.');
  if (dot == section.npos) return {{section, keys}};
  const std::string outer = section.substr(0, dot), inner = section.substr(dot + 1);
  const json needed = outer == "zero_optimization"   ? json{{"stage", 3}}
                      : inner == "comm_state_option" ? json{{"comm_hook", "power_sgd"}}
                                                     : json::object();
  json all{{outer, needed}};
  all[outer][inner] = keys;
  return all;
}

std::string text_of(const ObjectSpec& o, const KeySpec& k) {
  return concat(o.path, " ", o.variant, " ", k.key);
}

DsConfig parse(const ObjectSpec& object, const KeySpec& key, const json& value) {
  return parse_ds_config(around(object, {{key.key, value}}).dump(), "ds.json");
}

TEST(DsConfigKeys, AreUniqueInTheirObject) {
  std::set<std::string> seen;
  for (const ObjectSpec& o : objects())
    for (const KeySpec& k : o.keys) EXPECT_TRUE(seen.insert(text_of(o, k)).second) << text_of(o, k);
  EXPECT_GT(seen.size(), 300u);
}

TEST(DsConfigKeys, EverySectionHasATable) {
  for (const ObjectSpec& o : objects())
    for (const KeySpec& k : o.keys) {
      if (k.kind != Kind::object || std::string_view(k.key) == "params") continue;
      EXPECT_NE(find_object(concat(o.path, *o.path ? "." : "", k.key)), nullptr) << text_of(o, k);
    }
}

/// "stage" of "… [with auto Member = &rz::DsConfig::stage]".
std::string member_of(const KeySpec& k) {
  std::string_view name = k.field.name;
  const auto is_name = [](unsigned char c) { return std::isalnum(c) != 0 || c == '_'; };
  while (!is_name(static_cast<unsigned char>(name.back()))) name.remove_suffix(1);
  std::size_t begin = name.size();
  while (is_name(static_cast<unsigned char>(name[begin - 1]))) --begin;
  return std::string(name.substr(begin));
}

/// All sources. A row of a table has no '.' before a member.
std::string readers() {
  std::string all;
  for (const char* top : {"sharding", "tools"})
    for (const auto& entry :
         std::filesystem::recursive_directory_iterator(std::filesystem::path(RZ_SOURCE_DIR) / top)) {
      const std::string path = entry.path().string();
      if (path.ends_with(".cpp") || path.ends_with(".h")) all += read_text_file(path);
    }
  return all;
}

/// Whether something reads `.member` or `->member`; an assignment does not.
bool is_read(const std::string& member, const std::string& sources) {
  for (std::size_t at = sources.find(member); at != std::string::npos; at = sources.find(member, at + 1)) {
    if (at < 2 || (sources[at - 1] != '.' && sources.substr(at - 2, 2) != "->")) continue;
    const std::size_t after = at + member.size();
    if (std::isalnum(static_cast<unsigned char>(sources[after])) != 0 || sources[after] == '_') continue;
    const std::size_t next = sources.find_first_not_of(" \n", after);
    if (sources[next] != '=' || sources[next + 1] == '=') return true;
  }
  return false;
}

TEST(DsConfigKeys, AreAppliedIfAndOnlyIfSomethingReadsTheirField) {
  const std::string sources = readers();
  ASSERT_TRUE(is_read("max_live_parameters", sources));
  ASSERT_FALSE(is_read("auto_cast", sources));
  int applied = 0;
  for (const ObjectSpec& o : objects())
    for (const KeySpec& k : o.keys) {
      EXPECT_EQ(k.treatment == Treatment::applied, k.field.set != nullptr) << text_of(o, k);
      if (k.field.set == nullptr) continue;
      EXPECT_TRUE(is_read(member_of(k), sources)) << text_of(o, k) << " sets " << k.field.name;
      ++applied;
    }
  EXPECT_GT(applied, 150);
}

/// One that two keys of an object set has the value of the last, whatever the other says.
TEST(DsConfigKeys, HaveAFieldEach) {
  for (const ObjectSpec& o : objects()) {
    std::set<std::string> seen;
    for (const KeySpec& k : o.keys)
      if (k.field.set != nullptr) EXPECT_TRUE(seen.insert(k.field.name).second) << text_of(o, k);
  }
}

TEST(DsConfigKeys, TheirArgumentsExist) {
  std::set<std::string> used;
  for (const ObjectSpec& o : objects())
    for (const KeySpec& k : o.keys)
      if (k.argument) used.emplace(argument_spec(k.argument).name);
  for (const ArgumentSpec& a : argument_specs())
    if (a.group == ArgumentGroup::derived) EXPECT_TRUE(used.contains(std::string(a.name))) << a.name;
}

TEST(DsConfigKeys, EveryDefaultIsAcceptedWithoutAWarning) {
  for (const ObjectSpec& o : objects())
    for (const KeySpec& k : o.keys) {
      if (k.is_required() || k.kind == Kind::object) continue;
      EXPECT_TRUE(parse(o, k, k.initial()).warnings.empty()) << text_of(o, k);
    }
}

TEST(DsConfigKeys, ARefusedKeyIsRefusedButForHarmlessValues) {
  for (const ObjectSpec& o : objects())
    for (const KeySpec& k : o.keys) {
      if (k.treatment != Treatment::refused) continue;
      for (const json& harmless : json::parse(k.values)) parse(o, k, harmless);
      const Error e = test::error_of([&] { parse(o, k, "something else"); });
      EXPECT_EQ(e.code(), Errc::unsupported) << text_of(o, k);
      EXPECT_NE(std::string(e.what()).find(k.key), std::string::npos) << e.what();
      EXPECT_NE(std::string(e.what()).find(k.note), std::string::npos) << e.what();
      EXPECT_NE(std::string_view(k.note), "") << text_of(o, k) << " has no reason";
    }
}

TEST(DsConfigKeys, AKeyThatIsNotAppliedHasAReasonAndAWarning) {
  for (const ObjectSpec& o : objects())
    for (const KeySpec& k : o.keys) {
      if (k.treatment != Treatment::unused && k.treatment != Treatment::always) continue;
      EXPECT_NE(std::string_view(k.note), "") << text_of(o, k);
      json keys{{k.key, k.kind == Kind::boolean ? json(!k.initial().get<bool>()) : json(7)}};
      if (std::string_view(o.path) == "zero_optimization") keys["stage"] = 3;
      const DsConfig c = parse_ds_config(around(o, keys).dump(), "ds.json");
      ASSERT_EQ(c.warnings.size(), 1u) << text_of(o, k);
      EXPECT_NE(c.warnings[0].find(k.key), std::string::npos) << c.warnings[0];
    }
}

TEST(DsConfigKeys, UnknownKeysAreRefusedInEveryObject) {
  for (const ObjectSpec& o : objects()) {
    const json document = around(o, {{"no_such_key_anywhere", 1}});
    const Error e = test::error_of([&] { parse_ds_config(document.dump(), "ds.json"); });
    EXPECT_EQ(e.code(), Errc::config);
    EXPECT_EQ(std::string(e.what()), concat("ds.json: ", o.path, *o.path ? "." : "",
                                            "no_such_key_anywhere: unknown key; remove it"));
  }
}

}  // namespace
}  // namespace rz::ds
