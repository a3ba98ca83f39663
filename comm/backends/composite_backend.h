#pragma once
/// Combines a device backend and a host backend. A communicator on a CUDA device uses it to exchange device
/// memory and the few host values it needs (losses, norms, decisions).

#include <memory>
#include <string>

#include "comm/backend.h"

namespace rz {

/// Routes each operation to the backend that serves its memory's device. All operations of a group must be on
/// one side; otherwise submit() fails with Errc::invalid_argument. Allocations come from the device backend,
/// register_buffer() from the host's. abort() aborts both backends. describe() includes `why`, the reason for
/// the choice of the device backend, unless it is empty.
std::unique_ptr<Backend> device_and_host_backend(std::shared_ptr<Backend> host,
                                                 std::unique_ptr<Backend> device, std::string why = "");

}  // namespace rz
