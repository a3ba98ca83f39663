#include "sharding/engine/engine.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <utility>

#include "autograd_lite/init.h"
#include "comm/core/error.h"
#include "sharding/engine/read_configuration.h"
#include "sharding/world/rank_agreement.h"

namespace rz {

namespace {

Stream stream_on(Device device, int threads) {
  return device.kind == Device::host ? Stream::host(threads) : Stream::create(device);
}

std::unique_ptr<Strategy> strategy_of(Module& module, Communicator& communicator, const DsConfig& config,
                                      const EngineOptions& o) {
  StrategyOptions options = strategy_options(config);
  if (o.configure_strategy) o.configure_strategy(options);
  const auto trains = [&] { return o.optimizer != nullptr || config.optimizer.has_value(); };
  if (!trains()) module.requires_grad_(false);
  const StrategyKind kind = o.strategy ? *o.strategy : strategy_kind(config);
  const std::vector<Parameter*> parameters = module.parameters();
  const bool has_values = std::any_of(parameters.begin(), parameters.end(),
                                      [](const Parameter* p) { return p->value.defined(); });
  auto strategy = make_strategy(kind, module, communicator, options);
  if (!has_values)
    strategy->fill_parameters([&](const Parameter& p, Range elements, float* out) {
      init_slice(p, {out, elements.count()}, elements.begin, o.seed);
    });
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
  if (config.activation_checkpointing.enabled() && !blocks)
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
      schedule_unit_(o.schedule_unit),
      seed_(o.seed),
      expected_terms_(o.expected_terms),
      communicator_(world.new_communicator()),
      stream_(stream_on(communicator_.options().device, o.threads > 0 ? o.threads : world.threads())),
      tape_(stream_),
      strategy_(strategy_of(module, communicator_, config_, o)),
      accumulation_(std::max<std::int64_t>(1, config_.sizes.accumulation)),
      seeds_(o.seed, static_cast<std::size_t>(accumulation_.steps()), {world.rank(), world.size()}, stream_),
      monitor_(monitor_of(world, config_.monitor, o)),
      update_start_(std::chrono::steady_clock::now()) {
  may_use_graph_ = o.graph && communicator_.capturable() && !monitor_.times().enabled();
  if (config_.activation_checkpointing.enabled()) module.checkpoint_activations();
  strategy_->attach(tape_);
  if (expected_terms_) strategy_->set_expected_terms(*expected_terms_);
  if (auto optimizer = optimizer_of(config_, o))
    training_.emplace(*strategy_, std::move(optimizer), o.lr_schedule ? *o.lr_schedule : config_.schedule,
                      config_);
  else
    module.eval();
  tape_.seed(seeds_.of_pass(0));
}

Engine::~Engine() = default;

TrainingStep& Engine::training() {
  require(training_.has_value(), Errc::invalid_argument,
          "this engine has no optimizer and does not train: add the section \"optimizer\" to the "
          "configuration, or give EngineOptions::optimizer");
  return *training_;
}

Optimizer& Engine::optimizer() { return training().optimizer(); }

// ---- updates

void Engine::prepare_update() {
  training_->prepare(schedule_unit_ == ScheduleUnit::epoch ? epochs_ : training_->optimizer().updates(),
                     stream_);
}

void Engine::expect_terms(const nn::Loss& loss) {
  if (expected_terms_) return;
  const double terms = world_.reduce(static_cast<double>(loss.read(stream_).count), ReduceOp::sum);
  expected_terms_ = std::max(1.0, terms * static_cast<double>(accumulation_.steps()));
  strategy_->set_expected_terms(*expected_terms_);
}

void Engine::complete_update() {
  report_ = {.step = steps_++};
  const auto now = std::chrono::steady_clock::now();
  report_.ran_graph = graph_.defined();
  report_.exposed_seconds = report_.ran_graph ? std::nan("") : strategy_->exposed_seconds();
  accumulation_.next_update();
  tape_.seed(seeds_.of_pass(passes_));
  try {
    training_->complete(stream_, report_);
  } catch (...) {
    report_.seconds = std::chrono::duration<double>(now - update_start_).count();
    throw;
  }
  report_.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - update_start_).count();
  update_start_ = std::chrono::steady_clock::now();
}

// ---- pass by pass

bool Engine::begin_pass() {
  training();
  monitor_.times().end(Phase::forward, stream_);
  if (accumulation_.fresh()) {
    drop_graph();
    losses_.clear();
    prepare_update();
  }
  if (std::exchange(reducing_, false)) strategy_->finish_gradients(stream_);
  return accumulation_.boundary() && no_syncs_ == 0;
}

void Engine::end_pass(bool synchronised) {
  reducing_ = synchronised;
  tape_.reset();
  accumulation_.count_pass();
  monitor_.times().end(Phase::backward, stream_);
  tape_.seed(seeds_.of_pass(++passes_));
}

void Engine::backward(const nn::Loss& loss) {
  const bool synchronise = begin_pass();
  expect_terms(loss);
  strategy_->backward(tape_, loss, synchronise);
  losses_.add(loss);
  end_pass(synchronise);
}

void Engine::backward(Var loss) {
  const bool synchronise = begin_pass();
  strategy_->begin_backward(synchronise);
  tape_.backward(loss,
                 static_cast<float>(training_->loss_scale() / static_cast<double>(accumulation_.steps())));
  end_pass(synchronise);
}

bool Engine::step() {
  training();
  require(no_syncs_ == 0, Errc::unsynchronised,
          "step() inside NoSync: gradients would differ over the ranks, and so would the parameters; end "
          "NoSync before the last backward() of an update, or leave it out: micro-batches before the last "
          "do not synchronise anyway");
  require(accumulation_.passes() > 0, Errc::invalid_argument,
          "step() without a backward() since the last step()");
  if (!accumulation_.boundary()) {
    accumulation_.next_micro_batch();
    return false;
  }
  reducing_ = false;
  training_->apply(stream_);
  monitor_.times().end(Phase::step, stream_);
  complete_update();
  strategy_->zero_grad();
  write_report();
  return true;
}

void Engine::cancel_update() {
  training();
  tape_.reset();
  strategy_->cancel_update(stream_);
  reducing_ = false;
  accumulation_.next_update();
  losses_.clear();
}

// ---- update by update

void Engine::run_update(const std::function<nn::Loss(std::size_t)>& forward) {
  training();
  require(
      accumulation_.fresh(), Errc::invalid_argument,
      "train_batch() in the middle of an update: call step() for the last backward(), or cancel_update()");
  seeds_.draw(passes_, stream_);
  prepare_update();
  graph_.run(stream_, may_use_graph_, [&] { run_passes(forward); });
  passes_ += static_cast<std::uint64_t>(accumulation_.steps());
  complete_update();
  write_report();
}

/// May be captured: everything that differs from one update to the next is in memory.
void Engine::run_passes(const std::function<nn::Loss(std::size_t)>& forward) {
  const auto steps = static_cast<std::size_t>(accumulation_.steps());
  strategy_->zero_grad();
  losses_.clear();
  for (std::size_t m = 0; m < steps; ++m) {
    tape_.seed_at(seeds_.at(m));
    const nn::Loss loss = forward(m);
    monitor_.times().end(Phase::forward, stream_);
    expect_terms(loss);
    strategy_->backward(tape_, loss, m + 1 == steps);
    losses_.add(loss);
    tape_.reset();
    monitor_.times().end(Phase::backward, stream_);
  }
  training_->apply(stream_);
  monitor_.times().end(Phase::step, stream_);
}

void Engine::drop_graph() { graph_.drop(); }

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
  return Loader(std::move(dataset), std::make_shared<DistributedBatchSampler>(sampling), stream_,
                {.num_workers = o.num_workers,
                 .prefetch_factor = o.prefetch_factor,
                 .slots = static_cast<std::size_t>(accumulation_.steps())});
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

// ---- reports

void Engine::write_report() {
  if (!monitor_.needs_loss(report_.step)) return;
  monitor_.write(report_, loss(), global_samples(), skipped_steps(), strategy_->memory());
}

double Engine::loss() { return world_.reduce(losses_.read(stream_)); }

}  // namespace rz
