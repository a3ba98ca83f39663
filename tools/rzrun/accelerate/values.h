#pragma once
/// What a file of Accelerate and its flags give, each with its place.

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tools/rzrun/accelerate/keys.h"
#include "tools/rzrun/accelerate/yaml.h"

namespace rz::accelerate {

struct Value {
  const Key* key = nullptr;
  YamlNode node;
  std::string where;  ///< "X.yaml:3: num_processes", "--num_processes"
  bool of_flag = false;
};

/// Typed access to values; errors are Errc::config, and name the place.
class Values {
 public:
  /// Reads a file. Unknown keys are errors with the nearest known one, keys that are refused with the remedy.
  /// Keys of an empty block that stand where the file's own are, as after a copy from a page that lost its
  /// indentation, count as the block's, which is a note.
  void read_file(const YamlNode& root, const std::string& file);
  /// A flag takes the place of the file's value.
  void set_flag(const Key& key, const std::string& text);

  const Value* find(std::string_view name) const;
  bool has(std::string_view name) const { return find(name) != nullptr; }
  const Value* first_of_block(std::string_view block) const;
  void erase(std::string_view name);

  /// The place of a value; of one that is missing its name.
  std::string where(std::string_view name) const { return has(name) ? find(name)->where : std::string(name); }
  std::optional<std::string> text(std::string_view name) const;
  std::optional<long> integer(std::string_view name, long min, long max) const;
  std::optional<double> number(std::string_view name) const;  ///< finite, and not negative
  bool boolean(std::string_view name) const;                  ///< false if it is missing
  /// One of the words, in any case, as the list has it; or nothing.
  std::optional<std::string> word(std::string_view name, const std::vector<std::string>& words) const;

  const std::vector<std::string>& notes() const { return notes_; }

 private:
  void add(std::string_view block, const std::string& name, const YamlNode&, const std::string& file);
  void put(Value);

  std::vector<Value> values_;
  std::vector<std::string> notes_;
};

/// "true", "Yes", "on": nothing if it is no truth value.
std::optional<bool> truth_of(std::string_view word);

}  // namespace rz::accelerate
