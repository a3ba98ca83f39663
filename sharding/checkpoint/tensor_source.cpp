#include "sharding/checkpoint/tensor_source.h"

#include <algorithm>
#include <array>
#include <map>
#include <type_traits>
#include <utility>

#include "comm/core/error.h"
#include "comm/core/math.h"
#include "sharding/io/text.h"

namespace rz {
namespace {

/// The dtypes of safetensors, and U16, U32 and U64.
constexpr struct {
  const char* name;
  unsigned bits;
} elements[] = {{"BOOL", 8},        {"F4", 4},      {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"U8", 8},
                {"I8", 8},          {"F8_E5M2", 8}, {"F8_E4M3", 8}, {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8},
                {"F8_E5M2FNUZ", 8}, {"I16", 16},    {"U16", 16},    {"F16", 16},    {"BF16", 16},
                {"I32", 32},        {"U32", 32},    {"F32", 32},    {"F64", 64},    {"I64", 64},
                {"U64", 64},        {"C64", 64}};

float widened(double x) { return static_cast<float>(x); }
template <class T>
float widened(T x) {
  return to_f32(x);
}

/// Elements of another type as f32, in blocks.
template <class T>
void read_widened(std::uint64_t begin, std::span<float> out, const TensorSource::Read& read) {
  std::array<T, 8192> block;
  for (std::size_t done = 0; done < out.size();) {
    const std::size_t n = std::min(block.size(), out.size() - done);
    read((begin + done) * sizeof(T), std::as_writable_bytes(std::span(block).first(n)));
    for (std::size_t i = 0; i < n; ++i) out[done + i] = widened(block[i]);
    done += n;
  }
}

}  // namespace

const char* safetensors_name(DType type) {
  constexpr const char* names[dtype_count] = {"F32", "F64", "F16", "BF16", "F8_E4M3", "F8_E5M2",
                                              "I8",  "U8",  "I32", "U32",  "I64",     "U64"};
  return names[static_cast<std::size_t>(type)];
}

unsigned safetensors_bits(std::string_view dtype) {
  for (const auto& e : elements)
    if (dtype == e.name) return e.bits;
  return 0;
}

bool is_float_dtype(std::string_view dtype) {
  return dtype == "F32" || dtype == "F16" || dtype == "BF16" || dtype == "F64";
}

std::string name(const std::vector<std::uint64_t>& shape) {
  std::string out = "[";
  for (const auto extent : shape) out += concat(out.size() > 1 ? ", " : "", extent);
  return out + "]";
}

struct TensorSource::State {
  std::string path, choice;
  std::optional<std::string> state;
  std::vector<TensorInfo> tensors;
  struct Place {
    Read read;
    std::uint32_t path;  // index in paths
  };
  std::vector<Place> places;  // of each tensor
  std::vector<std::string> paths;
  std::map<std::string, std::size_t, std::less<>> index;

  const Place& at(const TensorInfo& t) const { return places[index.find(t.name)->second]; }
  void add(TensorInfo, Read);
  template <class... T>
  [[noreturn]] void refuse(Errc code, const TensorInfo& t, const T&... parts) const {
    fail(code, escaped(concat(path, ": tensor '", t.name, "': ", parts...)));
  }
};

/// From the last of the paths.
void TensorSource::State::add(TensorInfo t, Read read) {
  const auto [place, is_new] = index.emplace(t.name, tensors.size());
  if (!is_new)
    fail(Errc::io, escaped(concat(paths.back(), ": tensor '", t.name, "' is also in ",
                                  paths[places[place->second].path])));
  tensors.push_back(std::move(t));
  places.push_back({std::move(read), static_cast<std::uint32_t>(paths.size() - 1)});
}

TensorSource::TensorSource(std::string path) : state_(std::make_shared<State>()) {
  state_->path = std::move(path);
}

void TensorSource::add(TensorInfo t, Read read) {
  if (state_->paths.empty()) state_->paths.push_back(state_->path);
  state_->add(std::move(t), std::move(read));
}

void TensorSource::add(const TensorSource& other) {
  state_->paths.push_back(other.path());
  for (const TensorInfo& t : other.tensors()) state_->add(t, other.state_->at(t).read);
  if (!other.choice().empty()) set_choice(other.choice());
}

void TensorSource::set_choice(std::string line) { state_->choice = std::move(line); }
void TensorSource::set_state(std::string json) { state_->state = std::move(json); }

const std::string& TensorSource::path() const { return state_->path; }
const std::string& TensorSource::choice() const { return state_->choice; }
const std::optional<std::string>& TensorSource::state() const { return state_->state; }
const std::vector<TensorInfo>& TensorSource::tensors() const& { return state_->tensors; }

const TensorInfo* TensorSource::find(std::string_view name) const {
  const auto found = state_->index.find(name);
  return found == state_->index.end() ? nullptr : &state_->tensors[found->second];
}

const std::string& TensorSource::path_of(const TensorInfo& t) const {
  return state_->paths[state_->at(t).path];
}

namespace {

/// The elements of a tensor of a dtype as they are in the file.
template <class From, class To, class Refuse>
void read_integers(std::vector<To>& out, const TensorSource::Read& read, const Refuse& refuse) {
  std::array<From, 8192> block;
  for (std::size_t done = 0; done < out.size();) {
    const std::size_t n = std::min(block.size(), out.size() - done);
    read(done * sizeof(From), std::as_writable_bytes(std::span(block).first(n)));
    for (std::size_t i = 0; i < n; ++i) {
      if (!std::in_range<To>(block[i])) refuse(done + i, concat(+block[i]));
      out[done + i] = static_cast<To>(block[i]);
    }
    done += n;
  }
}

}  // namespace

template <class T>
std::vector<T> TensorSource::read(std::string_view name) const {
  const TensorInfo* t = find(name);
  if (!t) {
    std::vector<std::string> names;
    for (const TensorInfo& other : state_->tensors) names.push_back(other.name);
    const std::string near = nearest_name(name, names);
    fail(Errc::io, escaped(concat(state_->path, ": there is no tensor '", name, "'",
                                  near.empty() ? "" : concat("; did you mean '", near, "'?"))));
  }
  std::vector<T> out(t->count);
  if constexpr (std::is_same_v<T, float>) {
    read_f32(*t, 0, out);
  } else {
    const auto refuse = [&](std::size_t at, const std::string& value) {
      state_->refuse(Errc::io, *t, "element ", at, " is ", value, ", which needs more than ", sizeof(T),
                     " bytes");
    };
    const Read& read = state_->at(*t).read;
    const std::string_view dtype = t->dtype;
    if (dtype == "BOOL" || dtype == "U8")
      read_integers<std::uint8_t>(out, read, refuse);
    else if (dtype == "I8")
      read_integers<std::int8_t>(out, read, refuse);
    else if (dtype == "I16")
      read_integers<std::int16_t>(out, read, refuse);
    else if (dtype == "U16")
      read_integers<std::uint16_t>(out, read, refuse);
    else if (dtype == "I32")
      read_integers<std::int32_t>(out, read, refuse);
    else if (dtype == "U32")
      read_integers<std::uint32_t>(out, read, refuse);
    else if (dtype == "I64")
      read_integers<std::int64_t>(out, read, refuse);
    else if (dtype == "U64")
      read_integers<std::uint64_t>(out, read, refuse);
    else
      state_->refuse(Errc::unsupported, *t, "dtype ", dtype,
                     " is none of integers; read<float>() reads F32, F16, ",
                     "BF16 and F64, and read_bytes() all");
  }
  return out;
}

template std::vector<float> TensorSource::read<float>(std::string_view) const;
template std::vector<std::int32_t> TensorSource::read<std::int32_t>(std::string_view) const;
template std::vector<std::int64_t> TensorSource::read<std::int64_t>(std::string_view) const;

void TensorSource::read_f32(const TensorInfo& t, std::uint64_t begin, std::span<float> out) const {
  if (begin > t.count || out.size() > t.count - begin)
    state_->refuse(Errc::invalid_argument, t, "elements ", begin, " to ", begin + out.size(),
                   " requested of ", t.count);
  if (!is_float_dtype(t.dtype))
    state_->refuse(Errc::unsupported, t, "dtype ", t.dtype,
                   " cannot be read as f32; F32, F16, BF16 and F64 can");
  const Read& read = state_->at(t).read;
  if (t.dtype == "F32") return read(begin * sizeof(float), std::as_writable_bytes(out));
  if (t.dtype == "F64") return read_widened<double>(begin, out, read);
  if (t.dtype == "F16") return read_widened<f16>(begin, out, read);
  read_widened<bf16>(begin, out, read);
}

void TensorSource::read_bytes(const TensorInfo& t, std::uint64_t begin, std::span<std::byte> out) const {
  if (begin > t.bytes || out.size() > t.bytes - begin)
    state_->refuse(Errc::invalid_argument, t, "bytes from ", begin, " on, ", out.size(),
                   " of them, requested of ", t.bytes);
  const std::uint64_t size = t.count > 0 && t.bytes % t.count == 0 ? t.bytes / t.count : 1;
  if (begin % size != 0 || out.size() % size != 0)
    state_->refuse(Errc::invalid_argument, t, out.size(), " bytes from ", begin,
                   " on are no whole elements of ", size, " bytes");
  state_->at(t).read(begin, out);
}

void require_whole_bytes(const TensorSource& source) {
  for (const TensorInfo& t : source.tensors()) {
    const unsigned bits = safetensors_bits(t.dtype);
    require(bits > 0 && bits % 8 == 0, Errc::unsupported,
            escaped(concat(source.path(), ": tensor '", t.name, "': its dtype ", t.dtype,
                           " cannot be converted")));
  }
}

}  // namespace rz
