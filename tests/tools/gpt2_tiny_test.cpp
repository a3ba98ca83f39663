// Training of a small GPT-2, held against PyTorch's and our own double precision, at every strategy and
// number of ranks.

#include "tests/support/gpt2_tiny.h"

#include <cstdlib>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>

#include "sharding/json.h"
#include "tests/support/ranks.h"
#include "tests/support/reference_gpt2.h"
#include "tests/support/shared_fixture.h"
#include "tools/train_gpt/model_config.h"
#include "tools/train_gpt/trainer.h"

namespace rz::train_gpt {
namespace {

namespace fs = std::filesystem;
using Reports = std::vector<UpdateReport>;
const std::string data_folder = RZ_SOURCE_DIR "/tests/data/gpt2_tiny/";

/// A case of tests/data/gpt2_tiny.
struct Case {
  Gpt2Config config;
  std::int64_t batch = 0, steps = 0;
  std::vector<double> loss, grad_norm;
};

Case read_case(const std::string& name) {
  const std::string path = data_folder + "expected.json";
  const nlohmann::json node = parse_json(read_text_file(path), path, JsonDialect::strict).at(name);
  Case c;
  c.config = {.n_layer = node["n_layer"],
              .n_head = node["n_head"],
              .n_embd = node["n_embd"],
              .n_positions = node["n_positions"],
              .vocab_size = node["vocab_size"],
              .tie_word_embeddings = node["tied"]};
  c.batch = node["batch"];
  c.steps = node["steps"];
  c.loss = node["float64"]["loss"].get<std::vector<double>>();
  c.grad_norm = node["float64"]["grad_norm"].get<std::vector<double>>();
  return c;
}

/// A folder of the test's own.
class Folder {
 public:
  Folder() : path_((fs::temp_directory_path() / "rz_gpt2_tiny_XXXXXX").string()) {
    EXPECT_NE(::mkdtemp(path_.data()), nullptr);
  }
  ~Folder() { fs::remove_all(path_); }
  std::string operator/(const char* name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

/// The initial weights of a case, as a checkpoint.
void write_start(const Gpt2Config& config, const std::string& path) {
  Gpt2 model(config);
  std::vector<SafetensorsOut> tensors;
  for (const Parameter* p : model.parameters()) {
    tensors.push_back({p->name, {}});
    for (int i = 0; i < p->shape.dims(); ++i) tensors.back().shape.push_back(p->shape[i]);
  }
  SafetensorsWriter writer(path, tensors);
  for (const Parameter* p : model.parameters()) {
    std::vector<float> values(p->count());
    for (std::size_t i = 0; i < values.size(); ++i)
      values[i] = test::gpt2_tiny_weight(p->name, p->shape.dims(), static_cast<int>(config.n_layer), i);
    writer.write(values);
  }
  writer.finish();
}

TrainerOptions options_of(const Case& c, int ranks, StrategyKind kind) {
  TrainerOptions o;
  o.strategy = kind;
  o.optimizer = {.lr = 1e-3, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1};
  o.batches = {
      .samples = 10240 / c.config.n_positions, .sizes = {c.batch, c.batch / ranks, 1}, .shuffle = false};
  o.seq_len = c.config.n_positions;
  return o;
}

struct Job {
  Case c;
  int ranks = 1;
  TrainerOptions options;
  std::string checkpoint;  ///< that it starts from
  std::string tokens = data_folder + "tokens.bin";
  std::function<void(Trainer&, int rank)> afterwards;  ///< on every rank
};

/// Runs the updates with threads as ranks; every rank must report the same losses and norms.
Reports train(const Job& run, std::int64_t steps) {
  std::vector<Reports> reports(static_cast<std::size_t>(run.ranks));
  test::run_ranks(run.ranks, [&](int rank, std::shared_ptr<Store> store) {
    Communicator comm = Communicator::connect(rank, run.ranks, std::move(store));
    Gpt2 model(run.c.config);
    Trainer trainer(model, Tokens::from_file(run.tokens), comm, run.options);
    trainer.load(Checkpoint(SafetensorsFile::open(run.checkpoint), model.parameters()));
    for (std::int64_t i = 0; i < steps; ++i)
      reports[static_cast<std::size_t>(rank)].push_back(trainer.update());
    if (run.afterwards) run.afterwards(trainer, rank);
  });
  for (const Reports& r : reports)
    for (std::size_t i = 0; i < reports[0].size(); ++i) {
      EXPECT_EQ(r.at(i).loss, reports[0][i].loss);
      EXPECT_EQ(r.at(i).grad_norm, reports[0][i].grad_norm);
    }
  return reports[0];
}

Reports train(const std::string& name, int ranks, StrategyKind kind, std::int64_t steps,
              const std::function<void(TrainerOptions&)>& change = {}) {
  const Folder folder;
  const Case c = read_case(name);
  Job run{c, ranks, options_of(c, ranks, kind), folder / "start.safetensors"};
  write_start(c.config, run.checkpoint);
  if (change) change(run.options);
  return train(run, steps);
}

void expect_close(const Reports& reports, const std::vector<double>& loss,
                  const std::vector<double>& grad_norm) {
  for (const UpdateReport& r : reports) {
    EXPECT_NEAR(r.loss, loss[r.step], 2e-5) << "update " << r.step;
    EXPECT_NEAR(r.grad_norm, grad_norm[r.step], 1e-4 * grad_norm[r.step]) << "update " << r.step;
  }
}

constexpr StrategyKind strategies[] = {StrategyKind::ddp, StrategyKind::zero1, StrategyKind::zero2,
                                       StrategyKind::zero3};

using Setting = std::tuple<const char*, int, StrategyKind>;
class Gpt2Tiny : public testing::TestWithParam<Setting> {};

TEST_P(Gpt2Tiny, TrainsAsPyTorchDoesInFloat64) {
  const auto& [name, ranks, kind] = GetParam();
  const Case c = read_case(name);
  const Reports reports = train(name, ranks, kind, c.steps);
  ASSERT_EQ(reports.size(), c.loss.size());
  expect_close(reports, c.loss, c.grad_norm);
}

std::string setting_name(const testing::TestParamInfo<Setting>& info) {
  return str(std::get<0>(info.param), "_ranks", std::get<1>(info.param), "_", name(std::get<2>(info.param)));
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

// ---- the same bits

void expect_same_bits(const Reports& a, const Reports& b, const std::string& what) {
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i) {
    EXPECT_EQ(a[i].loss, b[i].loss) << what << ", update " << i;
    EXPECT_EQ(a[i].grad_norm, b[i].grad_norm) << what << ", update " << i;
  }
}

class Gpt2TinyBits : public testing::TestWithParam<std::tuple<const char*, int>> {};

TEST_P(Gpt2TinyBits, DoNotDependOnStrategyBucketsOrOverlap) {
  const auto& [name, ranks] = GetParam();
  constexpr std::pair<std::size_t, bool> ways[] = {{20000, true}, {1 << 19, false}, {25 << 20, true}};
  const Reports base = train(name, ranks, StrategyKind::ddp, 3);
  for (const StrategyKind kind : strategies)
    for (const auto& [bucket, overlap] : ways) {
      const Reports other =
          train(name, ranks, kind, 3, [&, bucket = bucket, overlap = overlap](TrainerOptions& o) {
            o.strategy_options.bucket_bytes = bucket;
            o.strategy_options.first_bucket_bytes = std::min(bucket, o.strategy_options.first_bucket_bytes);
            o.strategy_options.overlap = overlap;
          });
      expect_same_bits(base, other, str(rz::name(kind), ", buckets of ", bucket, ", overlap ", overlap));
    }
}
INSTANTIATE_TEST_SUITE_P(Cases, Gpt2TinyBits,
                         testing::Values(std::tuple{"tiny", 2}, std::tuple{"tiny_batch12", 3},
                                         std::tuple{"untied", 4}),
                         [](const auto& info) {
                           return str(std::get<0>(info.param), "_ranks", std::get<1>(info.param));
                         });

// ---- against the double-precision reference

test::ReferenceGpt2 reference_of(const std::string& checkpoint, double clip) {
  test::ReferenceConfig config = test::shared_fixture::config();
  config.clip = clip;
  const auto file = SafetensorsFile::open(checkpoint);
  test::ReferenceParameters values;
  for (const auto& entry : file.tensors()) {
    std::vector<float> value(entry.count);
    file.read_f32(entry, 0, value);
    values[entry.name].assign(value.begin(), value.end());
  }
  return {config, std::move(values)};
}

std::vector<std::vector<int>> reference_samples(std::uint64_t first, std::size_t count) {
  const Tokens tokens = Tokens::from_file(data_folder + "tokens.bin");
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
  const Case c = read_case("tiny");
  write_start(c.config, folder / "start.safetensors");
  auto reference = reference_of(folder / "start.safetensors", 0);
  for (std::size_t s = 0; s < 2; ++s) {
    const auto update = reference.update(reference_samples(8 * s, 8));
    EXPECT_NEAR(update.loss, c.loss[s], 1e-12);
    EXPECT_NEAR(update.grad_norm, c.grad_norm[s], 1e-11);
  }
}

TEST(Gpt2TinyVariants, ClippingIsTheReferences) {
  const Folder folder;
  const Case c = read_case("tiny_batch12");
  Job run{c, 3, options_of(c, 3, StrategyKind::zero2), folder / "start.safetensors"};
  write_start(c.config, run.checkpoint);
  run.options.gradient_clipping = 0.5;
  const Reports reports = train(run, 2);
  auto reference = reference_of(run.checkpoint, 0.5);
  for (std::size_t s = 0; s < 2; ++s) {
    const auto update = reference.update(reference_samples(12 * s, 12));
    EXPECT_NEAR(reports[s].loss, update.loss, 2e-5);
    EXPECT_NEAR(reports[s].grad_norm, update.grad_norm, 1e-4 * update.grad_norm);
  }
}

TEST(Gpt2TinyVariants, AccumulationIsTheSameBatch) {
  const Case c = read_case("tiny");
  for (const StrategyKind kind : strategies) {
    const auto halve = [](TrainerOptions& o) { o.batches.sizes = {8, 2, 2}; };
    expect_close(train("tiny", 2, kind, 5, halve), c.loss, c.grad_norm);
  }
}

TEST(Gpt2TinyVariants, RecomputationChangesNoBit) {
  const Folder folder;
  const Case c = read_case("tiny");
  write_start(c.config, folder / "start.safetensors");
  Reports reports[2];
  for (const bool recompute : {false, true})
    test::run_ranks(2, [&](int rank, std::shared_ptr<Store> store) {
      Communicator comm = Communicator::connect(rank, 2, std::move(store));
      Gpt2 model(c.config);
      model.recompute_blocks = recompute;
      Trainer trainer(model, Tokens::from_file(data_folder + "tokens.bin"), comm,
                      options_of(c, 2, StrategyKind::zero3));
      trainer.load(Checkpoint(SafetensorsFile::open(folder / "start.safetensors"), model.parameters()));
      for (int i = 0; i < 3; ++i) {
        const UpdateReport r = trainer.update();
        if (rank == 0) reports[recompute].push_back(r);
      }
    });
  expect_same_bits(reports[0], reports[1], "recompute");
}

// ---- saved, loaded, sampled

std::string bytes_of(const std::string& path) { return read_text_file(path); }

TEST(Gpt2TinyVariants, SavesAndSamplesTheSameWithEveryStrategy) {
  const Folder folder;
  const Case c = read_case("tiny");
  write_start(c.config, folder / "start.safetensors");
  std::map<std::string, std::string> files, samples;
  for (const StrategyKind kind : strategies) {
    Job run{c, 2, options_of(c, 2, kind), folder / "start.safetensors"};
    run.afterwards = [&](Trainer& trainer, int rank) {
      const std::string text = trainer.sample("First Citizen:", 40);
      trainer.save(folder / name(kind));
      if (rank == 0) samples[name(kind)] = text;
    };
    train(run, 2);
    files[name(kind)] = bytes_of(folder / name(kind));
  }
  EXPECT_EQ(samples["ddp"].size(), 40u);
  for (const StrategyKind kind : strategies) {
    EXPECT_EQ(files[name(kind)], files["ddp"]) << name(kind);
    EXPECT_EQ(samples[name(kind)], samples["ddp"]) << name(kind);
  }
}

TEST(Gpt2TinyVariants, WhatIsLoadedIsSavedAgain) {
  const Folder folder;
  const Case c = read_case("untied");
  write_start(c.config, folder / "start.safetensors");
  for (const StrategyKind kind : {StrategyKind::ddp, StrategyKind::zero3}) {
    Job run{c, 3, options_of(c, 1, kind), folder / "start.safetensors"};
    run.options.batches.sizes = {9, 3, 1};
    run.afterwards = [&](Trainer& trainer, int) { trainer.save(folder / "again.safetensors"); };
    train(run, 0);
    EXPECT_EQ(bytes_of(folder / "again.safetensors"), bytes_of(folder / "start.safetensors"));
  }
}

// ---- the shared fixture

TEST(Gpt2SharedFixture, TrainsAsPyTorchDoesInFloat64) {
  namespace fixture = test::shared_fixture;
  if (fixture::folder().empty()) GTEST_SKIP() << "no ../shared/fixtures/gpt2_tiny beside the sources";
  const Folder folder;
  Case c = read_case("tiny");
  const fixture::Expected expected = fixture::expected();
  fixture::write_start(folder / "start.safetensors");
  for (const auto& [ranks, kind] : {std::pair{1, StrategyKind::ddp}, std::pair{2, StrategyKind::zero3}}) {
    Job run{c, ranks, options_of(c, ranks, kind), folder / "start.safetensors"};
    run.tokens = fixture::folder() + "/tokens.bin";
    expect_close(train(run, 20), expected.loss, expected.grad_norm);
  }
}

}  // namespace
}  // namespace rz::train_gpt
