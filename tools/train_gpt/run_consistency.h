#pragma once
/// Whether the ranks were started alike.

#include "comm/communicator.h"
#include "tools/train_gpt/inputs.h"
#include "tools/train_gpt/options.h"

namespace rz::train_gpt {

/// Errc::mismatch on every rank, naming the first rank that differs from rank 0, and in what: flags, seed,
/// model, configuration, data (count and hash of tokens), checkpoint (hash). Of data and checkpoints above a
/// few MiB the hash is of samples spread over all of it. What may differ does not count: threads, paths,
/// devices. Collective.
void require_same_run(const Options&, const Inputs&, Communicator&);

/// Of the tokens, or of pieces spread over them.
std::uint64_t hash_of(const Tokens&);

}  // namespace rz::train_gpt
