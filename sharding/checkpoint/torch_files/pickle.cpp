#include "sharding/checkpoint/torch_files/pickle.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <map>
#include <unordered_map>

#include "comm/core/error.h"
#include "sharding/io/text.h"

namespace rz {
namespace {

constexpr std::uint64_t max_pickle_bytes = std::uint64_t{256} << 20,
                        max_pickled_text_bytes = std::uint64_t{64} << 20;
constexpr std::size_t max_values = std::size_t{4} << 20, max_items = std::size_t{16} << 20, max_marks = 1000;
constexpr std::size_t max_dict_items = std::size_t{1} << 17;
/// The longest name of a module, and in it. A pickle may name one again at each of its bytes.
constexpr std::size_t max_name_bytes = 250;

constexpr PickleId none_id = 0, false_id = 1, true_id = 2;

/// Bytes of a file in their order.
class PickleInput {
 public:
  PickleInput(const InputFile& file, std::uint64_t begin, std::uint64_t end)
      : file_(file), begin_(begin), end_(std::min(end, file.size())), next_(begin) {}

  std::uint64_t position() const { return next_ - (filled_ - at_); }

  template <class... T>
  [[noreturn]] void fail_here(Errc code, const T&... parts) const {
    fail(code, escaped(concat(file_.path(), ": the pickle at byte ", position(), ": ", parts...)));
  }
  template <class... T>
  void check(bool ok, const T&... parts) const {
    if (!ok) fail_here(Errc::io, parts...);
  }

  std::uint8_t byte() {
    if (at_ == filled_) refill();
    return static_cast<std::uint8_t>(block_[at_++]);
  }

  /// A little-endian number.
  template <class T>
  T number() {
    std::array<std::uint8_t, sizeof(T)> bytes;
    for (auto& b : bytes) b = byte();
    return std::bit_cast<T>(bytes);
  }

  std::string bytes(std::uint64_t count) {
    check(count <= end_ - std::min(end_, position()), "a text of ", count,
          " bytes does not fit into the file");
    count_text(count);
    std::string out(count, '\0');
    for (char& c : out) c = static_cast<char>(byte());
    return out;
  }

  /// Texts, bytes and names that will be held, wherever they come from.
  void count_text(std::uint64_t bytes) {
    check(bytes <= max_pickled_text_bytes - text_bytes_, "texts of more than ", max_pickled_text_bytes,
          " bytes");
    text_bytes_ += bytes;
  }

  std::string line() {
    std::string out;
    for (std::uint8_t c; (c = byte()) != '\n';) {
      check(out.size() < max_name_bytes, "a name of more than ", max_name_bytes, " bytes");
      out += static_cast<char>(c);
    }
    return out;
  }

 private:
  void refill() {
    check(next_ < end_, "it ends early; the file is cut off or damaged");
    check(next_ - begin_ < max_pickle_bytes, "it is longer than ", max_pickle_bytes, " bytes");
    filled_ = static_cast<std::size_t>(std::min<std::uint64_t>(block_.size(), end_ - next_));
    file_.read(next_, std::span(block_).first(filled_));
    next_ += filled_, at_ = 0;
  }

  const InputFile& file_;
  std::uint64_t begin_, end_, next_;
  std::uint64_t text_bytes_ = 0;
  std::array<std::byte, 1 << 14> block_;
  std::size_t at_ = 0, filled_ = 0;
};

/// The names whose values are plain. Python 2 has __builtin__, and protocol 2 its names.
bool is_builtin(std::string_view name, std::string_view what) {
  for (const std::string_view module : {"builtins.", "__builtin__."})
    if (name.starts_with(module) && name.substr(module.size()) == what) return true;
  return false;
}
bool is_set(std::string_view name) { return is_builtin(name, "set") || is_builtin(name, "frozenset"); }
bool is_bytes(std::string_view name) { return is_builtin(name, "bytes") || is_builtin(name, "bytearray"); }
constexpr std::string_view ordered_dict = "collections.OrderedDict", encode = "_codecs.encode";
bool is_plain(std::string_view name) {
  return name == ordered_dict || name == encode || is_set(name) || is_bytes(name);
}

class PickleMachine {
 public:
  PickleMachine(PickleInput& in, PicklePermission permission) : in_(in), permission_(permission) {
    pickle_.values = {PickleNone{}, false, true};
    pickle_.names = std::make_shared<PickleNames>();
  }

  Pickle run() {
    while (step(in_.byte())) {
    }
    pickle_.root = pop();
    in_.check(stack_.empty() && marks_.empty(), "it ends with values on its stack");
    pickle_.end = in_.position();
    return std::move(pickle_);
  }

 private:
  // ---- stack

  void push(PickleId id) {
    in_.check(stack_.size() < max_values, "more than ", max_values, " values on its stack");
    stack_.push_back(id);
  }
  void push_new(PickleValue value) {
    in_.check(pickle_.values.size() < max_values, "more than ", max_values, " values");
    pickle_.values.push_back(std::move(value));
    push(static_cast<PickleId>(pickle_.values.size() - 1));
  }
  PickleId top() const {
    in_.check(stack_.size() > (marks_.empty() ? 0 : marks_.back()), "its stack is empty");
    return stack_.back();
  }
  PickleId pop() {
    const PickleId id = top();
    stack_.pop_back();
    return id;
  }
  std::vector<PickleId> pop_mark() {
    in_.check(!marks_.empty(), "it has no mark");
    const auto from = stack_.begin() + static_cast<std::ptrdiff_t>(marks_.back());
    std::vector<PickleId> items(from, stack_.end());
    stack_.erase(from, stack_.end());
    marks_.pop_back();
    return items;
  }
  std::vector<PickleId> pop_some(std::size_t count) {
    std::vector<PickleId> items(count);
    for (std::size_t i = count; i-- > 0;) items[i] = pop();
    return items;
  }
  template <class T>
  T& top_as(const char* what) {
    T* value = std::get_if<T>(&pickle_.values[top()]);
    in_.check(value != nullptr, what, " where it has ", kind_of(pickle_.values[top()]));
    return *value;
  }
  void count_items(std::size_t count) {
    in_.check(count <= max_items - items_, "more than ", max_items, " items");
    items_ += count;
  }

  // ---- memo

  void put(std::uint64_t key) {
    const PickleId id = top();
    in_.check(memo_.size() < max_values, "more than ", max_values, " values in its memo");
    memo_[key] = id;
  }
  void get(std::uint64_t key) {
    const auto found = memo_.find(key);
    in_.check(found != memo_.end(), "its memo has no value ", key);
    push(found->second);
  }

  // ---- values

  void push_long(std::uint64_t count) {
    const std::string bytes = in_.bytes(count);
    if (bytes.size() > 8) return push_new(PickleLong{bytes});
    // Sign extension of a shorter number.
    std::uint64_t value = !bytes.empty() && (bytes.back() & 0x80) ? ~std::uint64_t{0} : 0;
    std::memcpy(&value, bytes.data(), bytes.size());
    push_new(static_cast<std::int64_t>(value));
  }

  /// A text of Python 2 is bytes, which are text if they are UTF-8.
  void push_string(std::uint64_t count) {
    std::string bytes = in_.bytes(count);
    if (is_utf8(bytes)) return push_new(PickleText{std::move(bytes)});
    push_new(PickleBytes{std::move(bytes)});
  }

  void push_text(std::uint64_t count) {
    std::string text = in_.bytes(count);
    // Python encodes lone surrogates too, which are no UTF-8.
    in_.check(is_utf8(text), "a text is not UTF-8");
    push_new(PickleText{std::move(text)});
  }

  void push_tuple(std::vector<PickleId> items) {
    count_items(items.size());
    push_new(PickleTuple{std::move(items)});
  }
  void push_list(std::vector<PickleId> items) {
    count_items(items.size());
    push_new(PickleList{std::move(items)});
  }

  void append(const std::vector<PickleId>& items) {
    auto& list = top_as<PickleList>("it appends to a list").items;
    count_items(items.size());
    list.insert(list.end(), items.begin(), items.end());
  }

  void add_pairs(PickleDict& dict, const std::vector<PickleId>& items) {
    in_.check(items.size() % 2 == 0, "a key of a dict has no value");
    count_items(items.size());
    for (std::size_t i = 0; i < items.size(); i += 2) dict.items.emplace_back(items[i], items[i + 1]);
  }
  void set_items(const std::vector<PickleId>& items) {
    add_pairs(top_as<PickleDict>("it sets an item of a dict"), items);
  }
  void push_dict(const std::vector<PickleId>& items) {
    PickleDict dict;
    add_pairs(dict, items);
    push_new(std::move(dict));
  }

  // ---- names and calls

  void push_global(const std::string& module, const std::string& name) {
    const std::string full = module + "." + name;
    if (!is_plain(full) && permission_(full) == PickleUse::refused)
      in_.fail_here(
          Errc::unsupported, "needs '", full,
          "', which is none of the types that weights consist of; load the file with PyTorch and save "
          "the state dict alone");
    push_new(PickleGlobal{held_name(full)});
  }
  void push_stack_global() {
    const PickleId name = pop(), module = pop();
    const auto *n = pickle_.get<PickleText>(name), *m = pickle_.get<PickleText>(module);
    in_.check(n && m, "a name is no text");
    in_.check(n->text.size() <= max_name_bytes && m->text.size() <= max_name_bytes, "a name of more than ",
              max_name_bytes, " bytes");
    push_global(m->text, n->text);
  }
  std::string_view held_name(std::string_view name) {
    auto found = pickle_.names->find(name);
    if (found == pickle_.names->end()) {
      in_.count_text(name.size());
      found = pickle_.names->emplace(name).first;
    }
    return *found;
  }

  using Items = std::vector<PickleId>;

  /// Valid as long as the pickle, whose tuples do not change.
  const Items& pop_arguments() {
    const PickleId id = pop();
    const auto* tuple = pickle_.get<PickleTuple>(id);
    in_.check(tuple != nullptr, "a call has ", kind_of(pickle_.values[id]), " as its arguments");
    return tuple->items;
  }
  std::string_view pop_callable() {
    const PickleId id = pop();
    const auto* global = pickle_.get<PickleGlobal>(id);
    in_.check(global != nullptr, "it calls ", kind_of(pickle_.values[id]));
    return global->name;
  }

  void reduce() {
    const Items& arguments = pop_arguments();
    const std::string_view name = pop_callable();
    if (is_plain(name)) return push_plain(name, arguments);
    if (permission_(name) < PickleUse::call) in_.fail_here(Errc::unsupported, "calls '", name, "'");
    push_call(name, arguments);
  }
  void new_object(bool has_keywords) {
    if (has_keywords) pop();
    const Items& arguments = pop_arguments();
    const std::string_view name = pop_callable();
    if (name == ordered_dict) return push_plain(name, arguments);
    if (permission_(name) != PickleUse::object) in_.fail_here(Errc::unsupported, "makes a '", name, "'");
    push_call(name, arguments);
  }
  void push_call(std::string_view name, const Items& arguments) {
    count_items(arguments.size());
    push_new(PickleCall{name, arguments});
  }

  void push_plain(std::string_view name, const Items& arguments) {
    if (name == ordered_dict) return push_ordered_dict(arguments);
    if (is_set(name)) return push_set(arguments.empty() ? arguments : items_of(arguments[0]));
    push_encoded(name, arguments);
  }
  void push_set(const Items& items) {
    count_items(items.size());
    push_new(PickleList{items});
  }

  const Items& items_of(PickleId id) const {
    if (const auto* list = pickle_.get<PickleList>(id)) return list->items;
    const auto* tuple = pickle_.get<PickleTuple>(id);
    in_.check(tuple != nullptr, "has ", kind_of(pickle_.values[id]), " where a list is needed");
    return tuple->items;
  }

  /// Python 2 has the items as an argument.
  void push_ordered_dict(const Items& arguments) {
    PickleDict dict;
    if (!arguments.empty()) {
      const Items& pairs = items_of(arguments[0]);
      count_items(2 * pairs.size());
      dict.items.reserve(pairs.size());
      for (const PickleId pair : pairs) {
        const Items& both = items_of(pair);
        in_.check(both.size() == 2, "an item of a dict is no pair");
        dict.items.emplace_back(both[0], both[1]);
      }
    }
    push_new(std::move(dict));
  }

  /// Protocol 2 has bytes as a text of the characters U+0000 to U+00FF and its encoding.
  void push_encoded(std::string_view name, const Items& arguments) {
    if (arguments.empty()) return push_new(PickleBytes{});
    if (pickle_.get<PickleBytes>(arguments[0])) return push(arguments[0]);  // values do not change
    const auto* text = pickle_.get<PickleText>(arguments[0]);
    in_.check(text != nullptr, name, " has ", kind_of(pickle_.values[arguments[0]]), " as its argument");
    in_.count_text(text->text.size());
    std::string out;
    out.reserve(text->text.size());
    for (std::size_t i = 0; i < text->text.size(); ++i) {
      const auto c = static_cast<std::uint8_t>(text->text[i]);
      in_.check(c < 0xc4, "bytes have a character above U+00FF");
      out += static_cast<char>(c < 0x80 ? c : (c & 3) << 6 | (text->text[++i] & 0x3f));
    }
    push_new(PickleBytes{std::move(out)});
  }

  /// Attributes of an object, such as _metadata of a state dict, are left out.
  void build() {
    pop();
    const PickleValue& object = pickle_.values[top()];
    in_.check(std::holds_alternative<PickleDict>(object) || std::holds_alternative<PickleCall>(object),
              "it sets attributes of ", kind_of(object));
  }

  // ---- opcodes: 'x' or their hexadecimal number, by pickletools

  /// False after the last opcode.
  bool step(std::uint8_t op) {
    if (op == '.') return false;
    if (!step_stack(op) && !step_container(op) && !step_value(op) && !step_call(op))
      in_.fail_here(Errc::unsupported, "opcode ", op, " is none of protocols 2 to 5 that weights need");
    return true;
  }

  bool step_stack(std::uint8_t op) {
    switch (op) {
      case 0x80: {  // PROTO
        const auto protocol = in_.byte();
        if (protocol < 2 || protocol > 5)
          in_.fail_here(Errc::unsupported, "protocol ", protocol, " is not 2 to 5");
        return true;
      }
      case 0x95:
        return in_.number<std::uint64_t>(), true;  // FRAME
      case '(':
        in_.check(marks_.size() < max_marks, "more than ", max_marks, " marks within each other");
        return marks_.push_back(stack_.size()), true;
      case '0':
        return pop_or_unmark(), true;
      case '1':
        return pop_mark(), true;
      case '2':
        return push(top()), true;
      case 'q':
        return put(in_.byte()), true;
      case 'r':
        return put(in_.number<std::uint32_t>()), true;
      case 0x94:
        return put(memo_.size()), true;  // MEMOIZE
      case 'h':
        return get(in_.byte()), true;
      case 'j':
        return get(in_.number<std::uint32_t>()), true;
      default:
        return false;
    }
  }

  bool step_container(std::uint8_t op) {
    switch (op) {
      case ']':
        return push_new(PickleList{}), true;
      case 'l':
        return push_list(pop_mark()), true;
      case 'a':
        return append(pop_some(1)), true;
      case 'e':
        return append(pop_mark()), true;
      case ')':
        return push_new(PickleTuple{}), true;
      case 't':
        return push_tuple(pop_mark()), true;
      case 0x85:
        return push_tuple(pop_some(1)), true;
      case 0x86:
        return push_tuple(pop_some(2)), true;
      case 0x87:
        return push_tuple(pop_some(3)), true;
      case '}':
        return push_new(PickleDict{}), true;
      case 'd':
        return push_dict(pop_mark()), true;
      case 's':
        return set_items(pop_some(2)), true;
      case 'u':
        return set_items(pop_mark()), true;
      case 0x8f:
        return push_new(PickleList{}), true;  // EMPTY_SET
      case 0x90:
        return append(pop_mark()), true;  // ADDITEMS
      case 0x91:
        return push_list(pop_mark()), true;  // FROZENSET
      default:
        return false;
    }
  }

  void pop_or_unmark() {
    if (!marks_.empty() && marks_.back() == stack_.size()) return marks_.pop_back();
    pop();
  }

  bool step_value(std::uint8_t op) {
    switch (op) {
      case 'N':
        return push(none_id), true;
      case 0x88:
        return push(true_id), true;
      case 0x89:
        return push(false_id), true;
      case 'J':
        return push_new(std::int64_t{in_.number<std::int32_t>()}), true;
      case 'K':
        return push_new(std::int64_t{in_.byte()}), true;
      case 'M':
        return push_new(std::int64_t{in_.number<std::uint16_t>()}), true;
      case 0x8a:
        return push_long(in_.byte()), true;
      case 0x8b:
        return push_long(in_.number<std::uint32_t>()), true;
      case 'G':
        return push_new(std::bit_cast<double>(__builtin_bswap64(in_.number<std::uint64_t>()))), true;
      case 'X':
        return push_text(in_.number<std::uint32_t>()), true;
      case 0x8c:
        return push_text(in_.byte()), true;
      case 0x8d:
        return push_text(in_.number<std::uint64_t>()), true;
      case 'U':
        return push_string(in_.byte()), true;
      case 'T':
        return push_string(in_.number<std::uint32_t>()), true;
      case 'C':
        return push_new(PickleBytes{in_.bytes(in_.byte())}), true;
      case 'B':
        return push_new(PickleBytes{in_.bytes(in_.number<std::uint32_t>())}), true;
      case 0x8e:
      case 0x96:
        return push_new(PickleBytes{in_.bytes(in_.number<std::uint64_t>())}), true;
      default:
        return false;
    }
  }

  bool step_call(std::uint8_t op) {
    switch (op) {
      case 'c': {
        const std::string module = in_.line();
        return push_global(module, in_.line()), true;
      }
      case 0x93:
        return push_stack_global(), true;
      case 'R':
        return reduce(), true;
      case 0x81:
        return new_object(false), true;
      case 0x92:
        return new_object(true), true;
      case 'b':
        return build(), true;
      case 'Q':
        return push_call(held_name(pickle_persistent_id), {pop()}), true;
      default:
        return false;
    }
  }

  PickleInput& in_;
  PicklePermission permission_;
  Pickle pickle_;
  std::vector<PickleId> stack_;
  std::vector<std::size_t> marks_;
  std::unordered_map<std::uint64_t, PickleId> memo_;
  std::size_t items_ = 0;
};

}  // namespace

const PickleId* Pickle::find(PickleId id, std::string_view key) const {
  const auto* dict = get<PickleDict>(id);
  if (!dict) return nullptr;
  for (auto item = dict->items.rbegin(); item != dict->items.rend(); ++item)
    if (const auto* text = get<PickleText>(item->first); text && text->text == key) return &item->second;
  return nullptr;
}

std::vector<std::pair<PickleId, PickleId>> Pickle::items(PickleId id) const {
  std::vector<std::pair<PickleId, PickleId>> all;
  const auto* dict = get<PickleDict>(id);
  if (!dict) return all;
  // Keys are compared once, since a pickle may name a long one again at each of its bytes.
  std::unordered_map<PickleId, std::size_t> of_key;
  std::map<std::string_view, std::size_t> of_text;
  for (const auto& [key, value] : dict->items) {
    const auto [place, is_new_key] = of_key.emplace(key, all.size());
    if (is_new_key) {
      const auto* text = get<PickleText>(key);
      if (text) place->second = of_text.emplace(text->text, all.size()).first->second;
      if (place->second == all.size()) all.emplace_back(key, value);
    }
    all[place->second].second = value;
    require(all.size() <= max_dict_items, Errc::io, "a dict has more than ", max_dict_items, " keys");
  }
  return all;
}

std::string kind_of(const PickleValue& value) {
  if (const auto* global = std::get_if<PickleGlobal>(&value)) return concat("the name '", global->name, "'");
  if (const auto* call = std::get_if<PickleCall>(&value)) return concat("a '", call->name, "'");
  constexpr const char* kinds[] = {"None",  "a boolean",  "an integer", "a number", "a text",
                                   "bytes", "an integer", "a list",     "a tuple",  "a dict"};
  return kinds[value.index()];
}

Pickle read_pickle(const InputFile& file, std::uint64_t begin, std::uint64_t end,
                   PicklePermission permission) {
  PickleInput in(file, begin, end);
  return PickleMachine(in, permission).run();
}

}  // namespace rz
