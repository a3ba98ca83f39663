#pragma once
/// Checks that ranks agree on model, options and values, and names the rank that differs. All calls are
/// collective.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "autograd_lite/parameter.h"
#include "comm/communicator.h"

namespace rz {

/// A named value, as text, that must be equal on all ranks.
struct Fact {
  std::string name, value;
};

/// Errc::mismatch on every rank if ranks differ, with the first fact that differs: "SUBJECT differs over the
/// ranks: NAME is VALUE on rank 0 and VALUE on rank 2; ADVICE". The culprit is the first rank that differs
/// from the majority; none, as with two ranks, if there is no majority. Ranks may pass different numbers of
/// facts. Ranks with another `group` are not compared, but get the error, too.
void require_same(const char* subject, std::span<const Fact>, const char* advice, Communicator&,
                  int group = 0);

/// require_same() for names, shapes of whole tensors, frozen flags, and the presence of values.
void require_same_model(std::span<Parameter* const>, Communicator&);

/// Broadcasts the values of rank 0, for parameters that have a value.
void broadcast_values(std::span<Parameter* const>, Communicator&);

/// Broadcasts tensors that are no parameters, such as running means, from a rank; undefined and empty ones
/// are left out. The same shapes and dtypes on every rank.
void broadcast_buffers(std::span<const Tensor>, Communicator&, const Stream& = {}, int root = 0);

/// Hash of bytes; equal on all machines of the same byte order. Not cryptographic.
std::uint64_t hash_bytes(const void* data, std::size_t bytes, std::uint64_t seed = 0);
/// The hash as text.
std::string hash_text(std::uint64_t hash);

}  // namespace rz
