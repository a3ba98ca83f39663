#include "sharding/checkpoint/model_tensors.h"

#include "comm/core/error.h"

namespace rz {
namespace {

std::string shape_mismatch(const TensorInfo& t, const Shape& shape) {
  if (t.shape == extents(shape)) return "";
  return concat(t.name, " is ", name(t.shape), " where the model has ", name(shape));
}

bool has_dtype_of(const TensorInfo& t, const ModuleBuffer& b) { return t.dtype == safetensors_name(b.dtype); }

}  // namespace

std::string mismatch(const TensorInfo& t, const Shape& shape) {
  const std::string why = shape_mismatch(t, shape);
  if (!why.empty() || is_float_dtype(t.dtype)) return why;
  return concat(t.name, " is of dtype ", t.dtype, " where a float is needed");
}

std::string mismatch(const TensorInfo& t, const ModuleBuffer& b) {
  const std::string why = shape_mismatch(t, b.shape);
  if (!why.empty() || has_dtype_of(t, b) || (b.dtype == DType::f32 && is_float_dtype(t.dtype))) return why;
  return concat(t.name, " is of dtype ", t.dtype, " where the buffer has ", safetensors_name(b.dtype));
}

void read_parameter(const TensorSource& source, const TensorInfo& t, const Parameter& p, Range elements,
                    float* out) {
  p.box().for_each_run(elements.begin, elements.end,
                       [&](std::uint64_t element, std::uint64_t index, std::uint64_t count) {
                         source.read_f32(t, index, {out + (element - elements.begin), count});
                       });
}

void read_buffer(const TensorSource& source, const TensorInfo& t, ModuleBuffer& b, const Stream& stream) {
  require(b.value.defined(), Errc::invalid_argument, "the buffer ", b.name,
          " has no memory; make the strategy, or call allocate_buffers(), first");
  const Tensor on_host = Tensor::empty(b.shape, b.dtype);
  if (has_dtype_of(t, b))
    source.read_bytes(t, 0, {on_host.raw(), on_host.bytes()});
  else
    source.read_f32(t, 0, {on_host.data<float>(), on_host.count()});
  b.value.assign(std::span<const std::byte>(on_host.raw(), on_host.bytes()), stream);
}

}  // namespace rz
