#include "sharding/engine/checkpoints/checkpointer.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <exception>
#include <filesystem>
#include <set>
#include <utility>

#include "autograd_lite/models/lora.h"
#include "comm/core/error.h"
#include "comm/core/integer_math.h"
#include "comm/os/flight_recorder.h"
#include "sharding/checkpoint/checkpoint_folder.h"
#include "sharding/checkpoint/checkpoint_reader.h"
#include "sharding/checkpoint/deepspeed_weights.h"
#include "sharding/checkpoint/model_tensors.h"
#include "sharding/checkpoint/save_operation.h"
#include "sharding/engine/checkpoints/signal_handler.h"
#include "sharding/huggingface/merge_adapter.h"
#include "sharding/io/text.h"
#include "sharding/parallel/rank_agreement.h"
#include "sharding/strategy/optimizer_state.h"

namespace rz {
namespace {

namespace fs = std::filesystem;

OptimizerProgress progress_of(const Optimizer& optimizer, const ScheduledRates& rates,
                              const Strategy& strategy, Module& module) {
  OptimizerProgress p{.name = optimizer.name(), .updates = optimizer.updates()};
  for (int g = 0; g < optimizer.groups(); ++g)
    p.groups.push_back({optimizer.group_name(g), rates.base_rates()[static_cast<std::size_t>(g)],
                        optimizer.learning_rate(g)});
  for (const auto& [name, parameter] : module.named_parameters()) {
    if (!parameter->requires_grad) continue;
    const std::int64_t missed = strategy.optimizer_state().missed_updates(*parameter);
    if (missed > 0) p.missed_updates[name] = missed;
  }
  return p;
}

/// Rates that a loop has set by hand. A rate that the configuration has changed since is kept.
void restore_rates(const OptimizerProgress& saved, const ScheduledRates& rates, Optimizer& optimizer) {
  if (rates.scheduled() || saved.groups.size() != static_cast<std::size_t>(optimizer.groups())) return;
  for (std::size_t g = 0; g < saved.groups.size(); ++g)
    if (saved.groups[g].base_lr == rates.base_rates()[g])
      optimizer.set_learning_rate(static_cast<int>(g), saved.groups[g].lr);
}

/// The tag that rank 0 finds, on every rank; empty if there is none.
std::string agreed_tag(Communicator& comm, const std::string& dir, const std::string& given) {
  std::string tag = given;
  check_on_all_ranks(comm, [&] {
    if (comm.rank() != 0) return;
    remove_stale(dir);
    if (given == best_file) {
      tag = read_tag_file(dir, best_file).value_or("");
      return require(!tag.empty(), Errc::config, dir, ": has no file ", best_file,
                     " that names a checkpoint; give a tag, or none for the last one");
    }
    if (!given.empty()) return check_tag(given);
    tag = read_tag_file(dir, latest_file).value_or("");
    if (!tag.empty()) return;
    if (const auto tags = checkpoint_tags(dir); !tags.empty())
      fail(Errc::config, dir, ": has checkpoints, and no file ", latest_file,
           " that names one; give the folder of one: the last is ", (fs::path(dir) / tags.back()).string());
  });
  return broadcast_text(comm, tag, 0);
}

/// Every rank reads some of the files.
void verify_share(const CheckpointReader& reader, int rank, int ranks) {
  const auto step = static_cast<std::size_t>(ranks);
  for (std::size_t f = static_cast<std::size_t>(rank); f < reader.index().files.size(); f += step)
    reader.verify(f);
}

/// A name of weights that stays the same where their folder is moved.
std::string name_of_weights(const std::string& given) {
  fs::path path = fs::absolute(given).lexically_normal();
  if (!path.has_filename()) path = path.parent_path();
  const std::string name = path.filename().string();
  const bool of_any_model = name.starts_with("model") || name.starts_with("pytorch_model");
  return of_any_model && path.has_extension() ? path.parent_path().filename().string() : name;
}

/// Those that are not trained, and not of an adapter.
std::set<const Parameter*> base_parameters(Module& module) {
  std::set<const Parameter*> all;
  for (const Parameter* p : module.parameters())
    if (!p->requires_grad) all.insert(p);
  for (const auto& [name, p] : adapter_tensors(module).parameters) all.erase(p);
  return all;
}

/// Where the selected parameters were loaded from.
template <class F>
std::vector<std::string> base_of(Module& module, const F& selected) {
  std::set<std::string> names;
  for (const auto& [name, p] : module.named_parameters())
    if (!p->loaded_from.empty() && selected(name, *p)) names.insert(name_of_weights(p->loaded_from));
  return {names.begin(), names.end()};
}

/// "'llama' and 'adapter'"
std::string quoted(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += concat(text.empty() ? "'" : " and '", escaped(name), '\'');
  return text;
}

/// Its states of optimizers are laid out for DeepSpeed.
void refuse_deepspeed(const fs::path& folder) {
  require(!is_deepspeed_checkpoint(folder.string()), Errc::config, escaped(folder.string()),
          ": is a checkpoint of DeepSpeed, whose training cannot be resumed; write its weights with "
          "`checkpoint merge ",
          escaped(folder.string()), " OUT`, and load them with load_model()");
}

/// Passes of earlier updates, for the seeds of dropout. With another number of micro-batches they are counted
/// as if all updates had been like those to come.
std::uint64_t passes_before(const EngineState& s, std::int64_t accumulation) {
  const auto before = static_cast<std::uint64_t>(s.accumulation);
  if (s.accumulation == accumulation) return s.updates.passes;
  return ceil_div(s.updates.passes, before) * static_cast<std::uint64_t>(accumulation);
}

/// A checkpoint with all weights has those of its base.
void mark_loaded(Module& module, const EngineState& saved, const std::string& path) {
  const bool one = saved.base && saved.base->size() == 1;
  for (Parameter* p : module.parameters()) p->loaded_from = one ? saved.base->front() : path;
}

}  // namespace

Checkpointer::Checkpointer(CheckpointedParts parts, TrainerState trainer)
    : parts_(std::move(parts)), trainer_(std::move(trainer)) {}

std::int64_t Checkpointer::steps() const { return parts_.updates ? parts_.updates->reports().steps() : 0; }

Checkpointer::~Checkpointer() {
  if (!saving_ || std::uncaught_exceptions() > 0) return;
  try {
    wait();
  } catch (const Error&) {  // a rank has failed, or ended: the checkpoint stays invisible
  }
}

// ---- saving

EngineState Checkpointer::state() const {
  EngineState s{.strategy = name(parts_.strategy.kind()),
                .ranks = parts_.world.size(),
                .accumulation = parts_.accumulation,
                .seed = parts_.seed,
                .loaders = parts_.loaders->now(),
                .config = parts_.config,
                .trainer_state = to_json(trainer_)};
  for (const LauncherJob& job : jobs_of_launchers()) s.jobs.push_back(job.name);
  const std::set<const Parameter*> frozen = base_parameters(parts_.module);
  s.base =
      base_of(parts_.module, [&](const std::string&, const Parameter& p) { return frozen.contains(&p); });
  s.adapter = adapter_state(parts_.module);
  if (!parts_.updates) return s;
  s.updates = parts_.updates->state();
  if (!parts_.updates->accumulation().fresh()) s.loaders = parts_.loaders->of_update();
  TrainingStep& training = parts_.updates->training();
  s.optimizer = progress_of(training.optimizer(), training.rates(), parts_.strategy, parts_.module);
  return s;
}

void Checkpointer::save(const std::string& dir, const SaveCheckpointOptions& o) {
  const flight::Phase phase("saving a checkpoint");
  wait();
  EngineState s = state();
  s.client_state = o.client_state;
  s.without_frozen = o.exclude_frozen_parameters;
  const SaveRequest request{.dir = dir,
                            .tag = o.tag.empty() ? step_tag(s.updates.count.steps) : o.tag,
                            .state = to_json(s),
                            .files = o.files,
                            .best = o.best,
                            .keep = o.save_total_limit};
  const OwnedState owned(parts_.module, parts_.strategy,
                         {.buffers = parts_.world.is_main(),
                          .finite = !o.nonfinite,
                          .left_out = o.exclude_frozen_parameters ? base_parameters(parts_.module)
                                                                  : std::set<const Parameter*>()},
                         parts_.stream);
  saving_.emplace(parts_.world.communicator(), owned, request, o.async ? &snapshot_ : nullptr);
  folder_locks_[dir] = saving_->folder_lock();
  if (!o.async) wait();
}

void Checkpointer::lock(const std::string& dir, bool make) {
  Communicator& comm = parts_.world.communicator();
  check_on_all_ranks(comm, [&] {
    if (!parts_.world.is_main() || (::access(dir.c_str(), W_OK) != 0 && !(make && errno == ENOENT))) return;
    folder_locks_[dir] = lock_checkpoint_folder(dir);
  });
  const std::string mark = broadcast_text(comm, folder_locks_.contains(dir) ? folder_lock_file(dir) : "", 0);
  if (!mark.empty()) require_shared_folder(comm, dir, mark);
}

void Checkpointer::end_update() {
  parts_.loaders->end_update();
  if (!saving_) return;
  try {
    if (saving_->poll()) saving_.reset();
  } catch (...) {
    saving_.reset();
    throw;
  }
}

void Checkpointer::wait() {
  if (!saving_) return;
  try {
    saving_->wait();
  } catch (...) {
    saving_.reset();
    throw;
  }
  saving_.reset();
}

// ---- loading

void Checkpointer::restore_optimizer(const OptimizerProgress& saved,
                                     const std::vector<std::string>& without_states) {
  TrainingStep& training = parts_.updates->training();
  training.optimizer().set_updates(saved.updates);
  restore_rates(saved, training.rates(), training.optimizer());
  for (const auto& [name, p] : parts_.module.named_parameters()) {
    if (!p->requires_grad) continue;
    const auto missed = saved.missed_updates.find(name);
    parts_.strategy.optimizer_state().set_missed_updates(
        *p, missed == saved.missed_updates.end() ? 0 : missed->second);
    if (std::ranges::find(without_states, name) != without_states.end())
      parts_.strategy.optimizer_state().set_missed_updates(*p, saved.updates);
  }
}

void Checkpointer::check_seed(const EngineState& saved, const LoadCheckpointOptions& o) const {
  require(o.load_module_only || !parts_.updates || saved.seed == parts_.seed, Errc::config,
          "load_checkpoint(): ", "the checkpoint has seed ", saved.seed, " and the engine ", parts_.seed,
          ": the order of samples would be another; give the engine the same seed, or load the module only");
}

/// Frozen weights that the checkpoint leaves out are those that it was trained with.
void Checkpointer::check_base(const EngineState& saved, const TensorSource& tensors,
                              const LoadCheckpointOptions& o, const std::string& path) const {
  if (!saved.without_frozen || !saved.base || !o.load_module_strict) return;
  const auto own = base_of(parts_.module, [&](const std::string& name, const Parameter&) {
    return !tensors.find(model_tensor(name));
  });
  if (own == *saved.base) return;
  const auto describe = [](const std::vector<std::string>& names) {
    return names.empty() ? std::string("that were loaded from no file") : concat("of ", quoted(names));
  };
  const std::string remedy =
      saved.base->empty() ? "leave them as they are initially"
                          : concat("load ", quoted(*saved.base),
                                   " before, with load_model(), or for a run that "
                                   "is resumed with load_pretrained() or EngineOptions::initial_values, "
                                   "--init of train_lm");
  fail(Errc::config, escaped(path), ": has no frozen weights and was trained with those ",
       describe(*saved.base), "; the model has weights ", describe(own), ": ", remedy,
       "; LoadCheckpointOptions::load_module_strict = false takes others");
}

/// Equal names of states do not make them those of one rule. An engine without an optimizer saves none.
void Checkpointer::check_optimizer(const OptimizerProgress& saved) const {
  const std::string own = parts_.updates->training().optimizer().name();
  require(saved.name.empty() || saved.name == own, Errc::config,
          "load_checkpoint(): ", "the checkpoint is of the optimizer ", escaped(saved.name),
          " and the engine has ", own, ", to which its states mean something else; train with ",
          escaped(saved.name), ", or load without load_optimizer_states");
}

std::string Checkpointer::describe_differences(const EngineState& saved, const StateLoader& loader) const {
  std::string text = differences(saved, state());
  if (const std::string states = loader.changed_states(); !states.empty())
    text += concat(text.empty() ? "" : "; ", states);
  const std::vector<std::string> without_states = loader.without_states();
  if (without_states.empty() || saved.optimizer.updates == 0) return text;
  const std::size_t others = without_states.size() - 1;
  return concat(text, text.empty() ? "" : "; ", "updates of ", without_states.front(),
                others ? concat(" and of ", others, others == 1 ? " other" : " others") : "", ": ",
                saved.optimizer.updates, " without states, now 0");
}

/// Before anything is loaded.
TrainerState Checkpointer::trainer_of(const EngineState& saved, const std::string& file) const {
  TrainerState trainer = trainer_;
  rz::restore(trainer, saved.trainer_state, file);
  return trainer;
}

void Checkpointer::restore(const EngineState& saved, const LoadCheckpointOptions& o,
                           const std::vector<std::string>& without_states) {
  if (!parts_.updates || o.load_module_only) return;
  UpdateLoop::State updates = saved.updates;
  updates.passes = passes_before(saved, parts_.accumulation);
  parts_.updates->set_state(updates);
  parts_.loaders->restore(saved.loaders);
  if (o.load_optimizer_states) restore_optimizer(saved.optimizer, without_states);
}

std::optional<LoadedCheckpoint> Checkpointer::load(const std::string& dir, const LoadCheckpointOptions& o) {
  wait();
  const UnrecordedTermination ends_at_once;
  Communicator& comm = parts_.world.communicator();
  const std::string tag = agreed_tag(comm, dir, o.tag);
  check_on_all_ranks(comm, [&] { refuse_deepspeed(fs::path(dir) / tag); });
  if (tag.empty()) return std::nullopt;
  LoadedCheckpoint loaded{.path = (fs::path(dir) / tag).string(), .tag = tag};
  const std::string index_file = (fs::path(loaded.path) / checkpoint_index_file).string();
  const bool optimizer = parts_.updates && !o.load_module_only && o.load_optimizer_states;
  std::optional<CheckpointReader> reader;
  std::optional<StateLoader> loader;
  EngineState saved;
  TrainerState trainer;
  check_on_all_ranks(comm, [&] {
    if (parts_.updates) parts_.updates->require_between_updates("load_checkpoint()");
    reader = CheckpointReader::open(loaded.path);
    saved = parse_engine_state(reader->index().state, index_file);
    check_seed(saved, o);
    if (optimizer) check_optimizer(saved.optimizer);
    trainer = trainer_of(saved, index_file);
    const TensorSource tensors = reader->tensors(TensorPart::all);
    check_base(saved, tensors, o, loaded.path);
    loader.emplace(
        tensors, parts_.module, optimizer ? &parts_.updates->training().optimizer() : nullptr,
        StateLoaderOptions{
            .strict = o.load_module_strict, .seed = parts_.seed, .without_frozen = saved.without_frozen});
  });
  if (parts_.updates) parts_.updates->drop_graph();
  if (o.verify) check_on_all_ranks(comm, [&] { verify_share(*reader, comm.rank(), comm.size()); });
  check_on_all_ranks(comm, [&] { loader->load(parts_.strategy, parts_.stream); });
  if (!saved.without_frozen) mark_loaded(parts_.module, saved, loaded.path);
  restore_adapter_state(parts_.module, saved.adapter);
  if (optimizer) loaded.differences = describe_differences(saved, *loader);
  restore(saved, o, loader->without_states());
  if (parts_.updates && !o.load_module_only) trainer_ = trainer;
  loaded.steps = saved.updates.count.steps;
  loaded.missing_keys = loader->missing(), loaded.unexpected_keys = loader->unexpected();
  loaded.client_state = saved.client_state;
  return loaded;
}

}  // namespace rz
