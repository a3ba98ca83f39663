#include "sharding/checkpoint/checkpoint_reader.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "comm/core/error.h"
#include "sharding/checkpoint/safetensors.h"
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

/// A slice in its file. Errc::io unless the file has it.
const TensorInfo& stored_slice(const TensorSource& file, std::string_view tensor, const StoredTensor& t,
                               const StoredSlice& s) {
  const std::string name = slice_name(tensor, s);
  const TensorInfo* found = file.find(name);
  require(found != nullptr, Errc::io,
          escaped(concat(file.path(), ": lacks ", name, ", which the index of the checkpoint has in it")));
  require(found->dtype == t.dtype && found->count == s.count(), Errc::io,
          escaped(concat(file.path(), ": tensor '", name, "': ", found->count, " elements of ", found->dtype,
                         " where the index of the checkpoint has ", s.count(), " of ", t.dtype)));
  return *found;
}

/// The name in a model of a tensor of a checkpoint; empty for one of the optimizer.
std::string_view name_in_model(std::string_view tensor) {
  for (const std::string_view category : {"model/", "buffer/"})
    if (tensor.starts_with(category)) return tensor.substr(category.size());
  return {};
}

}  // namespace

struct CheckpointReader::State {
  std::string folder;
  CheckpointIndex index;
  std::mutex mutex;
  std::map<std::size_t, TensorSource> open;  // guarded

  TensorSource file(std::size_t number);
  void read(const std::string& tensor, const StoredTensor&, std::uint64_t begin, std::span<std::byte> out);
};

TensorSource CheckpointReader::State::file(std::size_t number) {
  const std::lock_guard lock(mutex);
  if (const auto found = open.find(number); found != open.end()) return found->second;
  if (open.size() >= max_open_files) open.clear();
  return open.emplace(number, open_safetensors(in_folder(folder, index.files[number].name))).first->second;
}

/// The bytes of elements from one that begins at byte `begin` on.
void CheckpointReader::State::read(const std::string& name, const StoredTensor& t, std::uint64_t begin,
                                   std::span<std::byte> out) {
  if (out.empty()) return;
  const unsigned bits = safetensors_bits(t.dtype);
  require(bits > 0 && bits % 8 == 0, Errc::unsupported,
          escaped(concat(folder, ": ", name, ": the dtype ", t.dtype, " cannot be read")));
  const std::uint64_t size = bits / 8, first = begin / size, last = (begin + out.size()) / size;
  for (const StoredSlice& s : t.slices) {
    if (!s.box && (s.end <= first || s.begin >= last)) continue;
    const TensorSource from = file(s.file);
    const TensorInfo& stored = stored_slice(from, name, t, s);
    for_each_common_run(
        t, s, first, last, [&](std::uint64_t element, std::uint64_t index, std::uint64_t count) {
          from.read_bytes(stored, element * size, out.subspan((index - first) * size, count * size));
        });
  }
}

CheckpointReader CheckpointReader::open(const std::string& folder) {
  const std::string path = in_folder(folder, checkpoint_index_file);
  CheckpointReader reader;
  reader.state_ = std::make_shared<State>();
  reader.state_->folder = folder;
  reader.state_->index = parse_checkpoint_index(read_text_file(path, max_index_bytes), path);
  check_files(folder, reader.index());
  return reader;
}

const std::string& CheckpointReader::folder() const { return state_->folder; }
const CheckpointIndex& CheckpointReader::index() const { return state_->index; }

TensorSource CheckpointReader::tensors(TensorPart part) const {
  std::map<std::string, const std::pair<const std::string, StoredTensor>*> by_name;
  for (const auto& stored : index().tensors) {
    const std::string name(part == TensorPart::all ? std::string_view(stored.first)
                                                   : name_in_model(stored.first));
    if (name.empty()) continue;
    require(by_name.emplace(name, &stored).second, Errc::config,
            escaped(concat(folder(), ": has a parameter and a buffer of the name '", name, "'")));
  }
  TensorSource source(folder());
  source.set_state(index().state);
  for (const auto& [name, stored] : by_name) {
    const StoredTensor& t = stored->second;
    source.add({name, t.dtype, t.shape, t.count(), t.count() * safetensors_bits(t.dtype) / 8},
               [state = state_, stored = stored](std::uint64_t begin, std::span<std::byte> out) {
                 state->read(stored->first, stored->second, begin, out);
               });
  }
  return source;
}

void CheckpointReader::for_each_damage(std::size_t number,
                                       const std::function<void(const Error&)>& report) const {
  const TensorSource from = state_->file(number);
  std::vector<std::byte> block(std::size_t{1} << 22);
  for (const auto& [name, tensor] : index().tensors)
    for (const StoredSlice& s : tensor.slices) {
      if (s.file != number) continue;
      const TensorInfo& stored = stored_slice(from, name, tensor, s);
      Checksum checksum;
      for (std::uint64_t at = 0; at < stored.bytes; at += block.size()) {
        const auto part = std::span(block).first(std::min<std::uint64_t>(block.size(), stored.bytes - at));
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

void CheckpointReader::verify(std::size_t number) const {
  for_each_damage(number, [](const Error& e) { throw Error(e); });
}

std::vector<Error> CheckpointReader::find_damage(std::size_t number) const {
  std::vector<Error> all;
  try {
    for_each_damage(number, [&](const Error& e) { all.push_back(e); });
  } catch (const Error& e) {
    all.push_back(e);
  }
  return all;
}

}  // namespace rz
