#include "tools/command_line/command_line.h"

#include <fcntl.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdio>

#include "comm/core/environment.h"
#include "comm/core/error.h"
#include "comm/core/text.h"
#include "comm/os/error_file.h"
#include "comm/os/flight_recorder.h"
#include "tools/command_line/launcher_flags.h"

namespace rz {

namespace {

/// The word up to '=', without the value; or up to ':', as in DeepSpeed's "--localhost:0,2".
std::string flag_of(const std::string& word) { return word.substr(0, word.find_first_of("=:")); }

/// The advice with the slots of "--localhost:0,2" in place of SLOT,SLOT.
std::string with_slots(std::string_view advice, const std::string& word) {
  std::string text(advice);
  const auto colon = word.find(':');
  const std::string slots = colon == std::string::npos ? "" : word.substr(colon + 1);
  const std::string_view place = "localhost:SLOT,SLOT";
  const auto at = text.find(place);
  if (word.starts_with("--localhost:") && at != std::string::npos && !slots.empty() &&
      slots.find_first_not_of("0123456789,") == std::string::npos)
    text.replace(at, place.size(), concat("localhost:", slots));
  return text;
}

/// Throws for the first flag that belongs to another launcher and not to `app`. CLI11 cannot do this: it
/// parses "-np" as "-n" with the value "p", and "-host" as a request for help.
void refuse_launcher_flags(const CLI::App& app, std::span<const char* const> words) {
  const bool starts_a_program = app.get_prefix_command();
  for (std::size_t i = 0; i < words.size(); ++i) {
    const std::string word = words[i], flag = flag_of(word);
    if (word == "--" || (starts_a_program && !word.starts_with("-"))) return;
    if (const auto* own = app.get_option_no_throw(flag)) {
      if (flag == word && own->get_items_expected_min() > 0) ++i;  // the next word is its value
      continue;
    }
    if (const LauncherFlag* other = find_launcher_flag(flag))
      fail(Errc::config, flag, " is a flag of ", other->launcher, "; ",
           with_slots(starts_a_program ? other->in_rzrun : other->in_programs, word));
  }
}

/// -1: not started by a launcher, as in PyTorch.
void check_local_rank(const std::string& flag, const std::string& text) {
  const auto rank = parse_number<int>(text);
  require(rank.has_value(), Errc::config, flag, "=", text, ": expected an integer");
  const std::string found = environment_variable("LOCAL_RANK").value_or("0");
  require(*rank == -1 || concat(*rank) == found, Errc::config, flag, "=", text, ": the local rank is ", found,
          " by LOCAL_RANK of the environment; leave the flag out, or start the ranks with rzrun or torchrun");
}

/// The words for CLI11: without --local_rank=R or --local_rank R; and "--flag=" as two words, since CLI11
/// takes the word behind it for its value, which is empty.
std::vector<std::string> words_to_parse(const CLI::App& app, std::span<const char* const> words) {
  std::vector<std::string> kept;
  for (std::size_t i = 0; i < words.size(); ++i) {
    const std::string word = words[i], flag = word.substr(0, word.find('='));
    if (word == "--" || (app.get_prefix_command() && i > 0 && !word.starts_with("-"))) {
      kept.insert(kept.end(), words.begin() + static_cast<std::ptrdiff_t>(i), words.end());
      break;
    }
    const auto* own = app.get_option_no_throw(flag);
    if (!own && (flag == "--local_rank" || flag == "--local-rank")) {
      require(flag != word || i + 1 < words.size(), Errc::config, flag, ": a value is missing");
      check_local_rank(flag, flag != word ? word.substr(flag.size() + 1) : words[++i]);
      continue;
    }
    if (own && word == flag + "=") {
      require(own->get_items_expected_min() > 0, Errc::config, word, ": the flag has no value");
      kept.insert(kept.end(), {flag, ""});
      continue;
    }
    kept.push_back(words[i]);
    if (own && flag == word && own->get_items_expected_min() > 0 && i + 1 < words.size())
      kept.push_back(words[++i]);
  }
  return kept;
}

bool is_flag(const std::string& word) {
  return word.starts_with("-") && !(word.size() > 1 && word[1] >= '0' && word[1] <= '9');
}

std::string describe_unknown(const std::string& flag, const std::vector<std::string>& names) {
  const std::string near = nearest_name(flag_of(flag), names);
  return concat("unknown flag ", flag, near.empty() ? "" : "; did you mean " + near + "?", "; ");
}

/// Refuses words that are no flags of `app`: all that look like flags, else the first, with the error that
/// parsing the others gave. Words of a command, and what follows them, are its own.
void refuse_rest(const CLI::App& app, std::vector<std::string> known_names, const std::string& error = "") {
  const auto rest = app.remaining();
  const bool commands = app.get_prefix_command();
  if (rest.empty() || (commands && !is_flag(rest.front()))) return;
  for (const auto* option : app.get_options())
    for (const auto& name : option->get_lnames()) known_names.push_back("--" + name);
  std::string text;
  for (const std::string& word : rest) {
    if (is_flag(word)) text += describe_unknown(word, known_names);
    if (commands) break;
  }
  if (text.empty())
    text = concat("unexpected argument '", rest.front(), "'; ", error.empty() ? "" : error + "; ");
  fail(Errc::config, text, "see --help");
}

}  // namespace

CommandLine::CommandLine(const std::string& description, const std::string& program,
                         const std::string& footer)
    : app_(std::make_unique<CLI::App>(description, program)) {
  app_->footer(footer);
  app_->set_version_flag("--version", "ringzero " RZ_VERSION "\n", "Print the version and exit");
}

CommandLine::~CommandLine() = default;

using Flag = CommandLine::Flag;

Flag CommandLine::add_option(const std::string& names, int& value, const std::string& what) {
  return Flag(app_->add_option(names, value, what));
}

Flag CommandLine::add_option(const std::string& names, std::int64_t& value, const std::string& what) {
  return Flag(app_->add_option(names, value, what));
}

Flag CommandLine::add_option(const std::string& names, std::uint64_t& value, const std::string& what) {
  return Flag(app_->add_option(names, value, what));
}

Flag CommandLine::add_option(const std::string& names, double& value, const std::string& what) {
  return Flag(app_->add_option(names, value, what));
}

Flag CommandLine::add_option(const std::string& names, bool& value, const std::string& what) {
  return Flag(app_->add_option(names, value, what));
}

Flag CommandLine::add_option(const std::string& names, std::string& value, const std::string& what) {
  const auto is_empty = [](const std::string& text) {  // as of a variable of a shell that is not set
    return std::string(text.empty() ? "a value is missing" : "");
  };
  return Flag(app_->add_option(names, value, what)->check(CLI::Validator(is_empty, "", "empty")));
}

Flag CommandLine::add_option(const std::string& names, std::vector<std::string>& value,
                             const std::string& what) {
  return Flag(app_->add_option(names, value, what));
}

Flag CommandLine::add_option(const std::string& names, std::optional<std::int64_t>& value,
                             const std::string& what) {
  return Flag(app_->add_option(names, value, what));
}

Flag CommandLine::add_option(const std::string& names, std::optional<double>& value,
                             const std::string& what) {
  return Flag(app_->add_option(names, value, what));
}

Flag CommandLine::add_option(const std::string& names, std::optional<std::string>& value,
                             const std::string& what) {
  return Flag(app_->add_option(names, value, what));
}

Flag CommandLine::add_flag(const std::string& name, bool& value, const std::string& what) {
  if (!name.starts_with('!')) return Flag(app_->add_flag(name, value, what));
  const auto switch_off = [&value] { value = false; };  // CLI11's own '!' prints "{false}" behind the name
  return Flag(app_->add_flag_callback(name.substr(1), switch_off, what));
}

Flag Flag::within(std::int64_t min, std::int64_t max) { return Flag(option_->check(CLI::Range(min, max))); }
Flag Flag::within(double min, double max) {
  const auto is_number = [](const std::string& text) {  // a NaN is within every range of CLI11
    const auto value = parse_number<double>(text);
    return value && std::isnan(*value) ? concat("Value ", text, " is no number") : std::string();
  };
  return Flag(option_->check(CLI::Range(min, max))->check(is_number));
}
Flag Flag::one_of(std::vector<std::string> words) {
  return Flag(option_->check(CLI::IsMember(std::move(words))));
}
Flag Flag::delimiter(char between) { return Flag(option_->delimiter(between)); }
Flag Flag::type_name(const std::string& name) { return Flag(option_->type_name(name)); }
Flag Flag::group(const std::string& heading) { return Flag(option_->group(heading)); }
Flag Flag::required() { return Flag(option_->required()); }
Flag Flag::excludes(Flag other) { return Flag(option_->excludes(other.option_)); }
Flag Flag::may_be_empty() {
  option_->get_validator("empty")->active(false);
  return *this;
}
Flag Flag::one_value_each() { return Flag(option_->allow_extra_args(false)); }

void CommandLine::allow_trailing_command() { app_->prefix_command(); }
void CommandLine::column_width(std::size_t width) { app_->get_formatter()->column_width(width); }

std::optional<int> CommandLine::values_of(const std::string& flag) const {
  const auto* option = app_->get_option_no_throw(flag);
  return option ? std::optional(option->get_items_expected_min()) : std::nullopt;
}

bool CommandLine::is_set(const std::string& name) const { return app_->count(name) > 0; }
std::vector<std::string> CommandLine::remaining() const { return app_->remaining(); }

std::vector<std::string> split_at_commas(const std::string& words) { return CLI::detail::split(words, ','); }

std::string CommandLine::parse(int argc, const char* const* argv) {
  app_->allow_extras();
  const std::vector<std::string> kept =
      words_to_parse(*app_, std::span(argv, static_cast<std::size_t>(argc)));
  std::vector<const char*> words;
  for (const std::string& word : kept) words.push_back(word.c_str());
  refuse_launcher_flags(*app_, std::span(words).subspan(argc > 0 ? 1 : 0));
  try {
    app_->parse(static_cast<int>(words.size()), words.data());
  } catch (const CLI::CallForHelp&) {
    return app_->help();
  } catch (const CLI::CallForVersion&) {
    return app_->version();
  } catch (const CLI::ParseError& e) {
    std::string line = e.what();
    std::ranges::replace(line, '\n', ' ');
    refuse_rest(*app_, known_names_, line);  // an unknown flag explains more than a missing one
    fail(Errc::config, line, "; see --help");
  }
  refuse_rest(*app_, known_names_);
  return "";
}

int print_help(const std::string& help) { return std::fputs(help.c_str(), stdout) < 0 ? 1 : 0; }

void reserve_standard_descriptors() {
  for (const int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO})
    if (::fcntl(fd, F_GETFD) < 0 && ::open("/dev/null", fd == STDIN_FILENO ? O_WRONLY : O_RDONLY) != fd)
      return;  // /dev/null is missing
}

namespace {

/// A program without standard output prints to nowhere (reserve_standard_descriptors()).
void require_printed() {
  const bool printed = std::fflush(stdout) == 0 && std::ferror(stdout) == 0;
  const int mode = ::fcntl(STDOUT_FILENO, F_GETFL);
  require(printed || mode < 0 || (mode & O_ACCMODE) == O_RDONLY, Errc::system,
          "standard output cannot be written: the disk may be full");
}

}  // namespace

int run_program(const char* name, const std::function<int()>& body) {
  reserve_standard_descriptors();
  try {
    flight::record_crashes();
    const int status = body();
    if (status == 0) require_printed();
    return status;
  } catch (const Error& e) {
    write_error_file(e);
    std::fprintf(stderr, "%s: %s\n", name, one_line(e).c_str());
    return e.code() == Errc::config ? 2 : 1;
  } catch (const std::exception& e) {
    write_error_file(e);
    std::fprintf(stderr, "%s: %s\n", name, one_line(e).c_str());
    return 1;
  }
}

}  // namespace rz
