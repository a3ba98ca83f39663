// Weights of checkpoints and of safetensors as folders of Hugging Face, and comparisons of both.

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <nlohmann/json.hpp>
#include <numeric>

#include "comm/core/math.h"
#include "sharding/checkpoint/checkpoint_folder.h"
#include "sharding/checkpoint/compare.h"
#include "sharding/checkpoint/open_tensors.h"
#include "sharding/checkpoint/safetensors.h"
#include "sharding/checkpoint/write_weights.h"
#include "sharding/io/json.h"
#include "tests/support/error_of.h"
#include "tests/support/written_checkpoint.h"

namespace rz {
namespace {

namespace fs = std::filesystem;
using test::error_of;
using test::Folder;
using test::write_checkpoint;
using Names = std::vector<std::string>;

Names files_in(const std::string& dir) {
  Names names;
  for (const auto& entry : fs::directory_iterator(dir)) names.push_back(entry.path().filename());
  std::ranges::sort(names);
  return names;
}

/// A safetensors file of f32.
void write_f32(const std::string& path,
               const std::vector<std::pair<std::string, std::vector<float>>>& tensors) {
  std::vector<SafetensorsSpec> specs;
  for (const auto& [name, values] : tensors) specs.push_back({name, {values.size()}, DType::f32});
  SafetensorsWriter writer(path, specs);
  for (const auto& [name, values] : tensors) writer.write(values);
  writer.finish();
}

template <class T>
std::vector<T> values_of(const std::string& path, const std::string& tensor, const std::string& dtype) {
  const TensorSource files = open_tensors(path);
  const TensorInfo* entry = files.find(tensor);
  if (!entry) return ADD_FAILURE() << path << " lacks " << tensor, std::vector<T>();
  EXPECT_EQ(entry->dtype, dtype);
  std::vector<T> values(entry->count);
  files.read_bytes(*entry, 0, std::as_writable_bytes(std::span(values)));
  return values;
}

std::vector<float> counted(float first, std::size_t count) {
  std::vector<float> values(count);
  std::iota(values.begin(), values.end(), first);
  return values;
}

// ---- files

TEST(FilesOfWeights, AreCutAsHuggingFaceCutsThem) {
  using Files = std::vector<std::vector<std::size_t>>;
  const auto cut = [](std::vector<std::uint64_t> bytes, std::uint64_t max) {
    return cut_into_files(bytes, max);
  };
  EXPECT_EQ(cut({}, 10), (Files{{}}));
  EXPECT_EQ(cut({3, 3, 4}, 10), (Files{{0, 1, 2}}));
  EXPECT_EQ(cut({3, 3, 5}, 10), (Files{{0, 1}, {2}}));
  EXPECT_EQ(cut({10, 10}, 10), (Files{{0}, {1}}));
  EXPECT_EQ(cut({3, 11, 3}, 10), (Files{{1}, {0, 2}})) << "a larger tensor has a file of its own";
}

class Weights : public testing::Test {
 protected:
  /// Of two ranks: a parameter in two boxes, one in ranges, a buffer, and the optimizer's.
  std::string checkpoint(float first = 0) {
    const std::string path = folder_ / concat("run/global_step", ++steps_);
    const std::vector<StoredSlice> boxes{{0, Box{{4, 5}, {0, 0}, {4, 3}}, 0, 12, 0},
                                         {1, Box{{4, 5}, {0, 3}, {4, 2}}, 0, 8, 0}};
    write_checkpoint(path,
                     {{"model/a.weight", {4, 5}, boxes, first},
                      {"model/b.weight", {30}, test::equal_ranges(30, 2), first + 1},
                      {"buffer/c.count", {3}, test::equal_ranges(3, 1), 5, DType::i64},
                      {"optimizer/exp_avg/a.weight", {4, 5}, boxes, 1}},
                     2, concat(R"({"steps":)", steps_, R"(,"client_state":{"epoch":1}})"));
    return path;
  }
  TensorSource weights(const std::string& path) const { return open_tensors(path); }
  std::string out() const { return folder_ / "out"; }

  Folder folder_;
  int steps_ = 0;
};

TEST_F(Weights, OfACheckpointAreOneFile) {
  write_weights(weights(checkpoint()), out());
  EXPECT_EQ(files_in(out()), Names{"model.safetensors"});
  EXPECT_EQ(values_of<float>(out(), "a.weight", "F32"), counted(0, 20));
  EXPECT_EQ(values_of<float>(out(), "b.weight", "F32"), counted(1, 30));
  EXPECT_EQ(values_of<std::int64_t>(out(), "c.count", "I64"), (std::vector<std::int64_t>{5, 6, 7}));
  const TensorSource files = open_tensors(out());
  EXPECT_EQ(files.tensors().size(), 3u) << "none of the optimizer";
  EXPECT_EQ(files.find("a.weight")->shape, (std::vector<std::uint64_t>{4, 5}));
}

TEST_F(Weights, OfSeveralFilesHaveTheIndexOfHuggingFace) {
  write_weights(weights(checkpoint()), out(), {.max_file_bytes = 110});
  EXPECT_EQ(files_in(out()), (Names{"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
                                    "model.safetensors.index.json"}));
  EXPECT_EQ(read_text_file(out() + "/model.safetensors.index.json"),
            "{\n  \"metadata\": {\n    \"total_size\": 224\n  },\n  \"weight_map\": {\n"
            "    \"a.weight\": \"model-00002-of-00002.safetensors\",\n"
            "    \"b.weight\": \"model-00001-of-00002.safetensors\",\n"
            "    \"c.count\": \"model-00002-of-00002.safetensors\"\n  }\n}\n");
  EXPECT_EQ(values_of<float>(out(), "b.weight", "F32"), counted(1, 30));
  EXPECT_EQ(values_of<std::int64_t>(out(), "c.count", "I64"), (std::vector<std::int64_t>{5, 6, 7}));
  const std::string again = folder_ / "again", index = out() + "/model.safetensors.index.json";
  write_weights(weights(index), again, {.max_file_bytes = 1000});
  EXPECT_EQ(files_in(again), Names{"model.safetensors"});
  EXPECT_TRUE(compare(weights(again), weights(out()), 0, [](auto, auto) {}).none());
}

TEST_F(Weights, RoundToNearestEven) {
  const float tie = 0x1.01p0f, above = 0x1.010002p0f, next_tie = 0x1.03p0f, half_tie = 0x1.002p0f;
  const std::vector<float> values{tie, above, next_tie, half_tie, -0.0f, 65504.0f, 0x1p-24f, 0x1p-25f};
  write_f32(folder_ / "x.safetensors", {{"x", values}});
  write_weights(weights(folder_ / "x.safetensors"), folder_ / "bf16", {.dtype = DType::bf16});
  write_weights(weights(folder_ / "x.safetensors"), folder_ / "f16", {.dtype = DType::f16});
  const auto brain = values_of<std::uint16_t>(folder_ / "bf16", "x", "BF16");
  EXPECT_EQ(std::vector(brain.begin(), brain.begin() + 5),
            (std::vector<std::uint16_t>{0x3f80, 0x3f81, 0x3f82, 0x3f80, 0x8000}));
  EXPECT_EQ(values_of<std::uint16_t>(folder_ / "f16", "x", "F16"),
            (std::vector<std::uint16_t>{0x3c04, 0x3c04, 0x3c0c, 0x3c00, 0x8000, 0x7bff, 0x0001, 0x0000}));
  write_weights(weights(folder_ / "f16"), folder_ / "wide", {.dtype = DType::f32});
  EXPECT_EQ(values_of<float>(folder_ / "wide", "x", "F32")[5], 65504.0f);
}

TEST_F(Weights, AnOverflowIsRefusedOrAllowed) {
  std::vector<float> values = counted(0, 10);
  values[7] = 65520;
  values[8] = std::numeric_limits<float>::infinity();
  write_f32(folder_ / "x.safetensors", {{"first", counted(0, 5)}, {"x", values}});
  const TensorSource source = weights(folder_ / "x.safetensors");
  const Error e = error_of([&] { write_weights(source, out(), {.dtype = DType::f16}); });
  EXPECT_EQ(e.code(), Errc::diverged);
  EXPECT_EQ(e.what(), source.path() +
                          ": tensor 'x': element 7 is 65520, which overflows f16; choose bf16 or f32, or "
                          "allow the overflow to infinity");
  EXPECT_EQ(files_in(folder_.path()), Names{"x.safetensors"}) << "nothing is left";
  write_weights(source, out(), {.dtype = DType::f16, .allow_overflow = true});
  EXPECT_EQ(values_of<std::uint16_t>(out(), "x", "F16")[7], 0x7c00);
}

TEST_F(Weights, EveryBitAndDtypeIsKept) {
  const std::string path = folder_ / "x.safetensors";
  std::vector<std::byte> bytes(5 + 8 + 16 + 2);
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(0xff - 3 * i);
  const std::vector<SafetensorsSpec> specs{{"mask", {5, 1}, DType::u8, "BOOL"},
                                           {"nan", {2}, DType::f32},
                                           {"complex", {2}, DType::f64, "C64"},
                                           {"short", {1}, DType::f16, "I16"}};
  SafetensorsWriter writer(path, specs);
  writer.write(bytes);
  writer.finish();
  write_weights(weights(path), out(), {.dtype = DType::f32});
  const TensorSource before = open_safetensors(path), after = open_safetensors(out() + "/model.safetensors");
  std::uint64_t begin = 0;  // of the data
  for (const TensorInfo& e : after.tensors()) {
    EXPECT_EQ(before.find(e.name)->dtype, e.dtype);
    EXPECT_EQ(begin % (safetensors_bits(e.dtype) / 8), 0u) << e.name << " is not aligned";
    begin += e.bytes;
  }
  EXPECT_TRUE(compare(weights(path), weights(out()), 0, [](auto, auto) {}).none());
  const auto nans = values_of<std::uint32_t>(out(), "nan", "F32");
  EXPECT_EQ(std::memcmp(nans.data(), &bytes[5], 8), 0);
}

TEST_F(Weights, TensorsOfManyBlocksAreWhole) {
  const std::vector<float> values = counted(0, (std::size_t{1} << 20) + 5);
  write_f32(folder_ / "x.safetensors", {{"x", values}});
  write_weights(weights(folder_ / "x.safetensors"), out());
  EXPECT_EQ(values_of<float>(out(), "x", "F32"), values);
  write_weights(weights(folder_ / "x.safetensors"), folder_ / "bf16", {.dtype = DType::bf16});
  const auto narrow = values_of<std::uint16_t>(folder_ / "bf16", "x", "BF16");
  for (std::size_t i = 0; i < values.size(); i += 4093) EXPECT_EQ(narrow[i], from_f32<bf16>(values[i]).bits);
  EXPECT_EQ(narrow.back(), from_f32<bf16>(values.back()).bits);
}

TEST_F(Weights, FilesAreCopiedAndAnExistingFolderIsKept) {
  std::ofstream(folder_ / "config.json") << "{}";
  write_weights(weights(checkpoint()), out(), {.copies = {folder_ / "config.json"}});
  EXPECT_EQ(files_in(out()), (Names{"config.json", "model.safetensors"}));
  const auto before = fs::last_write_time(out() + "/model.safetensors");
  EXPECT_EQ(error_of([&] { write_weights(weights(checkpoint()), out()); }).code(), Errc::io);
  EXPECT_EQ(fs::last_write_time(out() + "/model.safetensors"), before);
  const Error e =
      error_of([&] { write_weights(weights(checkpoint()), folder_ / "b", {.copies = {folder_ / "none"}}); });
  EXPECT_EQ(e.what(), folder_ / "none" + ": cannot be opened");
  EXPECT_EQ(files_in(folder_.path()), (Names{"config.json", "out", "run"}));
}

TEST_F(Weights, ADtypeOfPartsOfBytesIsRefused) {
  const std::string header = R"({"x":{"dtype":"F4","shape":[2],"data_offsets":[0,1]}})";
  const std::uint64_t length = header.size();
  std::ofstream(folder_ / "x.safetensors", std::ios::binary)
      << std::string(reinterpret_cast<const char*>(&length), 8) << header << 'x';
  const TensorSource source = weights(folder_ / "x.safetensors");
  const Error e = error_of([&] { write_weights(source, out()); });
  EXPECT_EQ(e.what(), folder_ / "x.safetensors" + ": tensor 'x': its dtype F4 cannot be converted");
}

TEST_F(Weights, APathIsACheckpointOrAFolderOfThemOrSafetensors) {
  const std::string run = folder_ / "run";
  EXPECT_EQ(error_of([&] { weights(run); }).what(), run + ": cannot be opened: No such file or directory");
  EXPECT_EQ(error_of([&] { checkpoint_at(run); }).what(), run + ": no such folder");
  const std::string first = checkpoint(), second = checkpoint();
  EXPECT_EQ(checkpoint_at(second), second);
  EXPECT_EQ(error_of([&] { checkpoint_at(run); }).what(),
            run + ": holds neither checkpoint.json nor a file latest; give the folder of a checkpoint");
  write_tag_file(run, latest_file, "global_step1");
  EXPECT_EQ(checkpoint_at(run), first);
  EXPECT_EQ(weights(run).path(), first);
  write_tag_file(run, latest_file, "global_step9");
  EXPECT_EQ(error_of([&] { checkpoint_at(run); }).what(),
            run + ": latest names global_step9, which is no checkpoint in this folder");
}

// ---- comparisons

class Comparison : public Weights {
 protected:
  SourceDifferences differences(const std::string& a, const std::string& b, double tolerance = 0,
                                TensorPart part = TensorPart::all) const {
    const auto open = [&](const std::string& path) {
      return has_checkpoint(path) ? open_checkpoint(path, part) : open_tensors(path);
    };
    return compare(open(a), open(b), tolerance, [](auto, auto) {});
  }
  /// Files of one tensor x.
  TensorDifference difference(const std::vector<float>& a, const std::vector<float>& b,
                              double tolerance = 0) const {
    write_f32(folder_ / "a", {{"x", a}}), write_f32(folder_ / "b", {{"x", b}});
    const SourceDifferences d = differences(folder_ / "a", folder_ / "b", tolerance);
    EXPECT_EQ(d.none(), d.tensors.empty());
    EXPECT_EQ(d.equal, d.tensors.empty());
    return d.none() ? TensorDifference{} : d.tensors[0];
  }
};

TEST_F(Comparison, FindsWhatDiffers) {
  const std::string a = checkpoint(), b = checkpoint(0.5f);
  EXPECT_TRUE(differences(a, a).none());
  EXPECT_EQ(differences(a, a).equal, 4u);
  const SourceDifferences d = differences(a, b);
  EXPECT_EQ(d.equal, 2u);
  ASSERT_EQ(d.tensors.size(), 2u);
  EXPECT_EQ(d.tensors[0].name, "model/a.weight");
  EXPECT_EQ(d.tensors[0].a, "F32 [4, 5]");
  EXPECT_EQ(d.tensors[0].differing, 20u);
  EXPECT_EQ(d.tensors[0].max_difference, 0.5);
  EXPECT_EQ(d.state, Names{"steps: 1 and 2"});
  EXPECT_EQ(differences(a, b, 0.5).tensors.size(), 0u);
  EXPECT_EQ(differences(a, b, 0.49).tensors.size(), 2u);
}

TEST_F(Comparison, NamesWhatOneLacks) {
  write_f32(folder_ / "a", {{"x", {1}}, {"only", {1}}}),
      write_f32(folder_ / "b", {{"x", {1}}, {"other", {1}}});
  const SourceDifferences d = differences(folder_ / "a", folder_ / "b");
  EXPECT_EQ(d.only_in_a, Names{"only"});
  EXPECT_EQ(d.only_in_b, Names{"other"});
  EXPECT_EQ(d.equal, 1u);
  EXPECT_FALSE(d.none());
}

TEST_F(Comparison, CountsElementsByBitsOrWithinTheTolerance) {
  const float nan = std::numeric_limits<float>::quiet_NaN(), inf = std::numeric_limits<float>::infinity();
  TensorDifference d = difference({1, 2, 3, 4}, {1, 2.5, 3, 2});
  EXPECT_EQ(d.differing, 2u);
  EXPECT_EQ(d.max_difference, 2);
  EXPECT_EQ(difference({1, 2, 3, 4}, {1, 2.5, 3, 2}, 1).differing, 1u);
  EXPECT_EQ(difference({0.0f}, {-0.0f}).differing, 1u) << "other bits";
  EXPECT_EQ(difference({0.0f}, {-0.0f}, 1e-300).differing, 0u);
  EXPECT_EQ(difference({nan, inf}, {nan, inf}).differing, 0u);
  EXPECT_EQ(difference({inf}, {-inf}).max_difference, inf);
  d = difference({nan, 1}, {1, 3}, 100);
  EXPECT_EQ(d.differing, 1u);
  EXPECT_TRUE(std::isnan(d.max_difference)) << "NaN is no small difference";
  EXPECT_FALSE(difference({1, 2}, {1, 2, 3}).comparable);
  std::vector<float> many = counted(0, 600'000), others = many;
  others[599'999] += 1;
  EXPECT_EQ(difference(many, others).differing, 1u) << "in the last block";
}

TEST_F(Comparison, DtypesDifferUnlessThereIsATolerance) {
  write_weights(weights(checkpoint()), folder_ / "f32");
  write_weights(weights(folder_ / "f32"), folder_ / "bf16", {.dtype = DType::bf16});
  const SourceDifferences d = differences(folder_ / "f32", folder_ / "bf16");
  ASSERT_EQ(d.tensors.size(), 2u);
  EXPECT_EQ(d.tensors[0].b, "BF16 [4, 5]");
  EXPECT_EQ(d.tensors[0].differing, 0u) << "small integers are exact in bf16";
  EXPECT_TRUE(differences(folder_ / "f32", folder_ / "bf16", 1e-9).none());
}

TEST_F(Comparison, OfStatesListsLeaves) {
  const std::string a = folder_ / "a", b = folder_ / "b";
  write_checkpoint(a, {}, 1, R"({"steps":1,"same":[1,2],"client":{"epoch":1,"gone":true},"list":[1]})");
  write_checkpoint(b, {}, 1, R"({"steps":2,"same":[1,2],"client":{"epoch":2,"new":null},"list":[1,2]})");
  EXPECT_EQ(differences(a, b).state,
            (Names{"client.epoch: 1 and 2", "client.gone: only in A", "client.new: only in B",
                   "list: [1] and [1,2]", "steps: 1 and 2"}));
}

}  // namespace
}  // namespace rz
