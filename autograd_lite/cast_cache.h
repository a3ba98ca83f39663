#pragma once
/// Casts of parameters that a tape keeps.

#include <cstddef>
#include <utility>
#include <vector>

#include "autograd_lite/parameter.h"
#include "autograd_lite/tape.h"

namespace rz {

/// Casts of parameters, each kept while the scope that made it is the innermost one.
class CastCache {
 public:
  void enter_scope() { outer_.push_back(std::exchange(begin_, casts_.size())); }
  void leave_scope() {
    forget();
    begin_ = outer_.back();
    outer_.pop_back();
  }
  /// Forgets those of the innermost scope.
  void forget() { casts_.resize(begin_); }
  void clear() {
    casts_.clear();
    outer_.clear();
    begin_ = 0;
  }
  void add(const Parameter& p, DType dtype, Var result) { casts_.push_back({&p, dtype, result}); }
  /// The cast of the innermost scope whose result is accepted; undefined if there is none.
  template <class F>
  Var find(const Parameter& p, DType dtype, const F& accepts) const {
    for (std::size_t i = begin_; i < casts_.size(); ++i)
      if (casts_[i].parameter == &p && casts_[i].dtype == dtype && accepts(casts_[i].result))
        return casts_[i].result;
    return {};
  }

 private:
  struct Cast {
    const Parameter* parameter;
    DType dtype;
    Var result;
  };
  std::vector<Cast> casts_;
  std::size_t begin_ = 0;           // the first cast of the innermost scope
  std::vector<std::size_t> outer_;  // those of the scopes around it
};

}  // namespace rz
