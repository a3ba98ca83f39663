// generate: continues texts with a language model. See --help.

#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <functional>
#include <iostream>
#include <iterator>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "autograd_lite/models/generate.h"
#include "autograd_lite/models/lora.h"
#include "autograd_lite/nn/init.h"
#include "comm/core/error.h"
#include "comm/core/text.h"
#include "comm/device/allocate.h"
#include "comm/device/cuda_runtime.h"
#include "comm/topology.h"
#include "sharding/huggingface/adapter.h"
#include "sharding/huggingface/families.h"
#include "sharding/huggingface/generation_config.h"
#include "sharding/huggingface/merge_adapter.h"
#include "sharding/huggingface/pretrained_weights.h"
#include "sharding/io/json.h"
#include "sharding/lm/sample_text.h"
#include "sharding/tokenizer/tokenizer.h"
#include "tools/command_line/command_line.h"

namespace rz::generate_tool {
namespace {

constexpr const char* description =
    "Continues a text with a language model of Hugging Face's or train_lm's files, on this machine alone.\n\n"
    "  generate --model FOLDER --prompt 'Once upon a time'\n"
    "  generate --model FOLDER <question.txt        the prompt is the whole of standard input\n"
    "  generate --model FOLDER                      on a terminal: each line is a prompt, until Ctrl-D\n"
    "  generate --model RUN --max-new-tokens 400    a folder of checkpoints: the latest, with its adapter of "
    "LoRA";

constexpr const char* footer =
    "The text goes to standard output as it is made, times and speed to standard error. What is not given "
    "is\n"
    "as in FOLDER/generation_config.json; if it does not sample, a temperature of 0.8 and the 50 likeliest "
    "tokens.\n"
    "The same seed gives the same text.\n\n"
    "Exit status: 0 done; 2 an input is wrong; 1 anything else.";

struct Options {
  std::string model, weights, adapter, tokenizer, generation_config;
  std::optional<std::string> prompt;
  std::string prompt_file;
  std::string dtype = "f32", device = "host";
  std::int64_t threads = 0, num_return_sequences = 1;
  std::optional<std::int64_t> max_new_tokens, top_k;
  std::optional<double> temperature, top_p, min_p, repetition_penalty;
  std::vector<std::string> stop;
  std::uint64_t seed = 0;
  bool echo = true, special_tokens = false, add_special_tokens = true, ignore_eos = false;
};

void add_inputs(CommandLine& line, Options& o) {
  constexpr const char* group = "Inputs";
  line.add_option("--model", o.model,
                  "A folder with config.json, weights and tokenizer, or a folder of checkpoints")
      .required()
      .type_name("FOLDER")
      .group(group);
  line.add_option("--weights", o.weights, "Weights that are elsewhere, as --init of train_lm")
      .type_name("PATH")
      .group(group);
  line.add_option("--adapter", o.adapter, "An adapter of PEFT, which is merged into the weights")
      .type_name("FOLDER")
      .group(group);
  line.add_option("--tokenizer", o.tokenizer,
                  "A folder with a tokenizer; default: the model's, or bytes if it has 256 tokens")
      .type_name("FOLDER")
      .group(group);
  line.add_option("--generation-config", o.generation_config,
                  "A generation_config.json; default: that of --model, or its config.json")
      .type_name("FILE")
      .group(group);
  const auto prompt =
      line.add_option("--prompt", o.prompt, "The text to continue").type_name("TEXT").group(group);
  line.add_option("--prompt-file", o.prompt_file, "A file with it")
      .type_name("FILE")
      .excludes(prompt)
      .group(group);
  line.add_flag("!--no-special-tokens", o.add_special_tokens,
                "Do not put the tokenizer's tokens, such as <s>, around the prompt")
      .group(group);
}

void add_sampling(CommandLine& line, Options& o) {
  constexpr const char* group = "Tokens (names and meanings of Hugging Face's GenerationConfig)";
  line.add_option("--max-new-tokens", o.max_new_tokens,
                  "Length of the continuation; default: of generation_config.json, or 200")
      .type_name("N")
      .within(1, 1 << 24)
      .group(group);
  line.add_option("--temperature", o.temperature, "Divides the logits; 0: always the likeliest token")
      .type_name("X")
      .within(0.0, 100.0)
      .group(group);
  line.add_option("--top-k", o.top_k, "Only the K likeliest tokens; 0: all")
      .type_name("K")
      .within(0, 1 << 30)
      .group(group);
  line.add_option("--top-p", o.top_p, "Only the fewest likeliest tokens whose probabilities sum up to P")
      .type_name("P")
      .within(1e-6, 1.0)
      .group(group);
  line.add_option("--min-p", o.min_p, "Only tokens of at least P times the probability of the likeliest")
      .type_name("P")
      .within(0.0, 1.0)
      .group(group);
  line.add_option("--repetition-penalty", o.repetition_penalty,
                  "Above 1: tokens of the text become less likely")
      .type_name("X")
      .within(1e-6, 100.0)
      .group(group);
  line.add_option("--stop", o.stop, "A text that ends the continuation, and is left out; may be repeated")
      .type_name("TEXT")
      .group(group);
  line.add_flag("--ignore-eos", o.ignore_eos, "Go on behind a token that ends texts").group(group);
  line.add_option("--num-return-sequences", o.num_return_sequences,
                  "Several continuations, made at once and printed one after the other")
      .type_name("N")
      .within(1, 1024)
      .group(group);
  line.add_option("--seed", o.seed, "Of the tokens that are drawn; default 0").type_name("S").group(group);
}

void add_run(CommandLine& line, Options& o) {
  line.add_option("--dtype", o.dtype, "Of the weights in memory: bf16 takes half the time and memory of f32")
      .one_of({"f32", "bf16", "f16"})
      .group("Speed");
  line.add_option("--threads", o.threads, "Default: the processors that this process may use")
      .type_name("N")
      .within(1, 1024)
      .group("Speed");
  line.add_option("--device", o.device, "host (default), cuda or cuda:N").type_name("NAME").group("Speed");
  line.add_flag("!--no-echo", o.echo, "Print the continuation without the prompt").group("Output");
  line.add_flag("--show-special-tokens", o.special_tokens, "Print tokens such as </s>, too").group("Output");
}

Parsed<Options> parse_options(int argc, const char* const* argv) {
  Parsed<Options> parsed;
  CommandLine line(description, "generate", footer);
  line.column_width(34);
  add_inputs(line, parsed.options);
  add_sampling(line, parsed.options);
  add_run(line, parsed.options);
  parsed.help = line.parse(argc, argv);
  return parsed;
}

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

void print_status(const std::string& line) { std::fprintf(stderr, "generate: %s\n", line.c_str()); }

/// A model with its values, and what its texts are made of.
class Generator {
 public:
  explicit Generator(const Options& o)
      : options_(o), stream_(stream_of(o)), model_(language_model_from_config(o.model)), tape_(stream_) {
    const auto start = std::chrono::steady_clock::now();
    tokenizer_.emplace(tokenizer_of_model());
    config_ = config_of_model();
    load();
    print_status(
        concat(model_->facts().name, " of ", o.model, ", ", o.dtype, ", ",
               stream_.device().kind == Device::host ? concat(stream_.threads(), " threads") : o.device,
               ", read in ", fixed(seconds_since(start), 1), " s"));
  }

  /// Prints the continuations of a prompt.
  void continue_text(const std::string& prompt) {
    std::vector<std::int32_t> tokens = tokenizer_->encode(prompt, options_.add_special_tokens);
    if (tokens.empty()) tokens = first_tokens();
    for (const std::int32_t t : tokens)
      require(static_cast<std::size_t>(t) < model_->facts().vocabulary, Errc::config,
              "the prompt has the token \"", tokenizer_->id_to_token(t), "\" (", t,
              "), and the model a vocabulary of ", model_->facts().vocabulary,
              "; use a text without it, or the tokenizer that belongs to the model");
    if (const std::size_t positions = model_->facts().positions;
        tokens.size() + config_.max_new_tokens > positions)
      print_status(concat("behind ", positions,
                          " tokens, the positions of the model, each token sees the last ", positions,
                          " and takes a pass over all of them"));
    const std::size_t texts = static_cast<std::size_t>(options_.num_return_sequences);
    Printed printed(*this, prompt, tokens, texts);
    const std::vector<std::vector<std::int32_t>> prompts(texts, tokens);
    const auto start = std::chrono::steady_clock::now();
    std::optional<std::chrono::steady_clock::time_point> first;
    std::size_t made = 0;
    config_.stopping_criteria = [&](std::size_t text, std::int32_t token) {
      if (!first) first = std::chrono::steady_clock::now();
      ++made;
      return printed.add(text, token);
    };
    generate(*model_, tape_, prompts, config_);
    printed.finish();
    const double all = seconds_since(start),
                 prompt_seconds = std::chrono::duration<double>(first.value_or(start) - start).count();
    const std::size_t later = made - std::min(made, texts);  // the first of each is the prompt's
    print_status(concat(tokens.size(), " tokens of the prompt in ", fixed(prompt_seconds, 2), " s, ", made,
                        " tokens in ", fixed(all, 2), " s, ",
                        fixed(later > 0 ? static_cast<double>(later) / (all - prompt_seconds) : 0, 1),
                        " tokens/s after the first"));
  }

 private:
  static Stream stream_of(const Options& o) {
    const Device device = cuda::device_from_name(o.device);
    if (device.kind != Device::host) return Stream::create(device);
    return Stream::host(o.threads > 0 ? static_cast<int>(o.threads) : usable_processors());
  }

  Tokenizer tokenizer_of_model() const {
    const std::size_t vocabulary = model_->facts().vocabulary;
    const std::string folder = model_->origin().folder;
    if (!options_.tokenizer.empty()) {
      const Tokenizer given = checked(Tokenizer::from_pretrained(options_.tokenizer));
      if (has_tokenizer(folder) && Tokenizer::from_pretrained(folder).checksum() != given.checksum())
        print_status(concat("warning: --tokenizer ", options_.tokenizer, " is not that of ", folder));
      return given;
    }
    if (has_tokenizer(folder)) return checked(Tokenizer::from_pretrained(folder));
    require(vocabulary == 256, Errc::config, "--model: ", folder, " has no tokenizer.json; give --tokenizer ",
            "FOLDER");
    return Tokenizer::bytes();
  }
  Tokenizer checked(Tokenizer t) const {
    require(t.ordinary_vocab_size() <= model_->facts().vocabulary, Errc::config, "the tokenizer has ",
            t.ordinary_vocab_size(), " tokens, and the model a vocabulary of ", model_->facts().vocabulary,
            ": the tokenizer is another model's");
    return t;
  }

  GenerationConfig config_of_model() const {
    const Options& o = options_;
    const std::size_t vocabulary = model_->facts().vocabulary;
    GenerationConfig c = o.generation_config.empty()
                             ? generation_config_from_pretrained(o.model, vocabulary, 200)
                             : read_generation_config(o.generation_config, vocabulary, 200);
    if (c.temperature == 0) c.temperature = 0.8, c.top_k = 50;
    if (o.max_new_tokens) c.max_new_tokens = static_cast<std::size_t>(*o.max_new_tokens), c.max_length = 0;
    if (o.temperature) c.temperature = *o.temperature;
    if (o.top_k) c.top_k = static_cast<std::size_t>(*o.top_k);
    if (o.top_p) c.top_p = *o.top_p;
    if (o.min_p) c.min_p = *o.min_p;
    if (o.repetition_penalty) c.repetition_penalty = *o.repetition_penalty;
    c.seed = o.seed;
    if (o.ignore_eos) {
      c.eos_token_id.clear();
    } else if (c.eos_token_id.empty() && tokenizer_->eos_token_id()) {
      c.eos_token_id.push_back(*tokenizer_->eos_token_id());
    }
    return c;
  }

  void load() {
    const Allocator allocate = allocator_on(stream_.device());
    const DType dtype = dtype_from_name(options_.dtype);
    const auto allocate_parameters = [&] {
      for (Parameter* p : model_->parameters())
        if (!p->value.defined()) p->value = Tensor::empty(p->shape, dtype, allocate);
    };
    allocate_parameters();
    allocate_buffers(*model_, allocate, stream_);
    const std::string& weights = options_.weights.empty() ? options_.model : options_.weights;
    if (!options_.adapter.empty())
      require_no_adapter(weights);
    else if (const std::string line = adapter_beside(weights); !line.empty())
      print_status("warning: " + line);
    load_pretrained(*model_, weights, {}, stream_);
    if (options_.adapter.empty()) return;
    add_lora(*model_, read_adapter_config(options_.adapter));
    allocate_parameters();
    load_adapter(*model_, options_.adapter, {}, stream_);
  }

  /// What a text without a prompt begins with.
  std::vector<std::int32_t> first_tokens() const {
    for (const auto& token : {tokenizer_->bos_token_id(), tokenizer_->eos_token_id()})
      if (token) return {*token};
    std::vector<std::int32_t> newline = tokenizer_->encode("\n", false);
    require(!newline.empty(), Errc::config, "--prompt: is empty; give a text");
    return newline;
  }

  /// Continuations as text: the first one is printed as it is made, the others at the end.
  class Printed {
   public:
    Printed(const Generator& of, const std::string& prompt, std::span<const std::int32_t> tokens,
            std::size_t texts)
        : of_(of), prompt_(of.options_.echo ? prompt : "") {
      for (std::size_t i = 0; i < texts; ++i)
        texts_.emplace_back(Text{DecodeStream(*of.tokenizer_, !of.options_.special_tokens, tokens)});
      print(prompt_);
    }
    /// Returns whether the text ends, with one of the texts of --stop.
    bool add(std::size_t text, std::int32_t token) {
      Text& t = texts_[text];
      t.made += t.decoder.push(token);
      bool ends = false;
      for (const std::string& stop : of_.options_.stop)
        if (const auto at = t.made.find(stop); at != t.made.npos) t.made.resize(at), ends = true;
      if (text == 0) print_new(t, ends ? 0 : held_back(t.made));
      return ends;
    }
    void finish() {
      for (std::size_t i = 0; i < texts_.size(); ++i) {
        Text& t = texts_[i];
        t.made += t.decoder.finish();
        if (i > 0) print(concat("\n", prompt_));
        print_new(t, 0);
      }
      print("\n");
    }

   private:
    struct Text {
      DecodeStream decoder;
      std::string made{};
      std::size_t printed = 0;
    };
    /// Bytes at the end that may be the beginning of a text of --stop.
    std::size_t held_back(const std::string& made) const {
      std::size_t held = 0;
      for (const std::string& stop : of_.options_.stop)
        for (std::size_t n = std::min(stop.size() - 1, made.size()); n > held; --n)
          if (made.ends_with(stop.substr(0, n))) held = n;
      return held;
    }
    void print_new(Text& t, std::size_t held) {
      const std::size_t end = t.made.size() - held;
      if (end <= t.printed) return;
      print(t.made.substr(t.printed, end - t.printed));
      t.printed = end;
    }
    void print(const std::string& text) const {
      const std::string shown = terminal_ ? lm::printable(text) : text;
      require(std::fwrite(shown.data(), 1, shown.size(), stdout) == shown.size() && std::fflush(stdout) == 0,
              Errc::io, "standard output cannot be written");
    }

    const Generator& of_;
    std::string prompt_;
    std::vector<Text> texts_;
    bool terminal_ = ::isatty(STDOUT_FILENO) == 1;
  };

  Options options_;
  Stream stream_;
  std::unique_ptr<LanguageModel> model_;
  Tape tape_;
  std::optional<Tokenizer> tokenizer_;
  GenerationConfig config_;
};

int run(const Options& o) {
  for (const std::string& stop : o.stop)
    require(!stop.empty(), Errc::config, "--stop: is empty; give a text that ends the continuation");
  std::optional<std::string> prompt = o.prompt;
  if (!o.prompt_file.empty()) prompt = read_text_file(o.prompt_file);
  const bool interactive = !prompt && ::isatty(STDIN_FILENO) == 1;
  if (!prompt && !interactive)
    prompt.emplace(std::istreambuf_iterator<char>(std::cin), std::istreambuf_iterator<char>());
  std::optional<Generator> generator;
  try {
    generator.emplace(o);
  } catch (const Error& e) {
    if (e.code() == Errc::system) throw;
    fail(Errc::config, e.what());
  }
  if (prompt) {
    generator->continue_text(*prompt);
    return 0;
  }
  std::string line;
  while (std::fputs("> ", stderr), std::getline(std::cin, line)) generator->continue_text(line);
  std::fputs("\n", stderr);
  return 0;
}

}  // namespace
}  // namespace rz::generate_tool

int main(int argc, char** argv) {
  const auto parse = [&] { return rz::generate_tool::parse_options(argc, argv); };
  return rz::run_program("generate", parse, rz::generate_tool::run);
}
