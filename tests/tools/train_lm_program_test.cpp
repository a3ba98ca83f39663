// Needs: train_lm tokenize

// The program itself: started alone, or as two ranks, on good input and on bad.

#include <arpa/inet.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "comm/core/error.h"
#include "sharding/checkpoint/safetensors.h"
#include "sharding/io/json.h"
#include "sharding/tokenizer/tokenizer.h"
#include "tests/support/folder.h"
#include "tests/support/program.h"

namespace rz {
namespace {

namespace fs = std::filesystem;
const std::string fixture = RZ_SOURCE_DIR "/tests/data/gpt2_tiny/";
const std::string program = RZ_BINARY_DIR "/bin/train_lm";

struct Ended {
  int status = -1;
  std::string out, err;
};

int free_port() {
  const int s = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
  socklen_t length = sizeof address;
  EXPECT_EQ(::bind(s, reinterpret_cast<sockaddr*>(&address), length), 0);
  EXPECT_EQ(::getsockname(s, reinterpret_cast<sockaddr*>(&address), &length), 0);
  ::close(s);
  return ntohs(address.sin_port);
}

class TrainLmProgram : public testing::Test, protected test::Folder {
 protected:
  void SetUp() override {
    if (!fs::exists(program)) GTEST_SKIP() << program << " was not built";
    fs::create_directory(path("out"));
    put("model.json", R"({"n_layer": 1, "n_head": 2, "n_embd": 16, "n_positions": 16, "vocab_size": 256, )"
                      R"("embd_pdrop": 0, "attn_pdrop": 0, "resid_pdrop": 0})");
    put("ds.json", R"({"train_batch_size": 4, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},)"
                   R"( "zero_optimization": {"stage": 3}})");
  }
  /// Starts the ranks, waits for all, and returns each exit status.
  std::vector<Ended> run(int ranks, const std::vector<std::string>& arguments) const {
    const int port = free_port();
    std::vector<pid_t> children;
    for (int rank = 0; rank < ranks; ++rank) children.push_back(start(rank, ranks, port, arguments));
    std::vector<Ended> ended;
    for (int rank = 0; rank < ranks; ++rank) {
      int status = 0;
      EXPECT_EQ(::waitpid(children[rank], &status, 0), children[rank]);
      ended.push_back({WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status),
                       get(concat("stdout.", rank)), get(concat("stderr.", rank))});
    }
    return ended;
  }

  pid_t start(int rank, int ranks, int port, std::vector<std::string> arguments) const {
    arguments.insert(arguments.begin(), program);
    const pid_t child = ::fork();
    if (child != 0) return child;
    ::alarm(120);  // a rank that hangs is killed
    redirect(STDOUT_FILENO, path(concat("stdout.", rank)));
    redirect(STDERR_FILENO, path(concat("stderr.", rank)));
    const auto set = [](const char* key, const std::string& value) { ::setenv(key, value.c_str(), 1); };
    set("RANK", concat(rank)), set("WORLD_SIZE", concat(ranks)), set("LOCAL_RANK", concat(rank));
    set("LOCAL_WORLD_SIZE", concat(ranks)), set("MASTER_ADDR", "127.0.0.1"), set("MASTER_PORT", concat(port));
    std::vector<char*> words;
    for (auto& a : arguments) words.push_back(a.data());
    words.push_back(nullptr);
    ::execv(program.c_str(), words.data());
    ::_exit(127);
  }
  static void redirect(int fd, const std::string& to) {
    const int file = ::open(to.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0644);
    ::dup2(file, fd);
  }

  std::vector<std::string> good() const {
    return {"--model",  path("model.json"),     "--config",  path("ds.json"),
            "--tokens", fixture + "tokens.bin", "--threads", "1"};
  }
  std::vector<std::string> with(std::vector<std::string> arguments, const std::string& flag,
                                const std::string& value) const {
    const auto at = std::ranges::find(arguments, flag);
    if (at == arguments.end()) {
      arguments.insert(arguments.end(), {flag, value});
    } else {
      *(at + 1) = value;
    }
    return arguments;
  }

  /// Exit status 2 on every rank, one line on stderr of rank 0 that contains the parts, and no file written.
  void expect_refused(int ranks, std::vector<std::string> arguments,
                      std::initializer_list<std::string> parts) const {
    arguments.insert(arguments.end(),
                     {"--metrics", path("out/metrics.jsonl"), "--save", path("out/model"), "--steps", "2"});
    const auto ended = run(ranks, arguments);
    std::string all;
    for (const Ended& e : ended) {
      EXPECT_EQ(e.status, 2) << e.err;
      EXPECT_EQ(e.out, "");
      all += e.err;
    }
    EXPECT_EQ(ended[0].err, all) << "only rank 0 prints";
    EXPECT_EQ(std::ranges::count(all, '\n'), 1) << all;
    EXPECT_EQ(all.rfind("train_lm: ", 0), 0u) << all;
    for (const auto& part : parts)
      EXPECT_NE(all.find(part), std::string::npos) << "'" << all << "' lacks " << part;
    EXPECT_TRUE(fs::is_empty(path("out"))) << "something was written";
  }

  std::vector<double> losses(const std::string& log) const {
    std::ifstream in(path(log));
    std::vector<double> out;
    for (std::string line; std::getline(in, line);) {
      const auto node = nlohmann::json::parse(line);
      EXPECT_EQ(node["step"], out.size());
      for (const char* key : {"grad_norm", "lr", "tokens_per_second", "step_ms", "exposed_comm_ms"})
        EXPECT_TRUE(node[key].is_number()) << key;
      out.push_back(node["loss"]);
    }
    return out;
  }
};

TEST_F(TrainLmProgram, TrainsSavesAndGoesOnFromWhatItSaved) {
  auto arguments = good();
  arguments.insert(arguments.end(), {"--steps", "12", "--save", path("saved"), "--metrics", path("a.jsonl"),
                                     "--sample", "First", "--sample-tokens", "20", "--seed", "7"});
  const auto ended = run(2, arguments);
  for (const Ended& e : ended) ASSERT_EQ(e.status, 0) << e.err;
  EXPECT_EQ(ended[1].out, "") << "only rank 0 prints";
  for (const char* part : {"configuration: ", "optimizer.params.lr", "group matrices: ", "group the rest: ",
                           "zero3", "2 ranks", "step 12/12", "sample:\nFirst", "saved:"})
    EXPECT_NE(ended[0].out.find(part), std::string::npos) << part << " in\n" << ended[0].out;
  const auto first = losses("a.jsonl");
  ASSERT_EQ(first.size(), 12u);
  EXPECT_LT(first.back(), first.front() - 0.2) << "the loss falls";

  // One process and another strategy read a saved model.
  const auto again = run(1, {"--model", path("saved/config.json"), "--init", path("saved/model.safetensors"),
                             "--config", path("ds.json"), "--tokens", fixture + "tokens.bin", "--strategy",
                             "ddp", "--steps", "2", "--metrics", path("b.jsonl")});
  ASSERT_EQ(again[0].status, 0) << again[0].err;
  EXPECT_LT(losses("b.jsonl").front(), first.front() - 0.2);
}

TEST_F(TrainLmProgram, TheSampleGoesByItsFlags) {
  std::string text;
  for (int i = 0; i < 60; ++i) text += "the ring sends a chunk and the tree sends another\n";
  put("words.txt", text);
  const auto sample = [&](const std::string& seed, const std::string& temperature, const std::string& top_k) {
    const auto ended = run(1, {"--model",      path("model.json"),
                               "--config",     path("ds.json"),
                               "--data",       path("words.txt"),
                               "--threads",    "1",
                               "--steps",      "3",
                               "--no-shuffle", "--sample",
                               "the ",         "--sample-tokens",
                               "60",           "--seed",
                               seed,           "--sample-temperature",
                               temperature,    "--sample-top-k",
                               top_k});
    EXPECT_EQ(ended[0].status, 0) << ended[0].err;
    const auto at = ended[0].out.find("sample:\n");
    return at == std::string::npos ? "" : ended[0].out.substr(at);
  };
  const std::string drawn = sample("1", "0.9", "30");
  EXPECT_NE(drawn.find("sample:\nthe "), std::string::npos) << drawn;
  EXPECT_NE(drawn.find("occur in the data ("), std::string::npos) << drawn;
  EXPECT_EQ(drawn, sample("1", "0.9", "30")) << "the seed decides";
  EXPECT_NE(drawn, sample("2", "0.9", "30"));
  EXPECT_NE(drawn, sample("1", "0.2", "30"));
  EXPECT_NE(drawn, sample("1", "0.9", "0"));
  EXPECT_EQ(sample("1", "0.9", "1"), sample("1", "0", "0")) << "the likeliest token";
}

/// Weights suffice for a sample; a model of text has the tokenizer of bytes beside it.
TEST_F(TrainLmProgram, ASavedModelIsSampledWithoutDataAndConfiguration) {
  put("words.txt", std::string(200, 'a'));
  const auto trained =
      run(1, {"--model", path("model.json"), "--deepspeed", path("ds.json"), "--data", path("words.txt"),
              "--threads", "1", "--max_steps", "2", "--save", path("saved"), "--sample", "the ",
              "--sample-tokens", "20", "--logging_steps", "1"});
  ASSERT_EQ(trained[0].status, 0) << trained[0].err;
  const std::string drawn = trained[0].out.substr(trained[0].out.find("sample:\n"));
  const std::vector<std::string> again{"--model", path("saved"), "--sample", "the ", "--sample-tokens", "20"};
  for (const int ranks : {1, 2}) {
    const auto sampled = run(ranks, again);
    ASSERT_EQ(sampled[0].status, 0) << sampled[0].err;
    EXPECT_EQ(sampled[0].err, "");
    const std::size_t at = sampled[0].out.find("sample:\n");
    ASSERT_NE(at, std::string::npos) << sampled[0].out;
    EXPECT_EQ(sampled[0].out.substr(at), drawn.substr(0, drawn.find("words: "))) << sampled[0].out;
  }
  EXPECT_TRUE(fs::exists(path("saved/tokenizer.json")));
  auto tokens = good();
  tokens.insert(tokens.end(), {"--steps", "0", "--save", path("saved")});
  EXPECT_EQ(run(1, tokens)[0].status, 0);
  EXPECT_FALSE(fs::exists(path("saved/tokenizer.json"))) << "what these tokens mean is not known";
}

/// The tokenizer of bytes without its file's spelling of it, so that it is one of the user's.
void put_tokenizer(const std::string& folder) {
  Tokenizer::bytes().save_pretrained(folder);
  auto file = nlohmann::ordered_json::parse(read_text_file(folder + "/tokenizer.json"));
  file["added_tokens"] = {{{"id", 256},
                           {"content", "<|end|>"},
                           {"single_word", false},
                           {"lstrip", false},
                           {"rstrip", false},
                           {"normalized", false},
                           {"special", true}}};
  std::ofstream(folder + "/tokenizer.json") << file;
  std::ofstream(folder + "/tokenizer_config.json") << R"({"eos_token": "<|end|>"})";
}

TEST_F(TrainLmProgram, TextOfATokenizerIsTrainedOnSampledAndSaved) {
  const auto model = [&](const char* name, int vocabulary) {
    put(name, concat(R"({"n_layer": 1, "n_head": 2, "n_embd": 16, "n_positions": 16, "vocab_size": )",
                     vocabulary, R"(, "embd_pdrop": 0, "attn_pdrop": 0, "resid_pdrop": 0})"));
  };
  model("model.json", 257);
  put_tokenizer(path("tokenizer"));
  std::string whole, halves;  // documents of a sample, and of half of one
  for (int i = 0; i < 40; ++i) {
    whole += concat("{\"text\": \"the document ", 10 + i, "\"}\n");
    halves += concat("{\"text\": \"half ", 10 + i, "\"}\n");
  }
  put("whole.jsonl", whole), put("halves.jsonl", halves);
  const auto first_loss = [&](const std::string& data, const std::vector<std::string>& more) {
    std::vector<std::string> flags{
        "--model",         path("model.json"), "--config", path("ds.json"), "--threads",    "1",
        "--metrics",       path("m.jsonl"),    "--data",   path(data),      "--no-shuffle", "--tokenizer",
        path("tokenizer"), "--steps",          "1"};
    flags.insert(flags.end(), more.begin(), more.end());
    const auto ended = run(1, flags);
    EXPECT_EQ(ended[0].status, 0) << ended[0].err;
    return losses("m.jsonl").at(0);
  };
  EXPECT_EQ(first_loss("whole.jsonl", {}), first_loss("whole.jsonl", {"--document-mask"}));
  EXPECT_NE(first_loss("halves.jsonl", {}), first_loss("halves.jsonl", {"--document-mask"}));

  put("pairs.jsonl",
      "{\"q\": \"one?\", \"a\": \"two\"}\n{\"q\": \"and a longer one?\", \"a\": \"three\"}\n"
      "{\"q\": \"x\", \"a\": \"y\"}\n{\"q\": \"1\", \"a\": \"2\"}\n");
  auto flags = std::vector<std::string>{"--model",
                                        path("model.json"),
                                        "--config",
                                        path("ds.json"),
                                        "--data",
                                        path("pairs.jsonl"),
                                        "--tokenizer",
                                        path("tokenizer"),
                                        "--prompt-key",
                                        "q",
                                        "--answer-key",
                                        "a",
                                        "--steps",
                                        "30",
                                        "--save",
                                        path("saved"),
                                        "--sample",
                                        "one?",
                                        "--sample-temperature",
                                        "0"};
  for (const Ended& e : run(2, flags)) ASSERT_EQ(e.status, 0) << e.err;
  EXPECT_EQ(get("saved/tokenizer.json"), get("tokenizer/tokenizer.json"));
  const auto sampled = run(1, {"--model", path("saved"), "--sample", "one?", "--sample-temperature", "0"});
  ASSERT_EQ(sampled[0].status, 0) << sampled[0].err;
  EXPECT_NE(sampled[0].out.find("sample:\none?"), std::string::npos) << sampled[0].out;
  EXPECT_EQ(get("stdout.0").find("<|end|>"), std::string::npos);
  auto wrong = flags;
  model("model.json", 256);
  wrong.resize(12);
  expect_refused(2, wrong, {path("pairs.jsonl"), "token 256 at position", "vocab_size 256"});
}

/// The folder of a run is all that a text needs, as a saved model's is.
TEST_F(TrainLmProgram, ACheckpointHasTheTokenizerOfItsRun) {
  put_tokenizer(path("tokenizer"));
  put("model.json", R"({"n_layer": 1, "n_head": 2, "n_embd": 16, "n_positions": 16, "vocab_size": 257, )"
                    R"("embd_pdrop": 0, "attn_pdrop": 0, "resid_pdrop": 0})");
  put("text.txt", std::string(400, 'a') + "bc");
  const auto flags = [&](const std::string& tokenizer) {
    return std::vector<std::string>{"--model",      path("model.json"), "--config",    path("ds.json"),
                                    "--data",       path("text.txt"),   "--tokenizer", path(tokenizer),
                                    "--output-dir", path("run"),        "--resume",    "true"};
  };
  for (const Ended& e : run(2, with(flags("tokenizer"), "--steps", "2"))) ASSERT_EQ(e.status, 0) << e.err;
  const std::string checkpoint = "run/" + get("run/latest").substr(0, get("run/latest").find('\n')) + "/";
  for (const char* file : {"tokenizer.json", "tokenizer_config.json"})
    EXPECT_EQ(get(checkpoint + file), get(concat("tokenizer/", file)));

  const auto continued = [&](const std::string& model) {
    test::Program generate({test::built("generate"), "--model", path(model), "--prompt", "aa",
                            "--max-new-tokens", "9", "--temperature", "0"});
    EXPECT_EQ(generate.wait(), 0) << generate.err();
    return generate.out();
  };
  test::Program merge({test::built("checkpoint"), "merge", path("run"), path("merged")});
  ASSERT_EQ(merge.wait(), 0) << merge.err();
  EXPECT_EQ(get("merged/tokenizer.json"), get("tokenizer/tokenizer.json"));
  EXPECT_EQ(continued("run"), continued("merged"));

  for (const Ended& e : run(2, with(flags("run"), "--steps", "3"))) ASSERT_EQ(e.status, 0) << e.err;
  put_tokenizer(path("other"));
  std::string other = get("other/tokenizer.json");
  other.replace(other.find("<|end|>"), 7, "<|END|>");
  put("other/tokenizer.json", other), put("other/tokenizer_config.json", "{}");
  expect_refused(2, flags("other"),
                 {path("run/"), "was trained with another tokenizer than " + path("other")});
}

/// Without the key the end of Llama's own tokenizer would be written, and the folder refused.
TEST_F(TrainLmProgram, ASavedModelHasTheEndOfItsTokenizer) {
  put_tokenizer(path("tokenizer"));
  put("model.json",
      R"({"model_type": "llama", "vocab_size": 257, "hidden_size": 16, "intermediate_size": 32, )"
      R"("num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 16})");
  put("text.txt", std::string(400, 'a'));
  const auto trained =
      run(1, {"--model", path("model.json"), "--learning-rate", "0.001", "--max-steps", "1",
              "--per-device-train-batch-size", "2", "--data", path("text.txt"), "--tokenizer",
              path("tokenizer"), "--save", path("saved"), "--output-dir", path("run")});
  ASSERT_EQ(trained[0].status, 0) << trained[0].err;
  for (const std::string folder : {"saved", "run/global_step1"}) {
    const auto config = nlohmann::json::parse(get(folder + "/config.json"));
    EXPECT_EQ(config["eos_token_id"], 256) << folder;
    EXPECT_EQ(config["bos_token_id"], nullptr) << folder;
  }
  const auto again = run(1, {"--model", path("saved"), "--init", path("saved"), "--config", path("ds.json"),
                             "--data", path("text.txt"), "--steps", "1"});
  EXPECT_EQ(again[0].status, 0) << again[0].err;
}

TEST_F(TrainLmProgram, ShardsOfTokenizeAreTheTextThatTheyAreOf) {
  put_tokenizer(path("tokenizer"));
  put("model.json", R"({"n_layer": 1, "n_head": 2, "n_embd": 16, "n_positions": 16, "vocab_size": 257})");
  std::string text, records;
  for (int i = 0; i < 20000; ++i) text += concat("line ", i, "\n");
  for (int i = 0; i < 9; ++i) records += concat("{\"body\": \"record ", i, "\"}\n");
  put("a.txt", text), put("b.jsonl", records);
  const auto flags = [&](const std::string& output) {
    return std::vector<std::string>{"--tokenizer", path("tokenizer"), "--text-key",
                                    "body",        "--output",        path(output),
                                    "--data",      path("a.txt"),     path("b.jsonl")};
  };
  for (const std::string threads : {"1", "3"}) {
    auto command = flags("shards" + threads);
    command.insert(command.begin(), test::built("tokenize"));
    command.insert(command.end(), {"--threads", threads, "--shard-size", "100000"});
    test::Program tokenize(command);
    ASSERT_EQ(tokenize.wait(), 0) << tokenize.err();
    EXPECT_NE(tokenize.out().find("documents: 10 in 2 files"), std::string::npos) << tokenize.out();
    EXPECT_NE(tokenize.out().find("ended by <|end|> (256)"), std::string::npos) << tokenize.out();
  }
  for (const char* file :
       {"index.json", "tokens_000000.bin", "tokens_000001.bin", "tokenizer/tokenizer.json"})
    EXPECT_EQ(get(concat("shards1/", file)), get(concat("shards3/", file))) << file;
  const auto first_loss = [&](const std::vector<std::string>& more) {
    std::vector<std::string> all{"--model", path("model.json"), "--config",      path("ds.json"), "--threads",
                                 "1",       "--metrics",        path("m.jsonl"), "--steps",       "2"};
    all.insert(all.end(), more.begin(), more.end());
    const auto ended = run(1, all);
    EXPECT_EQ(ended[0].status, 0) << ended[0].err;
    return losses("m.jsonl");
  };
  EXPECT_EQ(first_loss({"--tokens", path("shards3"), "--save", path("saved")}),
            first_loss({"--data", path("a.txt") + "," + path("b.jsonl"), "--text-key", "body", "--tokenizer",
                        path("tokenizer")}));
  EXPECT_EQ(get("saved/tokenizer.json"), get("tokenizer/tokenizer.json"));
  test::expect_refusal("tokenize", flags("shards1"), "shards1: exists already");
  auto unreadable = flags("shards1");
  unreadable[1] = path("no tokenizer");
  test::expect_refusal("tokenize", unreadable, "shards1: exists already");  // found before anything is read
  auto wrong = flags("new");
  wrong[3] = "text";
  test::expect_refusal("tokenize", wrong, "b.jsonl:1: there is no \"text\" among body; give --text-key KEY");
  EXPECT_FALSE(fs::exists(path("new")));
}

TEST_F(TrainLmProgram, TwoRanksHaveTheLossesOfOne) {
  for (const int ranks : {1, 2}) {
    auto arguments = with(good(), "--metrics", path(concat("log.", ranks)));
    arguments.insert(arguments.end(), {"--no-shuffle", "--steps", "6"});
    for (const Ended& e : run(ranks, arguments)) ASSERT_EQ(e.status, 0) << e.err;
  }
  const auto one = losses("log.1"), two = losses("log.2");
  ASSERT_EQ(one.size(), 6u);
  ASSERT_EQ(two.size(), 6u);
  for (std::size_t i = 0; i < 6; ++i) EXPECT_NEAR(one[i], two[i], 2e-5);
}

TEST_F(TrainLmProgram, ReadsTextBelowAFolder) {
  fs::create_directory(path("text"));
  put("text/a.txt", std::string(500, 'a') + std::string(500, 'b'));
  const auto ended =
      run(1, {"--model", path("model.json"), "--config", path("ds.json"), "--data", path("text"), "--steps",
              "3", "--recompute", "--no-overlap", "--bucket-mb", "0.01"});
  EXPECT_EQ(ended[0].status, 0) << ended[0].err;
  EXPECT_NE(ended[0].out.find("1000 tokens"), std::string::npos) << ended[0].out;
}

TEST_F(TrainLmProgram, HelpIsShownOnce) {
  const auto ended = run(2, {"--help"});
  EXPECT_EQ(ended[0].status, 0);
  EXPECT_NE(ended[0].out.find("--no-shuffle"), std::string::npos);
  EXPECT_EQ(ended[1].out, "");
}

TEST_F(TrainLmProgram, MissingFilesAreRefused) {
  expect_refused(2, with(good(), "--model", path("none.json")), {path("none.json"), "no such file"});
  expect_refused(1, with(good(), "--config", path("none.json")), {path("none.json"), "cannot be opened"});
  expect_refused(1, with(good(), "--tokens", path("none.bin")), {path("none.bin"), "cannot be opened"});
  expect_refused(1, with(good(), "--init", path("none.st")), {path("none.st"), "cannot be opened"});
}

TEST_F(TrainLmProgram, WrongFlagsAreRefused) {
  auto arguments = good();
  arguments.push_back("--no-shufle");
  expect_refused(2, arguments, {"unknown flag --no-shufle", "did you mean --no-shuffle"});
  expect_refused(1, {"--model", path("model.json"), "--tokens", fixture + "tokens.bin"},
                 {"--config is required", "--learning-rate"});
  expect_refused(1, with(good(), "--strategy", "zero4"), {"zero4", "zero3"});
  expect_refused(1, with(good(), "--seq-len", "17"), {"--seq-len", "17", "16 positions"});
}

TEST_F(TrainLmProgram, WrongConfigurationsAreRefused) {
  const auto refused = [&](int ranks, const char* text, std::initializer_list<std::string> parts) {
    put("bad.json", text);
    expect_refused(ranks, with(good(), "--config", path("bad.json")), parts);
  };
  refused(2, R"({"train_batch_size": 3})", {"train_batch_size", "3", "2 ranks", "2 or 4"});
  refused(1, R"({"train_batch_size": 4, "optimizer": {"type": "Adan"}})", {"Adan", "AdamW"});
  refused(1, R"({"train_batch_size": 4, "gradient_cliping": 1})", {"gradient_cliping", "gradient_clipping"});
  refused(1, R"({"train_batch_size": 4, "communication_data_type": "fp17"})",
          {"communication_data_type", "fp17"});
}

TEST_F(TrainLmProgram, WrongModelsAreRefused) {
  const auto refused = [&](const char* text, std::initializer_list<std::string> parts) {
    put("bad.json", text);
    expect_refused(1, with(good(), "--model", path("bad.json")), parts);
  };
  refused(R"({"n_layer": 1, "n_head": 3, "n_embd": 16, "n_positions": 16, "vocab_size": 256})",
          {"bad.json", "n_head"});
  refused(R"({"n_head": 2, "n_embd": 16, "n_positions": 16, "vocab_size": 256})",
          {"bad.json", "n_layer", "missing"});
  refused(
      R"({"n_layer": 1, "n_head": 2, "n_embd": 16, "n_positions": 16, "vocab_size": 256, "activation_function": "relu"})",
      {"activation_function", "gelu_new", "relu"});
  refused(R"({"n_layer": "one"})", {"n_layer", "whole number"});
  refused("{", {"bad.json", "not valid JSON"});
  put("bad.json", get("model.json") + std::string("\0{}", 3));
  expect_refused(1, with(good(), "--model", path("bad.json")), {"bad.json", "is zero"});
}

TEST_F(TrainLmProgram, TokensBeyondTheVocabularyAreRefused) {
  put("small.json", R"({"n_layer": 1, "n_head": 2, "n_embd": 16, "n_positions": 16, "vocab_size": 100})");
  expect_refused(2, with(good(), "--model", path("small.json")),
                 {"tokens.bin", "position", "vocab_size 100"});
  put("few.bin", "abcd");
  expect_refused(1, with(good(), "--tokens", path("few.bin")), {"few.bin", "too few"});
}

TEST_F(TrainLmProgram, DamagedCheckpointsAreRefused) {
  const std::vector<SafetensorsSpec> tensors{{"transformer.wte.weight", {256, 8}}};
  {
    SafetensorsWriter writer(path("m.safetensors"), tensors);
    writer.write(std::vector<float>(2048));
    writer.finish();
  }
  expect_refused(
      2, with(good(), "--init", path("m.safetensors")),
      {"m.safetensors", "missing: transformer.wpe.weight", "[256, 8] where the model has [256, 16]"});
  fs::resize_file(path("m.safetensors"), 4000);
  expect_refused(1, with(good(), "--init", path("m.safetensors")), {"m.safetensors", "cut off"});
  put("m.safetensors", std::string("\xff\xff\xff\xff\0\0\0\0", 8) + "{}");
  expect_refused(1, with(good(), "--init", path("m.safetensors")), {"m.safetensors", "header"});
}

TEST_F(TrainLmProgram, AReadErrorOnOneRankStopsAll) {
  // A relative path, and rank 1 runs in another folder.
  fs::copy_file(fixture + "tokens.bin", path("tokens.bin"));
  const int port = free_port();
  const auto arguments = with(good(), "--tokens", "tokens.bin");
  const fs::path before = fs::current_path();
  fs::current_path(path());
  const pid_t zero = start(0, 2, port, arguments);
  fs::current_path(path("out"));
  const pid_t one = start(1, 2, port, arguments);
  fs::current_path(before);
  for (const pid_t child : {zero, one}) {
    int status = 0;
    ::waitpid(child, &status, 0);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 2) << status;
  }
  EXPECT_NE(get("stderr.0").find("train_lm: rank 1: tokens.bin: cannot be opened"), std::string::npos)
      << get("stderr.0");
  EXPECT_EQ(get("stderr.1"), "");
}

TEST_F(TrainLmProgram, ARankThatIsKilledBeforeTheRunIsNoWrongInput) {
  ASSERT_EQ(::mkfifo(path("never.json").c_str(), 0600), 0);
  fs::create_symlink(path("never.json"),
                     path("link.json"));  // as those in /dev/fd; a pipe's own name is refused
  const int port = free_port();
  const pid_t zero = start(0, 2, port, good()),
              one = start(1, 2, port, with(good(), "--model", path("link.json")));
  // Rank 0 waits for the inputs of rank 1, which reads a pipe that nothing is written to.
  int pipe = -1;
  for (int i = 0; i < 1000 && pipe < 0; ++i) {
    ::usleep(10'000);
    pipe = ::open(path("never.json").c_str(), O_WRONLY | O_NONBLOCK);
  }
  EXPECT_GE(pipe, 0) << "rank 1 does not read";
  ::kill(one, SIGKILL);
  int status = 0;
  ASSERT_EQ(::waitpid(one, &status, 0), one);
  ::close(pipe);
  EXPECT_TRUE(WIFSIGNALED(status)) << get("stderr.1");
  ASSERT_EQ(::waitpid(zero, &status, 0), zero);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 1) << status;
  EXPECT_NE(get("stderr.0").find("rank 1"), std::string::npos) << get("stderr.0");
}

TEST_F(TrainLmProgram, RanksThatWereStartedDifferentlyAreRefused) {
  const auto refused = [&](const std::string& flag, const std::string& other,
                           std::initializer_list<std::string> parts) {
    const int port = free_port();
    auto arguments = good();
    arguments.insert(arguments.end(), {"--save", path("out/model"), "--steps", "2"});
    const pid_t zero = start(0, 2, port, arguments), one = start(1, 2, port, with(arguments, flag, other));
    for (const pid_t child : {zero, one}) {
      int status = 0;
      ::waitpid(child, &status, 0);
      EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 2) << flag << ": " << status;
    }
    const std::string said = get("stderr.0");
    EXPECT_EQ(std::ranges::count(said, '\n'), 1) << said;
    for (const auto& part : parts) EXPECT_NE(said.find(part), std::string::npos) << said << " lacks " << part;
    EXPECT_EQ(get("stderr.1"), "");
    EXPECT_TRUE(fs::is_empty(path("out")));
  };
  refused("--seed", "7", {"--seed is 0 on rank 0 and 7 on rank 1"});
  refused("--steps", "3", {"--steps is 2 on rank 0 and 3 on rank 1"});
  refused("--checkpoint-dir", path("out/a"),
          {"output_dir is not given on rank 0 and " + path("out/a") + " on"});
  refused("--resume", path("out/a"),
          {"resume_from_checkpoint is not given on rank 0 and " + path("out/a") + " on rank 1"});
  put("other.json", R"({"train_batch_size": 4, "optimizer": {"type": "AdamW", "params": {"lr": 0.02}},)"
                    R"( "zero_optimization": {"stage": 3}})");
  refused("--config", path("other.json"),
          {"--config /optimizer/params/lr is 0.01 on rank 0 and 0.02 on rank 1"});
  std::string tokens = read_text_file(fixture + "tokens.bin");
  tokens[9000] = static_cast<char>(tokens[9000] ^ 1);
  put("tokens.bin", tokens);
  refused("--tokens", path("tokens.bin"), {"the hash of the tokens", "on rank 1"});
  put("tokens.bin", tokens.substr(0, 9000));
  refused("--tokens", path("tokens.bin"), {"the number of tokens is 10241 on rank 0 and 4500 on rank 1"});
}

/// Copies a checkpoint with another value for its last element.
void copy_with_last(const std::string& from, const std::string& to, float last) {
  const auto file = open_safetensors(from);
  std::vector<SafetensorsSpec> tensors;
  for (const auto& entry : file.tensors()) tensors.push_back({entry.name, entry.shape});
  SafetensorsWriter writer(to, tensors);
  for (const auto& entry : file.tensors()) {
    std::vector<float> values(entry.count);
    file.read_f32(entry, 0, values);
    if (&entry == &file.tensors().back()) values.back() = last;
    writer.write(values);
  }
  writer.finish();
}

TEST_F(TrainLmProgram, RanksWithOtherCheckpointsAreRefused) {
  auto arguments = good();
  arguments.insert(arguments.end(), {"--steps", "0", "--save", path("start")});
  ASSERT_EQ(run(1, arguments)[0].status, 0);
  copy_with_last(path("start/model.safetensors"), path("other.safetensors"), 0.25f);
  arguments = with(good(), "--init", path("start/model.safetensors"));
  const int port = free_port();
  const pid_t zero = start(0, 2, port, arguments),
              one = start(1, 2, port, with(arguments, "--init", path("other.safetensors")));
  for (const pid_t child : {zero, one}) {
    int status = 0;
    ::waitpid(child, &status, 0);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 2) << status;
  }
  EXPECT_NE(get("stderr.0").find("the hash of --init"), std::string::npos) << get("stderr.0");
}

TEST_F(TrainLmProgram, ARunThatDivergesStopsAndSavesNothing) {
  put("bad.json", R"({"train_batch_size": 4, "optimizer": {"type": "AdamW", "params": {"lr": 1e25}}})");
  fs::create_directory(path("model"));
  put("model/model.safetensors", "good");
  auto arguments = with(good(), "--config", path("bad.json"));
  arguments.insert(arguments.end(),
                   {"--steps", "5", "--save", path("model"), "--metrics", path("log.jsonl")});
  const auto ended = run(2, arguments);
  for (const Ended& e : ended) EXPECT_EQ(e.status, 1) << e.err;
  EXPECT_NE(ended[0].err.find("step 2: training diverged: loss "), std::string::npos) << ended[0].err;
  EXPECT_NE(ended[0].err.find("nan: the loss is not finite, "), std::string::npos) << ended[0].err;
  EXPECT_EQ(std::ranges::count(ended[0].err, '\n'), 1) << ended[0].err;
  EXPECT_EQ(ended[1].err, "");
  EXPECT_EQ(get("model/model.safetensors"), "good");
  const std::string log = get("log.jsonl");
  EXPECT_EQ(std::ranges::count(log, '\n'), 2) << log;
}

TEST_F(TrainLmProgram, ARunInBf16WhoseLossIsNotFiniteStopsAndSavesNothing) {
  put("bad.json", R"({"train_batch_size": 4, "bf16": {"enabled": true},
                      "optimizer": {"type": "AdamW", "params": {"lr": 1e30}}})");
  fs::create_directory(path("model"));
  put("model/model.safetensors", "good");
  auto arguments = with(good(), "--config", path("bad.json"));
  arguments.insert(arguments.end(),
                   {"--steps", "5", "--save", path("model"), "--metrics", path("log.jsonl")});
  const auto ended = run(2, arguments);
  for (const Ended& e : ended) EXPECT_EQ(e.status, 1) << e.err;
  EXPECT_NE(ended[0].err.find("the loss is not finite"), std::string::npos) << ended[0].err;
  EXPECT_EQ(ended[1].err, "");
  EXPECT_EQ(get("model/model.safetensors"), "good");
}

TEST_F(TrainLmProgram, NonfiniteWeightsAreSavedOnRequestOnly) {
  auto arguments = good();
  arguments.insert(arguments.end(), {"--steps", "0", "--save", path("model")});
  ASSERT_EQ(run(1, arguments)[0].status, 0);
  copy_with_last(path("model/model.safetensors"), path("nan.safetensors"), NAN);
  const std::string before = get("model/model.safetensors");
  arguments = with(arguments, "--init", path("nan.safetensors"));
  const auto ended = run(2, arguments);
  for (const Ended& e : ended) EXPECT_EQ(e.status, 1) << e.err;
  for (const char* part : {"nan.safetensors: ", "is nan"})
    EXPECT_NE(ended[0].err.find(part), std::string::npos) << ended[0].err;
  EXPECT_EQ(get("model/model.safetensors"), before);
  arguments.push_back("--save-nonfinite");
  ASSERT_EQ(run(1, arguments)[0].status, 0);
  EXPECT_NE(get("model/model.safetensors"), before);
}

TEST_F(TrainLmProgram, AModelIsSavedIn16BitsAndInShardsOnRequest) {
  auto arguments = good();
  arguments.insert(arguments.end(), {"--steps", "0", "--save", path("model"), "--save-dtype", "bf16",
                                     "--max-shard-size", "2KB"});
  for (const Ended& e : run(2, arguments)) EXPECT_EQ(e.status, 0) << e.err;
  EXPECT_NE(get("model/config.json").find("\"dtype\": \"bfloat16\""), std::string::npos);
  EXPECT_NE(get("model/model.safetensors.index.json").find("model-00002-of-"), std::string::npos);
  const auto ended = run(1, with(arguments, "--max-shard-size", "2 pieces"));
  EXPECT_EQ(ended[0].status, 2);
  EXPECT_NE(ended[0].err.find("--max-shard-size"), std::string::npos) << ended[0].err;
}

TEST_F(TrainLmProgram, OutputsThatCannotBeWrittenAreRefused) {
  put("file", "");
  auto arguments = good();
  arguments.insert(arguments.end(), {"--metrics", path("none/metrics.jsonl")});
  auto ended = run(2, arguments);
  for (const Ended& e : ended) EXPECT_EQ(e.status, 2) << e.err;
  EXPECT_NE(ended[0].err.find("there is no folder"), std::string::npos) << ended[0].err;
  arguments = good();
  arguments.insert(arguments.end(), {"--save", path("file/model")});
  ended = run(2, arguments);
  for (const Ended& e : ended) EXPECT_EQ(e.status, 2) << e.err;
  EXPECT_NE(ended[0].err.find("is not a folder"), std::string::npos) << ended[0].err;
}

}  // namespace
}  // namespace rz
