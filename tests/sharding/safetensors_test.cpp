#include "sharding/checkpoint/safetensors.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <random>

#include "comm/core/error.h"
#include "tests/support/folder.h"

namespace {
/// Events of the disk and of renames, in order.
std::vector<std::string> disk_calls;
}  // namespace

// Replaces the C library's.
extern "C" int fsync(int fd) {
  struct stat info {};
  ::fstat(fd, &info);
  disk_calls.push_back(S_ISDIR(info.st_mode) ? "sync folder" : "sync file");
  return static_cast<int>(::syscall(SYS_fsync, fd));
}
extern "C" int rename(const char* from, const char* to) noexcept {
  disk_calls.push_back("rename");
  return ::renameat(AT_FDCWD, from, AT_FDCWD, to);
}

namespace rz {
namespace {

namespace fs = std::filesystem;

class Safetensors : public testing::Test, protected test::Folder {
 protected:
  std::string path(const char* name = "x.safetensors") const { return Folder::path(name); }

  void put(const std::string& bytes) const { std::ofstream(path(), std::ios::binary) << bytes; }
  static std::string framed(const std::string& header, const std::string& data) {
    std::uint64_t length = header.size();
    return std::string(reinterpret_cast<const char*>(&length), 8) + header + data;
  }
  /// The error of opening; empty if there is none.
  std::string error_message(const std::string& bytes) const {
    put(bytes);
    try {
      open_safetensors(path());
      return "";
    } catch (const Error& e) {
      EXPECT_TRUE(e.code() == Errc::io || e.code() == Errc::config) << e.what();
      EXPECT_EQ(std::string(e.what()).rfind(path() + ": ", 0), 0u) << e.what();
      EXPECT_EQ(std::string(e.what()).find('\n'), std::string::npos) << e.what();
      return e.what();
    }
  }
  void expect_error_message(const std::string& bytes, std::initializer_list<const char*> parts) const {
    const std::string what = error_message(bytes);
    for (const char* part : parts)
      EXPECT_NE(what.find(part), std::string::npos) << "'" << what << "' lacks " << part;
  }
  std::string written() const {
    const std::vector<SafetensorsSpec> tensors{{"b", {2, 3}}, {"a", {}}, {"none", {0, 4}}, {"c", {5}}};
    std::vector<float> values(12);
    std::iota(values.begin(), values.end(), 0.5f);
    SafetensorsWriter writer(path(), tensors);
    writer.write(std::span(values).first(4));
    writer.write(std::span(values).subspan(4));
    writer.finish();
    std::ifstream in(path(), std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
  }
};

TEST_F(Safetensors, WrittenTensorsReadBackInSlices) {
  EXPECT_NE(written().find(R"("__metadata__":{"format":"pt"})"), std::string::npos);
  const auto file = open_safetensors(path());
  ASSERT_EQ(file.tensors().size(), 4u);
  EXPECT_EQ(file.tensors()[0].name, "b");
  EXPECT_EQ(file.find("b")->shape, (std::vector<std::uint64_t>{2, 3}));
  EXPECT_EQ(file.find("nothing"), nullptr);
  std::vector<float> c(5), slice(2);
  file.read_f32(*file.find("c"), 0, c);
  EXPECT_EQ(c, (std::vector<float>{7.5, 8.5, 9.5, 10.5, 11.5}));
  file.read_f32(*file.find("b"), 3, slice);
  EXPECT_EQ(slice, (std::vector<float>{3.5, 4.5}));
  file.read_f32(*file.find("none"), 0, {});
  EXPECT_THROW(file.read_f32(*file.find("c"), 4, slice), Error);
}

TEST_F(Safetensors, TheHeaderIsPaddedToEightBytes) {
  const std::string bytes = written();
  std::uint64_t length = 0;
  std::memcpy(&length, bytes.data(), 8);
  EXPECT_EQ(length % 8, 0u);
  EXPECT_EQ(bytes.size(), 8 + length + 12 * 4);
  EXPECT_EQ(bytes.compare(8, 34, R"({"__metadata__":{"format":"pt"},"b")", 0, 34), 0);
}

TEST_F(Safetensors, NothingHalfWrittenIsLeft) {
  const std::vector<SafetensorsSpec> tensors{{"x", {4}}};
  const std::vector<float> two(2), five(5);
  {
    SafetensorsWriter writer(path(), tensors);
    writer.write(two);
    EXPECT_FALSE(fs::exists(path()));
    EXPECT_THROW(writer.finish(), Error);
    EXPECT_THROW(writer.write(five), Error);
  }
  EXPECT_TRUE(fs::is_empty(Folder::path()));
  EXPECT_THROW(SafetensorsWriter(path("no/x"), tensors), Error);
}

TEST_F(Safetensors, AFileIsOnTheDiskBeforeItHasItsNameAndTheFolderAfterIt) {
  for (const char* which : {"the first", "one in another's place"}) {
    disk_calls.clear();
    written();
    EXPECT_EQ(disk_calls, (std::vector<std::string>{"sync file", "rename", "sync folder"})) << which;
  }
}

TEST_F(Safetensors, FilesOfKilledWritersAreRemoved) {
  for (int i = 0; i < 3; ++i) {
    const pid_t child = ::fork();
    if (child == 0) {
      SafetensorsWriter writer(path(), std::vector<SafetensorsSpec>{{"x", {4}}});
      writer.write(std::vector<float>(2));
      ::raise(SIGKILL);
    }
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFSIGNALED(status));
  }
  EXPECT_FALSE(fs::exists(path()));
  written();
  std::vector<std::string> left;
  for (const auto& entry : fs::directory_iterator(Folder::path())) left.push_back(entry.path().filename());
  EXPECT_EQ(left, std::vector<std::string>{"x.safetensors"});
}

TEST_F(Safetensors, UnreadableNamesAreNotWritten) {
  const auto refusal = [this](const std::vector<SafetensorsSpec>& tensors) -> std::string {
    try {
      SafetensorsWriter(path(), tensors);
      return "";
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Errc::invalid_argument) << e.what();
      return e.what();
    }
  };
  EXPECT_NE(refusal({{"__metadata__", {1}}}).find("'__metadata__': the format keeps this name"),
            std::string::npos);
  EXPECT_NE(refusal({{"a", {1}}, {"b", {1}}, {"a", {1}}}).find("'a': there are two of this name"),
            std::string::npos);
  EXPECT_NE(refusal({{"a\xff", {1}}}).find("'a\\xff': the name is not UTF-8"), std::string::npos);
  EXPECT_NE(refusal({{std::string(100'000'001, 'x'), {1}}}).find("limit of 100000000"), std::string::npos);
  EXPECT_NE(refusal({{"a", {std::uint64_t{1} << 62}}}).find("larger than any memory"), std::string::npos);
  EXPECT_TRUE(fs::is_empty(Folder::path()));
}

/// The header of one tensor of that many bytes, and the bytes.
std::string one_tensor(const std::string& name, const std::string& dtype, const std::string& shape,
                       std::size_t bytes) {
  return "{\"" + name + R"(":{"dtype":")" + dtype + R"(","shape":)" + shape + R"(,"data_offsets":[0,)" +
         std::to_string(bytes) + "]}}";
}

TEST_F(Safetensors, MetadataMayBeNull) {
  put(framed(R"({"__metadata__":null,"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})", "abcd"));
  const TensorSource source = open_safetensors(path());
  EXPECT_EQ(source.tensors().size(), 1u);
}

TEST_F(Safetensors, EveryTypeOfTheFormatIsAccepted) {
  for (const char* dtype : {"F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F4", "F6_E2M3", "F6_E3M2"}) {
    const std::size_t bits = dtype[1] == '4' ? 4 : dtype[1] == '6' ? 6 : 8;
    EXPECT_EQ(error_message(framed(one_tensor("t", dtype, "[4,2]", bits), std::string(bits, 'x'))), "")
        << dtype;
    expect_error_message(framed(one_tensor("t", dtype, "[4,4]", bits), std::string(bits, 'x')),
                         {"tensor 't'", dtype, "needs"});
  }
  expect_error_message(framed(one_tensor("t", "F4", "[3]", 2), "xx"),
                       {"[3] of F4 is 12 bits", "no whole bytes"});
  put(framed(one_tensor("t", "F4", "[4]", 2), "xx"));
  const auto file = open_safetensors(path());
  std::vector<float> out(4);
  try {
    file.read_f32(*file.find("t"), 0, out);
    FAIL() << "F4 was read as f32";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Errc::unsupported);
    EXPECT_NE(std::string(e.what()).find("'t': dtype F4 cannot be read"), std::string::npos) << e.what();
  }
}

TEST_F(Safetensors, AnUnusedUnknownTypeIsAccepted) {
  const float one = 1;
  put(framed(R"({"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},)"
             R"("later":{"dtype":"F2_E1M0","shape":[16],"data_offsets":[4,8]}})",
             std::string(reinterpret_cast<const char*>(&one), 4) + "xxxx"));
  const auto file = open_safetensors(path());
  std::vector<float> w(1), later(16);
  file.read_f32(*file.find("w"), 0, w);
  EXPECT_EQ(w[0], 1);
  EXPECT_THROW(file.read_f32(*file.find("later"), 0, later), Error);
  // Its bytes are the file's nevertheless, and one bit per element is the minimum.
  expect_error_message(framed(one_tensor("t", "F2", "[8]", 4), "xx"), {"'t'", "beyond"});
  expect_error_message(framed(one_tensor("t", "F2", "[17]", 2), "xx"),
                       {"'t'", "[17]", "F2", "cannot lie in 2"});
}

TEST_F(Safetensors, NothingButSpacesFollowsTheHeadersObject) {
  const std::string header = one_tensor("t", "F32", "[1]", 4);
  EXPECT_EQ(error_message(framed(header + "   ", "xxxx")), "");
  expect_error_message(framed(header + std::string("\0", 1), "xxxx"), {"zero"});
  expect_error_message(framed(header + std::string("\0{}", 3), "xxxx"), {"zero"});
  expect_error_message(framed(header + "\n", "xxxx"), {"header", "end"});
  expect_error_message(framed(header + " {}", "xxxx"), {"not valid JSON"});
}

TEST_F(Safetensors, MessagesAreFitForATerminal) {
  const auto plain = [this](const std::string& bytes, const char* part) {
    const std::string what = error_message(bytes);
    EXPECT_NE(what.find(part), std::string::npos) << what;
    for (const char c : what) EXPECT_FALSE(static_cast<unsigned char>(c) < 0x20 || c == 0x7f) << what;
    EXPECT_EQ(what.find("\xff"), std::string::npos);
    EXPECT_EQ(what.find("\xc2\x9b"), std::string::npos);
  };
  plain(framed(one_tensor("a\\u001b[2Jb\\u007f\\u009bc", "F32", "[1]", 8), "xxxxxxxx"),
        "tensor 'a\\x1b[2Jb\\x7f\\xc2\\x9bc'");
  plain(framed(one_tensor("t", "\\u001b[31m", "[99]", 4), "xxxx"), "\\x1b[31m");
  plain(framed("{\"a\xff\xfe\":1}", ""), "not valid JSON");
  plain(framed(R"({"a\u001b":1,"a\u001b":1})", ""), "key 'a\\x1b'");
  plain(framed(R"({"__metadata__":{"\u001b":1}})", ""), "\\x1b");
  plain(framed(R"({"t\u001b":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})", "xxxxxxxx"), "t\\x1b");
}

TEST_F(Safetensors, ReadsHalfBrainAndDouble) {
  // 1, -2, the smallest subnormal, infinity, 65504 as f16; 1, -3.140625 as bf16; 0.1 as f64.
  const std::uint16_t half[5] = {0x3c00, 0xc000, 0x0001, 0x7c00, 0x7bff}, brain[2] = {0x3f80, 0xc049};
  const double tenth = 0.1;
  std::string data(reinterpret_cast<const char*>(half), 10);
  data.append(reinterpret_cast<const char*>(brain), 4).append(reinterpret_cast<const char*>(&tenth), 8);
  data += '\1';
  put(framed(R"({"h":{"dtype":"F16","shape":[5],"data_offsets":[0,10]},"b":{"dtype":"BF16","shape":[2],)"
             R"("data_offsets":[10,14]},"d":{"dtype":"F64","shape":[],"data_offsets":[14,22]},)"
             R"("mask":{"dtype":"BOOL","shape":[1],"data_offsets":[22,23]}})",
             data));
  const auto file = open_safetensors(path());
  std::vector<float> h(5), b(2), d(1);
  file.read_f32(*file.find("h"), 0, h);
  file.read_f32(*file.find("b"), 0, b);
  file.read_f32(*file.find("d"), 0, d);
  EXPECT_EQ(h, (std::vector<float>{1, -2, 0x1p-24f, INFINITY, 65504}));
  EXPECT_EQ(b, (std::vector<float>{1, -3.140625}));
  EXPECT_EQ(d[0], 0.1f);
  EXPECT_THROW(file.read_f32(*file.find("mask"), 0, d), Error);
}

TEST_F(Safetensors, IntegersOfEachTypeAreReadByName) {
  std::string header = "{", data;
  const auto add = [&](const std::string& name, const std::string& dtype, auto... values) {
    const std::size_t begin = data.size();
    ((data.append(reinterpret_cast<const char*>(&values), sizeof values)), ...);
    header += concat(header.size() > 1 ? "," : "", '"', name, R"(":{"dtype":")", dtype, R"(","shape":[)",
                     sizeof...(values), R"(],"data_offsets":[)", begin, ",", data.size(), "]}");
  };
  add("ids", "I64", std::int64_t{7}, std::int64_t{-100}, std::int64_t{1} << 40);
  add("mask", "BOOL", std::uint8_t{1}, std::uint8_t{0});
  add("i8", "I8", std::int8_t{-1}, std::int8_t{127});
  add("i16", "I16", std::int16_t{-300}), add("u16", "U16", std::uint16_t{65535});
  add("i32", "I32", std::int32_t{-70000}), add("u32", "U32", std::uint32_t{4294967295});
  add("u64", "U64", ~std::uint64_t{0}), add("x", "F32", 0.5f);
  put(framed(header + "}", data));
  const TensorSource file = open_safetensors(path());
  EXPECT_EQ(file.read<std::int64_t>("ids"), (std::vector<std::int64_t>{7, -100, std::int64_t{1} << 40}));
  EXPECT_EQ(file.read<std::int32_t>("mask"), (std::vector<std::int32_t>{1, 0}));
  EXPECT_EQ(file.read<std::int32_t>("i8"), (std::vector<std::int32_t>{-1, 127}));
  EXPECT_EQ(file.read<std::int64_t>("i16"), (std::vector<std::int64_t>{-300}));
  EXPECT_EQ(file.read<std::int32_t>("u16"), (std::vector<std::int32_t>{65535}));
  EXPECT_EQ(file.read<std::int32_t>("i32"), (std::vector<std::int32_t>{-70000}));
  EXPECT_EQ(file.read<std::int64_t>("u32"), (std::vector<std::int64_t>{4294967295}));
  EXPECT_EQ(file.read<float>("x"), (std::vector<float>{0.5}));
  const auto refused = [&](auto read, Errc code, const char* words) {
    try {
      read();
      ADD_FAILURE() << words;
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), code) << e.what();
      EXPECT_NE(std::string(e.what()).find(words), std::string::npos) << e.what();
    }
  };
  refused([&] { file.read<std::int32_t>("ids"); }, Errc::io,
          "element 2 is 1099511627776, which needs more than 4");
  refused([&] { file.read<std::int32_t>("u32"); }, Errc::io, "element 0 is 4294967295");
  refused([&] { file.read<std::int64_t>("u64"); }, Errc::io, "element 0 is 18446744073709551615");
  refused([&] { file.read<std::int64_t>("x"); }, Errc::unsupported,
          "tensor 'x': dtype F32 is none of integers");
  refused([&] { file.read<float>("ids"); }, Errc::unsupported,
          "tensor 'ids': dtype I64 cannot be read as f32");
  refused([&] { file.read<float>("masks"); }, Errc::io, "there is no tensor 'masks'; did you mean 'mask'?");
}

TEST_F(Safetensors, WrongHeadersAreNamed) {
  const std::string eight(8, 'x');
  const auto one = [](const char* body) { return std::string("{\"t\":") + body + "}"; };
  expect_error_message("abc", {"too few"});
  expect_error_message(std::string("\xff\xff\xff\xff\xff\xff\xff\xff", 8) + eight, {"limit"});
  expect_error_message(std::string("\xff\0\0\0\0\0\0\0", 8) + "{}", {"255", "cut off"});
  expect_error_message(framed("", ""), {"does not start with '{'"});
  expect_error_message(framed("[1]", ""), {"does not start with '{'"});
  expect_error_message(framed("{nonsense", ""), {"not valid JSON"});
  expect_error_message(framed("{,}", ""), {"not valid JSON"});
  expect_error_message(framed(one("3"), ""), {"tensor 't'", "expected an object"});
  expect_error_message(framed(one(R"({"shape":[1],"data_offsets":[0,4]})"), ""),
                       {"tensor 't'", "dtype is missing"});
  expect_error_message(framed(one(R"({"dtype":"F32","data_offsets":[0,4]})"), ""), {"shape is missing"});
  expect_error_message(framed(one(R"({"dtype":"F32","shape":[1]})"), ""), {"data_offsets is missing"});
  expect_error_message(framed(one(R"({"dtype":33,"shape":[1],"data_offsets":[0,4]})"), eight),
                       {"tensor 't'", "dtype: expected a text", "33"});
  expect_error_message(framed(one(R"({"dtype":"F32","shape":[-1],"data_offsets":[0,4]})"), eight), {"[-1]"});
  expect_error_message(framed(one(R"({"dtype":"F32","shape":[1.5],"data_offsets":[0,4]})"), eight),
                       {"[1.5]"});
  expect_error_message(framed(one(R"({"dtype":"F32","shape":[2],"data_offsets":[4,0]})"), eight), {"[4,0]"});
  expect_error_message(framed(one(R"({"dtype":"F32","shape":[3],"data_offsets":[0,8]})"), eight),
                       {"tensor 't'", "needs 12 bytes", "hold 8"});
  expect_error_message(
      framed(one(R"({"dtype":"F32","shape":[4611686018427387904],"data_offsets":[0,0]})"), ""),
      {"larger than any memory"});
  expect_error_message(
      framed(one(R"({"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0]})"), ""),
      {"larger than any memory"});
  expect_error_message(framed(one(R"({"dtype":"F32","shape":[2],"data_offsets":[0,8],"more":1})"), eight),
                       {"'more'"});
  expect_error_message(framed(one(R"({"dtype":"F32","shape":[4],"data_offsets":[0,16]})"), eight),
                       {"beyond"});
  expect_error_message(framed(one(R"({"dtype":"F32","shape":[1],"data_offsets":[0,4]})"), eight),
                       {"4 bytes after the last tensor"});
  expect_error_message(framed(one(R"({"dtype":"F32","shape":[1],"data_offsets":[4,8]})"), eight), {"hole"});
  expect_error_message(framed(R"({"t":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},)"
                              R"("u":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})",
                              eight),
                       {"'u'", "overlap"});
  expect_error_message(framed(R"({"t":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},)"
                              R"("t":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})",
                              eight),
                       {"'t'", "twice"});
  expect_error_message(framed(R"({"__metadata__":{"format":1}})", ""), {"__metadata__"});
  EXPECT_EQ(error_message(framed("{}", "")), "");
}

TEST_F(Safetensors, AMissingFileAndADirectoryAreNamed) {
  for (const std::string& where : {path("missing"), Folder::path()}) try {
      open_safetensors(where);
      FAIL();
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Errc::io);
      EXPECT_NE(std::string(e.what()).find(where), std::string::npos);
    }
}

TEST_F(Safetensors, EveryTruncationIsRefused) {
  const std::string bytes = written();
  for (std::size_t length = 0; length < bytes.size(); ++length)
    EXPECT_NE(error_message(bytes.substr(0, length)), "") << "cut to " << length << " bytes";
}

TEST_F(Safetensors, MutationsAreReadOrRefusedButNeverCrash) {
  const std::string good = written();
  std::mt19937 random(7);
  int refused = 0;
  for (int i = 0; i < 3000; ++i) {
    std::string bytes = good;
    for (int m = 0; m <= i % 3; ++m) bytes[random() % (good.size() - 48)] = static_cast<char>(random());
    if (i % 7 == 0) bytes.resize(random() % bytes.size());
    if (!error_message(bytes).empty()) {
      ++refused;
      continue;
    }
    const auto file = open_safetensors(path());
    for (const auto& t : file.tensors()) {
      std::vector<float> values(t.count);
      if (t.dtype == "F32") file.read_f32(t, 0, values);
    }
  }
  EXPECT_GT(refused, 2000);
}

}  // namespace
}  // namespace rz
