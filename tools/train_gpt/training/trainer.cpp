#include "tools/train_gpt/training/trainer.h"

#include <chrono>
#include <cmath>

#include "autograd_lite/init.h"
#include "sharding/data/continuous_batch_sampler.h"
#include "sharding/data/token_dataset.h"
#include "sharding/engine/configured.h"

namespace rz::train_gpt {
namespace {

std::shared_ptr<const BatchSampler> sampler(const BatchPlan& plan, std::uint64_t samples,
                                            const Communicator& comm) {
  return std::make_shared<ContinuousBatchSampler>(
      ContinuousBatchOptions{.samples = samples,
                             .batch_size = static_cast<std::size_t>(plan.sizes.micro),
                             .accumulation = static_cast<std::size_t>(plan.sizes.accumulation),
                             .ranks = comm.size(),
                             .rank = comm.rank(),
                             .shuffle = plan.shuffle,
                             .drop_last = plan.drop_last,
                             .seed = plan.seed});
}

Stream stream_on(Device device, int threads) {
  return device.kind == Device::host ? Stream::host(threads) : Stream::create(device);
}

}  // namespace

Trainer::Trainer(Gpt2& model, Tokens tokens, Communicator& comm, TrainerOptions options)
    : model_(model),
      comm_(comm),
      options_(std::move(options)),
      stream_(stream_on(comm.options().device, options_.threads)),
      tape_(stream_),
      strategy_(make_strategy(options_.strategy, model, comm, options_.strategy_options)),
      optimizer_(make_optimizer(options_.optimizer, options_.decay)),
      loader_(std::make_shared<TokenDataset>(tokens, options_.seq_len),
              sampler(options_.batches, tokens.samples(options_.seq_len), comm), stream_,
              {.slots = static_cast<std::size_t>(options_.batches.sizes.accumulation)}),
      micro_batches_(static_cast<std::size_t>(options_.batches.sizes.accumulation)),
      seeds_(options_.seed, micro_batches_.size(), {comm.rank(), comm.size()}, stream_) {
  for (int g = 0; g < optimizer_->groups(); ++g) base_rates_.push_back(optimizer_->learning_rate(g));
  strategy_->attach(tape_);
  const double samples =
      static_cast<double>(options_.batches.sizes.micro * options_.batches.sizes.accumulation);
  strategy_->set_expected_terms(samples * static_cast<double>(options_.seq_len) * comm.size());
  if (options_.strategy_options.precision.parameters == DType::f16) scaler_.emplace(options_.loss_scale);
}

void Trainer::init(std::uint64_t seed) {
  strategy_->fill_parameters([&](const Parameter& p, Range elements, float* out) {
    rz::init_slice(p, {out, elements.count()}, elements.begin, seed);
  });
}

void Trainer::load(const PretrainedWeights& checkpoint) {
  strategy_->fill_parameters(
      [&](const Parameter& p, Range elements, float* out) { checkpoint.read(p, elements, out); });
}

void Trainer::read_micro_batches() {
  for (const Batch*& batch : micro_batches_) batch = &loader_.next();
}

nn::Loss Trainer::run_micro_batch(std::size_t m) {
  tape_.seed_at(seeds_.at(m));
  const Batch& batch = *micro_batches_[m];
  const Gpt2::Output out = model_.forward(tape_, batch["inputs"], batch["targets"]);
  strategy_->backward(tape_, out.loss, m + 1 == micro_batches_.size());
  tape_.reset();
  return out.loss;
}

Trainer::LossSum Trainer::sum_losses() {
  double both[2] = {};
  for (const nn::Loss& loss : losses_) {
    const ops::LossSum part = loss.read(stream_);
    both[0] += part.sum;
    both[1] += static_cast<double>(part.count);
  }
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

void Trainer::record_outcome(UpdateReport& report) {
  const Strategy::Outcome outcome = strategy_->outcome(*optimizer_, stream_);
  report.grad_norm = outcome.norm;
  report.skipped = outcome.skipped;
  if (!scaler_) return;
  report.loss_scale = scaler_->scale();
  scaler_->update(report.skipped);
}

/// Updates that were skipped do not advance the schedule, as in DeepSpeed.
void Trainer::set_learning_rates() {
  for (int g = 0; g < optimizer_->groups(); ++g) {
    const auto group = static_cast<std::size_t>(g);
    optimizer_->set_learning_rate(g, learning_rate(options_.schedule, optimizer_->updates(),
                                                   {.base_lr = base_rates_[group], .index = group}));
  }
}

UpdateReport Trainer::update() {
  const auto start = std::chrono::steady_clock::now();
  read_micro_batches();
  seeds_.draw(step_, stream_);
  strategy_->set_loss_scale(loss_scale());
  set_learning_rates();
  UpdateReport report{.step = step_, .lr = optimizer_->learning_rate()};
  if (stream_.device().kind == Device::cuda) strategy_->next_update(*optimizer_, stream_);
  const bool as_graph = graph_.run(stream_, options_.graph && comm_.capturable(), [this] { run_update(); });
  ++step_;
  record_outcome(report);
  const LossSum all = sum_losses();
  report.loss = all.sum / all.count;
  const bool finite = std::isfinite(report.loss) && std::isfinite(report.grad_norm);
  report.diverged = !finite && !(report.skipped && options_.skip_overflow);
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  report.step_ms = seconds.count() * 1e3;
  report.tokens_per_second = all.count / seconds.count();
  report.exposed_comm_ms = as_graph ? std::nan("") : strategy_->exposed_seconds() * 1e3;
  return report;
}

std::string Trainer::sample(const std::string& prompt, std::size_t tokens, const Sampling& how) {
  graph_.drop();
  std::vector<std::int32_t> start;
  for (const unsigned char c : prompt) start.push_back(c);
  std::string text;
  for (const std::int32_t t : generate(model_, tape_, start, tokens, how)) text += static_cast<char>(t);
  return text;
}

void Trainer::save(const std::string& folder, const SaveOptions& options) {
  graph_.drop();
  save_pretrained(folder, model_, *strategy_, comm_.rank(), stream_, options);
}

}  // namespace rz::train_gpt
