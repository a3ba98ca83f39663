// Runs: computes

// Training of a small GPT-2, compared with PyTorch's and our own double precision, for every strategy and
// number of ranks.

#include <gtest/gtest.h>

#include <map>

#include "sharding/checkpoint/safetensors.h"
#include "sharding/lm/updates.h"
#include "sharding/tokenizer/tokenizer.h"
#include "tests/lab/training.h"
#include "tests/support/folder.h"
#include "tests/support/reference_gpt2.h"
#include "tests/support/shared_fixture.h"

namespace rz::lm {
namespace {

using namespace test;  // NOLINT: the test's own

lab::Run run_of(const lab::Gpt& gpt, int ranks, StrategyKind kind, std::int64_t updates) {
  return {.model = lab::gpt(gpt), .strategy = kind, .ranks = ranks, .updates = updates};
}
lab::Run run_of(const char* name, int ranks, StrategyKind kind, std::int64_t updates) {
  return run_of(lab::of_case(tiny_case(name)), ranks, kind, updates);
}

using Setting = std::tuple<const char*, int, StrategyKind>;
class Gpt2Tiny : public testing::TestWithParam<Setting> {};

TEST_P(Gpt2Tiny, TrainsAsPyTorchDoesInFloat64) {
  const auto& [name, ranks, kind] = GetParam();
  const TinyCase c = tiny_case(name);
  const auto updates = lab::train(run_of(name, ranks, kind, c.steps)).updates;
  ASSERT_EQ(updates.size(), c.loss.size());
  expect_close(updates, c);
}

std::string setting_name(const testing::TestParamInfo<Setting>& info) {
  return concat(std::get<0>(info.param), "_ranks", std::get<1>(info.param), "_",
                name(std::get<2>(info.param)));
}
INSTANTIATE_TEST_SUITE_P(Tied, Gpt2Tiny,
                         testing::Combine(testing::Values("tiny"), testing::Values(1, 2, 4, 8),
                                          testing::ValuesIn(lab::strategies)),
                         setting_name);
INSTANTIATE_TEST_SUITE_P(ThreeRanks, Gpt2Tiny,
                         testing::Combine(testing::Values("tiny_batch12"), testing::Values(3),
                                          testing::ValuesIn(lab::strategies)),
                         setting_name);
INSTANTIATE_TEST_SUITE_P(Untied, Gpt2Tiny,
                         testing::Combine(testing::Values("untied"), testing::Values(2),
                                          testing::Values(StrategyKind::ddp, StrategyKind::zero3)),
                         setting_name);

class Gpt2TinyMesh : public testing::TestWithParam<MeshSizes> {};

TEST_P(Gpt2TinyMesh, EveryStageTrainsAsPyTorchDoes) {
  const TinyCase c = tiny_case("tiny");
  const Folder folder;
  lab::Gpt gpt = lab::of_case(c);
  gpt.weights = folder / "start.safetensors";  // of which a rank reads its part
  write_tiny_start(c.config, gpt.weights);
  const auto train = [&](StrategyKind kind, std::int64_t updates) {
    lab::Run run = run_of(gpt, GetParam().ranks(), kind, updates);
    run.mesh = GetParam();
    return lab::train(run);
  };
  expect_close(train(StrategyKind::zero3, c.steps).updates, c);
  const lab::Trace ddp = train(StrategyKind::ddp, 3);
  for (const StrategyKind kind : {StrategyKind::zero1, StrategyKind::zero2, StrategyKind::zero3})
    EXPECT_EQ(train(kind, 3), ddp) << rz::name(kind);
}
INSTANTIATE_TEST_SUITE_P(Sizes, Gpt2TinyMesh,
                         testing::Values(MeshSizes{2, 2, 1}, MeshSizes{1, 1, 2}, MeshSizes{1, 1, 4},
                                         MeshSizes{1, 2, 2}, MeshSizes{2, 1, 2}),
                         [](const auto& info) {
                           const MeshSizes& s = info.param;
                           return concat("replicate", s.replicate, "_shard", s.shard, "_tp", s.tp);
                         });

// ---- the same bits

class Gpt2TinyBits : public testing::TestWithParam<std::tuple<const char*, int>> {};

TEST_P(Gpt2TinyBits, DoNotDependOnStrategyBucketsOrOverlap) {
  const auto& [name, ranks] = GetParam();
  constexpr std::pair<std::size_t, bool> ways[] = {{5000, true}, {1 << 17, false}, {25 << 18, true}};
  const lab::Trace base = lab::train(run_of(name, ranks, StrategyKind::ddp, 3));
  for (const StrategyKind kind : lab::strategies)
    for (const auto& [bucket, overlap] : ways) {
      lab::Run run = run_of(name, ranks, kind, 3);
      run.options = [&, bucket = bucket, overlap = overlap](EngineOptions& o) {
        o.ds_config->strategy.reduce_bucket_size = bucket;
        o.ds_config->strategy.overlap_comm = overlap;
      };
      EXPECT_EQ(lab::train(run), base)
          << rz::name(kind) << ", buckets of " << bucket << ", overlap " << overlap;
    }
}
INSTANTIATE_TEST_SUITE_P(Cases, Gpt2TinyBits,
                         testing::Values(std::tuple{"tiny", 2}, std::tuple{"tiny_batch12", 3},
                                         std::tuple{"untied", 4}),
                         [](const auto& info) {
                           return concat(std::get<0>(info.param), "_ranks", std::get<1>(info.param));
                         });

lab::Gpt tiny_with_dropout() {
  lab::Gpt gpt = lab::of_case(tiny_case("tiny"));
  gpt.config.embd_pdrop = gpt.config.attn_pdrop = gpt.config.resid_pdrop = 0.1;
  return gpt;
}
constexpr const char* invariant = R"("ringzero": {"deterministic": "world_size_invariant"})";

TEST(Gpt2TinyInvariance, BitsDoNotDependOnTheNumberOfThreads) {
  const auto with = [](int threads) {
    lab::Run run = run_of(tiny_with_dropout(), 1, StrategyKind::ddp, 3);
    run.keys = invariant;
    run.options = [=](EngineOptions& o) { o.threads = threads; };
    return lab::train(run);
  };
  const lab::Trace one = with(1);
  for (const int threads : {2, 3, 5, 8}) EXPECT_EQ(with(threads), one) << threads << " threads";
}

LanguageModel& language_model(Module& module) { return dynamic_cast<LanguageModel&>(module); }

/// With dropout; also the file of the model.
std::pair<lab::Trace, std::string> invariant_run(int ranks, StrategyKind kind) {
  const Folder folder;
  lab::Gpt gpt = tiny_with_dropout();
  gpt.clipping = 0.5;
  lab::Run run = run_of(gpt, ranks, kind, 3);
  run.keys = concat(invariant, R"(, "gradient_accumulation_steps": )", 8 / ranks);
  // As ranks of one node have them.
  run.options = [=](EngineOptions& o) { o.threads = std::max(1, 4 / ranks); };
  run.end = [&](Engine& engine, Module& model) { save(engine, language_model(model), folder / "model"); };
  return {lab::train(run), folder.get("model/model.safetensors")};
}

TEST(Gpt2TinyInvariance, BitsDoNotDependOnTheNumberOfRanks) {
  const auto one = invariant_run(1, StrategyKind::ddp);
  for (const int ranks : {1, 2, 4, 8})
    for (const StrategyKind kind : lab::strategies) {
      const auto other = invariant_run(ranks, kind);
      EXPECT_EQ(other.first, one.first) << rz::name(kind) << " on " << ranks << " ranks";
      EXPECT_TRUE(other.second == one.second) << rz::name(kind) << " on " << ranks << " ranks";
    }
}

// ---- against the double-precision reference

test::ReferenceGpt2 reference_of(const std::string& checkpoint, double clip) {
  test::ReferenceConfig config = test::shared_fixture::config();
  config.clip = clip;
  const auto file = open_safetensors(checkpoint);
  test::ReferenceParameters values;
  for (const auto& entry : file.tensors()) {
    std::vector<float> value(entry.count);
    file.read_f32(entry, 0, value);
    values[entry.name].assign(value.begin(), value.end());
  }
  return {config, std::move(values)};
}

std::vector<std::vector<int>> reference_samples(std::uint64_t first, std::size_t count) {
  const Tokens tokens = Tokens::from_file(tiny_tokens());
  std::vector<std::vector<int>> out;
  for (std::size_t i = 0; i < count; ++i) {
    std::vector<std::int32_t> sample(65);
    tokens.read((first + i) * 64, sample);
    out.emplace_back(sample.begin(), sample.end());
  }
  return out;
}

TEST(Gpt2Reference, IsPyTorchsFloat64) {
  const Folder folder;
  const TinyCase c = tiny_case("tiny");
  write_tiny_start(c.config, folder / "start.safetensors");
  auto reference = reference_of(folder / "start.safetensors", 0);
  for (std::size_t s = 0; s < 2; ++s) {
    const auto update = reference.update(reference_samples(8 * s, 8));
    EXPECT_NEAR(update.loss, c.loss[s], 1e-12);
    EXPECT_NEAR(update.grad_norm, c.grad_norm[s], 1e-11);
  }
}

TEST(Gpt2TinyVariants, ClippingIsTheReferences) {
  const Folder folder;
  lab::Gpt gpt = lab::of_case(tiny_case("tiny_batch12"));
  gpt.clipping = 0.5;
  write_tiny_start(gpt.config, folder / "start.safetensors");
  const auto updates = lab::train(run_of(gpt, 3, StrategyKind::zero2, 2)).updates;
  auto reference = reference_of(folder / "start.safetensors", 0.5);
  for (std::size_t s = 0; s < 2; ++s) {
    const auto update = reference.update(reference_samples(12 * s, 12));
    EXPECT_NEAR(updates[s].loss, update.loss, 2e-5);
    EXPECT_NEAR(updates[s].grad_norm, update.grad_norm, 1e-4 * update.grad_norm);
  }
}

TEST(Gpt2TinyVariants, AccumulationIsTheSameBatch) {
  for (const StrategyKind kind : lab::strategies) {
    lab::Run run = run_of("tiny", 2, kind, 5);
    run.keys = R"("gradient_accumulation_steps": 2)";
    expect_close(lab::train(run).updates, tiny_case("tiny"));
  }
}

TEST(Gpt2TinyVariants, RecomputationChangesNoBit) {
  lab::Run run = run_of("tiny", 2, StrategyKind::zero3, 3);
  const lab::Trace kept = lab::train(run);
  run.keys = R"("activation_checkpointing": {"partition_activations": true})";
  EXPECT_EQ(lab::train(run), kept);
}

/// A first update that makes weights so large that losses are not finite from the second one on. (A run that
/// may skip updates ends, too: TrainLmProgram.ARunInBf16WhoseLossIsNotFiniteStopsAndSavesNothing.)
TEST(Gpt2TinyVariants, WhatIsNotFiniteIsADivergence) {
  lab::Run run = run_of(lab::Gpt(), 2, StrategyKind::zero2, 3);
  run.keys = R"("optimizer": {"params": {"lr": 1e25}})";
  const auto updates = lab::train(run).updates;
  EXPECT_FALSE(!updates[0].diverged.empty() || updates[0].skipped);
  for (std::size_t i = 1; i < 3; ++i) {
    EXPECT_TRUE(updates[i].skipped) << "weights stay as they are";
    EXPECT_FALSE(updates[i].diverged.empty());
  }
}

// ---- saved, loaded, sampled

TEST(Gpt2TinyVariants, SavesAndSamplesTheSameWithEveryStrategy) {
  const Folder folder;
  std::map<std::string, std::string> files;
  std::map<std::string, std::vector<std::int32_t>> samples;
  for (const StrategyKind kind : lab::strategies) {
    lab::Run run = run_of("tiny", 2, kind, 2);
    run.end = [&](Engine& engine, Module& module) {
      LanguageModel& model = language_model(module);
      const std::vector<std::int32_t> prompt = Tokenizer::bytes().encode("First Citizen:"),
                                      text = sample(engine, model, prompt,
                                                    {.max_new_tokens = 40, .temperature = 0.8, .top_k = 20});
      save(engine, model, folder / name(kind));
      if (engine.world().is_main()) samples[name(kind)] = text;
    };
    lab::train(run);
    files[name(kind)] = folder.get(concat(name(kind), "/model.safetensors"));
  }
  EXPECT_EQ(samples["ddp"].size(), 40u);
  for (const StrategyKind kind : lab::strategies) {
    EXPECT_EQ(files[name(kind)], files["ddp"]) << name(kind);
    EXPECT_EQ(samples[name(kind)], samples["ddp"]) << name(kind);
  }
}

TEST(Gpt2TinyVariants, WhatIsLoadedIsSavedAgain) {
  const Folder folder;
  const TinyCase c = tiny_case("untied");
  write_tiny_start(c.config, folder / "start.safetensors");
  for (const StrategyKind kind : {StrategyKind::ddp, StrategyKind::zero3}) {
    lab::Run run =
        run_of({.config = c.config, .batch = 9, .weights = folder / "start.safetensors"}, 3, kind, 0);
    run.end = [&](Engine& engine, Module& model) { save(engine, language_model(model), folder / "again"); };
    lab::train(run);
    EXPECT_EQ(folder.get("again/model.safetensors"), folder.get("start.safetensors"));
  }
}

// ---- the shared fixture

class Gpt2SharedFixture : public testing::TestWithParam<std::tuple<int, StrategyKind>> {};

TEST_P(Gpt2SharedFixture, TrainsAsPyTorchDoesInFloat64) {
  namespace fixture = test::shared_fixture;
  if (fixture::folder().empty()) GTEST_SKIP() << "no ../shared/fixtures/gpt2_tiny beside the sources";
  const auto& [ranks, kind] = GetParam();
  const Folder folder;
  lab::Gpt gpt = lab::of_case(tiny_case("tiny"));
  gpt.weights = folder / "start.safetensors";
  gpt.tokens = fixture::folder() + "/tokens.bin";
  fixture::write_start(gpt.weights);
  const fixture::Expected expected = fixture::expected();
  const auto updates = lab::train(run_of(gpt, ranks, kind, 20)).updates;
  ASSERT_EQ(updates.size(), expected.loss.size());
  for (const UpdateReport& r : updates) {
    const auto bound = fixture::bound(expected, r.step);
    EXPECT_NEAR(r.loss, expected.loss[r.step], bound.loss) << "update " << r.step;
    EXPECT_NEAR(r.grad_norm / expected.grad_norm[r.step], 1, bound.relative_grad_norm) << "update " << r.step;
  }
}
INSTANTIATE_TEST_SUITE_P(Settings, Gpt2SharedFixture,
                         testing::Combine(testing::Values(1, 2, 4), testing::ValuesIn(lab::strategies)),
                         [](const auto& info) {
                           return concat("ranks_", std::get<0>(info.param), "_",
                                         name(std::get<1>(info.param)));
                         });

}  // namespace
}  // namespace rz::lm
