#pragma once
/// Rendezvous of ranks on one host that share only the id of their job. Internal: users call
/// store_for_launch().

#include <memory>
#include <string>

#include "comm/core/deadline.h"
#include "comm/store.h"

namespace rz {

/// Returns a file_store in a fresh private directory, below a directory named after user and job. Rank 0
/// creates it, writes its name and its own process id and start time to the file "current", and waits until
/// every rank has registered there. Another rank follows "current" only if the process that wrote it is alive
/// and the rank is not registered yet. So files of an earlier job, or of an earlier program of the same job,
/// are ignored. Rank 0's store removes the directory. Directories of killed jobs are removed by rank 0 of the
/// user's next job. Errc::timeout names the ranks that did not register.
std::shared_ptr<Store> local_rendezvous_store(const std::string& job, int rank, int size, Deadline);

/// Process id and start time of the process that launched this one: the nearest ancestor that is a Hydra
/// proxy, else the parent.
std::string launcher_process_id();

}  // namespace rz
