#include "sharding/model/runtime.h"

#include <span>
#include <utility>

#include "comm/core/error.h"

namespace rz {

namespace {

Communicator& along_last(const Mesh& mesh) {
  const std::span<const MeshDimension> all = mesh.dimensions();
  for (const MeshDimension& d : all.first(all.size() - 1))
    require(d.size == 1, Errc::unsupported, "a strategy on the mesh ", describe(mesh.dimensions()),
            ": it trains along the last dimension, and dimension \"", d.name, "\" has ", d.size,
            " ranks, expected 1; hybrid sharding is not supported");
  return mesh.along(all.back().name);
}

}  // namespace

Runtime::Runtime(Mesh ranks, bool offloads)
    : mesh(std::move(ranks)),
      communicator(mesh.communicator()),
      shard_group(along_last(mesh)),
      stream(Stream::create(communicator.options().device)),
      to_device(offloads ? Stream::create(communicator.options().device) : Stream()),
      to_host(offloads ? Stream::create(communicator.options().device) : Stream()),
      transient(shard_group.allocator(), [this] {
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
  return Tensor::empty({count}, dtype, shard_group.allocator());
}

void Runtime::abort(const std::string& reason) noexcept {
  shard_group.abort(reason);
  communicator.abort(reason);
}

Work Runtime::all_reduce(const Tensor& in_out, ReduceOp op, const Stream& on) {
  traffic.all_reduce.add(in_out.bytes());
  return shard_group.all_reduce(in_out.buffer(), op, on);
}

Work Runtime::reduce_scatter(const Tensor& in, const Tensor& out, ReduceOp op, const Stream& on) {
  traffic.reduce_scatter.add(in.bytes());
  return shard_group.reduce_scatter(in.buffer(), out.buffer(), op, on);
}

Work Runtime::all_gather(const Tensor& in, const Tensor& out, const Stream& on) {
  traffic.all_gather.add(out.bytes());
  return shard_group.all_gather(in.buffer(), out.buffer(), on);
}

Work Runtime::broadcast(const Tensor& in_out, int root, const Stream& on) {
  traffic.broadcast.add(in_out.bytes());
  return shard_group.broadcast(in_out.buffer(), root, on);
}

}  // namespace rz
