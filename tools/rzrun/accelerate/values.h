#pragma once
/// What a file of Accelerate and its flags give, each with its place.

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tools/rzrun/accelerate/keys.h"
#include "tools/rzrun/accelerate/yaml.h"

namespace rz::accelerate {

struct Value {
  const Key* key = nullptr;
  nlohmann::json value;  ///< a text, or a list or a block of texts
  std::string where;     ///< "X.yaml:3: num_processes", "--num_processes"
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
  std::optional<double> number(std::string_view name) const {  ///< finite, and not negative
    return read<double>(name, {.kind = ValueKind::number});
  }
  bool boolean(std::string_view name) const {  ///< false if it is missing
    return read<bool>(name, {.kind = ValueKind::boolean}).value_or(false);
  }
  /// One of the words, in any case, as the list has it; or nothing.
  std::optional<std::string> word(std::string_view name, const std::vector<std::string>& words) const {
    return read<std::string>(name,
                             {.kind = ValueKind::choice, .values = nlohmann::json(words).dump().c_str()});
  }

  const std::vector<std::string>& notes() const { return notes_; }

 private:
  void add(std::string_view block, const std::string& name, const YamlNode&, const std::string& file);
  void put(Value);
  template <class T>
  std::optional<T> read(std::string_view name, const ValueForm& form) const {
    const Value* const v = find(name);
    return v ? std::optional(checked_value(v->value, form, "", v->where).get<T>()) : std::nullopt;
  }

  std::vector<Value> values_;
  std::vector<std::string> notes_;
};

}  // namespace rz::accelerate
