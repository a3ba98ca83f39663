#include "tools/lm_flags/lm_flags.h"

#include <algorithm>

#include "comm/core/error.h"
#include "sharding/engine/parse_arguments.h"

namespace rz::lm {
namespace {

void add_model(CommandLine& line, Options& o) {
  line.add_option("--model", o.model,
                  "Hugging Face config of a language model (config.json, its folder, or one of checkpoints)")
      .required()
      .type_name("CONFIG.json")
      .group("Inputs");
  line.add_option("--config", o.config,
                  "DeepSpeed configuration (also: --deepspeed FILE); default: RZ_CONFIG")
      .type_name("DS.json")
      .group("Inputs");
}

void add_passes(CommandLine& line, Options& o) {
  line.add_option("--seq-len", o.seq_len, "Tokens a sample; default: the model's n_positions")
      .type_name("T")
      .within(1, 1 << 24)
      .group("Training");
  line.add_option("--strategy", o.strategy, "ddp, zero1, zero2 or zero3; default: zero_optimization.stage")
      .type_name("NAME")
      .group("Training");
  line.add_flag("--recompute", o.recompute, "Keep no activations of a block: compute them again in backward")
      .group("Training");
}

void add_decay(CommandLine& line, std::string& decay) {
  line.add_option(
          "--decay", decay,
          "Parameters to which weight decay applies: matrices (default; those of two or more dimensions), "
          "or all, as in DeepSpeed")
      .type_name("WHICH")
      .one_of({"all", "matrices"})
      .group("Training");
}

void add_buckets(CommandLine& line, Options& o) {
  line.add_option("--bucket-mb", o.bucket_mb,
                  "Size of a gradient bucket in MiB; default: zero_optimization.reduce_bucket_size")
      .type_name("X")
      .within(0.001, 65536.0)
      .group(speed_group);
  line.add_flag("!--no-overlap", o.overlap, "Wait for each bucket of gradients before backward goes on")
      .group(speed_group);
}

/// Names that train_lm had before.
constexpr FlagAlias aliases[] = {
    {"resume", "resume_from_checkpoint"}, {"checkpoint_dir", "output_dir"}, {"save_async", "async_save"}};

bool is_argument(const std::string& word, std::span<const ArgumentGroup> groups) {
  if (const ArgumentSpec* flag = find_flag(word, aliases))
    return std::ranges::find(groups, flag->group) != groups.end();
  const std::string name = word.starts_with("--") ? argument_name(word) : "";
  return name == "deepspeed" || name == "deepspeed_config" || name == "local_rank";
}

/// `word` with '-' between the words of its name.
std::string dashed(std::string word) {
  if (word.starts_with("--"))
    std::replace(word.begin(),
                 word.begin() + static_cast<std::ptrdiff_t>(std::min(word.find('='), word.size())), '_', '-');
  return word;
}

bool is_bool(std::string_view word) {
  return word == "true" || word == "True" || word == "false" || word == "False";
}

/// Divides the words between CommandLine and parse_arguments(); a flag of both is CommandLine's.
class DividedWords {
 public:
  DividedWords(const CommandLine& line, std::span<const ArgumentGroup> groups,
               std::span<const char* const> words) {
    for (std::size_t i = 0; i < words.size(); ++i) {
      const std::string word = dashed(words[i]);
      const std::string flag = word.substr(0, word.find('='));
      const bool has_value = flag == word && i + 1 < words.size();
      if (const auto values = line.values_of(flag)) {
        if (has_value && *values == 0 && is_bool(words[i + 1])) {  // Trainer's form of a flag without a value
          if (std::string_view(words[++i]).substr(1) == "rue") own.push_back(word);
          continue;
        }
        own.push_back(word);
        if (has_value && *values > 0) own.emplace_back(words[++i]);
      } else if (is_argument(word, groups)) {
        arguments.emplace_back(words[i]);
        if (has_value && !std::string_view(words[i + 1]).starts_with("--"))
          arguments.emplace_back(words[++i]);
      } else {
        require(no_counterpart(word).empty() || !word.starts_with("--"), Errc::config, flag,
                ": a flag of Trainer without a counterpart here: ", no_counterpart(word));
        own.push_back(word);
      }
    }
  }

  std::vector<std::string> own, arguments;
};

std::vector<const char*> pointers(const std::string& program, const std::vector<std::string>& words) {
  std::vector<const char*> out{program.c_str()};
  for (const std::string& word : words) out.push_back(word.c_str());
  return out;
}

}  // namespace

std::string parse_words(CommandLine& line, Options& o, std::span<const ArgumentGroup> groups, int argc,
                        const char* const* argv) {
  std::vector<std::string> names{"--deepspeed", "--deepspeed-config", "--local-rank"};
  for (const ArgumentSpec& spec : argument_specs())
    if (std::ranges::find(groups, spec.group) != groups.end())
      names.push_back(dashed(concat("--", spec.name)));
  line.add_known_names(std::move(names));
  const auto words = std::span(argv, static_cast<std::size_t>(argc)).subspan(argc > 0 ? 1 : 0);
  const DividedWords divided(line, groups, words);
  const std::string program = argc > 0 ? argv[0] : "";
  const auto own = pointers(program, divided.own), arguments = pointers(program, divided.arguments);
  if (std::string help = line.parse(static_cast<int>(own.size()), own.data()); !help.empty()) {
    if (line.is_set("--version")) return help;
    return concat(help,
                  "\nFlags with the names of Hugging Face's TrainingArguments ('_' may stand for '-')\n",
                  describe_flags(groups, '-', aliases));
  }
  KnownArguments known = parse_known_arguments(static_cast<int>(arguments.size()), arguments.data(), aliases);
  require(known.rest.empty(), Errc::config, "unexpected argument '",
          known.rest.empty() ? "" : known.rest.front(), "'; see --help");
  o.arguments = std::move(known.options.arguments);
  std::string& file = known.options.config;
  require(file.empty() || o.config.empty() || file == o.config, Errc::config, "--config ", o.config,
          " and --deepspeed ", file, " exclude each other");
  if (!file.empty()) o.config = file;
  return "";
}

void add_run_flags(CommandLine& line, Options& o, std::string& decay) {
  decay = "matrices";
  add_model(line, o);
  add_passes(line, o);
  add_decay(line, decay);
  add_buckets(line, o);
}

void read_words(Options& o, const std::string& decay) {
  o.decay = decay == "all" ? Decay::all : Decay::matrices;
  o.arguments.origin = "command line";
}

}  // namespace rz::lm
