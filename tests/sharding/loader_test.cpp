/// Datasets, batch samplers and the loader: what is read, in which order, and what stays valid.
#include "sharding/data/loader.h"

#include <gtest/gtest.h>

#include <atomic>
#include <condition_variable>
#include <map>
#include <mutex>
#include <numeric>
#include <set>
#include <thread>

#include "comm/communicator.h"
#include "sharding/data/continuous_batch_sampler.h"
#include "sharding/data/dataset.h"
#include "sharding/data/subset.h"
#include "tests/support/error_of.h"
#include "tests/support/ranks.h"

namespace rz {
namespace {

using test::error_of;

/// Sample i is x = [i, i + 0.5] and y = -i. Reading takes longer for some samples than for others.
class Numbers : public Dataset {
 public:
  explicit Numbers(std::uint64_t size, bool uneven = false) : size_(size), uneven_(uneven) {}
  std::uint64_t size() const override { return size_; }
  std::vector<Field> fields() const override { return {{"x", DType::f32, {2}}, {"y", DType::i32, {}}}; }
  void read(std::uint64_t index, BatchRows& to, std::size_t row) const override {
    if (uneven_) std::this_thread::sleep_for(std::chrono::microseconds(index * 37 % 200));
    const auto x = to.row<float>("x", row);
    x[0] = static_cast<float>(index), x[1] = x[0] + 0.5f;
    to.row<std::int32_t>("y", row)[0] = -static_cast<std::int32_t>(index);
  }

 private:
  std::uint64_t size_;
  bool uneven_;
};

std::shared_ptr<const DistributedBatchSampler> sampler(BatchSamplerOptions o) {
  return std::make_shared<DistributedBatchSampler>(o);
}

/// The samples in the tensors, after a check that all fields agree with indices().
std::vector<std::uint64_t> samples_of(const Batch& batch) {
  const Tensor &x = batch["x"], &y = batch["y"];
  EXPECT_EQ(x.shape(), (Shape{batch.rows(), 2}));
  EXPECT_EQ(y.shape(), (Shape{batch.rows()}));
  std::vector<std::uint64_t> out;
  for (std::size_t i = 0; i < batch.rows(); ++i) {
    const auto index = static_cast<std::uint64_t>(x.data<float>()[2 * i]);
    EXPECT_EQ(x.data<float>()[2 * i + 1], static_cast<float>(index) + 0.5f);
    EXPECT_EQ(y.data<std::int32_t>()[i], -static_cast<std::int32_t>(index));
    EXPECT_EQ(batch.indices()[i], index);
    out.push_back(index);
  }
  return out;
}

TEST(Loader, OrderIsTheSamplersForAnyNumberOfWorkers) {
  const auto data = std::make_shared<Numbers>(53, true);
  const auto order = sampler({.samples = 53, .batch_size = 4, .ranks = 2, .rank = 1, .seed = 3});
  for (const int workers : {0, 1, 2, 5}) {
    for (const std::size_t slots : {1u, 3u}) {
      Loader loader(data, order, Stream(), {.num_workers = workers, .slots = slots});
      ASSERT_EQ(loader.size(), 7u);
      for (std::uint64_t i = 0; i < 3 * loader.size(); ++i) {
        const BatchSampler::Batch expected = order->at(i / 7, i % 7);
        const Batch& batch = loader.next();
        EXPECT_EQ(samples_of(batch), expected.indices) << workers << " workers, batch " << i;
        EXPECT_EQ(batch.padding(), expected.padding);
      }
    }
  }
}

TEST(Loader, EverySampleIsReadOnceAnEpoch) {
  for (const std::uint64_t n : {1u, 2u, 7u, 16u, 33u})
    for (const int ranks : {1, 2, 3, 4})
      for (const bool shuffle : {true, false}) {
        const auto data = std::make_shared<Numbers>(n);
        std::multiset<std::uint64_t> seen;
        std::set<std::vector<std::size_t>> rows;
        for (int r = 0; r < ranks; ++r) {
          const auto order = sampler(
              {.samples = n, .batch_size = 4, .ranks = ranks, .rank = r, .shuffle = shuffle, .seed = 5});
          Loader loader(data, order, Stream(), {.num_workers = 2});
          std::vector<std::size_t> of_rank;
          for (Batch& batch : loader) {
            const auto samples = samples_of(batch);
            seen.insert(samples.begin(), samples.end() - static_cast<std::ptrdiff_t>(batch.padding()));
            of_rank.push_back(batch.rows());
          }
          rows.insert(of_rank);
        }
        EXPECT_EQ(rows.size(), 1u) << "ranks have different batches";
        EXPECT_EQ(seen.size(), n) << n << " on " << ranks;
        EXPECT_EQ(std::set<std::uint64_t>(seen.begin(), seen.end()).size(), n);
      }
}

TEST(Loader, TheLastBatchIsSmallerOrDropped) {
  const auto rows = [](bool drop_last) {
    Loader loader(std::make_shared<Numbers>(11),
                  sampler({.samples = 11, .batch_size = 4, .shuffle = false, .drop_last = drop_last}),
                  Stream());
    std::vector<std::size_t> all;
    for (Batch& batch : loader) all.push_back(batch.rows());
    return all;
  };
  EXPECT_EQ(rows(false), (std::vector<std::size_t>{4, 4, 3}));
  EXPECT_EQ(rows(true), (std::vector<std::size_t>{4, 4}));
  const Error e = error_of([] { sampler({.samples = 5, .batch_size = 4, .ranks = 2, .drop_last = true}); });
  EXPECT_STREQ(e.what(),
               "5 samples on 2 ranks are less than one batch of 4; give more data or a smaller batch, or set "
               "drop_last to false");
}

TEST(Loader, ALoopIsAnEpochAndTheNextLoopTheNext) {
  const auto order = sampler({.samples = 20, .batch_size = 4});
  Loader loader(std::make_shared<Numbers>(20), order, Stream(), {.num_workers = 2});
  for (std::uint64_t epoch = 0; epoch < 3; ++epoch) {
    EXPECT_EQ(loader.epoch(), epoch);
    std::uint64_t batches = 0;
    for (Batch& batch : loader) EXPECT_EQ(samples_of(batch), order->at(epoch, batches++).indices);
    EXPECT_EQ(batches, 5u);
  }
  loader.set_epoch(1);
  EXPECT_EQ(samples_of(loader.next()), order->at(1, 0).indices);
}

TEST(Loader, ARunResumesExactlyAtEveryBatch) {
  const auto data = std::make_shared<Numbers>(23, true);
  const auto order = sampler({.samples = 23, .batch_size = 4, .ranks = 2, .seed = 9});
  Loader whole(data, order, Stream(), {.num_workers = 2});
  std::vector<std::vector<std::uint64_t>> batches;
  std::vector<Loader::State> states;
  for (int i = 0; i < 9; ++i) {
    states.push_back(whole.state());
    batches.push_back(samples_of(whole.next()));
  }
  EXPECT_EQ(states[4], (Loader::State{1, 1}));
  for (const int workers : {0, 3}) {
    Loader resumed(data, order, Stream(), {.num_workers = workers});
    for (std::size_t from : {5u, 0u, 8u, 2u}) {
      resumed.set_state(states[from]);
      for (std::size_t i = from; i < batches.size(); ++i) {
        EXPECT_EQ(resumed.state(), states[i]);
        EXPECT_EQ(samples_of(resumed.next()), batches[i]) << "from " << from;
      }
    }
    EXPECT_EQ(error_of([&] { resumed.set_state({0, 3}); }).code(), Errc::invalid_argument);
  }
}

/// Each sample has the seed of its draw.
class Drawn final : public Dataset {
 public:
  std::uint64_t size() const override { return 23; }
  std::vector<Field> fields() const override { return {{"seed", DType::i64, {1}}}; }
  void read(std::uint64_t index, BatchRows& to, std::size_t row) const override {
    EXPECT_EQ(to.draw().seed, seed_of_sample(6, to.draw().epoch, index));
    to.row<std::int64_t>("seed", row)[0] = static_cast<std::int64_t>(to.draw().seed);
  }
};

TEST(Loader, ADrawIsThatOfTheSampleAndItsPassWithAnyBatchesAndAfterAResume) {
  const auto loader_of = [](std::size_t batch_size, int workers) {
    return std::make_unique<Loader>(std::make_shared<Drawn>(),
                                    std::make_shared<ContinuousBatchSampler>(ContinuousBatchOptions{
                                        .samples = 23, .batch_size = batch_size, .seed = 9}),
                                    Stream(), LoaderOptions{.num_workers = workers, .seed = 6});
  };
  const auto take = [](Loader& loader, int batches, std::vector<std::int64_t>& seeds) {
    for (int i = 0; i < batches; ++i) {
      const Batch& b = loader.next();
      const auto* values = b["seed"].data<std::int64_t>();
      seeds.insert(seeds.end(), values, values + b.rows());
    }
  };
  std::vector<std::int64_t> whole, parts;
  take(*loader_of(1, 0), 50, whole);
  const auto first = loader_of(4, 2), second = loader_of(6, 3);
  take(*first, 5, parts);
  EXPECT_EQ(first->position(), (LoaderPosition{0, 20}));
  second->set_position(first->position());
  take(*second, 5, parts);
  EXPECT_EQ(second->position(), (LoaderPosition{2, 4}));
  EXPECT_EQ(parts, whole);
  EXPECT_EQ(std::set<std::int64_t>(whole.begin(), whole.end()).size(), 50u);
}

TEST(LoaderPositions, OtherDataBeginAnewAndAreNamed) {
  Tensor x = Tensor::zeros({40, 3});
  const auto loader_of = [&](std::size_t rows, std::uint64_t seed,
                             std::shared_ptr<LoaderPositions> positions) {
    const auto data = tensor_dataset({{"x", x.view(0, {rows, 3})}});
    return std::make_unique<Loader>(data, sampler({.samples = rows, .batch_size = 4, .seed = seed}), Stream(),
                                    LoaderOptions{.positions = std::move(positions), .name = "train"});
  };
  LoaderPositions::ByName saved;
  {
    const auto positions = std::make_shared<LoaderPositions>();
    const auto loader = loader_of(40, 1, positions);
    for (int i = 0; i < 3; ++i) loader->next();
    saved = positions->now();
  }
  const auto position_of = [&](std::size_t rows, std::uint64_t seed, bool attached, std::string& line) {
    const auto positions = std::make_shared<LoaderPositions>();
    positions->on_difference([&](const std::string& text) { line = text; });
    if (!attached) positions->restore(saved);
    const auto loader = loader_of(rows, seed, positions);
    if (attached) loader->next(), positions->restore(saved);
    EXPECT_EQ(positions->differences().size(), line.empty() ? 0u : 1u);
    return loader->position();
  };
  const LoaderPosition start{0, 0}, third{0, 12};
  for (const bool attached : {false, true}) {
    std::string same, shorter, other_order, other_data;
    EXPECT_EQ(position_of(40, 1, attached, same), third);
    EXPECT_EQ(same, "");
    EXPECT_EQ(position_of(20, 1, attached, shorter), start);
    EXPECT_EQ(shorter.rfind(
                  "the data of 'train' are not those of the checkpoint: 40 samples, shuffled with seed 1, "
                  "checksum ",
                  0),
              0u)
        << shorter;
    EXPECT_NE(shorter.find("; now 20 samples, "), std::string::npos) << shorter;
    EXPECT_EQ(position_of(40, 2, attached, other_order), start);
    EXPECT_NE(other_order, "");
    x.data<float>()[119] = 1;
    EXPECT_EQ(position_of(40, 1, attached, other_data), start);
    EXPECT_NE(other_data, "");
    x.data<float>()[119] = 0;
  }
}

TEST(Loader, BatchesStayValidForTheSlotsAfterThem) {
  for (const int workers : {0, 3}) {
    constexpr std::size_t slots = 4;
    const auto order = sampler({.samples = 64, .batch_size = 3});
    Loader loader(std::make_shared<Numbers>(64), order, Stream(), {.num_workers = workers, .slots = slots});
    std::vector<Batch*> valid;
    for (std::uint64_t i = 0; i < 50; ++i) {
      valid.push_back(&loader.next());
      for (std::uint64_t past = 0; past < std::min<std::uint64_t>(slots, i + 1); ++past) {
        const std::uint64_t at = i - past;
        EXPECT_EQ(samples_of(*valid[at]), order->at(at / loader.size(), at % loader.size()).indices);
      }
    }
  }
}

/// Reads of one sample fail.
class Broken : public Numbers {
 public:
  Broken(std::uint64_t size, std::uint64_t bad) : Numbers(size), bad_(bad) {}
  void read(std::uint64_t index, BatchRows& to, std::size_t row) const override {
    if (index == bad_) fail(Errc::config, "images/7.png: cut off");
    if (index == bad_ + 1) throw std::out_of_range("no such row");
    Numbers::read(index, to, row);
  }

 private:
  std::uint64_t bad_;
};

TEST(Loader, ErrorsCarryTheIndexOfTheSampleAndComeInTheirTurn) {
  for (const int workers : {0, 1, 4}) {
    Loader loader(std::make_shared<Broken>(20, 9),
                  sampler({.samples = 20, .batch_size = 4, .shuffle = false}), Stream(),
                  {.num_workers = workers});
    EXPECT_EQ(samples_of(loader.next()).front(), 0u);
    EXPECT_EQ(samples_of(loader.next()).front(), 4u);
    for (int again = 0; again < 2; ++again) {
      const Error e = error_of([&] { loader.next(); });
      EXPECT_EQ(e.code(), Errc::config);
      EXPECT_STREQ(e.what(), "sample 9: images/7.png: cut off");
    }
    EXPECT_EQ(loader.state(), (Loader::State{0, 2}));
    loader.set_state({0, 3});
    EXPECT_EQ(samples_of(loader.next()).front(), 12u);
  }
  Loader loader(std::make_shared<Broken>(8, 3), sampler({.samples = 8, .batch_size = 4, .shuffle = false}),
                Stream());
  loader.set_state({0, 1});
  const Error e = error_of([&] { loader.next(); });
  EXPECT_EQ(e.code(), Errc::io);
  EXPECT_STREQ(e.what(), "sample 4: no such row");
}

/// Reads nothing until it may.
class Blocked : public Numbers {
 public:
  Blocked() : Numbers(8) {}
  void read(std::uint64_t index, BatchRows& to, std::size_t row) const override {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return open; });
    Numbers::read(index, to, row);
  }
  mutable std::mutex mutex;
  mutable std::condition_variable changed;
  mutable bool open = false;
};

TEST(Loader, ALateBatchIsATimeout) {
  const auto data = std::make_shared<Blocked>();
  Loader loader(data, sampler({.samples = 8, .batch_size = 4, .shuffle = false}), Stream(),
                {.timeout = std::chrono::milliseconds(20)});
  const Error e = error_of([&] { loader.next(); });
  EXPECT_EQ(e.code(), Errc::timeout);
  EXPECT_STREQ(e.what(),
               "batch 0 of epoch 0 was not read in time; raise LoaderOptions::timeout if reading "
               "takes that long");
  {
    const std::lock_guard lock(data->mutex);
    data->open = true;
  }
  data->changed.notify_all();
}

/// Counts reads, and how many there are at a time.
class Counted : public Numbers {
 public:
  explicit Counted(std::uint64_t size) : Numbers(size) {}
  void read(std::uint64_t index, BatchRows& to, std::size_t row) const override {
    const int now = ++at_a_time;
    for (int max = max_at_a_time; now > max && !max_at_a_time.compare_exchange_weak(max, now);) {
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    Numbers::read(index, to, row);
    --at_a_time;
    ++reads;
  }
  mutable std::atomic<int> reads = 0, at_a_time = 0, max_at_a_time = 0;
};

TEST(Loader, WorkersReadAheadAsFarAsThePrefetchFactor) {
  const auto data = std::make_shared<Counted>(100);
  Loader loader(data, sampler({.samples = 100, .batch_size = 2}), Stream(),
                {.num_workers = 2, .prefetch_factor = 3, .slots = 2});
  loader.next();
  // Two slots and six batches ahead fit; the first batch is still valid.
  for (int i = 0; i < 2000 && data->reads < 16; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_EQ(data->reads, 16);
  EXPECT_EQ(data->max_at_a_time, 2);
  const auto none = std::make_shared<Counted>(100);
  Loader lazy(none, sampler({.samples = 100, .batch_size = 2}), Stream(), {.num_workers = 0});
  EXPECT_EQ(none->reads, 0);
  lazy.next();
  EXPECT_EQ(none->reads, 2);
}

TEST(Loader, RefusesWrongOptionsAndFields) {
  const auto data = std::make_shared<Numbers>(8);
  const auto order = sampler({.samples = 8, .batch_size = 2});
  const auto message = [&](std::shared_ptr<const Dataset> d, LoaderOptions o) {
    return std::string(error_of([&] { Loader(d, order, Stream(), o); }).what());
  };
  EXPECT_EQ(message(data, {.num_workers = -1}), "LoaderOptions::num_workers is -1; at least 0");
  EXPECT_EQ(message(data, {.prefetch_factor = 0}), "LoaderOptions::prefetch_factor is 0; at least 1");
  EXPECT_EQ(message(data, {.slots = 0}), "LoaderOptions::slots is 0; at least 1");
  EXPECT_EQ(message(nullptr, {}), "a loader without a dataset");
  struct Of : Numbers {
    explicit Of(std::vector<Field> f) : Numbers(8), all(std::move(f)) {}
    std::vector<Field> fields() const override { return all; }
    std::vector<Field> all;
  };
  EXPECT_EQ(message(std::make_shared<Of>(std::vector<Field>{{"x", DType::f32, {1, 2, 3, 4}}}), {}),
            "field x: samples of shape [1, 2, 3, 4]; a batch adds a dimension, so give at most 3");
  EXPECT_EQ(message(std::make_shared<Of>(std::vector<Field>{{"x"}, {"x"}}), {}), "field x is there twice");
  EXPECT_EQ(message(std::make_shared<Of>(std::vector<Field>{}), {}),
            "the samples have no fields; Dataset::fields() is empty");
  Loader other(data, sampler({.samples = 9, .batch_size = 9, .shuffle = false}), Stream());
  EXPECT_STREQ(error_of([&] { other.next(); }).what(),
               "sample 8: the dataset has 8; make the sampler for as many");
}

TEST(Batch, AnUnknownFieldIsNamedWithThoseThereAre) {
  Loader loader(std::make_shared<Numbers>(8), sampler({.samples = 8, .batch_size = 2}), Stream());
  const Batch& batch = loader.next();
  EXPECT_STREQ(error_of([&] { batch["z"]; }).what(), "there is no field \"z\"; the samples have x, y");
}

TEST(BatchRows, WritesAreChecked) {
  const std::vector<Field> fields{{"x", DType::f32, {2}}};
  const std::vector<Tensor> memory{Tensor::zeros({3, 2})};
  BatchRows rows(fields, memory);
  rows.row<float>("x", 2)[1] = 7;
  EXPECT_EQ(memory[0].data<float>()[5], 7);
  EXPECT_STREQ(error_of([&] { rows.row<float>("y", 0); }).what(),
               "there is no field \"y\"; the samples have x");
  EXPECT_STREQ(error_of([&] { rows.row<double>("x", 0); }).what(), "field x of f32 was written as f64");
}

TEST(TensorDataset, ReadsRowsOfEveryTensor) {
  const Tensor x = Tensor::empty({6, 2}), y = Tensor::empty({6}, DType::i32);
  for (int i = 0; i < 6; ++i) {
    x.data<float>()[2 * i] = static_cast<float>(i), x.data<float>()[2 * i + 1] = static_cast<float>(i) + 0.5f;
    y.data<std::int32_t>()[i] = -i;
  }
  const auto data = tensor_dataset({{"x", x}, {"y", y}});
  EXPECT_EQ(data->size(), 6u);
  Loader loader(data, sampler({.samples = 6, .batch_size = 4}), Stream());
  std::set<std::uint64_t> seen;
  for (Batch& batch : loader)
    for (const std::uint64_t i : samples_of(batch)) seen.insert(i);
  EXPECT_EQ(seen.size(), 6u);
}

TEST(Loader, RowsThatRepeatSamplesHaveTargetsThatAreIgnored) {
  for (const int workers : {0, 2}) {
    std::multiset<std::int32_t> counted;
    for (int rank = 0; rank < 3; ++rank) {
      Loader loader(std::make_shared<Numbers>(7),
                    sampler({.samples = 7, .batch_size = 2, .ranks = 3, .rank = rank, .shuffle = false}),
                    Stream(), {.num_workers = workers, .targets = "y", .ignore_index = 9});
      for (Batch& batch : loader)
        for (std::size_t row = 0; row < batch.rows(); ++row) {
          const std::int32_t y = batch["y"].data<std::int32_t>()[row];
          EXPECT_EQ(y == 9, row + batch.padding() >= batch.rows());
          if (y != 9) counted.insert(y);
        }
    }
    EXPECT_EQ(counted, (std::multiset<std::int32_t>{0, -1, -2, -3, -4, -5, -6}));
  }
  const auto refused = [](const std::string& field) {
    return std::string(error_of([&] {
                         Loader(std::make_shared<Numbers>(7), sampler({.samples = 7, .batch_size = 2}),
                                Stream(), {.targets = field});
                       }).what());
  };
  EXPECT_EQ(refused("z"), "LoaderOptions::targets: there is no field z; name a field of i32");
  EXPECT_EQ(refused("x"), "LoaderOptions::targets: x is f32; name a field of i32");
}

TEST(TensorDataset, RefusesTensorsThatDoNotFit) {
  const auto message = [](std::vector<NamedTensor> tensors) {
    return std::string(error_of([&] { TensorDataset(std::move(tensors)); }).what());
  };
  EXPECT_EQ(message({}), "a dataset of no tensors");
  EXPECT_EQ(message({{"x", Tensor::zeros({4, 2})}, {"y", Tensor::zeros({3})}}),
            "tensor y of [3] has other rows than x of [4, 2]");
  EXPECT_EQ(message({{"x", Tensor::zeros({})}}), "tensor x has no rows; its first dimension counts samples");
}

/// The first `n` batches of a loop that is then left, or all.
std::vector<std::uint64_t> samples_of_loop(Loader& loader, std::size_t n = 1000) {
  std::vector<std::uint64_t> all;
  for (Batch& batch : loader) {
    const auto samples = samples_of(batch);
    all.insert(all.end(), samples.begin(), samples.end());
    if (--n == 0) break;
  }
  return all;
}

TEST(Loader, ALoopAfterABreakContinuesOrBeginsTheEpochAgain) {
  using Samples = std::vector<std::uint64_t>;
  const auto data = std::make_shared<Numbers>(10);
  const auto order = sampler({.samples = 10, .batch_size = 2, .shuffle = false});
  const Samples whole{0, 1, 2, 3, 4, 5, 6, 7, 8, 9};
  for (const int workers : {0, 2}) {
    Loader goes_on(data, order, Stream(), {.num_workers = workers});
    EXPECT_EQ(samples_of_loop(goes_on, 2), (Samples{0, 1, 2, 3}));
    EXPECT_EQ(samples_of_loop(goes_on, 1), (Samples{4, 5}));
    EXPECT_EQ(samples_of_loop(goes_on), (Samples{6, 7, 8, 9}));
    Loader again(data, order, Stream(), {.num_workers = workers, .restart = true});
    for (int i = 0; i < 3; ++i) EXPECT_EQ(samples_of_loop(again, 2), (Samples{0, 1, 2, 3}));
    EXPECT_EQ(samples_of_loop(again), whole);
    EXPECT_EQ(again.state(), (Loader::State{1, 0}));
    EXPECT_EQ(samples_of_loop(again, 5), whole);  // left at the last batch
    EXPECT_EQ(samples_of_loop(again, 1), (Samples{0, 1}));
    EXPECT_EQ(again.epoch(), 1u);
    again.set_state({1, 3});  // a run that is resumed goes on in the middle of an epoch
    EXPECT_EQ(samples_of_loop(again), (Samples{6, 7, 8, 9}));
    EXPECT_EQ(samples_of_loop(again), whole);
    EXPECT_EQ(again.epoch(), 3u);
  }
}

// ---- datasets made of others

std::shared_ptr<const Dataset> numbers(std::uint64_t size) { return std::make_shared<Numbers>(size); }

/// Values of "y" of all samples, negated.
std::vector<int> values_of(const Dataset& data) {
  const std::vector<Field> fields = data.fields();
  const std::vector<Tensor> memory{Tensor::zeros({1, 2}), Tensor::zeros({1}, DType::i32)};
  std::vector<int> all;
  for (std::uint64_t i = 0; i < data.size(); ++i) {
    BatchRows rows(fields, memory);
    data.read(i, rows, 0);
    all.push_back(-memory[1].data<std::int32_t>()[0]);
  }
  return all;
}

TEST(Subset, HasTheSamplesOfItsIndices) {
  const Subset some(numbers(10), {7, 0, 7, 3});
  EXPECT_EQ(values_of(some), (std::vector<int>{7, 0, 7, 3}));
  EXPECT_EQ(values_of(Subset(std::make_shared<Subset>(some), {3, 0})), (std::vector<int>{3, 7}));
  EXPECT_STREQ(error_of([] {
                 Subset(numbers(4), {0, 4});
               }).what(),
               "index 1 of the subset is sample 4; the dataset has 4 samples");
  EXPECT_STREQ(error_of([] { Subset(nullptr, {}); }).what(), "a subset without a dataset");
}

TEST(RandomSplit, PartsHaveEverySampleOnceAndTheLengthsOfTorch) {
  const auto lengths = [](std::uint64_t size, const std::vector<SplitSize>& sizes) {
    std::vector<std::uint64_t> all;
    std::multiset<int> seen;
    for (const auto& part : random_split(numbers(size), sizes, 4)) {
      const auto values = values_of(*part);
      all.push_back(values.size());
      seen.insert(values.begin(), values.end());
    }
    std::multiset<int> expected;
    for (std::uint64_t i = 0; i < size; ++i) expected.insert(static_cast<int>(i));
    EXPECT_EQ(seen, expected);
    return all;
  };
  using Lengths = std::vector<std::uint64_t>;
  EXPECT_EQ(lengths(10, {7, 0, 3}), (Lengths{7, 0, 3}));
  EXPECT_EQ(lengths(1, {1}), (Lengths{1}));
  EXPECT_EQ(lengths(10, {0.3, 0.3, 0.4}), (Lengths{3, 3, 4}));
  EXPECT_EQ(lengths(11, {0.3, 0.3, 0.4}), (Lengths{4, 3, 4}));  // ⌊3.3⌋, ⌊3.3⌋, ⌊4.4⌋, and one for the first
  EXPECT_EQ(lengths(5, {0.25, 0.25, 0.25, 0.25}), (Lengths{2, 1, 1, 1}));
  EXPECT_EQ(lengths(7, std::vector<SplitSize>(10, 0.1)), (Lengths{1, 1, 1, 1, 1, 1, 1, 0, 0, 0}));
}

TEST(RandomSplit, DependsOnSizeAndSeedAlone) {
  const auto first = [](std::uint64_t seed, const std::vector<SplitSize>& sizes) {
    return values_of(*random_split(numbers(100), sizes, seed)[0]);
  };
  EXPECT_EQ(first(1, {0.5, 0.5}), first(1, {50, 30, 20}));
  EXPECT_NE(first(1, {0.5, 0.5}), first(2, {0.5, 0.5}));
  EXPECT_FALSE(std::ranges::is_sorted(first(1, {1.0})));
}

TEST(RandomSplit, RefusesSizesThatDoNotFit) {
  const auto refused = [](const std::vector<SplitSize>& sizes) {
    return std::string(error_of([&] { random_split(numbers(1000000), sizes, 0); }).what());
  };
  EXPECT_EQ(refused({}), "random_split() into no parts");
  EXPECT_EQ(refused({900000, 0.1}),
            "random_split() into 900000, 0.1: give numbers of samples only, or fractions only");
  EXPECT_EQ(refused({900000, 1000}),
            "random_split() of 1000000 samples into 900000, 1000: they add up to 901000, not to 1000000");
  EXPECT_EQ(refused({0.9, 0.2}),
            "random_split() of 1000000 samples into 0.9, 0.2: they add up to 1.1, not to 1");
  EXPECT_EQ(refused({1000001, -1}), "random_split() of 1000000 samples into 1000001, -1: give 0 to 1000000");
}

TEST(RandomSplit, RanksThatDifferAreNamedOnAll) {
  struct Case {
    std::uint64_t size, seed;
    double fraction;
    const char* message;
  };
  const std::string first = "; rank 0 has seed 5, 0.5, 0.5 of 8 samples; give all ranks the same";
  for (const Case& c :
       {Case{8, 5, 0.5, ""}, Case{8, 6, 0.5, "random_split(): rank 2 has seed 6, 0.5, 0.5 of 8 samples"},
        Case{9, 5, 0.5, "random_split(): rank 2 has seed 5, 0.5, 0.5 of 9 samples"},
        Case{8, 5, 0.25, "random_split(): rank 2 has seed 5, 0.25, 0.75 of 8 samples"}})
    test::run_ranks(3, [&](int rank, std::shared_ptr<Store> store) {
      Communicator ranks = Communicator::connect(rank, 3, std::move(store));
      const bool other = rank == 2;
      const double fraction = other ? c.fraction : 0.5;
      const auto split = [&] {
        return random_split(numbers(other ? c.size : 8), {fraction, 1 - fraction}, other ? c.seed : 5, ranks);
      };
      if (std::string(c.message).empty()) {
        EXPECT_EQ(values_of(*split()[1]), values_of(*random_split(numbers(8), {4, 4}, 5)[1]));
        return;
      }
      const Error e = error_of(split);
      EXPECT_EQ(e.code(), Errc::mismatch);
      EXPECT_EQ(e.culprit(), 2);
      EXPECT_EQ(e.what(), c.message + first);
    });
}

TEST(ConcatDataset, HasTheSamplesOfAllInTheirOrder) {
  const ConcatDataset all({numbers(2), numbers(0), numbers(3)});
  EXPECT_EQ(values_of(all), (std::vector<int>{0, 1, 0, 1, 2}));
  const auto refused = [](std::vector<std::shared_ptr<const Dataset>> sets) {
    return std::string(error_of([&] { ConcatDataset(std::move(sets)); }).what());
  };
  EXPECT_EQ(refused({}), "a concatenation of no datasets");
  EXPECT_EQ(refused({numbers(2), nullptr}), "dataset 1 of a concatenation is null");
  EXPECT_EQ(refused({numbers(2), numbers(2), tensor_dataset({{"x", Tensor::zeros({2, 3})}})}),
            "dataset 2 of a concatenation has the fields x f32 [3]; dataset 0 has x f32 [2], y i32 []");
}

TEST(Subset, ChecksumsDifferWithTheSamples) {
  const auto tensor = [](float value) {
    const Tensor x = Tensor::zeros({4});
    x.data<float>()[3] = value;
    return tensor_dataset({{"x", x}});
  };
  const auto plain = numbers(4), zeros = tensor(0), ones = tensor(1);
  std::set<std::uint64_t> sums;
  const std::vector<std::shared_ptr<const Dataset>> all{
      std::make_shared<Subset>(plain, std::vector<std::uint64_t>{0, 1}),
      std::make_shared<Subset>(plain, std::vector<std::uint64_t>{1, 0}),
      std::make_shared<Subset>(zeros, std::vector<std::uint64_t>{0, 1}),
      std::make_shared<Subset>(ones, std::vector<std::uint64_t>{0, 1}),
      random_split(ones, {2, 2}, 1)[0],
      random_split(ones, {2, 2}, 1)[1],
      std::make_shared<ConcatDataset>(std::vector{zeros, ones}),
      std::make_shared<ConcatDataset>(std::vector{ones, zeros}),
      std::make_shared<ConcatDataset>(std::vector{plain, numbers(3)}),
      std::make_shared<ConcatDataset>(std::vector{numbers(3), plain})};
  for (const auto& data : all) sums.insert(data->checksum().value());
  EXPECT_EQ(sums.size(), all.size());
  EXPECT_EQ(all[0]->checksum(), Subset(numbers(4), {0, 1}).checksum());
}

// ---- samples of different lengths

/// Sample i has i mod 4 tokens i · 10, i · 10 + 1, …, as many pairs, and a label.
class Ragged : public Dataset {
 public:
  std::uint64_t size() const override { return 8; }
  std::vector<Field> fields() const override {
    return {{"ids", DType::i32, {6}, true, 99},
            {"label", DType::i32, {}},
            {"pairs", DType::f32, {6, 2}, true, -0.5}};
  }
  void read(std::uint64_t index, BatchRows& to, std::size_t row) const override {
    to.row<std::int32_t>("label", row)[0] = static_cast<std::int32_t>(index);
    const auto length = static_cast<std::size_t>(index % 4);
    if (length == 0) return;
    const auto ids = to.row<std::int32_t>("ids", row, length);
    const auto pairs = to.row<float>("pairs", row, length);
    ASSERT_EQ(ids.size(), length);
    ASSERT_EQ(pairs.size(), 2 * length);
    for (std::size_t i = 0; i < length; ++i) {
      ids[i] = static_cast<std::int32_t>(10 * index + i);
      pairs[2 * i] = static_cast<float>(ids[i]), pairs[2 * i + 1] = pairs[2 * i] + 0.5f;
    }
  }
};

template <class T>
std::vector<T> elements(const Tensor& t) {
  return {t.data<T>(), t.data<T>() + t.count()};
}

TEST(RaggedFields, ArePaddedToTheLongestOrTheLargestLength) {
  using Ids = std::vector<std::int32_t>;
  using Padding = Collation::Padding;
  using Side = Collation::Side;
  const auto check = [](Collation collation, std::size_t padded) {
    SCOPED_TRACE(concat(padded, " on ", collation.padding_side == Side::left ? "left" : "right"));
    Loader loader(std::make_shared<Ragged>(), sampler({.samples = 8, .batch_size = 4, .shuffle = false}),
                  Stream(), {.num_workers = 2, .collation = collation});
    for (int round = 0; round < 4; ++round) {  // memory is used again
      const std::int32_t first = round % 2 * 4;
      const Batch& b = loader.next();
      Ids ids;
      std::vector<float> pairs;
      for (std::int32_t i = first; i < first + 4; ++i)
        for (std::size_t at = 0; at < padded; ++at) {
          const auto length = static_cast<std::size_t>(i % 4);
          const std::size_t begin = collation.padding_side == Side::left ? padded - length : 0;
          const bool inside = at >= begin && at < begin + length;
          ids.push_back(inside ? 10 * i + static_cast<std::int32_t>(at - begin) : 99);
          pairs.push_back(inside ? static_cast<float>(ids.back()) : -0.5f);
          pairs.push_back(inside ? pairs.back() + 0.5f : -0.5f);
        }
      EXPECT_EQ(b["ids"].shape(), (Shape{4, padded}));
      EXPECT_EQ(b["pairs"].shape(), (Shape{4, padded, 2}));
      EXPECT_EQ(elements<std::int32_t>(b["ids"]), ids);
      EXPECT_EQ(elements<float>(b["pairs"]), pairs);
      EXPECT_EQ(elements<std::int32_t>(b["ids.lengths"]), (Ids{0, 1, 2, 3}));
      EXPECT_EQ(elements<std::int32_t>(b["pairs.lengths"]), (Ids{0, 1, 2, 3}));
      EXPECT_EQ(elements<std::int32_t>(b["label"]), (Ids{first, first + 1, first + 2, first + 3}));
    }
  };
  for (const Side side : {Side::right, Side::left}) {
    check({.padding_side = side}, 3);
    check({.padding_side = side, .pad_to_multiple_of = 4}, 4);
    check({.padding = Padding::max_length, .padding_side = side}, 6);
    check({.padding = Padding::max_length, .padding_side = side, .pad_to_multiple_of = 4}, 8);
  }
}

TEST(RaggedFields, OfRowsThatRepeatSamplesAreIgnoredWhole) {
  Loader loader(std::make_shared<Ragged>(),
                sampler({.samples = 8, .batch_size = 3, .ranks = 3, .rank = 2, .shuffle = false}), Stream(),
                {.targets = "ids"});
  const Batch& batch = loader.next();  // samples 2, 5, and 0 again
  EXPECT_EQ(batch.padding(), 1u);
  EXPECT_EQ(elements<std::int32_t>(batch["ids"]), (std::vector<std::int32_t>{20, 21, 50, 99, -100, -100}));
}

TEST(RaggedFields, WrongOnesAreRefused) {
  const auto refused = [](Field field, Collation collation = {}) {
    struct Of : Ragged {
      std::vector<Field> fields() const override { return {field}; }
      Field field;
    };
    auto data = std::make_shared<Of>();
    data->field = field;
    return std::string(error_of([&] {
                         Loader loader(data, sampler({.samples = 8, .batch_size = 4, .shuffle = false}),
                                       Stream(), {.collation = collation});
                         loader.next();
                       }).what());
  };
  EXPECT_EQ(refused({"ids", DType::i32, {}, true}),
            "field ids is ragged and has the shape []; give the largest length as its first extent");
  EXPECT_EQ(refused({"ids", DType::u8, {2}, true, -100}), "field ids: padding_value -100 is no value of u8");
  EXPECT_EQ(refused({"ids", DType::i32, {2}, true, 0.5}), "field ids: padding_value 0.5 is no value of i32");
  EXPECT_EQ(refused({"ids", DType::i32, {2}, true}, {.pad_to_multiple_of = 0}),
            "LoaderOptions::collation.pad_to_multiple_of is 0; at least 1");
  const std::vector<Field> fields{{"ids", DType::i32, {2}, true}, {"x"}, {"ids.lengths", DType::i32}};
  const std::vector<Tensor> memory{Tensor::zeros({1, 2}, DType::i32), Tensor::zeros({1}),
                                   Tensor::zeros({1}, DType::i32)};
  BatchRows rows(fields, memory);
  EXPECT_STREQ(
      error_of([&] { rows.row<std::int32_t>("ids", 0, 3); }).what(),
      "field ids: a sample of length 3; the field has [2]: cut the sample, or give the field a larger shape");
  EXPECT_STREQ(error_of([&] { rows.row<std::int32_t>("ids", 0); }).what(),
               "field ids is ragged: give row() the length of the sample");
  EXPECT_STREQ(error_of([&] { rows.row<float>("x", 0, 1); }).what(),
               "field x is not ragged: call row() without a length");
}

// ---- time

/// Each read takes 10 ms.
struct Slow : Numbers {
  Slow() : Numbers(1000) {}
  void read(std::uint64_t index, BatchRows& to, std::size_t row) const override {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    Numbers::read(index, to, row);
  }
};

TEST(Loader, WaitsAreCountedAndHiddenByWorkers) {
  const auto order = sampler({.samples = 1000, .batch_size = 1});
  const auto positions = std::make_shared<LoaderPositions>();
  {
    Loader lazy(std::make_shared<Slow>(), order, Stream(), {.num_workers = 0, .positions = positions});
    for (int i = 0; i < 4; ++i) lazy.next();
    EXPECT_GE(lazy.waited_seconds(), 0.04);
    EXPECT_EQ(positions->waited_seconds(), lazy.waited_seconds());
  }
  const double before = positions->waited_seconds();
  EXPECT_GE(before, 0.04) << "of a loader that has ended";
  Loader ahead(std::make_shared<Slow>(), order, Stream(), {.num_workers = 4, .positions = positions});
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  for (int i = 0; i < 4; ++i) ahead.next();
  EXPECT_LT(ahead.waited_seconds(), 0.02);
  EXPECT_EQ(positions->waited_seconds(), before + ahead.waited_seconds());
}

}  // namespace
}  // namespace rz
