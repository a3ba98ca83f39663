#include "sharding/engine/parse_arguments.h"

#include <array>
#include <span>
#include <string_view>
#include <utility>

#include "comm/bootstrap.h"
#include "comm/core/environment.h"
#include "comm/core/error.h"
#include "comm/core/text.h"
#include "sharding/config/arguments.h"
#include "sharding/parallel/world.h"

namespace rz {

namespace {

/// Flags that are no TrainingArguments.
constexpr std::string_view own_flags[] = {"deepspeed", "deepspeed_config", "seed", "local_rank", "help"};

template <class T>
T parse_integer(std::string_view flag, std::string_view text) {
  const auto value = parse_number<T>(text);
  require(value.has_value(), Errc::config, "--", flag, " ", text, ": expected an integer");
  return *value;
}

class ArgumentParser {
 public:
  ArgumentParser(std::span<const char* const> words, std::span<const FlagAlias> aliases)
      : words_(words), aliases_(aliases) {}

  KnownArguments parse() {
    known_.options.arguments.origin = "command line";
    while (at_ < words_.size()) {
      const std::string_view word = words_[at_];
      if (word == "--") {
        known_.rest.insert(known_.rest.end(), words_.begin() + static_cast<std::ptrdiff_t>(at_) + 1,
                           words_.end());
        break;
      }
      if (const ArgumentSpec* flag = find_flag(word, aliases_)) {
        at_ = set_argument(known_.options.arguments, *flag, words_, at_);
      } else if (!parse_own(word)) {
        known_.rest.emplace_back(word);
        ++at_;
      }
    }
    const TrainingArguments& a = known_.options.arguments;
    require(
        !switched_on_ || !known_.options.config.empty() || known_.help ||
            !environment_variable("RZ_CONFIG").value_or("").empty(),
        Errc::config,
        "--deepspeed: a file is missing; give --deepspeed FILE or --deepspeed_config FILE, or set RZ_CONFIG");
    require(!a.warmup_steps || !a.warmup_ratio, Errc::config,
            "--warmup_steps and --warmup_ratio exclude each other");
    return std::move(known_);
  }

 private:
  /// False if the word is no flag of an engine; else it and its value are read.
  bool parse_own(std::string_view word) {
    const std::string name = word.starts_with("--") ? argument_name(word) : "";
    if (word == "-h" || name == "help") {
      known_.help = true;
      ++at_;
    } else if (name == "deepspeed" && word.find('=') == word.npos && !has_word()) {
      switched_on_ = true;  // DeepSpeed's switch: the file has a flag of its own
      ++at_;
    } else if (name == "deepspeed" || name == "deepspeed_config") {
      set_config(name, value_of(name));
    } else if (name == "seed") {
      known_.options.seed = parse_integer<std::uint64_t>(name, value_of(name));
    } else if (name == "local_rank") {
      check_local_rank(parse_integer<int>(name, value_of(name)));
    } else {
      return false;
    }
    return true;
  }

  bool has_word() const {
    return at_ + 1 < words_.size() && !std::string_view(words_[at_ + 1]).starts_with("-");
  }

  std::string_view value_of(const std::string& name) {
    const std::string_view word = words_[at_++];
    if (const std::size_t equals = word.find('='); equals != word.npos) return word.substr(equals + 1);
    require(at_ < words_.size() && !std::string_view(words_[at_]).starts_with("--"), Errc::config, "--", name,
            ": a value is missing");
    return words_[at_++];
  }

  void set_config(const std::string& name, std::string_view file) {
    std::string& config = known_.options.config;
    require(config.empty() || config == file, Errc::config, "--", name, " ", file,
            ": another configuration was given before: ", config, "; remove one of them");
    config = file;
  }

  /// -1: not started by a launcher, as in PyTorch and Hugging Face.
  static void check_local_rank(int rank) {
    if (rank == -1) return;
    const int found = launch_info_from_environment().local_rank;
    require(rank == found, Errc::config, "--local_rank ", rank, ": the local rank is ", found,
            " by the environment of the launcher; start the ranks with rzrun, torchrun, mpirun or srun, "
            "which set it");
  }

  std::span<const char* const> words_;
  std::span<const FlagAlias> aliases_;
  std::size_t at_ = 0;
  KnownArguments known_;
  bool switched_on_ = false;
};

std::string describe_unknown(const std::string& word) {
  if (!word.starts_with("-")) return concat(word, ": expected a flag, e.g. --deepspeed FILE");
  const std::string name = argument_name(word);
  if (const std::string_view reason = no_counterpart(word); !reason.empty())
    return concat("--", name, ": a flag of Trainer without a counterpart here: ", reason);
  std::vector<std::string_view> names(std::begin(own_flags), std::end(own_flags));
  for (const ArgumentSpec& spec : argument_specs())
    if (spec.group != ArgumentGroup::derived) names.push_back(spec.name);
  const std::string nearest = nearest_name(name, names);
  return concat("--", name, ": unknown flag", nearest.empty() ? "" : "; nearest: --", nearest);
}

/// All of them, a line each. A word behind an unknown flag is its value.
void refuse_words(const std::vector<std::string>& words) {
  std::string text;
  bool after_flag = false;
  for (const std::string& word : words) {
    const bool is_flag = word.starts_with("-");
    if (is_flag || !after_flag) text += concat(text.empty() ? "" : "\n", describe_unknown(word));
    after_flag = is_flag;
  }
  require(text.empty(), Errc::config, text);
}

}  // namespace

KnownArguments parse_known_arguments(int argc, const char* const* argv, std::span<const FlagAlias> aliases) {
  const auto words = std::span(argv, static_cast<std::size_t>(argc)).subspan(argc > 0 ? 1 : 0);
  return ArgumentParser(words, aliases).parse();
}

EngineOptions parse_arguments(int argc, const char* const* argv) {
  KnownArguments known = parse_known_arguments(argc, argv);
  if (known.help) throw HelpRequest(arguments_help());
  refuse_words(known.rest);
  return std::move(known.options);
}

std::string arguments_help() {
  constexpr std::array groups{ArgumentGroup::configuration, ArgumentGroup::loop, ArgumentGroup::checkpoint};
  return concat(
      "  --deepspeed FILE                DeepSpeed configuration (also: --deepspeed --deepspeed_config "
      "FILE); default: RZ_CONFIG\n"
      "  --seed N                        Seed of initial values, dropout, and the order of samples\n"
      "  --local_rank N                  Local rank, where a launcher appends it\n\n",
      describe_flags(groups, '_'));
}

}  // namespace rz
