#include "sharding/checkpoint/safetensors.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <nlohmann/json.hpp>
#include <set>

#include "comm/core/error.h"
#include "comm/core/integer_math.h"
#include "sharding/io/file.h"
#include "sharding/io/json.h"
#include "sharding/io/text.h"

namespace rz {

static_assert(std::endian::native == std::endian::little, "safetensors are little-endian");

namespace {

using nlohmann::json;
using std::uint64_t;

constexpr uint64_t max_header_bytes = 100'000'000;

/// A tensor, and the bytes [begin, end) of it in the data section.
struct Entry {
  TensorInfo tensor;
  uint64_t begin = 0, end = 0;
};

/// Parses the header entry of one tensor.
class EntryReader {
 public:
  EntryReader(const std::string& path, const std::string& name, const json& node) : path_(path), node_(node) {
    entry_.tensor.name = name;
  }

  Entry read() {
    check(node_.is_object(), "expected an object, found ", to_display(node_));
    for (const auto& [key, value] : node_.items())
      check(key == "dtype" || key == "shape" || key == "data_offsets", "unknown key '", key, "'");
    read_dtype();
    read_shape();
    read_offsets();
    check_size();
    return std::move(entry_);
  }

 private:
  template <class... T>
  void check(bool ok, const T&... parts) const {
    if (!ok) fail(Errc::io, escaped(concat(path_, ": tensor '", entry_.tensor.name, "': ", parts...)));
  }

  const json& field(const char* key) const {
    check(node_.contains(key), key, " is missing");
    return node_[key];
  }

  void read_dtype() {
    const json& dtype = field("dtype");
    check(dtype.is_string(), "dtype: expected a text, found ", to_display(dtype));
    entry_.tensor.dtype = dtype.get<std::string>();
  }

  /// Checks that the byte range matches shape × dtype; elements of an unknown dtype need at least one bit
  /// each.
  void check_size() const {
    const uint64_t held = entry_.end - entry_.begin;
    const unsigned element_bits = safetensors_bits(entry_.tensor.dtype);
    if (element_bits == 0) {
      check(entry_.tensor.count / 8 + (entry_.tensor.count % 8 != 0) <= held, "shape ",
            rz::name(entry_.tensor.shape), " of the unknown dtype ", entry_.tensor.dtype, " cannot lie in ",
            held, " bytes");
      return;
    }
    uint64_t bits = 0;
    check(!__builtin_mul_overflow(entry_.tensor.count, element_bits, &bits), "shape ",
          rz::name(entry_.tensor.shape), " is larger than any memory");
    check(bits % 8 == 0, "shape ", rz::name(entry_.tensor.shape), " of ", entry_.tensor.dtype, " is ", bits,
          " bits, which are no whole bytes");
    check(bits / 8 == held, "shape ", rz::name(entry_.tensor.shape), " of ", entry_.tensor.dtype, " needs ",
          bits / 8, " bytes, data_offsets hold ", held);
  }

  void read_shape() {
    const json& shape = field("shape");
    check(shape.is_array() && shape.size() <= 64, "shape: expected a list of extents, found ",
          to_display(shape));
    for (const auto& extent : shape) {
      check(extent.is_number_unsigned(), "shape: ", to_display(shape), " holds what is not a count");
      entry_.tensor.shape.push_back(extent.get<uint64_t>());
      check(!__builtin_mul_overflow(entry_.tensor.count, entry_.tensor.shape.back(), &entry_.tensor.count),
            "shape ", to_display(shape), " is larger than any memory");
    }
  }

  void read_offsets() {
    const json& offsets = field("data_offsets");
    check(offsets.is_array() && offsets.size() == 2 && offsets[0].is_number_unsigned() &&
              offsets[1].is_number_unsigned() && offsets[0].get<uint64_t>() <= offsets[1].get<uint64_t>(),
          "data_offsets: expected [begin, end], found ", to_display(offsets));
    entry_.begin = offsets[0].get<uint64_t>();
    entry_.end = offsets[1].get<uint64_t>();
    entry_.tensor.bytes = entry_.end - entry_.begin;
  }

  const std::string& path_;
  const json& node_;
  Entry entry_;
};

/// Checks that the byte ranges cover the data exactly once.
void check_cover(const std::string& path, const std::vector<Entry>& sorted, uint64_t data_bytes) {
  uint64_t at = 0;
  for (const auto& e : sorted) {
    require(e.end <= data_bytes, Errc::io, escaped(path), ": tensor '", escaped(e.tensor.name),
            "': its bytes ", e.begin, " to ", e.end, " lie beyond the file's ", data_bytes,
            " bytes of data; the file is cut off or damaged");
    require(e.begin == at, Errc::io, escaped(path), ": tensor '", escaped(e.tensor.name),
            "': starts at byte ", e.begin, " where ", at, " was expected (tensors ",
            e.begin < at ? "overlap" : "leave a hole", ")");
    at = e.end;
  }
  require(at == data_bytes, Errc::io, path, ": ", data_bytes - at,
          " bytes after the last tensor belong to none");
}

void check_metadata(const std::string& path, const json& node) {
  if (node.is_null()) return;  // as in the library of the format
  require(node.is_object(), Errc::io, path, ": __metadata__: expected an object, found ", to_display(node));
  for (const auto& [key, value] : node.items())
    require(value.is_string(), Errc::io, escaped(path), ": __metadata__: '", escaped(key), "' is not a text");
}

/// Returns the text of the header, or throws if the file is too short or the length is out of range.
std::string read_header(const InputFile& file) {
  const std::string& path = file.path();
  const uint64_t file_bytes = file.size();
  uint64_t length = 0;
  require(file_bytes >= 8, Errc::io, path, ": ", file_bytes, " bytes are too few for a safetensors file");
  file.read(0, std::as_writable_bytes(std::span(&length, 1)));
  require(length <= max_header_bytes, Errc::io, path, ": a header of ", length,
          " bytes is above the format's limit of ", max_header_bytes, "; not a safetensors file, or damaged");
  require(length <= file_bytes - 8, Errc::io, path, ": a header of ", length,
          " bytes does not fit into the file's ", file_bytes, "; the file is cut off or damaged");
  std::string text(length, '\0');
  file.read(8, std::as_writable_bytes(std::span(text)));
  require(!text.empty() && text[0] == '{', Errc::io, path, ": the header does not start with '{'");
  return text;
}

}  // namespace

TensorSource open_safetensors(const std::string& path) {
  const InputFile file = InputFile::open(path);
  const std::string text = read_header(file);
  const uint64_t data_start = 8 + text.size();
  const json header = parse_json(text, path, JsonDialect::strict);
  require(text[text.find_last_not_of(' ')] == '}', Errc::io, path,
          ": the header ends with more than '}' and spaces");
  std::vector<Entry> entries;
  for (const auto& [key, node] : header.items()) {
    if (key == "__metadata__") {
      check_metadata(path, node);
    } else {
      entries.push_back(EntryReader(path, key, node).read());
    }
  }
  std::ranges::sort(entries, {}, [](const Entry& e) { return std::pair(e.begin, e.end); });
  check_cover(path, entries, file.size() - data_start);
  TensorSource source(path);
  for (Entry& e : entries)
    source.add(std::move(e.tensor),
               [file, from = data_start + e.begin](uint64_t begin, std::span<std::byte> out) {
                 file.read(from + begin, out);
               });
  return source;
}

// ---- writing

namespace {

void require_fits(const std::string& path, uint64_t header_bytes) {
  require(header_bytes <= max_header_bytes, Errc::invalid_argument, path, ": a header of ", header_bytes,
          " bytes is above the format's limit of ", max_header_bytes,
          "; write fewer tensors, or shorter names");
}

/// Rejects names that open() would reject.
void check_names(const std::string& path, std::span<const SafetensorsSpec> tensors) {
  uint64_t bytes = 0;
  for (const auto& t : tensors) bytes += t.name.size();
  require_fits(path, bytes);
  std::set<std::string_view> seen;
  for (const auto& t : tensors) {
    const auto check = [&](bool ok, const char* what) {
      if (!ok) fail(Errc::invalid_argument, escaped(concat(path, ": tensor '", t.name, "': ", what)));
    };
    check(t.name != "__metadata__", "the format keeps this name for metadata; rename the parameter");
    check(is_utf8(t.name), "the name is not UTF-8; rename the parameter");
    check(seen.insert(t.name).second, "there are two of this name; rename one");
  }
}

uint64_t tensor_bytes(const std::string& path, const SafetensorsSpec& t) {
  uint64_t count = 1, bytes = 0;
  bool fits = true;
  for (const auto extent : t.shape) fits = fits && !__builtin_mul_overflow(count, extent, &count);
  require(fits && !__builtin_mul_overflow(count, uint64_t{size_of(t.dtype)}, &bytes), Errc::invalid_argument,
          path, ": tensor '", escaped(t.name), "': shape ", rz::name(t.shape), " is larger than any memory");
  return bytes;
}

/// Built by hand, since dump() would sort the keys: readers list tensors in the order of the header.
std::string header_text(const std::string& path, std::span<const SafetensorsSpec> tensors) {
  check_names(path, tensors);
  std::string text = R"({"__metadata__":{"format":"pt"})";
  uint64_t at = 0;
  for (const auto& t : tensors) {
    const uint64_t end = at + tensor_bytes(path, t);
    text += concat(",", json(t.name).dump(), R"(:{"dtype":)",
                   json(t.stored_as.empty() ? safetensors_name(t.dtype) : t.stored_as).dump(), R"(,"shape":)",
                   json(t.shape).dump(), R"(,"data_offsets":[)", at, ",", end, "]}");
    at = end;
  }
  text += "}";
  // Large data begin where direct writes can.
  const std::size_t alignment = at < DurableFile::min_direct ? 8 : DurableFile::direct_alignment;
  text.resize(round_up(sizeof(uint64_t) + text.size(), alignment) - sizeof(uint64_t), ' ');
  require_fits(path, text.size());
  return text;
}

}  // namespace

struct SafetensorsWriter::State {
  State(const std::string& path, std::span<const SafetensorsSpec> tensors)
      : State(path, header_text(path, tensors)) {
    for (const auto& t : tensors) remaining += tensor_bytes(path, t);
  }
  State(const std::string& path, const std::string& header) : path(path), file(path) {
    const uint64_t length = header.size();
    file.write(&length, 8);
    file.write(header.data(), header.size());
  }

  const std::string path;
  DurableFile file;
  uint64_t remaining = 0;  // bytes not yet written
};

SafetensorsWriter::SafetensorsWriter(const std::string& path, std::span<const SafetensorsSpec> tensors)
    : state_(std::make_unique<State>(path, tensors)) {}

SafetensorsWriter::~SafetensorsWriter() = default;

void SafetensorsWriter::write(std::span<const std::byte> elements) {
  require(elements.size() <= state_->remaining, Errc::invalid_argument, state_->path, ": ", elements.size(),
          " bytes written where ", state_->remaining, " were left");
  state_->file.write(elements.data(), elements.size());
  state_->remaining -= elements.size();
}

void SafetensorsWriter::finish() {
  require(state_->remaining == 0, Errc::invalid_argument, state_->path, ": ", state_->remaining,
          " bytes were not written");
  state_->file.commit();
}

}  // namespace rz
