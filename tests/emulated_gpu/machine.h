#pragma once
/// The emulated devices' streams: queues of tasks that a seeded scheduler runs in any order that streams and
/// events allow, as late as possible. A missing wait in a program therefore shows as a wrong result for some
/// seed, where a real card would mostly give the expected one.
///
/// A device has as many hardware queues as CUDA_DEVICE_MAX_CONNECTIONS specifies when a stream is made, or 8.
/// Further streams share queues, and each queue runs in the order of submission, whatever the stream.
///
/// Tasks run in any host thread that waits, one at a time. Thread-safe.

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "tests/emulated_gpu/grid_run.h"

namespace rz::emulated {

using Progress = GridRun::Progress;

/// An entry of a stream: work that continues when it is called again. `make` creates a fresh one from a
/// random number, so that a graph can run it many times.
using Work = std::function<Progress()>;
using MakeWork = std::function<Work(std::uint64_t random)>;

struct Graph;
struct Stream;

struct EventState {
  std::uint64_t recorded = 0, reached = 0;  ///< recordings submitted, and recordings reached
  Graph* graph = nullptr;                   ///< being captured: recorded there, after `node`
  int node = -1;
  std::chrono::steady_clock::time_point when;
};
using EventHandle = std::shared_ptr<EventState>;

/// Work and its predecessors, by index; -1 where a stream was empty.
struct Graph {
  struct Node {
    MakeWork make;
    std::vector<int> after;
  };
  std::vector<Node> nodes;
  Stream* origin = nullptr;
  std::set<Stream*> joined;
  bool invalid = false;

  int add(MakeWork make, std::vector<int> after) {
    nodes.push_back({std::move(make), std::move(after)});
    return static_cast<int>(nodes.size()) - 1;
  }
};

struct Task {
  enum Kind { work, record, wait } kind = work;
  MakeWork make;
  Work run;
  EventHandle event;
  std::uint64_t version = 0;
  std::uint64_t submission = 0;  ///< its number among all tasks
};

struct Stream {
  int device = 0;
  int queue = 0;  ///< of its device
  std::deque<Task> tasks;
  bool stalled = false;  ///< its first task waits for memory to change
  bool orphan = false;   ///< destroyed by its owner; ends with its last task
  Graph* graph = nullptr;
  std::vector<int> last;  ///< of the graph: predecessors of the next node
};

class Machine {
 public:
  static Machine& instance();

  enum class Pace { eager, any, lazy };
  /// Discards tasks and failures; streams and memory stay.
  void restart(std::uint64_t seed, Pace);

  Stream* create_stream(int device);
  void destroy_stream(Stream*);
  Stream* null_stream(int device);
  std::size_t streams(int device);

  void submit(Stream*, MakeWork);
  void record(Stream*, const EventHandle&);
  void wait(Stream*, const EventHandle&);

  /// Runs tasks of any stream until these have run. False: something failed.
  bool synchronize(Stream*);
  bool synchronize(const EventHandle&);
  bool synchronize_device(int device);
  /// Runs a little and returns its state.
  bool idle(Stream*);
  bool reached(const EventHandle&);

  bool begin_capture(Stream*);
  /// Null if the capture was broken, or has streams that were not joined back to `stream`.
  std::unique_ptr<Graph> end_capture(Stream*);
  bool capturing(Stream*);
  bool capturing_into(const EventHandle&);
  /// Whether this thread captures: it must not wait or allocate then.
  static bool thread_captures();

  /// The failure of the machine; empty while it works.
  std::string failure();
  std::size_t pending();
  /// How long it may make no progress during a wait.
  std::chrono::milliseconds patience{20'000};

 private:
  template <class F>
  bool run_until(const F& reached);
  void run_some();
  std::string describe_stall();
  Stream* add_stream(int device);
  int emptiest_queue(int device) const;
  bool behind_another(const Stream&) const;
  std::vector<Stream*> runnable();
  Progress run_first(Stream&, std::unique_lock<std::mutex>&);
  bool step(std::unique_lock<std::mutex>&);
  void put(Stream*, Task);
  void bury(Stream*);
  bool captures(const Graph*) const;
  std::uint64_t draw(std::uint64_t below) { return random_() % below; }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::unique_ptr<Stream>> streams_;
  std::vector<Stream*> null_streams_;
  std::mt19937_64 random_{1};
  Pace pace_ = Pace::any;
  bool running_ = false;
  std::uint64_t changes_ = 0;
  std::uint64_t submissions_ = 0;
  std::size_t idle_turns_ = 0;
  std::uint64_t moves_ = 0;
  std::string failure_;
};

/// A graph's nodes as one task, in a random order that their edges allow.
MakeWork replay(std::shared_ptr<const Graph>);

}  // namespace rz::emulated
