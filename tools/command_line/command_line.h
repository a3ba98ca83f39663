#pragma once
/// What the programs share of reading their command lines.

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace rz {

/// What a command line says: options, or the help if that was asked for, which is then all that is wanted.
template <class Options>
struct Parsed {
  Options options;
  std::string help;
};

/// The flags of a program, each bound to a variable that outlives this. Only its own file includes CLI11,
/// which takes longer to compile than most programs.
class CommandLine {
 public:
  CommandLine(const std::string& description, const std::string& program, const std::string& footer);
  ~CommandLine();

  /// What may be said of a flag besides.
  class Flag {
   public:
    Flag within(int min, int max) { return within(std::int64_t{min}, std::int64_t{max}); }
    Flag within(std::int64_t min, std::int64_t max);
    Flag within(double min, double max);
    Flag one_of(std::vector<std::string> words);
    Flag delimiter(char between);
    Flag type_name(const std::string& name);
    Flag group(const std::string& heading);
    Flag required();
    Flag excludes(Flag other);

   private:
    friend CommandLine;
    explicit Flag(CLI::Option* option) : option_(option) {}
    CLI::Option* option_;
  };

  /// `names` as in "-n,--ranks".
  Flag add_option(const std::string& names, int& value, const std::string& what);
  Flag add_option(const std::string& names, std::int64_t& value, const std::string& what);
  Flag add_option(const std::string& names, std::uint64_t& value, const std::string& what);
  Flag add_option(const std::string& names, double& value, const std::string& what);
  Flag add_option(const std::string& names, bool& value, const std::string& what);
  Flag add_option(const std::string& names, std::string& value, const std::string& what);
  Flag add_option(const std::string& names, std::vector<std::string>& values, const std::string& what);
  Flag add_option(const std::string& names, std::optional<std::int64_t>& value, const std::string& what);
  Flag add_option(const std::string& names, std::optional<std::string>& value, const std::string& what);
  /// Given, it makes its variable true, or false if the name starts with '!'.
  Flag add_flag(const std::string& name, bool& value, const std::string& what);

  /// Words from the first that is no flag on are a command: remaining().
  void allow_trailing_command();
  void column_width(std::size_t);

  /// Fills what flags are bound to and returns "", or returns the help if that was asked for. Errc::config
  /// says in one line what is wrong, for an unknown flag with the nearest one that there is, for a flag of
  /// another launcher with what to use instead (launcher_flags.h). Words that are no flags are refused too,
  /// unless they are a command.
  std::string parse(int argc, const char* const* argv);

  bool is_set(const std::string& name) const;
  std::vector<std::string> remaining() const;

 private:
  std::unique_ptr<CLI::App> app_;
};

/// "a,b,c"; of nothing, one empty word.
std::vector<std::string> split_at_commas(const std::string& words);

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
