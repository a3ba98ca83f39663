#include "autograd_lite/nn/init.h"

#include <array>
#include <cmath>
#include <numbers>
#include <vector>

#include "tensor/ops.h"

namespace rz {
namespace {

using Counter = std::array<std::uint32_t, 4>;

/// Philox4x32-10: four random words, a pure function of key and counter.
Counter philox(std::uint64_t key, std::uint64_t counter, std::uint64_t stream) {
  auto k0 = static_cast<std::uint32_t>(key), k1 = static_cast<std::uint32_t>(key >> 32);
  Counter c{static_cast<std::uint32_t>(counter), static_cast<std::uint32_t>(counter >> 32),
            static_cast<std::uint32_t>(stream), static_cast<std::uint32_t>(stream >> 32)};
  for (int round = 0; round < 10; ++round, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
    const std::uint64_t a = 0xD2511F53ull * c[0], b = 0xCD9E8D57ull * c[2];
    c = {static_cast<std::uint32_t>(b >> 32) ^ c[1] ^ k0, static_cast<std::uint32_t>(b),
         static_cast<std::uint32_t>(a >> 32) ^ c[3] ^ k1, static_cast<std::uint32_t>(a)};
  }
  return c;
}

/// FNV-1a.
std::uint64_t hash(std::string_view text) {
  std::uint64_t h = 0xcbf29ce484222325ull;
  for (const unsigned char c : text) h = (h ^ c) * 0x100000001b3ull;
  return h;
}

/// In (0, 1).
double uniform(std::uint32_t word) { return (word + 0.5) * 0x1p-32; }

std::array<float, 4> normal_of(const Counter& words, double deviation) {
  std::array<float, 4> out;
  for (std::size_t i = 0; i < 4; i += 2) {
    const double radius = deviation * std::sqrt(-2 * std::log(uniform(words[i])));
    const double angle = 2 * std::numbers::pi * uniform(words[i + 1]);
    out[i] = static_cast<float>(radius * std::cos(angle));
    out[i + 1] = static_cast<float>(radius * std::sin(angle));
  }
  return out;
}

std::array<float, 4> uniform_of(const Counter& words, double bound) {
  std::array<float, 4> out;
  for (std::size_t i = 0; i < 4; ++i) out[i] = static_cast<float>(bound * (2 * uniform(words[i]) - 1));
  return out;
}

/// Elements from `begin` on of the whole tensor, from the random numbers of a seed and a name.
void draw(const Initial& initial, std::span<float> out, std::size_t begin, std::uint64_t seed,
          std::uint64_t name) {
  const std::size_t end = begin + out.size();
  for (std::size_t four = begin / 4; four * 4 < end; ++four) {
    const Counter words = philox(seed, four, name);
    const auto drawn =
        initial.kind == Initial::normal ? normal_of(words, initial.scale) : uniform_of(words, initial.scale);
    for (std::size_t i = 0; i < 4; ++i) {
      if (const std::size_t at = four * 4 + i; at >= begin && at < end) out[at - begin] = drawn[i];
    }
  }
}

}  // namespace

void init_slice(const Parameter& p, std::span<float> slice, std::size_t begin, std::uint64_t seed) {
  require(begin + slice.size() <= p.count(), Errc::invalid_argument, "initialise: elements ", begin, " to ",
          begin + slice.size(), " of ", p.name, ", which has ", p.count());
  if (p.initial.kind == Initial::constant) {
    std::fill(slice.begin(), slice.end(), p.initial.scale);
    return;
  }
  const std::uint64_t stream = hash(p.name);
  p.box().for_each_run(begin, begin + slice.size(),
                       [&](std::size_t element, std::size_t index, std::size_t count) {
                         draw(p.initial, slice.subspan(element - begin, count), index, seed, stream);
                       });
}

double random_uniform(std::uint64_t seed, std::string_view stream, std::uint64_t index) {
  return uniform(philox(seed, index / 4, hash(stream))[index % 4]);
}

void allocate_parameters(Module& module, const Allocator& allocate) {
  const auto parameters = module.parameters();
  require_distinct_names(parameters);
  for (Parameter* p : parameters) {
    if (!p->value.defined()) p->value = Tensor::empty(p->shape, DType::f32, allocate);
  }
  allocate_buffers(module, allocate);
}

void allocate_buffers(Module& module, const Allocator& allocate, const Stream& stream) {
  for (ModuleBuffer* b : module.buffers()) {
    if (b->value.defined()) continue;
    b->value = Tensor::zeros(b->shape, b->dtype, allocate);
    if (b->initial != 0) ops::fill(b->value, b->initial, stream);
  }
}

void init_parameters(Module& module, std::uint64_t seed, const Stream& stream) {
  const auto parameters = module.parameters();
  require_distinct_names(parameters);
  for (const Parameter* p : parameters) {
    std::vector<float> values(p->count());
    init_slice(*p, values, 0, seed);
    p->value.assign(std::span<const float>(values), stream);
  }
}

}  // namespace rz
