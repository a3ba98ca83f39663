#include "tools/rzrun/accelerate/translation.h"

#include <algorithm>
#include <cstdint>

#include "comm/core/error.h"
#include "comm/core/text.h"
#include "tools/rzrun/accelerate/configuration.h"
#include "tools/rzrun/hosts/hosts.h"

namespace rz::accelerate {
namespace {

void check_environment(const Values& v) {
  const auto found = v.text("compute_environment");
  require(found != "AMAZON_SAGEMAKER", Errc::config, v.where("compute_environment"),
          ": jobs on SageMaker are not started; use LOCAL_MACHINE");
  require(!found || found == "LOCAL_MACHINE", Errc::config, v.where("compute_environment"), " ",
          hosts::quoted(found.value_or("")), ": there is LOCAL_MACHINE");
}

class Hosts {
 public:
  Hosts(const Values& v, const Typed& typed, Method method, Translation& to)
      : v_(v), typed_(typed), method_(method), translation_(to) {}

  void read() {
    machines_ = static_cast<int>(v_.integer("num_machines", 1, hosts::max_nodes).value_or(1));
    if (typed_.hosts && !is_flag("num_machines")) machines_ = 1;
    const int nodes = typed_.nnodes ? typed_.nnodes : machines_;
    if (nodes > 1 && uses_hostfile()) return read_hostfile();
    if (!typed_.ranks || is_flag("num_processes")) read_ranks(nodes);
    if (nodes > 1) read_address();
    set("--master-port", "main_process_port", [&] { return port(nodes > 1 ? 1 : 0); });
  }

 private:
  bool is_flag(const char* key) const { return v_.has(key) && v_.find(key)->of_flag; }

  template <class Get>
  void set(const char* flag, const char* key, const Get& get) {
    if (!v_.has(key) || (typed_.hosts && !is_flag(key))) return;
    translation_.flags[flag] = {get(), v_.where(key)};
  }

  std::string port(long min) const {
    const long found = *v_.integer("main_process_port", min, 65535);
    return found ? concat(found) : "";
  }

  /// All ranks, divided by the hosts.
  void read_ranks(int nodes) {
    if (method_ == Method::single && !is_flag("num_processes")) {
      const long n = v_.integer("num_processes", 1, 1).value_or(1);
      translation_.flags["--nproc-per-node"] = {concat(n), v_.where("distributed_type")};
      return;
    }
    if (!v_.has("num_processes")) return;
    const std::string& where = v_.where("num_processes");
    require(v_.text("num_processes") != "-1", Errc::config, where,
            ": the file leaves the number to the command line; add --num_processes N");
    const long all = *v_.integer("num_processes", 1, std::int64_t{hosts::max_nodes} * hosts::max_slots);
    require(all % nodes == 0, Errc::config, where, ": ", all, " ranks of all machines, of which there are ",
            nodes, ": each has as many, so the number must divide");
    translation_.flags["--nproc-per-node"] = {concat(all / nodes), where};
  }

  void read_address() {
    set("--nnodes", "num_machines", [&] { return concat(machines_); });
    require(v_.has("main_process_ip") || typed_.nnodes, Errc::config, v_.where("num_machines"),
            ": there are ", machines_,
            " machines, and main_process_ip is missing; add the address of machine 0");
    set("--node-rank", "machine_rank", [&] { return *v_.text("machine_rank"); });
    set("--master-addr", "main_process_ip", [&] { return *v_.text("main_process_ip"); });
    set("--rdzv-backend", "rdzv_backend", [&] { return *v_.text("rdzv_backend"); });
  }

  /// DeepSpeed's own launcher, which starts all hosts from one.
  bool uses_hostfile() const {
    if (method_ != Method::deepspeed || typed_.nnodes) return false;
    const auto launcher = v_.text("deepspeed_multinode_launcher");
    return launcher ? launcher != "standard" : v_.has("deepspeed_hostfile");
  }

  void read_hostfile() {
    const auto launcher = v_.text("deepspeed_multinode_launcher").value_or("pdsh");
    const auto& where = [&] { return v_.where("deepspeed_multinode_launcher"); };
    require(launcher != "nossh", Errc::config, launcher == "nossh" ? where() : "",
            ": nossh: write standard, which starts rzrun on each host in the same way");
    const bool other = launcher == "openmpi" || launcher == "slurm";
    const bool known = other || launcher == "pdsh" || launcher == "ssh";
    require(
        known, Errc::config, known ? "" : where(), ": ", launcher,
        ": rzrun starts its agents by ssh, openmpi or slurm; write one of these, pdsh, which is ssh here, or "
        "standard");
    if (other) set("--launcher", "deepspeed_multinode_launcher", [&] { return launcher; });
    require(
        v_.has("deepspeed_hostfile"), Errc::config, v_.where("num_machines"), ": there are ", machines_,
        " machines, and deepspeed_hostfile is missing; add it, or deepspeed_multinode_launcher: standard");
    const bool both = v_.has("deepspeed_inclusion_filter") && v_.has("deepspeed_exclusion_filter");
    require(!both, Errc::config, both ? v_.where("deepspeed_exclusion_filter") : "",
            ": it and deepspeed_inclusion_filter exclude each other; remove one");
    const auto copy = [&](const char* flag, const char* key) {
      set(flag, key, [&] { return *v_.text(key); });
    };
    copy("--hostfile", "deepspeed_hostfile");
    copy("--include", "deepspeed_inclusion_filter");
    copy("--exclude", "deepspeed_exclusion_filter");
    copy("--master-addr", "main_process_ip");
    set("--master-port", "main_process_port", [&] { return port(0); });
    if (v_.has("deepspeed_inclusion_filter") || v_.has("deepspeed_exclusion_filter")) return;
    if (typed_.ranks && !is_flag("num_processes")) return;
    read_ranks(machines_);
    const auto each = translation_.flags.extract("--nproc-per-node");
    if (each) translation_.flags["--num_gpus"] = each.mapped();
  }

  const Values& v_;
  const Typed& typed_;
  Method method_;
  Translation& translation_;
  int machines_ = 1;
};

/// Which devices the ranks see.
void read_devices(const Values& v, const Typed& typed, Translation& to) {
  if (v.boolean("cpu") || v.boolean("use_cpu")) {
    to.variables.emplace_back("CUDA_VISIBLE_DEVICES", "");
    return;
  }
  const Value* const ids = v.find("gpu_ids");
  if (!ids || ((typed.hosts || typed.ranks) && !ids->of_flag)) return;
  to.devices = parse_gpu_ids(*ids);
  const auto ranks = to.flags.find("--nproc-per-node");
  if (to.devices.empty() || ranks == to.flags.end()) return;
  const std::size_t n = static_cast<std::size_t>(*parse_number<int>(ranks->second.value));
  require(n <= to.devices.size(), Errc::config, ids->where, ": ", to.devices.size(),
          to.devices.size() == 1 ? " device" : " devices", " for ", n, " ranks of this host; name ", n,
          ", or all");
}

}  // namespace

std::vector<int> parse_gpu_ids(const Value& ids) {
  std::vector<std::string> words;
  if (ids.node.kind == YamlNode::Kind::list)
    for (const YamlNode& item : ids.node.items) words.push_back(item.text);
  else if (ids.node.text == "all")
    return {};
  else
    words = parts_of(ids.node.text, ',');
  std::vector<int> devices;
  for (std::string& word : words) {
    word.erase(0, word.find_first_not_of(' '));
    const auto id = parse_number<int>(word);
    require(id && *id >= 0 && *id < hosts::max_slots, Errc::config, ids.where, ": ", hosts::quoted(word),
            " is no number of a device; write all, or 0,1");
    require(!std::ranges::count(devices, *id), Errc::config, ids.where, ": device ", *id,
            " is there twice; remove one");
    devices.push_back(*id);
  }
  require(!devices.empty(), Errc::config, ids.where, ": no device; write all, or 0,1");
  return devices;
}

Translation translate(const Values& v, const Typed& typed) {
  Translation to;
  to.notes = v.notes();
  check_environment(v);
  const Method method = method_of(v);
  Hosts(v, typed, method, to).read();
  read_devices(v, typed, to);
  if (const auto threads = v.integer("num_cpu_threads_per_process", 1, 4096))
    to.variables.emplace_back("OMP_NUM_THREADS", concat(*threads));
  if (const std::string config = configuration_of(v, method); !config.empty()) {
    to.variables.emplace_back("RZ_CONFIG", config);
    to.plan.push_back(concat("RZ_CONFIG: ", config));
  }
  return to;
}

}  // namespace rz::accelerate
