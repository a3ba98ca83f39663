#pragma once
/// Checks that ranks agree on model, options and values, and names the rank that differs. All calls are
/// collective.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "autograd_lite/parameter.h"
#include "comm/communicator.h"
#include "comm/core/text.h"

namespace rz {

/// A named value, as text, that must be equal on all ranks.
struct Fact {
  std::string name, value;
};

/// A fact for each field(name, value): yes or no, the name() of an enumerator, the number, the text. An
/// optional value may have a text for its absence.
class Facts {
 public:
  template <class T>
  void operator()(const std::string& name, const T& value) {
    list.push_back({name, text_of(value)});
  }
  template <class T>
  void operator()(const std::string& name, const T& value, const char* absent) {
    list.push_back({name, value ? text_of(*value) : absent});
  }

  std::vector<Fact> list;

 private:
  template <class T>
  static std::string text_of(const T& value) {
    if constexpr (std::is_same_v<T, bool>)
      return value ? "yes" : "no";
    else if constexpr (std::is_enum_v<T>)
      return name(value);
    else if constexpr (requires { value.describe(); })
      return value.describe();
    else
      return concat(value);
  }
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
