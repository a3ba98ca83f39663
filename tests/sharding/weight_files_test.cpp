// Weights in files of PyTorch and Hugging Face, whatever their kind.

#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <chrono>
#include <filesystem>
#include <numeric>

#include "sharding/checkpoint/model_tensors.h"
#include "sharding/checkpoint/open_tensors.h"
#include "sharding/checkpoint/safetensors.h"
#include "tests/support/deepspeed_writer.h"
#include "tests/support/error_of.h"
#include "tests/support/torch_writer.h"
#include "tests/support/written_checkpoint.h"

namespace rz {
namespace {

namespace fs = std::filesystem;
namespace pk = test::pickle;
using test::error_of;
using test::TorchWriter;

std::vector<float> counted(std::size_t count, float first = 0) {
  std::vector<float> values(count);
  std::iota(values.begin(), values.end(), first);
  return values;
}

class WeightFilesOf : public testing::Test {
 protected:
  std::string path(const std::string& name) const { return folder_ / name; }
  void put_safetensors(const std::string& file, const std::string& tensor, float first) const {
    const std::vector<SafetensorsSpec> specs{{tensor, {2, 3}, DType::f32}};
    SafetensorsWriter writer(path(file), specs);
    writer.write(counted(6, first));
    writer.finish();
  }
  void put_torch(const std::string& file, const std::string& tensor, float first) const {
    TorchWriter w;
    w.write(path(file), pk::state_dict({{pk::text(tensor), w.tensor(counted(6, first), {2, 3})}}));
  }
  void put_index(const std::string& file, const std::string& map) const {
    test::write_bytes(path(file), "{\"metadata\":{\"total_size\":48},\"weight_map\":" + map + "}");
  }
  std::vector<float> values(const TensorSource& files, const std::string& tensor) const {
    const TensorInfo* t = files.find(tensor);
    if (!t) return ADD_FAILURE() << files.path() << " lacks " << tensor, std::vector<float>();
    std::vector<float> out(t->count);
    files.read_f32(*t, 0, out);
    return out;
  }
  std::string what_of(const std::string& file) const {
    return error_of([&] { open_tensors(path(file)); }).what();
  }

  test::Folder folder_;
};

TEST_F(WeightFilesOf, ALengthOfTheHeaderThatLooksLikeAPickleIsNone) {
  for (const std::size_t length : {640u, 896u, 1152u, 1408u, 0x4B50u}) {
    std::string header = R"({"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})";
    header.resize(length, ' ');
    std::string bytes(8, '\0');
    for (std::size_t i = 0; i < 8; ++i) bytes[i] = static_cast<char>(std::uint64_t{length} >> (8 * i));
    test::write_bytes(path("h.safetensors"), bytes + header + std::string("\0\0\x80\x3F", 4));
    EXPECT_EQ(values(open_tensors(path("h.safetensors")), "w"), counted(1, 1)) << length;
  }
}

TEST_F(WeightFilesOf, EveryKindAreFoundByTheirContents) {
  put_safetensors("a.bin", "w", 1);
  put_torch("a.safetensors", "w", 2);
  TorchWriter old;
  test::write_bytes(path("a.pt"),
                    old.legacy_bytes(pk::dict({{pk::text("w"), old.tensor(counted(6, 3), {2, 3})}})));
  EXPECT_EQ(values(open_tensors(path("a.bin")), "w"), counted(6, 1));
  EXPECT_EQ(values(open_tensors(path("a.safetensors")), "w"), counted(6, 2));
  EXPECT_EQ(values(open_tensors(path("a.pt")), "w"), counted(6, 3));
  for (const char* file : {"a.bin", "a.safetensors", "a.pt"}) {
    const TensorSource files = open_tensors(path(file));
    EXPECT_EQ(files.path(), path(file));
    ASSERT_EQ(files.tensors().size(), 1u);
    const TensorInfo& t = files.tensors()[0];
    EXPECT_EQ(t.dtype, "F32");
    EXPECT_EQ(t.shape, (std::vector<std::uint64_t>{2, 3}));
    EXPECT_EQ(t.bytes, 24u);
    EXPECT_EQ(files.find("v"), nullptr);
  }
}

TEST_F(WeightFilesOf, AFolderArePreferredInTheOrderOfHuggingFace) {
  put_torch("shard.bin", "w", 4);
  put_index("pytorch_model.bin.index.json", R"({"w":"shard.bin"})");
  EXPECT_EQ(values(open_tensors(folder_.path()), "w"), counted(6, 4));
  put_torch("pytorch_model.bin", "w", 3);
  EXPECT_EQ(values(open_tensors(folder_.path()), "w"), counted(6, 3));
  put_safetensors("shard.safetensors", "w", 2);
  put_index("model.safetensors.index.json", R"({"w":"shard.safetensors"})");
  EXPECT_EQ(values(open_tensors(folder_.path()), "w"), counted(6, 2));
  put_safetensors("model.safetensors", "w", 1);
  EXPECT_EQ(values(open_tensors(folder_.path()), "w"), counted(6, 1));
}

TEST_F(WeightFilesOf, AFolderWithSeveralSourcesAreTheBestOnesOrRefused) {
  // A Trainer's folder under ZeRO-3: placeholders, and DeepSpeed's files, which have the weights.
  const auto put_empty = [&](const std::string& file) {
    SafetensorsWriter writer(path(file), std::array{SafetensorsSpec{"a.weight", {0}, DType::f32},
                                                    SafetensorsSpec{"b.weight", {0}, DType::f32}});
    writer.finish();
  };
  put_empty("model.safetensors");
  const std::string empty = path("model.safetensors") + ": tensor 'a.weight' and 1 others have 0 elements";
  EXPECT_TRUE(what_of("model.safetensors").starts_with(empty)) << what_of("model.safetensors");
  test::DeepSpeedWriter deepspeed;
  deepspeed.stage = 3;
  fs::create_directories(path("global_step7"));
  deepspeed.write(path("global_step7"));
  test::write_bytes(path("latest"), "global_step7");
  const TensorSource of_deepspeed = open_tensors(folder_.path());
  EXPECT_EQ(of_deepspeed.path(), path("global_step7"));
  EXPECT_TRUE(of_deepspeed.choice().starts_with("read: the f32 weights of DeepSpeed in " +
                                                path("global_step7") + "; not read: model.safetensors"))
      << of_deepspeed.choice();
  EXPECT_TRUE(what_of("model.safetensors").ends_with("give " + path("global_step7")));
  // A run's folder with older weights.
  fs::create_directories(path("run"));
  test::write_checkpoint(path("run/global_step5"), {{"model/w", {2, 3}, test::equal_ranges(6, 2), 5}}, 2);
  put_safetensors("run/model.safetensors", "w", 1);
  test::write_bytes(path("run/latest"), "global_step5\n");
  const auto now = fs::last_write_time(path("run/global_step5/checkpoint.json"));
  fs::last_write_time(path("run/model.safetensors"), now - std::chrono::hours(1));
  const TensorSource newest = open_tensors(path("run"));
  EXPECT_EQ(values(newest, "w"), counted(6, 5));
  EXPECT_EQ(newest.choice(),
            "read: the f32 values of " + path("run/global_step5") + "; not read: model.safetensors (older)");
  fs::last_write_time(path("run/model.safetensors"), now + std::chrono::hours(1));
  const TensorSource of_run = open_tensors(path("run"));
  EXPECT_EQ(values(of_run, "w"), counted(6, 1));
  EXPECT_EQ(of_run.choice(),
            "read: " + path("run/model.safetensors") + "; not read: the checkpoint global_step5 (older)");
  put_torch("run/pytorch_model.bin", "w", 2);
  fs::last_write_time(path("run/pytorch_model.bin"), now + std::chrono::hours(2));
  EXPECT_TRUE(open_tensors(path("run"))
                  .choice()
                  .ends_with("not read: pytorch_model.bin (newer), the checkpoint global_step5 (older)"));
  EXPECT_EQ(values(open_tensors(path("run/global_step5")), "w"), counted(6, 5));
  EXPECT_EQ(values(open_checkpoint(path("run"), TensorPart::weights), "w"), counted(6, 5))
      << "whatever lies beside it";
}

/// Its parameters and persistent buffers, by their names in the model.
TEST_F(WeightFilesOf, ACheckpointOfThisLibraryAreThoseOfAllItsRanks) {
  const std::vector<StoredSlice> boxes{{0, Box{{2, 3}, {0, 0}, {2, 1}}, 0, 2, 0},
                                       {1, Box{{2, 3}, {0, 1}, {2, 2}}, 0, 4, 0}};
  const auto put = [&](const std::string& tag, float first) {
    test::write_checkpoint(path("run/" + tag),
                           {{"model/w", {2, 3}, boxes, first},
                            {"buffer/n", {2}, test::equal_ranges(2, 1), 3, DType::i64},
                            {"optimizer/exp_avg/w", {2, 3}, boxes, 9}},
                           2, R"({"steps":5})");
  };
  put("global_step5", 1);
  test::write_bytes(path("run/latest"), "global_step5");
  for (const char* from : {"run", "run/global_step5"}) {
    const TensorSource source = open_tensors(path(from));
    EXPECT_EQ(source.path(), path("run/global_step5"));
    EXPECT_EQ(source.choice(), "");
    EXPECT_EQ(source.state(), R"({"steps":5})");
    ASSERT_EQ(source.tensors().size(), 2u) << "none of the optimizer";
    EXPECT_EQ(source.find("n")->dtype, "I64");
    EXPECT_EQ(values(source, "w"), counted(6, 1));
  }
  put("global_step6", 2);
  EXPECT_TRUE(open_tensors(path("run"))
                  .choice()
                  .starts_with("read: the f32 values of " + path("run/global_step5") +
                               "; not read: the checkpoint global_step6"));
  EXPECT_EQ(open_tensors(path("run/global_step6")).choice(), "");
  fs::remove(path("run/latest"));
  EXPECT_TRUE(what_of("run").ends_with("give the folder of a checkpoint")) << what_of("run");
  put("global_step6", 2);
  test::write_checkpoint(
      path("twice"),
      {{"model/n", {2}, test::equal_ranges(2, 1)}, {"buffer/n", {2}, test::equal_ranges(2, 1)}}, 1);
  EXPECT_TRUE(what_of("twice").ends_with("has a parameter and a buffer of the name 'n'")) << what_of("twice");
}

/// A part of a tensor that is cut by rows is one call, however many rows it has.
TEST_F(WeightFilesOf, ATableIsReadByRowsInOneCall) {
  int calls = 0;
  TensorSource source("table");
  source.add({"w", "F32", {50257, 768}, 50257 * 768, 50257 * 768 * 4},
             [&](std::uint64_t begin, std::span<std::byte> out) {
               ++calls;
               EXPECT_EQ(begin, 1000u * 768 * 4);
               EXPECT_EQ(out.size(), 2000u * 768 * 4);
             });
  Parameter p;
  p.set_part({{50257, 768}, {1000, 0}, {2000, 768}});
  std::vector<float> values(p.count());
  read_parameter(source, source.tensors()[0], p, {0, p.count()}, values.data());
  EXPECT_EQ(calls, 1);
}

/// As nanoGPT and Lightning save them.
TEST_F(WeightFilesOf, ATrainingLoopAreFoundUnderTheirKey) {
  TorchWriter w;
  const std::string weights = pk::state_dict({{pk::text("w"), w.tensor(counted(6), {2, 3})}});
  const std::string optimizer =
      pk::dict({{pk::text("state"), pk::dict({})}, {pk::text("lr"), pk::integer(1)}});
  w.write(path("ckpt.pt"), pk::dict({{pk::text("optimizer"), optimizer},
                                     {pk::text("iter_num"), pk::integer(10)},
                                     {pk::text("model"), weights}}));
  const TensorSource files = open_tensors(path("ckpt.pt"));
  EXPECT_EQ(values(files, "w"), counted(6));
  EXPECT_EQ(files.choice(), "read: 'model' of " + path("ckpt.pt"));
  EXPECT_EQ(files.tensors().size(), 1u);
  w.write(path("two.pt"),
          pk::dict({{pk::text("model"), weights},
                    {pk::text("ema"), pk::dict({{pk::text("w"), w.tensor(counted(2), {2})}})}}));
  EXPECT_TRUE(what_of("two.pt").ends_with("holds 2 state dicts, 'model', 'ema'; save one of them by itself"))
      << what_of("two.pt");
}

TEST_F(WeightFilesOf, AnIndexLieInSeveralFiles) {
  put_torch("1.bin", "a", 1);
  put_torch("2.bin", "b", 2);
  put_safetensors("3.safetensors", "c", 3);
  put_index("x.index.json", R"({"a":"1.bin","b":"2.bin","c":"3.safetensors"})");
  const TensorSource files = open_tensors(path("x.index.json"));
  EXPECT_EQ(files.tensors().size(), 3u);
  EXPECT_EQ(values(files, "a"), counted(6, 1));
  EXPECT_EQ(values(files, "b"), counted(6, 2));
  EXPECT_EQ(values(files, "c"), counted(6, 3));
}

TEST_F(WeightFilesOf, AnIndexWithNamesForATerminalAreRefusedInOneLine) {
  put_index("x.index.json", R"({"a": "x\n\u001b[31mall is well"})");
  EXPECT_EQ(what_of("x.index.json"),
            path("x\\x0a\\x1b[31mall is well: cannot be opened: No such file or directory"));
  put_safetensors("1.safetensors", "a", 1);
  put_index("x.index.json", R"({"a": "1.safetensors", "b\n\u001b[2J": "1.safetensors"})");
  EXPECT_EQ(what_of("x.index.json"),
            path("x.index.json") + ": weight_map: tensor 'b\\x0a\\x1b[2J' is not in 1.safetensors");
}

TEST_F(WeightFilesOf, AnIndexThatDiffersAreRefused) {
  put_torch("1.bin", "a", 1);
  put_torch("2.bin", "b", 2);
  put_torch("again.bin", "a", 2);
  const std::string index = "pytorch_model.bin.index.json";
  put_index(index, R"({"a":"1.bin"})");
  fs::rename(path("2.bin"), path("1.bin"));
  EXPECT_EQ(what_of(index), path("1.bin") + ": tensor 'b' is not in weight_map of " + path(index));
  put_torch("1.bin", "a", 1);
  put_torch("2.bin", "b", 2);
  put_index(index, R"({"a":"1.bin","c":"2.bin","b":"2.bin"})");
  EXPECT_EQ(what_of(index), path(index) + ": weight_map: tensor 'c' is not in 2.bin");
  put_index(index, R"({"a":"2.bin","b":"1.bin"})");
  EXPECT_EQ(what_of(index), path(index) + ": weight_map: tensor 'a' is not in 2.bin");
  put_index(index, R"({"a":"1.bin","b":"again.bin"})");
  EXPECT_EQ(what_of(index), path("again.bin") + ": tensor 'a' is also in " + path("1.bin"));
  put_index(index, R"({"a":"../1.bin"})");
  EXPECT_NE(what_of(index).find("expected the name of a file in the same folder"), std::string::npos);
  put_index(index, R"({"a":"none.bin"})");
  EXPECT_EQ(what_of(index), path("none.bin") + ": cannot be opened: No such file or directory");
}

TEST_F(WeightFilesOf, PyTorchAreReadAsF32) {
  TorchWriter w;
  std::vector<std::uint16_t> brain, half;
  for (int i = 0; i < 9000; ++i)
    brain.push_back(
        static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(static_cast<float>(i % 200)) >> 16));
  half = {0x3c00, 0xc000, 0x0001, 0x7c00};
  w.write(path("x.bin"),
          pk::dict({{pk::text("b"), w.tensor(brain, {9000}, "BFloat16Storage")},
                    {pk::text("h"), w.tensor(half, {4}, "HalfStorage")},
                    {pk::text("d"), w.tensor(std::vector<double>{1.5, 1e300}, {2}, "DoubleStorage")},
                    {pk::text("i"), w.tensor(std::vector<std::int64_t>{1, 2, 3}, {3}, "LongStorage")},
                    {pk::text("turned"),
                     TorchWriter::view(w.storage(counted(6), "FloatStorage"), 0, {3, 2}, {1, 3})}}));
  const TensorSource files = open_tensors(path("x.bin"));
  const auto b = values(files, "b");
  for (int i = 0; i < 9000; ++i) ASSERT_EQ(b[static_cast<std::size_t>(i)], static_cast<float>(i % 200));
  std::vector<float> part(3);
  files.read_f32(*files.find("b"), 8195, part);
  EXPECT_EQ(part, (std::vector<float>{195, 196, 197}));
  EXPECT_EQ(values(files, "h"), (std::vector<float>{1, -2, 0x1p-24f, INFINITY}));
  EXPECT_EQ(values(files, "d"), (std::vector<float>{1.5, INFINITY}));
  EXPECT_EQ(values(files, "turned"), (std::vector<float>{0, 3, 1, 4, 2, 5}));

  const TensorInfo& i = *files.find("i");
  std::vector<std::int64_t> all(3), last(1);
  files.read_bytes(i, 0, std::as_writable_bytes(std::span(all)));
  EXPECT_EQ(all, (std::vector<std::int64_t>{1, 2, 3}));
  files.read_bytes(i, 16, std::as_writable_bytes(std::span(last)));
  EXPECT_EQ(last[0], 3);
  EXPECT_EQ(error_of([&] { files.read_f32(i, 0, part); }).what(),
            path("x.bin") + ": tensor 'i': dtype I64 cannot be read as f32; F32, F16, BF16 and F64 can");
  EXPECT_EQ(error_of([&] { files.read_f32(*files.find("h"), 2, part); }).code(), Errc::invalid_argument);
  EXPECT_EQ(error_of([&] { files.read_bytes(i, 4, std::as_writable_bytes(std::span(last))); }).code(),
            Errc::invalid_argument)
      << "no whole elements";
  EXPECT_EQ(error_of([&] { files.read_bytes(i, 24, std::as_writable_bytes(std::span(last))); }).code(),
            Errc::invalid_argument);
}

}  // namespace
}  // namespace rz
