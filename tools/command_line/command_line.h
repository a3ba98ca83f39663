#pragma once
/// Command line parsing shared by the programs.

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

/// Result of parsing: the options, or the help text if help was requested; a program then only prints it.
template <class Options>
struct Parsed {
  Options options;
  std::string help;
};

/// The flags of a program. Each flag is bound to a variable that must outlive this object. Only
/// command_line.cpp includes CLI11, which takes longer to compile than most programs.
class CommandLine {
 public:
  CommandLine(const std::string& description, const std::string& program, const std::string& footer);
  ~CommandLine();

  /// A flag, with functions that set its constraints and its help.
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
    /// A list has one value behind each appearance of the flag.
    Flag one_value_each();
    /// An empty text is as good as none. Elsewhere it is refused.
    Flag may_be_empty();

   private:
    friend CommandLine;
    explicit Flag(CLI::Option* option) : option_(option) {}
    CLI::Option* option_;
  };

  /// Adds an option with a value; `names` as in "-n,--ranks".
  Flag add_option(const std::string& names, int& value, const std::string& what);
  Flag add_option(const std::string& names, std::int64_t& value, const std::string& what);
  Flag add_option(const std::string& names, std::uint64_t& value, const std::string& what);
  Flag add_option(const std::string& names, double& value, const std::string& what);
  Flag add_option(const std::string& names, bool& value, const std::string& what);
  Flag add_option(const std::string& names, std::string& value, const std::string& what);
  Flag add_option(const std::string& names, std::vector<std::string>& values, const std::string& what);
  Flag add_option(const std::string& names, std::optional<std::int64_t>& value, const std::string& what);
  Flag add_option(const std::string& names, std::optional<double>& value, const std::string& what);
  Flag add_option(const std::string& names, std::optional<std::string>& value, const std::string& what);
  /// Adds a flag without a value. If present, it sets its variable to true, or to false if the name starts
  /// with '!'.
  Flag add_flag(const std::string& name, bool& value, const std::string& what);

  /// The first word that is not a flag, and all words after it, form a command: remaining().
  void allow_trailing_command();
  void column_width(std::size_t);

  /// Flags that are parsed elsewhere, as near names of unknown ones.
  void add_known_names(std::vector<std::string> names) { known_names_ = std::move(names); }
  /// How many values the flag has, e.g. "--seed"; nothing if there is no such flag.
  std::optional<int> values_of(const std::string& flag) const;

  /// Parses the words into the bound variables and returns "", or returns the text of --help or
  /// --version. --local_rank=R, which DeepSpeed's launcher adds, must be LOCAL_RANK, and is left out, unless
  /// the program has such a flag. Errors are Errc::config in one line. For an unknown flag it names the
  /// nearest known one, for a flag of another launcher the replacement (launcher_flags.h). Words that are not
  /// flags are errors too, unless they form a command.
  std::string parse(int argc, const char* const* argv);

  bool is_set(const std::string& name) const;
  std::vector<std::string> remaining() const;

 private:
  std::unique_ptr<CLI::App> app_;
  std::vector<std::string> known_names_;
};

/// Splits "a,b,c"; an empty text yields one empty word.
std::vector<std::string> split_at_commas(const std::string& words);

/// Runs `body` and returns the exit status for main(). An exception is printed as one line on standard error;
/// the status is then 2 for an error of the user (Errc::config), otherwise 1, as for results that standard
/// output does not take. It is also written to the error file of the rank (comm/os/error_file.h), and a crash
/// under rzrun records its stack (comm/os/flight_recorder.h).
int run_program(const char* name, const std::function<int()>& body);

/// Opens those of the standard descriptors that are closed, such that their use fails as before, and no file
/// or socket of the program receives what it prints. run_program() calls it.
void reserve_standard_descriptors();

/// Prints to standard output; returns the exit status for main().
int print_help(const std::string& help);

/// Runs `run` with the options of the Parsed that `parse` returns; returns the exit status for main().
template <class Parse, class Run>
int run_program(const char* name, const Parse& parse, const Run& run) {
  return run_program(name, [&] {
    const auto parsed = parse();
    return parsed.help.empty() ? run(parsed.options) : print_help(parsed.help);
  });
}

}  // namespace rz
