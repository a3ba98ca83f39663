#include "sharding/huggingface/weight_names.h"

#include <algorithm>
#include <array>
#include <set>

#include "comm/core/error.h"
#include "sharding/io/text.h"

namespace rz {
namespace {

/// Prefixes by torch.compile(), FullyShardedDataParallel and checkpoint_wrapper().
constexpr std::array<std::string_view, 3> wrappers{"_orig_mod.", "_fsdp_wrapped_module.",
                                                   "_checkpoint_wrapped_module."};

/// The name without these parts, which begin it or follow a dot.
std::string without_wrappers(std::string name) {
  for (const std::string_view w : wrappers)
    for (auto at = name.find(w); at != name.npos; at = name.find(w, at)) {
      if (at == 0 || name[at - 1] == '.') {
        name.erase(at, w.size());
      } else {
        ++at;
      }
    }
  return name;
}

/// The dotted parts that all names begin with: "a.b." of a.b.c and a.b.d.
std::string common_prefix(const std::vector<std::pair<std::string, const TensorInfo*>>& tensors) {
  if (tensors.empty()) return "";
  std::string_view common = tensors[0].first;
  for (const auto& [name, tensor] : tensors) {
    const auto differs = std::ranges::mismatch(common, name).in1 - common.begin();
    common = common.substr(0, static_cast<std::size_t>(differs));
  }
  return std::string(common.substr(0, common.rfind('.') + 1));
}

}  // namespace

namespace {

bool matches_any(std::string_view name, std::span<const std::string> only) {
  return std::ranges::any_of(only, [&](const std::string& pattern) { return matches_part(name, pattern); });
}

template <class T>
void keep_matching(std::span<const std::string> only, std::vector<std::pair<std::string, T*>>& named) {
  std::erase_if(named, [&](const auto& n) { return !matches_any(n.first, only); });
}

}  // namespace

void select_only(std::span<const std::string> only,
                 std::vector<std::pair<std::string, Parameter*>>& parameters,
                 std::vector<std::pair<std::string, ModuleBuffer*>>& buffers) {
  if (only.empty()) return;
  std::vector<std::string> names;
  for (const auto& [name, p] : parameters) names.push_back(name);
  for (const auto& [name, b] : buffers) names.push_back(name);
  for (const std::string& pattern : only) {
    if (std::ranges::any_of(names, [&](const std::string& n) { return matches_part(n, pattern); })) continue;
    std::vector<std::string> known = names;
    for (const std::string& name : names)
      for (std::string& part : parts_of(name, '.')) known.push_back(std::move(part));
    const std::string near = nearest_name(pattern, known);
    fail(Errc::config, "only: '", escaped(pattern), "' matches no parameter",
         near.empty() ? concat("; the first is '", names.empty() ? "" : names[0], "'")
                      : concat("; did you mean '", near, "'?"));
  }
  keep_matching(only, parameters);
  keep_matching(only, buffers);
}

WeightNames::WeightNames(const TensorSource& files, std::span<const std::string> model,
                         const std::string& prefix, const NameTable& table)
    : table_(table) {
  for (const TensorInfo& t : files.tensors())
    if (t.name.starts_with(prefix)) tensors_.emplace_back(t.name.substr(prefix.size()), &t);
  require(!tensors_.empty() || prefix.empty(), Errc::config, escaped(files.path()),
          ": no tensor has the prefix '", escaped(prefix), "'");
  leave_out_wrappers(model);
  choose(model);
}

/// Unless the model has such names itself, or two names would be one.
void WeightNames::leave_out_wrappers(std::span<const std::string> model) {
  if (std::ranges::any_of(model, [](const std::string& n) { return without_wrappers(n) != n; })) return;
  std::set<std::string> names;
  for (const auto& [name, tensor] : tensors_)
    if (!names.insert(without_wrappers(name)).second) return;
  for (auto& [name, tensor] : tensors_) name = without_wrappers(name);
}

void WeightNames::choose(std::span<const std::string> model) {
  for (const auto& [name, tensor] : tensors_) by_name_[name] = tensor;
  const std::string common = common_prefix(tensors_);
  std::size_t best = 0;
  for (std::size_t end = 0; end != common.npos; end = common.find('.', end)) {
    if (end > 0) ++end;
    for (const Prefix t : {Prefix::as_is, Prefix::left_out, Prefix::added})
      if (const std::size_t n = found(model, common.substr(0, end), t); n > best)
        best = n, left_out_ = common.substr(0, end), prefix_ = t;
  }
  for (auto& [name, tensor] : tensors_) name.erase(0, left_out_.size());
}

std::size_t WeightNames::found(std::span<const std::string> model, const std::string& prefix,
                               Prefix t) const {
  return static_cast<std::size_t>(std::ranges::count_if(
      model, [&](const std::string& name) { return by_name_.contains(prefix + in_files(name, t)); }));
}

std::string WeightNames::in_files(const std::string& name, Prefix t) const {
  if (t == Prefix::left_out) return std::string(without_prefix(name));
  return t == Prefix::added && name != table_.head ? concat(table_.prefix, name) : name;
}

std::string_view WeightNames::without_prefix(std::string_view name) const {
  return name.starts_with(table_.prefix) ? name.substr(table_.prefix.size()) : name;
}

bool WeightNames::is_ignored(std::string_view name, const TensorInfo& t,
                             std::span<const std::string> model) const {
  const std::string_view parent = without_prefix(name.substr(0, name.rfind('.') + 1));
  const auto has_layer = [&](std::string_view layer) {
    return std::ranges::any_of(model, [&, path = concat(parent, layer)](const std::string& n) {
      return without_prefix(n).starts_with(path);
    });
  };
  return std::ranges::any_of(table_.ignored, [&](const NameTable::Ignored& i) {
    return !i.ending.empty() && name.ends_with(i.ending) &&
           (i.dims == 0 ? t.count == 1 : t.shape.size() == i.dims) && (i.layer.empty() || has_layer(i.layer));
  });
}

const TensorInfo* WeightNames::find(const std::string& name) const {
  const auto tensor = by_name_.find(left_out_ + in_files(name, prefix_));
  return tensor == by_name_.end() ? nullptr : tensor->second;
}

std::string WeightNames::likely_prefix(std::span<const std::string> model) const {
  std::string best;
  std::size_t max_count = found(model, left_out_, prefix_);
  std::set<std::string> tried;
  for (const std::string& name : model.first(std::min<std::size_t>(model.size(), 4)))
    for (const auto& [stored, tensor] : by_name_) {
      if (!stored.ends_with("." + name)) continue;
      const std::string prefix = stored.substr(0, stored.size() - name.size());
      if (!tried.insert(prefix).second || tried.size() > 64) continue;
      if (const std::size_t n = found(model, prefix, Prefix::as_is); n > max_count)
        max_count = n, best = prefix;
    }
  return best;
}

}  // namespace rz
