#include "sharding/checkpoint/deepspeed_weights.h"

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <set>

#include "comm/core/error.h"
#include "sharding/checkpoint/torch_files/torch_file.h"
#include "sharding/io/text.h"

namespace rz {
namespace {

using std::uint64_t;
using Extents = std::vector<uint64_t>;

/// Elements [begin, begin + count) of a tensor in a file are the elements from `at` on.
struct Piece {
  std::size_t tensor = 0;
  uint64_t begin = 0, count = 0, at = 0;
};

/// A tensor that is in several files.
struct ZeroTensor {
  TensorInfo info;
  std::vector<Piece> pieces;
};

template <class... T>
void check_states(bool ok, const TorchFile& file, const T&... parts) {
  if (!ok) fail(Errc::io, escaped(concat(file.path(), ": ", parts...)));
}

uint64_t count_of(const Extents& shape) {
  uint64_t count = 1;
  for (const uint64_t n : shape) count *= n;  // TorchFile::shape() has checked the product
  return count;
}

/// A list may have one value many times, and so may the parameters of all groups.
constexpr std::size_t max_groups = std::size_t{1} << 16, max_parameters = std::size_t{1} << 18;

struct NamedShape {
  std::string name;
  Extents shape;
};

/// Values of one file.
class StateReader {
 public:
  explicit StateReader(const TorchFile& file) : file_(file), p_(file.pickle()) {}

  const TorchFile& file() const { return file_; }
  const Pickle& pickle() const { return p_; }

  /// nullptr if the key is absent or None.
  const PickleId* find(PickleId dict, const char* key) const {
    const PickleId* value = p_.find(dict, key);
    return value && !p_.get<PickleNone>(*value) ? value : nullptr;
  }
  PickleId at(PickleId dict, const char* key) const {
    const PickleId* value = find(dict, key);
    check_states(value != nullptr, file_, "has no ", key, "; it is no state of DeepSpeed, or damaged");
    return *value;
  }
  const std::vector<PickleId>& list(PickleId id, const char* what) const {
    const auto* list = p_.get<PickleList>(id);
    check_states(list != nullptr, file_, what, " is ", kind_of(p_.values[id]), " instead of a list");
    check_states(list->items.size() <= max_groups, file_, what, " has more than ", max_groups, " items");
    return list->items;
  }
  std::string text(PickleId id, const char* what) const {
    const auto* text = p_.get<PickleText>(id);
    check_states(text != nullptr, file_, "in ", what, " a name is ", kind_of(p_.values[id]));
    return text->text;
  }
  /// The last value of each key of a dict, in the order of the keys.
  std::vector<std::pair<std::string, PickleId>> items(PickleId id, const char* what) const {
    check_states(p_.get<PickleDict>(id) != nullptr, file_, what, " is ", kind_of(p_.values[id]),
                 " instead of a dict");
    std::vector<std::pair<std::string, PickleId>> all;
    for (const auto& [key, value] : items_of(file_, id)) all.emplace_back(text(key, what), value);
    return all;
  }
  std::vector<NamedShape> shapes(PickleId id, const char* what) const {
    std::vector<NamedShape> all;
    for (const auto& [name, value] : items(id, what)) {
      auto shape = file_.shape(value);
      check_states(shape.has_value(), file_, what, " of '", name, "' is no shape");
      all.push_back({name, std::move(*shape)});
    }
    return all;
  }
  TorchTensor tensor(PickleId id, const std::string& what) const {
    auto t = file_.tensor(id, what);
    check_states(t.has_value(), file_, what, " is ", kind_of(p_.values[id]), " instead of a tensor");
    return *t;
  }
  /// An integer, or a member of the enumeration of stages.
  std::optional<uint64_t> integer(PickleId id) const {
    if (const auto* call = p_.get<PickleCall>(id)) return member(*call);
    const auto* n = p_.get<std::int64_t>(id);
    return n && *n >= 0 ? std::optional(static_cast<uint64_t>(*n)) : std::nullopt;
  }

 private:
  /// ZeroStageEnum(2), or getattr(ZeroStageEnum, 'gradients').
  std::optional<uint64_t> member(const PickleCall& call) const {
    if (call.arguments.size() == 1) {
      const auto* n = p_.get<std::int64_t>(call.arguments[0]);
      return n && *n >= 0 ? std::optional(static_cast<uint64_t>(*n)) : std::nullopt;
    }
    const char* names[] = {"disabled", "optimizer_states", "gradients", "weights"};
    const auto* name = call.arguments.size() == 2 ? p_.get<PickleText>(call.arguments[1]) : nullptr;
    for (uint64_t stage = 0; name && stage < std::size(names); ++stage)
      if (name->text == names[stage]) return stage;
    return std::nullopt;
  }

  const TorchFile& file_;
  const Pickle& p_;
};

/// Tensors of files, one after the other.
struct FlatVector {
  std::vector<Piece> pieces;
  uint64_t count = 0;

  void add(std::size_t tensor, uint64_t elements) {
    if (elements > 0) pieces.push_back({tensor, 0, elements, count});
    count += elements;
  }
  /// Appends elements [begin, begin + n), which there are, to pieces that have `at` elements.
  void cut(uint64_t begin, uint64_t n, uint64_t at, std::vector<Piece>& out) const {
    auto piece = std::ranges::upper_bound(pieces, begin, {}, &Piece::at);
    for (piece -= piece != pieces.begin(); n > 0; ++piece) {
      const uint64_t skipped = begin - piece->at, run = std::min(n, piece->count - skipped);
      out.push_back({piece->tensor, piece->begin + skipped, run, at});
      begin += run, n -= run, at += run;
    }
  }
};

/// Tensors in files, with numbers by which pieces name them.
using StoredTensors = std::vector<std::pair<TorchFile, TorchTensor>>;

/// Collects the tensors of a checkpoint by their names.
class Consolidator {
 public:
  Consolidator(const DeepSpeedFiles& files, std::vector<TorchFile> models, std::vector<TorchFile> optimizers)
      : files_(files),
        models_(std::move(models)),
        optimizers_(std::move(optimizers)),
        model_(models_.front()) {}

  void run() {
    const PickleId root = model_.pickle().root;
    refuse_experts(root);
    const PickleId module = model_.at(root, "module");
    if (const PickleId* shapes = model_.find(root, "param_shapes"))
      add_trainable(model_.list(*shapes, "param_shapes"));
    if (const PickleId* shapes = model_.find(root, "frozen_param_shapes")) add_frozen(*shapes);
    add_shared(root);
    add_module(module);
  }

  /// In the order of the module, and then in that of their names.
  std::vector<ZeroTensor> tensors() {
    std::vector<ZeroTensor> all;
    for (const std::string& name : order_)
      if (auto found = tensors_.extract(name)) all.push_back(std::move(found.mapped()));
    for (auto& [name, tensor] : tensors_) all.push_back(std::move(tensor));
    return all;
  }
  StoredTensors stored() { return std::move(stored_); }

 private:
  void refuse_experts(PickleId root) const {
    for (const char* key : {"autoep_layers", "ds_autoep_layers"})
      require(!model_.find(root, key), Errc::unsupported, escaped(model_.file().path()),
              ": has layers of experts (MoE), which are not read; write the weights with DeepSpeed");
  }

  std::size_t store(const TorchFile& file, const TorchTensor& t) {
    stored_.emplace_back(file, t);
    return stored_.size() - 1;
  }

  void add(const std::string& name, const std::string& dtype, const Extents& shape,
           std::vector<Piece> pieces) {
    const uint64_t count = count_of(shape), bytes = count * safetensors_bits(dtype) / 8;
    const bool is_new =
        tensors_.emplace(name, ZeroTensor{{name, dtype, shape, count, bytes}, std::move(pieces)}).second;
    check_states(is_new, model_.file(), "parameter '", name, "' occurs twice");
  }

  // ---- masters

  /// The masters of one rank, by groups: indices of stored tensors.
  using RankMasters = std::vector<std::size_t>;

  /// The stage of an optimizer file; files of BF16_Optimizer lack it and have the parts of stage 1.
  uint64_t stage_of(const StateReader& r, PickleId state) const {
    const PickleId* value = r.find(state, "zero_stage");
    if (!value) return 1;
    const auto stage = r.integer(*value);
    check_states(stage && *stage >= 1 && *stage <= 3, r.file(), "zero_stage is no stage from 1 to 3");
    return *stage;
  }

  uint64_t partitions_of(const StateReader& r, PickleId state) const {
    const PickleId id = r.at(state, "partition_count");
    if (const auto n = r.integer(id)) return *n;
    std::set<uint64_t> counts;
    for (const PickleId item : r.list(id, "partition_count")) {
      const auto n = r.integer(item);
      check_states(n.has_value(), r.file(), "partition_count is no number");
      counts.insert(*n);
    }
    check_states(!counts.empty(), r.file(), "partition_count is empty");
    require(counts.size() == 1, Errc::unsupported, escaped(r.file().path()),
            ": has groups on different numbers of ranks, as those of experts (MoE), which are not read");
    return *counts.begin();
  }

  RankMasters read_masters(const TorchFile& file) {
    const StateReader r(file);
    const PickleId state = r.at(r.pickle().root, "optimizer_state_dict");
    require(!r.find(state, "ds_zero_partition_groups"), Errc::unsupported, escaped(file.path()),
            ": has groups of experts (MoE), which are not read; write the weights with DeepSpeed");
    const uint64_t stage = stage_of(r, state), partitions = partitions_of(r, state);
    check_states(stage_ == 0 || stage == stage_, file, "is of stage ", stage, " where ",
                 optimizers_[0].path(), " is of stage ", stage_);
    stage_ = stage;
    require(partitions == optimizers_.size(), Errc::config, escaped(files_.folder),
            ": has the optimizer files of ", optimizers_.size(), " ranks where ", escaped(file.path()),
            " announces ", partitions, "; a rank's file is missing, or left from another run");
    const char* key = stage == 3 ? "fp32_flat_groups" : "single_partition_of_fp32_groups";
    RankMasters masters;
    for (const PickleId id : r.list(r.at(state, key), key)) {
      const TorchTensor t = r.tensor(id, key);
      check_states(t.dtype == "F32", file, key, " is of ", t.dtype, " instead of F32");
      masters.push_back(store(file, t));
    }
    return masters;
  }

  void add_trainable(const std::vector<PickleId>& groups) {
    require(!optimizers_.empty(), Errc::config, escaped(files_.folder),
            ": holds no file of the name *_optim_states.pt, which has the f32 weights");
    std::vector<RankMasters> ranks;
    for (const TorchFile& file : optimizers_) {
      ranks.push_back(read_masters(file));
      check_states(ranks.back().size() == ranks.front().size(), file, "has ", ranks.back().size(),
                   " groups where rank 0 has ", ranks.front().size());
    }
    std::vector<std::vector<NamedShape>> shapes;
    std::size_t parameters = 0;
    for (const PickleId group : groups) {
      shapes.push_back(model_.shapes(group, "param_shapes"));
      parameters += shapes.back().size();
      check_states(parameters <= max_parameters, model_.file(), "param_shapes has more than ", max_parameters,
                   " parameters");
    }
    stage_ == 3 ? add_partitioned(shapes, ranks) : add_flat(shapes, ranks);
  }

  /// Stages 1 and 2: the ranks' parts of a group are one vector.
  void add_flat(const std::vector<std::vector<NamedShape>>& groups, const std::vector<RankMasters>& ranks) {
    check_states(groups.size() == ranks[0].size(), model_.file(), "param_shapes has ", groups.size(),
                 " groups where the optimizer has ", ranks[0].size());
    const uint64_t alignment = 2 * ranks.size();
    for (std::size_t g = 0; g < groups.size(); ++g) {
      FlatVector flat;
      for (const RankMasters& rank : ranks) flat.add(rank[g], stored_[rank[g]].second.count);
      uint64_t at = 0;
      for (const NamedShape& p : groups[g]) {
        const uint64_t n = count_of(p.shape);
        check_states(n <= flat.count - at, model_.file(), "group ", g, " of the optimizer has ", flat.count,
                     " elements, which end within '", p.name, "'");
        std::vector<Piece> pieces;
        flat.cut(at, n, 0, pieces);
        add(p.name, "F32", p.shape, std::move(pieces));
        at += n;
      }
      check_states(flat.count - at < alignment, model_.file(), "group ", g, " of the optimizer has ",
                   flat.count, " elements where its parameters have ", at, " and padding is below ",
                   alignment);
    }
  }

  /// Stage 3: the groups of a rank are one vector with a part of each parameter.
  void add_partitioned(const std::vector<std::vector<NamedShape>>& groups,
                       const std::vector<RankMasters>& ranks) {
    std::vector<FlatVector> flat(ranks.size());
    for (std::size_t r = 0; r < ranks.size(); ++r)
      for (const std::size_t t : ranks[r]) flat[r].add(t, stored_[t].second.count);
    uint64_t at = 0;
    for (const auto& group : groups)
      for (const NamedShape& p : group) {
        const uint64_t part = part_of(count_of(p.shape));
        for (std::size_t r = 0; r < ranks.size(); ++r)
          check_states(part <= flat[r].count - at, optimizers_[r], "has ", flat[r].count,
                       " elements, which end within '", p.name, "'");
        add_parts(p, "F32", flat, at);
        at += part;
      }
    for (std::size_t r = 0; r < ranks.size(); ++r)
      check_states(flat[r].count == at, optimizers_[r], "has ", flat[r].count,
                   " elements where the parameters have ", at, " on each rank");
  }

  uint64_t part_of(uint64_t count) const {
    const uint64_t ranks = optimizers_.size();
    return count / ranks + (count % ranks != 0);
  }

  /// Adds the parameter whose parts begin at `at` of each rank's vector.
  void add_parts(const NamedShape& p, const std::string& dtype, const std::vector<FlatVector>& flat,
                 uint64_t at) {
    const uint64_t count = count_of(p.shape), part = part_of(count);
    std::vector<Piece> pieces;
    uint64_t done = 0;
    for (std::size_t r = 0; done < count; ++r) {
      const uint64_t n = std::min(part, count - done);
      flat[r].cut(at, n, done, pieces);
      done += n;
    }
    add(p.name, dtype, p.shape, std::move(pieces));
  }

  // ---- the model

  using Fragments = std::map<std::string, PickleId>;
  Fragments fragments_of(const TorchFile& file) const {
    constexpr const char* key = "frozen_param_fragments";
    const StateReader r(file);
    const auto all = r.items(r.at(r.pickle().root, key), key);
    return {all.begin(), all.end()};
  }

  void add_frozen(PickleId shapes) {
    std::vector<Fragments> fragments;
    for (const NamedShape& p : model_.shapes(shapes, "frozen_param_shapes")) {
      std::vector<FlatVector> flat;
      std::string dtype;
      const std::size_t parts = stage_ == 3 ? optimizers_.size() : 1;
      require(parts <= models_.size(), Errc::config, escaped(files_.folder), ": has the model files of ",
              models_.size(), " ranks where ", parts, " are needed; a rank's file is missing");
      for (std::size_t r = fragments.size(); r < parts; ++r) fragments.push_back(fragments_of(models_[r]));
      for (std::size_t r = 0; r < parts; ++r) {
        const StateReader reader(models_[r]);
        const auto fragment = fragments[r].find(p.name);
        check_states(fragment != fragments[r].end(), models_[r], "frozen_param_fragments lacks '", p.name,
                     "'");
        const TorchTensor t = reader.tensor(fragment->second, p.name);
        check_states(r == 0 || t.dtype == dtype, models_[r], "frozen parameter '", p.name, "' is of ",
                     t.dtype, " where rank 0 has ", dtype);
        dtype = t.dtype;
        const uint64_t expected = stage_ == 3 ? part_of(count_of(p.shape)) : count_of(p.shape);
        check_states(t.count == expected, models_[r], "frozen parameter '", p.name, "' has ", t.count,
                     " elements where ", expected, " are expected");
        flat.emplace_back().add(store(models_[r], t), t.count);
      }
      if (stage_ == 3) {
        add_parts(p, dtype, flat, 0);
      } else {
        add(p.name, dtype, p.shape, flat[0].pieces);
      }
    }
  }

  void add_shared(PickleId root) {
    const PickleId* shared = model_.find(root, "shared_params");
    if (!shared) return;
    for (const auto& [name, value] : model_.items(*shared, "shared_params")) {
      const auto found = tensors_.find(model_.text(value, "shared_params"));
      if (found == tensors_.end() || tensors_.contains(name)) continue;
      add(name, found->second.info.dtype, found->second.info.shape, found->second.pieces);
    }
  }

  /// What has no masters: everything in stage 0, buffers, frozen parameters of stage 1.
  void add_module(PickleId module) {
    for (const auto& [name, tensor] : state_dict_of(model_.file(), module)) {
      order_.push_back(name);
      if (tensors_.contains(name) || (stage_ == 3 && tensor.count == 0)) continue;
      std::vector<Piece> pieces;
      if (tensor.count > 0) pieces.push_back({store(model_.file(), tensor), 0, tensor.count, 0});
      add(name, tensor.dtype, tensor.shape, std::move(pieces));
    }
  }

  const DeepSpeedFiles& files_;
  std::vector<TorchFile> models_, optimizers_;
  StateReader model_;  // of rank 0
  uint64_t stage_ = 0;
  std::vector<std::string> order_;
  std::map<std::string, ZeroTensor> tensors_;
  StoredTensors stored_;
};

std::vector<TorchFile> open_files(const std::map<std::size_t, std::string>& paths) {
  std::vector<TorchFile> files;
  for (const auto& [rank, path] : paths) files.push_back(TorchFile::open(path, TorchContents::deepspeed));
  return files;
}

/// Reads from byte `at` on.
void read_pieces(const StoredTensors& stored, const std::vector<Piece>& pieces, uint64_t at,
                 std::span<std::byte> out) {
  if (out.empty()) return;
  const uint64_t size = stored[pieces[0].tensor].second.element_bytes;
  uint64_t begin = at / size;
  auto piece = std::ranges::upper_bound(pieces, begin, {}, &Piece::at);
  for (piece -= piece != pieces.begin(); !out.empty(); ++piece) {
    const uint64_t skipped = begin - piece->at, run = std::min(out.size() / size, piece->count - skipped);
    const auto& [file, tensor] = stored[piece->tensor];
    file.read(tensor, piece->begin + skipped, out.first(run * size));
    out = out.subspan(run * size);
    begin += run;
  }
}

}  // namespace

TensorSource open_deepspeed(const std::string& path) {
  const DeepSpeedFiles files = find_deepspeed_files(path);
  Consolidator all(files, open_files(files.models), open_files(files.optimizers));
  all.run();
  const auto stored = std::make_shared<const StoredTensors>(all.stored());
  TensorSource source(files.folder);
  for (ZeroTensor& t : all.tensors())
    source.add(std::move(t.info),
               [stored, pieces = std::move(t.pieces)](uint64_t begin, std::span<std::byte> out) {
                 read_pieces(*stored, pieces, begin, out);
               });
  return source;
}

}  // namespace rz
