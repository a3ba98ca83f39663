#include "sharding/engine/engine.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <exception>
#include <functional>
#include <numeric>
#include <set>
#include <utility>

#include "autograd_lite/models/language_model.h"
#include "autograd_lite/models/lora.h"
#include "autograd_lite/nn/init.h"
#include "autograd_lite/nn/layers.h"
#include "comm/core/deadline.h"
#include "comm/core/error.h"
#include "comm/device/drain.h"
#include "sharding/data/batch_sampler.h"
#include "sharding/engine/checkpoints/checkpointer.h"
#include "sharding/engine/loop/update_loop.h"
#include "sharding/engine/read_configuration.h"
#include "sharding/engine/reports/comms_logger.h"
#include "sharding/huggingface/adapter.h"
#include "sharding/huggingface/save_pretrained.h"
#include "sharding/io/text.h"
#include "sharding/parallel/rank_agreement.h"
#include "sharding/parallel/rank_consistency.h"
#include "sharding/strategy/join.h"
#include "sharding/strategy/strategy.h"

namespace rz {

namespace {

/// Bits that do not depend on the number of ranks do not depend on that of threads either, since more ranks
/// of a node have fewer threads each.
Stream stream_on(Device device, int threads, const DsConfig& config) {
  if (device.kind != Device::host) return Stream::create(device);
  using enum Stream::Reproducible;
  return Stream::host(threads, config.world_size_invariant ? for_any_threads : run_to_run);
}

/// Of the sums of gradients; absent: that of the world.
std::optional<ReductionOrder> reduction_order(const World& world, const DsConfig& config) {
  if (!config.world_size_invariant) return {};
  require(world.device().kind == Device::host, Errc::unsupported, config.file,
          ": ringzero.deterministic: world_size_invariant is for host memory, found ", name(world.device()),
          "; train on the host, or remove the key");
  return ReductionOrder::pairwise;
}

/// The ranks with other data, for calls of the engine's own, which must not wait for those of the strategy.
std::shared_ptr<Communicator> data_ranks(World& world, const Mesh& mesh) {
  Communicator& all = world.communicator();
  if (mesh.sizes().tp == 1) return {std::shared_ptr<Communicator>(), &all};
  return std::make_shared<Communicator>(*all.split(mesh.part().rank, all.rank(), {}, true));
}

/// Divides the layers on all ranks, or throws an error on all. Collective.
void divide_layers(Module& module, const Mesh& mesh, const World& world, const DsConfig& config,
                   const EngineOptions& o) {
  std::string line;
  check_on_all_ranks(mesh.communicator(), [&] { line = divide_layers(module, mesh, config, o); });
  if (o.log && world.is_main() && !line.empty())
    std::fprintf(o.log, "%s%s\n", o.name.empty() ? "" : concat(o.name, ": ").c_str(), line.c_str());
}

std::unique_ptr<Strategy> strategy_of(Module& module, const Mesh& mesh, const World& world,
                                      const DsConfig& config, const EngineOptions& o) {
  divide_layers(module, mesh, world, config, o);
  const StrategyKind kind = o.strategy ? *o.strategy : strategy_kind(config);
  const StrategyOptions options = strategy_options(config, kind, o.configure_strategy);
  const auto trains = [&] { return o.optimizer != nullptr || config.optimizer.has_value(); };
  if (!trains()) module.requires_grad_(false);
  std::set<const Parameter*> without_values;
  for (const Parameter* p : module.parameters())
    if (!p->value.defined()) without_values.insert(p);
  auto strategy = make_strategy(kind, module, mesh, options);
  const auto from_seed = [&](const Parameter& p, Range elements, float* out) {
    init_slice(p, {out, elements.count()}, elements.begin, o.seed);
  };
  if (!without_values.empty())
    strategy->values().fill(o.initial_values ? o.initial_values : from_seed,
                            [&](const Parameter& p) { return without_values.contains(&p); });
  return strategy;
}

/// None: inference.
std::unique_ptr<Optimizer> optimizer_of(const DsConfig& config, EngineOptions& o) {
  if (o.optimizer) return std::move(o.optimizer);
  return config.optimizer ? make_optimizer(*config.optimizer, o.decay) : nullptr;
}

/// Rank 0 opens files.
StepMonitor monitor_of(World& world, const MonitorConfig& config, const EngineOptions& o) {
  std::optional<StepMonitor> monitor;
  check_on_all_ranks(world.communicator(), [&] {
    monitor.emplace(config, world.is_main(), o.name.empty() ? "" : o.name + ": ", o.log);
  });
  return std::move(*monitor);
}

/// Without blocks activation checkpointing has no effect.
void warn_of_no_blocks(Module& module, DsConfig& config) {
  const std::vector<Module*> all = module.modules();
  const bool blocks = std::any_of(all.begin(), all.end(), [](const Module* m) { return m->is_block(); });
  if (config.checkpoint_activations && !blocks)
    config.warnings.push_back(concat(config.file, ": activation_checkpointing: has no effect: no module of ",
                                     "the model is a block; call one_scope() in the constructor of those ",
                                     "that shall be computed again in backward"));
}

void print_configuration(World& world, const DsConfig& config, const EngineOptions& o) {
  if (!o.log || !world.is_main()) return;
  const std::string prefix = o.name.empty() ? "" : o.name + ": ";
  for (const std::string& warning : config.warnings)
    std::fprintf(o.log, "%swarning: %s\n", prefix.c_str(), warning.c_str());
  if (!o.name.empty()) std::fprintf(o.log, "%s\n", o.name.c_str());
  std::fputs(resolved_table(config).c_str(), o.log);
  std::fflush(o.log);
}

/// What reads the weights of the model knows no low-rank updates that were added since.
void initialize_updates(Module& module, EngineOptions& o) {
  std::set<const Parameter*> updates;
  for (const auto& [name, layer] : lora_layers(module)) updates.insert({&layer->lora->a, &layer->lora->b});
  if (updates.empty() || !o.initial_values) return;
  o.initial_values = [updates, read = o.initial_values, seed = o.seed](const Parameter& p, Range elements,
                                                                       float* out) {
    if (!updates.contains(&p)) return read(p, elements, out);
    init_slice(p, {out, elements.count()}, elements.begin, seed);
  };
}

/// `all` has `rows` rows of each rank, of which the last padding[rank] are left out.
Tensor without_padding(const Tensor& all, std::size_t rows, std::span<const std::int64_t> padding) {
  std::size_t extents[4] = {};
  const int dims = all.shape().dims();
  for (int d = 0; d < dims; ++d) extents[d] = all.shape()[d];
  for (const std::int64_t n : padding) extents[0] -= static_cast<std::size_t>(n);
  Tensor kept = Tensor::empty(Shape(std::span<const std::size_t>(extents, static_cast<std::size_t>(dims))),
                              all.dtype());
  const std::size_t row_bytes = all.bytes() / all.shape()[0];
  std::byte* to = kept.raw();
  for (std::size_t rank = 0; rank < padding.size(); ++rank) {
    const std::size_t bytes = (rows - static_cast<std::size_t>(padding[rank])) * row_bytes;
    std::memcpy(to, all.raw() + rank * rows * row_bytes, bytes);
    to += bytes;
  }
  return kept;
}

/// Moves the loaders behind the last batch that any rank has taken, or failed to read. Ranks may have
/// different loaders, which are known by the hashes of their names. Collective.
void skip_batches(LoaderPositions& loaders, Communicator& communicator) {
  loaders.skip_failed();
  LoaderPositions::ByName positions = loaders.now();
  std::vector<std::uint64_t> mine;
  for (const auto& [name, at] : positions)
    mine.insert(mine.end(), {hash_bytes(name.data(), name.size()), at.epoch, at.samples});
  std::uint64_t words = mine.size();
  communicator.all_reduce(Buffer(&words, 1), ReduceOp::max).wait();
  if (words == 0) return;
  mine.resize(words);
  std::vector<std::uint64_t> all(words * static_cast<std::size_t>(communicator.size()));
  communicator.all_gather(ConstBuffer(mine.data(), words), Buffer(all.data(), all.size())).wait();
  for (auto& [name, at] : positions)
    for (std::size_t i = 0; i < all.size(); i += 3)
      if (all[i] == hash_bytes(name.data(), name.size()) &&
          std::pair(all[i + 1], all[i + 2]) > std::pair(at.epoch, at.samples))
        at = {all[i + 1], all[i + 2]};
  loaders.restore(positions);
}

JoinOptions join_options(const JoinConfig& config) {
  return {.divide_by_initial_world_size = config.divide_by_initial_world_size,
          .throw_on_early_termination = config.throw_on_early_termination};
}

}  // namespace

Engine initialize(World& world, Module& module, EngineOptions options, CallSite site) {
  const OuterSite outer(site);
  DsConfig config = read_configuration(world, module, options);
  warn_of_no_blocks(module, config);
  const bool had_lora = lora_options(module) != nullptr;
  check_on_all_ranks(world.communicator(), [&] { prepare_model(module, config); });
  if (!had_lora) initialize_updates(module, options);
  print_configuration(world, config, options);
  if (!had_lora && config.lora && options.log && world.is_main())
    std::fprintf(options.log, "%s%s\n", options.name.empty() ? "" : concat(options.name, ": ").c_str(),
                 describe_lora(module).c_str());
  return Engine(world, module, std::move(config), std::move(options));
}

struct Engine::State {
  State(World&, Module&, DsConfig, EngineOptions&);

  void make_updates(std::unique_ptr<Optimizer>, const EngineOptions&);
  void observe_communication();
  MemoryUse memory();
  /// Errc::invalid_argument if the engine has no optimizer.
  UpdateLoop& loop();
  /// A line to EngineOptions::log, with the name of the engine.
  void print(const std::string& line) const;
  void warn(const std::string& line) const { print("warning: " + line); }
  /// Of a loader of so many samples.
  std::pair<std::shared_ptr<const BatchSampler>, LoaderOptions> sampling_of(std::uint64_t samples,
                                                                            const EngineLoaderOptions&,
                                                                            bool shuffle) const;

  World& world;
  Module& module;
  DsConfig config;
  std::string name;
  std::FILE* log;  // null on other ranks than 0
  std::int64_t max_steps = -1;
  std::uint64_t seed;
  Communicator communicator;
  Mesh mesh;                           // of `communicator`
  std::shared_ptr<Communicator> data;  // the ranks with other data
  Stream stream;
  Tape tape;
  std::optional<CommsLogger> comms;
  std::optional<UpdateTrace> trace;
  std::optional<FlopsProfiler> profiler;
  std::unique_ptr<Strategy> strategy;  // declared after the tape it is attached to, so destroyed first
  std::optional<UpdateLoop> updates;   // none: inference
  std::shared_ptr<LoaderPositions> loaders = std::make_shared<LoaderPositions>();
  std::optional<Checkpointer> checkpointer;
  std::optional<TrainingCheckpoints> checkpoints;
  std::vector<std::pair<std::string, Shape>> shapes_of_graph;  // fields of the batches of an update
  std::shared_ptr<void> renewal;                               // World::on_renewal()
};

Engine::State::State(World& w, Module& model, DsConfig resolved, EngineOptions& o)
    : world(w),
      module(model),
      config(std::move(resolved)),
      name(o.name.empty() ? "" : o.name + ": "),
      log(world.is_main() ? o.log : nullptr),
      max_steps(o.arguments.max_steps.value_or(-1)),
      seed(o.seed),
      communicator(world.new_communicator(reduction_order(world, config))),
      mesh(communicator, config.mesh),
      data(data_ranks(world, mesh)),
      stream(stream_on(communicator.options().device, o.threads > 0 ? o.threads : world.threads(), config)),
      tape(stream),
      strategy(strategy_of(module, mesh, world, config, o)) {
  strategy->attach(tape);
  tape.set_autocast(config.precision.autocast);
  if (config.monitor.comms_enabled) comms.emplace(config.monitor, name, log);
  if (auto optimizer = optimizer_of(config, o)) {
    make_updates(std::move(optimizer), o);
  } else {
    module.eval();
  }
  checkpointer.emplace(CheckpointedParts{.world = world,
                                         .module = module,
                                         .strategy = *strategy,
                                         .updates = updates ? &*updates : nullptr,
                                         .loaders = loaders,
                                         .stream = stream,
                                         .accumulation = std::max<std::int64_t>(1, config.sizes.accumulation),
                                         .seed = seed,
                                         .config = resolved_json(config)},
                       initial_trainer_state(config.checkpoint));
  checkpoints.emplace(world, *checkpointer, config.checkpoint, config.file);
  if (updates)
    checkpoints->on_record([this](const Metrics& metrics) {
      for (const auto& [metric, value] : metrics)
        updates->reports().add_scalar({concat("Eval/Samples/", metric), value});
    });
  renewal = world.on_renewal([this] { updates ? updates->cancel() : strategy->drop_update(); });
  if (log) loaders->on_difference([this](const std::string& line) { warn(line); });
  checkpoints->resume();
  if (const std::string lines = checkpoints->describe_resume(); !lines.empty()) print(lines);
}

void Engine::State::observe_communication() {
  if (!comms && !trace) return;
  CommunicationObserver observer;
  observer.started = [this](const StartedCollective& c) {
    if (comms) comms->add(c);
    if (trace && trace->recording()) trace->add_collective(c);
  };
  if (trace)
    observer.waited = [this](UpdateTrace::Clock::time_point start, UpdateTrace::Clock::time_point end) {
      if (trace->recording()) trace->add_wait(start, end);
    };
  strategy->observe_communication(std::move(observer));
}

void Engine::State::make_updates(std::unique_ptr<Optimizer> optimizer, const EngineOptions& o) {
  if (!config.trace.path.empty()) trace.emplace(config.trace, world);
  updates.emplace(
      world.communicator(), *data, tape, *strategy,
      TrainingStep(*strategy, std::move(optimizer), o.lr_schedule ? *o.lr_schedule : config.schedule,
                   o.schedule_unit, config),
      UpdateReports(*data, *strategy, monitor_of(world, config.monitor, o), config.sizes.train, loaders),
      UpdateLoopOptions{.accumulation = config.sizes.accumulation,
                        .expected_terms = o.expected_terms,
                        .max_norm = config.gradient_clipping,
                        .seed = o.seed,
                        .graph = o.graph && !comms && !trace && strategy->capturable(),
                        .when_dropped = [loaders = loaders,
                                         &world = world] { skip_batches(*loaders, world.communicator()); },
                        .world_size_invariant = config.world_size_invariant,
                        .tp = mesh.sizes().tp});
  const std::string reason = strategy->reason_against_capture();
  if (o.graph && stream.device().kind == Device::cuda && !reason.empty())
    print("updates run without a CUDA graph: " + reason);
  if (config.flops_profiler.enabled) {
    profiler.emplace(config.flops_profiler, world, module, tape, config.sizes.accumulation, name, log);
    updates->reports().set_profiler(*profiler);
  }
  if (trace) updates->reports().set_trace(*trace, [this] { return memory(); });
  observe_communication();
}

std::pair<std::shared_ptr<const BatchSampler>, LoaderOptions> Engine::State::sampling_of(
    std::uint64_t samples, const EngineLoaderOptions& o, bool shuffle) const {
  const auto micro = static_cast<std::size_t>(config.sizes.micro);
  require(o.batch_size || micro > 0, Errc::config, config.file,
          ": train_micro_batch_size_per_gpu: missing; give it, or EngineLoaderOptions::batch_size");
  const BatchSamplerOptions sampling{.samples = samples,
                                     .batch_size = o.batch_size.value_or(micro),
                                     .ranks = data->size(),
                                     .rank = data->rank(),
                                     .shuffle = shuffle,
                                     .drop_last = o.drop_last.value_or(config.drop_last),
                                     .seed = o.seed.value_or(seed)};
  const auto accumulation = static_cast<std::size_t>(std::max<std::int64_t>(1, config.sizes.accumulation));
  std::shared_ptr<const BatchSampler> sampler;
  if (config.world_size_invariant)
    sampler = std::make_shared<ConsecutiveBatchSampler>(sampling, accumulation);
  else
    sampler = std::make_shared<DistributedBatchSampler>(sampling);
  return {sampler,
          {.num_workers = o.num_workers,
           .prefetch_factor = o.prefetch_factor,
           .slots = accumulation,
           .positions = loaders,
           .name = o.name.empty() ? loaders->new_name() : o.name,
           .seed = sampling.seed,
           .restart = !o.shuffle,
           .targets = o.targets,
           .ignore_index = o.ignore_index,
           .collation = o.collation,
           .buffer_size = o.buffer_size}};
}

UpdateLoop& Engine::State::loop() {
  require(updates.has_value(), Errc::invalid_argument,
          "this engine has no optimizer and does not train: add the section \"optimizer\" to the "
          "configuration, or give EngineOptions::optimizer");
  return *updates;
}

void Engine::State::print(const std::string& line) const {
  if (!log) return;
  std::fprintf(log, "%s%s\n", name.c_str(), line.c_str());
  std::fflush(log);
}

// ---- the engine

Engine::Engine(World& world, Module& module, DsConfig config, EngineOptions options)
    : state_(std::make_unique<State>(world, module, std::move(config), options)) {}

Engine::~Engine() {
  State& s = *state_;
  s.loaders->on_difference({});
  if (s.comms && s.log && std::uncaught_exceptions() == 0) {
    std::fputs(s.comms->log_summary().c_str(), s.log);
    std::fflush(s.log);
  }
  const bool stopped = s.checkpoints && s.checkpoints->decision().stops();
  if (!s.updates || stopped || std::uncaught_exceptions() > 0) return;
  const std::int64_t left = s.updates->accumulation().begun();
  if (left == 0) return;
  s.warn(
      concat("the last ", left, " of ", s.updates->accumulation().steps(),
             " micro-batches of an update have made none and are dropped: end a run with a whole update, or "
             "call set_gradient_accumulation_boundary(true) before the last backward()"));
}

Tape& Engine::tape() { return state_->tape; }

const DsConfig& Engine::config() const { return state_->config; }

World& Engine::world() const { return state_->world; }

const Mesh& Engine::mesh() const { return state_->mesh; }

const Stream& Engine::stream() const { return state_->stream; }

Strategy& Engine::strategy() { return *state_->strategy; }

Optimizer& Engine::optimizer() { return state_->loop().training().optimizer(); }

TrainingCheckpoints& Engine::checkpoints() { return *state_->checkpoints; }

const std::shared_ptr<LoaderPositions>& Engine::loader_positions() const { return state_->loaders; }

// ---- training

void Engine::backward(const nn::Loss& loss, CallSite site) {
  const OuterSite outer(site);
  state_->loop().backward(loss);
}

bool Engine::step(CallSite site) {
  const OuterSite outer(site);
  const bool updated = state_->loop().step();
  if (updated) state_->checkpointer->end_update();
  return updated;
}

bool Engine::takes_all_batches() { return state_->loop().may_capture(); }

void Engine::require_shapes_of_graph(std::span<const Batch* const> batches) {
  State& s = *state_;
  std::vector<std::pair<std::string, Shape>> shapes;
  for (const Batch* b : batches)
    for (std::size_t f = 0; f < b->fields().size(); ++f)
      shapes.emplace_back(b->fields()[f].name, (*b)[b->fields()[f].name].shape());
  if (s.loop().has_graph())
    for (std::size_t i = 0; i < std::min(shapes.size(), s.shapes_of_graph.size()); ++i)
      require(shapes[i] == s.shapes_of_graph[i], Errc::invalid_argument, "train_batch(): a batch has ",
              shapes[i].first, ' ', rz::name(shapes[i].second), "; the CUDA graph of the updates has ",
              rz::name(s.shapes_of_graph[i].second),
              ": drop the incomplete last batch (drop_last), pad to Collation::Padding::max_length, or set "
              "EngineOptions::graph to false");
  else
    s.shapes_of_graph = std::move(shapes);
}

void Engine::run_update(const std::function<nn::Loss(std::size_t)>& forward,
                        std::chrono::steady_clock::time_point start, bool stoppable) {
  State& s = *state_;
  struct Stopped {};
  const auto pass = [&](std::size_t m) {
    const auto elapsed = std::chrono::steady_clock::now() - start;
    if (stoppable && m > 0 && s.checkpoints->stop_requested_in_update(static_cast<std::int64_t>(m), elapsed))
      throw Stopped();
    return forward(m);
  };
  try {
    s.loop().run(pass, start);
  } catch (const Stopped&) {
    s.loop().abandon();
    return s.loaders->restore(s.loaders->of_update());
  }
  s.checkpointer->end_update();
}

bool Engine::is_gradient_accumulation_boundary() { return state_->loop().accumulation().boundary(); }

void Engine::set_gradient_accumulation_boundary(std::optional<bool> boundary) {
  state_->loop().accumulation().force_boundary(boundary);
}

/// What the device still computes may be the end of an update that the other ranks have made.
void Engine::cancel_update(CallSite site) {
  const OuterSite outer(site);
  State& s = *state_;
  s.loop();  // there is an optimizer
  try {
    const Event issued = s.stream.record();
    drain([&] { return issued.done(); }, Deadline::after(std::chrono::seconds(1)));
  } catch (const Error&) {  // of the device; it ended a call before
  }
  s.world.renew(concat("rank ", s.world.rank(),
                       " cancelled the update: call cancel_update() on every rank, and go on with the next"));
}

Module& Engine::begin_evaluation() {
  if (state_->updates) state_->updates->drop_graph();
  return state_->module;
}

bool Engine::should_stop(CallSite site) {
  const OuterSite outer(site);
  const std::int64_t end = state_->max_steps;
  const bool ended = end >= 0 && global_steps() >= end;
  return checkpoints().should_stop() || ended;
}

void Engine::end_epoch() { state_->loop().training().end_epoch(); }

void Engine::lr_scheduler_step(double metric, CallSite site) {
  const OuterSite outer(site);
  State& s = *state_;
  s.loop().require_between_updates("lr_scheduler_step()");
  std::vector<double> all(static_cast<std::size_t>(s.data->size()));
  s.data->all_gather(ConstBuffer(&metric, 1), Buffer(all.data(), all.size())).wait();
  const auto first = std::ranges::adjacent_find(all, std::not_equal_to());
  const double mean =
      first == all.end() ? metric : std::reduce(all.begin(), all.end()) / static_cast<double>(all.size());
  s.loop().training().step_scheduler(mean);
}

void Engine::require_distinct(std::vector<const void*> batches) {
  std::ranges::sort(batches);
  require(
      std::ranges::adjacent_find(batches) == batches.end(), Errc::invalid_argument,
      "train_batch(): next() returned one batch for two micro-batches; updates run as a CUDA graph, which "
      "needs all micro-batches of an update at once: return as many objects in turn "
      "(LoaderOptions::slots), or set EngineOptions::graph = false");
}

// ---- uneven inputs

struct Engine::Join::State {
  UpdateLoop& loop() { return engine.state_->loop(); }

  Engine& engine;
  bool enabled;
  rz::Join ranks;
  bool active = false;
};

Engine::Join::Join(Engine& engine)
    : state_(new State{engine, engine.config().ddp.join.enable,
                       rz::Join(*engine.state_->data, join_options(engine.config().ddp.join))}) {
  State& s = *state_;
  if (!s.enabled) return;
  s.loop();  // there is an optimizer
  require(engine.strategy().kind() != StrategyKind::zero3, Errc::unsupported,
          "Engine::Join: zero3 gathers values in forward and backward, on all ranks; run a rank without data "
          "on a batch of which all targets are ignored (-100), which counts no terms");
  require(!engine.mesh().tp(), Errc::unsupported, "Engine::Join on the mesh ",
          describe(engine.mesh().sizes()),
          ": the layers of other ranks need this one; give every rank as many batches (drop_last), or choose "
          "tp 1");
}

Engine::Join::~Join() = default;

bool Engine::Join::next(bool has_data, CallSite site) {
  const OuterSite outer(site);
  State& s = *state_;
  s.active = has_data;
  if (!s.enabled) return has_data;
  const bool any = s.ranks.next(has_data);
  const int without = s.engine.state_->data->size() - s.ranks.active_ranks();
  require(without == 0 || !any || !s.loop().fresh(), Errc::mismatch, "Engine::Join: ", without,
          " ranks have no batch before the first update; give every rank at least one");
  return any;
}

bool Engine::Join::active() const { return state_->active; }

void Engine::Join::backward_without_data() { state_->loop().backward_without_data(); }

float Engine::Join::loss_factor() const { return state_->ranks.loss_factor(); }

// ---- data

Loader Engine::loader(std::shared_ptr<const Dataset> dataset, const EngineLoaderOptions& o) {
  auto [sampler, options] = state_->sampling_of(dataset->size(), o, o.shuffle);
  return Loader(std::move(dataset), std::move(sampler), state_->stream, std::move(options));
}

Loader Engine::loader(std::shared_ptr<const IterableDataset> source, const EngineLoaderOptions& o) {
  auto [sampler, options] = state_->sampling_of(source->size(), o, false);
  return Loader(std::move(source), std::move(sampler), state_->stream, std::move(options));
}

Tensor Engine::gather_for_metrics(const Batch& batch, const Tensor& rows, CallSite site) {
  const OuterSite outer(site);
  State& s = *state_;
  const Tensor all = s.world.gather(rows, s.stream);
  std::vector<std::int64_t> padding(static_cast<std::size_t>(s.world.size()));
  const bool fits = rows.shape()[0] == batch.rows();
  const bool repeats = s.mesh.part().rank > 0;  // the rows of another rank
  const std::int64_t own = fits ? static_cast<std::int64_t>(repeats ? batch.rows() : batch.padding()) : -1;
  s.world.communicator().all_gather(ConstBuffer(&own, 1), Buffer(padding.data(), padding.size())).wait();
  const auto wrong = std::ranges::find(padding, -1);
  if (wrong != padding.end()) {
    const auto rank = static_cast<int>(wrong - padding.begin());
    throw Error(Errc::invalid_argument,
                concat("gather_for_metrics(): the first extent of ", rz::name(rows.shape()),
                       " is not the number of rows of the batch of rank ", rank,
                       rank == s.world.rank() ? concat(", ", batch.rows()) : ""),
                rank);
  }
  return without_padding(all, batch.rows(), padding);
}

MemoryUse Engine::State::memory() {
  MemoryUse use{.model = strategy->memory()};
  const BufferPool::Statistics pool = tape.pool().statistics();
  use.activations = pool.bytes, use.activations_in_use = pool.peak;
  for (const ModuleBuffer* b : module.buffers()) use.buffers += b->value.bytes();
  return use;
}

MemoryUse Engine::memory() { return state_->memory(); }

void Engine::abort(const std::string& reason) noexcept {
  State& s = *state_;
  for (Communicator* group : {s.mesh.tp(), s.mesh.replicas(), &s.mesh.shard(), &s.mesh.data(), s.data.get(),
                              &s.communicator, &s.world.communicator()})
    if (group != nullptr) group->abort(reason);
}

// ---- checkpoints and files

void Engine::save_checkpoint(const std::string& dir, const SaveCheckpointOptions& o, CallSite site) {
  const OuterSite outer(site);
  state_->checkpointer->save(dir, o);
}

void Engine::wait_for_checkpoint(CallSite site) {
  const OuterSite outer(site);
  state_->checkpointer->wait();
}

void Engine::save_model(const std::string& path, CallSite site) {
  const OuterSite outer(site);
  State& s = *state_;
  save_weights(path, s.module, *s.strategy, s.world.rank(), s.stream);
}

PretrainedWeights Engine::load_model(const std::string& path, const LoadOptions& o) {
  return load_model(state_->module, path, o);
}

PretrainedWeights Engine::load_model(Module& part, const std::string& path, const LoadOptions& o) {
  State& s = *state_;
  LoadOptions options = o;
  if (options.seed == 0) options.seed = s.seed;
  PretrainedWeights weights = load_pretrained(*s.strategy, part, path, options, s.stream);
  if (const std::string what = weights.describe(); !what.empty())
    s.print(concat("loaded: ", escaped(path), ": ", what));
  return weights;
}

void Engine::save_adapter(const std::string& folder, CallSite site) {
  const OuterSite outer(site);
  State& s = *state_;
  rz::save_adapter(folder, s.module, *s.strategy, s.world.rank(), s.stream);
}

PretrainedWeights Engine::load_adapter(const std::string& folder, const LoadOptions& o) {
  State& s = *state_;
  return rz::load_adapter(*s.strategy, s.module, folder, o, s.stream);
}

std::optional<LoadedCheckpoint> Engine::load_checkpoint(const std::string& dir,
                                                        const LoadCheckpointOptions& o, CallSite site) {
  const OuterSite outer(site);
  State& s = *state_;
  auto loaded = s.checkpointer->load(dir, o);
  if (!loaded) return loaded;
  const auto print_names = [&](const char* what, const std::vector<std::string>& names) {
    if (!names.empty())
      s.print(concat("loaded: ", escaped(loaded->path), ": ", what, escaped(listed(names))));
  };
  print_names("not in the checkpoint: ", loaded->missing_keys);
  print_names("not in the model: ", loaded->unexpected_keys);
  return loaded;
}

// ---- reports

const StepReport& Engine::report() { return state_->loop().reports().last(); }

void Engine::add_scalar(const std::string& tag, double value) {
  state_->loop().reports().add_scalar({tag, value});
}

std::string Engine::breakdown() { return state_->loop().reports().breakdown(); }

std::string Engine::log_summary() const { return state_->comms ? state_->comms->log_summary() : ""; }

double Engine::loss(CallSite site) {
  const OuterSite outer(site);
  return state_->loop().reports().loss(state_->stream);
}

std::int64_t Engine::global_steps() { return state_->loop().reports().steps(); }

double Engine::mean(std::span<const Mean> losses, CallSite site) {
  const OuterSite outer(site);
  return exact_mean(losses, *state_->data);
}

Mean Engine::item(const nn::Loss& loss) const {
  const State& s = *state_;
  const ops::LossSum part = loss.read(s.stream);
  return {part.sum, static_cast<double>(part.count)};
}

Mean Engine::item(const Tensor& sum_count) const {
  require(sum_count.count() == 2 && sum_count.dtype() == DType::f64, Errc::invalid_argument,
          "item() of a tensor of ", name(sum_count.dtype()), " and shape ", name(sum_count.shape()),
          ", expected f64 [2], a sum and its number of terms");
  const Tensor host = sum_count.on_host(state_->stream);
  return {host.data<double>()[0], host.data<double>()[1]};
}

}  // namespace rz
