#pragma once
/// What a strategy and an optimizer need to know of a model.

#include <span>
#include <string>
#include <vector>

#include "autograd_lite/tape.h"

namespace rz {

class Module {
 public:
  virtual ~Module() = default;
  /// Every parameter once, in the order of first use, shared ones (tied embeddings) at their first use.
  virtual std::vector<Parameter*> parameters() = 0;
  /// In the order of use in forward. Every parameter stands in at least one; shared ones may stand in
  /// several.
  virtual std::vector<const Scope*> scopes() = 0;
};

/// Errc::invalid_argument if two parameters have one name: their initial values would be the same, and a
/// checkpoint could not tell them apart. allocate_parameters(), init_parameters() and strategies call
/// it before they give parameters memory or values.
void require_distinct_names(std::span<Parameter* const>);

}  // namespace rz
