#pragma once
/// Pickles of Python, protocols 2 to 5, as data (the documentation of Python's modules pickle and
/// pickletools).
///
/// A pickle is a program for a stack machine that may call any function. This reader has values only. It
/// builds None, numbers, texts, bytes, lists, tuples and dicts. A call of a permitted name becomes a record
/// of its name and arguments. Any other name is an error. Nothing is imported or executed.

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "sharding/io/file.h"

namespace rz {

/// Index of a value in a Pickle. Lists and dicts may contain themselves, so a reader of nested values bounds
/// its depth.
using PickleId = std::uint32_t;

using PickleNone = std::monostate;
struct PickleText {
  std::string text;  ///< UTF-8
};
struct PickleBytes {
  std::string bytes;
};
struct PickleLong {
  std::string bytes;  ///< an integer beyond 64 bits: little-endian, two's complement
};
struct PickleList {
  std::vector<PickleId> items;  ///< also those of a set
};
struct PickleTuple {
  std::vector<PickleId> items;
};
struct PickleDict {
  std::vector<std::pair<PickleId, PickleId>> items;  ///< a key may occur again: the last one is valid
};
struct PickleGlobal {
  std::string_view name;  ///< "torch.FloatStorage", one of Pickle::names
};
/// A call, or an object, that is not made. A persistent id has the name "persistent id".
struct PickleCall {
  std::string_view name;  ///< one of Pickle::names
  std::vector<PickleId> arguments;
};
using PickleValue = std::variant<PickleNone, bool, std::int64_t, double, PickleText, PickleBytes, PickleLong,
                                 PickleList, PickleTuple, PickleDict, PickleGlobal, PickleCall>;

using PickleNames = std::set<std::string, std::less<>>;

struct Pickle {
  std::deque<PickleValue> values;      // never moved, as a vector's are when it grows
  std::shared_ptr<PickleNames> names;  ///< of all PickleGlobal and PickleCall, each once
  PickleId root = 0;
  std::uint64_t end = 0;  ///< offset in the file of the first byte after the pickle

  template <class T>
  const T* get(PickleId id) const {
    return std::get_if<T>(&values[id]);
  }
  /// The value of a key of a dict; nullptr if there is none, or `id` is no dict.
  const PickleId* find(PickleId id, std::string_view key) const;
  /// The items of a dict in the order of their keys, of texts that occur again with the last value; empty if
  /// `id` is no dict. Errc::io if there are more than 128 Ki: for each of them more is done than for the
  /// bytes of a pickle.
  std::vector<std::pair<PickleId, PickleId>> items(PickleId id) const;
};
inline constexpr const char* pickle_persistent_id = "persistent id";

/// "an integer", "a dict"
std::string kind_of(const PickleValue&);

/// What a pickle may do with a name: nothing; keep it as a value; call it; call it or make an object of it.
/// Besides, these names have plain values: collections.OrderedDict, set, frozenset, bytes, bytearray and
/// _codecs.encode.
enum class PickleUse { refused, value, call, object };
using PicklePermission = PickleUse (*)(std::string_view name);

/// Reads the pickle at bytes [begin, end) of a file, which may be longer than it. Errc::unsupported names
/// what is not permitted, as "os.system", and opcodes of other protocols; Errc::io names the byte at which
/// the pickle is damaged, or a limit that it exceeds: 256 MiB, 4 Mi values, 16 Mi items of lists, tuples,
/// dicts and calls, 64 MiB of texts, bytes and names, names of 250 bytes, 1000 marks within each other. What
/// is held and done for a byte of the pickle is bounded: 2 MB take less than 300 MiB and less than a second.
Pickle read_pickle(const InputFile&, std::uint64_t begin, std::uint64_t end, PicklePermission);

}  // namespace rz
