#include <limits>
#include <nlohmann/json.hpp>

#include "comm/core/error.h"
#include "sharding/io/json.h"
#include "tools/doctor/host_facts.h"

namespace rz::doctor {
namespace {

using Json = nlohmann::json;

template <class Facts, class Visit>
void visit_network(Facts& f, const Visit& visit) {
  visit("own_addresses", f.own_addresses), visit("own_name_error", f.own_name_error);
  visit("master_addresses", f.master_addresses), visit("master_error", f.master_error);
  visit("interfaces", f.interfaces);
  visit("address", f.address), visit("address_error", f.address_error);
  visit("ports", f.ports), visit("ports_free", f.ports_free);
  visit("infiniband", f.infiniband);
}

template <class Facts, class Visit>
void visit_memory(Facts& f, const Visit& visit) {
  visit("memory_available", f.memory_available), visit("memory_total", f.memory_total);
  visit("overcommit", f.overcommit), visit("commit_left", f.commit_left);
  visit("huge_pages", f.huge_pages);
  visit("shared_memory_error", f.shared_memory_error);
  visit("l2", f.l2), visit("l3", f.l3), visit("l3_processors", f.l3_processors);
  visit("has_dev_shm", f.has_dev_shm);
  visit("dev_shm_bytes", f.dev_shm_bytes), visit("dev_shm_free", f.dev_shm_free);
  visit("max_locked", f.max_locked), visit("max_file", f.max_file);
}

/// Calls visit(key, member) for every fact, so that writing and reading have one list.
template <class Facts, class Visit>
void visit_facts(Facts& f, const Visit& visit) {
  visit("name", f.name), visit("version", f.version), visit("kernel", f.kernel), visit("clock", f.clock);
  visit_memory(f, visit);
  visit("open_files", f.open_files), visit("open_files_soft", f.open_files_soft);
  visit("open_files_hard", f.open_files_hard);
  visit("max_processes", f.max_processes), visit("user_processes", f.user_processes);
  visit("cgroup_processes", f.cgroup_processes);
  visit("processors", f.processors), visit("quota", f.quota), visit("all_processors", f.all_processors);
  visit("cores", f.cores), visit("numa_nodes", f.numa_nodes), visit("usable_numa_nodes", f.usable_numa_nodes);
  visit("machine", f.machine), visit("instructions", f.instructions);
  visit("openblas_core", f.openblas_core);
  visit("cma_error", f.cma_error), visit("ptrace_scope", f.ptrace_scope);
  visit("rendezvous_error", f.rendezvous_error), visit("group_error", f.group_error);
  visit_network(f, visit);
  visit("secret_digest", f.secret_digest), visit("secret_error", f.secret_error);
  visit("secret_to_create", f.secret_to_create);
  visit("devices", f.devices), visit("gpus", f.gpus);
  visit("driver", f.driver), visit("cuda", f.cuda), visit("nccl", f.nccl), visit("open_mpi", f.open_mpi);
  visit("nccl_error", f.nccl_error);
}

template <class Request, class Visit>
void visit_request(Request& r, const Visit& visit) {
  visit("master", r.master), visit("nodes", r.nodes), visit("cuda", r.cuda), visit("nonce", r.nonce);
}

// ---- writing

template <class T>
Json written(const T& value) {
  return value;
}
template <class T>
Json written(const std::optional<T>& value) {
  return value ? Json(*value) : Json();
}
Json written(const std::vector<Interface>& all) {
  Json list = Json::array();
  for (const Interface& i : all) list.push_back({{"name", i.name}, {"address", i.address}, {"mtu", i.mtu}});
  return list;
}

/// Text of other programs need not be UTF-8.
std::string one_line_of(const Json& json) {
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

// ---- reading: what another host printed is checked

constexpr std::size_t max_elements = 65536;

class Reader {
 public:
  Reader(const Json& node, const std::string& source, const std::string& path = "")
      : object_(node, source, path) {}

  template <class T>
  void operator()(const char* key, T& value) const {
    if (!object_.has(key))
      object_.fail_at(key, "is missing; install the same version of ringzero on all hosts");
    read(key, value);
  }

 private:
  void read(const char* key, std::string& value) const { value = object_.text(key, ""); }
  void read(const char* key, bool& value) const { value = object_.boolean(key, false); }
  void read(const char* key, double& value) const { value = object_.number(key, 0, -1e18, 1e18); }
  /// A count, by which a check divides.
  void read(const char* key, std::int64_t& value) const { value = object_.integer(key, 0, 1, max_elements); }
  void read(const char* key, int& value) const {
    value = static_cast<int>(object_.integer(key, 0, -1, std::numeric_limits<int>::max()));
  }
  void read(const char* key, std::uint64_t& value) const {
    const Json& node = object_.at(key);
    if (!node.is_number_unsigned()) object_.fail_at(key, "is no number from 0 on");
    value = node.get<std::uint64_t>();
  }
  void read(const char* key, std::optional<std::uint64_t>& value) const {
    value.reset();
    if (!object_.at(key).is_null()) read(key, value.emplace());
  }
  void read(const char* key, std::vector<std::string>& values) const {
    values.clear();
    for (const Json& element : list(key)) {
      if (!element.is_string()) object_.fail_at(key, "has an element that is no text");
      values.push_back(element.get<std::string>());
    }
  }
  void read(const char* key, std::vector<int>& values) const {
    values.clear();
    for (const Json& element : list(key)) {
      const bool fits = element.is_number_unsigned() && element.get<std::uint64_t>() < max_elements;
      if (!fits) object_.fail_at(key, "has an element that is no number of a processor");
      values.push_back(element.get<int>());
    }
  }
  void read(const char* key, std::vector<Interface>& values) const {
    values.clear();
    for (const Json& element : list(key)) {
      const Reader in(element, object_.file(), object_.path(key));
      Interface& i = values.emplace_back();
      in("name", i.name), in("address", i.address), in("mtu", i.mtu);
    }
  }
  const Json& list(const char* key) const {
    const Json& node = object_.at(key);
    if (!node.is_array() || node.size() > max_elements) object_.fail_at(key, "is no list");
    return node;
  }

  JsonObject object_;
};

}  // namespace

std::string to_json(const HostFacts& facts) {
  Json json = Json::object();
  visit_facts(facts, [&](const char* key, const auto& value) { json[key] = written(value); });
  return one_line_of(json);
}

HostFacts parse_facts(const std::string& text, const std::string& source) {
  HostFacts facts;
  const Json json = parse_json(text, source, JsonDialect::strict);
  visit_facts(facts, Reader(json, source));
  return facts;
}

std::string to_json(const FactsRequest& request) {
  Json json = Json::object();
  visit_request(request, [&](const char* key, const auto& value) { json[key] = written(value); });
  return one_line_of(json);
}

FactsRequest parse_request(const std::string& text, const std::string& source) {
  FactsRequest request;
  const Json json = parse_json(text, source, JsonDialect::strict);
  visit_request(request, Reader(json, source));
  return request;
}

}  // namespace rz::doctor
