#pragma once
/// Asymmetric fence by membarrier(2), for a sleep/wakeup protocol: the thread that is about to sleep runs
/// heavy_fence(), so that the threads that publish events need no fence.

namespace rz {

/// Registers this process as a target of heavy_fence(). Returns false if the system lacks the call or forbids
/// it.
bool register_asymmetric_fence() noexcept;
/// Full memory barrier in this thread and, before the call returns, in every running thread of the registered
/// processes. If this thread writes A, calls heavy_fence() and reads B, while a registered thread writes B
/// and then reads A without a fence, at least one of them sees the other's write.
void heavy_fence() noexcept;

}  // namespace rz
