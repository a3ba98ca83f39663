#include "tests/emulated_gpu/machine.h"

#include <algorithm>
#include <cstdlib>
#include <exception>
#include <utility>

#include "tests/emulated_gpu/device_memory.h"

namespace rz::emulated {

namespace {
thread_local int captures_of_thread = 0;
}

Machine& Machine::instance() {
  static auto* const machine = new Machine();  // outlives every stream in a static object
  return *machine;
}

bool Machine::thread_captures() { return captures_of_thread > 0; }

void Machine::restart(std::uint64_t seed, Pace pace) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return !running_; });
  DeviceMemory::instance().close();
  random_.seed(seed);
  pace_ = pace;
  failure_.clear();
  for (auto& s : streams_) {
    for (const Task& t : s->tasks)
      if (t.kind == Task::record) t.event->reached = std::max(t.event->reached, t.version);
    s->tasks.clear();
    s->stalled = false;
  }
  std::erase_if(streams_, [](const auto& s) { return s->orphan; });
}

Stream* Machine::create_stream(int device) {
  const std::lock_guard lock(mutex_);
  return add_stream(device);
}

Stream* Machine::add_stream(int device) {
  const int queue = emptiest_queue(device);
  streams_.push_back(std::make_unique<Stream>());
  streams_.back()->device = device;
  streams_.back()->queue = queue;
  return streams_.back().get();
}

/// The one with the fewest streams.
int Machine::emptiest_queue(int device) const {
  const char* const setting = std::getenv("CUDA_DEVICE_MAX_CONNECTIONS");
  std::vector<int> streams(static_cast<std::size_t>(setting ? std::clamp(std::atoi(setting), 1, 32) : 8));
  for (const auto& s : streams_)
    if (s->device == device && static_cast<std::size_t>(s->queue) < streams.size())
      ++streams[static_cast<std::size_t>(s->queue)];
  return static_cast<int>(std::min_element(streams.begin(), streams.end()) - streams.begin());
}

std::size_t Machine::streams(int device) {
  const std::lock_guard lock(mutex_);
  return static_cast<std::size_t>(
      std::count_if(streams_.begin(), streams_.end(), [&](const auto& s) { return s->device == device; }));
}

Stream* Machine::null_stream(int device) {
  const std::lock_guard lock(mutex_);
  const auto d = static_cast<std::size_t>(device);
  if (null_streams_.size() <= d) null_streams_.resize(d + 1);
  if (!null_streams_[d]) null_streams_[d] = add_stream(device);
  return null_streams_[d];
}

void Machine::destroy_stream(Stream* s) {
  const std::lock_guard lock(mutex_);
  s->orphan = true;
  if (s->tasks.empty()) bury(s);
}

void Machine::bury(Stream* s) {
  std::erase_if(streams_, [&](const auto& other) { return other.get() == s; });
}

// ---- filling the queues

void Machine::put(Stream* s, Task task) {
  if (!failure_.empty()) return;
  task.submission = ++submissions_;
  s->tasks.push_back(std::move(task));
  ++changes_;
  idle_turns_ = 0;
  changed_.notify_all();
}

void Machine::submit(Stream* s, MakeWork make) {
  {
    const std::lock_guard lock(mutex_);
    if (s->graph) {
      s->last = {s->graph->add(std::move(make), std::exchange(s->last, {}))};
      return;
    }
    put(s, {.kind = Task::work, .make = std::move(make)});
  }
  run_some();
}

void Machine::record(Stream* s, const EventHandle& event) {
  {
    const std::lock_guard lock(mutex_);
    event->graph = s->graph;
    if (s->graph) {
      event->node = s->graph->add([](std::uint64_t) { return [] { return Progress::done; }; }, s->last);
      s->last = {event->node};
      return;
    }
    put(s, {.kind = Task::record, .event = event, .version = ++event->recorded});
    if (!failure_.empty()) event->reached = event->recorded;
  }
  run_some();
}

void Machine::wait(Stream* s, const EventHandle& event) {
  const std::lock_guard lock(mutex_);
  if (captures(event->graph)) {  // the stream becomes a part of the capture
    if (!s->graph) s->graph = event->graph, s->last.clear(), event->graph->joined.insert(s);
    s->last.push_back(event->node);
    return;
  }
  if (s->graph) {
    if (event->recorded > event->reached) s->graph->invalid = true;  // waits for work outside of the graph
    return;
  }
  put(s, {.kind = Task::wait, .event = event, .version = event->recorded});
}

/// Whether the graph is still being captured.
bool Machine::captures(const Graph* graph) const {
  return graph &&
         std::any_of(streams_.begin(), streams_.end(), [&](const auto& s) { return s->graph == graph; });
}

// ---- running

/// Whether another stream of the same queue has a task submitted before this one's first task.
bool Machine::behind_another(const Stream& s) const {
  return std::any_of(streams_.begin(), streams_.end(), [&](const auto& other) {
    return other->device == s.device && other->queue == s.queue && !other->tasks.empty() &&
           other->tasks.front().submission < s.tasks.front().submission;
  });
}

std::vector<Stream*> Machine::runnable() {
  std::vector<Stream*> all;
  for (const auto& s : streams_) {
    if (s->tasks.empty() || behind_another(*s)) continue;
    const Task& t = s->tasks.front();
    if (t.kind != Task::wait || t.event->reached >= t.version) all.push_back(s.get());
  }
  return all;
}

/// Runs a part of a stream's first task, without the lock: others may submit meanwhile.
Progress Machine::run_first(Stream& s, std::unique_lock<std::mutex>& lock) {
  Task& t = s.tasks.front();
  if (t.kind == Task::record) {
    t.event->reached = std::max(t.event->reached, t.version);
    t.event->when = std::chrono::steady_clock::now();
  }
  if (t.kind != Task::work) return Progress::done;
  if (!t.run) t.run = t.make(random_());
  lock.unlock();
  std::string failure;
  Progress progress = Progress::done;
  try {
    progress = t.run();
  } catch (const std::exception& e) {
    failure = e.what();
  }
  lock.lock();
  if (!failure.empty() && failure_.empty()) failure_ = failure;
  return progress;
}

/// Runs one part of one runnable task, chosen at random; those that wait for memory last. False: none can
/// progress, or the waiting ones did not for many turns.
bool Machine::step(std::unique_lock<std::mutex>& lock) {
  std::vector<Stream*> choice = runnable();
  if (choice.empty()) return false;
  const auto stalled = std::partition(choice.begin(), choice.end(), [](Stream* s) { return !s->stalled; });
  const bool all_wait = stalled == choice.begin();
  if (!all_wait) choice.erase(stalled, choice.end());
  Stream& s = *choice[draw(choice.size())];
  const auto before = changes_;
  const Progress progress = run_first(s, lock);
  s.stalled = progress == Progress::waiting;
  if (progress == Progress::done) {
    s.tasks.pop_front();
    if (s.orphan && s.tasks.empty()) bury(&s);
  }
  const bool moved = !all_wait || progress != Progress::waiting || changes_ != before;
  moves_ += moved;
  idle_turns_ = moved ? 0 : idle_turns_ + 1;
  return idle_turns_ < 8 * choice.size();
}

std::string Machine::describe_stall() {
  const auto behind = std::count_if(streams_.begin(), streams_.end(),
                                    [&](const auto& s) { return !s->tasks.empty() && behind_another(*s); });
  return concat("emulated GPU: nothing can run; kernels wait for memory that no task writes, in ",
                runnable().size(), " streams",
                behind ? concat("; ", behind,
                                " streams wait behind others that share their "
                                "hardware queue (CUDA_DEVICE_MAX_CONNECTIONS)")
                       : "");
}

template <class F>
bool Machine::run_until(const F& reached) {
  std::unique_lock lock(mutex_);
  auto limit = std::chrono::steady_clock::now() + patience;
  auto moves = moves_;
  while (failure_.empty() && !reached()) {
    if (running_) {
      changed_.wait_for(lock, std::chrono::milliseconds(5));
      continue;
    }
    running_ = true;
    bool stands_still = false;
    DeviceMemory::instance().open();
    while (failure_.empty() && !reached() && !stands_still) stands_still = !step(lock);
    if (!stands_still) DeviceMemory::instance().close();
    running_ = false;
    changed_.notify_all();
    if (!stands_still) continue;
    if (std::exchange(moves, moves_) != moves_) limit = std::chrono::steady_clock::now() + patience;
    if (std::chrono::steady_clock::now() > limit) failure_ = describe_stall();
    changed_.wait_for(lock, std::chrono::microseconds(200));  // another rank has to come
  }
  if (!failure_.empty())
    for (auto& s : streams_) s->tasks.clear(), s->stalled = false;
  return failure_.empty();
}

/// After a submission to a queue: runs as many tasks as the pace requires.
void Machine::run_some() {
  std::unique_lock lock(mutex_);
  std::size_t tasks = 0;
  for (const auto& s : streams_) tasks += s->tasks.size();
  constexpr std::size_t max_tasks = 4000;
  if (running_ || tasks == 0 || (pace_ == Pace::lazy && tasks < max_tasks)) return;
  if (pace_ == Pace::any && tasks < max_tasks && draw(8) != 0) return;
  running_ = true;
  DeviceMemory::instance().open();
  for (std::size_t n = pace_ == Pace::any ? draw(2 * tasks) + 1 : ~std::size_t{0}; n > 0; --n)
    if (!failure_.empty() || !step(lock)) break;
  running_ = false;
  changed_.notify_all();
}

bool Machine::synchronize(Stream* s) {
  return run_until([s] { return s->tasks.empty(); });
}

bool Machine::synchronize(const EventHandle& event) {
  const auto version = [&] {
    const std::lock_guard lock(mutex_);
    return event->recorded;
  }();
  return run_until([&] { return event->reached >= version; });
}

bool Machine::synchronize_device(int device) {
  return run_until([&] {
    return std::all_of(streams_.begin(), streams_.end(),
                       [&](const auto& s) { return s->device != device || s->tasks.empty(); });
  });
}

bool Machine::idle(Stream* s) {
  run_some();
  const std::lock_guard lock(mutex_);
  return s->tasks.empty();
}

bool Machine::reached(const EventHandle& event) {
  bool stuck = false;
  {
    std::unique_lock lock(mutex_);
    if (event->reached >= event->recorded) return true;
    if (!running_ && failure_.empty()) {  // each poll runs tasks, since no other thread might
      running_ = true;
      DeviceMemory::instance().open();
      stuck = !step(lock);
      running_ = false;
      changed_.notify_all();
    }
  }
  const std::lock_guard lock(mutex_);
  return event->reached >= event->recorded || (stuck && !failure_.empty());
}

// ---- graphs

bool Machine::begin_capture(Stream* s) {
  const std::lock_guard lock(mutex_);
  if (s->graph) return false;
  s->graph = new Graph();
  s->graph->origin = s;
  s->last.clear();
  ++captures_of_thread;
  return true;
}

std::unique_ptr<Graph> Machine::end_capture(Stream* s) {
  const std::lock_guard lock(mutex_);
  if (!s->graph || s->graph->origin != s) return nullptr;
  --captures_of_thread;
  std::unique_ptr<Graph> graph(s->graph);
  // Every last node of a joined stream must precede the origin's last node.
  std::set<int> before(s->last.begin(), s->last.end());
  for (int i = static_cast<int>(graph->nodes.size()) - 1; i >= 0; --i)
    if (before.contains(i))
      before.insert(graph->nodes[static_cast<std::size_t>(i)].after.begin(),
                    graph->nodes[static_cast<std::size_t>(i)].after.end());
  for (Stream* other : graph->joined) {
    for (const int node : other->last) graph->invalid |= !before.contains(node);
    other->graph = nullptr;
    other->last.clear();
  }
  s->graph = nullptr;
  s->last.clear();
  if (graph->invalid) return nullptr;
  return graph;
}

bool Machine::capturing(Stream* s) {
  const std::lock_guard lock(mutex_);
  return s->graph != nullptr;
}

bool Machine::capturing_into(const EventHandle& event) {
  const std::lock_guard lock(mutex_);
  return captures(event->graph);
}

namespace {

/// One run of a graph.
class Replay {
 public:
  Replay(std::shared_ptr<const Graph> graph, std::uint64_t seed)
      : graph_(std::move(graph)), random_(seed), work_(graph_->nodes.size()), done_(graph_->nodes.size()) {}

  Progress operator()() {
    std::vector<std::size_t> ready;
    for (std::size_t i = 0; i < work_.size(); ++i)
      if (!done_[i] && std::all_of(graph_->nodes[i].after.begin(), graph_->nodes[i].after.end(),
                                   [&](int a) { return done_[static_cast<std::size_t>(a)]; }))
        ready.push_back(i);
    std::shuffle(ready.begin(), ready.end(), random_);
    for (const std::size_t i : ready) {
      if (!work_[i]) work_[i] = graph_->nodes[i].make(random_());
      const Progress progress = work_[i]();
      if (progress == Progress::waiting) continue;
      if (progress == Progress::done) done_[i] = true, work_[i] = nullptr;
      const bool over = std::all_of(done_.begin(), done_.end(), [](bool d) { return d; });
      return over ? Progress::done : Progress::more;
    }
    return ready.empty() ? Progress::done : Progress::waiting;
  }

 private:
  std::shared_ptr<const Graph> graph_;
  std::mt19937_64 random_;
  std::vector<Work> work_;
  std::vector<bool> done_;
};

}  // namespace

MakeWork replay(std::shared_ptr<const Graph> graph) {
  return [graph = std::move(graph)](std::uint64_t random) -> Work {
    return [run = std::make_shared<Replay>(graph, random)] { return (*run)(); };
  };
}

std::string Machine::failure() {
  const std::lock_guard lock(mutex_);
  return failure_;
}

std::size_t Machine::pending() {
  const std::lock_guard lock(mutex_);
  std::size_t tasks = 0;
  for (const auto& s : streams_) tasks += s->tasks.size();
  return tasks;
}

}  // namespace rz::emulated
