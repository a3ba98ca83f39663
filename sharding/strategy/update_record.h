#pragma once
/// What the passes of an update did that other ranks take part in.

#include <algorithm>
#include <cstddef>
#include <span>
#include <vector>

#include "autograd_lite/hooks.h"

namespace rz {

/// Records the steps of an update. Those of the update before predict how one that has failed on this rank
/// goes on elsewhere; that of the first one is expected. Not thread-safe; allocates only in the first
/// updates.
class UpdateRecord {
 public:
  struct Step {
    enum Kind : char { enter, leave, begin, touch, ready, finish } kind = finish;
    Pass pass = Pass::forward;     ///< of enter and leave
    bool synchronises = false;     ///< of begin
    int member = -1;               ///< of touch and ready
    const Scope* scope = nullptr;  ///< of enter and leave; null: of any, where a forward pass begins
    bool operator==(const Step&) const = default;
  };

  /// What is recorded of scopes if they do not communicate, on a rank without data too.
  static Step forward_begins() { return {.kind = Step::enter, .pass = Pass::forward}; }

  void add(const Step& step) { now_.push_back(step); }
  /// The update has succeeded.
  void end_update() { before_.swap(now_), now_.clear(); }
  /// The update is dropped.
  void clear() { now_.clear(); }
  /// Before the first update has succeeded: passes are expected to run scopes in this order, and backward in
  /// the reverse one; the last one synchronises. No scopes: they do not communicate.
  void expect(std::span<const Scope* const> scopes, int passes) {
    if (!before_.empty()) return;
    for (int p = 1; p <= passes; ++p) {
      if (scopes.empty()) before_.push_back(forward_begins());
      for (const Scope* s : scopes) add_visit(before_, *s, Pass::forward);
      before_.push_back({.kind = Step::begin, .synchronises = p == passes});
      for (auto s = scopes.rbegin(); s != scopes.rend(); ++s) add_visit(before_, **s, Pass::backward);
    }
    before_.push_back({});
  }
  /// What this update has not done yet up to the next finish, if it has gone like the one before so far;
  /// otherwise nothing. Gradients that have begun may be there again.
  std::vector<Step> rest() const {
    auto from = before_.begin();
    for (const Step& step : now_) {
      if (is_gradient(step)) continue;
      from = std::find_if_not(from, before_.end(), is_gradient);
      if (from == before_.end() || *from != step) return {};
      ++from;
    }
    return {from, std::find_if(from, before_.end(), [](const Step& s) { return s.kind == Step::finish; })};
  }

 private:
  static void add_visit(std::vector<Step>& to, const Scope& scope, Pass pass) {
    to.push_back({.kind = Step::enter, .pass = pass, .scope = &scope});
    to.push_back({.kind = Step::leave, .pass = pass, .scope = &scope});
  }
  static bool is_gradient(const Step& s) { return s.kind == Step::touch || s.kind == Step::ready; }

  std::vector<Step> now_, before_;
};

}  // namespace rz
