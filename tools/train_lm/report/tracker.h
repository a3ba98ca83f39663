#pragma once
/// What --track sends to a program of the user's: a JSON object per line on its standard input.
///
///     {"event": "start", "program": "train_lm", "ranks": 2, "first_step": 0, "steps": 100, "config": {…}}
///     {"event": "update", "step": 0, "loss": 5.5, …}             as a line of --metrics
///     {"event": "evaluation", "step": 9, "eval_loss": 4.2}       after update `step`, counted from 0
///     {"event": "checkpoint", "step": 9, "folder": "checkpoints"}
///     {"event": "end", "step": 99, "reason": "done"}             or "stopped", "failed"
///
/// A program for Weights & Biases, train_lm … --track "python3 track.py":
///
///     import json, sys, wandb
///     for line in sys.stdin:
///         event = json.loads(line)
///         kind, step = event.pop("event"), event.pop("step", None)
///         if kind == "start": run = wandb.init(project="ringzero", config=event["config"])
///         elif kind in ("update", "evaluation"): run.log(event, step=step)
///     run.finish()
///
/// For MLflow: mlflow.start_run(), mlflow.log_metrics({k: v for k, v in event.items() if isinstance(v,
/// float)}, step).

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>

#include "comm/os/child.h"

namespace rz::train_lm {

struct TrackerOptions {
  std::size_t max_buffered = std::size_t{4} << 20;  ///< bytes that the command has not read
  std::chrono::milliseconds patience{30'000};       ///< at the end, for it to read and to end
};

/// Runs a command and sends it lines, without ever waiting for it before the end, and without failing: what
/// is wrong with it is printed once, as one line on standard error, and lines that it does not read are lost.
/// The command has a process group of its own, so Ctrl-C reaches only the training.
class Tracker {
 public:
  /// Starts `sh -c COMMAND`; an empty command: nothing.
  explicit Tracker(const std::string& command, TrackerOptions = {});
  /// end("failed") with a patience of at most 2 s, unless end() was called.
  ~Tracker();
  Tracker(const Tracker&) = delete;

  /// Whether lines are sent: there is a command, and it has not ended.
  bool active() const { return static_cast<bool>(pipe_); }
  /// `members`: of the object after its event, R"("step": 1)".
  void send(const char* event, const std::string& members);
  /// `step`: of the last update, from 0 on; below 0: unknown. Sends the last line, closes the standard input
  /// of the command, and waits until it ends, at most `patience`: it is then ended by SIGTERM.
  void end(const char* reason, std::int64_t step);

 private:
  void warn(const std::string& what);
  /// Writes what the pipe has room for.
  void flush();
  void close_pipe();
  bool has_ended(Deadline);

  TrackerOptions options_;
  UniqueFd pipe_;
  Child process_;
  std::string buffer_;  // whole lines, but for the first
  bool warned_ = false;
};

/// A text in quotes, as JSON has it; what is not UTF-8 is replaced.
std::string json_text(const std::string&);

}  // namespace rz::train_lm
