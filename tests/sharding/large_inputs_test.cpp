// Readers of files that anybody may have made: what they hold and do for large structured inputs is bounded.
// The inputs that the library's other tests mutate are small.

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <functional>
#include <nlohmann/json.hpp>
#include <numeric>
#include <random>

#include "sharding/checkpoint/checkpoint_index.h"
#include "sharding/checkpoint/open_tensors.h"
#include "sharding/checkpoint/torch_files/torch_file.h"
#include "sharding/io/json.h"
#include "tests/support/error_of.h"
#include "tests/support/torch_writer.h"
#include "tests/support/written_checkpoint.h"

namespace rz {
namespace {

namespace pk = test::pickle;
using test::TorchWriter;
using test::ZipWriter;

std::vector<float> counted(std::size_t count) {
  std::vector<float> values(count);
  std::iota(values.begin(), values.end(), 0.f);
  return values;
}

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool is_sanitized = true;
#else
constexpr bool is_sanitized = false;
#endif
/// Files are smaller under a sanitizer, which makes everything slower. What grows with the square of a file
/// takes a 64th of the time then, and is still beyond the limit.
constexpr int scale = is_sanitized ? 8 : 1;
constexpr rlim_t max_seconds = is_sanitized ? 5 : 2;
constexpr int count(int n) { return n / scale; }

std::string times(std::size_t n, const std::string& part) {
  std::string all;
  all.reserve(n / scale * part.size());
  for (std::size_t i = 0; i < n / scale; ++i) all += part;
  return all;
}
std::string kept(const std::string& value, char slot) { return value + "q" + slot + "0"; }
std::string again(char slot) { return std::string("h") + slot; }

/// Large files of few parts that are used again and again.
class LargeInputs : public testing::Test {
 protected:
  std::string path(const char* name = "x.pt") const { return folder_ / name; }

  /// Runs a reader of `bytes` of input in a child that may hold 300 MiB, which a sanitizer does not count,
  /// and use 2 s.
  void expect_bounded(const std::string& what, std::size_t bytes, const std::function<void()>& read) const {
    ASSERT_LE(bytes, 2'100'000u) << what;
    const pid_t child = ::fork();
    if (child == 0) {
      const rlimit time{max_seconds, max_seconds};
      ::setrlimit(RLIMIT_CPU, &time);
      try {
        read();
      } catch (const Error&) {
      } catch (...) {
        ::_exit(3);
      }
      ::_exit(0);
    }
    int status = 0;
    rusage use{};
    ASSERT_EQ(::wait4(child, &status, 0, &use), child);
    EXPECT_TRUE(WIFEXITED(status)) << what << ": killed by signal " << WTERMSIG(status);
    EXPECT_EQ(WEXITSTATUS(status), 0) << what;
    if constexpr (!is_sanitized) {
      EXPECT_LE(use.ru_maxrss, 300 << 10) << what << ", KiB";
    }
  }
  void expect_bounded(const std::string& what, const std::string& bytes,
                      TorchContents contents = TorchContents::weights) const {
    test::write_bytes(path(), bytes);
    expect_bounded(what, bytes.size(), [&] {
      const TorchFile file = TorchFile::open(path(), contents);
      find_state_dict(file);
    });
  }
  void expect_bounded_pickle(const std::string& what, const std::string& pickle,
                             TorchContents contents = TorchContents::weights) const {
    ZipWriter zip;
    zip.add("a/data.pkl", pk::whole(pickle, 4));
    expect_bounded(what, zip.bytes(), contents);
  }

  test::Folder folder_;
};

TEST_F(LargeInputs, OfTorchHoldNoCopiesOfTheirParts) {
  const std::string megabyte(1'000'000, 'x');
  const std::string bytes = "B" + pk::raw(std::uint32_t{1'000'000}) + megabyte;
  for (const auto& [module, name] :
       {std::pair("_codecs", "encode"), std::pair("builtins", "bytes"), std::pair("builtins", "bytearray")}) {
    const std::string call = again('\1') + again('\3') + "R";
    const std::string set_up =
        kept(pk::global(module, name), '\1') + kept(bytes, '\2') + kept(again('\2') + "\x85", '\3');
    expect_bounded_pickle(name, set_up + "(" + times(160'000, call) + "t");
    const std::string of_text = kept(pk::global(module, name), '\1') + kept(pk::text(megabyte), '\2') +
                                kept(again('\2') + "\x85", '\3');
    expect_bounded_pickle(name, of_text + "(" + times(160'000, call) + "t");
  }
  // A long tuple as arguments, and as the items of sets and dicts.
  const std::string tuple = "(" + std::string(1'000'000, 'N') + "t";
  for (const auto& [module, name] :
       {std::pair("_codecs", "encode"), std::pair("builtins", "set"), std::pair("collections", "OrderedDict"),
        std::pair("torch", "Size"), std::pair("torch._utils", "_rebuild_tensor_v2")}) {
    const std::string call = again('\1') + again('\2') + "R";
    const std::string set_up = kept(pk::global(module, name), '\1') + kept(tuple, '\2');
    expect_bounded_pickle(name, set_up + "(" + times(160'000, call) + "t");
    expect_bounded_pickle(name, set_up + kept(again('\2') + "\x85", '\2') + "(" + times(160'000, call) + "t");
  }
  // Names of two texts each.
  const std::string long_name = pk::text("deepspeed." + std::string(900, 'a'));
  const std::string name = again('\1') + again('\2') + "\x93";
  expect_bounded_pickle(
      "names",
      kept(long_name, '\1') + kept(pk::text(std::string(900, 'b')), '\2') + "(" + times(300'000, name) + "t",
      TorchContents::deepspeed);
  const std::string short_name = pk::text("deepspeed." + std::string(200, 'a'));
  const std::string object = again('\3') + ")\x81";
  const std::string names =
      kept(short_name, '\1') + kept(pk::text(std::string(200, 'b')), '\2') + kept(name, '\3');
  expect_bounded_pickle("names", names + "(" + times(300'000, name) + "t", TorchContents::deepspeed);
  expect_bounded_pickle("objects", names + "(" + times(400'000, object) + "t", TorchContents::deepspeed);
  std::string pairs;  // 500 × 500 names
  for (int i = 0; i < 500; ++i)
    pairs += pk::text("deepspeed." + std::string(230, 'a') + std::to_string(1000 + i)) + "r" + pk::raw(i) +
             "0" + pk::text(std::string(240, 'b') + std::to_string(1000 + i)) + "r" + pk::raw(1000 + i) + "0";
  pairs += "(";
  for (int i = 0; i < count(130'000); ++i)
    pairs += "j" + pk::raw(i % 500) + "j" + pk::raw(1000 + i / 500) + "\x93";
  expect_bounded_pickle("pairs of names", pairs + "t", TorchContents::deepspeed);
  // Values of one byte each, with a memo.
  for (const char* op : {"\x85", "2", "Q", ")\x94", "]Na"})
    expect_bounded_pickle(op, "N" + times(2'000'000 / std::strlen(op), op));
}

/// A text of three characters, another one for each i below 729,000.
std::string numbered_name(int i) {
  return "\x8c\x03" + std::string{char(33 + i % 90), char(33 + i / 90 % 90), char(33 + i / 8100)};
}

std::string dict_of(std::size_t count, const std::string& key, const std::string& value) {
  return "}(" + times(count, key + value) + "u";
}

TEST_F(LargeInputs, OfTorchDoNoWorkForEachUseOfAPart) {
  const std::string long_text(1'000'000, 'k');
  {  // A tensor of many arguments, and one key.
    TorchWriter w;
    const std::string storage = w.storage(counted(4), "FloatStorage");
    const std::string call = pk::global("torch._utils", "_rebuild_tensor_v2") + "(" + storage +
                             pk::integer(0) + pk::numbers({4}) + pk::numbers({1}) + times(500'000, "N") +
                             "tR";
    expect_bounded("arguments", w.bytes(kept(call, '\1') + kept(pk::text("w"), '\2') +
                                        dict_of(200'000, again('\2'), again('\1'))));
  }
  {  // A long key of a dict.
    TorchWriter w;
    expect_bounded("long name",
                   w.bytes(kept(w.tensor(counted(4), {4}), '\1') + kept(pk::text(long_text), '\2') +
                           dict_of(200'000, again('\2'), again('\1'))));
  }
  for (const bool legacy : {false, true}) {  // A long key of a storage.
    TorchWriter w;
    const std::string id = kept(pk::text("storage"), '\1') + kept(pk::global("torch", "FloatStorage"), '\2') +
                           kept(pk::text(long_text), '\3') + kept(pk::text("cpu"), '\4');
    const std::string tuple =
        "(" + again('\1') + again('\2') + again('\3') + again('\4') + pk::integer(4) + "t";
    const std::string value = id + kept(tuple, '\5') + "(" + times(300'000, again('\5') + "Q") + "t";
    expect_bounded("long key", legacy ? w.legacy_bytes(value) : w.bytes(value));
    const std::string tensor =
        pk::call(pk::global("torch._utils", "_rebuild_tensor_v2"),
                 {again('\5') + "Q", pk::integer(0), pk::numbers({4}), pk::numbers({1})});
    std::string named = id + kept(tuple, '\5') + kept(tensor, '\6') + "}(";
    for (int i = 0; i < count(100'000); ++i) named += numbered_name(i) + again('\6');
    expect_bounded("long key of tensors", legacy ? w.legacy_bytes(named + "u") : w.bytes(named + "u"));
  }
}

TEST_F(LargeInputs, OfTorchMayHaveManyNames) {
  {  // And a shape of 64 dimensions.
    TorchWriter w;
    const std::vector<std::uint64_t> ones(64, 1);
    std::string many =
        kept(TorchWriter::view(w.storage(counted(4), "FloatStorage"), 0, ones, ones), '\1') + "}(";
    for (int i = 0; i < count(280'000); ++i) many += numbered_name(i) + again('\1');
    expect_bounded("dimensions", w.bytes(many + "u"));
    many.replace(0, many.find("}("), kept(w.tensor(counted(4), {4}), '\1'));
    expect_bounded("tensors", w.bytes(many + "u"));
  }
  {  // State dicts below keys: one many times, and many.
    TorchWriter w;
    const std::string tensor = kept(w.tensor(counted(4), {4}), '\1');
    std::string tensors = "}(";
    for (int i = 0; i < count(100'000); ++i) tensors += numbered_name(i) + again('\1');
    std::string one = tensor + kept(tensors + "u", '\2') + "}(", many = tensor + "}(";
    for (int i = 0; i < count(100'000); ++i) {
      const std::string name = numbered_name(i);
      one += name + again('\2');
      many += name + "}" + name + again('\1') + "s";
    }
    expect_bounded("one state dict", w.bytes(one + "u"));
    expect_bounded("many state dicts", w.bytes(many + "u"));
  }
}

// ---- random ones

/// A value of a few opcodes, of parts in slots 1 to 8.
std::string random_value(std::mt19937& random, int depth) {
  const auto slot = [&] { return again(static_cast<char>(1 + random() % 8)); };
  const auto value = [&] { return depth > 0 ? random_value(random, depth - 1) : slot(); };
  switch (random() % 14) {
    case 0:
      return "N";
    case 1:
      return "K" + std::string(1, static_cast<char>(random()));
    case 2:
      return value() + "\x85";
    case 3:
      return value() + value() + "\x86";
    case 4:
      return "}" + slot() + value() + "s";
    case 5:
      return "]" + value() + "a";
    case 6:
      return "}(" + slot() + value() + slot() + value() + "u";
    case 7:
      return slot() + slot() + "\x93";  // a name of two texts
    case 8:
      return slot() + value() + "R";
    case 9:
      return slot() + value() + "\x81";
    case 10:
      return value() + "Q";
    case 11:
      return value() + "\x94";  // one more in the memo
    case 12:
      return slot() + value() + "\x85R";
    default:
      return slot();
  }
}

/// A large part, or one that calls refer to.
std::string random_part(std::mt19937& random) {
  const std::size_t size =
      std::array{std::size_t{3}, std::size_t{200}, std::size_t{30'000}, std::size_t{600'000}}[random() % 4];
  constexpr std::array names{std::pair("_codecs", "encode"),
                             std::pair("builtins", "bytes"),
                             std::pair("builtins", "bytearray"),
                             std::pair("builtins", "set"),
                             std::pair("collections", "OrderedDict"),
                             std::pair("torch", "Size"),
                             std::pair("torch", "FloatStorage"),
                             std::pair("torch._utils", "_rebuild_tensor_v2"),
                             std::pair("torch._utils", "_rebuild_parameter")};
  switch (random() % 7) {
    case 0:
      return pk::text(std::string(size, 'x'));
    case 1:
      return "B" + pk::raw(static_cast<std::uint32_t>(size)) + std::string(size, 'y');
    case 2:
      return "(" + std::string(size, 'N') + "t";
    case 3:
      return "](" + std::string(size, 'N') + "e";
    case 4:
      return "}(" + times(size / 4, "NN") + "u";
    case 5:
      return pk::text("deepspeed.") + pk::text(std::string(size % 230, 'n')) + "\x93";
    default: {
      const auto& [module, name] = names[random() % names.size()];
      return pk::global(module, name);
    }
  }
}

TEST_F(LargeInputs, OfTorchAtRandomAreBounded) {
  for (unsigned seed = 1; seed <= 40u / scale; ++seed) {
    std::mt19937 random(seed);
    std::string pickle;
    for (char slot = 1; slot <= 8; ++slot) pickle += kept(random_part(random), slot);
    const std::string value = random_value(random, 3);
    const std::size_t limit = 2'000'000 / scale;
    pickle += "(";
    if (pickle.size() < limit)
      for (std::size_t n = (limit - pickle.size()) / value.size(); n > 0; --n) pickle += value;
    expect_bounded_pickle(concat("seed ", seed), pickle + "t",
                          seed % 2 ? TorchContents::deepspeed : TorchContents::weights);
  }
}

/// JSON of a few parts, each many times.
std::string random_json(std::mt19937& random, const std::string& key, const std::string& item) {
  std::string text = "{";
  const std::size_t limit = 1'900'000 / scale;
  const std::string nested = std::string(random() % 60, '[') + "1";
  for (int i = 0; text.size() < limit; ++i) {
    text += concat(i ? "," : "", "\"", key, random() % 10 ? i : 0, "\":");
    switch (random() % 8) {
      case 0:
        text += nested + std::string(nested.size() - 1, ']');
        break;
      case 1:
        text += "\"" + std::string(random() % 3000, 'x') + "\"";
        break;
      default:
        text += item;
    }
  }
  return text + "}";
}

TEST_F(LargeInputs, OfSafetensorsAndJsonAreBounded) {
  const std::string ones = "[" + times(scale * 60, "1,") + "1]";
  for (unsigned seed = 1; seed <= 3; ++seed) {
    std::mt19937 random(seed);
    for (const std::string& item : {std::string(R"({"dtype":"F32","shape":[0],"data_offsets":[0,0]})"),
                                    R"({"dtype":"F32","shape":)" + ones + R"(,"data_offsets":[0,4]})",
                                    std::string(R"({"a":"b"})"), std::string("[]")}) {
      const std::string header = random_json(random, seed == 2 ? std::string(2000, 'k') : "t", item);
      test::write_bytes(path("x.safetensors"), pk::raw(std::uint64_t{header.size()}) + header + "1234");
      expect_bounded(concat("safetensors, seed ", seed, ", ", item.substr(0, 60)), header.size(),
                     [&] { open_tensors(path("x.safetensors")); });
    }
    const std::string map =
        random_json(random, "t", seed == 1 ? "\"x.safetensors\"" : "\"" + std::string(100, 'f') + "\"");
    test::write_bytes(path("x.index.json"), R"({"weight_map":)" + map + "}");
    expect_bounded(concat("index, seed ", seed), map.size(), [&] { open_tensors(path("x.index.json")); });
    const std::string tensors = random_json(
        random, "model/t", R"({"dtype":"F32","shape":[1],"slices":[{"file":0,"begin":0,"end":1}]})");
    const std::string index =
        R"({"format":"ringzero checkpoint","version":1,"state":{},"files":[],"tensors":)" + tensors + "}";
    expect_bounded(concat("checkpoint, seed ", seed), index.size(),
                   [&] { parse_checkpoint_index(index, "x"); });
    expect_bounded(concat("relaxed JSON, seed ", seed), tensors.size(),
                   [&] { parse_json(tensors, "x", JsonDialect::relaxed); });
  }
}

}  // namespace
}  // namespace rz
