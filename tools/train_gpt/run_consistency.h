#pragma once
/// Checks that all ranks were started with the same inputs.

#include "comm/communicator.h"
#include "tools/train_gpt/inputs.h"
#include "tools/train_gpt/options.h"

namespace rz::train_gpt {

/// Throws Errc::mismatch on every rank if a rank differs from rank 0; it names the first such rank and the
/// difference. Compared are flags, seed, model, configuration, data (count and hash of tokens) and checkpoint
/// (hash). Above a few MiB the hash covers samples spread over the data or checkpoint. Threads, paths and
/// devices may differ. Collective.
void require_same_run(const Options&, const Inputs&, Communicator&);

}  // namespace rz::train_gpt
