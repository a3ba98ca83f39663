#include <cstdio>
#include <filesystem>

#include "comm/core/error.h"
#include "sharding/io/disk.h"
#include "sharding/io/json.h"
#include "sharding/io/text.h"
#include "tools/checkpoint/commands.h"
#include "tools/command_line/command_line.h"

namespace rz::checkpoint {
namespace {

using nlohmann::json;

constexpr const char* inspect_description =
    "Prints what a checkpoint holds: which ranks and strategy wrote it, its state, and a table of its\n"
    "tensors. For a folder of checkpoints: a line for each. For weights (safetensors, a state dict of\n"
    "torch.save(), a folder of Hugging Face or DeepSpeed): the table of tensors.\n"
    "\n"
    "  checkpoint inspect RUN\n"
    "  checkpoint inspect RUN/global_step100 --json | jq .state.client_state";

constexpr const char* inspect_footer =
    "Only the index is read, and the sizes of the files are compared with it; checkpoint verify reads them.\n"
    "--json writes an object: path, tag, latest, best, written, bytes, state, files, tensors, totals; for a\n"
    "folder of checkpoints a list of objects without the last four; for weights an object: path, tensors.";

struct InspectOptions {
  std::string path;
  bool as_json = false;
};

/// "model", "buffer", "optimizer/exp_avg"
std::string category_of(const std::string& tensor) {
  const auto first = tensor.find('/');
  const bool optimizer = tensor.starts_with("optimizer/");
  return tensor.substr(0, optimizer ? tensor.find('/', first + 1) : first);
}

struct Totals {
  std::uint64_t tensors = 0, elements = 0, bytes = 0;
  void add(const StoredTensor& t) { ++tensors, elements += t.count(), bytes += bytes_of(t); }
};

std::map<std::string, Totals> totals_by_category(const CheckpointIndex& index) {
  std::map<std::string, Totals> totals;
  for (const auto& [name, tensor] : index.tensors) totals[category_of(name)].add(tensor);
  return totals;
}

// ---- as JSON

json summary_json(const StoredCheckpoint& c) {
  json all{{"path", c.path}, {"tag", c.tag},         {"latest", c.latest},
           {"best", c.best}, {"written", c.written}, {"bytes", c.bytes}};
  for (const char* key : {"steps", "ranks", "strategy"})
    if (c.state.contains(key)) all[key] = c.state[key];
  return all;
}

json whole_json(const StoredCheckpoint& c) {
  json all = summary_json(c);
  all["state"] = c.state;
  all["files"] = json::array();
  for (const StoredFile& f : c.index.files) all["files"].push_back({{"name", f.name}, {"bytes", f.bytes}});
  all["tensors"] = json::object(), all["totals"] = json::object();
  for (const auto& [name, t] : c.index.tensors)
    all["tensors"][name] = {{"dtype", t.dtype},
                            {"shape", t.shape},
                            {"elements", t.count()},
                            {"bytes", bytes_of(t)},
                            {"slices", t.slices.size()}};
  for (const auto& [category, t] : totals_by_category(c.index))
    all["totals"][category] = {{"tensors", t.tensors}, {"elements", t.elements}, {"bytes", t.bytes}};
  return all;
}

void print_json(const json& value) {
  std::puts(value.dump(2, ' ', false, json::error_handler_t::replace).c_str());
}

// ---- for people

/// A leaf of the state in a summary; empty if it is absent.
std::string word_of(const json& state, const char* key) {
  if (!state.contains(key)) return "";
  return escaped(state[key].is_string() ? state[key].get<std::string>() : state[key].dump());
}

std::string marks_of(const StoredCheckpoint& c) {
  return c.latest && c.best ? "latest, best" : c.latest ? "latest" : c.best ? "best" : "";
}

void print_list(const std::string& path, const std::vector<StoredCheckpoint>& all) {
  TextTable table({"tag", "steps", "ranks", "strategy", "tensors", "size", "written", ""});
  for (const StoredCheckpoint& c : all)
    table.add({escaped(c.tag), word_of(c.state, "steps"), word_of(c.state, "ranks"),
               word_of(c.state, "strategy"), concat(c.index.tensors.size()), human_bytes(c.bytes), c.written,
               marks_of(c)});
  std::printf("%s: %zu checkpoint%s\n\n%s", escaped(path).c_str(), all.size(), all.size() == 1 ? "" : "s",
              table.text().c_str());
}

std::string tensor_table(const CheckpointIndex& index) {
  TextTable table({"tensor", "dtype", "shape", "elements", "bytes", "slices"});
  for (const auto& [name, t] : index.tensors)
    table.add({escaped(name), escaped(t.dtype), rz::name(t.shape), concat(t.count()), concat(bytes_of(t)),
               concat(t.slices.size())});
  return table.text();
}

std::string totals_table(const CheckpointIndex& index) {
  TextTable table({"total", "tensors", "elements", "bytes", ""});
  Totals sum;
  const auto add = [&](const std::string& category, const Totals& t) {
    table.add(
        {escaped(category), concat(t.tensors), concat(t.elements), concat(t.bytes), human_bytes(t.bytes)});
  };
  for (const auto& [category, t] : totals_by_category(index)) add(category, t);
  for (const auto& [name, t] : index.tensors) sum.add(t);
  add("all", sum);
  return table.text();
}

void print_checkpoint(const StoredCheckpoint& c) {
  const std::string marks = marks_of(c);
  std::printf("%s%s\n", escaped(c.path).c_str(), marks.empty() ? "" : (" (" + marks + ")").c_str());
  std::printf("written %s; %zu file%s, %s\n", c.written.c_str(), c.index.files.size(),
              c.index.files.size() == 1 ? "" : "s", human_bytes(c.bytes).c_str());
  std::printf("\nstate %s\n", c.state.dump(2, ' ', true, json::error_handler_t::replace).c_str());
  std::printf("\n%s\n%s", tensor_table(c.index).c_str(), totals_table(c.index).c_str());
}

// ---- weights without a checkpoint

int inspect_weights(const InspectOptions& o) {
  const TensorSource source = open_source(o.path);
  json all{{"path", source.path()}, {"tensors", json::object()}};
  TextTable table({"tensor", "dtype", "shape", "elements", "bytes"});
  std::uint64_t bytes = 0;
  for (const TensorInfo& t : source.tensors()) {
    all["tensors"][t.name] = {
        {"dtype", t.dtype}, {"shape", t.shape}, {"elements", t.count}, {"bytes", t.bytes}};
    table.add({escaped(t.name), escaped(t.dtype), rz::name(t.shape), concat(t.count), concat(t.bytes)});
    bytes += t.bytes;
  }
  if (o.as_json) return print_json(all), 0;
  std::printf("%s: %zu tensors, %s\n\n%s", escaped(source.path()).c_str(), source.tensors().size(),
              human_bytes(bytes).c_str(), table.text().c_str());
  return 0;
}

int run_inspect(const InspectOptions& o) {
  require(path_exists(o.path), Errc::config, o.path, ": no such folder");
  if (!has_checkpoint(o.path)) return inspect_weights(o);
  const auto folders = checkpoints_at(o.path);
  if (folders == std::vector{o.path}) {
    const StoredCheckpoint c = read_stored_checkpoint(o.path);
    o.as_json ? print_json(whole_json(c)) : print_checkpoint(c);
    return 0;
  }
  std::vector<StoredCheckpoint> all;
  for (const std::string& folder : folders) all.push_back(read_stored_checkpoint(folder));
  if (!o.as_json) return print_list(o.path, all), 0;
  json list = json::array();
  for (const StoredCheckpoint& c : all) list.push_back(summary_json(c));
  print_json(list);
  return 0;
}

}  // namespace

int inspect(int argc, const char* const* argv) {
  InspectOptions o;
  CommandLine line(inspect_description, "checkpoint inspect", inspect_footer);
  line.add_option("PATH", o.path, "A checkpoint, a folder of checkpoints, or weights")
      .type_name("")
      .required();
  line.add_flag("--json", o.as_json, "Write JSON");
  const std::string help = line.parse(argc, argv);
  return help.empty() ? run_inspect(o) : print_help(help);
}

}  // namespace rz::checkpoint
