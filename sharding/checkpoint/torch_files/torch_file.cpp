#include "sharding/checkpoint/torch_files/torch_file.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <string_view>

#include "comm/core/error.h"
#include "sharding/checkpoint/torch_files/strided_read.h"
#include "sharding/checkpoint/torch_files/torch_types.h"
#include "sharding/checkpoint/torch_files/zip_directory.h"
#include "sharding/io/text.h"

namespace rz {

static_assert(std::endian::native == std::endian::little, "files of big-endian machines are refused");

namespace {

using std::uint64_t;

/// The first pickle of the format before version 1.6: 0x1950a86a20f9469cfc6c.
constexpr std::string_view legacy_magic("\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19", 10);
constexpr std::int64_t legacy_version = 1001;
constexpr int max_parameter_depth = 8;
/// A view may have any number of elements of a storage: up to 1 GiB, or 64 times the storage, they are read.
constexpr uint64_t max_expanded_bytes = uint64_t{1} << 30, max_expansion = 64;
/// A key occurs again at a few bytes of a pickle for each tensor, and a shape does.
constexpr std::size_t max_key_bytes = 1000;
/// The most dimensions of all tensors of a state dict, which may share one shape.
constexpr std::size_t max_dimensions = std::size_t{1} << 20;

template <class... T>
void check_torch(bool ok, const std::string& path, const T&... parts) {
  if (!ok) fail(Errc::io, escaped(concat(path, ": ", parts..., "; the file is damaged")));
}
template <class... T>
[[noreturn]] void refuse(const std::string& path, const T&... parts) {
  fail(Errc::unsupported, escaped(concat(path, ": ", parts...)));
}

std::string front_of(const InputFile& file, std::size_t count) {
  std::string text(std::min<uint64_t>(count, file.size()), '\0');
  file.read(0, std::as_writable_bytes(std::span(text)));
  return text;
}

bool is_zip(std::string_view front) { return front.starts_with("PK\x03\x04"); }
/// A header that begins with '{', behind its length in eight bytes. The lower bytes of the length may look
/// like the beginning of any other kind; its upper four are zero, as in no other kind, and also where the
/// file is cut off.
bool is_safetensors(std::string_view front) {
  return front.size() > 8 && front[8] == '{' && front.substr(4, 4) == std::string_view("\0\0\0\0", 4);
}
bool is_pickle(std::string_view front) {
  return front.size() > 2 && front[0] == '\x80' && front[1] >= 2 && front[1] <= 5;
}
bool is_tar(std::string_view front) { return front.size() > 262 && front.substr(257).starts_with("ustar"); }
constexpr std::size_t front_bytes = 263;

/// A persistent id: ('storage', class, key, device, elements[, view of another storage]).
struct StorageId {
  const TorchType* type = nullptr;  // null: bytes
  std::string_view key;             // a text of the pickle
  uint64_t elements = 0;
  uint64_t offset = 0;  // of a view in its storage, in elements
};

/// Bytes of the file that hold a storage.
struct StoredBytes {
  uint64_t data = 0, bytes = 0;
};

/// A call that makes a tensor: parts of the pickle.
struct TensorCall {
  std::string_view name;
  std::span<const PickleId> arguments;
};

}  // namespace

struct TorchFile::State {
  explicit State(InputFile opened) : file(std::move(opened)) {}

  InputFile file;
  Pickle pickle;
  mutable std::mutex window_lock;
  mutable StridedWindow window;  // of the tensor that is being read
  bool is_zip = false;
  std::string archive;                                     // the folder in the zip file, with its slash
  ZipDirectory directory;                                  // of a zip file
  std::map<std::string, StoredBytes, std::less<>> stored;  // of a file before version 1.6

  const std::string& path() const { return file.path(); }
  void open_zip(PicklePermission);
  void check_byte_order() const;
  void open_legacy(PicklePermission);
  void check_legacy_header(const Pickle& version, const Pickle& system) const;
  void find_legacy_storages(const Pickle& keys);

  const PickleValue& value(PickleId id) const { return pickle.values[id]; }
  StorageId storage_id(const PickleCall&) const;
  StoredBytes stored_bytes(const StorageId&) const;
  std::optional<TensorCall> tensor_call(PickleId) const;
  TensorCall call_of_type(const TensorCall&) const;
  std::uint64_t number(PickleId, const char* what) const;
  std::string_view text(PickleId, const char* what) const;
  std::vector<uint64_t> numbers(PickleId, const char* what) const;
  TorchTensor tensor(const TensorCall&) const;
  void check_metadata(const TensorCall&) const;
};

// ---- the zip format

namespace {

/// "archive/" of the entry archive/data.pkl.
std::string archive_of(const std::string& path, const ZipDirectory& directory) {
  constexpr std::string_view ending = "/data.pkl";
  std::vector<std::string> found;
  for (const auto& [name, entry] : directory.entries())
    if (name.ends_with(ending) && name.find('/') == name.size() - ending.size())
      found.push_back(name.substr(0, name.size() - ending.size() + 1));
  if (found.empty()) refuse(path, "is a zip file without data.pkl, which torch.save() has not written");
  check_torch(found.size() == 1, path, "has ", found.size(), " entries data.pkl");
  if (directory.find(found[0] + "constants.pkl"))
    refuse(path, "is a program of TorchScript; save its state_dict() with torch.save()");
  return found[0];
}

}  // namespace

void TorchFile::State::open_zip(PicklePermission permission) {
  is_zip = true;
  directory = ZipDirectory::read(file);
  archive = archive_of(path(), directory);
  const std::string name = archive + "data.pkl";
  const uint64_t begin = directory.data(file, name);
  check_byte_order();
  pickle = read_pickle(file, begin, begin + directory.find(name)->bytes, permission);
}

/// Files before version 2.1 lack the entry: machines were little-endian.
void TorchFile::State::check_byte_order() const {
  const std::string name = archive + "byteorder";
  const ZipEntry* entry = directory.find(name);
  if (!entry) return;
  std::string order(std::min<uint64_t>(entry->bytes, 16), '\0');
  file.read(directory.data(file, name), std::as_writable_bytes(std::span(order)));
  if (order != "little") refuse(path(), "has numbers in the byte order '", order, "'; only 'little' is read");
}

// ---- the format before version 1.6

void TorchFile::State::open_legacy(PicklePermission permission) {
  uint64_t at = 0;
  const auto next = [&] {
    Pickle p = read_pickle(file, at, file.size(), permission);
    at = p.end;
    return p;
  };
  const Pickle magic = next();
  const auto* number = magic.get<PickleLong>(magic.root);
  if (!number || number->bytes != legacy_magic)
    refuse(path(), "is a pickle that torch.save() has not written; save a state dict with torch.save()");
  const Pickle version = next(), system = next();
  check_legacy_header(version, system);
  pickle = next();
  find_legacy_storages(next());
}

void TorchFile::State::check_legacy_header(const Pickle& version, const Pickle& system) const {
  const auto* number = version.get<std::int64_t>(version.root);
  if (!number || *number != legacy_version)
    refuse(path(), "is of a version of PyTorch's format other than 1001");
  const PickleId* little = system.find(system.root, "little_endian");
  const bool* is_little = little ? system.get<bool>(*little) : nullptr;
  if (!is_little || !*is_little) refuse(path(), "has numbers of a big-endian machine");
}

/// Each storage follows as its number of elements, and these. Their type stands in the pickle.
void TorchFile::State::find_legacy_storages(const Pickle& keys) {
  std::map<std::string_view, unsigned> element_bytes;
  for (const PickleValue& v : pickle.values)
    if (const auto* call = std::get_if<PickleCall>(&v); call && call->name == pickle_persistent_id) {
      const StorageId id = storage_id(*call);
      element_bytes[id.key] = id.type ? id.type->bytes : 1;
    }
  const auto* list = keys.get<PickleList>(keys.root);
  check_torch(list != nullptr, path(), "its storages have no list");
  uint64_t at = keys.end;
  for (const PickleId id : list->items) {
    const auto* key = keys.get<PickleText>(id);
    const auto size = key ? element_bytes.find(key->text) : element_bytes.end();
    check_torch(size != element_bytes.end(), path(), "a storage of its list belongs to no tensor");
    uint64_t elements = 0, bytes = 0;
    file.read(at, std::as_writable_bytes(std::span(&elements, 1)));
    at += sizeof elements;
    check_torch(
        !__builtin_mul_overflow(elements, uint64_t{size->second}, &bytes) && bytes <= file.size() - at,
        path(), "storage ", key->text, " of ", elements, " elements lies beyond the end of the file");
    stored[key->text] = {at, bytes};
    at += bytes;
  }
}

// ---- values

uint64_t TorchFile::State::number(PickleId id, const char* what) const {
  const auto* n = std::get_if<std::int64_t>(&value(id));
  check_torch(n && *n >= 0, path(), what, " is ", n ? concat(*n) : kind_of(value(id)));
  return static_cast<uint64_t>(*n);
}

std::string_view TorchFile::State::text(PickleId id, const char* what) const {
  const auto* t = std::get_if<PickleText>(&value(id));
  check_torch(t != nullptr, path(), what, " is ", kind_of(value(id)));
  return t->text;
}

std::vector<uint64_t> TorchFile::State::numbers(PickleId id, const char* what) const {
  const std::vector<PickleId>* items = nullptr;
  const PickleValue* v = &value(id);
  if (const auto* size = std::get_if<PickleCall>(v);
      size && size->name == "torch.Size" && size->arguments.size() == 1)
    v = &value(size->arguments[0]);
  if (const auto* tuple = std::get_if<PickleTuple>(v)) items = &tuple->items;
  if (const auto* list = std::get_if<PickleList>(v)) items = &list->items;
  check_torch(items && items->size() <= 64, path(), what, " is ", kind_of(*v));
  std::vector<uint64_t> out;
  for (const PickleId item : *items) out.push_back(number(item, what));
  return out;
}

StorageId TorchFile::State::storage_id(const PickleCall& call) const {
  const auto* tuple = std::get_if<PickleTuple>(&value(call.arguments[0]));
  check_torch(tuple && tuple->items.size() >= 5 && text(tuple->items[0], "a persistent id") == "storage",
              path(), "a persistent id is no storage");
  const auto* global = std::get_if<PickleGlobal>(&value(tuple->items[1]));
  check_torch(global != nullptr, path(), "the type of a storage is ", kind_of(value(tuple->items[1])));
  const TorchType* type = torch_type(global->name);
  check_torch(type || is_untyped_storage(global->name), path(), "the type of a storage is ", global->name);
  StorageId id{type, text(tuple->items[2], "the key of a storage"),
               number(tuple->items[4], "the size of a storage")};
  check_torch(id.key.size() <= max_key_bytes, path(), "the key of a storage has ", id.key.size(), " bytes");
  // The view of a storage: (its key, first element, elements).
  if (tuple->items.size() > 5 && !std::holds_alternative<PickleNone>(value(tuple->items[5]))) {
    const auto* view = std::get_if<PickleTuple>(&value(tuple->items[5]));
    check_torch(view && view->items.size() == 3, path(), "the view of a storage is no tuple");
    id.offset = number(view->items[1], "the view of a storage");
  }
  return id;
}

StoredBytes TorchFile::State::stored_bytes(const StorageId& id) const {
  if (!is_zip) {
    const auto found = stored.find(id.key);
    check_torch(found != stored.end(), path(), "storage ", id.key, " is missing");
    return found->second;
  }
  const std::string name = concat(archive, "data/", id.key);
  return {directory.data(file, name), directory.find(name)->bytes};
}

std::optional<TensorCall> TorchFile::State::tensor_call(PickleId id) const {
  const auto* first = std::get_if<PickleCall>(&value(id));
  if (!first) return std::nullopt;
  TensorCall call{first->name, first->arguments};
  for (int depth = 0; depth < max_parameter_depth; ++depth) {
    if (call.name.starts_with("torch._utils._rebuild_tensor")) return call;
    if (call.name == rebuild_from_type) {
      call = call_of_type(call);
      continue;
    }
    if (call.name != "torch._utils._rebuild_parameter") return std::nullopt;
    const auto* inner = call.arguments.empty() ? nullptr : std::get_if<PickleCall>(&value(call.arguments[0]));
    check_torch(inner != nullptr, path(), "a parameter has no tensor");
    call = {inner->name, inner->arguments};
  }
  fail(Errc::io, escaped(path()), ": a parameter has no tensor; the file is damaged");
}

/// A tensor with attributes: (function, type, its arguments, attributes).
TensorCall TorchFile::State::call_of_type(const TensorCall& call) const {
  check_torch(call.arguments.size() == 4, path(), "a tensor with attributes has ", call.arguments.size(),
              " arguments");
  const auto* function = std::get_if<PickleGlobal>(&value(call.arguments[0]));
  const auto* type = std::get_if<PickleGlobal>(&value(call.arguments[1]));
  const auto* arguments = std::get_if<PickleTuple>(&value(call.arguments[2]));
  check_torch(function && type && arguments && function->name.starts_with("torch._utils._rebuild_") &&
                  is_tensor_type(type->name),
              path(), "a tensor with attributes has no tensor");
  return {function->name, arguments->items};
}

/// A tensor may be the conjugate or the negative of its storage.
void TorchFile::State::check_metadata(const TensorCall& call) const {
  const std::size_t at = call.name.ends_with("_v3") ? 7 : 6;
  if (call.arguments.size() <= at) return;
  const auto* dict = std::get_if<PickleDict>(&value(call.arguments[at]));
  if (dict && !dict->items.empty()) refuse(path(), "is a conjugate or negative view; save its clone()");
}

TorchTensor TorchFile::State::tensor(const TensorCall& call) const {
  const bool typed = call.name.ends_with("_v3");
  check_torch(call.arguments.size() >= (typed ? 7 : 4), path(), "has too few arguments");
  check_metadata(call);
  const auto* storage = std::get_if<PickleCall>(&value(call.arguments[0]));
  check_torch(storage && storage->name == pickle_persistent_id, path(), "its storage is missing");
  const StorageId id = storage_id(*storage);
  const TorchType* type = id.type;
  if (typed) {
    const auto* dtype = std::get_if<PickleGlobal>(&value(call.arguments[6]));
    type = dtype ? torch_type(dtype->name) : nullptr;
  }
  check_torch(type != nullptr, path(), "its dtype is missing");
  if (!*type->name)
    refuse(path(), "its dtype ", type->dtype, " is none of safetensors; convert it to another");

  TorchTensor t{type->name, type->bytes};
  uint64_t first = number(call.arguments[1], "its first element");
  t.shape = numbers(call.arguments[2], "its shape"), t.strides = numbers(call.arguments[3], "its strides");
  check_torch(t.shape.size() == t.strides.size(), path(), "has ", t.shape.size(), " dimensions and ",
              t.strides.size(), " strides");
  for (const uint64_t n : t.shape)
    check_torch(!__builtin_mul_overflow(t.count, n, &t.count), path(), "its shape is larger than any memory");
  const StoredBytes bytes = stored_bytes(id);
  uint64_t extent = 0, all_bytes = 0;
  check_torch(!__builtin_mul_overflow(id.elements, uint64_t{id.type ? id.type->bytes : 1}, &all_bytes) &&
                  (id.offset > 0 || all_bytes == bytes.bytes || !is_zip),
              path(), "storage ", id.key, " has ", bytes.bytes, " bytes where ", id.elements,
              " elements are announced");
  check_torch(extent_of_view(t.shape, t.strides, extent) &&
                  !__builtin_add_overflow(first, id.offset, &first) &&
                  !__builtin_add_overflow(extent, first, &extent) && extent <= bytes.bytes / t.element_bytes,
              path(), "its elements lie beyond storage ", id.key, " of ", bytes.bytes, " bytes");
  check_torch(!__builtin_mul_overflow(t.count, uint64_t{t.element_bytes}, &all_bytes), path(),
              "its shape is larger than any memory");
  if (all_bytes > max_expanded_bytes && all_bytes / max_expansion > bytes.bytes)
    refuse(path(), "is expanded from ", bytes.bytes, " to ", all_bytes,
           " bytes; leave it out, or save its clone()");
  t.data = bytes.data + first * t.element_bytes;
  return t;
}

// ---- TorchFile

bool TorchFile::is_one(const std::string& path) {
  const InputFile file = InputFile::open(path);
  const std::string front = front_of(file, front_bytes);
  if (is_safetensors(front)) return false;
  return is_zip(front) || is_pickle(front) || is_tar(front);
}

TorchFile TorchFile::open(const std::string& path, TorchContents contents) {
  auto state = std::make_shared<State>(InputFile::open(path));
  const PicklePermission permission =
      contents == TorchContents::deepspeed ? use_in_deepspeed : use_in_weights;
  const std::string front = front_of(state->file, front_bytes);
  if (is_tar(front))
    refuse(path, "is a tar file of PyTorch before version 0.1; load and save it with a newer one");
  if (is_zip(front)) {
    state->open_zip(permission);
  } else {
    if (!is_pickle(front)) refuse(path, "is no file of torch.save()");
    state->open_legacy(permission);
  }
  TorchFile file;
  file.state_ = std::move(state);
  return file;
}

const std::string& TorchFile::path() const { return state_->path(); }
const Pickle& TorchFile::pickle() const { return state_->pickle; }

std::optional<TorchTensor> TorchFile::tensor(PickleId id, const std::string& name) const {
  const std::optional<TensorCall> call = state_->tensor_call(id);
  if (!call) return std::nullopt;
  try {
    return state_->tensor(*call);
  } catch (const Error& e) {
    // "FILE: what" becomes "FILE: tensor 'name': what".
    const std::string what = e.what(), front = escaped(path()) + ": ";
    if (!what.starts_with(front)) throw;
    fail(e.code(), front, "tensor '", escaped(name), "': ", what.substr(front.size()));
  }
}

std::optional<std::vector<uint64_t>> TorchFile::shape(PickleId id) const {
  try {
    auto shape = state_->numbers(id, "a shape");
    uint64_t count = 1;
    for (const uint64_t n : shape)
      if (__builtin_mul_overflow(count, n, &count)) return std::nullopt;
    return shape;
  } catch (const Error&) {
    return std::nullopt;
  }
}

void TorchFile::read(const TorchTensor& t, uint64_t begin, std::span<std::byte> out) const {
  const uint64_t n = out.size() / t.element_bytes;
  require(out.size() % t.element_bytes == 0 && begin <= t.count && n <= t.count - begin,
          Errc::invalid_argument, path(), ": elements from ", begin, " on, ", out.size(),
          " bytes of them, requested of ", t.count);
  const std::lock_guard lock(state_->window_lock);
  read_strided(state_->file, t, begin, out, state_->window);
}

std::vector<std::pair<PickleId, PickleId>> items_of(const TorchFile& file, PickleId dict) {
  try {
    return file.pickle().items(dict);
  } catch (const Error& e) {
    fail(e.code(), escaped(file.path()), ": ", e.what());
  }
}

std::vector<NamedTorchTensor> state_dict_of(const TorchFile& file, PickleId root) {
  const Pickle& p = file.pickle();
  const auto* dict = p.get<PickleDict>(root);
  require(dict != nullptr, Errc::config, escaped(file.path()), ": holds ", escaped(kind_of(p.values[root])),
          " where a state dict is needed; save model.state_dict()");
  std::vector<NamedTorchTensor> tensors;
  std::size_t dimensions = 0;
  for (const auto& [key, value] : items_of(file, root)) {
    const auto* name = p.get<PickleText>(key);
    require(name != nullptr, Errc::config, escaped(file.path()), ": a key of the state dict is ",
            escaped(kind_of(p.values[key])));
    auto tensor = file.tensor(value, name->text);
    if (!tensor && name->text.ends_with("_extra_state")) continue;
    require(tensor.has_value(), Errc::config, escaped(file.path()), ": '", escaped(name->text), "' is ",
            escaped(kind_of(p.values[value])), " where a state dict has tensors; save model.state_dict()");
    dimensions += tensor->shape.size();
    require(dimensions <= max_dimensions, Errc::io, escaped(file.path()), ": its tensors have more than ",
            max_dimensions, " dimensions in all");
    tensors.push_back({name->text, std::move(*tensor)});
  }
  return tensors;
}

namespace {

bool is_tensor_call(const PickleCall* call) {
  return call && (call->name.starts_with("torch._utils._rebuild_") || call->name == rebuild_from_type);
}

/// Whether a value is a dict with tensors and nothing else, by their kinds.
bool is_state_dict(const TorchFile& file, PickleId value) {
  const Pickle& p = file.pickle();
  if (!p.get<PickleDict>(value)) return false;
  const auto items = items_of(file, value);
  return !items.empty() && std::ranges::all_of(items, [&](const auto& item) {
    const auto* key = p.get<PickleText>(item.first);
    return key && (is_tensor_call(p.get<PickleCall>(item.second)) || key->text.ends_with("_extra_state"));
  });
}

}  // namespace

FoundStateDict find_state_dict(const TorchFile& file) {
  const Pickle& p = file.pickle();
  if (!p.get<PickleDict>(p.root)) return {"", state_dict_of(file, p.root)};
  std::set<PickleId> seen;  // a value may occur at any number of keys
  std::vector<std::pair<std::string, PickleId>> found;
  for (const auto& [key, value] : items_of(file, p.root)) {
    if (is_tensor_call(p.get<PickleCall>(value))) return {"", state_dict_of(file, p.root)};
    const auto* name = p.get<PickleText>(key);
    if (name && seen.insert(value).second && is_state_dict(file, value))
      found.emplace_back(name->text, value);
  }
  if (found.empty()) return {"", state_dict_of(file, p.root)};
  std::string keys;
  for (std::size_t i = 0; i < std::min<std::size_t>(found.size(), 8); ++i)
    keys += concat(i ? ", '" : "'", escaped(found[i].first), "'");
  require(found.size() == 1, Errc::config, escaped(file.path()), ": holds ", found.size(), " state dicts, ",
          keys, "; save one of them by itself");
  return {found[0].first, state_dict_of(file, found[0].second)};
}

}  // namespace rz
