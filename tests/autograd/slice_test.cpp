/// Parameters that are parts of tensors.
#include "autograd_lite/slice.h"

#include <gtest/gtest.h>

#include <vector>

#include "autograd_lite/nn/init.h"
#include "tests/support/error_of.h"

namespace rz {
namespace {

TEST(Slice, TheDefaultIsTheWhole) {
  Parameter p;
  p.shape = {3, 4};
  EXPECT_EQ(p.global_shape(), Shape({3, 4}));
  EXPECT_FALSE(p.slice.has_value());
  EXPECT_TRUE(Slice(p.shape).is_whole());
  EXPECT_EQ(Slice(p.shape).global_index(7), 7u);
  EXPECT_EQ(Slice(p.shape)[1], (Interval{0, 4}));
  EXPECT_EQ(Slice(Shape{}).global_index(0), 0u);
}

TEST(Slice, ElementsHaveTheirIndicesInTheGlobalTensor) {
  const Slice part({4, 5, 6}, {{1, 3}, {0, 5}, {2, 4}});
  EXPECT_EQ(part.shape(), Shape({2, 5, 2}));
  std::size_t element = 0;
  for (std::size_t i = 1; i < 3; ++i)
    for (std::size_t j = 0; j < 5; ++j)
      for (std::size_t k = 2; k < 4; ++k)
        EXPECT_EQ(part.global_index(element++), (i * 5 + j) * 6 + k) << i << ' ' << j << ' ' << k;
}

TEST(Slice, RunsCoverARangeOnceInOrder) {
  for (const Slice& part : {Slice({6, 7}), Slice({6, 7}, {{2, 5}, {0, 7}}), Slice({6, 7}, {{0, 6}, {3, 5}}),
                            Slice({9}, {{4, 9}})})
    for (const std::size_t begin : {0, 1, 3}) {
      std::vector<std::size_t> indices;
      const std::size_t end = part.shape().count() - 1;
      part.for_each_run(begin, end, [&](std::size_t element, std::size_t index, std::size_t count) {
        EXPECT_EQ(element, begin + indices.size());
        for (std::size_t i = 0; i < count; ++i) indices.push_back(index + i);
      });
      ASSERT_EQ(indices.size(), end - begin);
      for (std::size_t i = 0; i < indices.size(); ++i) EXPECT_EQ(indices[i], part.global_index(begin + i));
    }
}

TEST(Slice, AWrongIntervalIsNamed) {
  EXPECT_STREQ(test::error_of([] {
                 Slice({4, 5}, {{0, 4}, {3, 6}});
               }).what(),
               "a slice has indices 3 to 6 in dimension 1, which has 5");
  EXPECT_EQ(test::error_of([] { Slice({4, 5}, {{0, 4}}); }).code(), Errc::invalid_argument);
  EXPECT_EQ(test::error_of([] { Slice({4, 5}, {{0, 4}, {3, 2}}); }).code(), Errc::invalid_argument);
}

TEST(Slice, AParameterBecomesAPartBeforeItHasMemory) {
  Parameter p;
  p.shape = {4, 6};
  p.set_slice(Slice({4, 6}, {{0, 4}, {3, 6}}));
  EXPECT_EQ(p.shape, Shape({4, 3}));
  EXPECT_EQ(p.count(), 12u);
  EXPECT_EQ(p.global_shape(), Shape({4, 6}));
  p.value = Tensor::zeros(p.shape);
  EXPECT_EQ(test::error_of([&] { p.set_slice(Slice({4, 6})); }).code(), Errc::invalid_argument);
}

/// The parts of a tensor start with the values that the whole would have.
TEST(Slice, InitialValuesAreThoseOfTheWhole) {
  Parameter whole, part;
  whole.name = part.name = "layer.weight";
  whole.initial = part.initial = {Initial::normal, 1};
  whole.shape = {6, 10};
  part.set_slice(Slice({6, 10}, {{1, 5}, {3, 9}}));
  std::vector<float> all(60), own(24 - 5);
  init_slice(whole, all, 0, 7);
  init_slice(part, own, 5, 7);
  for (std::size_t i = 0; i < own.size(); ++i) EXPECT_EQ(own[i], all[part.slice->global_index(5 + i)]) << i;
}

}  // namespace
}  // namespace rz
