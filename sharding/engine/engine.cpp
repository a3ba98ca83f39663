#include "sharding/engine/engine.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <exception>
#include <functional>
#include <numeric>
#include <utility>

#include "autograd_lite/nn/init.h"
#include "comm/core/error.h"
#include "sharding/engine/read_configuration.h"
#include "sharding/huggingface/save_pretrained.h"
#include "sharding/io/text.h"
#include "sharding/parallel/rank_agreement.h"
#include "sharding/parallel/rank_consistency.h"

namespace rz {

namespace {

/// Ranks of one node have fewer threads the more ranks there are.
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

std::unique_ptr<Strategy> strategy_of(Module& module, Communicator& communicator, const DsConfig& config,
                                      const EngineOptions& o) {
  const StrategyKind kind = o.strategy ? *o.strategy : strategy_kind(config);
  const StrategyOptions options = strategy_options(config, kind, o.configure_strategy);
  const auto trains = [&] { return o.optimizer != nullptr || config.optimizer.has_value(); };
  if (!trains()) module.requires_grad_(false);
  const std::vector<Parameter*> parameters = module.parameters();
  const bool has_values = std::any_of(parameters.begin(), parameters.end(),
                                      [](const Parameter* p) { return p->value.defined(); });
  const Mesh mesh = o.mesh.empty() ? Mesh(communicator) : Mesh(communicator, o.mesh);
  auto strategy = make_strategy(kind, module, mesh, options);
  const auto from_seed = [&](const Parameter& p, Range elements, float* out) {
    init_slice(p, {out, elements.count()}, elements.begin, o.seed);
  };
  if (!has_values) strategy->values().fill(o.initial_values ? o.initial_values : from_seed);
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

}  // namespace

Engine initialize(World& world, Module& module, EngineOptions options) {
  DsConfig config = read_configuration(world, module, options);
  warn_of_no_blocks(module, config);
  print_configuration(world, config, options);
  return Engine(world, module, std::move(config), std::move(options));
}

Engine::Engine(World& world, Module& module, DsConfig config, EngineOptions o)
    : world_(world),
      module_(module),
      config_(std::move(config)),
      name_(o.name.empty() ? "" : o.name + ": "),
      log_(world.is_main() ? o.log : nullptr),
      max_steps_(o.arguments.max_steps.value_or(-1)),
      seed_(o.seed),
      communicator_(world.new_communicator(reduction_order(world, config_))),
      stream_(
          stream_on(communicator_.options().device, o.threads > 0 ? o.threads : world.threads(), config_)),
      tape_(stream_),
      strategy_(strategy_of(module, communicator_, config_, o)) {
  if (config_.checkpoint_activations) module.checkpoint_activations();
  strategy_->attach(tape_);
  tape_.set_autocast(config_.precision.autocast);
  if (auto optimizer = optimizer_of(config_, o)) {
    make_updates(std::move(optimizer), o);
  } else {
    module.eval();
  }
  checkpointer_.emplace(
      CheckpointedParts{.world = world,
                        .module = module,
                        .strategy = *strategy_,
                        .updates = updates_ ? &*updates_ : nullptr,
                        .loaders = loaders_,
                        .stream = stream_,
                        .accumulation = std::max<std::int64_t>(1, config_.sizes.accumulation),
                        .seed = seed_,
                        .config = resolved_json(config_)},
      initial_trainer_state(config_.checkpoint));
  training_checkpoints_.emplace(world, *checkpointer_, config_.checkpoint, config_.file);
  if (log_) loaders_->on_difference([this](const std::string& line) { warn(line); });
  training_checkpoints_->resume();
  if (const std::string lines = training_checkpoints_->describe_resume(); !lines.empty()) print(lines);
}

void Engine::warn(const std::string& line) const { print("warning: " + line); }

Engine::~Engine() {
  loaders_->on_difference({});
  const bool stopped = training_checkpoints_ && training_checkpoints_->decision().stops();
  if (!updates_ || stopped || std::uncaught_exceptions() > 0) return;
  const std::int64_t left = updates_->accumulation().begun();
  if (left == 0) return;
  warn(concat("the last ", left, " of ", updates_->accumulation().steps(),
              " micro-batches of an update have made none and are dropped: end a run with a whole update, or "
              "call set_gradient_accumulation_boundary(true) before the last backward()"));
}

void Engine::make_updates(std::unique_ptr<Optimizer> optimizer, const EngineOptions& o) {
  updates_.emplace(
      world_, tape_, *strategy_,
      TrainingStep(*strategy_, std::move(optimizer), o.lr_schedule ? *o.lr_schedule : config_.schedule,
                   o.schedule_unit, config_),
      UpdateReports(world_, *strategy_, monitor_of(world_, config_.monitor, o), config_.sizes.train),
      UpdateLoopOptions{.accumulation = config_.sizes.accumulation,
                        .expected_terms = o.expected_terms,
                        .seed = o.seed,
                        .graph = o.graph && strategy_->capturable(),
                        .when_dropped = [loaders = loaders_,
                                         &world = world_] { skip_batches(*loaders, world.communicator()); },
                        .world_size_invariant = config_.world_size_invariant});
}

void Engine::run_update(const std::function<nn::Loss(std::size_t)>& forward,
                        UpdateReports::Clock::time_point start, bool stoppable) {
  struct Stopped {};
  const auto pass = [&](std::size_t m) {
    const auto elapsed = UpdateReports::Clock::now() - start;
    if (stoppable && m > 0 &&
        training_checkpoints_->stop_requested_in_update(static_cast<std::int64_t>(m), elapsed))
      throw Stopped();
    return forward(m);
  };
  try {
    updates().run(pass, start);
  } catch (const Stopped&) {
    updates().abandon();
    return loaders_->restore(loaders_->of_update());
  }
  checkpointer_->end_update();
}

void Engine::lr_scheduler_step(double metric) {
  updates().require_between_updates("lr_scheduler_step()");
  std::vector<double> all(static_cast<std::size_t>(world_.size()));
  world_.communicator().all_gather(ConstBuffer(&metric, 1), Buffer(all.data(), all.size())).wait();
  const auto first = std::ranges::adjacent_find(all, std::not_equal_to());
  const double mean =
      first == all.end() ? metric : std::reduce(all.begin(), all.end()) / static_cast<double>(all.size());
  updates().training().step_scheduler(mean);
}

void Engine::require_distinct(std::vector<const void*> batches) {
  std::ranges::sort(batches);
  require(
      std::ranges::adjacent_find(batches) == batches.end(), Errc::invalid_argument,
      "train_batch(): next() returned one batch for two micro-batches; updates run as a CUDA graph, which "
      "needs all micro-batches of an update at once: return as many objects in turn "
      "(LoaderOptions::slots), or set EngineOptions::graph = false");
}

UpdateLoop& Engine::updates() {
  require(updates_.has_value(), Errc::invalid_argument,
          "this engine has no optimizer and does not train: add the section \"optimizer\" to the "
          "configuration, or give EngineOptions::optimizer");
  return *updates_;
}

// ---- data

Loader Engine::loader(std::shared_ptr<const Dataset> dataset, const EngineLoaderOptions& o) {
  const auto micro = static_cast<std::size_t>(config_.sizes.micro);
  require(o.batch_size || micro > 0, Errc::config, config_.file,
          ": train_micro_batch_size_per_gpu: missing; give it, or EngineLoaderOptions::batch_size");
  const BatchSamplerOptions sampling{.samples = dataset->size(),
                                     .batch_size = o.batch_size.value_or(micro),
                                     .ranks = world_.size(),
                                     .rank = world_.rank(),
                                     .shuffle = o.shuffle,
                                     .drop_last = o.drop_last.value_or(config_.drop_last),
                                     .seed = o.seed.value_or(seed_)};
  const auto accumulation = static_cast<std::size_t>(std::max<std::int64_t>(1, config_.sizes.accumulation));
  std::shared_ptr<const BatchSampler> sampler;
  if (config_.world_size_invariant)
    sampler = std::make_shared<ConsecutiveBatchSampler>(sampling, accumulation);
  else
    sampler = std::make_shared<DistributedBatchSampler>(sampling);
  return Loader(std::move(dataset), std::move(sampler), stream_,
                {.num_workers = o.num_workers,
                 .prefetch_factor = o.prefetch_factor,
                 .slots = accumulation,
                 .positions = loaders_,
                 .name = o.name.empty() ? loaders_->new_name() : o.name,
                 .seed = sampling.seed,
                 .restart = !o.shuffle});
}

Tensor Engine::gather_for_metrics(const Batch& batch, const Tensor& rows) {
  require(rows.shape().dims() > 0 && rows.shape()[0] == batch.rows(), Errc::invalid_argument,
          "gather_for_metrics(): the first extent of ", name(rows.shape()), " is not the number of rows, ",
          batch.rows());
  const Tensor all = world_.gather(rows, stream_);
  std::vector<std::int64_t> padding(static_cast<std::size_t>(world_.size()));
  const auto own = static_cast<std::int64_t>(batch.padding());
  world_.communicator().all_gather(ConstBuffer(&own, 1), Buffer(padding.data(), padding.size())).wait();
  return without_padding(all, batch.rows(), padding);
}

MemoryUse Engine::memory() {
  MemoryUse use{.model = strategy_->memory()};
  const BufferPool::Statistics pool = tape_.pool().statistics();
  use.activations = pool.bytes, use.activations_in_use = pool.peak;
  for (const ModuleBuffer* b : module_.buffers()) use.buffers += b->value.bytes();
  return use;
}

void Engine::abort(const std::string& reason) noexcept {
  communicator_.abort(reason);
  world_.communicator().abort(reason);
}

// ---- files

void Engine::save_model(const std::string& path) {
  save_weights(path, module_, *strategy_, world_.rank(), stream_);
}

PretrainedWeights Engine::load_model(Module& part, const std::string& path, const LoadOptions& o) {
  LoadOptions options = o;
  if (options.seed == 0) options.seed = seed_;
  PretrainedWeights weights = load_pretrained(*strategy_, part, path, options, stream_);
  if (const std::string what = weights.describe(); !what.empty())
    print(concat("loaded: ", escaped(path), ": ", what));
  return weights;
}

std::optional<LoadedCheckpoint> Engine::load_checkpoint(const std::string& dir,
                                                        const LoadCheckpointOptions& o) {
  auto loaded = checkpointer_->load(dir, o);
  if (!loaded) return loaded;
  const auto print_names = [&](const char* what, const std::vector<std::string>& names) {
    if (!names.empty()) print(concat("loaded: ", escaped(loaded->path), ": ", what, escaped(listed(names))));
  };
  print_names("not in the checkpoint: ", loaded->missing_keys);
  print_names("not in the model: ", loaded->unexpected_keys);
  return loaded;
}

void Engine::print(const std::string& line) const {
  if (!log_) return;
  std::fprintf(log_, "%s%s\n", name_.c_str(), line.c_str());
  std::fflush(log_);
}

// ---- reports

Mean Engine::item(const nn::Loss& loss) const {
  const ops::LossSum part = loss.read(stream_);
  return {part.sum, static_cast<double>(part.count)};
}

Mean Engine::item(Var scalar) const {
  const Tensor& value = tape_.value(scalar);
  require(value.count() == 1, Errc::invalid_argument, "item() of a tensor of shape ", name(value.shape()));
  return {*value.on_host(stream_).data<float>(), 1};
}

}  // namespace rz
