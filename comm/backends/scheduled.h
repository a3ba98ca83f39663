#pragma once
/// The backend of ours: collectives as schedules on a transport.

#include <memory>

#include "comm/backend.h"
#include "comm/backends/scheduled_options.h"
#include "comm/transports/transport.h"

namespace rz {

std::unique_ptr<Backend> make_native_backend(int rank, int size, std::unique_ptr<Transport>,
                                             const NativeOptions&);

}  // namespace rz
