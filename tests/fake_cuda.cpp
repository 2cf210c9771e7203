// A CUDA runtime without a GPU.
#include "fake_cuda.h"

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstring>
#include <iterator>
#include <list>
#include <mutex>

namespace deltic::test::fake {

Machine& machine() {
  static Machine all{.contexts = {{1, 132}}, .greens = {}, .streams = {{}}, .current = 0};
  return all;
}
void* stream(size_t index) { return reinterpret_cast<void*>(index); }
Seen& seen() {
  thread_local Seen all;
  return all;
}

namespace {

cudaError_t count(const char* name) {
  if (machine().is_counted) ++seen().calls[name];
  return cudaSuccess;
}
template <class Handle>
Handle handle(int index) {
  return reinterpret_cast<Handle>(static_cast<uintptr_t>(index + 1));
}
template <class Handle>
size_t index(Handle handle) {
  return reinterpret_cast<uintptr_t>(handle) - 1;
}

CUresult CUDAAPI get_context_of(CUstream stream, CUcontext* context, CUgreenCtx* green) {
  count("cuStreamGetCtx");
  const Stream& s = machine().streams[reinterpret_cast<uintptr_t>(stream)];
  *context = handle<CUcontext>(s.context);
  *green = s.green < 0 ? nullptr : handle<CUgreenCtx>(s.green);
  return CUDA_SUCCESS;
}
CUresult CUDAAPI get_resource(CUcontext context, CUdevResource* resource, CUdevResourceType) {
  count("cuCtxGetDevResource");
  resource->sm.smCount = static_cast<unsigned>(machine().contexts[index(context)].sms);
  return CUDA_SUCCESS;
}
CUresult CUDAAPI get_green_resource(CUgreenCtx green, CUdevResource* resource, CUdevResourceType) {
  count("cuGreenCtxGetDevResource");
  resource->sm.smCount = static_cast<unsigned>(machine().greens[index(green)].sms);
  return CUDA_SUCCESS;
}
CUresult CUDAAPI get_current(CUcontext* context) {
  count("cuCtxGetCurrent");
  *context = handle<CUcontext>(machine().current);
  return CUDA_SUCCESS;
}
CUresult CUDAAPI get_id(CUcontext context, unsigned long long* id) {
  count("cuCtxGetId");
  *id = machine().contexts[index(context)].id;
  return CUDA_SUCCESS;
}
// A handle is of one context: its id and the kernel.
struct Function {
  uint64_t context;
  const void* kernel;
};
CUresult CUDAAPI launch_by_handle(const CUlaunchConfig* config, CUfunction function, void**,
                                  void**) {
  const auto* f = reinterpret_cast<const Function*>(function);
  const bool is_of_current = f->context == machine().contexts[size_t(machine().current)].id;
  if (!machine().takes_launches || !is_of_current) {
    count("cuLaunchKernelEx refused");
    return CUDA_ERROR_INVALID_HANDLE;
  }
  seen().grids.push_back(config->gridDimX), seen().kernels.push_back(f->kernel);
  seen().launched.push_back(f->kernel);
  return CUDA_SUCCESS;
}
// The address first, as another function replaces it; then all that the map was made from.
CUresult CUDAAPI encode(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* data,
                        const cuuint64_t* dims, const cuuint64_t* strides, const cuuint32_t* box,
                        const cuuint32_t* steps, CUtensorMapInterleave, CUtensorMapSwizzle swizzle,
                        CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  count("cuTensorMapEncodeTiled");
  size_t at = 0;
  const auto put = [&](uint64_t word) { map->opaque[at++] = word; };
  put(reinterpret_cast<uintptr_t>(data));
  put(uint64_t{type} << 32 | swizzle);
  for (cuuint32_t i = 0; i < rank; ++i) put(dims[i]), put(uint64_t{box[i]} << 32 | steps[i]);
  for (cuuint32_t i = 0; i + 1 < rank; ++i) put(strides[i]);
  while (at < std::size(map->opaque)) put(0);
  return CUDA_SUCCESS;
}
CUresult CUDAAPI replace_address(CUtensorMap* map, void* data) {
  count("cuTensorMapReplaceAddress");
  map->opaque[0] = reinterpret_cast<uintptr_t>(data);
  return CUDA_SUCCESS;
}

struct Configuration {
  dim3 grid, block;
  size_t bytes = 0;
  cudaStream_t stream = nullptr;
};
thread_local Configuration t_pushed;

}  // namespace
}  // namespace deltic::test::fake

using namespace deltic::test::fake;

// The names that compiled kernels and the library refer to.
extern "C" {

void** __cudaRegisterFatBinary(void*) {
  static void* none = nullptr;
  return &none;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void**, const char*, char*, const char*, int, uint3*, uint3*, dim3*,
                            dim3*, int*) {}
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t bytes, cudaStream_t stream) {
  t_pushed = {grid, block, bytes, stream};
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* bytes, void* stream) {
  *grid = t_pushed.grid, *block = t_pushed.block, *bytes = t_pushed.bytes;
  *static_cast<cudaStream_t*>(stream) = t_pushed.stream;
  return cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = static_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3, void**, size_t, cudaStream_t) {
  seen().grids.push_back(grid.x), seen().launched.push_back(kernel);
  return cudaSuccess;
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel, void**) {
  seen().grids.push_back(config->gridDim.x), seen().launched.push_back(kernel);
  return cudaSuccess;
}

cudaError_t cudaGetFuncBySymbol(cudaFunction_t* function, const void* kernel) {
  static std::mutex mutex;
  static std::list<Function> all;  // handles stay
  const std::lock_guard<std::mutex> lock(mutex);
  all.push_back({machine().contexts[size_t(machine().current)].id, kernel});
  *function = reinterpret_cast<cudaFunction_t>(&all.back());
  return count("cudaGetFuncBySymbol");
}

cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) {
  return count("cudaFuncSetAttribute");
}
cudaError_t cudaMemsetAsync(void*, int, size_t, cudaStream_t) { return count("cudaMemsetAsync"); }
cudaError_t cudaMemcpyAsync(void*, const void*, size_t, cudaMemcpyKind, cudaStream_t) {
  return count("cudaMemcpyAsync");
}
cudaError_t cudaGetLastError() { return count("cudaGetLastError"); }
cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return count("cudaGetDevice");
}
cudaError_t cudaSetDevice(int) { return count("cudaSetDevice"); }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return count("cudaStreamSynchronize"); }
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return count("cudaStreamIsCapturing");
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void*) {
  *attributes = {};
  return count("cudaPointerGetAttributes");
}

const char* cudaGetErrorString(cudaError_t) { return "no error"; }
const char* cudaGetErrorName(cudaError_t) { return "cudaSuccess"; }
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  *properties = {};
  std::strcpy(properties->name, "no GPU");
  return cudaSuccess;
}
cudaError_t cudaGetDeviceCount(int* number) {
  *number = 1;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrComputeCapabilityMajor         ? 9
           : attribute == cudaDevAttrMultiProcessorCount          ? 132
           : attribute == cudaDevAttrMaxSharedMemoryPerBlockOptin ? 232448
                                                                  : 0;
  return cudaSuccess;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  const std::map<std::string, void*> functions = {
      {"cuStreamGetCtx", reinterpret_cast<void*>(get_context_of)},
      {"cuCtxGetDevResource", reinterpret_cast<void*>(get_resource)},
      {"cuGreenCtxGetDevResource", reinterpret_cast<void*>(get_green_resource)},
      {"cuCtxGetCurrent", reinterpret_cast<void*>(get_current)},
      {"cuCtxGetId", reinterpret_cast<void*>(get_id)},
      {"cuLaunchKernelEx", reinterpret_cast<void*>(launch_by_handle)},
      {"cuTensorMapEncodeTiled", reinterpret_cast<void*>(encode)},
      {"cuTensorMapReplaceAddress", reinterpret_cast<void*>(replace_address)}};
  const auto found = functions.find(name);
  *result =
      found == functions.end() ? cudaDriverEntryPointSymbolNotFound : cudaDriverEntryPointSuccess;
  *function = found == functions.end() ? nullptr : found->second;
  return cudaSuccess;
}

}  // extern "C"
