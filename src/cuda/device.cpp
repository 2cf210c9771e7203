// Devices: found once per process, without creating a context on any of them.
#include "cuda/device.h"

#include <cuda.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <string>
#include <string_view>
#include <vector>

#include "core/error.h"
#include "core/kept.h"
#include "cuda/code.h"
#include "cuda/cuda.h"
#include "cuda/set.h"
#include "cuda/tile/launch.h"

namespace deltic::gpu {
namespace {

constexpr std::string_view kArchs = DELTIC_CUDA_ARCHS;  // cmake/cuda.cmake

struct Found {
  std::vector<Device> devices;
  std::vector<std::string> lines;
  std::string missing, missing_hopper;  // empty: some device runs the code
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

// What the environment tells drivers about PTX.
CodeRules code_rules() {
  const auto is_set = [](const char* name) {
    const char* value = std::getenv(name);
    return value != nullptr && std::string_view(value) == "1";
  };
  return {is_set("CUDA_FORCE_PTX_JIT"), is_set("CUDA_DISABLE_PTX_JIT")};
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
    found.missing_hopper = found.missing;
    found.lines.push_back("none: " + found.missing);
    return found;
  }
  const std::string code = code_text(kArchs);
  const CodeRules rules = code_rules();
  std::string first;
  bool has_code = false, has_hopper = false;
  for (int i = 0; i < count; ++i) {
    Device d;
    d.major = attribute(cudaDevAttrComputeCapabilityMajor, i);
    d.minor = attribute(cudaDevAttrComputeCapabilityMinor, i);
    d.num_sms = attribute(cudaDevAttrMultiProcessorCount, i);
    d.l2_bytes = static_cast<size_t>(attribute(cudaDevAttrL2CacheSize, i));
    d.smem_bytes = static_cast<size_t>(attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, i));
    if (DELTIC_CUDA_SMEM_KB > 0)
      d.smem_bytes = std::min(d.smem_bytes, size_t{DELTIC_CUDA_SMEM_KB} << 10);
    const int number = 10 * d.major + d.minor;
    d.code = code_for(kArchs, number, rules);
    d.has_hopper_code = gpu::has_hopper_code(kArchs, number, rules);
    found.devices.push_back(d);
    const std::string version = cat("compute capability ", d.major, ".", d.minor);
    found.lines.push_back(cat(name_of_device(i), ", ", d.num_sms, " SMs, ", version,
                              d.code > 0 ? "" : ": this build has code for " + code + " alone"));
    has_code = has_code || d.code > 0;
    has_hopper = has_hopper || d.has_hopper_code;
    if (first.empty()) first = version;
  }
  if (!has_code) {
    found.missing =
        cat("this build has code for ", code, " (DELTIC_CUDA_ARCHS), the GPU here has ", first);
  }
  if (!has_hopper) {
    found.missing_hopper = cat("its code is for sm_90a, and this build has code for ", code,
                               ", the GPU here has ", first);
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
// What says whose context it is and how many SMs it has, and what launches in it.
struct ContextFunctions {
  using OfStream = CUresult(CUDAAPI*)(CUstream, CUcontext*, CUgreenCtx*);
  using OfContext = CUresult(CUDAAPI*)(CUcontext, CUdevResource*, CUdevResourceType);
  using OfGreen = CUresult(CUDAAPI*)(CUgreenCtx, CUdevResource*, CUdevResourceType);
  using Current = CUresult(CUDAAPI*)(CUcontext*);
  using Id = CUresult(CUDAAPI*)(CUcontext, unsigned long long*);
  OfStream of_stream = driver_function<OfStream>("cuStreamGetCtx", 12050);
  OfContext of_context = driver_function<OfContext>("cuCtxGetDevResource", 12040);
  OfGreen of_green = driver_function<OfGreen>("cuGreenCtxGetDevResource", 12040);
  using Start = CUresult(CUDAAPI*)(const CUlaunchConfig*, CUfunction, void**, void**);
  Current current = driver_function<Current>("cuCtxGetCurrent", 4000);
  Id id = driver_function<Id>("cuCtxGetId", 12000);
  Start start = driver_function<Start>("cuLaunchKernelEx", 11060);

  // No two contexts of a process have the same, unlike handles; 0: unknown.
  uint64_t id_of(CUcontext context) const {
    unsigned long long found = 0;
    const bool is_known =
        id != nullptr && context != nullptr && id(context, &found) == CUDA_SUCCESS;
    return is_known ? found + 1 : 0;
  }
};
const ContextFunctions& context_functions() {
  static const ContextFunctions functions;
  return functions;
}

// The current context of this thread, asked for once in a call: nobody changes it meanwhile.
struct CurrentContext {
  CUcontext context = nullptr;
  uint64_t id = 0;  // 0: unknown
};
struct CallState {
  bool is_inside = false, is_asked = false;
  CurrentContext current;
};
thread_local CallState t_call;

CurrentContext current_context() {
  CallState& call = t_call;
  if (call.is_inside && call.is_asked) return call.current;
  const ContextFunctions& driver = context_functions();
  CurrentContext found;
  const bool is_known = driver.current != nullptr && driver.current(&found.context) == CUDA_SUCCESS;
  found.id = is_known ? driver.id_of(found.context) : 0;
  call.current = found, call.is_asked = true;
  return found;
}
// Of a stream's context, which mostly is the current one.
uint64_t id_of(CUcontext context) {
  if (t_call.is_inside) {
    const CurrentContext current = current_context();
    if (current.id != 0 && current.context == context) return current.id;
  }
  return context_functions().id_of(context);
}

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

namespace {
const char* sentence_of(const std::string& text) { return text.empty() ? nullptr : text.c_str(); }
constexpr const char* kNoSuchDevice = "there is no such device";
}  // namespace

const char* missing_code() { return sentence_of(found().missing); }
const char* missing_sm90() { return sentence_of(found().missing_hopper); }

const char* refuse_without_code(const Problem& p) {
  const Device* d = device(p.device_index);
  if (d == nullptr) return kNoSuchDevice;
  return d->code > 0 ? nullptr : "this build has no code for the tensors' GPU (DELTIC_CUDA_ARCHS)";
}

const char* refuse_before_sm90(const Problem& p) {
  const Device* d = device(p.device_index);
  if (d == nullptr) return kNoSuchDevice;
  return d->has_hopper_code
             ? nullptr
             : "the code is for sm_90a, which the tensors' GPU or this build has not";
}

const char* refuse_shared_memory(const Problem& p, size_t bytes) {
  const Device* d = device(p.device_index);
  if (d == nullptr) return kNoSuchDevice;
  return bytes <= d->smem_bytes ? nullptr
                                : "it needs more shared memory than the GPU has for a CTA";
}

bool overlaps_launches() {
  static const bool all_do =
      std::ranges::all_of(found().devices, [](const Device& d) { return d.code >= 90; });
  if (all_do) return true;  // whichever is the current one
  int index = 0;
  if (cudaGetDevice(&index) != cudaSuccess) return false;
  const Device* d = device(index);
  return d != nullptr && d->code >= 90;
}

std::string build_facts() {
  return cat(CUDART_VERSION / 1000, ".", CUDART_VERSION % 1000 / 10, ", code for ",
             code_text(kArchs),
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
  const ContextFunctions& driver = context_functions();
  if (!driver.of_stream || !driver.of_context || !driver.of_green) return d->num_sms;
  CUcontext context = nullptr;
  CUgreenCtx green = nullptr;  // then `context` is that of the whole device
  CUdevResource resource{};
  // An error, such as that of a thread without a context, is the launch's to report.
  if (driver.of_stream(static_cast<CUstream>(stream), &context, &green) != CUDA_SUCCESS)
    return d->num_sms;
  // A context keeps its SMs as long as it lives. Asking takes 0.5 us on a Xeon.
  struct Answer {
    uint64_t context = 0;
    int32_t device = -1;
    int sms = 0;
  };
  static thread_local Answer last;
  const uint64_t id = green == nullptr ? id_of(context) : 0;
  if (id != 0 && last.context == id && last.device == device_index) return last.sms;
  const CUresult error = green != nullptr
                             ? driver.of_green(green, &resource, CU_DEV_RESOURCE_TYPE_SM)
                             : driver.of_context(context, &resource, CU_DEV_RESOURCE_TYPE_SM);
  if (error != CUDA_SUCCESS) return d->num_sms;
  const int sms = std::min(d->num_sms, static_cast<int>(resource.sm.smCount));
  if (id != 0) last = {id, device_index, sms};
  return sms;
}

void SharedMemory::allow(const void* kernel, size_t bytes, const char* what) {
  const uint64_t id = current_context().id;
  if (id != 0 && context_.load(std::memory_order_acquire) == id) return;
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  static_cast<int>(bytes)),
             what);
  context_.store(id, std::memory_order_release);
}

namespace {

// A kernel's handle in the current context, which lives as long as that; null: there is none.
CUfunction function_of(const void* kernel) {
  struct Known {
    const void* kernel = nullptr;
    uint64_t context = 0;
    CUfunction function = nullptr;
  };
  static thread_local Kept<Known, 64> kept;  // a program calls a few
  const uint64_t context = current_context().id;
  if (context == 0) return nullptr;
  for (const Known& k : kept)
    if (k.kernel == kernel && k.context == context) return k.function;
  cudaFunction_t found = nullptr;
  if (cudaGetFuncBySymbol(&found, kernel) != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    return nullptr;
  }
  kept.add({kernel, context, found});
  return found;
}

cudaError_t launch_by_runtime(const Launch& launch, const void* kernel, void** arguments) {
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = launch.is_early;
  attributes[1].id = cudaLaunchAttributeCooperative;
  attributes[1].val.cooperative = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = launch.grid, config.blockDim = dim3(launch.threads);
  config.dynamicSmemBytes = launch.smem;
  config.stream = launch.stream, config.attrs = attributes;
  config.numAttrs = launch.is_together ? 2 : 1;
  return cudaLaunchKernelExC(&config, kernel, arguments);
}

}  // namespace

cudaError_t launch_kernel(const Launch& launch, const void* kernel, void** arguments) {
  const ContextFunctions& driver = context_functions();
  const CUfunction function = driver.start != nullptr ? function_of(kernel) : nullptr;
  if (function == nullptr) return launch_by_runtime(launch, kernel, arguments);
  CUlaunchAttribute attributes[2]{};
  attributes[0].id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
  attributes[0].value.programmaticStreamSerializationAllowed = launch.is_early;
  attributes[1].id = CU_LAUNCH_ATTRIBUTE_COOPERATIVE;
  attributes[1].value.cooperative = 1;
  CUlaunchConfig config{};
  config.gridDimX = launch.grid.x, config.gridDimY = launch.grid.y;
  config.gridDimZ = launch.grid.z;
  config.blockDimX = launch.threads, config.blockDimY = config.blockDimZ = 1;
  config.sharedMemBytes = launch.smem;
  config.hStream = launch.stream, config.attrs = attributes;
  config.numAttrs = launch.is_together ? 2 : 1;
  if (driver.start(&config, function, arguments, nullptr) == CUDA_SUCCESS) return cudaSuccess;
  // Such as a stream of another context; what it is the runtime says, or does.
  return launch_by_runtime(launch, kernel, arguments);
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
  if (current != device_index) {
    check_cuda(cudaSetDevice(device_index), "cudaSetDevice");
    previous_ = current;
  }
  t_call = {}, t_call.is_inside = true;
}

DeviceScope::~DeviceScope() {
  t_call.is_inside = false;
  if (previous_ >= 0) static_cast<void>(cudaSetDevice(previous_));
}

}  // namespace deltic::gpu
