/// Buffers in saved models.
#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <limits>
#include <string>
#include <vector>

#include "sharding/checkpoint/safetensors.h"
#include "sharding/engine/engine.h"
#include "sharding/huggingface/pretrained_weights.h"
#include "sharding/huggingface/save_pretrained.h"
#include "sharding/strategy/strategy.h"
#include "tests/lab/world.h"
#include "tests/support/error_of.h"
#include "tests/support/folder.h"

namespace rz {
namespace {

namespace fs = std::filesystem;

/// As batch normalisation has them, and others.
struct Norm : Module {
  Norm(Module& parent, const std::string& name) : Module(parent, name) {
    register_parameter(weight, "weight", {3});
    register_buffer(mean, "running_mean", {3});
    register_buffer(batches, "num_batches_tracked", {}, DType::i64);
    register_buffer(table, "table", {2, 2}, DType::bf16);
    register_buffer(scratch, "scratch", {2});
    scratch.persistent = false;
  }
  Parameter weight;
  ModuleBuffer mean, batches, table, scratch;
};
struct Net : Module {
  nn::Linear fc{*this, "fc", 3, 5};
  Norm norm{*this, "norm"};
};

/// Values that differ over the ranks.
void fill(Norm& n, int rank) {
  n.mean.value.data<float>()[0] = std::numeric_limits<float>::infinity();
  n.mean.value.data<float>()[2] = 0.1f + static_cast<float>(rank);
  *n.batches.value.data<std::int64_t>() = (std::int64_t{1} << 60) + 1 + rank;
  for (std::size_t i = 0; i < 4; ++i)
    reinterpret_cast<std::uint16_t*>(n.table.value.raw())[i] =
        static_cast<std::uint16_t>(0x3f80 + 7 * i) + static_cast<std::uint16_t>(rank);
  n.scratch.value.data<float>()[1] = 9;
}

std::vector<std::byte> bytes_of(const ModuleBuffer& b) {
  return {b.value.raw(), b.value.raw() + b.value.bytes()};
}
std::vector<std::vector<std::byte>> saved_values(const Norm& n) {
  return {bytes_of(n.mean), bytes_of(n.batches), bytes_of(n.table)};
}

class SavedBuffers : public testing::Test, protected test::Folder {
 protected:
  std::string path(const std::string& name = "model.safetensors") const { return Folder::path(name); }
  std::string contents(const std::string& name = "model.safetensors") const { return get(name); }
  /// Writes tensors of zeros.
  void put(const std::vector<SafetensorsSpec>& tensors) const {
    SafetensorsWriter writer(path(), tensors);
    for (const SafetensorsSpec& t : tensors) {
      std::size_t count = 1;
      for (const auto extent : t.shape) count *= extent;
      writer.write(std::vector<std::byte>(count * size_of(t.dtype)));
    }
    writer.finish();
  }
};

EngineOptions options(int stage) {
  return {.config = concat(R"({"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": )", stage,
                           R"(}, "optimizer": {"type": "SGD"}})"),
          .seed = 3,
          .log = nullptr};
}

TEST_F(SavedBuffers, AreThoseOfRankZeroInEveryStageOnAnyNumberOfRanks) {
  std::string file;
  for (const int ranks : {1, 2, 3})
    for (int stage = 0; stage < 4; ++stage) {
      lab::world(ranks, [&](World& world) {
        Net net, again;
        auto engine = initialize(world, net, options(stage));
        fill(net.norm, world.rank());
        engine.save_model(path());
        world.wait_for_everyone();
        auto other = initialize(world, again, options(3 - stage));
        other.load_model(path());
        fill(net.norm, 0);
        EXPECT_EQ(saved_values(again.norm), saved_values(net.norm))
            << "stage " << stage << ", rank " << world.rank();
        EXPECT_EQ(again.norm.scratch.value.data<float>()[1], 0) << "is not persistent";
      });
      if (file.empty()) file = contents();
      EXPECT_EQ(contents(), file) << "stage " << stage << ", " << ranks << " ranks";
    }
  const TensorSource saved = open_safetensors(path());
  ASSERT_EQ(saved.tensors().size(), 6u);
  const auto type = [&](const char* name) { return saved.find(name) ? saved.find(name)->dtype : "absent"; };
  EXPECT_EQ(type("norm.running_mean"), "F32");
  EXPECT_EQ(type("norm.num_batches_tracked"), "I64");
  EXPECT_EQ(type("norm.table"), "BF16");
  EXPECT_EQ(type("norm.scratch"), "absent");
}

TEST_F(SavedBuffers, APartOfAModelHasItsOwnNames) {
  lab::world(1, [&](World& world) {
    Net net;
    auto engine = initialize(world, net, options(0));
    save_weights(path(), net.norm, engine.strategy(), 0, {});
    const TensorSource saved = open_safetensors(path());
    EXPECT_TRUE(saved.find("weight"));
    EXPECT_TRUE(saved.find("running_mean"));
  });
}

const std::vector<SafetensorsSpec> complete{{"weight", {3}},
                                            {"running_mean", {3}},
                                            {"num_batches_tracked", {}, DType::i64},
                                            {"table", {2, 2}, DType::bf16}};
struct Root : Module {
  Root() {
    register_parameter(weight, "weight", {3});
    register_buffer(mean, "running_mean", {3});
    register_buffer(batches, "num_batches_tracked", {}, DType::i64);
    register_buffer(table, "table", {2, 2}, DType::bf16);
  }
  Parameter weight;
  ModuleBuffer mean, batches, table;
};

TEST_F(SavedBuffers, WhatDoesNotFitIsNamed) {
  const auto refusal = [&](std::vector<SafetensorsSpec> tensors, Module& module) {
    put(tensors);
    const Error e = test::error_of([&] { PretrainedWeights(path(), module); });
    EXPECT_EQ(e.code(), Errc::config);
    return std::string(e.what());
  };
  Root root;
  auto missing = complete, more = complete, type = complete, shape = complete;
  missing.erase(missing.begin() + 1);
  EXPECT_NE(refusal(missing, root).find("missing: running_mean"), std::string::npos);
  more.push_back({"running_var", {3}});
  EXPECT_NE(refusal(more, root).find("not in the model: running_var"), std::string::npos);
  type[2].dtype = DType::f32;
  EXPECT_NE(refusal(type, root).find("num_batches_tracked is of dtype F32 where the buffer has I64"),
            std::string::npos);
  shape[3].shape = {4};
  EXPECT_NE(refusal(shape, root).find("table is [4] where the model has [2, 2]"), std::string::npos);
  root.table.persistent = false;
  EXPECT_NE(refusal(complete, root).find("not in the model: table"), std::string::npos);
}

TEST_F(SavedBuffers, AreConvertedToF32AndKeptWhereTheFileHasNone) {
  Root root;
  allocate_parameters(root);
  root.mean.value.data<float>()[1] = 5;
  *root.batches.value.data<std::int64_t>() = 4;
  put({{"weight", {3}}, {"running_mean", {3}, DType::f16}, {"table", {2, 2}, DType::bf16}});
  const PretrainedWeights weights = load_pretrained(root, path(), {.strict = false});
  EXPECT_EQ(weights.missing_keys(), std::vector<std::string>{"num_batches_tracked"});
  EXPECT_EQ(root.mean.value.data<float>()[1], 0);
  EXPECT_EQ(*root.batches.value.data<std::int64_t>(), 4);
  Root empty;
  const PretrainedWeights early(path(), empty, {.strict = false});
  EXPECT_NE(
      std::string(test::error_of([&] { early.read_buffers(); }).what()).find("running_mean has no memory"),
      std::string::npos);
}

struct Attention : Module {
  explicit Attention(bool has_mask) {
    register_parameter(weight, "h.0.attn.c_attn.weight", {2});
    if (has_mask) register_buffer(mask, "h.0.attn.bias", {1, 1, 1, 2}, DType::u8);
  }
  Parameter weight;
  ModuleBuffer mask;
};

TEST_F(SavedBuffers, MasksAreIgnoredUnlessTheModuleHasThem) {
  put({{"h.0.attn.c_attn.weight", {2}},
       {"h.0.attn.bias", {1, 1, 1, 2}, DType::u8},
       {"h.0.attn.masked_bias", {}}});
  Attention plain(false), masked(true);
  EXPECT_EQ(PretrainedWeights(path(), plain).tensors(), 1u);
  allocate_parameters(masked);
  masked.mask.value.data<std::uint8_t>()[1] = 1;
  load_pretrained(masked, path());
  EXPECT_EQ(masked.mask.value.data<std::uint8_t>()[1], 0);
}

}  // namespace
}  // namespace rz
