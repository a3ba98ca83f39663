#pragma once
/// The backend of ours: collectives as schedules on a transport.

#include <memory>

#include "comm/backend.h"
#include "comm/backends/native/native_options.h"
#include "comm/transport/transport.h"

namespace rz {

std::unique_ptr<Backend> make_native_backend(int rank, int size, std::unique_ptr<Transport>,
                                             const NativeOptions&);

}  // namespace rz
