#pragma once
/// When the gradients of a flat parameter are complete.

#include <vector>

#include "comm/bucket_scheduler.h"
#include "sharding/layout/flat_layout.h"
#include "sharding/layout/flat_parameters.h"

namespace rz {

/// A flat parameter is complete when the earliest of its scopes leaves backward: that moment is the same on
/// every rank, whichever parameters a rank did not use.
class ScopeReadiness {
 public:
  /// All references must outlive this object.
  ScopeReadiness(FlatParameters&, const ModelParameters&, const FlatLayout&);

  void begin_pass();
  /// The gradient of a member is about to be written. Errc::unsupported if its flat parameter was complete.
  void touch(int member);
  /// The gradient of a member is complete.
  void ready(int member);
  /// Passes the members of those flat parameters that are now complete to the scheduler.
  void leave(const Scope&, BucketScheduler&, const Stream&);

 private:
  enum class Progress : char { untouched, touched, ready };
  bool is_complete(const std::vector<int>& members) const;

  FlatParameters& flat_;
  const ModelParameters& parameters_;
  const FlatLayout& layout_;
  std::vector<Progress> progress_;  // by member, in this pass
  std::vector<char> queued_;        // by flat parameter: passed to the scheduler in this pass
};

}  // namespace rz
