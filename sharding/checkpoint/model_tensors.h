#pragma once
/// The parameters and buffers of a module as tensors of files.

#include <optional>
#include <string>
#include <string_view>

#include "autograd_lite/nn/module.h"
#include "comm/core/text.h"
#include "comm/core/types.h"
#include "comm/device/stream.h"
#include "sharding/checkpoint/tensor_source.h"
#include "sharding/model/flat_layout.h"

namespace rz {

/// Names in a checkpoint.
inline std::string model_tensor(std::string_view parameter) { return concat("model/", parameter); }
inline std::string buffer_tensor(std::string_view buffer) { return concat("buffer/", buffer); }
inline std::string optimizer_tensor(std::string_view state, std::string_view parameter) {
  return concat("optimizer/", state, "/", parameter);
}

/// Why a tensor cannot be read as one of f32 and of this shape; empty if it can.
std::string mismatch(const TensorInfo&, const Shape&);
/// Why it cannot be the buffer, whose dtype it has, unless both are floats and that of the buffer is f32.
std::string mismatch(const TensorInfo&, const ModuleBuffer&);

/// Writes elements of a parameter, which is the tensor or a part of it, to out[0, elements.count()). Reads
/// only those bytes.
void read_parameter(const TensorSource&, const TensorInfo&, const Parameter&, Range elements, float* out);
/// Writes a tensor to the memory of a buffer, in the order of the stream, on whose device it is.
/// Errc::invalid_argument if the buffer has no memory.
void read_buffer(const TensorSource&, const TensorInfo&, ModuleBuffer&, const Stream&);

}  // namespace rz
