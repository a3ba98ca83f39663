// Times training with and without asynchronous checkpoints, in turn:
//
//   async_checkpoint_bench DIR LAYERS WIDTH ROWS UPDATES ROUNDS STAGE
//
// Trains LAYERS layers of WIDTH x WIDTH with AdamW in f32, on ROWS rows per update, alone or on the ranks of
// a launcher. A round is UPDATES updates without a checkpoint, then as many with one, which is saved before
// the first of them and is complete within the time of the last one. Prints a line per round and the medians;
// times are those of rank 0 in seconds:
//
//   without, with   of the updates
//   ratio           with / without
//   copied          in save_checkpoint(), which training waits for
//   complete        from then until an update finds the checkpoint complete
//   cpu             processor time of rank 0 with a checkpoint, minus that without

#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "sharding/checkpoint/checkpoint_folder.h"
#include "sharding/engine/engine.h"

namespace {

using rz::concat;
using rz::Tape;
using rz::Tensor;
using rz::Var;
using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

struct Options {
  std::string dir;
  std::size_t layers, width, rows;
  int updates, rounds, stage;
};

struct Net : rz::Module {
  Net(std::size_t layers, std::size_t width) {
    for (std::size_t i = 0; i < layers; ++i)
      this->layers.push_back(std::make_unique<rz::nn::Linear>(*this, concat("layer", i), width, width));
  }
  Var operator()(Tape& t, const Tensor& x) {
    Var h = (*layers[0])(t, x);
    for (std::size_t i = 1; i < layers.size(); ++i) h = (*layers[i])(t, rz::nn::gelu(t, h));
    return h;
  }
  std::vector<std::unique_ptr<rz::nn::Linear>> layers;
};

struct Round {
  double without = 0, with = 0, copied = 0, complete = 0;
  double cpu_without = 0, cpu_with = 0;
};

/// Processor time of this process: all threads, user and system.
double processor_seconds() {
  rusage used{};
  ::getrusage(RUSAGE_SELF, &used);
  const auto seconds = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) + 1e-6 * static_cast<double>(t.tv_usec);
  };
  return seconds(used.ru_utime) + seconds(used.ru_stime);
}

class Measure {
 public:
  Measure(rz::World& world, const Options& o)
      : options_(o),
        net_(o.layers, o.width),
        engine_(
            rz::initialize(world, net_,
                           {.config = concat(R"({"train_micro_batch_size_per_gpu": )",
                                             o.rows / static_cast<std::size_t>(world.size()),
                                             R"(, "zero_optimization": {"stage": )", o.stage,
                                             R"(}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}})"),
                            .log = nullptr})) {
    x_ = Tensor::empty({o.rows / static_cast<std::size_t>(world.size()), o.width});
    for (std::size_t i = 0; i < x_.count(); ++i)
      x_.data<float>()[i] = static_cast<float>(rz::random_uniform(1, "x", i)) - 0.5f;
    y_ = Tensor::zeros({x_.shape()[0]}, rz::DType::i32);
  }

  Round round(int updates) {
    Round r;
    engine_.world().wait_for_everyone();
    const auto start = Clock::now();
    double processor = processor_seconds();
    for (int u = 0; u < updates; ++u) update();
    r.without = seconds_since(start);
    r.cpu_without = processor_seconds() - processor;
    engine_.world().wait_for_everyone();
    const auto again = Clock::now();
    processor = processor_seconds();
    engine_.save_checkpoint(options_.dir, {.async = true, .save_total_limit = 1});
    r.copied = seconds_since(again);
    const std::string tag = rz::step_tag(engine_.global_steps());
    for (int u = 0; u < updates; ++u) {
      update();
      if (r.complete == 0 && rz::read_tag_file(options_.dir, rz::latest_file) == tag)
        r.complete = seconds_since(again) - r.copied;
    }
    engine_.wait_for_checkpoint();
    r.with = seconds_since(again);
    r.cpu_with = processor_seconds() - processor;
    return r;
  }

 private:
  void update() {
    Tape& t = engine_.tape();
    engine_.backward(rz::nn::cross_entropy(t, net_(t, x_), y_));
    engine_.step();
  }

  const Options& options_;
  Net net_;
  rz::Engine engine_;
  Tensor x_, y_;
};

double median(const std::vector<Round>& rounds, double (*of)(const Round&)) {
  std::vector<double> all;
  for (const Round& r : rounds) all.push_back(of(r));
  std::ranges::sort(all);
  return all.size() % 2 == 1 ? all[all.size() / 2] : (all[all.size() / 2 - 1] + all[all.size() / 2]) / 2;
}

void print(const char* name, const Round& r, double ratio) {
  std::printf("%-8s %8.3f %8.3f %8.4f %8.3f %8.3f %8.3f\n", name, r.without, r.with, ratio, r.copied,
              r.complete, r.cpu_with - r.cpu_without);
  std::fflush(stdout);
}

void run(rz::World& world, const Options& o) {
  Measure measure(world, o);
  measure.round(3);  // touches all memory
  const double parameters =
      static_cast<double>(o.layers) * static_cast<double>(o.width) * static_cast<double>(o.width + 1);
  world.print("# ", world.size(), " ranks, stage ", o.stage, ", ", o.layers, " layers of ", o.width, ", ",
              o.rows, " rows, a checkpoint of ", parameters * 12 / (1 << 30), " GiB every ", o.updates,
              " updates");
  if (world.is_main())
    std::printf("%-8s %8s %8s %8s %8s %8s %8s\n", "# round", "without", "with", "ratio", "copied", "complete",
                "cpu");
  std::vector<Round> rounds;
  for (int i = 0; i < o.rounds; ++i) {
    rounds.push_back(measure.round(o.updates));
    if (world.is_main()) print(concat(i).c_str(), rounds.back(), rounds.back().with / rounds.back().without);
  }
  if (!world.is_main()) return;
  const Round middle{median(rounds, [](const Round& r) { return r.without; }),
                     median(rounds, [](const Round& r) { return r.with; }),
                     median(rounds, [](const Round& r) { return r.copied; }),
                     median(rounds, [](const Round& r) { return r.complete; }),
                     0,
                     median(rounds, [](const Round& r) { return r.cpu_with - r.cpu_without; })};
  print("median", middle, median(rounds, [](const Round& r) { return r.with / r.without; }));
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 8)
    return std::fprintf(stderr, "async_checkpoint_bench DIR LAYERS WIDTH ROWS UPDATES ROUNDS STAGE\n"), 2;
  const auto number = [&](int i) { return std::strtoul(argv[i], nullptr, 10); };
  const auto count = [&](int i) { return static_cast<int>(number(i)); };
  const Options o{argv[1], number(2), number(3), number(4), count(5), count(6), count(7)};
  return rz::run_entrypoint([&](rz::World& world) { run(world, o); });
}
