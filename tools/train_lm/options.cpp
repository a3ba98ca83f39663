#include "tools/train_lm/options.h"

#include <array>

#include "tools/lm_flags/lm_flags.h"

namespace rz::train_lm {
namespace {

using lm::speed_group;

constexpr const char* description =
    "Trains a language model, e.g. GPT-2 or Llama, on text or tokens over the ranks that a launcher\n"
    "starts, or alone.\n\n"
    "  train_lm --model config.json --config ds.json --data .          one process\n"
    "  rzrun -n 2 train_lm --model config.json --config ds.json …      two ranks on this machine\n"
    "  torchrun --nproc-per-node 2 --no-python -- train_lm …           the same, with its options behind --\n"
    "  mpirun -n 2 and srun start it as well: the rank is found in their environment.";

constexpr const char* footer =
    "The DeepSpeed configuration decides batch sizes, clipping, optimizer, schedule and ZeRO stage, e.g.\n"
    "  {\"train_batch_size\": 8, \"zero_optimization\": {\"stage\": 3},\n"
    "   \"optimizer\": {\"type\": \"AdamW\", \"params\": {\"lr\": 1e-3}}}\n"
    "Without --config it is that of RZ_CONFIG, a path or JSON, which rzrun --config_file sets. Without\n"
    "one: --learning-rate 1e-3 --per-device-train-batch-size 8 --strategy zero3, and AdamW.\n\n"
    "Exit status: 0 done, 143 stopped by SIGTERM, Ctrl-C or the end of the allocation, 2 an input is\n"
    "wrong or differs over the ranks (nothing was written), 1 anything else, e.g. a loss that is not\n"
    "finite (the model is not saved).";

void add_data(CommandLine& line, Options& o) {
  line.add_option(
          "--init", o.init,
          "Start from these weights: safetensors, a state dict of PyTorch, a folder of Hugging Face or "
          "DeepSpeed, or a checkpoint; default: random weights from --seed")
      .type_name("MODEL.safetensors")
      .group("Inputs");
  line.add_option(
          "--adapter", o.adapter,
          "Start from this adapter of PEFT: a folder with adapter_config.json; without ringzero.lora and "
          "--lora-target-modules its options hold")
      .type_name("FOLDER")
      .group("Inputs");
  const auto data = line.add_option("--data", o.data,
                                    "Text: a file, a .jsonl of records, all such below a folder, a pattern, "
                                    "or several: A,B; by the "
                                    "model's tokenizer, or as bytes for a model of vocab_size 256")
                        .type_name("FILE|DIR")
                        .group("Inputs");
  line.add_option("--tokens", o.tokens,
                  "Tokens instead of --data: .npy, llm.c's .bin or little-endian uint16; a file, a folder, "
                  "also of the program tokenize, or a pattern, or several: A,B")
      .type_name("TOKENS")
      .excludes(data)
      .group("Inputs");
  line.add_option("--tokens-dtype", o.tokens_dtype,
                  "Of tokens without a header: auto is uint16, unless they look like another type")
      .type_name("DTYPE")
      .one_of({"auto", "uint16", "uint32", "int16", "int32", "uint64", "int64"})
      .group("Inputs");
}

void add_text(CommandLine& line, Options& o) {
  constexpr const char* group = "Text and documents";
  line.add_option("--tokenizer", o.tokenizer,
                  "Tokenizer of the text: a folder with tokenizer.json, or with vocab.json and merges.txt; "
                  "default: that of the folder of --model, else of --init, else of --tokens")
      .type_name("FOLDER")
      .group(group);
  line.add_option("--text-key", o.text_key, "Key of the text in records of .jsonl and .ndjson; default text")
      .type_name("KEY")
      .group(group);
  line.add_option("--prompt-key", o.prompt_key,
                  "A record is a prompt and its answer, of which the answer is learnt: key of the prompt")
      .type_name("KEY")
      .group(group);
  line.add_option("--answer-key", o.answer_key, "Key of the answer").type_name("KEY").group(group);
  line.add_option(
          "--long-samples", o.long_samples,
          "Prompt and answer of more than --seq-len + 1 tokens: cut (default; the prompt at its front, "
          "then the answer at its end) or refuse")
      .type_name("WHICH")
      .one_of({"cut", "refuse"})
      .group(group);
  line.add_flag(
          "--document-mask", o.document_mask,
          "Attention does not cross the end of a document within a sample: the end token of the tokenizer")
      .group(group);
}

void add_training(CommandLine& line, Options& o) {
  line.add_option("--steps", o.steps, "Updates, as --max-steps; default: one pass over the data")
      .type_name("N")
      .within(std::int64_t{0}, std::int64_t{1} << 40)
      .group("Training");
  line.add_option("--seed", o.seed,
                  "Seed of the initial weights, the order of samples, and the text of --sample; default 0")
      .type_name("S")
      .group("Training");
  line.add_flag("!--no-shuffle", o.shuffle, "Update s uses samples s·B … s·B+B-1, a contiguous part per rank")
      .group("Training");
  line.add_flag("!--no-graph", o.graph,
                "On a GPU: start each kernel by itself, not all of an update as a CUDA graph")
      .group("Training");
}

void add_outputs(CommandLine& line, Options& o) {
  line.add_option("--metrics", o.metrics,
                  "A JSON object an update: step, loss, grad_norm, lr, tokens_per_second, …")
      .type_name("METRICS.jsonl")
      .group("Outputs");
  line.add_option("--tensorboard", o.tensorboard,
                  "Write event files of TensorBoard to this folder; also: the section tensorboard")
      .type_name("DIR")
      .group("Outputs");
  line.add_option("--trace", o.trace,
                  "Write a timeline of computation, communication and memory of all ranks, for "
                  "ui.perfetto.dev or chrome://tracing; also: ringzero.trace")
      .type_name("TRACE.json")
      .group("Outputs");
  line.add_option("--trace-steps", o.trace_steps,
                  "The updates A to B in it, counted from 1 in this process; default 4:5")
      .type_name("A:B")
      .group("Outputs");
  line.add_option(
          "--track", o.track,
          "Start sh -c COMMAND and send it a JSON object per line: configuration, updates, evaluations, "
          "checkpoints; tools/train_lm/report/tracker.h has one for Weights & Biases")
      .type_name("COMMAND")
      .group("Outputs");
  line.add_flag(
          "--plan", o.plan,
          "Predict memory and traffic as the program plan does, and print them beside what was measured")
      .group("Outputs");
  line.add_option("--save", o.save,
                  "Write model.safetensors, config.json, ds_config.json and the tokenizer there at the end")
      .type_name("DIR")
      .group("Outputs");
  line.add_option("--save-dtype", o.save_dtype,
                  "Of the weights of --save, rounded to nearest even; default f32")
      .one_of({"f32", "bf16", "f16"})
      .group("Outputs");
  line.add_option("--max-shard-size", o.max_shard_size, "Bytes of weights in a file of --save; default 50GB")
      .type_name("SIZE")
      .group("Outputs");
  line.add_option(
          "--save-adapter", o.save_adapter,
          "Write adapter_model.safetensors and adapter_config.json there at the end; --save merges the "
          "adapter into the model")
      .type_name("DIR")
      .group("Outputs");
  line.add_flag("--save-nonfinite", o.save_nonfinite,
                "Read and save weights, also in checkpoints, even if some are infinite or NaN")
      .group("Outputs");
}

void add_sample(CommandLine& line, Options& o) {
  line.add_option("--sample", o.sample, "At the end, or without --data, continue this text")
      .type_name("TEXT")
      .group("Outputs");
  line.add_option("--sample-tokens", o.sample_tokens, "Length of that continuation; default 200")
      .type_name("N")
      .within(1, 1 << 20)
      .group("Outputs");
  line.add_option("--sample-temperature", o.sample_temperature,
                  "Divides the logits before a token is drawn; 0: the likeliest token; default 0.8")
      .type_name("X")
      .within(0.0, 100.0)
      .group("Outputs");
  line.add_option("--sample-top-k", o.sample_top_k,
                  "Draw from the K likeliest tokens only; 0: from all; default 0")
      .type_name("K")
      .within(0, 1 << 20)
      .group("Outputs");
}

void add_evaluation(CommandLine& line, Options& o) {
  constexpr const char* group = "Evaluation (with --eval-steps)";
  const auto data =
      line.add_option("--eval-data", o.eval_data, "What is evaluated: as --data, or as --tokens")
          .type_name("FILE|DIR")
          .group(group);
  line.add_option("--validation-split-percentage", o.validation_split_percentage,
                  "Evaluate the last P % of the samples of the data, and train on the others")
      .type_name("P")
      .within(0.001, 99.0)
      .excludes(data)
      .group(group);
}

void add_speed(CommandLine& line, Options& o) {
  line.add_option("--threads", o.threads,
                  "Per rank; default: the processors it may use, divided by the ranks that share them")
      .type_name("N")
      .within(1, 1024)
      .group(speed_group);
  line.add_option("--device", o.device,
                  "Device of the model: host (default), cuda (this machine's devices in turn), or cuda:N")
      .type_name("NAME")
      .group(speed_group);
  line.add_option("--backend", o.backend,
                  "Implementation of the collectives: auto, native, mpi, nccl or peer_cuda; default "
                  "RZ_BACKEND or auto")
      .type_name("NAME")
      .group(speed_group);
}

}  // namespace

ParsedOptions parse_options(int argc, const char* const* argv) {
  ParsedOptions parsed;
  constexpr std::array groups{ArgumentGroup::configuration, ArgumentGroup::loop, ArgumentGroup::checkpoint};
  CommandLine line(description, "train_lm", footer);
  line.column_width(34);
  std::string decay;
  add_run_flags(line, parsed.options, decay);
  add_data(line, parsed.options);
  add_text(line, parsed.options);
  add_training(line, parsed.options);
  add_outputs(line, parsed.options);
  add_sample(line, parsed.options);
  add_evaluation(line, parsed.options);
  add_speed(line, parsed.options);
  parsed.help = parse_words(line, parsed.options, groups, argc, argv);
  if (!parsed.help.empty()) return parsed;
  read_words(parsed.options, decay);
  complete(parsed.options);
  return parsed;
}

}  // namespace rz::train_lm
