/// Batch samplers and the loader: what is read, in which order, and what stays valid.
#include "sharding/data/loader.h"

#include <gtest/gtest.h>

#include <atomic>
#include <condition_variable>
#include <map>
#include <mutex>
#include <numeric>
#include <set>
#include <thread>

#include "sharding/data/continuous_batch_sampler.h"
#include "sharding/data/dataset.h"
#include "tests/support/error_of.h"

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
  for (int i = 0; i < 30'000 && data->reads < 16; ++i)
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
