// Two updates of a small GPT-2 with ZeRO-1, one rank: every library and its dependencies are linked.

#include <ringzero/autograd_lite/models/gpt2.h>
#include <ringzero/autograd_lite/nn/init.h>
#include <ringzero/comm/communicator.h>
#include <ringzero/sharding/optim/optimizers.h>
#include <ringzero/sharding/strategy/strategy.h>

#include <cstdio>

#include "tensor/tensor.h"

int main() {
  static_assert(consumer::Tensor().words == 8);
  rz::Gpt2Config config;
  config.n_layer = 1, config.n_head = 2, config.n_embd = 16, config.n_positions = 8, config.vocab_size = 32;
  rz::Gpt2 model(config);
  auto comm = rz::Communicator::connect(0, 1, rz::memory_store());
  const auto strategy = rz::make_strategy(rz::StrategyKind::zero1, model, comm);
  rz::Tape tape(rz::Stream::host(1));
  strategy->attach(tape);
  strategy->values().fill([](const rz::Parameter& p, rz::Range elements, float* out) {
    rz::init_slice(p, {out, elements.count()}, elements.begin, 0);
  });
  const auto adam = rz::make_adamw({});
  std::int32_t words[] = {3, 1, 4, 1, 5, 9, 2, 6};
  const auto tokens = rz::Tensor::borrow(words, {1, 8}, rz::DType::i32);
  double loss[2];
  for (double& l : loss) {
    strategy->zero_grad();
    const auto out = model.forward(tape, tokens, tokens);
    strategy->begin_backward();
    tape.backward(out.loss.sum, 1.0f / 8);
    l = out.loss.read({}).sum;
    tape.reset();
    strategy->finish_gradients();
    strategy->step(*adam);
  }
  std::printf("%g %g\n", loss[0], loss[1]);
  return loss[1] < loss[0] ? 0 : 1;
}
