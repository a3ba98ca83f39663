#pragma once
/// Files as torch.save() writes them, for tests that have no PyTorch.

#include <cstdint>
#include <cstring>
#include <fstream>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace rz::test {

/// Bytes of pickles: each function returns the opcodes that push one value. Values are joined as texts.
namespace pickle {

using Values = std::vector<std::string>;
using Pairs = std::vector<std::pair<std::string, std::string>>;

template <class T>
std::string raw(T value) {
  std::string bytes(sizeof value, '\0');
  std::memcpy(bytes.data(), &value, sizeof value);
  return bytes;
}
inline std::string joined(const Values& values) {
  std::string all;
  for (const std::string& v : values) all += v;
  return all;
}

inline std::string none() { return "N"; }
inline std::string boolean(bool b) { return b ? "\x88" : "\x89"; }
inline std::string integer(std::int64_t i) {
  if (i >= 0 && i < 256) return "K" + raw(static_cast<std::uint8_t>(i));
  if (i >= 0 && i < 65536) return "M" + raw(static_cast<std::uint16_t>(i));
  if (i == static_cast<std::int32_t>(i)) return "J" + raw(static_cast<std::int32_t>(i));
  return "\x8a\x08" + raw(i);
}
inline std::string text(std::string_view s) {
  return "X" + raw(static_cast<std::uint32_t>(s.size())) + std::string(s);
}
inline std::string tuple(const Values& v) { return "(" + joined(v) + "t"; }
inline std::string list(const Values& v) { return "](" + joined(v) + "e"; }
inline std::string items(const Pairs& pairs) {
  std::string all = "(";
  for (const auto& [key, value] : pairs) all += key + value;
  return all + "u";
}
inline std::string dict(const Pairs& pairs) { return "}" + items(pairs); }
inline std::string global(std::string_view module, std::string_view name) {
  return "c" + std::string(module) + "\n" + std::string(name) + "\n";
}
inline std::string call(const std::string& callable, const Values& arguments) {
  return callable + tuple(arguments) + "R";
}
inline std::string object(const std::string& type, const Pairs& attributes) {
  return type + ")\x81" + dict(attributes) + "b";
}
inline std::string ordered_dict(const Pairs& pairs) {
  return call(global("collections", "OrderedDict"), {}) + items(pairs);
}
/// As nn.Module.state_dict(), which has an attribute _metadata.
inline std::string state_dict(const Pairs& pairs) {
  return ordered_dict(pairs) + dict({{text("_metadata"), ordered_dict({{text(""), dict({})}})}}) + "b";
}
inline std::string numbers(const std::vector<std::uint64_t>& all) {
  Values v;
  for (const std::uint64_t n : all) v.push_back(integer(static_cast<std::int64_t>(n)));
  return tuple(v);
}
inline std::string size(const std::vector<std::uint64_t>& shape) {
  return call(global("torch", "Size"), {numbers(shape)});
}
inline std::string whole(const std::string& value, int protocol = 2) {
  return "\x80" + raw(static_cast<std::uint8_t>(protocol)) + value + ".";
}

}  // namespace pickle

/// A zip file of stored entries.
struct ZipWriter {
  bool zip64 = false;  ///< sizes and offsets in the extra field
  std::uint16_t method = 0, flags = 0;
  std::string comment;

  void add(const std::string& name, const std::string& data) { entries.emplace_back(name, data); }

  std::string bytes() const {
    using pickle::raw;
    std::string out, directory;
    for (const auto& [name, data] : entries) {
      const std::uint64_t at = out.size();
      const auto size = static_cast<std::uint32_t>(data.size());
      const std::string padding((64 - (at + 30 + name.size() + 4) % 64) % 64, 'Z');
      const std::string local = "FB" + raw(static_cast<std::uint16_t>(padding.size())) + padding;
      out += "PK\x03\x04" + raw(std::uint16_t{20}) + raw(flags) + raw(method) + raw(std::uint32_t{0}) +
             raw(std::uint32_t{0}) + raw(size) + raw(size) + raw(static_cast<std::uint16_t>(name.size())) +
             raw(static_cast<std::uint16_t>(local.size())) + name + local + data;
      const std::uint64_t bytes = data.size();
      const std::string extra = zip64 ? "FB" + raw(std::uint16_t{2}) + "ab" + raw(std::uint16_t{1}) +
                                            raw(std::uint16_t{24}) + raw(bytes) + raw(bytes) + raw(at)
                                      : "";
      const auto small = [&](std::uint64_t n) {
        return raw(zip64 ? ~std::uint32_t{0} : static_cast<std::uint32_t>(n));
      };
      directory += "PK\x01\x02" + raw(std::uint32_t{20}) + raw(flags) + raw(method) + raw(std::uint32_t{0}) +
                   raw(std::uint32_t{0}) + small(bytes) + small(bytes) +
                   raw(static_cast<std::uint16_t>(name.size())) +
                   raw(static_cast<std::uint16_t>(extra.size())) + raw(std::uint16_t{0}) +
                   raw(std::uint64_t{0}) + small(at) + name + extra;
    }
    const std::uint64_t start = out.size(), size = directory.size(), count = entries.size();
    out += directory;
    if (zip64) {
      const std::uint64_t record = out.size();
      out += "PK\x06\x06" + raw(std::uint64_t{44}) + raw(std::uint32_t{45}) + raw(std::uint64_t{0}) +
             raw(count) + raw(count) + raw(size) + raw(start) + "PK\x06\x07" + raw(std::uint32_t{0}) +
             raw(record) + raw(std::uint32_t{1});
    }
    const auto small = [&](std::uint64_t n) {
      return raw(zip64 ? ~std::uint32_t{0} : static_cast<std::uint32_t>(n));
    };
    const auto tiny = raw(zip64 ? std::uint16_t{0xffff} : static_cast<std::uint16_t>(count));
    return out + "PK\x05\x06" + raw(std::uint32_t{0}) + tiny + tiny + small(size) + small(start) +
           raw(static_cast<std::uint16_t>(comment.size())) + comment;
  }

  std::vector<std::pair<std::string, std::string>> entries;
};

inline void write_bytes(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
}

/// Strides of a tensor without gaps.
inline std::vector<std::uint64_t> row_major(const std::vector<std::uint64_t>& shape) {
  std::vector<std::uint64_t> strides(shape.size(), 1);
  for (std::size_t d = shape.size(); d-- > 1;) strides[d - 1] = strides[d] * shape[d];
  return strides;
}

/// The storages of one file, and pickles of tensors in them.
class TorchWriter {
 public:
  std::string archive = "archive", byte_order = "little";
  ZipWriter zip;

  /// Adds a storage; returns the pickle of its persistent id.
  template <class T>
  std::string storage(const std::vector<T>& values, const std::string& type) {
    std::string bytes(values.size() * sizeof(T), '\0');
    if (!values.empty()) std::memcpy(bytes.data(), values.data(), bytes.size());
    return storage_of_bytes(bytes, type, values.size());
  }
  std::string storage_of_bytes(const std::string& bytes, const std::string& type, std::uint64_t elements) {
    const std::string key = std::to_string(storages_.size());
    storages_.push_back({key, bytes, elements});
    return id_of(key, type, elements);
  }
  static std::string id_of(const std::string& key, const std::string& type, std::uint64_t elements,
                           const std::string& view = "") {
    using namespace pickle;
    const bool untyped = type == "UntypedStorage";
    Values id{text("storage"), global(untyped ? "torch.storage" : "torch", type), text(key), text("cpu"),
              integer(static_cast<std::int64_t>(elements))};
    if (!view.empty()) id.push_back(view);
    return tuple(id) + "Q";
  }

  /// The pickle of a view of a storage.
  static std::string view(const std::string& storage, std::uint64_t first,
                          const std::vector<std::uint64_t>& shape,
                          const std::vector<std::uint64_t>& strides) {
    using namespace pickle;
    return call(global("torch._utils", "_rebuild_tensor_v2"),
                {storage, integer(static_cast<std::int64_t>(first)), numbers(shape), numbers(strides),
                 boolean(false), call(global("collections", "OrderedDict"), {})});
  }
  template <class T>
  std::string tensor(const std::vector<T>& values, const std::vector<std::uint64_t>& shape,
                     const std::string& type = "FloatStorage") {
    return view(storage(values, type), 0, shape, row_major(shape));
  }
  static std::string parameter(const std::string& tensor) {
    using namespace pickle;
    return call(global("torch._utils", "_rebuild_parameter"),
                {tensor, boolean(true), call(global("collections", "OrderedDict"), {})});
  }

  /// The zip format.
  std::string bytes(const std::string& value) const {
    ZipWriter file = zip;
    file.add(archive + "/data.pkl", pickle::whole(value));
    if (!byte_order.empty()) file.add(archive + "/byteorder", byte_order);
    for (const Storage& s : storages_) file.add(archive + "/data/" + s.key, s.bytes);
    file.add(archive + "/version", "3\n");
    return file.bytes();
  }
  void write(const std::string& path, const std::string& value) const { write_bytes(path, bytes(value)); }

  /// The format before version 1.6.
  std::string legacy_bytes(const std::string& value, bool little = true) const {
    using namespace pickle;
    Values keys;
    for (const Storage& s : storages_) keys.push_back(text(s.key));
    std::string out =
        whole("\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19") + whole(integer(1001)) +
        whole(dict({{text("protocol_version"), integer(1001)}, {text("little_endian"), boolean(little)}})) +
        whole(value) + whole(list(keys));
    for (const Storage& s : storages_) out += raw(s.elements) + s.bytes;
    return out;
  }

 private:
  struct Storage {
    std::string key, bytes;
    std::uint64_t elements;
  };
  std::vector<Storage> storages_;
};

}  // namespace rz::test
