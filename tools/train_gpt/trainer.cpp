#include "tools/train_gpt/trainer.h"

#include <chrono>
#include <cmath>

#include "autograd_lite/init.h"
#include "comm/device/memory.h"

namespace rz::train_gpt {
namespace {

std::unique_ptr<Optimizer> make_optimizer(const OptimizerConfig& o) {
  const AdamOptions adam{o.lr, o.beta1, o.beta2, o.eps, o.weight_decay};
  switch (o.type) {
    case OptimizerConfig::Type::adam:
      return make_adam(adam);
    case OptimizerConfig::Type::adamw:
      return make_adamw(adam);
    case OptimizerConfig::Type::sgd:
      return make_sgd({o.lr, o.momentum, o.weight_decay, o.nesterov});
  }
  fail(Errc::invalid_argument, "an optimizer that is none");
}

BatchPlan of_rank(BatchPlan plan, const Communicator& comm) {
  plan.rank = comm.rank();
  plan.ranks = comm.size();
  return plan;
}

Stream stream_on(Device device, int threads) {
  return device.kind == Device::host ? Stream::host(threads) : Stream::create(device);
}

}  // namespace

Trainer::Trainer(Gpt2& model, Tokens tokens, Communicator& comm, TrainerOptions options)
    : model_(model),
      tokens_(std::move(tokens)),
      comm_(comm),
      options_(std::move(options)),
      batches_(of_rank(options_.batches, comm)),
      stream_(stream_on(comm.options().device, options_.threads)),
      tape_(stream_),
      strategy_(make_strategy(options_.strategy, model, comm, options_.strategy_options)),
      optimizer_(make_optimizer(options_.optimizer)) {
  const Shape shape{static_cast<std::size_t>(options_.batches.sizes.micro), options_.seq_len};
  for (std::int64_t m = 0; m < options_.batches.sizes.accumulation; ++m)
    micro_batches_.push_back({Tensor::empty(shape, DType::i32, allocator_on(stream_.device())),
                              Tensor::empty(shape, DType::i32, allocator_on(stream_.device()))});
  next_inputs_.resize(shape.count());
  next_targets_.resize(shape.count());
  next_seeds_.resize(micro_batches_.size());
  seeds_ = std::reinterpret_pointer_cast<std::uint64_t>(
      allocate_on(stream_.device(), next_seeds_.size() * sizeof(std::uint64_t)));
  strategy_->attach(tape_);
  if (options_.strategy_options.precision.parameters == DType::f16) scaler_.emplace(options_.loss_scale);
}

void Trainer::init(std::uint64_t seed) {
  strategy_->fill_parameters([&](const Parameter& p, Range elements, float* out) {
    rz::init_slice(p, {out, elements.count()}, elements.begin, seed);
  });
}

void Trainer::load(const Checkpoint& checkpoint) {
  strategy_->fill_parameters(
      [&](const Parameter& p, Range elements, float* out) { checkpoint.read(p, elements, out); });
}

/// Every micro-batch of every rank has its own dropout seed.
void Trainer::draw_seeds() {
  const auto rank = static_cast<std::uint64_t>(comm_.rank()),
             ranks = static_cast<std::uint64_t>(comm_.size());
  const std::uint64_t first = step_ * next_seeds_.size();
  for (std::size_t m = 0; m < next_seeds_.size(); ++m)
    next_seeds_[m] = options_.seed ^ ((first + m) * ranks + rank + 1) * 0x9e3779b97f4a7c15u;
  memcpy_async(seeds_.get(), next_seeds_.data(), next_seeds_.size() * sizeof(std::uint64_t), stream_);
}

void Trainer::read_micro_batches() {
  for (std::size_t m = 0; m < micro_batches_.size(); ++m) {
    read_samples(tokens_, batches_.indices(step_, m), options_.seq_len, next_inputs_, next_targets_);
    micro_batches_[m].inputs.assign(std::span<const std::int32_t>(next_inputs_), stream_);
    micro_batches_[m].targets.assign(std::span<const std::int32_t>(next_targets_), stream_);
  }
}

nn::CrossEntropy Trainer::run_micro_batch(std::uint64_t m) {
  const auto accumulation = static_cast<std::uint64_t>(options_.batches.sizes.accumulation);
  tape_.seed_at(seeds_.get() + m);
  const MicroBatch& batch = micro_batches_[static_cast<std::size_t>(m)];
  const Gpt2::Output out = model_.forward(tape_, batch.inputs, batch.targets);
  strategy_->begin_backward(m + 1 == accumulation);
  tape_.backward(out.loss.loss, static_cast<float>(loss_scale() / static_cast<double>(accumulation)));
  tape_.reset();
  return out.loss;
}

Trainer::LossSum Trainer::sum_over_ranks(LossSum mine) {
  double both[2] = {mine.sum, mine.count};
  comm_.all_reduce(Buffer(both, 2)).wait();
  return {both[0], both[1]};
}

void Trainer::run_update() {
  strategy_->zero_grad();
  losses_.clear();
  for (std::size_t m = 0; m < micro_batches_.size(); ++m) losses_.push_back(run_micro_batch(m));
  strategy_->finish_gradients(stream_);
  strategy_->clip_and_step(*optimizer_, {.max_norm = options_.gradient_clipping, .skip_overflow = true},
                           stream_);
}

/// Memory allocation settles in the second update after buckets were rebuilt.
bool Trainer::may_capture() const {
  constexpr int warmup_updates = 3;
  return options_.graph && comm_.capturable() && uncaptured_updates_ >= warmup_updates;
}

void Trainer::run_update_as_graph() {
  if (!graph_.defined() || captured_scale_ != loss_scale()) {
    graph_ = {};
    graph_ = capture(stream_, [this] { run_update(); });
    captured_scale_ = loss_scale();
  }
  graph_.launch(stream_);
}

void Trainer::record_outcome(UpdateReport& report) {
  const Strategy::Outcome outcome = strategy_->outcome(*optimizer_, stream_);
  report.grad_norm = outcome.norm;
  report.skipped = outcome.skipped;
  if (!scaler_) return;
  report.loss_scale = scaler_->scale();
  scaler_->update(report.skipped);
}

UpdateReport Trainer::update() {
  const auto start = std::chrono::steady_clock::now();
  read_micro_batches();
  draw_seeds();
  strategy_->set_loss_scale(loss_scale());
  UpdateReport report{.step = step_, .lr = optimizer_->learning_rate()};
  if (stream_.device().kind == Device::cuda) strategy_->next_update(*optimizer_, stream_);
  const bool as_graph = may_capture();
  if (as_graph) {
    run_update_as_graph();
  } else {
    run_update();
    ++uncaptured_updates_;
  }
  ++step_;
  record_outcome(report);
  LossSum mine;
  for (const nn::CrossEntropy& loss : losses_) {
    const ops::LossSum part = loss.read(stream_);
    mine.sum += part.sum;
    mine.count += static_cast<double>(part.count);
  }
  const LossSum all = sum_over_ranks(mine);
  report.loss = all.sum / all.count;
  const bool finite = std::isfinite(report.loss) && std::isfinite(report.grad_norm);
  report.diverged = !finite && !(report.skipped && options_.skip_overflow);
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  report.step_ms = seconds.count() * 1e3;
  report.tokens_per_second = all.count / seconds.count();
  report.exposed_comm_ms = as_graph ? std::nan("") : strategy_->exposed_seconds() * 1e3;
  return report;
}

void Trainer::drop_graph() {
  graph_ = {};
  uncaptured_updates_ = 0;
}

std::string Trainer::sample(const std::string& prompt, std::size_t tokens, const Sampling& how) {
  drop_graph();
  std::vector<std::int32_t> start;
  for (const unsigned char c : prompt) start.push_back(c);
  std::string text;
  for (const std::int32_t t : generate(model_, tape_, start, tokens, how)) text += static_cast<char>(t);
  return text;
}

void Trainer::save(const std::string& path, bool nonfinite) {
  drop_graph();
  save_model(path, model_.parameters(), *strategy_, comm_.rank(), stream_, nonfinite);
}

}  // namespace rz::train_gpt
