#pragma once
/// Rendezvous of ranks on one host that share only the id of their job. Internal: users call
/// store_for_launch().

#include <memory>
#include <string>

#include "comm/core/deadline.h"
#include "comm/store.h"

namespace rz {

/// Returns a file_store in a fresh private directory, below a directory named after user and job. Rank 0
/// creates it, writes its random name and the job to the file "current", and waits until every rank has
/// registered there. A rank registers by a file that it keeps locked (flock(2)) as long as its store exists,
/// so that a process counts as alive by its lock, from every pid namespace. Another rank follows "current"
/// only if it is of the same job and kernel, rank 0 is alive, and the rank is not registered yet. So files of
/// an earlier job, or of an earlier program of the same job, are ignored. Rank 0's store removes the
/// directory. Where another user has the directory's name, which can be guessed, rank 0 adds a random part,
/// and the others find it by its owner. Directories of killed jobs are removed by rank 0 of the user's next
/// job.
///
/// Errc::timeout names the ranks that did not register. Errc::rendezvous at once if another process is alive
/// as this rank of this job: a program that a rank started, or another job with the same identity; and if
/// there is no directory for temporary files.
std::shared_ptr<Store> local_rendezvous_store(const std::string& job, int rank, int size, Deadline);

/// The process that started the ranks of this host.
struct LauncherProcess {
  std::string name;  ///< of its program
  /// Boot of the kernel, pid namespace, process id and start time: no other process ever has the same. Empty
  /// if one of them is unknown.
  std::string id;
};

/// The nearest ancestor that is known as a launcher's; empty if none is visible here, as in a container with
/// processes of its own.
LauncherProcess find_launcher_process();

}  // namespace rz
