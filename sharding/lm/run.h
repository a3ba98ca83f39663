#pragma once
/// A run of a language model: its inputs, its engine, updates, evaluations, checkpoints, and what it saves.
///
///     rz::run_entrypoint([](rz::World& world) {
///       rz::lm::Options options{.model = "config.json", .data = "text", .config = "ds.json"};
///       options.save = "saved";
///       rz::lm::Run run(world, options);  // resumes
///       while (const auto update = run.update()) world.print("loss ", update->loss);
///       if (!run.finish()) run.save();
///     });

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "../parallel/world.h"
#include "options.h"
#include "update_report.h"

namespace rz {
class Engine;
}

namespace rz::lm {

struct Inputs;

/// All functions but inputs(), engine() and steps() are collective.
class Run {
 public:
  /// Reads and checks all inputs, compares them over the ranks, and makes the engine, which resumes a run by
  /// "ringzero.checkpoint". Nothing is written before. Errors of the inputs are one line, place, problem,
  /// remedy, and come on every rank: Errc::config, Errc::io or Errc::unsupported, or Errc::mismatch with the
  /// first rank that differs from rank 0. So does Errc::config for a checkpoint or adapter that does not fit.
  Run(World&, Options);
  /// With inputs of these options, which read_inputs() has read (sharding/lm/inputs.h).
  Run(World&, Options, Inputs);
  ~Run();
  Run(const Run&) = delete;

  /// Makes the next update, and the evaluation that is due after it, and writes Options::metrics; saves
  /// before it, if a checkpoint is due. Nothing after the last update, or if early stopping, a signal or the
  /// end of the allocation stops the run. Errors are those of Engine::step(); an update that has diverged is
  /// reported (UpdateReport::diverged), and the call after it throws Errc::diverged.
  std::optional<UpdateReport> update();
  /// The loss of an evaluation that is due after the updates so far: update() makes it, too. Nothing is due
  /// but in a run that was stopped in an evaluation, or the data are not evaluated.
  std::optional<double> evaluate();
  /// Completes the checkpoints, and loads the best one if the configuration has it so. Prints how the run has
  /// ended. Returns whether a signal or the end of the allocation has stopped it.
  bool finish();
  /// Writes Options::save, with tokenizer and configuration, and Options::save_adapter, if they are given.
  /// Errc::diverged for values that are not finite, unless Options::save_nonfinite.
  void save();

  struct Sample {
    std::string prompt, text;
  };
  /// Continues Options::sample, which must be given; an empty prompt is the beginning of a text. `show` is
  /// called with the prompt, and with the text piece by piece.
  Sample sample(const std::function<void(const std::string&)>& show = {});

  const Inputs& inputs() const;
  Engine& engine();
  /// Updates of the whole run.
  std::uint64_t steps() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace rz::lm
