#pragma once
/// Cross-memory attach (CMA): reads the memory of another process with one copy, by process_vm_readv(2). The
/// kernel decides on permission (ptrace(2), "access mode checks"): usually processes of one user may read
/// each other; in some containers no process may.

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <span>

namespace rz {

/// Fills `into` from `address` of the process. Returns 0 or an errno value: ESRCH if the process has exited,
/// EFAULT if the range is not mapped, EPERM or ENOSYS if reading is not permitted.
int cma_read_process(pid_t, std::uint64_t address, std::span<std::byte> into) noexcept;

/// True if the kernel can read this range of the calling process; false for some device mappings. Checks the
/// first and the last byte.
bool cma_readable(std::span<const std::byte>) noexcept;

/// Result of reading a peer's memory. `gone`: the peer has exited or the group has failed; the transport
/// reports the cause. `refused`: the kernel no longer permits this rank to read that process.
enum class CmaResult : unsigned char { done, gone, refused };

}  // namespace rz
