#pragma once
/// Ranks as processes of one call.

#include <functional>

#include "sharding/engine/world.h"

namespace rz {

/// Runs `main` in `ranks` processes, made by fork(), each with its World, and waits for them. As
/// torch.multiprocessing.spawn: nothing that `main` computes comes back; it writes files, or prints.
///
/// When a rank fails, the others are ended: SIGTERM, 5 s later SIGKILL. Then the first failure is thrown:
/// its code, and "rank 2: MESSAGE", or the signal that killed the rank; culprit() is the rank. The ranks end
/// when this process does.
///
/// fork() copies the calling thread only, and no CUDA context: call it before other threads run and before
/// CUDA is used. Do not use communicators of this process in `main`.
void spawn(int ranks, const std::function<void(World&)>& main, const WorldOptions& = {});

}  // namespace rz
