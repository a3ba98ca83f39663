#pragma once
/// When the gradients of a flat parameter are complete.

#include <vector>

#include "comm/bucket_scheduler.h"
#include "sharding/model/flat_layout.h"
#include "sharding/model/flat_parameters.h"

namespace rz {

/// A flat parameter is complete when that of its scopes leaves backward which forward entered first: that
/// moment is the same on every rank, whichever parameters a rank did not use.
class ScopeReadiness {
 public:
  /// All references must outlive this object.
  ScopeReadiness(FlatParameters&, const ModelParameters&, const FlatLayout&);

  void begin_pass();
  /// A scope is about to run.
  void enter(const Scope&, Pass);
  /// The gradient of a member is about to be written. Errc::unsupported if its flat parameter was complete.
  void touch(int member);
  /// The gradient of a member is complete.
  void ready(int member);
  /// A scope has run backward. Passes the members of those flat parameters that are now complete to the
  /// scheduler, unless that is null.
  void leave(const Scope&, BucketScheduler*, const Stream&);
  /// No scope is open any more: the pass has failed.
  void abandon_pass() { backward_depth_ = 0; }

 private:
  enum class Progress : char { untouched, touched, ready };
  bool is_complete(const std::vector<int>& members) const;
  void begin_forward();

  FlatParameters& flat_;
  const ModelParameters& parameters_;
  const FlatLayout& layout_;
  std::vector<Progress> progress_;   // by member, in this pass
  std::vector<char> queued_;         // by flat parameter: passed to the scheduler in this pass
  std::vector<const Scope*> first_;  // by flat parameter: the scope that forward entered first
  int backward_depth_ = 0;           // scopes that are open in backward; forward scopes in them recompute
  bool ran_backward_ = false;        // since forward began
};

}  // namespace rz
