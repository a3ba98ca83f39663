// Weights of checkpoints of DeepSpeed.

#include "sharding/checkpoint/deepspeed_weights.h"

#include <gtest/gtest.h>

#include <bit>
#include <cstring>
#include <filesystem>
#include <random>

#include "sharding/checkpoint/open_tensors.h"
#include "tests/support/deepspeed_writer.h"
#include "tests/support/error_of.h"
#include "tests/support/written_checkpoint.h"

namespace rz {
namespace {

namespace fs = std::filesystem;
namespace pk = test::pickle;
using test::DeepSpeedWriter;
using test::error_of;

class DeepSpeedWeights : public testing::Test {
 protected:
  std::string folder() const { return folder_ / "run/global_step3"; }
  /// Values, dtypes and shapes of every tensor.
  void expect_weights(const DeepSpeedWriter& w, const std::string& path) const {
    SCOPED_TRACE(concat("stage ", w.stage, ", ", w.ranks, " ranks"));
    const TensorSource files = open_tensors(path);
    EXPECT_EQ(files.path(), folder());
    ASSERT_EQ(files.tensors().size(), w.parameters.size() + 2);
    for (std::size_t p = 0; p < w.parameters.size(); ++p) {
      const auto& parameter = w.parameters[p];
      EXPECT_EQ(files.tensors()[p].name, parameter.name) << "the order of the module";
      expect_tensor(files, parameter.name, parameter.shape, w.stage == 0 || parameter.frozen, w.values(p));
    }
    expect_tensor(files, "tied.weight", w.parameters[0].shape, w.stage == 0, w.values(0));
    std::vector<std::int64_t> count(2);
    files.read_bytes(*files.find("count"), 0, std::as_writable_bytes(std::span(count)));
    EXPECT_EQ(count, (std::vector<std::int64_t>{5, 6}));
  }
  static void expect_tensor(const TensorSource& files, const std::string& name,
                            const std::vector<std::uint64_t>& shape, bool narrow,
                            std::vector<float> expected) {
    const TensorInfo* t = files.find(name);
    ASSERT_TRUE(t) << name;
    EXPECT_EQ(t->dtype, narrow ? "BF16" : "F32") << name;
    EXPECT_EQ(t->shape, shape) << name;
    if (narrow)
      for (float& x : expected) x = std::bit_cast<float>(std::bit_cast<std::uint32_t>(x) & 0xffff0000u);
    for (std::size_t begin = 0; begin < expected.size(); ++begin)
      for (std::size_t n = 1; begin + n <= expected.size(); ++n) {
        std::vector<float> part(n);
        files.read_f32(*t, begin, part);
        ASSERT_TRUE(
            std::equal(part.begin(), part.end(), expected.begin() + static_cast<std::ptrdiff_t>(begin)))
            << name << " from " << begin << ", " << n;
      }
  }
  std::string what_of(const DeepSpeedWriter& w, Errc code) const {
    fs::remove_all(folder());
    w.write(folder());
    return what_of(code);
  }
  std::string what_of(Errc code) const {
    const Error e = error_of([&] { open_tensors(folder()); });
    EXPECT_EQ(e.code(), code) << e.what();
    EXPECT_TRUE(std::string(e.what()).starts_with(folder())) << e.what();
    return std::string(e.what()).substr(std::min(folder().size(), std::strlen(e.what())));
  }

  test::Folder folder_;
};

TEST_F(DeepSpeedWeights, OfEveryStageAndNumberOfRanksAreConsolidated) {
  for (const int stage : {0, 1, 2, 3})
    for (const std::size_t ranks : {1, 2, 3, 4, 11}) {
      DeepSpeedWriter w;
      w.stage = stage, w.ranks = ranks, w.front = ranks % 2 ? "bf16_" : "";
      fs::remove_all(folder());
      w.write(folder());
      expect_weights(w, folder());
    }
}

TEST_F(DeepSpeedWeights, AreFoundByLatest) {
  const DeepSpeedWriter w;
  w.write(folder());
  EXPECT_FALSE(is_deepspeed_checkpoint(folder_ / "run"));
  test::write_bytes(folder_ / "run/latest", "global_step3\n");
  EXPECT_TRUE(is_deepspeed_checkpoint(folder_ / "run"));
  expect_weights(w, folder_ / "run");
  for (const char* tag : {"", "none", "../run/global_step3", ".", "/"}) {
    test::write_bytes(folder_ / "run/latest", tag);
    EXPECT_FALSE(is_deepspeed_checkpoint(folder_ / "run")) << tag;
  }
  EXPECT_FALSE(is_deepspeed_checkpoint(folder_ / "none"));
}

TEST_F(DeepSpeedWeights, HaveTheirStageInSeveralForms) {
  const std::string type = pk::global("deepspeed.runtime.zero.config", "ZeroStageEnum");
  const std::string getattr = pk::global("__builtin__", "getattr");
  for (const std::string& value : {pk::integer(2), pk::call(type, {pk::integer(2)}),
                                   pk::call(getattr, {type, pk::text("gradients")}), std::string("none")}) {
    DeepSpeedWriter w;
    w.stage_value = value, w.partition_count = pk::integer(2);
    w.write(folder());
    expect_weights(w, folder());
  }
  DeepSpeedWriter w;
  w.stage_value = pk::integer(7);
  EXPECT_NE(what_of(w, Errc::io).find("zero_stage is no stage"), std::string::npos);
}

TEST_F(DeepSpeedWeights, MayHaveNoPadding) {
  DeepSpeedWriter w;
  w.ranks = 1, w.groups = 1;
  w.parameters = {{"emb.weight", {3, 5}}, {"b", {2}}};
  w.padding_to = 17;
  w.write(folder());
  expect_weights(w, folder());
  w.padding_to = 18;
  w.write(folder());
  expect_weights(w, folder());
}

TEST_F(DeepSpeedWeights, ThatDoNotFitTogetherAreRefused) {
  DeepSpeedWriter w;
  w.padding_to = 32;
  EXPECT_EQ(what_of(w, Errc::io),
            "/mp_rank_00_model_states.pt: group 0 of the optimizer has 32 elements where its parameters have "
            "26 and "
            "padding is below 4");
  w.padding_to = 24;
  EXPECT_EQ(
      what_of(w, Errc::io),
      "/mp_rank_00_model_states.pt: group 0 of the optimizer has 24 elements, which end within 'b.weight'");
  w = {}, w.stage = 3, w.padding_to = 20;
  EXPECT_EQ(what_of(w, Errc::io),
            "/zero_pp_rank_0_mp_rank_00_optim_states.pt: has 20 elements where the parameters have 19 on "
            "each rank");
  w.padding_to = 16;
  EXPECT_EQ(what_of(w, Errc::io),
            "/zero_pp_rank_0_mp_rank_00_optim_states.pt: has 16 elements, which end within 'a.bias'");
  w = {}, w.partition_count = pk::integer(3);
  EXPECT_EQ(what_of(w, Errc::config).find(": has the optimizer files of 2 ranks where "), 0u);
  w = {};
  w.write(folder());
  DeepSpeedWriter other;
  other.groups = 1, other.parameters.resize(2);
  other.write_optimizer(folder(), 1);
  EXPECT_EQ(what_of(Errc::io), "/zero_pp_rank_1_mp_rank_00_optim_states.pt: has 1 groups where rank 0 has 2");
  other.stage_value = pk::integer(1), other.write_optimizer(folder(), 1);
  EXPECT_NE(what_of(Errc::io).find("is of stage 1 where"), std::string::npos);
}

TEST_F(DeepSpeedWeights, OfMissingRanksAreRefused) {
  DeepSpeedWriter w;
  w.ranks = 3;
  w.write(folder());
  fs::remove(folder() + "/" + w.optimizer_file(1));
  EXPECT_EQ(
      what_of(Errc::config),
      "/zero_pp_rank_1_mp_rank_00_optim_states.pt: is missing; the checkpoint has a file of each rank, up to "
      "rank 2");
  w.write(folder());
  fs::remove(folder() + "/" + w.optimizer_file(2));
  EXPECT_EQ(what_of(Errc::config).find(": has the optimizer files of 2 ranks where "), 0u);
  for (int r = 0; r < 2; ++r) fs::remove(folder() + "/" + w.optimizer_file(static_cast<std::size_t>(r)));
  EXPECT_EQ(what_of(Errc::config),
            ": holds no file of the name *_optim_states.pt, which has the f32 weights");
  w.write(folder());
  fs::remove(folder() + "/" + w.model_file(0));
  EXPECT_EQ(what_of(Errc::config), ": holds no file of the name *_model_states.pt");
  w.stage = 3, fs::remove_all(folder()), w.write(folder());
  fs::remove(folder() + "/" + w.model_file(2));
  EXPECT_EQ(what_of(Errc::config),
            ": has the model files of 2 ranks where 3 are needed; a rank's file is missing");
  w.stage = 2, w.write(folder());
  EXPECT_NE(what_of(Errc::config).find("is of the same rank as"), std::string::npos);
}

TEST_F(DeepSpeedWeights, OfOtherKindsOfParallelismAreRefused) {
  const auto with_file = [&](const std::string& name) {
    fs::remove_all(folder());
    DeepSpeedWriter().write(folder());
    test::write_bytes(folder() + "/" + name, "");
    return what_of(Errc::unsupported);
  };
  const auto refusal = [](const std::string& name, const char* part) {
    return "/" + name + ": belongs to " + part + ", which is not read; write the weights with DeepSpeed";
  };
  for (const auto& [name, part] : std::vector<std::pair<std::string, const char*>>{
           {"mp_rank_01_model_states.pt", "tensor parallelism"},
           {"zero_pp_rank_0_mp_rank_01_optim_states.pt", "tensor parallelism"},
           {"layer_03_mp_rank_00_model_states.pt", "pipeline parallelism"},
           {"layer_0_expert_3_mp_rank_00_model_states.pt", "experts (MoE)"},
           {"expert_3_mp_rank_00_model_states.pt", "experts (MoE)"},
           {"expp_rank_0_mp_rank_00_optim_states.pt", "experts (MoE)"},
           {"my_model_states.pt", "an unknown kind of checkpoint"}})
    EXPECT_EQ(with_file(name), refusal(name, part));
  fs::remove_all(folder());
  DeepSpeedWriter w;
  w.write(folder());
  fs::create_directory(folder() + "/zero");
  EXPECT_EQ(what_of(Errc::unsupported).find(": is a universal checkpoint"), 0u);
  w.partition_count = pk::list({pk::integer(2), pk::integer(1)});
  EXPECT_NE(what_of(w, Errc::unsupported).find("different numbers of ranks"), std::string::npos);
  w = {}, w.more_of_model = pk::text("autoep_layers") + pk::list({pk::integer(1)});
  EXPECT_NE(what_of(w, Errc::unsupported).find("layers of experts"), std::string::npos);
  w = {}, w.more_of_model = pk::text("args") + pk::object(pk::global("argparse", "Namespace"), {});
  EXPECT_NE(what_of(w, Errc::unsupported).find("needs 'argparse.Namespace'"), std::string::npos);
}

/// Any bytes in the files are weights or an error of one line.
TEST_F(DeepSpeedWeights, ThatAreMutatedAreReadOrRefused) {
  std::mt19937 random(5);
  int read = 0, refused = 0;
  for (const int stage : {1, 2, 3}) {
    DeepSpeedWriter w;
    w.stage = stage;
    fs::remove_all(folder());
    w.write(folder());
    for (const std::string& file : {w.model_file(0), w.optimizer_file(1)}) {
      std::ifstream in(folder() + "/" + file, std::ios::binary);
      const std::string bytes((std::istreambuf_iterator<char>(in)), {});
      for (int round = 0; round < 150; ++round) {
        std::string changed = bytes;
        for (int n = 0; n < 2; ++n) changed[random() % changed.size()] = static_cast<char>(random());
        test::write_bytes(folder() + "/" + file, changed);
        try {
          const TensorSource files = open_tensors(folder());
          for (const TensorInfo& t : files.tensors()) {
            ASSERT_LT(t.bytes, 1u << 20);
            std::vector<std::byte> out(t.bytes);
            files.read_bytes(t, 0, out);
          }
          ++read;
        } catch (const Error& e) {
          ++refused;
          EXPECT_EQ(std::string(e.what()).find('\n'), std::string::npos);
        }
      }
      test::write_bytes(folder() + "/" + file, bytes);
    }
  }
  EXPECT_GT(read, 50);
  EXPECT_GT(refused, 50);
}

}  // namespace
}  // namespace rz
