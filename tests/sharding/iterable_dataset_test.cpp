/// Streams of samples in shards: their order on any number of ranks and threads, and runs that are resumed.
#include "sharding/data/iterable_dataset.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <map>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "sharding/data/continuous_batch_sampler.h"
#include "sharding/data/loader.h"
#include "sharding/engine/engine.h"
#include "tests/lab/world.h"
#include "tests/support/error_of.h"
#include "tests/support/written_checkpoint.h"

namespace rz {
namespace {

using test::error_of;

/// Shard s has lengths[s] samples s · 1000, s · 1000 + 1, …, each with its epoch and draw.
struct Shards : IterableDataset {
  explicit Shards(std::vector<std::uint64_t> l, std::uint64_t each = endless)
      : lengths(std::move(l)), per_shard(each), opened(lengths.size()), reading(lengths.size()) {}

  std::vector<Field> fields() const override {
    return {{"value", DType::i64, {}}, {"draw", DType::i64, {}}, {"tokens", DType::i32, {4}, true}};
  }
  std::size_t shards() const override { return lengths.size(); }
  std::uint64_t samples_per_shard() const override { return per_shard; }
  std::unique_ptr<ShardReader> open(std::size_t shard, std::uint64_t epoch,
                                    std::uint64_t position) const override {
    struct Reader : ShardReader {
      Reader(const Shards& s, std::size_t n, std::uint64_t e, std::uint64_t p)
          : source(s), shard(n), epoch(e), next(p) {}
      bool read(BatchRows& to, std::size_t row) override {
        EXPECT_EQ(source.reading[shard]++, 0) << "two threads read shard " << shard;
        const int now = ++source.at_a_time;
        for (int max = source.max_at_a_time;
             now > max && !source.max_at_a_time.compare_exchange_weak(max, now);) {
        }
        if (source.sleep.count() > 0) std::this_thread::sleep_for(source.sleep);
        --source.at_a_time;
        --source.reading[shard];
        if (next >= source.lengths[shard]) return false;
        if (source.broken == std::pair(shard, next)) throw std::runtime_error("injected");
        EXPECT_EQ(to.draw().epoch, epoch);
        to.row<std::int64_t>("value", row)[0] = static_cast<std::int64_t>(shard * 1000 + next);
        to.row<std::int64_t>("draw", row)[0] = static_cast<std::int64_t>(to.draw().seed);
        for (std::int32_t& token : to.row<std::int32_t>("tokens", row, next % 5))
          token = static_cast<std::int32_t>(next);
        ++next;
        return true;
      }
      const Shards& source;
      const std::size_t shard;
      const std::uint64_t epoch;
      std::uint64_t next;
    };
    ++opened[shard];
    return std::make_unique<Reader>(*this, shard, epoch, position);
  }

  std::vector<std::uint64_t> lengths;
  std::uint64_t per_shard;
  std::pair<std::size_t, std::uint64_t> broken{~std::size_t{0}, 0};
  std::chrono::milliseconds sleep{0};
  mutable std::vector<std::atomic<int>> opened, reading;
  mutable std::atomic<int> at_a_time = 0, max_at_a_time = 0;
};

struct Way {
  int ranks = 1;
  std::size_t batch_size = 1;
  int workers = 0;
  std::size_t buffer = 0;
};

std::unique_ptr<Loader> loader_of(std::shared_ptr<const IterableDataset> source, const Way& way,
                                  int rank = 0) {
  const auto order =
      std::make_shared<DistributedBatchSampler>(BatchSamplerOptions{.samples = source->size(),
                                                                    .batch_size = way.batch_size,
                                                                    .ranks = way.ranks,
                                                                    .rank = rank,
                                                                    .shuffle = false});
  return std::make_unique<Loader>(
      std::move(source), order, Stream(),
      LoaderOptions{.num_workers = way.workers, .seed = 6, .buffer_size = way.buffer});
}

/// Index in the stream, value, draw, and length.
using Sample = std::tuple<std::uint64_t, std::int64_t, std::int64_t, std::int32_t>;

void append(std::vector<Sample>& all, const Batch& b) {
  for (std::size_t row = 0; row < b.rows(); ++row) {
    const std::int32_t length = b["tokens.lengths"].data<std::int32_t>()[row];
    const std::size_t padded = b["tokens"].shape()[1];
    const std::int64_t value = b["value"].data<std::int64_t>()[row];
    for (std::size_t i = 0; i < padded; ++i)
      EXPECT_EQ(b["tokens"].data<std::int32_t>()[row * padded + i],
                static_cast<std::int32_t>(i) < length ? value % 1000 : 0);
    all.emplace_back(b.indices()[row], value, b["draw"].data<std::int64_t>()[row], length);
  }
}

/// `batches` of every rank from a position on, in the order of all ranks; where they end.
std::vector<Sample> samples_of(const std::shared_ptr<const IterableDataset>& source, const Way& way,
                               int batches, LoaderPosition& position) {
  std::vector<std::vector<Sample>> of_rank;
  LoaderPosition end;
  for (int r = 0; r < way.ranks; ++r) {
    const auto loader = loader_of(source, way, r);
    loader->set_position(position);
    of_rank.emplace_back();
    for (int b = 0; b < batches; ++b) append(of_rank.back(), loader->next());
    end = loader->position();
  }
  position = end;
  std::vector<Sample> all;
  for (std::size_t i = 0; i < of_rank[0].size(); ++i)
    for (const auto& samples : of_rank) all.push_back(samples[i]);
  return all;
}

TEST(IterableDataset, OrderIsThatOfTheShardsOnAnyRanksAndThreads) {
  const std::vector<std::uint64_t> lengths{900, 900, 900, 900};
  for (const Way& way : {Way{1, 1, 0}, Way{1, 5, 3}, Way{2, 3, 2}, Way{4, 3, 1}, Way{3, 4, 2}}) {
    SCOPED_TRACE(concat(way.ranks, " ranks, batches of ", way.batch_size));
    const auto source = std::make_shared<Shards>(lengths);
    LoaderPosition position;
    const auto got = samples_of(source, way, 6, position);
    ASSERT_EQ(got.size(), 6 * way.batch_size * static_cast<std::size_t>(way.ranks));
    for (std::uint64_t i = 0; i < got.size(); ++i)
      EXPECT_EQ(got[i], Sample(i, i % 4 * 1000 + i / 4, static_cast<std::int64_t>(seed_of_sample(6, 0, i)),
                               i / 4 % 5));
  }
}

TEST(IterableDataset, AShardIsReadByOneRankIfTheirNumberDividesThatOfShards) {
  const auto source = std::make_shared<Shards>(std::vector<std::uint64_t>(4, 900));
  const auto loader = loader_of(source, {.ranks = 2, .batch_size = 6, .workers = 2}, 1);
  for (int i = 0; i < 4; ++i) loader->next();
  std::vector<int> opened(source->opened.begin(), source->opened.end());
  EXPECT_EQ(opened, (std::vector<int>{0, 1, 0, 1}));
}

/// A thread that is late with its batch does not make a shard begin again.
TEST(IterableDataset, BatchesReadAShardInTheirOrder) {
  struct Late : DistributedBatchSampler {
    using DistributedBatchSampler::DistributedBatchSampler;
    Batch at(std::uint64_t epoch, std::uint64_t batch) const override {
      if (batch % 3 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(5));
      return DistributedBatchSampler::at(epoch, batch);
    }
  };
  const auto source = std::make_shared<Shards>(std::vector<std::uint64_t>(2, 900));
  Loader loader(source,
                std::make_shared<Late>(
                    BatchSamplerOptions{.samples = source->size(), .batch_size = 4, .shuffle = false}),
                Stream(), {.num_workers = 3});
  for (int i = 0; i < 9; ++i) loader.next();
  EXPECT_EQ(source->opened[0], 1);
  EXPECT_EQ(source->opened[1], 1);
}

TEST(IterableDataset, ShardsAreReadAtTheSameTimeAndEachByOneThread) {
  const auto source = std::make_shared<Shards>(std::vector<std::uint64_t>(3, 900));
  source->sleep = std::chrono::milliseconds(1);
  const auto loader = loader_of(source, {.batch_size = 12, .workers = 3});
  std::vector<Sample> all;
  for (int i = 0; i < 8; ++i) append(all, loader->next());
  for (std::uint64_t i = 0; i < all.size(); ++i) EXPECT_EQ(std::get<0>(all[i]), i);
  EXPECT_GE(source->max_at_a_time, 2);
}

TEST(IterableDataset, AnEpochHasAsManySamplesOfEachShard) {
  const auto source = std::make_shared<Shards>(std::vector<std::uint64_t>{3, 5, 9}, 5);
  for (const std::size_t buffer : {0u, 2u}) {
    const auto loader = loader_of(source, {.batch_size = 4, .workers = 2, .buffer = buffer});
    for (std::uint64_t epoch = 0; epoch < 3; ++epoch) {
      std::vector<Sample> all;
      std::multiset<std::int64_t> values;
      std::set<std::int64_t> draws;
      for (Batch& b : *loader) append(all, b);
      for (const auto& [index, value, draw, length] : all) {
        values.insert(value);
        draws.insert(draw);
        EXPECT_EQ(draw, static_cast<std::int64_t>(seed_of_sample(6, epoch, index)));
      }
      EXPECT_EQ(values, (std::multiset<std::int64_t>{0, 1, 2, 0, 1, 1000, 1001, 1002, 1003, 1004, 2000, 2001,
                                                     2002, 2003, 2004}));
      EXPECT_EQ(draws.size(), 15u) << "samples of a shard that begins again have draws of their own";
    }
  }
}

TEST(IterableDataset, SamplesAreShuffledWithinWindows) {
  const auto source = std::make_shared<Shards>(std::vector<std::uint64_t>(2, 900), 70);
  std::vector<std::vector<std::int64_t>> orders;
  LoaderPosition position;
  for (int epoch = 0; epoch < 2; ++epoch) {
    std::map<std::int64_t, std::vector<std::int64_t>> of_shard;
    for (const auto& [index, value, draw, length] :
         samples_of(source, {.batch_size = 4, .buffer = 32}, 35, position))
      of_shard[value / 1000].push_back(value % 1000);
    EXPECT_EQ(position.samples, 0u);
    for (const auto& [shard, values] : of_shard) {
      ASSERT_EQ(values.size(), 70u);
      orders.push_back(values);
      for (std::size_t begin = 0; begin < 70; begin += 32) {
        auto window = std::vector(values.begin() + static_cast<long>(begin),
                                  values.begin() + static_cast<long>(std::min<std::size_t>(70, begin + 32)));
        if (begin < 64) {
          EXPECT_FALSE(std::ranges::is_sorted(window));
        }
        std::ranges::sort(window);
        for (std::size_t i = 0; i < window.size(); ++i)
          EXPECT_EQ(window[i], static_cast<std::int64_t>(begin + i));
      }
    }
  }
  EXPECT_EQ(std::set(orders.begin(), orders.end()).size(), 4u)
      << "shards and epochs have orders of their own";
}

/// From every kind of source: endless and finite shards, in order and shuffled.
TEST(IterableDataset, ARunGoesOnExactlyOnOtherRanksWithOtherBatches) {
  struct Case {
    std::vector<std::uint64_t> lengths;
    std::uint64_t per_shard;
    std::size_t buffer;
  };
  const std::uint64_t endless = IterableDataset::endless;
  for (const Case& c : {Case{{900, 900, 900, 900}, endless, 0}, Case{{900, 900, 900, 900}, endless, 5},
                        Case{{2, 3, 7, 900}, endless, 0}, Case{{2, 3, 7, 900}, endless, 4},
                        Case{{9, 4, 9, 9}, 9, 0}, Case{{9, 4, 9, 9}, 9, 4}}) {
    SCOPED_TRACE(concat("shards of ", c.lengths[0], ", ", c.lengths[1], ", … samples, buffer ", c.buffer));
    const auto source = std::make_shared<Shards>(c.lengths, c.per_shard);
    LoaderPosition start;
    const auto whole = samples_of(source, {.batch_size = 1, .buffer = c.buffer}, 96, start);
    for (int before = 0; before < 4; ++before) {
      LoaderPosition position;
      std::vector<Sample> parts;
      for (const auto& [way, batches] : {std::pair(Way{2, 3, 2, c.buffer}, before),
                                         {Way{4, 1, 1, c.buffer}, 2},
                                         {Way{3, 2, 0, c.buffer}, 1},
                                         {Way{1, 2, 3, c.buffer}, 2}}) {
        const auto part = samples_of(source, way, batches, position);
        parts.insert(parts.end(), part.begin(), part.end());
      }
      // A last batch may be smaller, or repeat samples: only epochs of more samples are compared here.
      ASSERT_LE(parts.size(), 36u);
      EXPECT_EQ(parts, std::vector(whole.begin(), whole.begin() + static_cast<long>(parts.size())));
    }
  }
}

TEST(IterableDataset, ASamplersPassesAreEpochs) {
  const auto source = std::make_shared<Shards>(std::vector<std::uint64_t>{5, 5}, 5);
  for (const std::size_t buffer : {0u, 3u}) {
    Loader loader(source,
                  std::make_shared<ContinuousBatchSampler>(
                      ContinuousBatchOptions{.samples = 10, .batch_size = 4, .shuffle = false}),
                  Stream(), {.num_workers = 2, .seed = 6, .buffer_size = buffer});
    std::vector<Sample> all;
    for (int i = 0; i < 10; ++i) append(all, loader.next());
    for (std::uint64_t i = 0; i < all.size(); ++i) {
      const auto& [index, value, draw, length] = all[i];
      EXPECT_EQ(draw, static_cast<std::int64_t>(seed_of_sample(6, i / 10, index))) << i;
    }
  }
}

TEST(IterableDataset, ErrorsNameShardAndSample) {
  for (const int workers : {0, 3}) {
    const auto source = std::make_shared<Shards>(std::vector<std::uint64_t>(2, 900));
    source->broken = {1, 3};
    const auto loader = loader_of(source, {.batch_size = 4, .workers = workers});
    loader->next();
    for (int again = 0; again < 2; ++again)
      EXPECT_STREQ(error_of([&] { loader->next(); }).what(), "shard 1, sample 3: injected");
    loader->skip_failed();
    std::vector<Sample> all;
    append(all, loader->next());
    EXPECT_EQ(std::get<1>(all[0]), 4);
    EXPECT_EQ(std::get<1>(all[1]), 1004);
  }
  const auto shuffled = std::make_shared<Shards>(std::vector<std::uint64_t>(2, 900));
  shuffled->broken = {1, 6};
  const auto loader = loader_of(shuffled, {.workers = 2, .buffer = 4});
  std::vector<Sample> others;
  int failed = 0;
  for (int i = 0; i < 24; ++i) {
    try {
      append(others, loader->next());
    } catch (const Error& e) {
      EXPECT_STREQ(e.what(), "shard 1, sample 6: injected");
      ++failed;
      loader->skip_failed();
    }
  }
  EXPECT_EQ(failed, 1);
  std::set<std::int64_t> seen;
  for (const auto& [index, value, draw, length] : others) seen.insert(value);
  EXPECT_EQ(seen.size(), 23u);
  EXPECT_FALSE(seen.contains(1006));
}

/// It holds up none of the others.
TEST(IterableDataset, ABatchThatTheSamplerCannotMakeIsAnErrorOfItsOwn) {
  struct Cut : DistributedBatchSampler {
    using DistributedBatchSampler::DistributedBatchSampler;
    Batch at(std::uint64_t epoch, std::uint64_t batch) const override {
      require(batch != 1, Errc::config, "cut");
      return DistributedBatchSampler::at(epoch, batch);
    }
  };
  const auto source = std::make_shared<Shards>(std::vector<std::uint64_t>(2, 900));
  Loader cut(source,
             std::make_shared<Cut>(
                 BatchSamplerOptions{.samples = source->size(), .batch_size = 2, .shuffle = false}),
             Stream(), {.num_workers = 3});
  cut.next();
  EXPECT_STREQ(error_of([&] { cut.next(); }).what(), "cut");
  cut.skip_failed();
  EXPECT_EQ(cut.next()["value"].data<std::int64_t>()[0], 2);
}

TEST(IterableDataset, AShardWithoutSamplesOrReaderIsNamed) {
  const auto message = [](std::shared_ptr<const IterableDataset> source) {
    return std::string(error_of([&] { loader_of(std::move(source), {.workers = 1})->next(); }).what());
  };
  EXPECT_EQ(message(std::make_shared<Shards>(std::vector<std::uint64_t>{0})),
            "shard 0, sample 0: the shard has no samples");
  struct Closed : Shards {
    Closed() : Shards({9}) {}
    std::unique_ptr<ShardReader> open(std::size_t, std::uint64_t, std::uint64_t) const override {
      return nullptr;
    }
  };
  EXPECT_EQ(message(std::make_shared<Closed>()),
            "shard 0, sample 0: IterableDataset::open() has returned no reader");
}

// ---- with an engine

struct Net : Module {
  nn::Linear fc{*this, "fc", 1, 2};
};

EngineOptions options() {
  return {.config = R"({"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD"}})", .log = nullptr};
}

TEST(IterableDataset, ACheckpointHasThePositionForAnyNumberOfRanks) {
  const test::Folder folder;
  const Shards source(std::vector<std::uint64_t>(4, 900));
  const auto open = [&](Engine& engine) {
    return engine.loader(std::make_shared<Shards>(source.lengths), {.buffer_size = 8});
  };
  std::vector<std::uint64_t> whole;
  lab::world(1, [&](World& world) {
    Net net;
    auto engine = initialize(world, net, options());
    auto loader = open(engine);
    for (int i = 0; i < 20; ++i) {
      const Batch& b = loader.next();
      whole.insert(whole.end(), b.indices().begin(), b.indices().end());
    }
  });
  EXPECT_FALSE(std::ranges::is_sorted(whole));
  lab::world(2, [&](World& world) {
    Net net;
    auto engine = initialize(world, net, options());
    auto loader = open(engine);
    for (int i = 0; i < 3; ++i) loader.next();
    engine.save_checkpoint(folder.path());
  });
  for (const int ranks : {1, 4})
    lab::world(ranks, [&](World& world) {
      Net net;
      auto engine = initialize(world, net, options());
      auto loader = open(engine);
      ASSERT_TRUE(engine.load_checkpoint(folder.path()));
      const auto at = [&](int row) {
        return whole[static_cast<std::size_t>(12 + world.rank() + row * world.size())];
      };
      const Batch& b = loader.next();
      EXPECT_EQ((std::vector(b.indices().begin(), b.indices().end())), (std::vector{at(0), at(1)}));
    });
}

TEST(IterableDataset, AnUpdateReportsItsWaitForData) {
  lab::world(1, [&](World& world) {
    Net net;
    auto engine = initialize(world, net, options());
    const auto source = std::make_shared<Shards>(std::vector<std::uint64_t>{900});
    source->sleep = std::chrono::milliseconds(5);
    auto loader = engine.loader(source, {.num_workers = 0});
    for (int i = 0; i < 2; ++i) {
      engine.train_batch(loader, [&](Tape& t, const Batch& b) {
        return nn::cross_entropy(t, net.fc(t, Tensor::zeros({b.rows(), 1})),
                                 Tensor::zeros({b.rows()}, DType::i32));
      });
      EXPECT_GE(engine.report().data_seconds, 0.01);
      EXPECT_LE(engine.report().data_seconds, engine.report().seconds);
    }
    const Tensor x = Tensor::zeros({2, 1}), y = Tensor::zeros({2}, DType::i32);
    engine.backward(nn::cross_entropy(engine.tape(), net.fc(engine.tape(), x), y));
    engine.step();
    EXPECT_EQ(engine.report().data_seconds, 0);
  });
}

}  // namespace
}  // namespace rz
