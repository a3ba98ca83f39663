#pragma once
/// The flags of a run of a language model that its programs share.

#include <span>
#include <string>

#include "sharding/config/arguments.h"
#include "sharding/lm/options.h"
#include "tools/command_line/command_line.h"

namespace rz::lm {

/// Adds the flags that decide on memory and traffic: model, configuration, and what changes them. `decay` is
/// set to the word of --decay, "matrices" without it.
void add_run_flags(CommandLine&, Options&, std::string& decay);
/// The heading of flags that leave results as they are.
inline constexpr const char* speed_group = "Speed (results stay the same except with --threads)";
/// Parses the flags of `line`, and those of parse_arguments() of these groups, in any of their spellings;
/// returns the text of --help, or "".
std::string parse_words(CommandLine& line, Options&, std::span<const ArgumentGroup> groups, int argc,
                        const char* const* argv);
/// Sets the options that the words stand for, after parsing.
void read_words(Options&, const std::string& decay);

}  // namespace rz::lm
