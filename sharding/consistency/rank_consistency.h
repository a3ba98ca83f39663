#pragma once
/// What must be the same on every rank, and who differs. All calls are collective.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "autograd_lite/parameter.h"
#include "comm/communicator.h"

namespace rz {

/// Something that every rank must have alike, as text.
struct Fact {
  std::string name, value;
};

/// Errc::mismatch on every rank, with the first fact in which a rank differs from rank 0, what both have, and
/// that rank as culprit: "SUBJECT differs over the ranks: NAME is VALUE on rank 0 and VALUE on rank 2;
/// ADVICE". A rank may have fewer facts than another.
void require_same(const char* subject, std::span<const Fact>, const char* advice, Communicator&);

/// require_same() for names, shapes, which parameters are frozen, and which have a value.
void require_same_model(std::span<Parameter* const>, Communicator&);

/// Rank 0's values on every rank, for parameters that have one.
void broadcast_values(std::span<Parameter* const>, Communicator&);

/// Of bytes: the same on every machine of the same byte order. Not cryptographic.
std::uint64_t hash_bytes(const void* data, std::size_t bytes, std::uint64_t seed = 0);
/// As text.
std::string hash_text(std::uint64_t hash);

}  // namespace rz
