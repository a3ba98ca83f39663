#include "sharding/strategy/parameter_values.h"

namespace rz {

void ParameterValues::fill(const Fill& fill, const ValueAccess::Selection& selected) {
  const ValueAccess::Selection all = [](const Parameter&) { return true; };
  agreement_.mark_values_written();
  comparison_.record(fill, selected ? selected : all);
  access_.fill(fill, selected ? selected : all);
  filled_ = true;
}

Tensor ParameterValues::whole(const Parameter& p, const Stream& given) {
  const Tensor value = access_.whole(p);
  const Stream& stream = runtime_.stream;
  if (stream.device().kind == Device::cuda) runtime_.stream_for(given).wait(stream.record());
  return value;
}

void ParameterValues::compare(const Stream& stream) {
  comparison_.require_same_scopes(agreement_);
  if (!agreement_.values_need_check() || stream.capturing()) return;
  comparison_.require_same_values();
  agreement_.mark_values_checked();
}

}  // namespace rz
