#pragma once
/// The private rendezvous of ranks on one host that share nothing but the id of their job. Not for users:
/// store_for_launch() is.

#include <memory>
#include <string>

#include "comm/core/deadline.h"
#include "comm/store.h"

namespace rz {

/// A file_store in a fresh directory inside one that is named from user and job. Rank 0 makes it, says in
/// "current" where it is and who it is, and waits until every rank has taken its seat there. The others
/// follow "current" only if the process that wrote it is alive and their seat is free: what an earlier job or
/// an earlier program of the same job has left is passed over. Rank 0's store removes the directory; what a
/// job that was killed has left, rank 0 of the user's next job does.
std::shared_ptr<Store> local_rendezvous_store(const std::string& job, int rank, int size, Deadline);

/// Names the process that launched this one, and its start: the nearest ancestor that is a launcher's proxy,
/// else the parent.
std::string launcher_process_id();

}  // namespace rz
