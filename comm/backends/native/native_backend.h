#pragma once
/// The native backend for host memory: collectives by the intra-node engine, or by schedules over a
/// transport.

#include <memory>

#include "comm/backend.h"
#include "comm/backends/native/native_options.h"
#include "comm/transport/transport.h"

namespace rz {

/// Backend of rank `rank` of a group of `size`. Errc::config if options.algorithm does not fit the group.
/// The process's progress thread drives it (comm/progress/progress_driver.h).
std::unique_ptr<Backend> make_native_backend(int rank, int size, std::unique_ptr<Transport>,
                                             const NativeOptions&);

}  // namespace rz
