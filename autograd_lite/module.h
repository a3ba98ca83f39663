#pragma once
/// Interface of a model for strategies and optimizers.

#include <span>
#include <string>
#include <vector>

#include "autograd_lite/tape.h"

namespace rz {

class Module {
 public:
  virtual ~Module() = default;
  /// Every parameter once, in order of first use.
  virtual std::vector<Parameter*> parameters() = 0;
  /// Scopes in order of use in forward. Every parameter is in at least one scope; a shared one may be in
  /// several.
  virtual std::vector<const Scope*> scopes() = 0;
};

/// Errc::invalid_argument if two parameters have the same name: their initial values would be equal, and a
/// checkpoint could not distinguish them. Called by allocate_parameters(), init_parameters() and the
/// strategies.
void require_distinct_names(std::span<Parameter* const>);

}  // namespace rz
