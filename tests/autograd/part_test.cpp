/// Parameters that are parts of tensors.
#include <gtest/gtest.h>

#include <vector>

#include "autograd_lite/nn/init.h"
#include "tests/support/error_of.h"

namespace rz {
namespace {

TEST(Part, TheDefaultIsTheWhole) {
  Parameter p;
  p.shape = {3, 4};
  EXPECT_EQ(p.global_shape(), Shape({3, 4}));
  EXPECT_FALSE(p.part.has_value());
  EXPECT_TRUE(p.box().is_whole());
  EXPECT_EQ(p.box().index(7), 7u);
}

TEST(Part, AParameterBecomesAPartBeforeItHasMemory) {
  Parameter p;
  p.shape = {4, 6};
  p.set_part({{4, 6}, {0, 3}, {4, 3}});
  EXPECT_EQ(p.shape, Shape({4, 3}));
  EXPECT_EQ(p.count(), 12u);
  EXPECT_EQ(p.global_shape(), Shape({4, 6}));
  p.value = Tensor::zeros(p.shape);
  EXPECT_EQ(test::error_of([&] { p.set_part(Box::whole({4, 6})); }).code(), Errc::invalid_argument);
}

TEST(Part, AWrongBoxIsRefused) {
  Parameter p;
  p.name = "w";
  const auto what = [&](const Box& box) {
    return std::string(test::error_of([&] { p.set_part(box); }).what());
  };
  EXPECT_EQ(what({{4, 5}, {0, 3}, {4, 3}}), "parameter w: its part does not lie within [4, 5]");
  EXPECT_EQ(what({{4, 5}, {0}, {4}}), "parameter w: its part does not lie within [4, 5]");
  EXPECT_EQ(what({{4, 5}, {0, 6}, {4, 0}}), "parameter w: its part does not lie within [4, 5]");
  EXPECT_FALSE(p.part.has_value());
}

/// The parts of a tensor start with the values that the whole would have.
TEST(Part, InitialValuesAreThoseOfTheWhole) {
  Parameter whole, part;
  whole.name = part.name = "layer.weight";
  whole.initial = part.initial = {Initial::normal, 1};
  whole.shape = {6, 10};
  part.set_part({{6, 10}, {1, 3}, {4, 6}});
  std::vector<float> all(60), own(24 - 5);
  init_slice(whole, all, 0, 7);
  init_slice(part, own, 5, 7);
  for (std::size_t i = 0; i < own.size(); ++i) EXPECT_EQ(own[i], all[part.part->index(5 + i)]) << i;
}

}  // namespace
}  // namespace rz
