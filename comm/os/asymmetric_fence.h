#pragma once
/// Asymmetric fence by membarrier(2). The thread that is about to sleep runs heavy_fence(), so that frequent
/// publishers need no fence of their own.

namespace rz {

/// Registers this process as a target of heavy_fence(). Returns false if the system lacks the call or forbids
/// it.
bool register_asymmetric_fence() noexcept;
/// Full fence on this thread and on all running threads of registered processes: it orders earlier writes of
/// this thread and earlier writes of those threads before later reads of either.
void heavy_fence() noexcept;

}  // namespace rz
