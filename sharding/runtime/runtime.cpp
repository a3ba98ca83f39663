#include "sharding/runtime/runtime.h"

namespace rz {

Runtime::Runtime(Communicator& c)
    : communicator(c),
      stream(Stream::create(c.options().device)),
      transient(c.allocator(), [this] { stream.synchronize(); }) {}

const Stream& Runtime::stream_for(const Stream& given) const {
  const bool named = given.device().kind == Device::cuda || given.threads() > 1;
  return named && given.device() == stream.device() ? given : stream;
}

Tensor Runtime::allocate_flat(std::size_t count, DType dtype) const {
  return Tensor::empty({count}, dtype, communicator.allocator());
}

}  // namespace rz
