#include "comm/backends/nccl/rendezvous.h"

#include <cstring>
#include <vector>

#include "comm/core/error.h"
#include "comm/device/cuda_runtime.h"

namespace rz::nccl {

namespace {

constexpr int min_shared_gpu_version = 23003;  // first version with NCCL_MULTI_RANK_GPU_ENABLE

std::string hex(std::string_view bytes) {
  std::string text;
  for (const char c : bytes) {
    const auto byte = static_cast<unsigned char>(c);
    text += "0123456789abcdef"[byte >> 4];
    text += "0123456789abcdef"[byte & 15];
  }
  return text;
}

/// Published by each rank in the store, one field per line.
struct RankEntry {
  std::string uuid, gpu, version, host_id, shares_gpu;

  std::string text() const { return concat(uuid, '\n', gpu, '\n', version, '\n', shares_gpu, '\n', host_id); }
  static RankEntry parse(const std::string& text) {
    RankEntry card;
    std::size_t at = 0;
    for (std::string* line : {&card.uuid, &card.gpu, &card.version, &card.shares_gpu}) {
      const std::size_t end = text.find('\n', at);
      require(end != std::string::npos, Errc::rendezvous,
              "another rank's key of the NCCL backend is damaged; ", "do all ranks run the same ringzero?");
      *line = text.substr(at, end - at);
      at = end + 1;
    }
    card.host_id = text.substr(at);
    return card;
  }
};

RankEntry own_entry(const RankInfo& me) {
  cuda::DeviceProperties card;
  cuda::check(cuda::runtime().get_properties(&card, me.device.index), "cudaGetDeviceProperties", me.device);
  return {hex(card.uuid), concat(name(me.device), " (", card.name, ")"), version_text(me.version), me.host_id,
          me.shares_gpu && me.version >= min_shared_gpu_version ? "1" : "0"};
}

std::string entry_key(int rank) { return concat("nccl/rank/", rank); }
std::string joining_key(int rank) { return concat("nccl/joining/", rank); }

bool has_key(Store& store, const std::string& key) {
  try {
    store.get(key, Deadline::after({}));
    return true;
  } catch (const Error&) {
    return false;
  }
}

std::string list_missing(const RankInfo& me, Store& store, std::string (*key)(int)) {
  std::string names;
  for (int r = 0; r < me.size; ++r)
    if (!has_key(store, key(r))) names += concat(' ', r);
  return names;
}

std::vector<RankEntry> read_entries(const RankInfo& me, Store& store, Deadline deadline) {
  std::vector<RankEntry> all;
  for (int r = 0; r < me.size; ++r) try {
      all.push_back(RankEntry::parse(store.get(entry_key(r), deadline)));
    } catch (const Error& e) {
      if (e.code() != Errc::timeout) throw;
      throw Error(Errc::timeout,
                  concat("rank ", me.rank, " of ", me.size,
                         ": these ranks did not connect to the NCCL backend before ",
                         "the rendezvous' deadline:", list_missing(me, store, entry_key),
                         "; do they run, with the same rendezvous and backend?"),
                  r);
    }
  return all;
}

/// Rejects groups for which NCCL would report "invalid usage" or hang.
void check_entries(const std::vector<RankEntry>& all) {
  for (std::size_t a = 0; a < all.size(); ++a) {
    require(all[a].version == all[0].version, Errc::config, "rank 0 has NCCL ", all[0].version, " and rank ",
            a, " ", all[a].version, "; install one version on all hosts");
    for (std::size_t b = a + 1; b < all.size(); ++b) {
      const bool different_nodes =
          !all[a].host_id.empty() && !all[b].host_id.empty() && all[a].host_id != all[b].host_id;
      const bool may_share = all[a].shares_gpu == "1" && all[b].shares_gpu == "1";
      require(all[a].uuid != all[b].uuid || different_nodes || may_share, Errc::config, "ranks ", a, " and ",
              b, " are both on one GPU, ", all[a].gpu, ", uuid ", all[a].uuid,
              ": NCCL requires a GPU for each rank; start no more ranks than there are GPUs, or use "
              "RZ_BACKEND=peer_cuda or native (--backend)");
    }
  }
}

}  // namespace

UniqueId exchange_unique_id(const NcclApi& api, const RankInfo& me, Store& store, Deadline deadline) {
  store.set(entry_key(me.rank), own_entry(me).text());
  check_entries(read_entries(me, store, deadline));
  UniqueId id{};
  if (me.rank == 0) {
    const Result result = api.get_unique_id(&id);
    require(result == success, Errc::system, "rank 0: ncclGetUniqueId: ", api.get_error_string(result),
            "; NCCL_SOCKET_IFNAME chooses its network interface, NCCL_DEBUG=WARN prints more");
    store.set("nccl/id", std::string_view(id.bytes, sizeof id.bytes));
  } else {
    const std::string text = store.get("nccl/id", deadline);
    require(text.size() == sizeof id.bytes, Errc::rendezvous, "rank ", me.rank, ": NCCL's unique id has ",
            text.size(), " bytes instead of ", sizeof id.bytes);
    std::memcpy(id.bytes, text.data(), text.size());
  }
  return id;
}

void mark_joining(const RankInfo& me, Store& store) { store.set(joining_key(me.rank), ""); }

std::string ranks_not_joined(const RankInfo& me, Store& store) {
  return list_missing(me, store, joining_key);
}

}  // namespace rz::nccl
