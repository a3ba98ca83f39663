#pragma once
/// Another process's own memory, read through the kernel: process_vm_readv(2), which finds the pages and
/// copies them once. Who may read whom is up to the kernel (ptrace(2), "access mode checks"): as a rule
/// processes of one user may, in some containers nobody.

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <span>

namespace rz {

/// Fills `into` from that address of the process; 0, or what is wrong as errno has it: ESRCH if the process
/// is gone, EFAULT if it has no such memory, EPERM or ENOSYS if it may not be read.
int cma_read_process(pid_t, std::uint64_t address, std::span<std::byte> into) noexcept;

/// Whether the kernel reads this process's memory there: not what some devices map. Looks at both ends.
bool cma_readable(std::span<const std::byte>) noexcept;

/// How reading a peer's own memory ended. `gone`: the peer, or the group has failed, as the transport will
/// say. `refused`: the kernel does not let this rank read that process any more.
enum class CmaResult : unsigned char { done, gone, refused };

}  // namespace rz
