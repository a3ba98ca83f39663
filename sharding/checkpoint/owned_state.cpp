#include "sharding/checkpoint/owned_state.h"

#include <map>
#include <string>

#include "autograd_lite/nn/module.h"
#include "sharding/checkpoint/tensor_names.h"

namespace rz {
namespace {

std::optional<Box> box_of(const Parameter& p) {
  if (!p.slice || p.slice->is_whole()) return std::nullopt;
  Box box;
  for (int d = 0; d < p.shape.dims(); ++d) {
    box.offset.push_back((*p.slice)[d].begin);
    box.extent.push_back((*p.slice)[d].count());
  }
  return box;
}

ShardSlice slice_of(std::string tensor, const ParameterElements& of, bool finite) {
  return {.tensor = std::move(tensor),
          .shape = extents(of.parameter->global_shape()),
          .slice = {.box = box_of(*of.parameter), .begin = of.elements.begin, .end = of.elements.end},
          .finite = finite};
}

std::map<const Parameter*, std::string> names_of(Module& module) {
  std::map<const Parameter*, std::string> names;
  for (const auto& [name, p] : module.named_parameters()) names[p] = name;
  return names;
}

std::span<const std::byte> bytes_of(const float* values, Range elements) {
  return std::as_bytes(std::span(values, elements.count()));
}

}  // namespace

OwnedState::OwnedState(Module& module, const Strategy& strategy, bool buffers, bool finite,
                       const Stream& stream)
    : strategy_(strategy), stream_(stream) {
  const auto names = names_of(module);
  for (const ParameterElements& of : strategy.values().owned())
    slices_.push_back(slice_of(model_tensor(names.at(of.parameter)), of, finite));
  for (const auto& [state, of] : strategy.optimizer_state().owned())
    slices_.push_back(slice_of(optimizer_tensor(state, names.at(of.parameter)), of, finite));
  if (!buffers) return;
  for (const auto& [name, b] : persistent_buffers(module)) {
    if (b->shape.count() == 0) continue;
    buffers_.emplace_back(name, b);
    slices_.push_back({.tensor = buffer_tensor(name),
                       .shape = extents(b->shape),
                       .dtype = b->dtype,
                       .slice = {.begin = 0, .end = b->shape.count()}});
  }
}

std::size_t OwnedState::bytes() const {
  std::size_t n = 0;
  for (const ShardSlice& s : slices_) n += s.slice.count() * size_of(s.dtype);
  return n;
}

void OwnedState::read(const std::function<void(std::span<const std::byte>)>& f) const {
  strategy_.values().visit_owned(
      [&](const Parameter&, Range elements, const float* values) { f(bytes_of(values, elements)); });
  strategy_.optimizer_state().visit([&](const std::string&, const Parameter&, Range elements,
                                        const float* values) { f(bytes_of(values, elements)); });
  for (const auto& [name, b] : buffers_) {
    const Tensor value = b->value.on_host(stream_);
    f({value.raw(), value.bytes()});
  }
}

}  // namespace rz
