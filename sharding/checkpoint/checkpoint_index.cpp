#include "sharding/checkpoint/checkpoint_index.h"

#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "comm/core/error.h"
#include "sharding/io/checksum.h"
#include "sharding/io/json.h"
#include "sharding/io/text.h"

namespace rz {
namespace {

using nlohmann::json;

constexpr const char* format_name = "ringzero-checkpoint";
constexpr std::int64_t format_version = 2;                 // 1 knows no boxes of another shape
constexpr std::int64_t max_count = std::int64_t{1} << 53;  // exact as a number of JSON

std::string list(const std::vector<std::uint64_t>& numbers) { return json(numbers).dump(); }

// ---- writing

bool has_own_shape(const StoredSlice& s, const StoredTensor& of) { return s.box && s.box->shape != of.shape; }

std::string to_json(const StoredSlice& s, const StoredTensor& of) {
  const std::string shape = has_own_shape(s, of) ? concat(R"("shape":)", list(s.box->shape), ",") : "";
  const std::string box = s.box ? concat(R"("box":{)", shape, R"("offset":)", list(s.box->offset),
                                         R"(,"extent":)", list(s.box->extent), "},")
                                : "";
  return concat(R"({"file":)", s.file, ",", box, R"("range":[)", s.begin, ",", s.end, R"(],"xxh3":")",
                checksum_text(s.checksum), R"("})");
}

/// `items` of one line each, by commas.
template <class Items, class F>
std::string lines(const Items& items, const F& text) {
  std::string all;
  for (const auto& item : items) all += concat(all.empty() ? "\n    " : ",\n    ", text(item));
  return all;
}

std::string to_json(const StoredTensor& t) {
  std::string slices;
  for (const StoredSlice& s : t.slices) slices += (slices.empty() ? "" : ",") + to_json(s, t);
  return concat(R"({"dtype":)", json(t.dtype).dump(), R"(,"shape":)", list(t.shape), R"(,"slices":[)", slices,
                "]}");
}

// ---- reading

const json& array_at(const JsonObject& o, std::string_view key) {
  if (!o.has(key) || !o.at(key).is_array()) o.fail_at(key, "missing, or no list");
  return o.at(key);
}

std::vector<std::uint64_t> numbers_at(const JsonObject& o, std::string_view key) {
  std::vector<std::uint64_t> numbers;
  for (const json& n : array_at(o, key)) {
    if (!n.is_number_unsigned() || n.get<std::uint64_t>() > static_cast<std::uint64_t>(max_count))
      o.fail_at(key, concat("expected whole numbers up to 2^53, found ", to_display(o.at(key))));
    numbers.push_back(n.get<std::uint64_t>());
  }
  return numbers;
}

/// Elements of a shape, unless they are more than any file holds.
std::uint64_t checked_count(const JsonObject& o, const std::vector<std::uint64_t>& shape) {
  std::uint64_t n = 1;
  for (const std::uint64_t e : shape)
    if (__builtin_mul_overflow(n, e, &n) || n > static_cast<std::uint64_t>(max_count))
      o.fail_at("shape", concat("a tensor of shape ", list(shape), " is larger than any memory"));
  return n;
}

Box read_box(const JsonObject& o, const std::vector<std::uint64_t>& of) {
  const std::vector<std::uint64_t> shape = o.has("shape") ? numbers_at(o, "shape") : of;
  if (checked_count(o, shape) != Box::whole(of).count())
    o.fail_at("shape", concat(list(shape), " has other elements than the tensor of shape ", list(of)));
  const Box box{shape, numbers_at(o, "offset"), numbers_at(o, "extent")};
  if (!box.is_valid())
    o.fail_at("extent", concat("the box ", list(box.offset), " + ", list(box.extent),
                               " is not within a tensor of shape ", list(shape)));
  return box;
}

StoredSlice read_slice(const JsonObject& o, const std::vector<std::uint64_t>& shape, std::size_t files) {
  StoredSlice s;
  s.file = static_cast<std::size_t>(o.required_integer("file", 0, static_cast<std::int64_t>(files) - 1));
  if (o.has("box")) s.box = read_box(o.object("box"), shape);
  const auto range = numbers_at(o, "range");
  const std::uint64_t count = s.box.value_or(Box::whole(shape)).count();
  if (range.size() != 2 || range[0] >= range[1] || range[1] > count)
    o.fail_at("range",
              concat("expected [begin, end) within ", count, " elements, found ", to_display(o.at("range"))));
  s.begin = range[0], s.end = range[1];
  const auto checksum = parse_checksum(o.text("xxh3", ""));
  if (!checksum) o.fail_at("xxh3", "missing, or not 16 hexadecimal digits");
  s.checksum = *checksum;
  return s;
}

/// The numbers of the slices that are ranges of one box.
struct SlicedBox {
  Box box;
  std::vector<std::size_t> slices;
};

/// The shape that all boxes of the tensor have.
std::vector<std::uint64_t> shape_of_boxes(const JsonObject& o, const StoredTensor& t) {
  const auto has_box = [](const StoredSlice& s) { return s.box.has_value(); };
  const auto first = std::ranges::find_if(t.slices, has_box);
  if (first == t.slices.end()) return t.shape;
  for (const StoredSlice& s : t.slices)
    if (s.box && s.box->shape != first->box->shape)
      o.fail_at("slices", concat("boxes have the shapes ", list(first->box->shape), " and ",
                                 list(s.box->shape), ", expected one"));
  return first->box->shape;
}

/// `whole`: of a slice without a box.
std::vector<SlicedBox> boxes_of(const StoredTensor& t, const Box& whole) {
  std::map<std::pair<std::vector<std::uint64_t>, std::vector<std::uint64_t>>, SlicedBox> all;
  for (std::size_t i = 0; i < t.slices.size(); ++i) {
    const Box& box = t.slices[i].box ? *t.slices[i].box : whole;
    SlicedBox& sliced = all[{box.offset, box.extent}];
    sliced.box = box;
    sliced.slices.push_back(i);
  }
  std::vector<SlicedBox> boxes;
  for (auto& [corners, sliced] : all) boxes.push_back(std::move(sliced));
  return boxes;
}

/// The dimension in which the boxes have the largest number of offsets: few of them share a part of it.
std::size_t separating_dimension(const std::vector<SlicedBox>& boxes) {
  std::size_t best = 0, max_offsets = 0;
  for (std::size_t d = 0; d < boxes[0].box.offset.size(); ++d) {
    std::set<std::uint64_t> offsets;
    for (const SlicedBox& b : boxes) offsets.insert(b.box.offset[d]);
    if (offsets.size() > max_offsets) max_offsets = offsets.size(), best = d;
  }
  return best;
}

using Overlap = std::optional<std::pair<std::size_t, std::size_t>>;

/// Two ranges of a box that share elements; of those in order of their begin, neighbours do if any do.
Overlap overlap_within(const StoredTensor& t, SlicedBox& b) {
  std::ranges::sort(b.slices, {}, [&](std::size_t i) { return t.slices[i].begin; });
  for (std::size_t k = 1; k < b.slices.size(); ++k)
    if (t.slices[b.slices[k]].begin < t.slices[b.slices[k - 1]].end)
      return std::minmax(b.slices[k - 1], b.slices[k]);
  return std::nullopt;
}

/// Two slices of different boxes that share elements. Compares boxes that share a part of one dimension.
Overlap overlap_between(std::vector<SlicedBox>& boxes) {
  if (boxes.size() < 2) return std::nullopt;
  const std::size_t d = separating_dimension(boxes);
  std::ranges::sort(boxes, {}, [&](const SlicedBox& b) { return b.box.offset[d]; });
  for (std::size_t i = 0; i < boxes.size(); ++i) {
    const Box& box = boxes[i].box;
    for (std::size_t j = i + 1; j < boxes.size() && boxes[j].box.offset[d] < box.offset[d] + box.extent[d];
         ++j)
      if (box.overlaps(boxes[j].box)) return std::minmax(boxes[i].slices[0], boxes[j].slices[0]);
  }
  return std::nullopt;
}

/// Every element is in one slice: the counts add up, and no two overlap.
void check_cover(const JsonObject& o, const StoredTensor& t) {
  std::uint64_t sum = 0;
  for (const StoredSlice& s : t.slices) sum += s.count();
  if (sum != t.count())
    o.fail_at("slices", concat("they have ", sum, " elements of the ", t.count(), " of the tensor"));
  std::vector<SlicedBox> boxes = boxes_of(t, Box::whole(shape_of_boxes(o, t)));
  Overlap found;
  for (SlicedBox& b : boxes)
    if (!found) found = overlap_within(t, b);
  if (!found) found = overlap_between(boxes);
  if (found)
    o.fail_at("slices", concat("numbers ", found->first, " and ", found->second, " have elements in common"));
}

StoredTensor read_tensor(const JsonObject& o, std::size_t files, IndexPart part) {
  StoredTensor t{.dtype = o.text("dtype", ""), .shape = numbers_at(o, "shape")};
  if (t.dtype.empty()) o.fail_at("dtype", "missing");
  checked_count(o, t.shape);
  const json& slices = array_at(o, "slices");
  for (std::size_t i = 0; i < slices.size(); ++i)
    t.slices.push_back(
        read_slice(JsonObject(slices[i], o.file(), concat(o.path("slices"), "[", i, "]")), t.shape, files));
  if (part == IndexPart::whole) check_cover(o, t);
  return t;
}

StoredFile read_file(const JsonObject& o) {
  const StoredFile file{o.text("name", ""),
                        static_cast<std::uint64_t>(o.required_integer("bytes", 0, max_count))};
  if (file.name.empty() || file.name.front() == '.' || file.name.find('/') != std::string::npos)
    o.fail_at("name",
              concat("expected the name of a file in the same folder, found ", json(file.name).dump()));
  return file;
}

void check_format(const json& document, const std::string& file) {
  const bool ours = document.is_object() && document.contains("format") && document["format"] == format_name;
  require(ours, Errc::config, file, ": is not an index of a checkpoint: it lacks \"format\": \"", format_name,
          "\"");
  const JsonObject o(document, file);
  const std::int64_t version = o.required_integer("version", 1, INT32_MAX);
  if (version > format_version)
    o.fail_at("version",
              concat("the checkpoint has version ", version, " of the format and this build reads ",
                     "versions up to ", format_version, "; use a newer build"));
}

}  // namespace

std::string rank_file(int rank, int ranks) {
  char name[64];
  std::snprintf(name, sizeof name, "rank_%05d_of_%05d.safetensors", rank, ranks);
  return name;
}

std::string slice_name(std::string_view tensor, const StoredSlice& s) {
  const std::string range = concat(tensor, "[", s.begin, ":", s.end, "]");
  return s.box ? concat(range, "@", list(s.box->offset), "+", list(s.box->extent)) : range;
}

std::string to_json(const CheckpointIndex& index) {
  const std::string files = lines(index.files, [](const StoredFile& f) {
    return concat(R"({"name":)", json(f.name).dump(), R"(,"bytes":)", f.bytes, "}");
  });
  const std::string tensors = lines(index.tensors, [](const auto& named) {
    return concat(json(named.first).dump(), ":", to_json(named.second));
  });
  const bool is_old = std::ranges::none_of(index.tensors, [](const auto& named) {  // builds before it read it
    return std::ranges::any_of(named.second.slices,
                               [&](const StoredSlice& s) { return has_own_shape(s, named.second); });
  });
  return concat("{\n  \"format\": \"", format_name, "\",\n  \"version\": ", is_old ? 1 : format_version,
                ",\n  \"state\": ", index.state, ",\n  \"files\": [", files, "],\n  \"tensors\": {", tensors,
                "}\n}\n");
}

CheckpointIndex parse_checkpoint_index(std::string_view text, const std::string& file, IndexPart part) {
  const json document = parse_json(text, file, JsonDialect::strict);
  check_format(document, file);
  const JsonObject o(document, file);
  CheckpointIndex index;
  o.object("state");
  index.state = o.at("state").dump();
  const json& files = array_at(o, "files");
  for (std::size_t i = 0; i < files.size(); ++i)
    index.files.push_back(read_file(JsonObject(files[i], file, concat("files[", i, "]"))));
  const JsonObject tensors = o.object("tensors");
  for (const std::string& name : tensors.keys())
    index.tensors[name] = read_tensor(tensors.object(name), index.files.size(), part);
  return index;
}

}  // namespace rz
