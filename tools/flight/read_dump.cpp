#include "tools/flight/read_dump.h"

#include <algorithm>
#include <filesystem>
#include <optional>
#include <string_view>

#include "comm/core/error.h"
#include "comm/core/text.h"
#include "sharding/checkpoint/torch_files/pickle.h"
#include "sharding/io/file.h"
#include "sharding/io/text.h"

namespace rz::flight_tool {

namespace {

constexpr std::string_view prefix = "flight_rank_";
constexpr int max_ranks = 1 << 20;

/// Values of the pickle of one file. What is not as expected is Errc::io, which names file and key.
class Reader {
 public:
  explicit Reader(const std::string& path) : path_(path) {
    const InputFile file = InputFile::open(path);
    pickle_ = read_pickle(file, 0, file.size(), [](std::string_view) { return PickleUse::refused; });
    require(pickle_.end == file.size(), Errc::io, escaped(path), ": has bytes behind its pickle");
  }

  PickleId root() const { return pickle_.root; }
  PickleId at(PickleId dict, std::string_view key) const {
    const PickleId* const found = pickle_.find(dict, key);
    if (!found) fail_at(key, "is missing");
    return *found;
  }
  const std::string& text(PickleId dict, std::string_view key) const { return text_of(at(dict, key), key); }
  std::int64_t integer(PickleId dict, std::string_view key) const {
    const auto* const n = pickle_.get<std::int64_t>(at(dict, key));
    if (!n) fail_at(key, "is no integer");
    return *n;
  }
  const std::vector<PickleId>& list(PickleId id, std::string_view key) const {
    if (const auto* const l = pickle_.get<PickleList>(id)) return l->items;
    if (const auto* const t = pickle_.get<PickleTuple>(id)) return t->items;
    fail_at(key, "is no list");
  }
  std::vector<std::pair<PickleId, PickleId>> dict(PickleId id, std::string_view key) const {
    if (!pickle_.get<PickleDict>(id)) fail_at(key, "is no dict");
    return pickle_.items(id);
  }
  const std::string& text_of(PickleId id, std::string_view key) const {
    const auto* const t = pickle_.get<PickleText>(id);
    if (!t) fail_at(key, "is no text");
    return t->text;
  }
  [[noreturn]] void fail_at(std::string_view key, std::string_view what) const {
    fail(Errc::io, escaped(path_), ": ", key, " ", what, "; is it a file of a flight recorder?");
  }
  /// The product of the first shape of a list of shapes.
  std::int64_t elements(PickleId dict, std::string_view key) const {
    std::int64_t product = 1;
    const auto& shapes = list(at(dict, key), key);
    if (shapes.empty()) return 0;
    for (const PickleId extent : list(shapes[0], key)) {
      const auto* const n = pickle_.get<std::int64_t>(extent);
      if (!n || *n < 0 || __builtin_mul_overflow(product, *n, &product)) fail_at(key, "is no shape");
    }
    return product;
  }

 private:
  std::string path_;
  Pickle pickle_;
};

/// "[0, 1, 2]"
std::vector<int> ranks_in(const Reader& r, const std::string& text) {
  std::vector<int> ranks;
  if (text.size() < 3 || text.front() != '[' || text.back() != ']') r.fail_at("ranks", "is no list");
  for (const std::string& part : parts_of(std::string_view(text).substr(1, text.size() - 2), ',')) {
    const auto rank = parse_number<int>(std::string_view(part).substr(part.starts_with(' ')));
    if (!rank || *rank < 0 || *rank >= max_ranks) r.fail_at("ranks", "is no list of ranks");
    ranks.push_back(*rank);
  }
  return ranks;
}

/// "all_reduce #204 (1024 f32, sum)"; of two sizes "all_gather #204 (4 to 16 f32)".
std::string text_of(const Reader& r, PickleId entry, std::int64_t number) {
  const PickleId own = r.at(entry, "ringzero");
  const std::string& name = r.text(own, "call");
  if (name == "barrier") return concat(name, " #", number);
  const std::int64_t in = r.elements(entry, "input_sizes"), out = r.elements(entry, "output_sizes");
  const std::string sizes = name == "all_to_all_v" ? ""
                            : in == out            ? concat(in, " ")
                                                   : concat(in, " to ", out, " ");
  std::string text = concat(name, " #", number, " (", sizes, r.text(own, "dtype"));
  if (const std::string& op = r.text(own, "op"); !op.empty()) text += ", " + op;
  if (const std::int64_t root = r.integer(own, "root"); root >= 0) text += concat(", root ", root);
  return escaped(text + ")");
}

std::string line_of(const Reader& r, PickleId entry) {
  const auto& frames = r.list(r.at(entry, "frames"), "frames");
  if (frames.empty()) return {};
  const PickleId frame = frames[0];
  const std::string& file = r.text(frame, "filename");
  return escaped(concat(std::string_view(file).substr(file.rfind('/') + 1), ":", r.integer(frame, "line")));
}

void read_entries(const Reader& r, PickleId list, Dump& dump, const std::map<std::string, GroupId>& ids) {
  for (const PickleId entry : r.list(list, "entries")) {
    const auto& group = r.list(r.at(entry, "process_group"), "process_group");
    if (group.empty()) r.fail_at("process_group", "is empty");
    const auto id = ids.find(r.text_of(group[0], "process_group"));
    if (id == ids.end()) r.fail_at("process_group", "is not in pg_config");
    const std::int64_t number = r.integer(entry, "collective_seq_id");
    dump.groups[id->second][number] = {text_of(r, entry, number), line_of(r, entry),
                                       escaped(r.text(entry, "state")), r.integer(entry, "record_id")};
  }
}

Dump read_dump(const std::string& path, int rank) {
  const Reader r(path);
  Dump dump{.rank = rank};
  if (const std::string& version = r.text(r.root(), "version"); version != "2.10")
    r.fail_at("version", concat("is ", escaped(version), ", not 2.10"));
  std::map<std::string, GroupId> ids;
  for (const auto& [key, config] : r.dict(r.at(r.root(), "pg_config"), "pg_config")) {
    const std::string& name = r.text_of(key, "pg_config");
    const GroupId id{escaped(name), ranks_in(r, r.text(config, "ranks"))};
    ids.emplace(name, id);
    dump.groups[id];
  }
  for (const char* list : {"entries", "earlier"}) read_entries(r, r.at(r.root(), list), dump, ids);
  const PickleId own = r.at(r.root(), "ringzero");
  dump.reason = escaped(r.text(own, "reason"));
  dump.phase = escaped(r.text(own, "phase"));
  dump.update = r.integer(own, "update");
  return dump;
}

}  // namespace

std::map<int, Dump> read_dumps(const std::string& folder) {
  std::error_code error;
  std::map<int, Dump> dumps;
  for (auto at = std::filesystem::directory_iterator(folder, error);
       !error && at != std::filesystem::directory_iterator(); at.increment(error)) {
    const std::string name = at->path().filename().string();
    if (!name.starts_with(prefix)) continue;
    const auto rank = parse_number<int>(std::string_view(name).substr(prefix.size()));
    if (rank && *rank >= 0 && *rank < max_ranks) dumps.emplace(*rank, read_dump(at->path().string(), *rank));
  }
  require(!error, Errc::config, escaped(folder), ": cannot be read: ", error.message());
  require(!dumps.empty(), Errc::config, escaped(folder), ": has no files ", prefix,
          "0, 1, …; RZ_FLIGHT=FOLDER in the environment of a job writes them");
  return dumps;
}

}  // namespace rz::flight_tool
