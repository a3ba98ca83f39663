#include "sharding/data/file_kinds.h"

#include <algorithm>

#include "sharding/io/text.h"

namespace rz {
namespace {

using namespace std::string_view_literals;

namespace remedy {
constexpr std::string_view gzip = "unpack it, e.g. gzip -dc < FILE > ",
                           lz4 = "unpack it, e.g. lz4 -dc < FILE > ", xz = "unpack it, e.g. xz -dc < FILE > ",
                           arrow =
                               "write its records to another file, e.g. pandas.read_feather(\"FILE\")"
                               ".to_json(\"FILE.jsonl\", orient=\"records\", lines=True)",
                           pickle = "write its texts to another file, in Python",
                           office = "save its text to another file, by the program that made it",
                           tokens = "give it as --tokens (Tokens::from_file()) if it has tokens",
                           none = "leave it out: it has no text",
                           utf32 = "convert it, e.g. iconv -f utf-32 -t utf-8 FILE > ",
                           utf16 = "convert it, e.g. iconv -f utf-16 -t utf-8 FILE > ";
}  // namespace remedy

constexpr FileKind file_kinds[] = {
    {"\x1f\x8b\x08"sv, "gzip", remedy::gzip},
    {"\x1f\x9d"sv, "compress (.Z)", remedy::gzip},
    {"\x28\xb5\x2f\xfd"sv, "zstd", "unpack it, e.g. zstd -dc < FILE > "},
    {"\xfd\x37zXZ\0"sv, "xz", remedy::xz},
    {"]\0\0"sv, "lzma", remedy::xz},
    {"1AY&SY"sv, "bzip2", "unpack it, e.g. bzip2 -dc < FILE > ", 4},
    {"\x04\x22\x4d\x18"sv, "lz4", remedy::lz4},
    {"\x02\x21\x4c\x18"sv, "lz4", remedy::lz4},
    {"LZIP"sv, "lzip", "unpack it, e.g. lzip -dc < FILE > ", 0, true},
    {"\x89LZO\0"sv, "lzop", "unpack it, e.g. lzop -dc < FILE > "},
    {"\xff\x06\0\0sNaPpY"sv, "snappy", "unpack it, e.g. snzip -dc < FILE > "},
    {"7z\xbc\xaf\x27\x1c"sv, "7z", "unpack it, e.g. 7z x FILE"},
    {"Rar!\x1a\x07"sv, "rar", "unpack it, e.g. unrar x FILE"},
    {"ustar"sv, "tar", "unpack it, e.g. tar -xf FILE", 257, true},
    {"[Content_Types].xml"sv, "Office", remedy::office, 30},
    {"mimetypeapplication/"sv, "OpenDocument or an e-book", remedy::office, 30},
    {"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"sv, "Office", remedy::office},
    {"PK\x03\x04"sv, "zip", "unpack it, e.g. unzip FILE"},
    {"%PDF-"sv, "PDF", "convert it, e.g. pdftotext FILE FILE.txt"},
    {"{\\rtf"sv, "RTF", remedy::office},
    {"PAR1"sv, "Parquet",
     "write its records to another file, e.g. "
     "pandas.read_parquet(\"FILE\").to_json(\"FILE.jsonl\", orient=\"records\", lines=True)",
     0, true},
    {"ARROW1\0"sv, "Arrow", remedy::arrow},
    {"\x10\0\0\0\0\0\x0a\0"sv, "Arrow",
     "write its records to another file, e.g. "
     "datasets.Dataset.from_file(\"FILE\").to_json(\"FILE.jsonl\")",
     8},
    {"ORC"sv, "ORC",
     "write its records to another file, e.g. "
     "pandas.read_orc(\"FILE\").to_json(\"FILE.jsonl\", orient=\"records\", lines=True)",
     0, true},
    {"Obj\x01"sv, "Avro", "write its records to another file, e.g. by fastavro"},
    {"\x89HDF\r\n\x1a\n"sv, "HDF5", "write its texts to another file, e.g. by h5py"},
    {"SQLite format 3\0"sv, "SQLite",
     "write its texts to another file, e.g. sqlite3 FILE 'select COLUMN from TABLE' > "},
    {"\x80\x02"sv, "pickle", remedy::pickle},
    {"\x80\x03"sv, "pickle", remedy::pickle},
    {"\x80\x04\x95"sv, "pickle", remedy::pickle},
    {"\x80\x05\x95"sv, "pickle", remedy::pickle},
    {"\x93NUMPY"sv, "NumPy", remedy::tokens},
    {"\x98\xd8\x34\x01"sv, "llm.c", remedy::tokens},
    {"\xb1\xd9\x34\x01"sv, "llm.c", remedy::tokens},
    {"\x89PNG\r\n"sv, "an image", remedy::none},
    {"\xff\xd8\xff"sv, "an image", remedy::none},
    {"GIF8"sv, "an image", remedy::none, 0, true},
    {"\x7f\x45LF"sv, "a program", remedy::none},
    {"\xff\xfe\0\0"sv, "UTF-32", remedy::utf32},
    {"\0\0\xfe\xff"sv, "UTF-32", remedy::utf32},
    {"\xff\xfe"sv, "UTF-16", remedy::utf16},
    {"\xfe\xff"sv, "UTF-16", remedy::utf16}};

}  // namespace

bool looks_like_text(std::string_view bytes) {
  const auto controls = std::ranges::count_if(bytes, [](char c) {
    const auto byte = static_cast<unsigned char>(c);
    return (byte < ' ' && (byte < '\b' || byte > '\r') && byte != '\x1b') || byte == 0x7f;
  });
  return static_cast<std::size_t>(controls) * 64 < std::max<std::size_t>(bytes.size(), 1);
}

bool begins_as_utf8(std::string_view bytes) {
  for (std::size_t cut = 0; cut < std::min<std::size_t>(4, bytes.size()); ++cut)
    if (is_utf8(bytes.substr(0, bytes.size() - cut))) return true;
  return bytes.empty();
}

const FileKind* marked_kind(std::string_view front, std::size_t min_bytes) {
  front = front.substr(0, 4096);
  const auto is_text = [&] { return begins_as_utf8(front) && looks_like_text(front); };
  for (const FileKind& kind : file_kinds)
    if (kind.mark.size() >= min_bytes &&
        front.substr(std::min(kind.at, front.size())).starts_with(kind.mark) &&
        (!kind.is_words || front == kind.mark || !is_text()))
      return &kind;
  return nullptr;
}

}  // namespace rz
