#include "sharding/model/model_parameters.h"

#include "comm/core/error.h"

namespace rz {

ModelParameters::ModelParameters(std::span<Parameter* const> parameters) {
  for (Parameter* p : parameters) {
    had_values_ |= p->value.defined();
    if (p->requires_grad) member_of_[p] = static_cast<int>(members_.size());
    (p->requires_grad ? members_ : frozen_).push_back(p);
  }
}

int ModelParameters::member_of(const Parameter& p) const {
  const auto found = member_of_.find(&p);
  return found == member_of_.end() ? -1 : found->second;
}

void ModelParameters::require_trainable(const char* call) const {
  for (const Parameter* p : members_)
    require(p->requires_grad, Errc::invalid_argument, call, ": ", p->name,
            " was frozen after the strategy was made, which still has its gradient and state; make a new "
            "strategy");
}

}  // namespace rz
