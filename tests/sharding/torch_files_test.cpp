// Files of torch.save(): values, tensors and refusals.

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <bit>
#include <cstdlib>
#include <filesystem>
#include <numeric>
#include <random>

#include "sharding/checkpoint/torch_files/torch_file.h"
#include "sharding/checkpoint/torch_files/zip_directory.h"
#include "sharding/io/file.h"
#include "tests/support/error_of.h"
#include "tests/support/torch_writer.h"
#include "tests/support/written_checkpoint.h"

namespace rz {
namespace {

namespace fs = std::filesystem;
namespace pk = test::pickle;
using test::error_of;
using test::TorchWriter;
using test::ZipWriter;
using Shape = std::vector<std::uint64_t>;

std::vector<float> counted(std::size_t count, float first = 0) {
  std::vector<float> values(count);
  std::iota(values.begin(), values.end(), first);
  return values;
}

bool has_text(const std::string& text, std::string_view part) { return text.find(part) != text.npos; }

class TorchFiles : public testing::Test {
 protected:
  std::string path() const { return folder_ / "x.pt"; }
  TorchFile opened(const std::string& bytes, TorchContents contents = TorchContents::weights) const {
    test::write_bytes(path(), bytes);
    return TorchFile::open(path(), contents);
  }
  TorchFile opened_value(const std::string& value) const { return opened(TorchWriter().bytes(value)); }
  /// The refusal of a file's bytes, whose lines are one.
  std::string refusal(const std::string& bytes, Errc code) const {
    const Error e = error_of([&] {
      const TorchFile file = opened(bytes);
      state_dict_of(file, file.pickle().root);
    });
    EXPECT_EQ(e.code(), code) << e.what();
    EXPECT_TRUE(std::string(e.what()).starts_with(path() + ": ")) << e.what();
    EXPECT_FALSE(has_text(e.what(), "\n"));
    return e.what();
  }
  std::string refusal_of_pickle(const std::string& pickle, Errc code) const {
    ZipWriter zip;
    zip.add("a/data.pkl", pickle);
    return refusal(zip.bytes(), code);
  }

  test::Folder folder_;
};

template <class T>
std::vector<T> values_of(const TorchFile& file, const TorchTensor& t) {
  std::vector<T> values(t.count);
  file.read(t, 0, std::as_writable_bytes(std::span(values)));
  return values;
}

std::map<std::string, TorchTensor> tensors_of(const TorchFile& file) {
  std::map<std::string, TorchTensor> all;
  for (const auto& [name, tensor] : state_dict_of(file, file.pickle().root)) all[name] = tensor;
  return all;
}

// ---- tensors

TEST_F(TorchFiles, OfTheZipFormatHaveTheirTensors) {
  TorchWriter w;
  const std::string value =
      pk::state_dict({{pk::text("w"), w.tensor(counted(6), {2, 3})},
                      {pk::text("p"), TorchWriter::parameter(w.tensor(counted(4, 10), {4}))},
                      {pk::text("n"), w.tensor(std::vector<std::int64_t>{7}, {}, "LongStorage")},
                      {pk::text("empty"), w.tensor(std::vector<float>{}, {0, 3})},
                      {pk::text("w_extra_state"), pk::none()}});
  const TorchFile file = opened(w.bytes(value));
  EXPECT_TRUE(TorchFile::is_one(path()));
  const auto list = state_dict_of(file, file.pickle().root);
  ASSERT_EQ(list.size(), 4u);
  EXPECT_EQ(list[1].name, "p") << "the order of the dict";
  const auto all = tensors_of(file);
  EXPECT_EQ(all.at("w").dtype, "F32");
  EXPECT_EQ(all.at("w").shape, (Shape{2, 3}));
  EXPECT_EQ(values_of<float>(file, all.at("w")), counted(6));
  EXPECT_EQ(values_of<float>(file, all.at("p")), counted(4, 10));
  EXPECT_EQ(all.at("n").shape, Shape{});
  EXPECT_EQ(values_of<std::int64_t>(file, all.at("n")), std::vector<std::int64_t>{7});
  EXPECT_EQ(all.at("empty").count, 0u);
  std::array<float, 2> part;
  file.read(all.at("w"), 3, std::as_writable_bytes(std::span(part)));
  EXPECT_EQ(part, (std::array<float, 2>{3, 4}));
  EXPECT_EQ(error_of([&] { file.read(all.at("w"), 5, std::as_writable_bytes(std::span(part))); }).code(),
            Errc::invalid_argument);
}

TEST_F(TorchFiles, OfTheOldFormatHaveTheirTensors) {
  TorchWriter w;
  const std::string first = w.tensor(counted(6), {2, 3}),
                    second = w.tensor(std::vector<double>{1.5, -2}, {2}, "DoubleStorage");
  // Elements 1 to 3 of storage 0 as a storage of its own, of which the tensor has the last two.
  const std::string viewed = TorchWriter::view(
      TorchWriter::id_of("0", "FloatStorage", 6, pk::tuple({pk::text("v"), pk::integer(1), pk::integer(3)})),
      1, {2}, {1});
  const TorchFile file = opened(
      w.legacy_bytes(pk::dict({{pk::text("a"), first}, {pk::text("b"), second}, {pk::text("v"), viewed}})));
  EXPECT_TRUE(TorchFile::is_one(path()));
  const auto all = tensors_of(file);
  EXPECT_EQ(values_of<float>(file, all.at("a")), counted(6));
  EXPECT_EQ(values_of<double>(file, all.at("b")), (std::vector<double>{1.5, -2}));
  EXPECT_EQ(values_of<float>(file, all.at("v")), (std::vector<float>{2, 3}));
}

TEST_F(TorchFiles, HaveTensorsWithAttributes) {
  const auto value = [](TorchWriter& w, const std::string& function, const std::string& type) {
    return pk::dict({{pk::text("t"), pk::call(pk::global("torch._tensor", "_rebuild_from_type_v2"),
                                              {pk::global("torch._utils", function), type,
                                               pk::tuple({w.storage(counted(3), "FloatStorage"),
                                                          pk::integer(1), pk::numbers({2}), pk::numbers({1}),
                                                          pk::boolean(true), pk::none()}),
                                               pk::dict({{pk::text("note"), pk::integer(1)}})})}});
  };
  for (const std::string& type :
       {pk::global("torch", "Tensor"), pk::global("torch.nn.parameter", "Parameter")}) {
    TorchWriter w;
    const TorchFile file = opened(w.bytes(value(w, "_rebuild_tensor_v2", type)));
    EXPECT_EQ(values_of<float>(file, tensors_of(file).at("t")), (std::vector<float>{1, 2}));
  }
  TorchWriter w;
  EXPECT_TRUE(
      has_text(refusal(w.bytes(value(w, "_rebuild_tensor_v2", pk::integer(1))), Errc::io), "has no tensor"));
  const std::string other = value(w, "_rebuild_sparse_tensor", pk::global("torch", "Tensor"));
  EXPECT_TRUE(
      has_text(refusal(w.bytes(other), Errc::unsupported), "needs 'torch._utils._rebuild_sparse_tensor'"));
}

TEST_F(TorchFiles, HaveEveryDtypeOfSafetensors) {
  const std::vector<std::tuple<std::string, std::string, unsigned>> typed{
      {"DoubleStorage", "F64", 8},    {"FloatStorage", "F32", 4},       {"HalfStorage", "F16", 2},
      {"BFloat16Storage", "BF16", 2}, {"LongStorage", "I64", 8},        {"IntStorage", "I32", 4},
      {"ShortStorage", "I16", 2},     {"CharStorage", "I8", 1},         {"ByteStorage", "U8", 1},
      {"BoolStorage", "BOOL", 1},     {"ComplexFloatStorage", "C64", 8}};
  const std::vector<std::tuple<std::string, std::string, unsigned>> untyped{
      {"uint16", "U16", 2},
      {"uint32", "U32", 4},
      {"uint64", "U64", 8},
      {"float8_e4m3fn", "F8_E4M3", 1},
      {"float8_e5m2", "F8_E5M2", 1},
      {"float8_e4m3fnuz", "F8_E4M3FNUZ", 1},
      {"float8_e5m2fnuz", "F8_E5M2FNUZ", 1},
      {"float8_e8m0fnu", "F8_E8M0", 1},
      {"bfloat16", "BF16", 2}};
  const auto bytes_of = [](unsigned n) {
    std::string bytes(3 * n, '\0');
    std::iota(bytes.begin(), bytes.end(), '\1');
    return bytes;
  };
  TorchWriter w;
  pk::Pairs pairs;
  for (const auto& [storage, name, n] : typed)
    pairs.emplace_back(pk::text(name),
                       TorchWriter::view(w.storage_of_bytes(bytes_of(n), storage, 3), 0, {3}, {1}));
  for (const auto& [dtype, name, n] : untyped)
    pairs.emplace_back(
        pk::text("v3." + name),
        pk::call(pk::global("torch._utils", "_rebuild_tensor_v3"),
                 {w.storage_of_bytes(bytes_of(n), "UntypedStorage", 3 * n), pk::integer(1), pk::numbers({2}),
                  pk::numbers({1}), pk::boolean(false), pk::none(), pk::global("torch", dtype)}));
  const TorchFile file = opened(w.bytes(pk::dict(pairs)));
  const auto all = tensors_of(file);
  const auto expect = [&](const std::string& key, const std::string& name, unsigned n, std::size_t first) {
    const TorchTensor& t = all.at(key);
    EXPECT_EQ(t.dtype, name);
    EXPECT_EQ(t.element_bytes, n);
    std::string bytes(t.count * n, '\0');
    file.read(t, 0, std::as_writable_bytes(std::span(bytes)));
    EXPECT_EQ(bytes, bytes_of(n).substr(first * n)) << key;
  };
  for (const auto& [storage, name, n] : typed) expect(name, name, n, 0);
  for (const auto& [dtype, name, n] : untyped) expect("v3." + name, name, n, 1);
}

/// Elements of a view by their indices, as a reference.
std::vector<float> elements_of_view(std::uint64_t first, const Shape& shape, const Shape& strides) {
  std::vector<float> all{static_cast<float>(first)};
  for (std::size_t d = 0; d < shape.size(); ++d) {
    std::vector<float> next;
    for (const float base : all)
      for (std::uint64_t i = 0; i < shape[d]; ++i) next.push_back(base + static_cast<float>(i * strides[d]));
    all = next;
  }
  return all;
}

TEST_F(TorchFiles, HaveStridedViewsInRowMajorOrder) {
  TorchWriter w;
  const std::string storage = w.storage(counted(120), "FloatStorage");
  const std::vector<std::tuple<std::uint64_t, Shape, Shape>> views{{0, {12, 10}, {10, 1}},
                                                                   {0, {10, 12}, {1, 10}},
                                                                   {7, {3, 4}, {20, 1}},
                                                                   {5, {6}, {3}},
                                                                   {1, {3, 2, 4}, {4, 60, 1}},
                                                                   {2, {4, 1, 5}, {0, 99, 1}},
                                                                   {9, {2, 2, 2, 2}, {1, 2, 4, 8}},
                                                                   {3, {}, {}},
                                                                   {0, {1, 1}, {5, 7}},
                                                                   {11, {3, 4, 5}, {20, 5, 1}},
                                                                   {0, {7}, {0}}};
  pk::Pairs pairs;
  for (std::size_t i = 0; i < views.size(); ++i) {
    const auto& [first, shape, strides] = views[i];
    pairs.emplace_back(pk::text(std::to_string(i)), TorchWriter::view(storage, first, shape, strides));
  }
  const TorchFile file = opened(w.bytes(pk::dict(pairs)));
  const auto all = tensors_of(file);
  for (std::size_t i = 0; i < views.size(); ++i) {
    const auto& [first, shape, strides] = views[i];
    const auto expected = elements_of_view(first, shape, strides);
    const TorchTensor& t = all.at(std::to_string(i));
    ASSERT_EQ(t.count, expected.size());
    for (std::size_t begin = 0; begin <= expected.size(); ++begin)
      for (std::size_t n = 0; begin + n <= expected.size(); ++n) {
        std::vector<float> part(n);
        file.read(t, begin, std::as_writable_bytes(std::span(part)));
        ASSERT_TRUE(
            std::equal(part.begin(), part.end(), expected.begin() + static_cast<std::ptrdiff_t>(begin)))
            << "view " << i << " from " << begin << ", " << n;
      }
  }
}

/// A transposed matrix of more than one tile, `rows` of whose rows are left out at the end, read in small
/// parts.
template <class T>
void expect_transposed(const std::string& path, const char* storage_type, std::uint64_t rows,
                       std::uint64_t columns, std::uint64_t left_out) {
  const auto value = [](std::uint64_t row, std::uint64_t column) {
    return static_cast<T>(static_cast<std::uint8_t>(row * 7 + column * 31 + row / 256));
  };
  const std::uint64_t stride = rows + left_out;
  std::vector<T> stored(stride * columns);
  for (std::uint64_t c = 0; c < columns; ++c)
    for (std::uint64_t r = 0; r < stride; ++r) stored[c * stride + r] = value(r, c);
  TorchWriter w;
  const std::string storage =
      w.storage_of_bytes(std::string(reinterpret_cast<const char*>(stored.data()), stored.size() * sizeof(T)),
                         storage_type, stored.size());
  test::write_bytes(
      path,
      w.bytes(pk::dict({{pk::text("t"), TorchWriter::view(storage, 0, {rows, columns}, {1, stride})}})));
  const TorchFile file = TorchFile::open(path);
  const TorchTensor t = tensors_of(file).at("t");
  std::vector<T> part(8192), expected(8192);
  for (std::uint64_t at = 0; at < t.count; at += 7 * part.size()) {
    const std::size_t n = std::min<std::uint64_t>(part.size(), t.count - at);
    for (std::size_t i = 0; i < n; ++i) expected[i] = value((at + i) / columns, (at + i) % columns);
    file.read(t, at, std::as_writable_bytes(std::span(part).first(n)));
    ASSERT_TRUE(std::equal(expected.begin(), expected.begin() + static_cast<std::ptrdiff_t>(n), part.begin()))
        << storage_type << " " << at;
  }
}

TEST_F(TorchFiles, HaveTransposedMatricesInTiles) {
  expect_transposed<std::uint8_t>(path(), "ByteStorage", 9000, 4000, 0);   // a column at a time
  expect_transposed<std::int16_t>(path(), "ShortStorage", 5003, 2001, 0);  // several at once
  expect_transposed<float>(path(), "FloatStorage", 2500, 2003, 100);
  expect_transposed<double>(path(), "DoubleStorage", 4099, 1031, 5);
  expect_transposed<float>(path(), "FloatStorage", 5000000, 2, 0);
  expect_transposed<float>(path(), "FloatStorage", 70, 70000, 1);
}

TEST_F(TorchFiles, AreReadByRange) {
  // A storage of 16 GiB, which is a hole except for a few elements.
  constexpr std::uint64_t elements = std::uint64_t{4} << 30;
  TorchWriter w;
  w.storage(std::vector<float>{}, "FloatStorage");
  const std::string id = TorchWriter::id_of("0", "FloatStorage", elements);
  std::string bytes =
      w.legacy_bytes(pk::dict({{pk::text("all"), TorchWriter::view(id, 0, {elements}, {1})},
                               {pk::text("turned"), TorchWriter::view(id, 0, {2, elements / 2}, {1, 2})},
                               {pk::text("sparse"), TorchWriter::view(id, 1, {3, 2}, {elements / 3, 7})}}));
  std::memcpy(bytes.data() + bytes.size() - 8, &elements, 8);
  test::write_bytes(path(), bytes);
  fs::resize_file(path(), bytes.size() + elements * 4);
  const auto put = [&](std::uint64_t element, float value) {
    std::fstream file(path(), std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(static_cast<std::streamoff>(bytes.size() + element * 4));
    file.write(reinterpret_cast<const char*>(&value), 4);
  };
  put(elements - 1, 5), put(1 + elements / 3, 6), put(1 + elements / 3 * 2 + 7, 7);
  const TorchFile file = TorchFile::open(path());
  const auto all = tensors_of(file);
  float last = 0;
  file.read(all.at("all"), elements - 1, std::as_writable_bytes(std::span(&last, 1)));
  EXPECT_EQ(last, 5);
  file.read(all.at("turned"), elements - 1, std::as_writable_bytes(std::span(&last, 1)));
  EXPECT_EQ(last, 5);
  EXPECT_EQ(values_of<float>(file, all.at("sparse")), (std::vector<float>{0, 0, 6, 0, 0, 7}));
}

// ---- pickles

TEST_F(TorchFiles, ReadProtocols2To5) {
  // {'a': (1, -2, 3.5), 'b': [True, None, b'xyz'], 'c': 2**40, 'd': 70000} by protocol, as Python writes
  // them.
  using std::string_literals::operator""s;
  const std::vector<std::string> pickles{
      "\x80\x02}q\0(X\x01\0\0\0aq\x01K\x01J\xfe\xff\xff\xffG@\x0c\0\0\0\0\0\0\x87q\x02X\x01\0\0\0bq\x03]"
      "q\x04(\x88N"
      "c_codecs\nencode\nq\x05X\x03\0\0\0xyzq\x06X\x06\0\0\0latin1q\x07\x86q\x08Rq\x09"
      "eX\x01\0\0\0cq\x0a\x8a\x06\0\0\0\0\0\x01X\x01\0\0\0dq\x0bJp\x11\x01\0u."s,
      "\x80\x04\x95\x3d\0\0\0\0\0\0\0}\x94(\x8c\x01"
      "a\x94K\x01J\xfe\xff\xff\xffG@\x0c\0\0\0\0\0\0\x87\x94\x8c\x01"
      "b\x94]\x94(\x88NC\x03xyz\x94"
      "e\x8c\x01"
      "c\x94\x8a\x06\0\0\0\0\0\x01\x8c\x01"
      "d\x94Jp\x11\x01\0u."s};
  for (const std::string& bytes : pickles)
    for (const char protocol : {2, 3, 4, 5}) {
      std::string changed = bytes;
      changed[1] = protocol;
      ZipWriter zip;
      zip.add("a/data.pkl", changed);
      const TorchFile file = opened(zip.bytes());
      const Pickle& p = file.pickle();
      const auto* a = p.get<PickleTuple>(*p.find(p.root, "a"));
      ASSERT_TRUE(a && a->items.size() == 3);
      EXPECT_EQ(*p.get<std::int64_t>(a->items[0]), 1);
      EXPECT_EQ(*p.get<std::int64_t>(a->items[1]), -2);
      EXPECT_EQ(*p.get<double>(a->items[2]), 3.5);
      const auto* b = p.get<PickleList>(*p.find(p.root, "b"));
      ASSERT_TRUE(b && b->items.size() == 3);
      EXPECT_EQ(*p.get<bool>(b->items[0]), true);
      EXPECT_TRUE(p.get<PickleNone>(b->items[1]));
      EXPECT_EQ(p.get<PickleBytes>(b->items[2])->bytes, "xyz");
      EXPECT_EQ(*p.get<std::int64_t>(*p.find(p.root, "c")), std::int64_t{1} << 40);
      EXPECT_EQ(*p.get<std::int64_t>(*p.find(p.root, "d")), 70000);
      EXPECT_EQ(p.find(p.root, "e"), nullptr);
    }
}

TEST_F(TorchFiles, HavePlainValuesOfPython) {
  const auto value_of = [&](const std::string& value) {
    const TorchFile file = opened_value(value);
    return file.pickle().values[file.pickle().root];
  };
  const auto list_of = [&](const std::string& value) {
    return std::get<PickleList>(value_of(value)).items.size();
  };
  EXPECT_EQ(std::get<std::int64_t>(value_of(std::string("\x8a\x00", 2))), 0);
  EXPECT_EQ(std::get<std::int64_t>(value_of("\x8a\x01\xff")), -1);
  EXPECT_EQ(std::get<std::int64_t>(value_of(std::string("\x8b\x02\0\0\0\x00\x80", 7))), -32768);
  EXPECT_EQ(std::get<PickleLong>(value_of("\x8a\x09"
                                          "123456789"))
                .bytes,
            "123456789");
  EXPECT_EQ(std::get<PickleText>(value_of("U\x02"
                                          "ab"))
                .text,
            "ab");
  EXPECT_EQ(std::get<PickleText>(value_of(std::string("\x8d\x02\0\0\0\0\0\0\0ab", 11))).text, "ab");
  EXPECT_EQ(std::get<PickleBytes>(value_of("U\x01\xff")).bytes, "\xff");
  EXPECT_EQ(std::get<PickleBytes>(value_of(std::string("\x96\x02\0\0\0\0\0\0\0ab", 11))).bytes, "ab");
  // é in Latin-1
  EXPECT_EQ(std::get<PickleBytes>(value_of(pk::call(pk::global("_codecs", "encode"),
                                                    {pk::text("\xc3\xa9"), pk::text("latin1")})))
                .bytes,
            "\xe9");
  EXPECT_EQ(list_of(pk::call(pk::global("__builtin__", "set"), {pk::list({pk::integer(1), pk::integer(2)})})),
            2u);
  EXPECT_EQ(list_of("\x8f(" + pk::integer(1) + "\x90"), 1u);
  EXPECT_EQ(list_of("(" + pk::integer(1) + "\x91"), 1u);
  EXPECT_EQ(list_of("(" + pk::integer(1) + "l"), 1u);
  EXPECT_EQ(list_of("]" + pk::integer(1) + "a"), 1u);
  // A dict by DICT and SETITEM, of which the last value is valid; one of Python 2 with its items as an
  // argument.
  const TorchFile twice =
      opened_value("(" + pk::text("a") + pk::integer(1) + "d" + pk::text("a") + pk::integer(2) + "s");
  EXPECT_EQ(*twice.pickle().get<std::int64_t>(*twice.pickle().find(twice.pickle().root, "a")), 2);
  const TorchFile old = opened_value(pk::call(pk::global("collections", "OrderedDict"),
                                              {pk::list({pk::list({pk::text("a"), pk::integer(3)})})}));
  EXPECT_EQ(*old.pickle().get<std::int64_t>(*old.pickle().find(old.pickle().root, "a")), 3);
  // POP, POP_MARK and DUP; a memo by LONG_BINPUT.
  EXPECT_EQ(std::get<std::int64_t>(value_of(pk::integer(1) + pk::integer(2) + "0(" + pk::integer(3) + "1")),
            1);
  EXPECT_EQ(std::get<PickleTuple>(value_of(pk::integer(1) + "2\x86")).items.size(), 2u);
  EXPECT_EQ(std::get<std::int64_t>(value_of(pk::integer(4) + std::string("r\0\0\0\x01"
                                                                         "0j\0\0\0\x01",
                                                                         11))),
            4);
}

TEST_F(TorchFiles, ExecuteNothing) {
  const std::string marker = folder_ / "marker", command = pk::text("touch " + marker);
  const std::vector<std::pair<const char*, const char*>> names{
      {"os", "system"},
      {"posix", "system"},
      {"builtins", "eval"},
      {"__builtin__", "exec"},
      {"builtins", "getattr"},
      {"torch.hub", "load"},
      {"collections", "OrderedDict.fromkeys"},
      {"torch", "load"},
      {"torch._utils", "os.system"},
      {"numpy.core.multiarray", "_reconstruct"},
      {"deepspeed.runtime.zero.config", "ZeroStageEnum"}};
  for (const auto& [module, name] : names) {
    const std::string full = std::string(module) + "." + name;
    const std::string by_global = pk::call(pk::global(module, name), {command});
    const std::string by_stack = pk::text(module) + pk::text(name) + "\x93" + pk::tuple({command}) + "R";
    const std::string by_object = pk::object(pk::global(module, name), {});
    for (const std::string& value : {by_global, by_stack, by_object, by_global + "0N"}) {
      const std::string what = refusal_of_pickle(pk::whole(value, 4), Errc::unsupported);
      EXPECT_TRUE(has_text(what, "needs '" + full + "'")) << what;
      test::write_bytes(path(),
                        "\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19." + pk::whole(value));
      EXPECT_TRUE(has_text(error_of([&] { TorchFile::open(path()); }).what(), "needs '" + full + "'"));
    }
  }
  EXPECT_FALSE(fs::exists(marker));
  EXPECT_TRUE(
      has_text(refusal_of_pickle(pk::whole(pk::global("torch", "FloatStorage") + ")R"), Errc::unsupported),
               "calls 'torch.FloatStorage'"));
  EXPECT_TRUE(has_text(refusal_of_pickle(pk::whole(pk::global("torch", "Size") + ")\x81"), Errc::unsupported),
                       "makes a 'torch.Size'"));
}

TEST_F(TorchFiles, OfDeepSpeedKeepItsObjectsAsRecords) {
  const std::string value = pk::dict(
      {{pk::text("stage"),
        pk::call(pk::global("deepspeed.runtime.zero.config", "ZeroStageEnum"), {pk::integer(2)})},
       {pk::text("scaler"), pk::object(pk::global("deepspeed.runtime.fp16.loss_scaler", "LossScaler"),
                                       {{pk::text("cur_scale"), pk::integer(1)}})}});
  const TorchFile file = opened(TorchWriter().bytes(value), TorchContents::deepspeed);
  const Pickle& p = file.pickle();
  const auto* stage = p.get<PickleCall>(*p.find(p.root, "stage"));
  ASSERT_TRUE(stage);
  EXPECT_EQ(stage->name, "deepspeed.runtime.zero.config.ZeroStageEnum");
  EXPECT_EQ(*p.get<std::int64_t>(stage->arguments.at(0)), 2);
  EXPECT_TRUE(p.get<PickleCall>(*p.find(p.root, "scaler")));
  test::write_bytes(path(), TorchWriter().bytes(pk::call(pk::global("os", "system"), {pk::text("true")})));
  EXPECT_EQ(error_of([&] { TorchFile::open(path(), TorchContents::deepspeed); }).code(), Errc::unsupported);
}

TEST_F(TorchFiles, WithDamagedPicklesNameTheByte) {
  const std::vector<std::pair<std::string, const char*>> damaged{
      {"", "ends early"},
      {"\x80\x02", "ends early"},
      {"\x80\x02N", "ends early"},
      {pk::whole(""), "its stack is empty"},
      {pk::whole("NN"), "values on its stack"},
      {pk::whole("(N"), "values on its stack"},
      {pk::whole("t"), "has no mark"},
      {pk::whole("(\x85"), "its stack is empty"},
      {pk::whole("N(\x85t"), "its stack is empty"},
      {pk::whole("h\x05"), "its memo has no value 5"},
      {pk::whole("q\x01"), "its stack is empty"},
      {pk::whole("NNa"), "appends to a list where it has None"},
      {pk::whole("](NNu"), "sets an item of a dict where it has a list"},
      {pk::whole("}(NNNu"), "a key of a dict has no value"},
      {pk::whole("N)R"), "it calls None"},
      {pk::whole(pk::global("torch", "Size") + "NR"), "has None as its arguments"},
      {pk::whole("]}b"), "sets attributes of a list"},
      {pk::whole("X\xff\xff\xff\xff"), "does not fit into the file"},
      {pk::whole("\x8e\xff\xff\xff\xff\xff\xff\xff\xff"), "does not fit into the file"},
      {pk::whole("\x8d\xff\xff\xff\xff\xff\xff\xff\x7f"), "does not fit into the file"},
      {pk::whole("\x8b\xff\xff\xff\xff"), "does not fit into the file"},
      {pk::whole(std::string("X\x01\0\0\0\xff", 6)), "a text is not UTF-8"},
      {pk::whole(pk::call(pk::global("_codecs", "encode"), {pk::text("\xe2\x82\xac")})), "above U+00FF"},
      {pk::whole("NN\x93"), "a name is no text"},
      {pk::whole(std::string(1001, '(')), "more than 1000 marks"},
      {pk::whole("c" + std::string(2000, 'a')), "a name of more than 250 bytes"}};
  for (const auto& [bytes, part] : damaged) {
    const std::string what = refusal_of_pickle(bytes, Errc::io);
    EXPECT_TRUE(has_text(what, part)) << what;
    EXPECT_TRUE(has_text(what, ": the pickle at byte ")) << what;
  }
  for (const char* op : {"I1\n", "P1\n", "\x82\x01", "V1\n", "i", "\x97", "o"})
    EXPECT_TRUE(has_text(refusal_of_pickle(pk::whole(op), Errc::unsupported), "opcode")) << op;
  EXPECT_TRUE(has_text(refusal_of_pickle("\x80\x06N.", Errc::unsupported), "protocol 6"));
  EXPECT_TRUE(has_text(refusal_of_pickle("\x80\x01N.", Errc::unsupported), "protocol 1"));
}

TEST_F(TorchFiles, ThatAreTooLargeAreRefused) {
  const std::string one = pk::text(std::string(40 << 20, 'x'));
  EXPECT_TRUE(has_text(refusal_of_pickle(pk::whole(pk::tuple({one, one})), Errc::io),
                       "texts of more than 67108864 bytes"));
  std::string many = "(";
  many.resize(1 + (5u << 20) * 2, 'K');  // K K: the integer 75
  EXPECT_TRUE(has_text(refusal_of_pickle(pk::whole(many + "t"), Errc::io), "more than 4194304 values"));
  // A tuple of 64 Ki items, 257 times.
  std::string items = "(" + std::string(65536, 'N') + "tq\x01" + "0";
  for (int i = 0; i < 257; ++i) items += "]" + std::string("(") + std::string(65536, 'N') + "e0";
  EXPECT_TRUE(has_text(refusal_of_pickle(pk::whole(items + "N"), Errc::io), "more than 16777216 items"));
}

// ---- state dicts

TEST_F(TorchFiles, ThatAreNoStateDictAreRefused) {
  const auto what_of = [&](const std::string& value) {
    return refusal(TorchWriter().bytes(value), Errc::config);
  };
  EXPECT_TRUE(has_text(what_of(pk::list({})), "holds a list where a state dict is needed"));
  EXPECT_TRUE(has_text(what_of(pk::dict({{pk::text("epoch"), pk::integer(3)}})), "'epoch' is an integer"));
  EXPECT_TRUE(has_text(what_of(pk::dict({{pk::integer(3), pk::integer(3)}})),
                       "a key of the state dict is an integer"));
  EXPECT_TRUE(has_text(what_of(pk::dict({{pk::text("model"), pk::dict({})}})), "'model' is a dict"));
}

TEST_F(TorchFiles, WithTensorsBeyondTheirStorageAreRefused) {
  const auto what_of = [&](std::uint64_t first, const Shape& shape, const Shape& strides) {
    TorchWriter w;
    return refusal(w.bytes(pk::dict({{pk::text("t"), TorchWriter::view(w.storage(counted(10), "FloatStorage"),
                                                                       first, shape, strides)}})),
                   Errc::io);
  };
  const std::string beyond = "tensor 't': its elements lie beyond storage 0 of 40 bytes";
  EXPECT_TRUE(has_text(what_of(1, {10}, {1}), beyond));
  EXPECT_TRUE(has_text(what_of(0, {11}, {1}), beyond));
  EXPECT_TRUE(has_text(what_of(0, {2}, {10}), beyond));
  EXPECT_TRUE(has_text(what_of(0, {2, 2}, {9, 1}), beyond));
  EXPECT_TRUE(has_text(what_of(0, {1ull << 40, 1}, {1ull << 40, 1}), beyond));
  EXPECT_TRUE(has_text(what_of((1ull << 63) - 1, {10}, {1}), beyond));
  EXPECT_TRUE(has_text(what_of(0, {1ull << 62, 1ull << 62}, {0, 0}), "larger than any memory"));
  EXPECT_TRUE(has_text(what_of(0, {2}, {1, 1}), "1 dimensions and 2 strides"));
  TorchWriter w;
  const std::string value =
      pk::dict({{pk::text("t"), TorchWriter::view(TorchWriter::id_of("7", "FloatStorage", 1), 0, {1}, {1})}});
  EXPECT_TRUE(has_text(refusal(w.bytes(value), Errc::io), "tensor 't': has no entry 'archive/data/7'"));
  EXPECT_TRUE(has_text(refusal(w.legacy_bytes(value), Errc::io), "tensor 't': storage 7 is missing"));
  TorchWriter other;
  other.storage(counted(3), "FloatStorage");
  EXPECT_TRUE(has_text(
      refusal(
          other.bytes(pk::dict(
              {{pk::text("t"), TorchWriter::view(TorchWriter::id_of("0", "FloatStorage", 4), 0, {1}, {1})}})),
          Errc::io),
      "storage 0 has 12 bytes where 4 elements are announced"));
  TorchWriter right;
  const std::string d =
      pk::dict({{pk::text("c"),
                 TorchWriter::view(right.storage_of_bytes(std::string(16, 'x'), "ComplexDoubleStorage", 1), 0,
                                   {1}, {1})}});
  EXPECT_TRUE(has_text(refusal(right.bytes(d), Errc::unsupported), "tensor 'c': its dtype torch.complex128"));
}

/// A stride of 0 makes any number of elements of a few bytes.
TEST_F(TorchFiles, WithExpandedTensorsAreReadUpToALimit) {
  const auto bytes_of = [&](std::uint64_t stored, std::uint64_t times) {
    TorchWriter w;
    const std::string storage = w.storage(counted(stored), "FloatStorage");
    return w.bytes(pk::dict({{pk::text("t"), TorchWriter::view(storage, 0, {times, stored}, {0, 1})}}));
  };
  const TorchTensor t = tensors_of(opened(bytes_of(2, std::uint64_t{1} << 27))).at("t");
  EXPECT_EQ(t.count, std::uint64_t{1} << 28);
  float last = 0;
  TorchFile::open(path()).read(t, t.count - 1, std::as_writable_bytes(std::span(&last, 1)));
  EXPECT_EQ(last, 1);
  const std::string front = path() + ": tensor 't': ";
  EXPECT_EQ(refusal(bytes_of(2, std::uint64_t{1} << 28), Errc::unsupported),
            front + "is expanded from 8 to 2147483648 bytes; leave it out, or save its clone()");
  EXPECT_TRUE(refusal(bytes_of(1, std::uint64_t{1} << 62), Errc::io)
                  .starts_with(front + "its shape is larger than any memory"));
  EXPECT_EQ(tensors_of(opened(bytes_of(5 << 20, 64))).at("t").count, 320u << 20) << "64 times 20 MiB";
}

TEST_F(TorchFiles, WithNegativeViewsAreRefused) {
  TorchWriter w;
  const auto value = [&](const pk::Pairs& metadata) {
    return pk::dict(
        {{pk::text("t"), pk::call(pk::global("torch._utils", "_rebuild_tensor_v2"),
                                  {w.storage(counted(2), "FloatStorage"), pk::integer(0), pk::numbers({2}),
                                   pk::numbers({1}), pk::boolean(false), pk::none(), pk::dict(metadata)})}});
  };
  EXPECT_EQ(tensors_of(opened(w.bytes(value({})))).size(), 1u);
  EXPECT_TRUE(has_text(refusal(w.bytes(value({{pk::text("neg"), pk::boolean(true)}})), Errc::unsupported),
                       "negative view"));
}

// ---- files

TEST_F(TorchFiles, InZip64AndWithCommentsAreRead) {
  for (const bool zip64 : {false, true})
    for (const char* comment : {"", "PK\x05\x06 is no end"}) {
      TorchWriter w;
      w.zip.zip64 = zip64, w.zip.comment = comment;
      const TorchFile file = opened(w.bytes(pk::dict({{pk::text("t"), w.tensor(counted(9), {9})}})));
      EXPECT_EQ(values_of<float>(file, tensors_of(file).at("t")), counted(9));
    }
}

TEST_F(TorchFiles, OfAnotherKindAreRefused) {
  const auto of_writer = [&](const std::function<void(TorchWriter&)>& change) {
    TorchWriter w;
    change(w);
    return refusal(w.bytes(pk::dict({{pk::text("t"), w.tensor(counted(9), {9})}})), Errc::unsupported);
  };
  EXPECT_TRUE(has_text(of_writer([](TorchWriter& w) { w.zip.method = 8; }),
                       "entry 'archive/data.pkl' is compressed"));
  EXPECT_TRUE(
      has_text(of_writer([](TorchWriter& w) { w.zip.flags = 1; }), "entry 'archive/data.pkl' is encrypted"));
  EXPECT_TRUE(has_text(of_writer([](TorchWriter& w) { w.byte_order = "big"; }), "byte order 'big'"));
  EXPECT_TRUE(
      has_text(of_writer([](TorchWriter& w) { w.zip.add("archive/constants.pkl", ""); }), "TorchScript"));
  EXPECT_TRUE(has_text(of_writer([](TorchWriter& w) { w.archive = "a/b"; }), "a zip file without data.pkl"));
  TorchWriter w;
  EXPECT_TRUE(has_text(refusal(w.legacy_bytes(pk::dict({}), false), Errc::unsupported), "big-endian"));
  EXPECT_TRUE(has_text(refusal(pk::whole(pk::dict({})), Errc::unsupported),
                       "a pickle that torch.save() has not written"));
  std::string tar(600, '\0');
  tar.replace(257, 5, "ustar");
  EXPECT_TRUE(has_text(refusal(tar, Errc::unsupported), "a tar file"));
  EXPECT_TRUE(has_text(refusal("hello", Errc::unsupported), "no file of torch.save()"));
  EXPECT_TRUE(has_text(refusal("", Errc::unsupported), "no file of torch.save()"));
  test::write_bytes(path(), std::string("PK\x03\x04\0\0\0\0{\"a\":1}", 16));
  EXPECT_FALSE(TorchFile::is_one(path())) << "safetensors whose header has this length";
}

TEST_F(TorchFiles, ThatAreCutOffAreRefused) {
  TorchWriter w;
  const std::string value = pk::dict({{pk::text("t"), w.tensor(counted(50), {50})}});
  for (const std::string& whole : {w.bytes(value), w.legacy_bytes(value)})
    for (std::size_t n = 0; n < whole.size(); n += 1 + n % 3) {
      test::write_bytes(path(), whole.substr(0, n));
      const Error e = error_of([&] {
        const TorchFile file = TorchFile::open(path());
        state_dict_of(file, file.pickle().root);
      });
      EXPECT_TRUE(e.code() == Errc::io || (n < 20 && e.code() == Errc::unsupported)) << n << ": " << e.what();
      EXPECT_TRUE(std::string(e.what()).starts_with(path() + ": ")) << e.what();
    }
}

TEST_F(TorchFiles, WithDamagedDirectoriesAreRefused) {
  const auto what_of =
      [&](const std::function<void(std::string&, std::size_t directory, std::size_t end)>& change,
          bool zip64 = false) {
        TorchWriter w;
        w.zip.zip64 = zip64;
        std::string bytes = w.bytes(pk::dict({{pk::text("t"), w.tensor(counted(3), {3})}}));
        change(bytes, bytes.find("PK\x01\x02"), bytes.rfind("PK\x05\x06"));
        return refusal(bytes, Errc::io);
      };
  const auto put = [](std::string& s, std::size_t at, auto value) {
    std::memcpy(s.data() + at, &value, sizeof value);
  };
  EXPECT_TRUE(has_text(what_of([&](auto& s, auto, auto end) { put(s, end + 16, std::uint32_t{0x7fffffff}); }),
                       "lies outside the file"));
  EXPECT_TRUE(has_text(what_of([&](auto& s, auto, auto end) { put(s, end + 12, std::uint32_t{0x7fffffff}); }),
                       "lies outside the file"));
  EXPECT_TRUE(has_text(what_of([&](auto& s, auto, auto end) { put(s, end + 10, std::uint16_t{9}); }),
                       "9 are announced"));
  EXPECT_TRUE(has_text(what_of([&](auto& s, auto directory, auto) { s[directory] = 'x'; }),
                       "has no entry at byte 0"));
  EXPECT_TRUE(
      has_text(what_of([&](auto& s, auto directory, auto) { put(s, directory + 28, std::uint16_t{9999}); }),
               "ends within an entry"));
  EXPECT_TRUE(
      has_text(what_of([&](auto& s, auto directory, auto) { put(s, directory + 24, std::uint32_t{1}); }),
               "bytes stored of 1"));
  EXPECT_TRUE(has_text(
      what_of([&](auto& s, auto directory, auto) { put(s, directory + 42, std::uint32_t{0x70000000}); }),
      "lies outside the file"));
  EXPECT_TRUE(
      has_text(what_of([&](auto& s, auto directory, auto) { put(s, directory + 42, std::uint32_t{1}); }),
               "has no header at byte 1"));
  EXPECT_TRUE(has_text(what_of([&](auto& s, auto directory, auto) {
                         put(s, directory + 20, std::uint32_t{99999}),
                             put(s, directory + 24, std::uint32_t{99999});
                       }),
                       "of 99999 bytes lies outside"));
  EXPECT_TRUE(has_text(what_of([&](auto& s, auto, auto end) { s[end - 20] = 'x'; }, true),
                       "its zip64 locator is missing"));
  EXPECT_TRUE(has_text(what_of([&](auto& s, auto, auto end) { put(s, end - 12, ~std::uint64_t{0}); }, true),
                       "zip64 record at byte"));
  ZipWriter twice;
  twice.add("a/data.pkl", pk::whole("N")), twice.add("a/data.pkl", pk::whole("N"));
  EXPECT_TRUE(has_text(refusal(twice.bytes(), Errc::io), "lists 'a/data.pkl' twice"));
  ZipWriter two;
  two.add("a/data.pkl", pk::whole("N")), two.add("b/data.pkl", pk::whole("N"));
  EXPECT_TRUE(has_text(refusal(two.bytes(), Errc::io), "has 2 entries data.pkl"));
}

/// Any bytes are tensors that can be read, or an error of one line; memory and time stay small.
TEST_F(TorchFiles, ThatAreMutatedAreReadOrRefused) {
  TorchWriter w, large;
  large.zip.zip64 = true;
  const auto value = [](TorchWriter& t) {
    return pk::state_dict(
        {{pk::text("w"), t.tensor(counted(6), {2, 3})},
         {pk::text("v"), TorchWriter::view(t.storage(counted(12), "FloatStorage"), 1, {3, 2}, {1, 4})},
         {pk::text("p"),
          TorchWriter::parameter(t.tensor(std::vector<std::int64_t>{1, 2}, {2}, "LongStorage"))}});
  };
  const std::string a = value(w), b = value(large);
  const std::vector<std::string> seeds{w.bytes(a), w.legacy_bytes(a), large.bytes(b)};
  const char* rounds_text = std::getenv("RZ_TEST_ROUNDS");
  const int rounds = rounds_text ? std::atoi(rounds_text) : 3000;
  std::mt19937 random(7);
  int refused = 0, read = 0;
  for (int round = 0; round < rounds; ++round) {
    std::string bytes = seeds[round % seeds.size()];
    for (unsigned n = 1 + random() % 3; n > 0; --n) {
      const std::size_t at = random() % bytes.size();
      switch (random() % 5) {
        case 0:
          bytes[at] = static_cast<char>(random());
          break;
        case 1:
          bytes[at] = static_cast<char>(bytes[at] ^ 1 << random() % 8);
          break;
        case 2:
          bytes.erase(at, 1 + random() % 8);
          break;
        case 3:
          bytes.insert(at, bytes.substr(random() % bytes.size(), 1 + random() % 16));
          break;
        default:
          bytes.replace(at, std::min<std::size_t>(4, bytes.size() - at), "\xff\xff\xff\xff");
          break;
      }
    }
    try {
      const TorchFile file = opened(bytes, round % 2 ? TorchContents::deepspeed : TorchContents::weights);
      for (const auto& [name, t] : state_dict_of(file, file.pickle().root)) {
        std::vector<std::byte> out(std::min<std::uint64_t>(t.count, 1000) * t.element_bytes);
        file.read(t, 0, out);
        file.read(t, t.count - std::min<std::uint64_t>(t.count, 1000), out);
      }
      ++read;
    } catch (const Error& e) {
      ++refused;
      EXPECT_FALSE(has_text(e.what(), "\n")) << e.what();
    }
  }
  EXPECT_GT(refused, rounds / 4);
  EXPECT_GT(read, rounds / 20);
  struct rusage use {};
  ::getrusage(RUSAGE_SELF, &use);
  EXPECT_LT(use.ru_maxrss, 2 << 20) << "KiB";
}

// ---- ranges of files

TEST_F(TorchFiles, InputFilesAreReadByRange) {
  test::write_bytes(path(), "0123456789");
  const InputFile file = InputFile::open(path());
  EXPECT_EQ(file.size(), 10u);
  std::string part(4, '\0');
  file.read(3, std::as_writable_bytes(std::span(part)));
  EXPECT_EQ(part, "3456");
  fs::resize_file(path(), 5);
  EXPECT_STREQ(error_of([&] { file.read(3, std::as_writable_bytes(std::span(part))); }).what(),
               (path() + ": ends at byte 5, 2 bytes early").c_str());
  EXPECT_TRUE(has_text(error_of([&] { InputFile::open(folder_.path()); }).what(), "not a regular file"));
  EXPECT_TRUE(has_text(error_of([&] { InputFile::open(folder_ / "none"); }).what(),
                       "cannot be opened: No such file"));
  ASSERT_EQ(::mkfifo((folder_ / "pipe").c_str(), 0600), 0);
  EXPECT_TRUE(has_text(error_of([&] { InputFile::open(folder_ / "pipe"); }).what(), "not a regular file"));
}

}  // namespace
}  // namespace rz
