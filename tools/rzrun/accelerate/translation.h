#pragma once
/// What rzrun does for a file of Accelerate and its flags.

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "tools/rzrun/accelerate/values.h"

namespace rz::accelerate {

/// The value of a flag of rzrun that was not typed, and its place for messages.
struct Setting {
  std::string value, where;
  bool is_set() const { return !value.empty(); }
};

/// What the user typed beside the file, which it gives way to.
struct Typed {
  bool ranks = false;  ///< -n, --nproc-per-node or slots
  bool hosts = false;  ///< --hostfile, filters or --standalone
  int nnodes = 0;      ///< of --nnodes; 0: it was not given
};

struct Translation {
  /// By flag: "--nnodes", "--nproc-per-node", "--node-rank", "--master-addr", "--master-port",
  /// "--rdzv-backend", "--hostfile", "--include", "--exclude", "--num_gpus".
  std::map<std::string, Setting> flags;
  std::vector<int> devices;  ///< of this host, for CUDA_VISIBLE_DEVICES; empty: all
  std::vector<std::pair<std::string, std::string>> variables;
  std::vector<std::string> notes, plan;
};

/// Errors are Errc::config, and name the place.
Translation translate(const Values&, const Typed&);

/// gpu_ids: "0,1"; nothing for "all".
std::vector<int> parse_gpu_ids(const Value&);

}  // namespace rz::accelerate
