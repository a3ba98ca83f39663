#include "sharding/checkpoint/torch_files/zip_directory.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "comm/core/error.h"
#include "sharding/io/text.h"

namespace rz {
namespace {

using std::uint16_t;
using std::uint32_t;
using std::uint64_t;

constexpr uint64_t max_directory_bytes = uint64_t{64} << 20;
constexpr uint32_t local_header = 0x04034b50, central_header = 0x02014b50, end_record = 0x06054b50,
                   end_record_64 = 0x06064b50, end_locator_64 = 0x07064b50;
constexpr std::size_t local_bytes = 30, central_bytes = 46, end_bytes = 22, end_bytes_64 = 56,
                      locator_bytes = 20;

std::vector<std::byte> bytes_at(const InputFile& file, uint64_t offset, uint64_t count) {
  std::vector<std::byte> bytes(count);
  file.read(offset, bytes);
  return bytes;
}

/// A little-endian number; the bytes are there.
template <class T>
T number_at(std::span<const std::byte> bytes, std::size_t at) {
  T value;
  std::memcpy(&value, bytes.data() + at, sizeof value);
  return value;
}

template <class... T>
void check_zip(bool ok, const InputFile& file, const T&... parts) {
  if (!ok) fail(Errc::io, escaped(concat(file.path(), ": ", parts..., "; the file is cut off or damaged")));
}

/// Where the directory is.
struct DirectoryPlace {
  uint64_t start = 0, bytes = 0, entries = 0;
};

/// Offset of the record that ends the file: its last one, after which only a comment follows.
uint64_t find_end(const InputFile& file, std::vector<std::byte>& record) {
  const uint64_t tail = std::min<uint64_t>(file.size(), end_bytes + 0xffff);
  const auto bytes = bytes_at(file, file.size() - tail, tail);
  for (std::size_t at = bytes.size() >= end_bytes ? bytes.size() - end_bytes + 1 : 0; at-- > 0;) {
    if (number_at<uint32_t>(bytes, at) != end_record) continue;
    if (at + end_bytes + number_at<uint16_t>(bytes, at + 20) != bytes.size()) continue;
    record.assign(bytes.begin() + static_cast<std::ptrdiff_t>(at),
                  bytes.begin() + static_cast<std::ptrdiff_t>(at + end_bytes));
    return file.size() - tail + at;
  }
  fail(Errc::io, escaped(file.path()), ": begins as a zip file, but its directory at the end is missing; ",
       "the file is cut off or damaged");
}

void require_one_volume(const InputFile& file, uint64_t volume, uint64_t of_directory) {
  require(volume == 0 && of_directory == 0, Errc::unsupported, escaped(file.path()),
          ": is one of several volumes of a zip file");
}

DirectoryPlace place_64(const InputFile& file, uint64_t end) {
  check_zip(end >= locator_bytes, file, "its zip64 locator is missing");
  const auto locator = bytes_at(file, end - locator_bytes, locator_bytes);
  check_zip(number_at<uint32_t>(locator, 0) == end_locator_64, file, "its zip64 locator is missing");
  const auto at = number_at<uint64_t>(locator, 8);
  check_zip(at <= end && end - at >= end_bytes_64 + locator_bytes, file, "its zip64 record at byte ", at,
            " lies outside the file");
  const auto record = bytes_at(file, at, end_bytes_64);
  check_zip(number_at<uint32_t>(record, 0) == end_record_64, file, "its zip64 record at byte ", at,
            " is none");
  require_one_volume(file, number_at<uint32_t>(record, 16), number_at<uint32_t>(record, 20));
  return {number_at<uint64_t>(record, 48), number_at<uint64_t>(record, 40), number_at<uint64_t>(record, 32)};
}

DirectoryPlace find_directory(const InputFile& file) {
  std::vector<std::byte> record;
  const uint64_t end = find_end(file, record);
  DirectoryPlace place{number_at<uint32_t>(record, 16), number_at<uint32_t>(record, 12),
                       number_at<uint16_t>(record, 10)};
  const bool is_64 = place.start == 0xffffffff || place.bytes == 0xffffffff || place.entries == 0xffff;
  if (is_64) {
    place = place_64(file, end);
  } else {
    require_one_volume(file, number_at<uint16_t>(record, 4), number_at<uint16_t>(record, 6));
  }
  check_zip(place.start <= end && place.bytes <= end - place.start, file, "its zip directory at byte ",
            place.start, " of ", place.bytes, " bytes lies outside the file");
  require(place.bytes <= max_directory_bytes, Errc::io, escaped(file.path()), ": a zip directory of ",
          place.bytes, " bytes is above the limit of ", max_directory_bytes);
  return place;
}

/// Reads the entries of a directory one after the other.
class EntryCursor {
 public:
  EntryCursor(const InputFile& file, std::span<const std::byte> bytes) : file_(file), bytes_(bytes) {}

  std::pair<std::string, ZipEntry> next() {
    check_zip(bytes_.size() - at_ >= central_bytes && number_at<uint32_t>(bytes_, at_) == central_header,
              file_, "its zip directory has no entry at byte ", at_);
    const std::size_t name = number<uint16_t>(28), extra = number<uint16_t>(30),
                      comment = number<uint16_t>(32);
    check_zip(bytes_.size() - at_ - central_bytes >= name + extra + comment, file_,
              "its zip directory ends within an entry");
    const std::string text(reinterpret_cast<const char*>(bytes_.data()) + at_ + central_bytes, name);
    const ZipEntry entry = sizes(text, bytes_.subspan(at_ + central_bytes + name, extra));
    at_ += central_bytes + name + extra + comment;
    return {text, entry};
  }
  bool at_end() const { return at_ == bytes_.size(); }

 private:
  template <class T>
  T number(std::size_t offset) const {
    return number_at<T>(bytes_, at_ + offset);
  }

  ZipEntry sizes(const std::string& name, std::span<const std::byte> extra) const {
    const uint16_t method = number<uint16_t>(10);
    uint64_t packed = number<uint32_t>(20), bytes = number<uint32_t>(24), header = number<uint32_t>(42);
    const bool is_64 = packed == 0xffffffff || bytes == 0xffffffff || header == 0xffffffff;
    if (is_64) read_64(name, extra, packed, bytes, header);
    check_zip(method != 0 || packed == bytes, file_, "entry '", name, "' has ", packed, " bytes stored of ",
              bytes);
    return {header, bytes, method, (number<uint16_t>(8) & 1) != 0};
  }

  /// The extra field 1 holds those of the numbers, in this order, that do not fit into 32 bits.
  void read_64(const std::string& name, std::span<const std::byte> extra, uint64_t& packed, uint64_t& bytes,
               uint64_t& header) const {
    while (extra.size() >= 4) {
      const std::size_t size = number_at<uint16_t>(extra, 2);
      if (size > extra.size() - 4) break;
      if (number_at<uint16_t>(extra, 0) != 1) {
        extra = extra.subspan(4 + size);
        continue;
      }
      auto field = extra.subspan(4, size);
      for (uint64_t* value : {&bytes, &packed, &header}) {
        if (*value != 0xffffffff) continue;
        check_zip(field.size() >= 8, file_, "entry '", name, "' lacks its zip64 sizes");
        *value = number_at<uint64_t>(field, 0), field = field.subspan(8);
      }
      return;
    }
    check_zip(false, file_, "entry '", name, "' lacks its zip64 sizes");
  }

  const InputFile& file_;
  std::span<const std::byte> bytes_;
  std::size_t at_ = 0;
};

void check_stored(const InputFile& file, std::string_view name, const ZipEntry& entry) {
  const char* kind = entry.encrypted ? "encrypted" : entry.method != 0 ? "compressed" : nullptr;
  if (!kind) return;
  fail(Errc::unsupported, escaped(concat(file.path(), ": entry '", name, "' is ", kind,
                                         "; torch.save() stores its entries as they are")));
}

}  // namespace

ZipDirectory ZipDirectory::read(const InputFile& file) {
  const DirectoryPlace place = find_directory(file);
  const auto bytes = bytes_at(file, place.start, place.bytes);
  ZipDirectory directory;
  directory.start_ = place.start;
  EntryCursor cursor(file, bytes);
  uint64_t entries = 0;
  for (; !cursor.at_end(); ++entries) {
    auto [name, entry] = cursor.next();
    check_zip(directory.entries_.emplace(name, entry).second, file, "its zip directory lists '", name,
              "' twice");
  }
  check_zip(entries == place.entries, file, "its zip directory has ", entries, " entries where ",
            place.entries, " are announced");
  return directory;
}

const ZipEntry* ZipDirectory::find(std::string_view name) const {
  const auto found = entries_.find(name);
  return found == entries_.end() ? nullptr : &found->second;
}

uint64_t ZipDirectory::data(const InputFile& file, std::string_view name) const {
  const ZipEntry* entry = find(name);
  check_zip(entry != nullptr, file, "has no entry '", name, "'");
  check_stored(file, name, *entry);
  check_zip(entry->header <= start_ && start_ - entry->header >= local_bytes, file, "entry '", name,
            "' at byte ", entry->header, " lies outside the file");
  const auto header = bytes_at(file, entry->header, local_bytes);
  check_zip(number_at<uint32_t>(header, 0) == local_header, file, "entry '", name, "' has no header at byte ",
            entry->header);
  const uint64_t data =
      entry->header + local_bytes + number_at<uint16_t>(header, 26) + number_at<uint16_t>(header, 28);
  check_zip(data <= start_ && start_ - data >= entry->bytes, file, "entry '", name, "' of ", entry->bytes,
            " bytes lies outside the file");
  return data;
}

}  // namespace rz
