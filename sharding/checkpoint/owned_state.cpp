#include "sharding/checkpoint/owned_state.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <string>
#include <utility>

#include "autograd_lite/nn/module.h"
#include "comm/core/error.h"
#include "sharding/checkpoint/model_tensors.h"
#include "sharding/strategy/optimizer_state.h"

namespace rz {
namespace {

std::optional<Box> box_of(const Parameter& p) {
  return p.part && !p.part->is_whole() ? p.part : std::nullopt;
}

ShardSlice slice_of(std::string tensor, const ParameterElements& of, bool finite) {
  return {.tensor = std::move(tensor),
          .shape = extents(of.parameter->global_shape()),
          .slice = {.box = box_of(*of.parameter), .begin = of.elements.begin, .end = of.elements.end},
          .finite = finite};
}

std::map<const Parameter*, std::string> parameter_names(Module& module) {
  std::map<const Parameter*, std::string> names;
  for (const auto& [name, p] : module.named_parameters()) names[p] = name;
  return names;
}

std::span<const std::byte> slice_bytes(const float* values, Range elements) {
  return std::as_bytes(std::span(values, elements.count()));
}

}  // namespace

OwnedState::OwnedState(Module& module, const Strategy& strategy, const Options& options, const Stream& stream)
    : strategy_(strategy), options_(options), stream_(stream) {
  const auto names = parameter_names(module);
  for (const ParameterElements& of : strategy.values().owned())
    if (!options.left_out.contains(of.parameter))
      slices_.push_back(slice_of(model_tensor(names.at(of.parameter)), of, options.finite));
  for (const auto& [state, of] : strategy.optimizer_state().owned())
    slices_.push_back(slice_of(optimizer_tensor(state, names.at(of.parameter)), of, options.finite));
  if (!options.buffers) return;
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
      [&](const Parameter&, Range elements, const float* values) { f(slice_bytes(values, elements)); },
      [&](const Parameter& p) { return !options_.left_out.contains(&p); });
  strategy_.optimizer_state().visit([&](const std::string&, const Parameter&, Range elements,
                                        const float* values) { f(slice_bytes(values, elements)); });
  for (const auto& [name, b] : buffers_) {
    const Tensor value = b->value.on_host(stream_);
    f({value.raw(), value.bytes()});
  }
}

// ---- the file

namespace {

std::vector<SafetensorsSpec> specs(std::span<const ShardSlice> slices) {
  std::vector<SafetensorsSpec> all;
  for (const ShardSlice& s : slices)
    all.push_back({slice_name(s.tensor, s.slice), {s.slice.count()}, s.dtype});
  return all;
}

/// Exponents of all ones, by a loop without branches.
void refuse_nonfinite(const std::string& tensor, std::span<const std::byte> floats) {
  constexpr std::uint32_t exponent = 0x7f800000;
  std::uint32_t found = 0;
  for (std::size_t at = 0; at + sizeof found <= floats.size(); at += sizeof found) {
    std::uint32_t bits;
    std::memcpy(&bits, floats.data() + at, sizeof bits);
    found |= (bits & exponent) == exponent;
  }
  require(!found, Errc::diverged, tensor,
          " has an element that is not finite; nothing is saved, and earlier "
          "checkpoints are as before (SaveCheckpointOptions::nonfinite, --save-nonfinite)");
}

}  // namespace

ShardWriter::ShardWriter(const std::string& path, std::span<const ShardSlice> slices)
    : file_(path, specs(slices)) {
  for (const ShardSlice& s : slices) {
    bytes_.push_back(s.slice.count() * size_of(s.dtype));
    finite_.push_back(s.finite && s.dtype == DType::f32 ? s.tensor : "");
  }
}

void ShardWriter::write(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    require(slice_ < bytes_.size(), Errc::invalid_argument, "ShardWriter: more bytes than the slices have");
    const auto part = bytes.first(std::min(bytes.size(), bytes_[slice_] - written_));
    check(part);
    file_.write(part);
    written_ += part.size();
    bytes = bytes.subspan(part.size());
    if (written_ < bytes_[slice_]) continue;
    checksums_.push_back(std::exchange(checksum_, Checksum()).value());
    ++slice_, written_ = 0;
  }
}

/// In parts that stay in the cache between the two.
void ShardWriter::check(std::span<const std::byte> bytes) {
  constexpr std::size_t max = std::size_t{64} << 10;
  while (!bytes.empty()) {
    const auto part = bytes.first(std::min(bytes.size(), max));
    if (!finite_[slice_].empty()) refuse_nonfinite(finite_[slice_], part);
    checksum_.add(part);
    bytes = bytes.subspan(part.size());
  }
}

std::vector<std::uint64_t> ShardWriter::finish() {
  file_.finish();
  return std::move(checksums_);
}

}  // namespace rz
