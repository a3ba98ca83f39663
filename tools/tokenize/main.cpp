// tokenize: makes token shards of text. See --help.
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <string>
#include <vector>

#include "comm/core/error.h"
#include "comm/core/text.h"
#include "comm/topology.h"
#include "sharding/data/text_documents.h"
#include "sharding/data/token_shards.h"
#include "sharding/io/file.h"
#include "sharding/tokenizer/tokenizer.h"
#include "tools/command_line/command_line.h"
#include "tools/command_line/progress.h"

namespace rz::tokenize {
namespace {

constexpr const char* description =
    "Makes shards of tokens of text, which train_lm reads as --tokens FOLDER. The shards depend on the text "
    "and the\nflags, not on the number of threads.\n\n"
    "  tokenize --tokenizer gpt2/ --data corpus/ --output tokens/\n"
    "  tokenize --tokenizer llama/ --data 'part_*.jsonl' --text-key content --output tokens/\n"
    "  tokenize --vocab-size 4096 --data corpus/ --output tokens/           makes a tokenizer of the text";

constexpr const char* footer =
    "The folder has the shards, index.json (tokenizer, vocabulary, documents, tokens), which train_lm "
    "checks, "
    "and a\ncopy of the tokenizer. It appears complete or not at all: Ctrl-C leaves nothing.\n\n"
    "Exit status: 0 done, 2 an input is wrong, 1 anything else.";

struct Options {
  std::string tokenizer, output, eos_token;
  std::int64_t vocab_size = 0;
  std::vector<std::string> data;
  TextOptions text;
  TokenShardsOptions shards;
  std::int64_t threads = 0;
};

void add_text(CommandLine& line, Options& o) {
  line.add_option("--tokenizer", o.tokenizer,
                  "Folder with tokenizer.json, or with vocab.json and merges.txt; or: bytes, of 256 tokens")
      .type_name("FOLDER")
      .group("Inputs");
  line.add_option("--vocab-size", o.vocab_size,
                  "Instead of --tokenizer: make a byte-level one of so many tokens from the text (the first "
                  "256 MiB)")
      .type_name("N")
      .within(257, 1 << 20)
      .group("Inputs");
  line.add_option("--data", o.data,
                  "Files of text, each a document, and .jsonl or .ndjson, each line a document; all such "
                  "below a folder, or of a pattern")
      .type_name("PATH…")
      .required()
      .group("Inputs");
  line.add_option("--text-key", o.text.text_key, "Key of the text in records; default text")
      .type_name("KEY")
      .group("Inputs");
  line.add_flag(
          "--append-eos", o.text.append_eos,
          "End documents by the tokenizer's end of a text (default; without one a line break is between "
          "them)")
      .group("Inputs");
  line.add_flag("!--no-eos", o.text.append_eos, "Nothing is between documents").group("Inputs");
  line.add_option("--eos-token", o.eos_token, "Another token than that, e.g. <|endoftext|>")
      .type_name("TOKEN")
      .group("Inputs");
}

void add_shards(CommandLine& line, Options& o) {
  line.add_option("--output", o.output, "A new or empty folder")
      .type_name("FOLDER")
      .required()
      .group("Output");
  line.add_option("--shard-size", o.shards.shard_size, "Tokens of a file; default 100000000")
      .type_name("TOKENS")
      .group("Output");
  line.add_option("--dtype", o.shards.dtype,
                  "auto (default): uint16 if the vocabulary has at most 65536 tokens, else uint32")
      .type_name("DTYPE")
      .one_of({"auto", "uint16", "uint32"})
      .group("Output");
  line.add_option("--format", o.shards.format,
                  "llmc (default): llm.c's header and .bin; npy: NumPy's; bin: tokens alone")
      .type_name("FORMAT")
      .one_of({"llmc", "npy", "bin"})
      .group("Output");
  line.add_option("--threads", o.threads, "Default: the processors that the program may use")
      .type_name("N")
      .within(1, 1024)
      .group("Output");
}

Parsed<Options> parse_options(int argc, const char* const* argv) {
  Parsed<Options> parsed;
  CommandLine line(description, "tokenize", footer);
  line.column_width(34);
  add_text(line, parsed.options);
  add_shards(line, parsed.options);
  parsed.help = line.parse(argc, argv);
  return parsed;
}

std::atomic<int> stop_signal{0};

void stop_on_signals() {
  struct sigaction action {};
  action.sa_handler = [](int number) { stop_signal = number; };
  action.sa_flags = SA_RESETHAND;  // a second one ends the program at once
  for (const int number : {SIGINT, SIGTERM, SIGHUP}) ::sigaction(number, &action, nullptr);
}

std::vector<TextFile> files_of(const Options& o) {
  std::vector<TextFile> files;
  std::vector<std::string> left_out;
  for (const std::string& data : o.data) {
    const std::vector<TextFile> more = text_files(data, std::span(&o.output, 1), &left_out);
    files.insert(files.end(), more.begin(), more.end());
  }
  for (const std::string& line : left_out) std::fprintf(stderr, "tokenize: warning: %s\n", line.c_str());
  return files;
}

/// A tokenizer of the first files.
Tokenizer made_tokenizer(const Options& o, std::span<const TextFile> files) {
  constexpr std::size_t max_bytes = std::size_t{256} << 20;
  std::vector<std::string> texts;
  std::size_t bytes = 0, used = 0;
  for (std::uint64_t all = 0; used < files.size() && all < max_bytes; ++used) all += files[used].bytes;
  TextOptions as_bytes{.text_key = o.text.text_key};
  as_bytes.on_progress = [](const TextProgress&) {
    require(stop_signal == 0, Errc::aborted, "stopped by a signal; nothing was written");
  };
  encode_documents(files.first(used), as_bytes, true, [&](EncodedText& some) {
    if (bytes >= max_bytes) return;
    bytes += some.text.size();
    texts.push_back(std::move(some.text));
  });
  const std::vector<std::string_view> views(texts.begin(), texts.end());
  return train_bpe(views, static_cast<std::size_t>(o.vocab_size));
}

Tokenizer tokenizer_of(const Options& o, std::span<const TextFile> files) {
  require(o.tokenizer.empty() != (o.vocab_size == 0), Errc::config,
          o.tokenizer.empty()
              ? "--tokenizer FOLDER is required, or --vocab-size N, which makes one; see --help"
              : "--tokenizer and --vocab-size exclude each other");
  if (o.vocab_size > 0) return made_tokenizer(o, files);
  return o.tokenizer == "bytes" ? Tokenizer::bytes() : Tokenizer::from_pretrained(o.tokenizer);
}

void set_end_token(Options& o) {
  if (o.eos_token.empty()) return;
  o.text.eos_token_id = o.text.tokenizer->token_to_id(o.eos_token);
  require(o.text.eos_token_id.has_value(), Errc::config, "--eos-token: ", "the tokenizer has no token ",
          o.eos_token);
  require(o.text.append_eos, Errc::config, "--eos-token and --no-eos exclude each other");
}

std::string end_of_documents(const TextOptions& text) {
  if (!text.append_eos) return "not marked";
  const auto end = end_token(text);
  if (!end) return "a line break between them, since the tokenizer has no end of a text";
  return concat("ended by ", text.tokenizer->id_to_token(*end), " (", *end, ")");
}

void print_summary(const Options& o, const TokensIndex& index, std::size_t files, std::uint64_t bytes,
                   double seconds) {
  std::printf("documents: %llu in %zu files, %s, %s\n", static_cast<unsigned long long>(index.documents),
              files, human_bytes(bytes).c_str(), end_of_documents(o.text).c_str());
  std::printf("tokens: %llu of %llu kinds, %s in %zu shards\n", static_cast<unsigned long long>(index.tokens),
              static_cast<unsigned long long>(index.vocab_size), index.dtype.c_str(), index.shards.size());
  std::printf("speed: %s MiB/s, %.0f tokens/s, %.1f s by %d thread%s\n",
              fixed(static_cast<double>(bytes) / seconds / (1 << 20), 1).c_str(),
              static_cast<double>(index.tokens) / seconds, seconds, o.text.threads,
              o.text.threads == 1 ? "" : "s");
  std::printf("saved: %s\n", (std::filesystem::path(o.output) / "index.json").c_str());
}

/// Before the texts are read: that the folder can be made.
void check_output(const std::string& path) {
  try {
    const DurableFolder folder(path);
  } catch (const Error& e) {
    fail(Errc::config, "--output ", e.what());
  }
}

int run(Options o) {
  stop_on_signals();
  check_output(o.output);
  o.text.threads = o.threads > 0 ? static_cast<int>(o.threads) : usable_processors();
  const std::vector<TextFile> files = files_of(o);
  o.text.tokenizer = tokenizer_of(o, files);
  set_end_token(o);
  TokenShards shards(o.output, o.text.tokenizer->vocab_size(), o.shards);
  TokensIndex index{.tokenizer = o.text.tokenizer->checksum(), .eos_token_id = end_token(o.text)};
  TokenizeProgress progress("tokenize");
  std::uint64_t bytes = 0;
  o.text.on_progress = [&](const TextProgress& p) {
    progress.show(p.bytes, p.all_bytes, p.tokens);
    index.documents = p.documents, bytes = p.bytes;
    require(stop_signal == 0, Errc::aborted, "stopped by a signal; nothing was written");
  };
  const auto start = std::chrono::steady_clock::now();
  encode_documents(files, o.text, false, [&](EncodedText& encoded) { shards.write(encoded.tokens); });
  const std::string copy = (std::filesystem::path(shards.folder()) / "tokenizer").string();
  make_folders(copy);
  o.text.tokenizer->save_pretrained(copy);
  index = shards.commit(index);
  const std::chrono::duration<double> past = std::chrono::steady_clock::now() - start;
  print_summary(o, index, files.size(), bytes, past.count());
  return 0;
}

}  // namespace
}  // namespace rz::tokenize

int main(int argc, char** argv) {
  const auto parse = [&] { return rz::tokenize::parse_options(argc, argv); };
  return rz::run_program("tokenize", parse, rz::tokenize::run);
}
