/// Files that PyTorch and DeepSpeed themselves have written: tests/data/torch_files.

#include <gtest/gtest.h>

#include <span>
#include <string>
#include <vector>

#include "sharding/checkpoint/open_tensors.h"

namespace rz {
namespace {

const std::string folder = RZ_SOURCE_DIR "/tests/data/torch_files/";

std::vector<std::byte> bytes_of(const TensorSource& files, const TensorInfo& t) {
  std::vector<std::byte> bytes(t.bytes);
  files.read_bytes(t, 0, std::span(bytes));
  return bytes;
}

/// Every tensor of `expected` has its dtype, shape and bits. Returns the names of the tensors that it lacks.
std::vector<std::string> expect_weights(const std::string& file, const std::string& expected) {
  SCOPED_TRACE(file);
  const TensorSource found = open_tensors(folder + file), safe = open_tensors(folder + expected);
  EXPECT_GT(safe.tensors().size(), 5u);
  for (const TensorInfo& e : safe.tensors()) {
    const TensorInfo* t = found.find(e.name);
    if (!t) {
      ADD_FAILURE() << "lacks " << e.name;
      continue;
    }
    EXPECT_EQ(t->dtype, e.dtype) << e.name;
    EXPECT_EQ(t->shape, e.shape) << e.name;
    EXPECT_EQ(bytes_of(found, *t), bytes_of(safe, e)) << e.name;
  }
  std::vector<std::string> more;
  for (const TensorInfo& t : found.tensors())
    if (!safe.find(t.name)) more.push_back(t.name);
  return more;
}

const std::vector<std::string> none;

TEST(TorchAndDeepSpeed, StateDictsOfPyTorchHaveItsBits) {
  for (const char* file : {"zip.pt", "legacy.pt", "sharded", "sharded/pytorch_model.bin.index.json"})
    EXPECT_EQ(expect_weights(file, "state_dict.safetensors"), none) << file;
}

TEST(TorchAndDeepSpeed, CheckpointsOfDeepSpeedHaveTheWeightsThatItReads) {
  for (const char* name : {"zero0_ranks1", "zero2_ranks2", "zero3_ranks1", "zero3_ranks3"})
    EXPECT_EQ(expect_weights(name, std::string(name) + ".safetensors"), none) << name;
}

TEST(TorchAndDeepSpeed, FrozenParametersThatDeepSpeedLeavesOutAreThoseOfTheModel) {
  EXPECT_EQ(expect_weights("zero1_ranks3", "zero1_ranks3.safetensors"),
            (std::vector<std::string>{"frozen.weight", "frozen.bias"}));
  const TensorSource stage1 = open_tensors(folder + "zero1_ranks3"),
                     stage0 = open_tensors(folder + "zero0_ranks1");
  for (const char* name : {"frozen.weight", "frozen.bias"})  // no update changes them
    EXPECT_EQ(bytes_of(stage1, *stage1.find(name)), bytes_of(stage0, *stage0.find(name))) << name;
}

}  // namespace
}  // namespace rz
