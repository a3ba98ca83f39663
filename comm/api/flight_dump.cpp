#include "comm/flight_dump.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "comm/api/pickle_writer.h"
#include "comm/collective.h"
#include "comm/core/error.h"
#include "comm/flight_entry.h"
#include "comm/os/flight_recorder.h"

namespace rz {

namespace flight {

namespace {

constexpr auto relaxed = std::memory_order_relaxed;

/// A recorded call, and whether it has ended.
struct Entry : CallEntry {
  enum State { scheduled, started, completed } state = scheduled;
};

/// A living communicator of the rank whose file is written.
struct Group {
  const Row* row;
  std::string name;  ///< that no other one of the rank has
  std::vector<int> members;
  std::vector<Entry> collectives, messages;
};

/// The calls of a channel, oldest first. Without the oldest of a full one, which may be overwritten now.
std::vector<Entry> entries_of(const Row& row, const Calls& calls) {
  std::vector<Entry> found;
  const std::uint32_t begun = calls.begun.load(std::memory_order_acquire), ended = calls.ended.load(relaxed);
  const auto kept = static_cast<std::uint32_t>(max_calls - 1);
  for (std::uint32_t n = begun > kept ? begun - kept : 0; n != begun; ++n) {
    const auto call = entry_of(calls.call[n % max_calls]);
    if (!call || call->number != n) continue;
    found.push_back({*call});
    if (row.in_streams) continue;
    found.back().state = static_cast<std::int32_t>(ended - n) > 0 ? Entry::completed : Entry::started;
  }
  return found;
}

std::string text_of(const char* chars, std::size_t size) { return {chars, ::strnlen(chars, size)}; }

std::vector<int> members_of(const Row& row) {
  std::vector<int> members(static_cast<std::size_t>(row.size));
  for (std::size_t r = 0; r < members.size(); ++r)
    members[r] = row.members > 0 ? row.member[r] : static_cast<int>(r);
  return members;
}

/// Numbers come from another process where the file does.
bool is_sound(const Row& row) {
  const int most = static_cast<int>(max_members);
  return row.used.load(std::memory_order_acquire) == 1 && row.rank >= 0 && row.rank < row.size &&
         row.size <= 1 << 20 && row.owner >= 0 && row.members >= 0 && row.members <= most &&
         (row.members == 0 || row.members == row.size);
}

/// The groups of a rank in the order in which they were made, the same on all ranks.
std::vector<Group> groups_of(const File& file, int owner) {
  std::vector<Group> groups;
  for (const Row& row : file.row)
    if (is_sound(row) && row.owner == owner)
      groups.push_back({&row, text_of(row.name, sizeof row.name), members_of(row),
                        entries_of(row, row.collective), entries_of(row, row.message)});
  std::ranges::sort(groups, {}, [](const Group& g) { return g.row->made; });
  std::map<std::pair<std::string, std::vector<int>>, int> seen;
  for (Group& g : groups)
    if (const int before = seen[{g.name, g.members}]++) g.name += concat(" #", before + 1);
  return groups;
}

struct Ordered {
  const Group* group;
  const Entry* entry;
  /// Torch's analyser compares the files of ranks from the latest first call of one on. So these begin where
  /// no communicator lacks calls.
  bool for_torch;
};

/// The calls of all groups in the order in which the rank made them.
std::vector<Ordered> in_order(const std::vector<Group>& groups) {
  std::uint32_t first = 0;
  for (const Group& g : groups)
    if (!g.collectives.empty() && g.collectives.front().number > 0)
      first = std::max(first, g.collectives.front().call.origin.order);
  std::vector<Ordered> all;
  for (const Group& g : groups)
    for (const Entry& e : g.collectives)
      all.push_back({&g, &e, e.call.origin.order >= first || e.state == Entry::started});
  std::ranges::stable_sort(all, {}, [](const Ordered& o) { return o.entry->call.origin.order; });
  return all;
}

/// The name that PyTorch's records of NCCL have.
std::string torch_name(const Group& g, const CollectiveCall& c) {
  switch (c.kind) {
    case Collective::all_gather:
      return "_all_gather_base";
    case Collective::reduce_scatter:
      return "_reduce_scatter_base";
    case Collective::all_to_all_v:
      return "all_to_all";
    case Collective::barrier:
      return "all_reduce_barrier";
    case Collective::send:
      return concat("send ", g.row->rank, "->", c.root);
    case Collective::recv:
      return concat("recv ", g.row->rank, "<-", c.root);
    default:
      return name(c.kind);
  }
}

const char* torch_name(DType t) {
  constexpr const char* names[] = {"Float", "Double", "Half", "BFloat16", "Float8_e4m3fn", "Float8_e5m2",
                                   "Char",  "Byte",   "Int",  "UInt32",   "Long",          "UInt64"};
  static_assert(std::size(names) == dtype_count);
  return names[static_cast<std::size_t>(t)];
}

/// Equal on all ranks where the calls match: a buffer that only the root has is that of the others, too.
std::pair<std::uint64_t, std::uint64_t> torch_sizes(const Group& g, const CollectiveCall& c) {
  const auto ranks = static_cast<std::uint64_t>(g.row->size);
  switch (c.kind) {
    case Collective::barrier:
    case Collective::all_to_all_v:
      return {1, 1};
    case Collective::broadcast:
      return {c.out.count, c.out.count};
    case Collective::reduce:
      return {c.in.count, c.in.count};
    case Collective::gather:
      return {c.in.count, c.in.count * ranks};
    case Collective::scatter:
      return {c.out.count * ranks, c.out.count};
    case Collective::send:
      return {c.in.count, c.in.count};
    case Collective::recv:
      return {c.out.count, c.out.count};
    default:
      return {c.in.count, c.out.count};
  }
}

class Dump {
 public:
  Dump(const File& file, int owner) : file_(file), owner_(owner), groups_(groups_of(file, owner)) {}

  std::string write(const std::string& reason) {
    out_.begin_dict();
    out_.text("version").text("2.10");
    write_groups();
    const std::vector<Ordered> all = in_order(groups_);
    for (const bool for_torch : {true, false}) {
      key(for_torch ? "entries" : "earlier").begin_list();
      for (const Ordered& o : all)
        if (o.for_torch == for_torch) write_entry(*o.group, *o.entry);
      out_.end_list();
    }
    out_.text("messages").begin_list();
    for (const Group& g : groups_)
      for (const Entry& e : g.messages) write_entry(g, e);
    out_.end_list();
    write_process(reason);
    out_.end_dict();
    return std::move(out_).finish();
  }

 private:
  PickleWriter& key(std::string_view name) { return out_.text(name); }
  void number(std::string_view name, std::uint64_t n) { key(name).integer(static_cast<std::int64_t>(n)); }

  void write_groups() {
    key("pg_config").begin_dict();
    for (const Group& g : groups_) {
      std::string ranks;
      for (const int r : g.members) ranks += concat(ranks.empty() ? "[" : ", ", r);
      key(g.name).begin_dict();
      key("name").text(g.name);
      key("desc").text(text_of(g.row->name, sizeof g.row->name));
      key("ranks").text(ranks + "]");
      out_.end_dict();
    }
    out_.end_dict();
    key("pg_status").begin_dict();
    for (const Group& g : groups_) {
      const auto last = [&](const char* what, std::uint32_t count) {
        key(what).integer(static_cast<std::int64_t>(count) - 1);
      };
      const std::uint32_t begun = g.row->collective.begun.load(relaxed);
      key(g.name).begin_dict();
      last("last_enqueued_collective", begun);
      last("last_started_collective", begun);
      last("last_completed_collective", g.row->collective.ended.load(relaxed));
      out_.end_dict();
    }
    out_.end_dict();
  }

  void write_entry(const Group& g, const Entry& e) {
    constexpr const char* states[] = {"scheduled", "started", "completed"};
    const CollectiveCall& c = e.call;
    const bool message = traits(c.kind).point_to_point;
    const auto [in, out] = torch_sizes(g, c);
    out_.begin_dict();
    number("record_id", c.origin.order);
    number("pg_id", static_cast<std::uint64_t>(&g - groups_.data()));
    key("process_group").begin_list().text(g.name).text(text_of(g.row->name, sizeof g.row->name)).end_list();
    number("collective_seq_id", message ? 0 : e.number);
    number("p2p_seq_id", message ? e.number : 0);
    number("op_id", e.number);
    key("profiling_name").text("nccl:" + torch_name(g, c));
    for (const char* time : {"time_created_ns", "timeout_ms"}) number(time, 0);
    for (const char* time : {"time_discovered_started_ns", "time_discovered_completed_ns"}) key(time).none();
    key("input_sizes").begin_list().begin_list().integer(static_cast<std::int64_t>(in)).end_list().end_list();
    key("output_sizes")
        .begin_list()
        .begin_list()
        .integer(static_cast<std::int64_t>(out))
        .end_list()
        .end_list();
    for (const char* types : {"input_dtypes", "output_dtypes"})
      key(types).begin_list().text(torch_name(c.dtype())).end_list();
    key("state").text(states[e.state]);
    key("retired").boolean(e.state == Entry::completed);
    key("is_p2p").boolean(message);
    write_frames(e.site);
    write_call(e);
    out_.end_dict();
  }

  void write_frames(std::size_t site) {
    key("frames").begin_list();
    if (site > 0 && site <= max_sites) {
      const Site& s = file_.site[site - 1];
      out_.begin_dict();
      key("name").text(text_of(s.function, sizeof s.function));
      key("filename").text(text_of(s.file, sizeof s.file));
      number("line", s.line.load(relaxed));
      out_.end_dict();
    }
    out_.end_list();
  }

  /// The call as messages of errors have it.
  void write_call(const Entry& e) {
    const CollectiveCall& c = e.call;
    key("ringzero").begin_dict();
    key("call").text(name(c.kind));
    key("op").text(traits(c.kind).reduces ? name(c.op) : "");
    key("dtype").text(name(c.dtype()));
    key("root").integer(traits(c.kind).rooted() || traits(c.kind).point_to_point ? c.root : -1);
    number("in_count", c.in.count);
    number("out_count", c.out.count);
    out_.end_dict();
  }

  void write_process(const std::string& reason) {
    char phase[max_phase + 1] = {};
    for (std::size_t i = 0; i < std::size(file_.phase); ++i) {
      const std::uint64_t word = file_.phase[i].load(relaxed);
      std::memcpy(phase + i * sizeof word, &word, sizeof word);
    }
    key("ringzero").begin_dict();
    number("rank", static_cast<std::uint64_t>(owner_));
    number("update", file_.update.load(relaxed));
    key("phase").text(text_of(phase, max_phase));
    key("reason").text(reason);
    number("time", static_cast<std::uint64_t>(std::time(nullptr)));
    out_.end_dict();
  }

  const File& file_;
  const int owner_;
  const std::vector<Group> groups_;
  PickleWriter out_;
};

/// Its temporary name has neither the prefix of the files nor a number at its end: torch's loader would read
/// it if a crash left one.
void replace_file(const std::string& path, const std::string& folder, const std::string& bytes) {
  static constinit std::atomic<unsigned> count{0};
  const std::string before = concat(folder, "/.flight.", ::getpid(), ".", count.fetch_add(1), ".part");
  {
    std::ofstream out(before, std::ios::binary | std::ios::trunc);
    out.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    out.close();
    if (out && std::rename(before.c_str(), path.c_str()) == 0) return;
  }
  const int reason = errno;
  std::remove(before.c_str());
  fail(Errc::io, path, ": cannot be written: ", std::strerror(reason));
}

void make_folder(const std::string& folder) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  require(!error || std::filesystem::is_directory(folder), Errc::io, folder,
          ": cannot be made: ", error.message());
}

}  // namespace

std::optional<CallEntry> entry_of(const Call& call) {
  const std::uint64_t what = call.what.load(relaxed);
  const auto kind = what >> 32 & 15, op = what >> 36 & 15, dtype = what >> 40 & 127;
  if (!(what >> 47 & 1) || kind >= collective_count || dtype >= dtype_count || op > ReduceOp::premul_sum)
    return {};
  CallEntry entry;
  CollectiveCall& c = entry.call;
  c.kind = static_cast<Collective>(kind);
  c.in.count = call.in_count.load(relaxed);
  c.out.count = call.out_count.load(relaxed);
  c.in.dtype = c.out.dtype = static_cast<DType>(dtype);
  c.op = ReduceOp(static_cast<ReduceOp::Kind>(op));
  c.root = call.root.load(relaxed);
  c.origin.order = call.order.load(relaxed);
  entry.number = static_cast<std::uint32_t>(what);
  entry.site = what >> 48;
  return entry;
}

void dump(const File& file, const std::string& folder, const std::string& reason) {
  make_folder(folder);
  std::set<int> owners;
  for (const Row& row : file.row)
    if (is_sound(row)) owners.insert(row.owner);
  for (const int owner : owners)
    replace_file(concat(folder, "/flight_rank_", owner), folder, Dump(file, owner).write(reason));
}

}  // namespace flight

void dump_flight(const std::string& folder, const std::string& reason) {
  const flight::File* const file = flight::file_of_process();
  require(file != nullptr, Errc::system, "there is no memory for the flight recorder");
  const flight::SteadyRows steady;
  flight::dump(*file, folder, reason);
}

}  // namespace rz
