#pragma once
/// The rare side of an asymmetric fence: who is about to sleep makes all other threads of the machine pass a
/// full fence, so that those who publish news need none (membarrier(2)).

namespace rz {

/// Makes heavy_fence() reach this process's threads. False: the system has no such call, or forbids it.
bool register_asymmetric_fence() noexcept;
/// What this thread wrote before is seen by registered threads of all processes in what they read after what
/// they wrote before it, as if each had passed a full fence.
void heavy_fence() noexcept;

}  // namespace rz
