#pragma once
/// Every key that Accelerate writes into its file, and every flag of `accelerate launch`, with what rzrun
/// does with it.

#include <span>
#include <string_view>

#include "sharding/io/foreign_keys.h"

namespace rz::accelerate {

enum class FlagKind { none, value, toggle };

struct Key {
  std::string_view block;  ///< "deepspeed_config"; "": of the file itself; "flag": a flag alone
  std::string_view name;
  Treatment treatment;    ///< applied: flags/accelerate_flags.cpp or configuration.cpp reads it
  FlagKind flag;          ///< of `accelerate launch`, "--" and the name
  std::string_view note;  ///< the reason of another treatment, with the remedy of a refusal
  std::string_view help;  ///< of the flag; empty: --help does not show it
};

std::span<const Key> keys();
/// The row of a name, or nullptr; names are unique.
const Key* find_key(std::string_view name);
/// Names of the blocks.
std::span<const std::string_view> blocks();
/// The name in the table of a key in this block: "backend" in "fp8_config" is "fp8_backend".
std::string_view prefix_of(std::string_view block);

}  // namespace rz::accelerate
