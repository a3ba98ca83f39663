#include "sharding/engine/reports/update_trace.h"

#include <algorithm>
#include <array>
#include <condition_variable>
#include <filesystem>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "comm/core/text.h"
#include "comm/os/helper_thread.h"
#include "sharding/io/file.h"
#include "sharding/parallel/rank_agreement.h"

namespace rz {
namespace {

/// A collective with the time of its end.
struct EndedCollective {
  Collective kind;
  std::size_t bytes;
  UpdateTrace::Clock::time_point start, end;
};

/// A thread that awaits the ends of collectives.
class EndTimes {
 public:
  EndTimes() : thread_(helper_thread([this] { run(); })) {}
  ~EndTimes() {
    {
      const std::lock_guard lock(mutex_);
      stops_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }
  EndTimes(const EndTimes&) = delete;

  void add(const StartedCollective& c) {
    {
      const std::lock_guard lock(mutex_);
      open_.push_back({c.work, {c.kind, c.bytes, c.start, {}}});
    }
    changed_.notify_all();
  }
  /// All that were added, which have ended, or end soon.
  std::vector<EndedCollective> all() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return open_.empty(); });
    return std::exchange(ended_, {});
  }

 private:
  struct Open {
    Work work;
    EndedCollective times;
  };

  void run() {
    name_this_thread("rz-trace");
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [&] { return stops_ || !open_.empty(); });
      if (stops_) return;
      collect();
      if (open_.empty()) {
        changed_.notify_all();
        continue;
      }
      lock.unlock();
      std::this_thread::sleep_for(std::chrono::microseconds(20));
      lock.lock();
    }
  }

  void collect() {
    std::erase_if(open_, [&](Open& o) {
      if (!o.work.done()) return false;
      o.times.end = UpdateTrace::Clock::now();
      ended_.push_back(o.times);
      return true;
    });
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Open> open_;
  std::vector<EndedCollective> ended_;
  bool stops_ = false;
  std::thread thread_;
};

/// Tracks of a rank: computation, then those of communication, whose collectives do not overlap.
constexpr int computation_track = 0;

constexpr std::array<const char*, 4> phase_names = {"forward", "backward", "reduction", "step"};

}  // namespace

struct UpdateTrace::State {
  State(const TraceConfig& c, World& w) : config(c), world(w) {}

  std::int64_t last() const { return config.first_step + config.steps - 1; }
  /// Microseconds since the beginning of the trace on the rank that began first.
  std::string time(Clock::time_point at) const {
    return fixed(std::chrono::duration<double, std::micro>(at - origin).count(), 3);
  }
  void add(const std::string& event) { events += concat(events.empty() ? "" : ",\n", event); }
  void add_span(const std::string& name, const char* category, int track, Clock::time_point start,
                Clock::time_point end, const std::string& args) {
    add(concat(R"({"name":")", name, R"(","cat":")", category, R"(","ph":"X","pid":)", world.rank(),
               R"(,"tid":)", track, R"(,"ts":)", time(start), R"(,"dur":)",
               fixed(std::chrono::duration<double, std::micro>(end - start).count(), 3), R"(,"args":{)", args,
               "}}"));
  }
  void add_name(const char* kind, int track, const std::string& name) {
    add(concat(R"({"name":")", kind, R"(","ph":"M","pid":)", world.rank(), R"(,"tid":)", track,
               R"(,"args":{"name":")", name, R"("}})"));
  }
  /// The earliest beginning of all ranks, by the system's clocks: no event is before it. Collective.
  void agree_on_origin();
  /// The update in progress is the first that is recorded. Collective.
  void start_recording();
  void add_collectives();
  void write();

  TraceConfig config;
  World& world;
  std::int64_t update = 1;  // in progress
  Clock::time_point origin{}, start{};
  std::string events;
  std::optional<EndTimes> ends;
};

void UpdateTrace::State::agree_on_origin() {
  // One instant on both clocks: the closest of a few readings, since a thread may be suspended between two.
  Clock::time_point here{};
  std::int64_t own = 0;
  auto closest = Clock::duration::max();
  for (int i = 0; i < 10; ++i) {
    const Clock::time_point before = Clock::now();
    const auto system = std::chrono::system_clock::now().time_since_epoch();
    const Clock::time_point after = Clock::now();
    if (after - before >= closest) continue;
    closest = after - before, here = before;
    own = std::chrono::duration_cast<std::chrono::nanoseconds>(system).count();
  }
  std::int64_t first = own;
  world.communicator().all_reduce(Buffer(&first, 1), ReduceOp::min).wait();
  origin = here - std::chrono::nanoseconds(own - first);
}

void UpdateTrace::State::start_recording() {
  agree_on_origin();
  add_name("process_name", computation_track, concat("rank ", world.rank()));
  add_name("thread_name", computation_track, "computation");
  ends.emplace();
}

void UpdateTrace::State::add_collectives() {
  std::vector<EndedCollective> all = ends->all();
  std::ranges::sort(all, {}, &EndedCollective::start);
  std::vector<Clock::time_point> tracks;  // where the last collective of each ends
  for (const EndedCollective& c : all) {
    const auto free = std::ranges::find_if(tracks, [&](Clock::time_point end) { return end <= c.start; });
    const auto track = static_cast<int>(free - tracks.begin()) + 1;
    if (free == tracks.end()) {
      tracks.push_back(c.end);
      add_name("thread_name", track, track == 1 ? "communication" : concat("communication ", track));
    } else {
      *free = c.end;
    }
    add_span(name(c.kind), "communication", track, c.start, c.end,
             concat(R"("bytes":)", c.bytes, R"(,"size":")", human_bytes(c.bytes), '"'));
  }
}

void UpdateTrace::State::write() {
  const std::vector<std::string> texts = gather_text(world.communicator(), events, 0);
  check_on_all_ranks(world.communicator(), [&] {
    if (!world.is_main()) return;
    std::string file = "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n";
    for (std::size_t r = 0; r < texts.size(); ++r) file += concat(r == 0 ? "" : ",\n", texts[r]);
    write_durably(config.path, file + "\n]}\n");
  });
  events.clear();
}

UpdateTrace::UpdateTrace(const TraceConfig& config, World& world)
    : state_(std::make_unique<State>(config, world)) {
  const std::filesystem::path folder = std::filesystem::path(config.path).parent_path();
  check_on_all_ranks(world.communicator(), [&] {
    if (!world.is_main()) return;
    if (!folder.empty()) make_folders(folder.string());
    write_durably(config.path, "");  // an earlier trace is not taken for one of this run
  });
  if (recording()) state_->start_recording();
  state_->start = Clock::now();
}

UpdateTrace::~UpdateTrace() = default;

bool UpdateTrace::recording() const {
  const State& s = *state_;
  return s.update >= s.config.first_step && s.update <= s.last();
}

void UpdateTrace::begin(Clock::time_point start) { state_->start = start; }

void UpdateTrace::add_phase(Phase phase, Clock::time_point start, Clock::time_point end) {
  state_->add_span(phase_names[static_cast<std::size_t>(phase)], "computation", computation_track, start, end,
                   "");
}

void UpdateTrace::add_wait(Clock::time_point start, Clock::time_point end) {
  if (end - start < std::chrono::microseconds(2)) return;
  state_->add_span("wait", "wait", computation_track, start, end, "");
}

void UpdateTrace::add_collective(const StartedCollective& c) { state_->ends->add(c); }

void UpdateTrace::add_memory(const MemoryUse& use) {
  State& s = *state_;
  std::string values;
  for (const MemoryPart& part : parts(use))
    values += concat(values.empty() ? "\"" : ",\"", part.name, "\":", part.bytes);
  s.add(concat(R"({"name":"memory","ph":"C","pid":)", s.world.rank(), R"(,"tid":0,"ts":)",
               s.time(Clock::now()), R"(,"args":{)", values, "}}"));
}

bool UpdateTrace::end_update(std::int64_t number) {
  State& s = *state_;
  const bool recorded = recording();
  if (recorded)
    s.add_span(concat("update ", number), "computation", computation_track, s.start, Clock::now(), "");
  ++s.update;
  if (!recorded && recording()) s.start_recording();
  if (recorded && !recording()) {
    s.add_collectives();
    s.ends.reset();
    s.write();
  }
  s.start = Clock::now();
  return recorded != recording();
}

}  // namespace rz
