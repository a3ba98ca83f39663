// Runs: ci
// Not under sanitizers: SlicesOfAnyBoxesAreRefused

// The index of a checkpoint: it reads what it writes, and refuses whatever does not fit together.

#include "sharding/checkpoint/checkpoint_index.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>

#include "sharding/io/checksum.h"
#include "tests/support/error_of.h"

namespace rz {
namespace {

CheckpointIndex small_index() {
  CheckpointIndex index;
  index.state = R"({"steps":12,"text":"a \"b\" \u00e9"})";
  index.files = {{rank_file(0, 2), 4000}, {rank_file(1, 2), 5000}};
  index.tensors["model/w"] = {"F32", {4, 6}, {{0, {}, 0, 10, 1}, {1, {}, 10, 24, 2}}};
  index.tensors["model/boxes"] = {"BF16",
                                  {4, 6},
                                  {{1, Box{{4, 6}, {0, 2}, {4, 4}}, 0, 16, 3},
                                   {0, Box{{4, 6}, {0, 0}, {4, 2}}, 3, 8, 4},
                                   {1, Box{{4, 6}, {0, 0}, {4, 2}}, 0, 3, 5}}};
  index.tensors["buffer/steps of a \"name\"\n"] = {"I64", {}, {{0, {}, 0, 1, ~std::uint64_t{0}}}};
  index.tensors["model/none"] = {"F32", {0, 7}, {}};
  return index;
}

const std::string file = "DIR/checkpoint.json";

/// The error for a text; empty if there is none.
std::string error_text(const std::string& text) {
  const std::string line = test::refusal([&] { parse_checkpoint_index(text, file); }, Errc::config);
  EXPECT_TRUE(line.empty() || line.starts_with(file + ": ")) << line;
  return line;
}

/// The text of small_index() with the first `from` replaced by `to`.
std::string changed(const std::string& from, const std::string& to) {
  std::string text = to_json(small_index());
  const auto at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from << " is not in " << text;
  return at == std::string::npos ? text : text.replace(at, from.size(), to);
}

void expect_error(const std::string& from, const std::string& to, const std::string& what) {
  EXPECT_EQ(error_text(changed(from, to)), file + ": " + what);
}

TEST(CheckpointIndex, ReadsWhatItWrites) {
  const CheckpointIndex index = small_index();
  EXPECT_EQ(parse_checkpoint_index(to_json(index), file), [&] {
    CheckpointIndex same = index;
    same.state = "{\"steps\":12,\"text\":\"a \\\"b\\\" \u00e9\"}";  // without an escape
    return same;
  }());
  EXPECT_EQ(parse_checkpoint_index(to_json(CheckpointIndex{}), file), CheckpointIndex{});
}

TEST(CheckpointIndex, NamesOfFilesAndSlicesAreThoseOfTheFormat) {
  EXPECT_EQ(rank_file(2, 4), "rank_00002_of_00004.safetensors");
  EXPECT_EQ(slice_name("model/w", {0, {}, 3, 9, 0}), "model/w[3:9]");
  EXPECT_EQ(slice_name("model/w", {0, Box{{256, 64}, {0, 32}, {256, 32}}, 0, 4096, 0}),
            "model/w[0:4096]@[0,32]+[256,32]");
}

TEST(CheckpointIndex, ATextCutAnywhereIsAnErrorOrEqual) {
  const std::string text = to_json(small_index());
  const CheckpointIndex whole = parse_checkpoint_index(text, file);
  std::size_t equal = 0;
  for (std::size_t length = 0; length < text.size(); ++length) {
    const std::string cut = text.substr(0, length);
    if (!error_text(cut).empty()) continue;
    EXPECT_EQ(parse_checkpoint_index(cut, file), whole) << cut;
    ++equal;
  }
  EXPECT_EQ(equal, 1u) << "only the newline at the end may be missing";
}

TEST(CheckpointIndex, AChangedByteIsAnErrorOrAnIndexThatFitsTogether) {
  const std::string text = to_json(small_index());
  for (std::size_t at = 0; at < text.size(); ++at)
    for (const char c : {'0', '9', '-', '"', '[', '}', ' ', '\x80', '\0'}) {
      std::string other = text;
      other[at] = c;
      error_text(other);  // neither another exception nor a crash
    }
}

TEST(CheckpointIndex, AForeignOrNewerFormatIsNamed) {
  expect_error("ringzero-checkpoint", "other",
               "is not an index of a checkpoint: it lacks \"format\": \"ringzero-checkpoint\"");
  EXPECT_EQ(error_text("[]"), error_text(changed("ringzero-checkpoint", "other")));
  EXPECT_EQ(error_text(R"({"metadata": {}, "weight_map": {}})"), error_text("[]"));
  expect_error(
      "\"version\": 1", "\"version\": 3",
      "version: the checkpoint has version 3 of the format and this build reads versions up to 2; use a "
      "newer build");
  expect_error("\"version\": 1", "\"version\": 0", "version: must be from 1 to 2147483647, found 0");
  expect_error("\"version\": 1,", "", "version: missing; give a whole number");
}

TEST(CheckpointIndex, SlicesThatOverlapOrLeaveElementsOutAreRefused) {
  const std::string w = "tensors.model/w.slices";
  expect_error("[10,24]", "[11,24]", w + ": they have 23 elements of the 24 of the tensor");
  expect_error("[10,24]", "[9,24]", w + ": they have 25 elements of the 24 of the tensor");
  expect_error("[0,10]", "[14,24]", w + ": numbers 0 and 1 have elements in common");
  expect_error("[0,10]", "[2,12]", w + ": numbers 0 and 1 have elements in common");
  const std::string boxes = "tensors.model/boxes.slices";
  expect_error("[0,2]", "[0,1]", boxes + ": numbers 0 and 2 have elements in common");
  expect_error("[3,8]", "[0,5]", boxes + ": numbers 1 and 2 have elements in common");
  expect_error("[0,16]", "[0,15]", boxes + ": they have 23 elements of the 24 of the tensor");
  expect_error(R"("shape":[0,7])", R"("shape":[1,7])",
               "tensors.model/none.slices: they have 0 elements of the 7 of the tensor");
}

/// Cuts a box in two until it is small, and the parts into ranges.
void cut(const Box& box, std::mt19937& random, std::vector<StoredSlice>& slices) {
  const std::size_t d = random() % 2;
  if (box.extent[d] > 1 && random() % 5 != 0) {
    Box low = box, high = box;
    low.extent[d] = 1 + random() % (box.extent[d] - 1);
    high.offset[d] += low.extent[d], high.extent[d] -= low.extent[d];
    cut(low, random, slices), cut(high, random, slices);
    return;
  }
  for (std::uint64_t begin = 0, end; begin < box.count(); begin = end) {
    end = begin + 1 + random() % (box.count() - begin);
    slices.push_back({.box = box, .begin = begin, .end = end});
  }
}

std::set<std::uint64_t> elements_of(const StoredSlice& s) {
  std::set<std::uint64_t> all;
  for (std::uint64_t e = s.begin; e < s.end; ++e) all.insert(s.box->index(e));
  return all;
}

TEST(CheckpointIndex, SlicesOfAnyBoxesAreRefusedIfTheyOverlap) {
  const std::vector<std::uint64_t> shape{9, 7};
  std::mt19937 random(1);
  std::size_t refused = 0;
  for (int i = 0; i < 2000; ++i) {
    CheckpointIndex index{.files = {{"a", 1}}};
    StoredTensor& t = index.tensors["w"];
    t.dtype = "F32", t.shape = shape;
    cut(Box::whole(shape), random, t.slices);
    std::ranges::shuffle(t.slices, random);
    EXPECT_EQ(parse_checkpoint_index(to_json(index), "index"), index);
    // One slice is moved within its tensor: it then has elements of others.
    StoredSlice& moved = t.slices[random() % t.slices.size()];
    const auto before = elements_of(moved);
    if (random() % 2 == 0) {
      moved.box->offset = {random() % (shape[0] - moved.box->extent[0] + 1),
                           random() % (shape[1] - moved.box->extent[1] + 1)};
    } else {
      const std::uint64_t count = moved.count();
      moved.begin = random() % (moved.box->count() - count + 1), moved.end = moved.begin + count;
    }
    if (elements_of(moved) == before) continue;
    const std::string what = error_text(to_json(index));
    EXPECT_NE(what.find("have elements in common"), std::string::npos) << what << to_json(index);
    ++refused;
  }
  EXPECT_GT(refused, 500u);
}

TEST(CheckpointIndex, SlicesOutsideTheirTensorAreRefused) {
  const std::string w = "tensors.model/w.slices[1]";
  expect_error("[10,24]", "[10,25]", w + ".range: expected [begin, end) within 24 elements, found [10,25]");
  expect_error("[10,24]", "[24,10]", w + ".range: expected [begin, end) within 24 elements, found [24,10]");
  expect_error("[10,24]", "[10,10]", w + ".range: expected [begin, end) within 24 elements, found [10,10]");
  expect_error("[10,24]", "[10]", w + ".range: expected [begin, end) within 24 elements, found [10]");
  expect_error("[10,24]", "[10,-1]", w + ".range: expected whole numbers up to 2^53, found [10,-1]");
  expect_error("[10,24]", "[10,2.5]", w + ".range: expected whole numbers up to 2^53, found [10,2.5]");
  expect_error("[10,24]", "10", w + ".range: missing, or no list");
  const std::string box = "tensors.model/boxes.slices[0].box.extent";
  const std::string outside = " is not within a tensor of shape [4,6]";
  expect_error("[4,4]", "[4,5]", box + ": the box [0,2] + [4,5]" + outside);
  expect_error("[4,4]", "[4,9007199254740992]", box + ": the box [0,2] + [4,9007199254740992]" + outside);
  expect_error("[0,2]", "[0,7]", box + ": the box [0,7] + [4,4]" + outside);
  expect_error("[4,4]", "[4]", box + ": the box [0,2] + [4]" + outside);
}

/// [4, 6] cut as [4, 2, 3] in columns of the last dimension.
CheckpointIndex index_of_other_boxes() {
  CheckpointIndex index = small_index();
  index.tensors["model/boxes"].slices = {{0, Box{{4, 2, 3}, {0, 0, 0}, {4, 2, 1}}, 0, 8, 3},
                                         {1, Box{{4, 2, 3}, {0, 0, 1}, {4, 2, 2}}, 0, 16, 4}};
  return index;
}

TEST(CheckpointIndex, BoxesMayHaveAShapeOfTheirOwn) {
  const CheckpointIndex index = index_of_other_boxes();
  const std::string text = to_json(index);
  EXPECT_NE(text.find(R"("version": 2)"), std::string::npos) << text;
  EXPECT_NE(text.find(R"("box":{"shape":[4,2,3],"offset":[0,0,1],"extent":[4,2,2]})"), std::string::npos)
      << text;
  EXPECT_EQ(parse_checkpoint_index(text, file).tensors, index.tensors);
  EXPECT_NE(to_json(small_index()).find(R"("version": 1)"), std::string::npos);
}

TEST(CheckpointIndex, ShapesOfBoxesThatDoNotFitAreRefused) {
  const auto error_after = [](const std::string& from, const std::string& to) {
    std::string text = to_json(index_of_other_boxes());
    return error_text(text.replace(text.find(from), from.size(), to));
  };
  const std::string slices = file + ": tensors.model/boxes.slices";
  EXPECT_EQ(error_after("[4,2,3]", "[4,2,4]"),
            slices + "[0].box.shape: [4,2,4] has other elements than the tensor of shape [4,6]");
  EXPECT_EQ(error_after("[4,2,3]", "[2,4,3]"),
            slices + "[0].box.extent: the box [0,0,0] + [4,2,1] is not within a tensor of shape [2,4,3]");
  EXPECT_EQ(error_after("[4,2,3]", "[4,3,2]"),
            slices + ": boxes have the shapes [4,3,2] and [4,2,3], expected one");
  EXPECT_EQ(error_after("[0,0,1]", "[0,0,0]"), slices + ": numbers 0 and 1 have elements in common");
}

TEST(CheckpointIndex, HugeNumbersAreRefused) {
  const std::string shape = "tensors.model/w.shape";
  const std::string limit = ": expected whole numbers up to 2^53, found ";
  const std::string w = R"("model/w":{"dtype":"F32","shape":[4,6])";
  const auto with_shape = [&](const std::string& s) { return R"("model/w":{"dtype":"F32","shape":)" + s; };
  expect_error(w, with_shape("[9007199254740993]"), shape + limit + "[9007199254740993]");
  expect_error(w, with_shape("[1e300]"), shape + limit + "[1e+300]");
  expect_error(w, with_shape("[9007199254740992,2]"),
               shape + ": a tensor of shape [9007199254740992,2] is larger than any memory");
  expect_error(w, with_shape("[4294967296,4294967296]"),
               shape + ": a tensor of shape [4294967296,4294967296] is larger than any memory");
  expect_error("4000", "9007199254740994",
               "files[0].bytes: must be from 0 to 9007199254740992, found 9007199254740994");
  expect_error("4000", "-1", "files[0].bytes: must be from 0 to 9007199254740992, found -1");
}

TEST(CheckpointIndex, FilesAreNamesInTheSameFolder) {
  for (const char* name : {"", "../secret", "/etc/passwd", "a/b", ".hidden", ".."})
    expect_error(
        rank_file(0, 2), name,
        std::string("files[0].name: expected the name of a file in the same folder, found \"") + name + "\"");
  expect_error(R"("file":1)", R"("file":2)",
               "tensors.model/boxes.slices[0].file: must be from 0 to 1, found 2");
  expect_error(R"("file":1)", R"("file":-1)",
               "tensors.model/boxes.slices[0].file: must be from 0 to 1, found -1");
  expect_error(R"("file":1,)", "", "tensors.model/boxes.slices[0].file: missing; give a whole number");
}

TEST(CheckpointIndex, MissingAndDuplicateKeysAreNamed) {
  expect_error("\"files\"", "\"fileS\"", "files: missing, or no list");
  expect_error("\"tensors\"", "\"tensorS\"", "tensors: missing; give an object { … }");
  expect_error("\"state\"", "\"State\"", "state: missing; give an object { … }");
  expect_error("\"shape\"", "\"Shape\"",
               "tensors.buffer/steps of a \"name\"\\x0a.shape: missing, or no list");
  expect_error(R"("dtype":"I64")", R"("dtype":"")", "tensors.buffer/steps of a \"name\"\\x0a.dtype: missing");
  expect_error("\"slices\"", "\"Slices\"",
               "tensors.buffer/steps of a \"name\"\\x0a.slices: missing, or no list");
  expect_error("model/none", "model/w",
               "line 12: key 'model/w' is given twice in one object, first on line 11; remove one");
  expect_error(R"("xxh3":"0000000000000003")", R"("xxh3":"3")",
               "tensors.model/boxes.slices[0].xxh3: missing, or not 16 hexadecimal digits");
  expect_error(R"("xxh3":"0000000000000003")", R"("xxh3":"000000000000000G")",
               "tensors.model/boxes.slices[0].xxh3: missing, or not 16 hexadecimal digits");
}

// ---- checksums

/// The bytes for which the authors of XXH3 publish values (cli/xsum_sanity_check.c of
/// https://github.com/Cyan4973/xxHash).
std::vector<std::byte> published_bytes(std::size_t count) {
  std::uint64_t state = 2654435761u;
  std::vector<std::byte> bytes(count);
  for (std::byte& b : bytes) {
    b = static_cast<std::byte>(state >> 56);
    state *= 11400714785074694797u;
  }
  return bytes;
}

TEST(Checksum, EqualsThePublishedValuesOfXxh3) {
  const std::pair<std::size_t, std::uint64_t> published[] = {
      {0, 0x2D06800538D394C2},   {1, 0xC44BDFF4074EECDB},    {6, 0x27B56A84CD2D7325},
      {12, 0xA713DAF0DFBB77E7},  {24, 0xA3FE70BF9D3510EB},   {48, 0x397DA259ECBA1F11},
      {80, 0xBCDEFBBB2C47C90A},  {195, 0xCD94217EE362EC3A},  {403, 0xCDEB804D65C6DEA4},
      {512, 0x617E49599013CB6B}, {2048, 0xDD59E2C3A5F038E0}, {2240, 0x6E73A90539CF2948}};
  for (const auto& [count, value] : published)
    for (const std::size_t step : {std::size_t{1}, std::size_t{7}, std::size_t{1000}, count + 1}) {
      const auto bytes = published_bytes(count);
      Checksum checksum;
      for (std::size_t at = 0; at < count; at += step)
        checksum.add(std::span(bytes).subspan(at, std::min(step, count - at)));
      EXPECT_EQ(checksum_text(checksum.value()), checksum_text(value)) << count << " bytes, by " << step;
    }
}

TEST(Checksum, ItsTextReadsBackAndNothingElse) {
  for (const std::uint64_t value : {std::uint64_t{0}, std::uint64_t{0x0123456789abcdef}, ~std::uint64_t{0}})
    EXPECT_EQ(parse_checksum(checksum_text(value)), value);
  EXPECT_EQ(checksum_text(0x0123456789abcdef), "0123456789abcdef");
  for (const char* text :
       {"", "1", "0123456789ABCDEF", "0x23456789abcdef", "00123456789abcdef", "-123456789abcdef"})
    EXPECT_EQ(parse_checksum(text), std::nullopt) << text;
}

}  // namespace
}  // namespace rz
