#include "sharding/checkpoint/save_operation.h"

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <future>
#include <new>
#include <optional>
#include <utility>
#include <vector>

#include "comm/core/error.h"
#include "comm/core/integer_math.h"
#include "sharding/checkpoint/checkpoint_folder.h"
#include "sharding/checkpoint/checkpoint_index.h"
#include "sharding/io/disk.h"
#include "sharding/io/file.h"
#include "sharding/io/text.h"
#include "sharding/parallel/rank_agreement.h"

namespace rz {
namespace {

namespace fs = std::filesystem;

/// "tags: rank 0 'a', ranks 1 to 3 'b'" is shorter than a list of thousands of ranks.
std::string by_rank(const std::vector<std::string>& texts) {
  std::string all;
  for (std::size_t first = 0, end; first < texts.size(); first = end) {
    for (end = first + 1; end < texts.size() && texts[end] == texts[first];) ++end;
    all += concat(all.empty() ? "" : ", ", end - first > 1 ? "ranks " : "rank ", first);
    if (end - first > 1) all += concat(" to ", end - 1);
    all += concat(" '", texts[first], "'");
  }
  return all;
}

void require_equal(Communicator& comm, const std::string& own, const char* what) {
  const auto all = all_gather_text(comm, own);
  require(std::ranges::count(all, all.front()) == static_cast<std::ptrdiff_t>(all.size()), Errc::mismatch,
          "save_checkpoint(): the ranks have different ", what, ": ", by_rank(all),
          "; nothing was written; pass the same on every rank");
}

/// Files of a checkpoint that are its own.
void check_file_name(const std::string& name) {
  const bool own = name == checkpoint_index_file || name.ends_with(".safetensors");
  require(!own && !name.empty() && name.front() != '.' && name.find('/') == name.npos, Errc::invalid_argument,
          "save_checkpoint(): the file '", escaped(name),
          "' of SaveCheckpointOptions::files cannot be beside the index; choose the name of a file that is "
          "neither hidden nor a part of the checkpoint");
}

/// The part of the index that describes this rank's file.
std::string part_of_index(const std::string& path, const std::vector<ShardSlice>& slices,
                          const std::vector<std::uint64_t>& checksums) {
  CheckpointIndex part;
  std::error_code problem;
  const std::uintmax_t bytes = fs::file_size(path, problem);
  require(!problem, Errc::io, path, ": is gone after it was written: ", problem.message());
  part.files = {{fs::path(path).filename(), bytes}};
  for (std::size_t i = 0; i < slices.size(); ++i) {
    StoredTensor& t = part.tensors[slices[i].tensor];
    t.dtype = safetensors_name(slices[i].dtype), t.shape = slices[i].shape;
    t.slices.push_back(slices[i].slice);
    t.slices.back().checksum = checksums[i];
  }
  return to_json(part);
}

void add_part(CheckpointIndex& index, CheckpointIndex&& part) {
  const std::size_t before = index.files.size();
  index.files.insert(index.files.end(), part.files.begin(), part.files.end());
  for (auto& [name, from] : part.tensors) {
    StoredTensor& to = index.tensors[name];
    to.dtype = from.dtype, to.shape = from.shape;
    for (StoredSlice& s : from.slices) {
      s.file += before;
      to.slices.push_back(std::move(s));
    }
  }
}

/// The index of the checkpoint, from those of all ranks.
std::string whole_index(const std::vector<std::string>& parts, const std::string& state,
                        const std::string& path) {
  CheckpointIndex index;
  index.state = state;
  for (const std::string& part : parts)
    add_part(index, parse_checkpoint_index(part, path, IndexPart::of_one_rank));
  const std::string text = to_json(index);
  parse_checkpoint_index(text, path);  // what is written can be read
  return text;
}

std::string write_file(const std::string& path, const std::vector<ShardSlice>& slices,
                       const std::function<void(ShardWriter&)>& write) {
  ShardWriter file(path, slices);
  write(file);
  return part_of_index(path, slices, file.finish());
}

}  // namespace

std::byte* SnapshotMemory::reserve(std::size_t bytes) {
  if (bytes > bytes_) {
    memory_.reset();
    bytes_ = 0;
    const std::size_t whole = round_up(bytes, DurableFile::direct_alignment);
    memory_.reset(static_cast<std::byte*>(std::aligned_alloc(DurableFile::direct_alignment, whole)));
    if (!memory_) throw std::bad_alloc();
    bytes_ = bytes;
  }
  return memory_.get();
}

struct SaveOperation::State {
  State(Communicator& c, const SaveRequest& r) : comm(c), request(r) {}

  void agree();
  void make_folder();
  void write_now(const OwnedState&);
  void write_later(const OwnedState&, SnapshotMemory&);
  bool all_done();
  void next_phase();
  void commit(const std::vector<std::string>& parts);

  Communicator& comm;
  const SaveRequest request;
  std::shared_ptr<const void> folder_lock;     // rank 0
  std::unique_ptr<PartialCheckpoint> partial;  // rank 0
  std::string path;                            // of this rank's file
  enum { writing, committing, complete } phase = writing;
  std::future<std::string> task;  // the phase on this rank; declared last, so that it ends first
};

void SaveOperation::State::agree() {
  check_on_all_ranks(comm, [&] {
    check_tag(request.tag);
    for (const auto& [name, text] : request.files) check_file_name(name);
  });
  require_equal(comm, request.tag, "tags");
  require_equal(comm, request.dir, "folders");
}

void require_shared_folder(Communicator& comm, const std::string& dir, const std::string& made) {
  check_on_all_ranks(comm, [&] {
    require(path_exists(made), Errc::io, dir, ": rank ", comm.rank(),
            " does not see what rank 0 has made there; save to a folder that all ranks share");
  });
}

void SaveOperation::State::make_folder() {
  std::string folder;
  check_on_all_ranks(comm, [&] {
    if (comm.rank() != 0) return;
    folder_lock = lock_checkpoint_folder(request.dir);
    partial = std::make_unique<PartialCheckpoint>(request.dir, request.tag);
    folder = partial->folder();
  });
  folder = broadcast_text(comm, folder, 0);
  path = (fs::path(folder) / rank_file(comm.rank(), comm.size())).string();
  require_shared_folder(comm, request.dir, folder);
}

void SaveOperation::State::write_now(const OwnedState& owned) {
  task = std::async(std::launch::async, [path = path, &owned] {
    return write_file(path, owned.slices(), [&](ShardWriter& file) {
      owned.read([&](std::span<const std::byte> bytes) { file.write(bytes); });
    });
  });
}

void SaveOperation::State::write_later(const OwnedState& owned, SnapshotMemory& snapshot) {
  const std::size_t bytes = owned.bytes();
  std::byte* const memory = snapshot.reserve(bytes);
  std::byte* to = memory;
  owned.read([&](std::span<const std::byte> part) { to = std::ranges::copy(part, to).out; });
  task = std::async(std::launch::async, [path = path, slices = owned.slices(), memory, bytes] {
    return write_file(path, slices, [&](ShardWriter& file) { file.write({memory, bytes}); });
  });
}

/// Whether the phase has ended on every rank.
bool SaveOperation::State::all_done() {
  std::int32_t done = !task.valid() || task.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
  comm.all_reduce(Buffer(&done, 1), ReduceOp::min).wait();
  return done != 0;
}

void SaveOperation::State::next_phase() {
  std::string part;
  check_on_all_ranks(comm, [&] {
    if (task.valid()) part = task.get();
  });
  if (phase == committing) {
    phase = complete;
    partial.reset();
    return;
  }
  auto parts = gather_text(comm, part, 0);
  phase = committing;
  if (comm.rank() != 0) return;
  task = std::async(std::launch::async, [this, parts = std::move(parts)] {
    commit(parts);
    return std::string();
  });
}

void SaveOperation::State::commit(const std::vector<std::string>& parts) {
  for (const auto& [name, text] : request.files) {
    DurableFile file((fs::path(partial->folder()) / name).string());
    file.write(text);
    file.commit();
  }
  partial->commit(whole_index(parts, request.state, path));
  if (request.best) write_tag_file(request.dir, best_file, request.tag);
  if (request.keep > 0) remove_old_checkpoints(request.dir, request.keep);
}

SaveOperation::SaveOperation(Communicator& comm, const OwnedState& owned, const SaveRequest& request,
                             SnapshotMemory* snapshot)
    : state_(std::make_unique<State>(comm, request)) {
  state_->agree();
  state_->make_folder();
  if (snapshot) {
    state_->write_later(owned, *snapshot);
  } else {
    state_->write_now(owned);
  }
}

SaveOperation::~SaveOperation() = default;

std::shared_ptr<const void> SaveOperation::folder_lock() const { return state_->folder_lock; }

bool SaveOperation::poll() {
  if (state_->phase != State::complete && state_->all_done()) state_->next_phase();
  return state_->phase == State::complete;
}

void SaveOperation::wait() {
  while (state_->phase != State::complete) {
    // No rank waits longer for the others in poll(), whose time is limited, however long it writes.
    if (state_->task.valid()) state_->task.wait_for(std::chrono::milliseconds(200));
    poll();
  }
}

}  // namespace rz
