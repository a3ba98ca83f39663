/// Datasets: of tensors, parts and chains of others, samples of different lengths.
#include "sharding/data/dataset.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "sharding/data/batch_sampler.h"
#include "sharding/data/loader.h"
#include "sharding/data/subset.h"
#include "tests/lab/group.h"
#include "tests/support/error_of.h"

namespace rz {
namespace {

using test::error_of;

/// Sample i is x = [i, i + 0.5] and y = -i.
struct Numbers : Dataset {
  explicit Numbers(std::uint64_t size) : count(size) {}
  std::uint64_t size() const override { return count; }
  std::vector<Field> fields() const override { return {{"x", DType::f32, {2}}, {"y", DType::i32, {}}}; }
  void read(std::uint64_t index, BatchRows& to, std::size_t row) const override {
    const auto x = to.row<float>("x", row);
    x[0] = static_cast<float>(index), x[1] = x[0] + 0.5f;
    to.row<std::int32_t>("y", row)[0] = -static_cast<std::int32_t>(index);
  }
  std::uint64_t count;
};

std::shared_ptr<const Dataset> numbers(std::uint64_t size) { return std::make_shared<Numbers>(size); }

std::shared_ptr<const DistributedBatchSampler> sampler(BatchSamplerOptions o) {
  return std::make_shared<DistributedBatchSampler>(o);
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

TEST(TensorDataset, RefusesTensorsThatDoNotFit) {
  const auto message = [](std::vector<NamedTensor> tensors) {
    return std::string(error_of([&] { TensorDataset(std::move(tensors)); }).what());
  };
  EXPECT_EQ(message({}), "a dataset of no tensors");
  EXPECT_EQ(message({{"x", Tensor::zeros({4, 2})}, {"y", Tensor::zeros({3})}}),
            "tensor y of [3] has other rows than x of [4, 2]");
  EXPECT_EQ(message({{"x", Tensor::zeros({})}}), "tensor x has no rows; its first dimension counts samples");
}

// ---- datasets made of others

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
    lab::group(3, [&](Communicator& ranks) {
      const bool other = ranks.rank() == 2;
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

}  // namespace
}  // namespace rz
