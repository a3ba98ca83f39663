// Checkpoints read back by any range, whatever slices hold them, and damage is found.

#include "sharding/checkpoint/checkpoint_reader.h"

#include <gtest/gtest.h>

#include <numeric>

#include "sharding/io/json.h"
#include "tests/support/error_of.h"
#include "tests/support/written_checkpoint.h"

namespace rz {
namespace {

using test::error_of;
using test::Folder;
using test::write_checkpoint;
using test::WrittenTensor;
using Extents = std::vector<std::uint64_t>;

std::vector<float> counted(float first, std::uint64_t begin, std::uint64_t end) {
  std::vector<float> values(end - begin);
  std::iota(values.begin(), values.end(), first + static_cast<float>(begin));
  return values;
}

std::vector<float> read(const CheckpointReader& reader, const std::string& tensor, std::uint64_t begin,
                        std::uint64_t end) {
  std::vector<float> values(end - begin, -1);
  const TensorSource tensors = reader.tensors(TensorPart::all);
  tensors.read_f32(*tensors.find(tensor), begin, values);
  return values;
}

/// Tensors cut at random: into the boxes of a grid, each of them into ranges, in files at random.
class RandomCut {
 public:
  explicit RandomCut(unsigned seed) : random_(seed) {}

  Extents shape() {
    Extents extents(below(5));
    for (auto& e : extents) e = 1 + below(extents.size() > 2 ? 5 : 9);
    return extents;
  }
  std::vector<StoredSlice> slices(const Extents& shape, std::size_t files) {
    std::vector<StoredSlice> all;
    for (const Box& box : grid(shape)) {
      std::uint64_t begin = 0;
      while (begin < box.count()) {
        const std::uint64_t end = begin + 1 + below(box.count() - begin);
        all.push_back({below(files), box, begin, end, 0});
        begin = end;
      }
    }
    std::ranges::shuffle(all, random_);
    return all;
  }
  std::uint64_t below(std::uint64_t n) { return random_() % n; }

 private:
  std::vector<Box> grid(const Extents& shape) {
    std::vector<Box> boxes{{shape, {}, {}}};
    for (const std::uint64_t extent : shape) {
      const std::uint64_t cut = below(extent + 1);
      std::vector<Box> finer;
      for (const Box& b : boxes)
        for (const auto& [from, to] : {std::pair(std::uint64_t{0}, cut), std::pair(cut, extent)}) {
          if (from == to) continue;
          finer.push_back(b);
          finer.back().offset.push_back(from), finer.back().extent.push_back(to - from);
        }
      boxes = finer;
    }
    return boxes;
  }
  std::mt19937 random_;
};

TEST(CheckpointReader, ReadsAnyRangeOfSlicesCutInAnyWay) {
  for (unsigned seed = 0; seed < 60; ++seed) {
    const Folder folder;
    RandomCut cut(seed);
    const Extents shape = cut.shape();
    const std::uint64_t count = Box::whole(shape).count(), files = 1 + cut.below(4);
    write_checkpoint(folder.path(),
                     {{"model/w", shape, cut.slices(shape, files), 100},
                      {"buffer/n", shape, cut.slices(shape, files), 7, DType::i64},
                      {"model/ranges", {count}, test::equal_ranges(count, files), 0}},
                     files);
    const CheckpointReader reader = CheckpointReader::open(folder.path());
    const TensorSource tensors = reader.tensors(TensorPart::all);
    SCOPED_TRACE(seed);
    for (int i = 0; i < 30; ++i) {
      const std::uint64_t begin = i == 0 ? 0 : cut.below(count + 1);
      const std::uint64_t end = i == 0 ? count : begin + cut.below(count - begin + 1);
      ASSERT_EQ(read(reader, "model/w", begin, end), counted(100, begin, end)) << begin << " to " << end;
      ASSERT_EQ(read(reader, "model/ranges", begin, end), counted(0, begin, end)) << begin << " to " << end;
      std::vector<std::int64_t> numbers(end - begin), expected(end - begin);
      std::iota(expected.begin(), expected.end(), 7 + begin);
      tensors.read_bytes(*tensors.find("buffer/n"), begin * 8, std::as_writable_bytes(std::span(numbers)));
      ASSERT_EQ(numbers, expected);
    }
    std::vector<float> whole(count);
    tensors.read_bytes(*tensors.find("model/w"), 0, std::as_writable_bytes(std::span(whole)));
    EXPECT_EQ(whole, counted(100, 0, count));
    for (std::size_t f = 0; f < files; ++f) reader.verify(f);
  }
}

class Checkpoint : public testing::Test {
 protected:
  Checkpoint() {
    const std::vector<StoredSlice> boxes{{0, Box{{4, 5}, {0, 0}, {4, 3}}, 0, 12, 0},
                                         {1, Box{{4, 5}, {0, 3}, {4, 2}}, 0, 8, 0}};
    index_ = write_checkpoint(folder_.path(),
                              {{"model/boxes", {4, 5}, boxes, 1000},
                               {"model/w", {7, 11}, test::equal_ranges(77, 3)},
                               {"buffer/none", {0, 2}, {}}},
                              3);
  }
  std::string file(int rank) const { return folder_ / rank_file(rank, 3); }
  std::uint64_t header_bytes(int rank) const {
    std::uint64_t bytes = std::filesystem::file_size(file(rank));
    const TensorSource source = open_safetensors(file(rank));
    for (const TensorInfo& t : source.tensors()) bytes -= t.bytes;
    return bytes;
  }
  CheckpointReader open() const { return CheckpointReader::open(folder_.path()); }
  std::string error_at_opening() const {
    const Error e = error_of([&] { open(); });
    EXPECT_EQ(std::string(e.what()).find('\n'), std::string::npos) << e.what();
    return e.what();
  }
  void write(const CheckpointIndex& index) const {
    std::ofstream(folder_ / checkpoint_index_file) << to_json(index);
  }

  Folder folder_;
  CheckpointIndex index_;
};

TEST_F(Checkpoint, RequestsOutsideATensorAreRefused) {
  const TensorSource tensors = open().tensors(TensorPart::all);
  const TensorInfo &w = *tensors.find("model/w"), &none = *tensors.find("buffer/none");
  std::vector<float> two(2);
  EXPECT_EQ(error_of([&] { tensors.read_f32(w, 76, two); }).code(), Errc::invalid_argument);
  EXPECT_EQ(error_of([&] { tensors.read_f32(w, ~std::uint64_t{0}, two); }).code(), Errc::invalid_argument);
  const auto bytes = std::as_writable_bytes(std::span(two));
  EXPECT_EQ(error_of([&] { tensors.read_bytes(none, 0, bytes); }).code(), Errc::invalid_argument);
  EXPECT_EQ(error_of([&] { tensors.read_bytes(w, 0, bytes.first(3)); }).code(), Errc::invalid_argument);
  EXPECT_EQ(error_of([&] { tensors.read_bytes(w, 2, bytes); }).code(), Errc::invalid_argument);
  EXPECT_EQ(error_of([&] { tensors.read_bytes(w, 304, bytes); }).code(), Errc::invalid_argument);
  EXPECT_EQ(tensors.find("model/x"), nullptr);
  tensors.read_f32(none, 0, {});
  tensors.read_bytes(none, 0, {});
}

TEST_F(Checkpoint, AMissingShardIsNamed) {
  std::filesystem::remove(file(1));
  EXPECT_EQ(error_at_opening(),
            file(1) + ": No such file or directory; the index of the checkpoint lists it");
}

TEST_F(Checkpoint, AShardOfAnotherSizeIsNamed) {
  const auto bytes = std::filesystem::file_size(file(2));
  std::filesystem::resize_file(file(2), bytes - 1);
  EXPECT_EQ(error_at_opening(),
            concat(file(2), ": has ", bytes - 1, " bytes where the index of the checkpoint has ", bytes,
                   "; the file is damaged or was replaced"));
}

TEST_F(Checkpoint, NamesOfFilesAreFitForATerminal) {
  index_.files[1].name = "x\n\x1b[31mall is well";
  write(index_);
  EXPECT_EQ(error_at_opening(), folder_ / "x\\x0a\\x1b[31mall is well" +
                                    ": No such file or directory; the index of the checkpoint lists it");
}

TEST_F(Checkpoint, AMissingOrDamagedIndexIsNamed) {
  const std::string index = folder_ / checkpoint_index_file;
  const std::string text = read_text_file(index);
  std::ofstream(index) << text.substr(0, text.size() / 2);
  EXPECT_TRUE(error_at_opening().starts_with(index + ": not valid JSON: ")) << error_at_opening();
  std::filesystem::remove(index);
  EXPECT_EQ(error_at_opening(), index + ": cannot be opened: No such file or directory");
}

TEST_F(Checkpoint, AnIndexThatDoesNotFitItsFilesIsAnError) {
  CheckpointIndex other = index_;
  std::swap(other.files[0], other.files[2]);
  write(other);
  EXPECT_EQ(error_of([&] {
              CheckpointReader reader = open();
              read(reader, "model/w", 0, 1);
            }).what(),
            file(2) + ": lacks model/w[0:25], which the index of the checkpoint has in it");
  other = index_;
  other.tensors["model/w"].dtype = "BF16";
  write(other);
  EXPECT_EQ(
      error_of([&] {
        CheckpointReader reader = open();
        read(reader, "model/w", 0, 1);
      }).what(),
      file(0) +
          ": tensor 'model/w[0:25]': 25 elements of F32 where the index of the checkpoint has 25 of BF16");
}

TEST_F(Checkpoint, VerifyFindsEveryFlippedByteOfATensor) {
  const TensorSource f = open_safetensors(file(0));
  std::uint64_t at = header_bytes(0);
  for (const TensorInfo& e : f.tensors())
    for (std::uint64_t end = at + e.bytes; at < end; ++at) {
      test::flip_byte(file(0), at);
      CheckpointReader reader = open();
      const std::string what = error_of([&] { reader.verify(0); }).what();
      EXPECT_TRUE(what.starts_with(file(0) + ": tensor '" + e.name + "': the checksum is ")) << what;
      reader.verify(1);
      test::flip_byte(file(0), at);
    }
  CheckpointReader reader = open();
  reader.verify(0);
}

TEST_F(Checkpoint, AFlippedByteOfAHeaderChangesNoElement) {
  const std::uint64_t header = header_bytes(0);
  std::size_t found = 0;
  for (std::uint64_t at = 0; at < header; ++at) {
    test::flip_byte(file(0), at);
    try {
      CheckpointReader reader = open();
      reader.verify(0);
      EXPECT_EQ(read(reader, "model/w", 0, 77), counted(0, 0, 77));
    } catch (const Error& e) {
      EXPECT_TRUE(std::string(e.what()).starts_with(file(0))) << e.what();
      ++found;
    }
    test::flip_byte(file(0), at);
  }
  EXPECT_GT(found, header / 2) << "some bytes are metadata, without effect";
}

TEST_F(Checkpoint, ManyMoreFilesThanAreOpenAtATime) {
  const Folder many;
  const std::size_t files = 150;
  write_checkpoint(many.path(), {{"model/w", {files, 3}, test::equal_ranges(3 * files, files)}}, files);
  CheckpointReader reader = CheckpointReader::open(many.path());
  EXPECT_EQ(read(reader, "model/w", 0, 3 * files), counted(0, 0, 3 * files));
  EXPECT_EQ(read(reader, "model/w", 5, 20), counted(0, 5, 20));
}

TEST_F(Checkpoint, AWriterRefusesMoreOrFewerBytesThanItsSlices) {
  const Folder other;
  const ShardSlice slice{"model/w", {4}, DType::f32, {0, {}, 0, 4, 0}};
  const std::vector<std::byte> bytes(17);
  EXPECT_EQ(error_of([&] { ShardWriter(other / "x", std::span(&slice, 1)).write(bytes); }).code(),
            Errc::invalid_argument);
  ShardWriter writer(other / "x", std::span(&slice, 1));
  writer.write(std::span(bytes).first(15));
  EXPECT_EQ(error_of([&] { writer.finish(); }).code(), Errc::invalid_argument);
  EXPECT_FALSE(std::filesystem::exists(other / "x"));
}

}  // namespace
}  // namespace rz
