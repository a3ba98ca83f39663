#pragma once
/// Checkpoints as DeepSpeed writes them, for tests that have no DeepSpeed.

#include <cstdio>
#include <filesystem>
#include <numeric>
#include <string>
#include <vector>

#include "tests/support/torch_writer.h"

namespace rz::test {

/// A checkpoint of a model whose values are known: element i of parameter number p is 1000 p + i.
struct DeepSpeedWriter {
  struct Parameter {
    std::string name;
    std::vector<std::uint64_t> shape;
    std::size_t group = 0;
    bool frozen = false;
    std::uint64_t count() const {
      return std::accumulate(shape.begin(), shape.end(), std::uint64_t{1}, std::multiplies<>());
    }
  };
  int stage = 2;
  std::size_t ranks = 2, groups = 2;
  std::vector<Parameter> parameters{
      {"emb.weight", {3, 5}, 0}, {"a.weight", {7, 1}, 0},         {"a.bias", {7}, 1},
      {"b.weight", {2, 2}, 0},   {"frozen.weight", {5}, 0, true}, {"b.bias", {}, 1}};
  std::uint64_t padding_to = 0;  ///< elements of a group; 0: a multiple of 2 × ranks
  std::size_t sub_group = 6;     ///< elements of a group of stage 3
  std::string stage_value;       ///< a pickle instead of the enumeration's; "none" leaves it out
  std::string partition_count;   ///< a pickle instead of the number of ranks
  std::string more_of_model;     ///< items of the model's state
  std::string front;             ///< of the names of optimizer files

  std::vector<float> values(std::size_t p) const {
    std::vector<float> v(parameters[p].count());
    std::iota(v.begin(), v.end(), 1000.0f * static_cast<float>(p));
    return v;
  }
  std::string model_file(std::size_t rank) const {
    return (stage == 3 ? "zero_pp_rank_" + std::to_string(rank) + "_" : "") + "mp_rank_00_model_states.pt";
  }
  std::string optimizer_file(std::size_t rank) const {
    return front + "zero_pp_rank_" + std::to_string(rank) + "_mp_rank_00_optim_states.pt";
  }

  void write(const std::string& folder) const {
    std::filesystem::create_directories(folder);
    for (std::size_t r = 0; r < (stage == 3 ? ranks : 1); ++r) write_model(folder, r);
    for (std::size_t r = 0; stage > 0 && r < ranks; ++r) write_optimizer(folder, r);
  }

  void write_model(const std::string& folder, std::size_t rank) const {
    using namespace pickle;
    TorchWriter w;
    Pairs module, frozen_shapes, fragments;
    std::vector<Pairs> shapes(groups);
    for (std::size_t p = 0; p < parameters.size(); ++p) {
      const Parameter& q = parameters[p];
      module.emplace_back(text(q.name),
                          stage == 3 ? w.tensor(std::vector<float>{}, {0}) : half(w, values(p), q.shape));
      if (!q.frozen) {
        shapes[q.group].emplace_back(text(q.name), size(q.shape));
        continue;
      }
      frozen_shapes.emplace_back(text(q.name), size(q.shape));
      const auto part = stage == 3 ? part_of(p, rank) : values(p);
      fragments.emplace_back(text(q.name), half(w, part, {part.size()}));
    }
    module.emplace_back(text("tied.weight"), stage == 3 ? w.tensor(std::vector<float>{}, {0})
                                                        : half(w, values(0), parameters[0].shape));
    // A placeholder without masters, as of a frozen parameter that was left out.
    if (stage == 3) module.emplace_back(text("left_out.weight"), w.tensor(std::vector<float>{}, {0}));
    module.emplace_back(text("count"), w.tensor(std::vector<std::int64_t>{5, 6}, {2}, "LongStorage"));
    Pairs state{{text("module"), state_dict(module)}, {text("buffer_names"), list({text("count")})}};
    if (stage > 0) {
      Values lists;
      for (const Pairs& s : shapes) lists.push_back(ordered_dict(s));
      state.emplace_back(text("param_shapes"), list(lists));
      state.emplace_back(text("shared_params"), dict({{text("tied.weight"), text("emb.weight")}}));
    }
    state.emplace_back(text("frozen_param_shapes"), stage > 1 ? ordered_dict(frozen_shapes) : none());
    state.emplace_back(text("frozen_param_fragments"), stage > 1 ? ordered_dict(fragments) : none());
    state.emplace_back(text("ds_version"), text("0.19"));
    w.write(folder + "/" + model_file(rank),
            dict(state) + (more_of_model.empty() ? "" : "(" + more_of_model + "u"));
  }

  void write_optimizer(const std::string& folder, std::size_t rank) const {
    using namespace pickle;
    TorchWriter w;
    Values flat;
    for (const auto& part : stage == 3 ? sub_groups(rank) : parts_of_groups(rank))
      flat.push_back(w.tensor(part, {part.size()}));
    Pairs state{
        {text(stage == 3 ? "fp32_flat_groups" : "single_partition_of_fp32_groups"), list(flat)},
        {text("loss_scaler"), object(global("deepspeed.runtime.fp16.loss_scaler", "LossScaler"), {})}};
    const auto count = integer(static_cast<std::int64_t>(ranks));
    state.emplace_back(text("partition_count"), !partition_count.empty() ? partition_count
                                                : stage == 3             ? count
                                                                         : list(Values(groups, count)));
    const std::string stages = global("deepspeed.runtime.zero.config", "ZeroStageEnum");
    if (stage_value != "none")
      state.emplace_back(text("zero_stage"),
                         stage_value.empty() ? call(stages, {integer(stage)}) : stage_value);
    w.write(folder + "/" + optimizer_file(rank), dict({{text("optimizer_state_dict"), dict(state)}}));
  }

  /// f32 values as bf16, exact up to 256.
  static std::string half(TorchWriter& w, const std::vector<float>& v,
                          const std::vector<std::uint64_t>& shape) {
    std::vector<std::uint16_t> bits;
    for (const float x : v) {
      std::uint32_t all;
      std::memcpy(&all, &x, 4);
      bits.push_back(static_cast<std::uint16_t>(all >> 16));
    }
    return w.tensor(bits, shape, "BFloat16Storage");
  }

  /// Rank r's part of each group.
  std::vector<std::vector<float>> parts_of_groups(std::size_t rank) const {
    std::vector<std::vector<float>> parts;
    for (std::size_t g = 0; g < groups; ++g) {
      std::vector<float> all;
      for (std::size_t p = 0; p < parameters.size(); ++p)
        if (const auto v = values(p); parameters[p].group == g && !parameters[p].frozen)
          all.insert(all.end(), v.begin(), v.end());
      const std::size_t unit = 2 * ranks;
      all.resize(padding_to ? padding_to : (all.size() + unit - 1) / unit * unit, -1);
      const std::size_t n = all.size() / ranks;
      parts.emplace_back(all.begin() + static_cast<std::ptrdiff_t>(rank * n),
                         all.begin() + static_cast<std::ptrdiff_t>((rank + 1) * n));
    }
    return parts;
  }
  /// Rank r's part of a parameter, in stage 3.
  std::vector<float> part_of(std::size_t p, std::size_t rank) const {
    auto v = values(p);
    const std::size_t n = (v.size() + ranks - 1) / ranks;
    v.resize(n * ranks, -1);
    return {v.begin() + static_cast<std::ptrdiff_t>(rank * n),
            v.begin() + static_cast<std::ptrdiff_t>((rank + 1) * n)};
  }
  /// All parts of a rank in stage 3, cut at other places than the parameters.
  std::vector<std::vector<float>> sub_groups(std::size_t rank) const {
    std::vector<float> all;
    for (std::size_t g = 0; g < groups; ++g)
      for (std::size_t p = 0; p < parameters.size(); ++p)
        if (parameters[p].group == g && !parameters[p].frozen) {
          const auto part = part_of(p, rank);
          all.insert(all.end(), part.begin(), part.end());
        }
    all.resize(padding_to ? padding_to : all.size(), -1);
    std::vector<std::vector<float>> cut;
    for (std::size_t at = 0; at < all.size(); at += sub_group)
      cut.emplace_back(all.begin() + static_cast<std::ptrdiff_t>(at),
                       all.begin() + static_cast<std::ptrdiff_t>(std::min(all.size(), at + sub_group)));
    return cut;
  }
};

}  // namespace rz::test
