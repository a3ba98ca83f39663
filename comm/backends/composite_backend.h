#pragma once
/// Two backends as one: what a communicator on a CUDA device has, whose ranks exchange device memory and, for
/// the few numbers that the host keeps (losses, norms, decisions), host memory.

#include <memory>
#include <string>

#include "comm/backend.h"

namespace rz {

/// An operation goes to the backend of the device that its memory is on; a group must be on one. Memory is
/// the device backend's. abort() and errors of either end both. describe() says `why` the device's was
/// chosen, if somebody chose it.
std::unique_ptr<Backend> device_and_host_backend(std::shared_ptr<Backend> host,
                                                 std::unique_ptr<Backend> device, std::string why = "");

}  // namespace rz
