// Runs: computes

// Training of a small GPT-2, compared with PyTorch's and our own double precision, for every strategy and
// number of ranks.

#include <gtest/gtest.h>

#include <map>

#include "sharding/checkpoint/safetensors.h"
#include "sharding/io/json.h"
#include "tests/support/reference_gpt2.h"
#include "tests/support/shared_fixture.h"
#include "tests/support/train_tiny.h"

namespace rz::lm {
namespace {

using namespace test;  // NOLINT: the test's own

using Setting = std::tuple<const char*, int, StrategyKind>;
class Gpt2Tiny : public testing::TestWithParam<Setting> {};

TEST_P(Gpt2Tiny, TrainsAsPyTorchDoesInFloat64) {
  const auto& [name, ranks, kind] = GetParam();
  const TinyCase c = tiny_case(name);
  const Reports reports = train_tiny(name, ranks, kind, c.steps);
  ASSERT_EQ(reports.size(), c.loss.size());
  expect_close(reports, c);
}

std::string setting_name(const testing::TestParamInfo<Setting>& info) {
  return concat(std::get<0>(info.param), "_ranks", std::get<1>(info.param), "_",
                name(std::get<2>(info.param)));
}
INSTANTIATE_TEST_SUITE_P(Tied, Gpt2Tiny,
                         testing::Combine(testing::Values("tiny"), testing::Values(1, 2, 4, 8),
                                          testing::ValuesIn(strategies)),
                         setting_name);
INSTANTIATE_TEST_SUITE_P(ThreeRanks, Gpt2Tiny,
                         testing::Combine(testing::Values("tiny_batch12"), testing::Values(3),
                                          testing::ValuesIn(strategies)),
                         setting_name);
INSTANTIATE_TEST_SUITE_P(Untied, Gpt2Tiny,
                         testing::Combine(testing::Values("untied"), testing::Values(2),
                                          testing::Values(StrategyKind::ddp, StrategyKind::zero3)),
                         setting_name);

class Gpt2TinyMesh : public testing::TestWithParam<MeshSizes> {};

TEST_P(Gpt2TinyMesh, EveryStageTrainsAsPyTorchDoes) {
  const TinyCase c = tiny_case("tiny");
  const auto run = [&](StrategyKind kind, std::int64_t steps) {
    return train_tiny("tiny", GetParam().ranks(), kind, steps, [](TinyRun& run) {
      auto& ds = run.options.ds;
      ds.mesh = GetParam();
      ds.sizes.micro = ds.sizes.train / GetParam().data();
      run.each = [](Engine& engine) { ASSERT_EQ(engine.mesh().sizes(), GetParam()); };
    });
  };
  expect_close(run(StrategyKind::zero3, c.steps), c);
  const Reports ddp = run(StrategyKind::ddp, 3);
  for (const StrategyKind kind : {StrategyKind::zero1, StrategyKind::zero2, StrategyKind::zero3})
    expect_same_bits(ddp, run(kind, 3), name(kind));
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
  const Reports base = train_tiny(name, ranks, StrategyKind::ddp, 3);
  for (const StrategyKind kind : strategies)
    for (const auto& [bucket, overlap] : ways) {
      const Reports other =
          train_tiny(name, ranks, kind, 3, [&, bucket = bucket, overlap = overlap](TinyRun& run) {
            auto& o = run.options;
            o.strategy_options.reduce_bucket_size = bucket;
            o.strategy_options.first_bucket_size = std::min(bucket, o.strategy_options.first_bucket_size);
            o.strategy_options.overlap_comm = overlap;
          });
      expect_same_bits(base, other, concat(rz::name(kind), ", buckets of ", bucket, ", overlap ", overlap));
    }
}
INSTANTIATE_TEST_SUITE_P(Cases, Gpt2TinyBits,
                         testing::Values(std::tuple{"tiny", 2}, std::tuple{"tiny_batch12", 3},
                                         std::tuple{"untied", 4}),
                         [](const auto& info) {
                           return concat(std::get<0>(info.param), "_ranks", std::get<1>(info.param));
                         });

TEST(Gpt2TinyInvariance, BitsDoNotDependOnTheNumberOfThreads) {
  const auto with = [](int threads) {
    return train_tiny("tiny", 1, StrategyKind::ddp, 3, [&](TinyRun& run) {
      run.options.threads = threads;
      run.options.ds.world_size_invariant = true;
      run.c.config.embd_pdrop = run.c.config.attn_pdrop = run.c.config.resid_pdrop = 0.1;
    });
  };
  const Reports one = with(1);
  for (const int threads : {2, 3, 5, 8}) expect_same_bits(one, with(threads), concat(threads, " threads"));
}

/// With dropout; rank 0 saves the model.
struct InvariantRun {
  Reports reports;
  std::string model;
};

InvariantRun invariant_run(int ranks, StrategyKind kind) {
  const Folder folder;
  TinyCase c = tiny_case("tiny");
  c.config.embd_pdrop = c.config.attn_pdrop = c.config.resid_pdrop = 0.1;
  TinyRun run{c, ranks, tiny_options(c, ranks, kind), folder / "start.safetensors"};
  write_tiny_start(c.config, run.checkpoint);
  run.options.ds.sizes = {8, 1, 8 / ranks};
  run.options.ds.world_size_invariant = true;
  run.options.threads = std::max(1, 4 / ranks);  // as ranks of one node have them
  run.options.ds.gradient_clipping = 0.5;
  run.afterwards = [&](Engine& engine, Gpt2& model) { save(engine, model, folder / "model"); };
  InvariantRun out{train(run, 3), {}};
  out.model = read_text_file((folder / "model") + "/model.safetensors");
  return out;
}

TEST(Gpt2TinyInvariance, BitsDoNotDependOnTheNumberOfRanks) {
  const InvariantRun one = invariant_run(1, StrategyKind::ddp);
  for (const int ranks : {1, 2, 4, 8})
    for (const StrategyKind kind : strategies) {
      const InvariantRun other = invariant_run(ranks, kind);
      const std::string what = concat(rz::name(kind), " on ", ranks, " ranks");
      expect_same_bits(one.reports, other.reports, what);
      EXPECT_EQ(one.model, other.model) << what;
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
  const TinyCase c = tiny_case("tiny_batch12");
  TinyRun run{c, 3, tiny_options(c, 3, StrategyKind::zero2), folder / "start.safetensors"};
  write_tiny_start(c.config, run.checkpoint);
  run.options.ds.gradient_clipping = 0.5;
  const Reports reports = train(run, 2);
  auto reference = reference_of(run.checkpoint, 0.5);
  for (std::size_t s = 0; s < 2; ++s) {
    const auto update = reference.update(reference_samples(12 * s, 12));
    EXPECT_NEAR(reports[s].loss, update.loss, 2e-5);
    EXPECT_NEAR(reports[s].grad_norm, update.grad_norm, 1e-4 * update.grad_norm);
  }
}

TEST(Gpt2TinyVariants, AccumulationIsTheSameBatch) {
  const TinyCase c = tiny_case("tiny");
  for (const StrategyKind kind : strategies) {
    const auto halve = [](TinyRun& run) { run.options.ds.sizes = {8, 2, 2}; };
    expect_close(train_tiny("tiny", 2, kind, 5, halve), c);
  }
}

TEST(Gpt2TinyVariants, RecomputationChangesNoBit) {
  const auto recompute = [](TinyRun& run) { run.recompute = true; };
  expect_same_bits(train_tiny("tiny", 2, StrategyKind::zero3, 3),
                   train_tiny("tiny", 2, StrategyKind::zero3, 3, recompute), "recompute");
}

/// A first update that makes weights so large that losses are not finite from the second one on. (A run that
/// may skip updates ends, too: TrainLmProgram.ARunInBf16WhoseLossIsNotFiniteStopsAndSavesNothing.)
TEST(Gpt2TinyVariants, WhatIsNotFiniteIsADivergence) {
  const Folder folder;
  TinyRun run = smallest_run(StrategyKind::zero2, 2, folder);
  run.options.ds.optimizer->lr = 1e25;
  const Reports reports = train(run, 3);
  EXPECT_FALSE(!reports[0].diverged.empty() || reports[0].skipped);
  for (std::size_t i = 1; i < 3; ++i) {
    EXPECT_TRUE(reports[i].skipped) << "weights stay as they are";
    EXPECT_FALSE(reports[i].diverged.empty());
  }
}

// ---- saved, loaded, sampled

std::string bytes_of(const std::string& path) { return read_text_file(path); }

TEST(Gpt2TinyVariants, SavesAndSamplesTheSameWithEveryStrategy) {
  const Folder folder;
  const TinyCase c = tiny_case("tiny");
  write_tiny_start(c.config, folder / "start.safetensors");
  std::map<std::string, std::string> files;
  std::map<std::string, std::vector<std::int32_t>> samples;
  for (const StrategyKind kind : strategies) {
    TinyRun run{c, 2, tiny_options(c, 2, kind), folder / "start.safetensors"};
    run.afterwards = [&](Engine& engine, Gpt2& model) {
      const std::vector<std::int32_t> prompt = Tokenizer::bytes().encode("First Citizen:"),
                                      text = sample(engine, model, prompt,
                                                    {.max_new_tokens = 40, .temperature = 0.8, .top_k = 20});
      save(engine, model, folder / name(kind));
      if (engine.world().is_main()) samples[name(kind)] = text;
    };
    train(run, 2);
    files[name(kind)] = bytes_of((folder / name(kind)) + "/model.safetensors");
  }
  EXPECT_EQ(samples["ddp"].size(), 40u);
  for (const StrategyKind kind : strategies) {
    EXPECT_EQ(files[name(kind)], files["ddp"]) << name(kind);
    EXPECT_EQ(samples[name(kind)], samples["ddp"]) << name(kind);
  }
}

TEST(Gpt2TinyVariants, WhatIsLoadedIsSavedAgain) {
  const Folder folder;
  const TinyCase c = tiny_case("untied");
  write_tiny_start(c.config, folder / "start.safetensors");
  for (const StrategyKind kind : {StrategyKind::ddp, StrategyKind::zero3}) {
    TinyRun run{c, 3, tiny_options(c, 1, kind), folder / "start.safetensors"};
    run.options.ds.sizes = {9, 3, 1};
    run.afterwards = [&](Engine& engine, Gpt2& model) { save(engine, model, folder / "again"); };
    train(run, 0);
    EXPECT_EQ(bytes_of(folder / "again/model.safetensors"), bytes_of(folder / "start.safetensors"));
  }
}

// ---- the shared fixture

class Gpt2SharedFixture : public testing::TestWithParam<std::tuple<int, StrategyKind>> {};

TEST_P(Gpt2SharedFixture, TrainsAsPyTorchDoesInFloat64) {
  namespace fixture = test::shared_fixture;
  if (fixture::folder().empty()) GTEST_SKIP() << "no ../shared/fixtures/gpt2_tiny beside the sources";
  const auto& [ranks, kind] = GetParam();
  const Folder folder;
  const TinyCase c = tiny_case("tiny");
  TinyRun run{c, ranks, tiny_options(c, ranks, kind), folder / "start.safetensors"};
  run.tokens = fixture::folder() + "/tokens.bin";
  fixture::write_start(run.checkpoint);
  const fixture::Expected expected = fixture::expected();
  const Reports reports = train(run, 20);
  ASSERT_EQ(reports.size(), expected.loss.size());
  for (const UpdateReport& r : reports) {
    const auto bound = fixture::bound(expected, r.step);
    EXPECT_NEAR(r.loss, expected.loss[r.step], bound.loss) << "update " << r.step;
    EXPECT_NEAR(r.grad_norm / expected.grad_norm[r.step], 1, bound.relative_grad_norm) << "update " << r.step;
  }
}
INSTANTIATE_TEST_SUITE_P(Settings, Gpt2SharedFixture,
                         testing::Combine(testing::Values(1, 2, 4), testing::ValuesIn(strategies)),
                         [](const auto& info) {
                           return concat("ranks_", std::get<0>(info.param), "_",
                                         name(std::get<1>(info.param)));
                         });

}  // namespace
}  // namespace rz::lm
