#include "tools/plan/report.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "comm/core/text.h"

namespace rz::plan {
namespace {

bool fits(const TrainingPlan& plan, const std::optional<std::size_t>& memory) {
  return !memory || on_device(plan.memory) <= *memory;
}

// ---- text

constexpr std::size_t label_width = 28, column_width = 14;

/// Characters of UTF-8 text on a terminal.
std::size_t width_of(const std::string& text) {
  return static_cast<std::size_t>(std::ranges::count_if(text, [](char c) { return (c & 0xc0) != 0x80; }));
}

std::string padded(const std::string& text, std::size_t width) {
  return text + std::string(width - std::min(width, width_of(text)), ' ');
}

/// A row with a column for each number of ranks.
template <class F>
std::string row(const Findings& f, const std::string& label, const F& cell) {
  std::string line = padded(label, label_width);
  for (std::size_t i = 0; i < f.runs.size(); ++i) line += padded(cell(i), column_width);
  return line.substr(0, line.find_last_not_of(' ') + 1) + "\n";
}

std::string ranks_text(int n) { return concat(n, n == 1 ? " rank" : " ranks"); }

std::string bytes_or_none(std::size_t bytes) { return bytes ? human_bytes(bytes) : "-"; }

std::string categories(const Findings& f) {
  const TrainingPlan& any = f.runs[0].plans[0];
  std::string text = row(f, concat("bytes of a rank, ", name(any.strategy)),
                         [&](std::size_t i) { return ranks_text(f.runs[i].ranks); });
  const std::size_t count = parts(any.memory).size();
  for (std::size_t c = 0; c < count; ++c) {
    const auto bytes = [&](std::size_t i) { return parts(largest(f.runs[i]).memory)[c].bytes; };
    bool used = false;
    for (std::size_t i = 0; i < f.runs.size(); ++i) used = used || bytes(i) > 0;
    if (used)
      text += row(f, concat("  ", parts(any.memory)[c].name),
                  [&](std::size_t i) { return bytes_or_none(bytes(i)); });
  }
  text += row(f, "  total", [&](std::size_t i) { return human_bytes(on_device(largest(f.runs[i]).memory)); });
  if (on_host(any.memory) > 0)
    text += row(f, "  total in host memory",
                [&](std::size_t i) { return human_bytes(on_host(largest(f.runs[i]).memory)); });
  return text + row(f, "  largest category",
                    [&](std::size_t i) { return std::string(largest_part(largest(f.runs[i]).memory).name); });
}

/// The groups of a mesh in the order of reports.
constexpr std::pair<const char*, Traffic MeshTraffic::*> groups[] = {{"replicate", &MeshTraffic::replicate},
                                                                     {"shard", &MeshTraffic::shard},
                                                                     {"tp", &MeshTraffic::tp},
                                                                     {"data", &MeshTraffic::data},
                                                                     {"all", &MeshTraffic::all}};

/// What a group of the mesh sends alone.
std::uint64_t sent_in(const TrainingPlan& plan, Traffic MeshTraffic::*group) {
  MeshTraffic only;
  only.*group = plan.update.*group;
  return only.sent(plan.mesh);
}

bool has_groups(const TrainingPlan& plan) { return plan.mesh.replicate > 1 || plan.mesh.tp > 1; }

/// Bytes that a rank sends in an update, by collective, and by group where a mesh has several.
std::string traffic(const Findings& f) {
  std::string text = "sent by a rank in an update\n";
  const auto sent = [&](std::size_t i, CallCount Traffic::*only) {
    MeshTraffic t;
    for (const auto& [name, group] : groups) (t.*group).*only = (f.runs[i].plans[0].update.*group).*only;
    return bytes_or_none(t.sent(f.runs[i].plans[0].mesh));
  };
  text += row(f, "  all_reduce", [&](std::size_t i) { return sent(i, &Traffic::all_reduce); });
  text += row(f, "  reduce_scatter", [&](std::size_t i) { return sent(i, &Traffic::reduce_scatter); });
  text += row(f, "  all_gather", [&](std::size_t i) { return sent(i, &Traffic::all_gather); });
  text += row(f, "  broadcast", [&](std::size_t i) { return sent(i, &Traffic::broadcast); });
  text += row(f, "  norms and agreement", [&](std::size_t i) { return sent(i, &Traffic::control); });
  text += row(f, "  total", [&](std::size_t i) {
    return human_bytes(f.runs[i].plans[0].update.sent(f.runs[i].plans[0].mesh));
  });
  if (std::ranges::none_of(f.runs, [](const PlannedRun& run) { return has_groups(run.plans[0]); }))
    return text;
  for (const auto& [name, group] : groups)
    text +=
        row(f, concat("  among ", name, group == &MeshTraffic::all ? " ranks" : ""),
            [&, group = group](std::size_t i) { return bytes_or_none(sent_in(f.runs[i].plans[0], group)); });
  return text;
}

/// Totals of every strategy; '!' marks what does not fit.
std::string strategies(const Findings& f) {
  std::string text = "total by strategy\n";
  for (std::size_t a = 0; a < f.alternatives[0].size(); ++a) {
    const Alternative& first = f.alternatives[0][a];
    text += row(f, concat("  ", name(first.strategy), first.recompute ? ", --recompute" : ""),
                [&](std::size_t i) {
                  const auto& plan = f.alternatives[i][a].plan;
                  if (!plan) return std::string("-");
                  return concat(human_bytes(on_device(plan->memory)), fits(*plan, f.memory) ? "" : " !");
                });
  }
  for (const Alternative& a : f.alternatives[0])
    if (!a.plan && !a.recompute) text += concat("  - ", name(a.strategy), ": ", a.reason, "\n");
  return text;
}

/// The mesh that fits with the smallest tp, which exchanges the least activations, and then the most copies
/// of the model, so that the fewest ranks gather together.
const MeshAlternative* proposed(const Findings& f, std::size_t i) {
  const MeshAlternative* best = nullptr;
  for (const MeshAlternative& a : f.meshes[i])
    if (a.plan && fits(*a.plan, f.memory) && (!best || best->mesh.tp == a.mesh.tp)) best = &a;
  return best;
}

/// Totals of every number of copies, and of every tp.
std::string meshes_table(const Findings& f) {
  std::string text;
  const int given = f.runs[0].plans[0].mesh.tp;
  std::set<std::pair<int, int>> all;
  for (const auto& of_ranks : f.meshes)
    for (const MeshAlternative& a : of_ranks)
      if (a.plan || a.mesh.tp == given) all.emplace(a.mesh.tp, a.mesh.replicate);
  for (const auto& [tp, n] : all)
    text += row(f, concat("  replicate ", n, tp > 1 ? concat(" x tp ", tp) : ""), [&](std::size_t i) {
      const auto a = std::ranges::find_if(
          f.meshes[i], [&](const MeshAlternative& m) { return m.mesh.replicate == n && m.mesh.tp == tp; });
      if (a == f.meshes[i].end() || !a->plan) return std::string("-");
      return concat(human_bytes(on_device(a->plan->memory)), fits(*a->plan, f.memory) ? "" : " !");
    });
  for (const MeshAlternative& a : f.meshes[0])
    if (!a.plan && a.mesh.tp != given) text += concat("  - tp ", a.mesh.tp, ": ", a.reason, "\n");
  return all.size() < 2 ? "" : concat("total by copies of the model and tp (--mesh)\n", text);
}

std::string differences(const Findings& f) {
  std::string text;
  for (const PlannedRun& run : f.runs) {
    std::size_t low = on_device(run.plans[0].memory);
    for (const TrainingPlan& p : run.plans) low = std::min(low, on_device(p.memory));
    const TrainingPlan& high = largest(run);
    if (low != on_device(high.memory))
      text += concat("the ranks of ", run.ranks, " hold from ", human_bytes(low), " to ",
                     human_bytes(on_device(high.memory)), ", rank ", high.rank.rank, " the maximum\n");
  }
  return text;
}

std::string verdict(const Findings& f) {
  if (!f.memory) return "";
  std::string text = concat("\nmemory: ", human_bytes(*f.memory), " a rank; ! marks what needs more\n");
  text += row(f, "  this run", [&](std::size_t i) {
    return std::string(fits(largest(f.runs[i]), f.memory) ? "fits" : "needs more");
  });
  text += row(f, "  largest micro-batch", [&](std::size_t i) {
    return f.micro_batches[i] ? concat(f.micro_batches[i]) : std::string("none fits");
  });
  for (std::size_t i = 0; i < f.runs.size(); ++i)
    if (const MeshAlternative* best = proposed(f, i); best && f.meshes[i].size() > 1)
      text += concat("  mesh for ", ranks_text(f.runs[i].ranks), ": --mesh ", flag_of(best->mesh), "\n");
  return text;
}

// ---- JSON

using Json = nlohmann::ordered_json;

Json json_of(const CallCount& calls) { return {{"calls", calls.calls}, {"bytes", calls.bytes}}; }

Json json_of(const MeshSizes& mesh) {
  return {{"replicate", mesh.replicate}, {"shard", mesh.shard}, {"tp", mesh.tp}};
}

Json json_of(const TrainingPlan& plan) {
  Json bytes;
  for (const MemoryPart& p : parts(plan.memory)) bytes[p.name] = p.bytes;
  const Traffic t = plan.update.total();
  Json sent;
  for (const auto& [name, group] : groups) sent[name] = sent_in(plan, group);
  return {{"rank", plan.rank.rank},
          {"strategy", name(plan.strategy)},
          {"bytes", bytes},
          {"total", on_device(plan.memory)},
          {"total_in_host_memory", on_host(plan.memory)},
          {"largest", largest_part(plan.memory).name},
          {"activations_in_use", plan.memory.activations_in_use},
          {"update",
           {{"all_reduce", json_of(t.all_reduce)},
            {"reduce_scatter", json_of(t.reduce_scatter)},
            {"all_gather", json_of(t.all_gather)},
            {"broadcast", json_of(t.broadcast)},
            {"control", json_of(t.control)},
            {"bytes_sent", plan.update.sent(plan.mesh)},
            {"bytes_sent_among", sent}}}};
}

Json json_of(const Findings& f, std::size_t i) {
  const PlannedRun& run = f.runs[i];
  Json out{{"ranks", run.ranks},
           {"mesh", json_of(run.plans[0].mesh)},
           {"train_batch_size", run.sizes.train},
           {"micro_batch_size", run.sizes.micro},
           {"gradient_accumulation_steps", run.sizes.accumulation}};
  for (const TrainingPlan& p : run.plans) out["of_each_rank"].push_back(json_of(p));
  for (const Alternative& a : f.alternatives[i])
    out["strategies"].push_back({{"strategy", name(a.strategy)},
                                 {"recompute", a.recompute},
                                 {"total", a.plan ? Json(on_device(a.plan->memory)) : Json()},
                                 {"reason", a.plan ? Json() : Json(a.reason)}});
  for (const MeshAlternative& a : f.meshes[i])
    out["meshes"].push_back({{"mesh", json_of(a.mesh)},
                             {"total", a.plan ? Json(on_device(a.plan->memory)) : Json()},
                             {"bytes_sent", a.plan ? Json(a.plan->update.sent(a.mesh)) : Json()},
                             {"reason", a.plan ? Json() : Json(a.reason)}});
  if (f.memory) {
    const MeshAlternative* best = proposed(f, i);
    out["proposed_mesh"] = best ? json_of(best->mesh) : Json();
    out["fits"] = fits(largest(run), f.memory);
    out["largest_micro_batch"] = f.micro_batches[i];
  }
  return out;
}

}  // namespace

bool fits(const Findings& f) {
  return std::ranges::all_of(f.runs, [&](const PlannedRun& run) { return fits(largest(run), f.memory); });
}

std::string table(const Findings& f) {
  std::string text = concat("model: ", f.model, "\n");
  text += row(f, "micro-batch", [&](std::size_t i) { return concat(f.runs[i].sizes.micro); });
  if (std::ranges::any_of(f.runs, [](const PlannedRun& run) { return has_groups(run.plans[0]); }))
    text += row(f, "mesh", [&](std::size_t i) {
      const MeshSizes& m = f.runs[i].plans[0].mesh;
      return concat(m.replicate, " x ", m.shard, " x ", m.tp);
    });
  text += row(f, "accumulation", [&](std::size_t i) { return concat(f.runs[i].sizes.accumulation); });
  return concat(text, "\n", categories(f), differences(f), "\n", traffic(f), "\n", strategies(f),
                meshes_table(f).empty() ? "" : concat("\n", meshes_table(f)), verdict(f));
}

std::string json(const Findings& f) {
  Json out{{"model", f.model}};
  if (f.memory) out["memory"] = *f.memory;
  for (std::size_t i = 0; i < f.runs.size(); ++i) out["runs"].push_back(json_of(f, i));
  return out.dump(2) + "\n";
}

}  // namespace rz::plan
