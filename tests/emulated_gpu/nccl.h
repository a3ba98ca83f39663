#pragma once
/// NCCL for emulated devices, behind the table of comm/backends/nccl/api/api.h: ranks are threads of the test
/// process, and collectives are tasks in the devices' streams that wait for all ranks. Sums begin with rank
/// 1, since NCCL guarantees no order. Tests that link rz_emulated_gpu get it as nccl_api().
///
/// A test fails if a communicator is used after its end, destroyed with registered memory, or not ended.

#include <string>

#include "comm/backends/nccl/api/api.h"

namespace rz::emulated {

/// An injected fault, from construction to destruction; one at a time. Ranks are those of the communicator.
class Nccl {
 public:
  /// Calls are named as in nccl::NcclApi, e.g. "group_end".
  Nccl();
  /// Releases hanging calls, and waits until all communicators have ended.
  ~Nccl();
  Nccl(const Nccl&) = delete;

  void version(int);
  /// Fills the table as a library of that version.
  static nccl::NcclApi table(int version = 22809);

  /// The call returns when it is released, or its communicator is aborted.
  void stall(const std::string& call, int rank);
  /// The call fails once, after `after` further calls have succeeded.
  void fail(const std::string& call, int rank, nccl::Result, int after = 0);
  /// From now on ncclCommGetAsyncError returns this.
  void report(int rank, nccl::Result);
  void never_connect();
  void never_finalize(int rank);
  /// ncclCommAbort returns and acts only when it is released.
  void hang_in_abort(int rank);
  /// Every call stays in progress for that many queries of ncclCommGetAsyncError.
  void in_progress(int polls);
  void release();

  int communicators() const;
  int calls() const;   ///< collectives and messages that all ranks have made
  int aborts() const;  ///< that have returned
  /// Handles of ncclCommRegister that were not deregistered.
  int registrations() const;
  int windows() const;  ///< ever registered
};

}  // namespace rz::emulated
