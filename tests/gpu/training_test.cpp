// Runs: ci long operators

// GPT-2 trained on devices: PyTorch's course in float64 for every strategy and number of ranks, and the same
// bits whatever the schedule. Texts of models there are those of the host.

#include "tests/lab/training.h"

#include <algorithm>
#include <memory>

#include "autograd_lite/models/generate.h"
#include "autograd_lite/models/gpt2.h"
#include "autograd_lite/models/gpt_neox.h"
#include "autograd_lite/models/llama.h"
#include "autograd_lite/nn/init.h"
#include "comm/device/allocate.h"
#include "comm/device/cuda_runtime.h"
#include "tests/gpu/on_card.h"
#include "tests/gpu/on_device.h"
#include "tests/support/folder.h"

namespace rz::test {
namespace {

using Setting = std::tuple<std::string, int, StrategyKind>;

/// An update takes the emulated device a second. One setting there goes to the end; the others, which have
/// the same bits, run three updates.
bool goes_all_the_way(const Setting& setting) {
  return !emulated_device || setting == Setting{"peer_cuda", 2, StrategyKind::zero3};
}

class Training : public OnDevice, public testing::WithParamInterface<Setting> {};

TEST_P(Training, FollowsPyTorchInFloat64) {
  const auto& [backend, ranks, kind] = GetParam();
  if (backend == "nccl" && !emulated_device)
    GTEST_SKIP() << "NCCL needs a process a rank on a card of its own; gpu_nccl_processes_test";
  const TinyCase c = tiny_case("tiny");
  const Folder folder;
  lab::Gpt gpt = lab::of_case(c);
  if (goes_all_the_way(GetParam())) {  // also that its initial values come from a file
    gpt.weights = folder / "start.safetensors";
    write_tiny_start(c.config, gpt.weights);
  }
  lab::Run run{.model = lab::gpt(gpt), .strategy = kind, .ranks = ranks};
  run.updates = checks_addresses ? 1 : goes_all_the_way(GetParam()) ? c.steps : 3;
  run.comm = [on = backend](int rank) { return on_card(rank, on); };
  expect_close(lab::train(run).updates, c);
}

std::string setting_name(const testing::TestParamInfo<Setting>& info) {
  return concat(std::get<0>(info.param), "_ranks", std::get<1>(info.param), "_",
                name(std::get<2>(info.param)));
}
using Kinds = std::vector<StrategyKind>;
INSTANTIATE_TEST_SUITE_P(
    Peers, Training,
    testing::Combine(testing::Values("peer_cuda"),
                     testing::ValuesIn(checks_addresses ? std::vector{2} : std::vector{1, 2, 4}),
                     testing::ValuesIn(checks_addresses
                                           ? Kinds{StrategyKind::zero3}
                                           : Kinds(std::begin(lab::strategies), std::end(lab::strategies)))),
    setting_name);
INSTANTIATE_TEST_SUITE_P(Others, Training,
                         testing::Combine(testing::Values("native", "nccl"), testing::Values(2),
                                          testing::ValuesIn(checks_addresses ? Kinds{StrategyKind::zero3}
                                                                             : Kinds{StrategyKind::ddp,
                                                                                     StrategyKind::zero3})),
                         setting_name);

// ---- texts

std::unique_ptr<LanguageModel> small_model(const std::string& kind) {
  if (kind == "gpt2")
    return std::make_unique<Gpt2>(
        Gpt2Config{.n_layer = 2, .n_head = 2, .n_embd = 16, .n_positions = 12, .vocab_size = 11});
  if (kind == "gpt_neox")
    return std::make_unique<GptNeox>(GptNeoxConfig{.vocab_size = 11,
                                                   .hidden_size = 16,
                                                   .intermediate_size = 24,
                                                   .num_hidden_layers = 2,
                                                   .num_attention_heads = 2,
                                                   .max_position_embeddings = 12});
  return std::make_unique<Llama>(LlamaConfig{.vocab_size = 11,
                                             .hidden_size = 16,
                                             .intermediate_size = 24,
                                             .num_hidden_layers = 2,
                                             .num_attention_heads = 4,
                                             .num_key_value_heads = 2,
                                             .head_dim = 6,
                                             .max_position_embeddings = 12,
                                             .sliding_window = 4,
                                             .max_window_layers = 1});
}

using Texts = std::vector<std::vector<std::int32_t>>;

/// Likely texts, far from uniform, by a model with values of its own on the stream's device.
Texts texts_on(const Stream& stream, const std::string& kind, bool use_cache) {
  const auto model = small_model(kind);
  allocate_parameters(*model, allocator_on(stream.device()));
  for (Parameter* p : model->parameters()) {
    std::vector<float> values(p->count());
    init_slice(*p, values, 0, 3);
    if (p->shape.dims() == 2)
      for (float& x : values) x *= 10;
    p->value.assign(std::span<const float>(values), stream);
  }
  Tape tape(stream);
  const Texts prompts{{4, 7, 1, 9, 0}, {2}, {3, 3, 8}};
  return generate(*model, tape, prompts, {.max_new_tokens = 9, .temperature = 0, .use_cache = use_cache});
}

class Generation : public OnDevice, public testing::WithParamInterface<const char*> {};

TEST_P(Generation, HasTheTextsOfTheHostWithACacheAndWithout) {
  const Texts expected = texts_on({}, GetParam(), false);
  for (const bool use_cache : {false, true}) EXPECT_EQ(texts_on(stream, GetParam(), use_cache), expected);
}
INSTANTIATE_TEST_SUITE_P(Models, Generation, testing::Values("gpt2", "llama", "gpt_neox"),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace rz::test
