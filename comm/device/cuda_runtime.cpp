#include "comm/device/cuda_runtime.h"

#include <charconv>
#include <system_error>

namespace rz::cuda {

namespace {

const char* advice(Status status) {
  switch (status) {
    case out_of_memory:
      return "; use smaller batches, a higher ZeRO stage or recomputation";
    case 35:  // cudaErrorInsufficientDriver
      return "; install a driver that is new enough for this build's CUDA";
    case 98:   // cudaErrorInvalidDeviceFunction
    case 209:  // cudaErrorNoKernelImageForDevice
      return "; build for this card with -DCMAKE_CUDA_ARCHITECTURES=…";
    case 700:  // cudaErrorIllegalAddress
    case 719:  // cudaErrorLaunchFailure
      return "; an earlier kernel failed: compute-sanitizer names it";
    default:
      return "";
  }
}

}  // namespace

int device_count() noexcept {
  try {
    int count = 0;
    return runtime().get_device_count(&count) == success ? count : 0;
  } catch (const Error&) {
    return 0;
  }
}

void require_device(Device device) {
  if (device.kind == Device::host) return;
  const Runtime* cuda = nullptr;
  try {
    cuda = &runtime();
  } catch (const Error& none) {  // a build without CUDA
    fail(Errc::config, name(device), " is not there: ", none.what());
  }
  int count = 0;
  const Status status = cuda->get_device_count(&count);
  if (status != success) count = 0;
  require(device.index >= 0 && device.index < count, Errc::config, name(device), " is not there: ",
          count == 0
              ? std::string("no CUDA device was found")
              : concat("this machine has ", count, count == 1 ? " device" : " devices", ", from cuda:0"),
          status != success ? concat(" (", cuda->error_text(status), ")") : "");
}

Device device_from_name(std::string_view text, int local_rank) {
  if (text == "host") return {};
  Device device{Device::cuda, 0};
  if (text == "cuda") {
    require_device(device);
    device.index = local_rank % device_count();
    return device;
  }
  constexpr std::string_view prefix = "cuda:";
  const std::string_view number = text.starts_with(prefix) ? text.substr(prefix.size()) : "";
  const auto [end, error] = std::from_chars(number.data(), number.data() + number.size(), device.index);
  require(error == std::errc{} && end == number.data() + number.size() && !number.empty(), Errc::config,
          "device '", text, "' is unknown; choose host, cuda or cuda:N");
  require_device(device);
  return device;
}

void check(Status status, const char* call, Device device) {
  if (status == success) return;
  const Runtime& cuda = runtime();
  fail(Errc::system, call, " on ", name(device), ": ", cuda.error_text(status), " (", cuda.error_name(status),
       ")", advice(status));
}

DeviceGuard::DeviceGuard(Device device) {
  if (device.kind == Device::host) return;
  const char* call = "";
  check(make_current(device.index, &call), call, device);
}

DeviceGuard::DeviceGuard(Device device, std::nothrow_t) noexcept {
  const char* call = "";
  if (device.kind == Device::cuda) static_cast<void>(make_current(device.index, &call));
}

Status DeviceGuard::make_current(int device, const char** call) {
  const Runtime& cuda = runtime();
  *call = "cudaGetDevice";
  if (const Status status = cuda.get_device(&previous_)) return status;
  if (previous_ == device) return success;
  *call = "cuDevicePrimaryCtxGetState";
  bool restores = false;
  if (const Status status = cuda.has_context(&restores, previous_)) return status;
  *call = "cudaSetDevice";
  const Status status = cuda.set_device(device);
  restores_ = restores && status == success;
  return status;
}

DeviceGuard::~DeviceGuard() {
  if (restores_) runtime().set_device(previous_);
}

}  // namespace rz::cuda
