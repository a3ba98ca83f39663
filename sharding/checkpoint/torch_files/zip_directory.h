#pragma once
/// The directory of a zip file (PKWARE's APPNOTE.TXT, 4.3), with the zip64 extension. Only stored entries are
/// read, as torch.save() writes them.

#include <cstdint>
#include <map>
#include <string>
#include <string_view>

#include "sharding/io/file.h"

namespace rz {

struct ZipEntry {
  std::uint64_t header = 0;  ///< offset in the file of the local header
  std::uint64_t bytes = 0;
  std::uint16_t method = 0;  ///< of compression
  bool encrypted = false;
};

class ZipDirectory {
 public:
  /// Reads the central directory. Errc::io, "FILE: …", if it is damaged, larger than 64 MiB, or lists a name
  /// twice; Errc::unsupported for a file in several volumes.
  static ZipDirectory read(const InputFile&);

  const std::map<std::string, ZipEntry, std::less<>>& entries() const { return entries_; }
  const ZipEntry* find(std::string_view name) const;
  /// Offset in the file of an entry's first byte. Errc::io unless the entry lies before the directory;
  /// Errc::unsupported names an entry that is compressed or encrypted.
  std::uint64_t data(const InputFile&, std::string_view name) const;

 private:
  std::map<std::string, ZipEntry, std::less<>> entries_;
  std::uint64_t start_ = 0;  // of the directory
};

}  // namespace rz
