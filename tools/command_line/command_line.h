#pragma once
/// What the programs share of reading their command lines with CLI11.

#include <functional>
#include <string>

namespace CLI {
class App;
}

namespace rz {

/// What a command line says: options, or the help if that was asked for, which is then all that is wanted.
template <class Options>
struct Parsed {
  Options options;
  std::string help;
};

/// Fills what the app's options are bound to and returns "", or returns the help if that was asked for.
/// Errc::config says in one line what is wrong, for an unknown flag with the nearest one that there is. Words
/// that are no flags are refused too, unless the app is a prefix command: then they are its remaining().
std::string parse_command_line(CLI::App& app, int argc, const char* const* argv);

/// What main() returns: what `body` does; after an Error, which becomes one line on standard error, 2 if it
/// was the user's (Errc::config), else 1.
int run_program(const char* name, const std::function<int()>& body);

/// On standard output; main()'s result.
int print_help(const std::string& help);

/// What main() returns: what `run` does with the options that `parse` gives as Parsed.
template <class Parse, class Run>
int run_program(const char* name, const Parse& parse, const Run& run) {
  return run_program(name, [&] {
    const auto parsed = parse();
    return parsed.help.empty() ? run(parsed.options) : print_help(parsed.help);
  });
}

}  // namespace rz
