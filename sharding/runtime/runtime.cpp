#include "sharding/runtime/runtime.h"

#include "comm/core/error.h"

namespace rz {

Runtime::Runtime(Communicator& c, bool offloads)
    : communicator(c),
      stream(Stream::create(c.options().device)),
      to_device(offloads ? Stream::create(c.options().device) : Stream()),
      to_host(offloads ? Stream::create(c.options().device) : Stream()),
      transient(c.allocator(), [this] {
        require(
            !stream.capturing(), Errc::invalid_argument,
            "an update that is captured in a graph needs other memory than those before; run more updates "
            "without capture first");
        stream.synchronize();
      }) {}

const Stream& Runtime::stream_for(const Stream& given) const {
  const bool named = given.device().kind == Device::cuda || given.threads() > 1;
  return named && given.device() == stream.device() ? given : stream;
}

Tensor Runtime::allocate_flat(std::size_t count, DType dtype) const {
  return Tensor::empty({count}, dtype, communicator.allocator());
}

Work Runtime::all_reduce(const Tensor& in_out, ReduceOp op, const Stream& on) {
  traffic.all_reduce.add(in_out.bytes());
  return communicator.all_reduce(in_out.buffer(), op, on);
}

Work Runtime::reduce_scatter(const Tensor& in, const Tensor& out, ReduceOp op, const Stream& on) {
  traffic.reduce_scatter.add(in.bytes());
  return communicator.reduce_scatter(in.buffer(), out.buffer(), op, on);
}

Work Runtime::all_gather(const Tensor& in, const Tensor& out, const Stream& on) {
  traffic.all_gather.add(out.bytes());
  return communicator.all_gather(in.buffer(), out.buffer(), on);
}

}  // namespace rz
