#pragma once
/// The rules of the optimizers again, in double precision, a parameter at a time. Only the options are the
/// library's.

#include <vector>

#include "sharding/optim/optimizers.h"

namespace rz::test {

/// A parameter and its states.
struct ReferenceState {
  std::size_t rows = 0, columns = 0;  ///< of a matrix
  std::vector<double> p, first, second;
  std::vector<double> third{};  ///< made where a rule has it
};

/// Each is update number t, from 1, with the gradient g and the rate instead of options.learning_rate.
void sgd_rule(ReferenceState&, const std::vector<double>& g, const SgdOptions&, double rate, int t);
/// `decoupled`: AdamW.
void adam_rule(ReferenceState&, const std::vector<double>& g, const AdamOptions&, bool decoupled, double rate,
               int t);
void lion_rule(ReferenceState&, const std::vector<double>& g, const LionOptions&, double rate);
void adagrad_rule(ReferenceState&, const std::vector<double>& g, const AdagradOptions&, double rate, int t);
void rmsprop_rule(ReferenceState&, const std::vector<double>& g, const RmspropOptions&, double rate);
void lamb_rule(ReferenceState&, const std::vector<double>& g, const LambOptions&, double rate, int t);
/// Of a matrix.
void muon_rule(ReferenceState&, const std::vector<double>& g, const MuonOptions&, double rate);

}  // namespace rz::test
