// Devices: found once per process, without creating a context on any of them.
#include "cuda/device.h"

#include <cuda.h>

#include <algorithm>
#include <fstream>
#include <string>
#include <vector>

#include "core/error.h"
#include "cuda/cuda.h"
#include "cuda/set.h"

namespace deltic::gpu {
namespace {

struct Found {
  std::vector<Device> devices;
  std::vector<std::string> lines;
  std::string missing;  // of code for sm_90; empty: some device has it
};

int attribute(cudaDeviceAttr which, int index) {
  int value = 0;
  return cudaDeviceGetAttribute(&value, which, index) == cudaSuccess ? value : 0;
}

std::string name_of_device(int index) {
  cudaDeviceProp properties;
  if (cudaGetDeviceProperties(&properties, index) != cudaSuccess) return "unknown GPU";
  return cat(properties.name, ", ", properties.totalGlobalMem >> 20, " MiB");
}

Found look() {
  Found found;
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  static_cast<void>(cudaGetLastError());
  if (error != cudaSuccess || count == 0) {
    found.missing = error == cudaErrorInsufficientDriver
                        ? "there is no NVIDIA driver, or one older than CUDA " +
                              std::to_string(CUDART_VERSION / 1000)
                        : cat("there is no GPU (", cudaGetErrorString(error), ")");
    found.lines.push_back("none: " + found.missing);
    return found;
  }
  std::string oldest;
  bool has_sm90 = false;
  for (int i = 0; i < count; ++i) {
    Device d;
    d.major = attribute(cudaDevAttrComputeCapabilityMajor, i);
    d.minor = attribute(cudaDevAttrComputeCapabilityMinor, i);
    d.num_sms = attribute(cudaDevAttrMultiProcessorCount, i);
    d.l2_bytes = static_cast<size_t>(attribute(cudaDevAttrL2CacheSize, i));
    d.smem_bytes = static_cast<size_t>(attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, i));
    found.devices.push_back(d);
    const std::string version = cat("compute capability ", d.major, ".", d.minor);
    found.lines.push_back(
        cat(name_of_device(i), ", ", d.num_sms, " SMs, ", version,
            d.major == 9 ? "" : ": this build has code for compute capability 9.0 alone"));
    has_sm90 = has_sm90 || d.major == 9;
    if (oldest.empty()) oldest = version;
  }
  if (!has_sm90) {
    found.missing =
        "this build has code for GPUs of compute capability 9.0, the GPU here has " + oldest;
  }
  return found;
}

const Found& found() {
  static const Found all = look();
  return all;
}

// A driver's function of the given version, or null: the runtime is linked statically, and a driver
// older than the function is no error.
template <class Function>
Function driver_function(const char* name, unsigned version) {
  void* f = nullptr;
  cudaDriverEntryPointQueryResult result;
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion(name, &f, version, cudaEnableDefault, &result);
  static_cast<void>(cudaGetLastError());
  return error == cudaSuccess && result == cudaDriverEntryPointSuccess
             ? reinterpret_cast<Function>(f)
             : nullptr;
}
// What says how many SMs a stream's context has.
struct ContextFunctions {
  using OfStream = CUresult(CUDAAPI*)(CUstream, CUcontext*, CUgreenCtx*);
  using OfContext = CUresult(CUDAAPI*)(CUcontext, CUdevResource*, CUdevResourceType);
  using OfGreen = CUresult(CUDAAPI*)(CUgreenCtx, CUdevResource*, CUdevResourceType);
  OfStream of_stream = driver_function<OfStream>("cuStreamGetCtx", 12050);
  OfContext of_context = driver_function<OfContext>("cuCtxGetDevResource", 12040);
  OfGreen of_green = driver_function<OfGreen>("cuGreenCtxGetDevResource", 12040);
};

}  // namespace

void check_cuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  static_cast<void>(cudaGetLastError());
  fail(error == cudaErrorMemoryAllocation ? DELTIC_OUT_OF_MEMORY : DELTIC_RUNTIME_ERROR, what, ": ",
       cudaGetErrorName(error), ": ", cudaGetErrorString(error));
}

void check_launch(const char* kernel) { check_cuda(cudaGetLastError(), kernel); }

const Device* device(int32_t index) {
  const auto& all = found().devices;
  return index >= 0 && static_cast<size_t>(index) < all.size() ? &all[static_cast<size_t>(index)]
                                                               : nullptr;
}

const char* missing_sm90() { return found().missing.empty() ? nullptr : found().missing.c_str(); }

const char* refuse_before_sm90(const Problem& p) {
  const Device* d = device(p.device_index);
  if (d == nullptr) return "there is no such device";
  return d->major == 9 ? nullptr
                       : "the code is for compute capability 9.0, the tensors' GPU has another";
}

std::string build_facts() {
  return cat(CUDART_VERSION / 1000, ".", CUDART_VERSION % 1000 / 10, ", code for sm_90a",
             kFullSet ? "" : ", one instance of each kernel (DELTIC_CUDA_SET=ci)");
}
std::vector<std::string> devices_found() { return found().lines; }

// The kernel module's line: `NVRM version: NVIDIA UNIX ... Kernel Module  580.159.04  Release ...`.
std::string driver_version() {
  std::ifstream in("/proc/driver/nvidia/version");
  std::string word;
  while (in >> word) {
    if (word.find_first_not_of("0123456789.") == std::string::npos) return word;
  }
  return "none";
}

int num_sms(int32_t device_index, void* stream) {
  const Device* d = device(device_index);
  if (d == nullptr) return 0;
  static const ContextFunctions driver;
  if (!driver.of_stream || !driver.of_context || !driver.of_green) return d->num_sms;
  CUcontext context = nullptr;
  CUgreenCtx green = nullptr;  // then `context` is that of the whole device
  CUdevResource resource{};
  // An error, such as that of a thread without a context, is the launch's to report.
  if (driver.of_stream(static_cast<CUstream>(stream), &context, &green) != CUDA_SUCCESS)
    return d->num_sms;
  const CUresult error = green != nullptr
                             ? driver.of_green(green, &resource, CU_DEV_RESOURCE_TYPE_SM)
                             : driver.of_context(context, &resource, CU_DEV_RESOURCE_TYPE_SM);
  return error == CUDA_SUCCESS ? std::min(d->num_sms, static_cast<int>(resource.sm.smCount))
                               : d->num_sms;
}

void check_device(const char* op, int32_t device_index) {
  const size_t count = found().devices.size();
  if (count == 0) {
    fail(DELTIC_UNSUPPORTED, op, ": no implementation takes this call: ", found().missing);
  }
  if (device(device_index) == nullptr) {
    fail(DELTIC_INVALID_ARGUMENT, op, ": device: expected cuda:0 to cuda:", count - 1,
         ", got cuda:", device_index);
  }
}

DeviceScope::DeviceScope(int32_t device_index) {
  int current = 0;
  check_cuda(cudaGetDevice(&current), "cudaGetDevice");
  if (current == device_index) return;
  check_cuda(cudaSetDevice(device_index), "cudaSetDevice");
  previous_ = current;
}

DeviceScope::~DeviceScope() {
  if (previous_ >= 0) static_cast<void>(cudaSetDevice(previous_));
}

}  // namespace deltic::gpu
