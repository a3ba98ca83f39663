#include "comm/api/arguments.h"
#include "comm/communicator.h"

namespace rz {

Group::Group(Communicator& communicator)
    : communicator_(&communicator), calls_(std::make_unique<CallList>()) {}
Group::Group(Group&&) noexcept = default;
Group::~Group() = default;

Group& Group::add(CollectiveCall call, const CallSite& site) {
  call.origin = CallOrigin::of(site);
  calls_->add(call);
  return *this;
}
Caller Group::caller() const {
  return {communicator_->rank(), communicator_->size(), communicator_->options().device};
}

Group& Group::all_reduce(const Buffer& in_out, ReduceOp op, const Stream& stream, CallSite site) {
  return all_reduce(in_out, in_out, op, stream, site);
}
Group& Group::all_reduce(const ConstBuffer& in, const Buffer& out, ReduceOp op, const Stream& stream,
                         CallSite site) {
  return add(make_call(caller(), Collective::all_reduce, in, out, 0, op, stream), site);
}
Group& Group::reduce_scatter(const ConstBuffer& in, const Buffer& out, ReduceOp op, const Stream& stream,
                             CallSite site) {
  return add(make_call(caller(), Collective::reduce_scatter, in, out, 0, op, stream), site);
}
Group& Group::all_gather(const ConstBuffer& in, const Buffer& out, const Stream& stream, CallSite site) {
  return add(make_call(caller(), Collective::all_gather, in, out, 0, ReduceOp::sum, stream), site);
}
Group& Group::broadcast(const Buffer& in_out, int root, const Stream& stream, CallSite site) {
  return broadcast(in_out, in_out, root, stream, site);
}
Group& Group::broadcast(const ConstBuffer& in, const Buffer& out, int root, const Stream& stream,
                        CallSite site) {
  return add(make_call(caller(), Collective::broadcast, in, out, root, ReduceOp::sum, stream), site);
}
Group& Group::reduce(const ConstBuffer& in, const Buffer& out, int root, ReduceOp op, const Stream& stream,
                     CallSite site) {
  return add(make_call(caller(), Collective::reduce, in, out, root, op, stream), site);
}
Group& Group::gather(const ConstBuffer& in, const Buffer& out, int root, const Stream& stream,
                     CallSite site) {
  return add(make_call(caller(), Collective::gather, in, out, root, ReduceOp::sum, stream), site);
}
Group& Group::scatter(const ConstBuffer& in, const Buffer& out, int root, const Stream& stream,
                      CallSite site) {
  return add(make_call(caller(), Collective::scatter, in, out, root, ReduceOp::sum, stream), site);
}
Group& Group::all_to_all(const ConstBuffer& in, const Buffer& out, const Stream& stream, CallSite site) {
  return add(make_call(caller(), Collective::all_to_all, in, out, 0, ReduceOp::sum, stream), site);
}
Group& Group::all_to_all_v(const ConstBuffer& in, const Counts& send_counts, const Counts& send_offsets,
                           const Buffer& out, const Counts& recv_counts, const Counts& recv_offsets,
                           const Stream& stream, CallSite site) {
  return add(
      make_all_to_all_v(caller(), in, send_counts, send_offsets, out, recv_counts, recv_offsets, stream)[0],
      site);
}
Group& Group::send(const ConstBuffer& buffer, int to, const Stream& stream, CallSite site) {
  return add(make_send(caller(), buffer, to, stream), site);
}
Group& Group::recv(const Buffer& buffer, int from, const Stream& stream, CallSite site) {
  return add(make_recv(caller(), buffer, from, stream), site);
}

Work Group::launch() { return communicator_->submit(*calls_); }

}  // namespace rz
