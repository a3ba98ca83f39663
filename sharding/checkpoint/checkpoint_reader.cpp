#include "sharding/checkpoint/checkpoint_reader.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <utility>
#include <vector>

#include "comm/core/error.h"
#include "sharding/io/checksum.h"
#include "sharding/io/json.h"
#include "sharding/io/text.h"

namespace rz {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t max_open_files = 64;
constexpr std::size_t max_index_bytes = std::size_t{4} << 30;

std::string in_folder(const std::string& folder, const std::string& name) {
  return (fs::path(folder) / name).string();
}

void check_files(const std::string& folder, const CheckpointIndex& index) {
  for (const StoredFile& f : index.files) {
    const std::string path = in_folder(folder, f.name);
    std::error_code problem;
    const std::uint64_t bytes = fs::file_size(path, problem);
    require(!problem, Errc::io, escaped(path), ": ", problem.message(),
            "; the index of the checkpoint lists it");
    require(bytes == f.bytes, Errc::io, escaped(path), ": has ", bytes,
            " bytes where the index of the checkpoint has ", f.bytes,
            "; the file is damaged or was replaced");
  }
}

/// Calls f(element of the slice's file, index in the tensor, count) for the runs of a slice within elements
/// [begin, end) of the tensor.
template <class F>
void for_each_common_run(const StoredTensor& t, const StoredSlice& s, std::uint64_t begin, std::uint64_t end,
                         const F& f) {
  const Box box = s.box.value_or(Box::whole(t.shape));
  const std::uint64_t row = s.box ? box.run_count() : s.end;
  // Rows lie in the order of the tensor: leave out those that end before the range.
  std::uint64_t first = s.begin / row, last = (s.end - 1) / row;
  const auto row_end = [&](std::uint64_t r) { return s.box ? box.index(r * row) + row : s.end; };
  for (std::uint64_t n = last - first; n > 0;) {
    const std::uint64_t half = n / 2, middle = first + half;
    if (row_end(middle) <= begin) {
      first = middle + 1, n -= half + 1;
    } else {
      n = half;
    }
  }
  for (std::uint64_t r = first; r <= last; ++r) {
    const std::uint64_t from = std::max(s.begin, r * row), to = std::min(s.end, (r + 1) * row);
    const std::uint64_t index = s.box ? box.index(from) : from;
    if (index >= end) break;
    const std::uint64_t low = std::max(index, begin), high = std::min(index + (to - from), end);
    if (low < high) f(from - s.begin + (low - index), low, high - low);
  }
}

}  // namespace

CheckpointReader::CheckpointReader(std::string folder, CheckpointIndex index)
    : folder_(std::move(folder)), index_(std::move(index)) {}

CheckpointReader CheckpointReader::open(const std::string& folder) {
  const std::string path = in_folder(folder, checkpoint_index_file);
  CheckpointIndex index = parse_checkpoint_index(read_text_file(path, max_index_bytes), path);
  check_files(folder, index);
  return CheckpointReader(folder, std::move(index));
}

const StoredTensor* CheckpointReader::find(std::string_view tensor) const {
  const auto found = index_.tensors.find(tensor);
  return found == index_.tensors.end() ? nullptr : &found->second;
}

const StoredTensor& CheckpointReader::at(std::string_view tensor) const {
  const StoredTensor* found = find(tensor);
  require(found != nullptr, Errc::invalid_argument, folder_, ": has no tensor ", tensor);
  return *found;
}

std::uint64_t CheckpointReader::bytes_of_element(std::string_view tensor, const StoredTensor& t) const {
  const unsigned bits = safetensors_bits(t.dtype);
  require(bits > 0 && bits % 8 == 0, Errc::unsupported,
          escaped(concat(folder_, ": ", tensor, ": the dtype ", t.dtype, " cannot be read")));
  return bits / 8;
}

const SafetensorsFile& CheckpointReader::file(std::size_t number) {
  if (const auto found = open_.find(number); found != open_.end()) return found->second;
  if (open_.size() >= max_open_files) open_.clear();
  const std::string path = in_folder(folder_, index_.files[number].name);
  return open_.emplace(number, SafetensorsFile::open(path)).first->second;
}

const SafetensorsEntry& CheckpointReader::entry(const SafetensorsFile& file, std::string_view tensor,
                                                const StoredTensor& t, const StoredSlice& s) const {
  const std::string name = slice_name(tensor, s);
  const SafetensorsEntry* found = file.find(name);
  require(
      found != nullptr, Errc::io,
      escaped(concat(file.path(), ": lacks ", name, ", which the index of ", "the checkpoint has in it")));
  require(found->dtype == t.dtype && found->count == s.count(), Errc::io,
          escaped(concat(file.path(), ": tensor '", name, "': ", found->count, " elements of ", found->dtype,
                         " where the index of the checkpoint has ", s.count(), " of ", t.dtype)));
  return *found;
}

template <class F>
void CheckpointReader::for_each_stored_run(std::string_view tensor, std::uint64_t begin, std::uint64_t end,
                                           const F& read) {
  const StoredTensor& t = at(tensor);
  require(begin <= end && end <= t.count(), Errc::invalid_argument, folder_, ": ", tensor, ": elements ",
          begin, " to ", end, " requested of ", t.count());
  for (const StoredSlice& s : t.slices) {
    if (!s.box && (s.end <= begin || s.begin >= end)) continue;
    const SafetensorsFile& from = file(s.file);
    const SafetensorsEntry& stored = entry(from, tensor, t, s);
    for_each_common_run(t, s, begin, end,
                        [&](std::uint64_t element, std::uint64_t index, std::uint64_t count) {
                          read(from, stored, element, index, count);
                        });
  }
}

void CheckpointReader::read_f32(std::string_view tensor, std::uint64_t begin, std::span<float> out) {
  for_each_stored_run(tensor, begin, begin + out.size(),
                      [&](const SafetensorsFile& from, const SafetensorsEntry& stored, std::uint64_t element,
                          std::uint64_t index, std::uint64_t count) {
                        from.read_f32(stored, element, out.subspan(index - begin, count));
                      });
}

void CheckpointReader::read_bytes(std::string_view tensor, std::span<std::byte> out) {
  const StoredTensor& t = at(tensor);
  const std::uint64_t bytes = t.count() * bytes_of_element(tensor, t);
  require(out.size() == bytes, Errc::invalid_argument, folder_, ": ", tensor, ": ", out.size(),
          " bytes requested of ", bytes);
  read_bytes(tensor, 0, out);
}

void CheckpointReader::read_bytes(std::string_view tensor, std::uint64_t begin, std::span<std::byte> out) {
  const std::uint64_t size = bytes_of_element(tensor, at(tensor));
  require(out.size() % size == 0, Errc::invalid_argument, folder_, ": ", tensor, ": ", out.size(),
          " bytes are no whole elements of ", size, " bytes");
  for_each_stored_run(tensor, begin, begin + out.size() / size,
                      [&](const SafetensorsFile& from, const SafetensorsEntry& stored, std::uint64_t element,
                          std::uint64_t index, std::uint64_t count) {
                        from.read_bytes(stored, element * size,
                                        out.subspan((index - begin) * size, count * size));
                      });
}

void CheckpointReader::for_each_damage(std::size_t number, const std::function<void(const Error&)>& report) {
  const SafetensorsFile& from = file(number);
  std::vector<std::byte> block(std::size_t{1} << 22);
  for (const auto& [name, tensor] : index_.tensors)
    for (const StoredSlice& s : tensor.slices) {
      if (s.file != number) continue;
      const SafetensorsEntry& stored = entry(from, name, tensor, s);
      Checksum checksum;
      for (std::uint64_t at = 0, bytes = stored.end - stored.begin; at < bytes; at += block.size()) {
        const auto part = std::span(block).first(std::min<std::uint64_t>(block.size(), bytes - at));
        from.read_bytes(stored, at, part);
        checksum.add(part);
      }
      if (checksum.value() != s.checksum)
        report(Error(Errc::io, escaped(concat(from.path(), ": tensor '", stored.name, "': the checksum is ",
                                              checksum_text(checksum.value()),
                                              " where the index of the checkpoint has ",
                                              checksum_text(s.checksum), "; the file is damaged"))));
    }
}

void CheckpointReader::verify(std::size_t number) {
  for_each_damage(number, [](const Error& e) { throw Error(e); });
}

std::vector<Error> CheckpointReader::find_damage(std::size_t number) {
  std::vector<Error> all;
  try {
    for_each_damage(number, [&](const Error& e) { all.push_back(e); });
  } catch (const Error& e) {
    all.push_back(e);
  }
  return all;
}

}  // namespace rz
