// The names of the CUDA runtime and driver that library and tests call, on the emulated GPU.
#include <cuda.h>
#include <cuda_runtime.h>

#include <cstring>
#include <map>
#include <string>

#include "machine.h"
#include "tensor_box.h"

namespace deltic::emulator {
namespace {

thread_local cudaError_t t_last = cudaSuccess;
cudaError_t keep(cudaError_t error) {
  if (error != cudaSuccess) t_last = error;
  return error;
}
Machine& machine() { return Machine::get(); }

struct EmulatedGraph {
  std::vector<Item> items;
};
uint64_t next_handle() {
  static uint64_t last = 4096;
  return ++last;
}
// What a stream is asked to do besides launches.
void add_work(cudaStream_t stream, std::function<void()> work) {
  machine().add(stream, {nullptr, [work = std::move(work)] {
                           work();
                           return true;
                         }});
}

CUresult CUDAAPI get_context_of(CUstream, CUcontext* context, CUgreenCtx* green) {
  *context = reinterpret_cast<CUcontext>(1), *green = nullptr;
  return CUDA_SUCCESS;
}
CUresult CUDAAPI get_resource(CUcontext, CUdevResource* resource, CUdevResourceType) {
  resource->sm.smCount = static_cast<unsigned>(machine().settings.sms);
  return CUDA_SUCCESS;
}
CUresult CUDAAPI get_green_resource(CUgreenCtx, CUdevResource*, CUdevResourceType) {
  return CUDA_ERROR_INVALID_VALUE;
}
CUresult CUDAAPI get_current(CUcontext* context) {
  *context = reinterpret_cast<CUcontext>(1);
  return CUDA_SUCCESS;
}
CUresult CUDAAPI get_id(CUcontext, unsigned long long* id) {
  *id = 1;
  return CUDA_SUCCESS;
}
CUresult CUDAAPI encode(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* data,
                        const cuuint64_t* dims, const cuuint64_t* strides, const cuuint32_t* box,
                        const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle swizzle,
                        CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  const uintptr_t at = reinterpret_cast<uintptr_t>(data);
  if (rank != 4 || at % 16 != 0) return CUDA_ERROR_INVALID_VALUE;
  for (int i = 0; i < 3; ++i)
    if (strides[i] % 16 != 0 || strides[i] >= uint64_t{1} << 40) return CUDA_ERROR_INVALID_VALUE;
  for (int i = 0; i < 4; ++i)
    if (dims[i] == 0 || dims[i] > uint64_t{1} << 32) return CUDA_ERROR_INVALID_VALUE;
  encode_map(map, type, data, dims, strides, box, swizzle);
  return CUDA_SUCCESS;
}
CUresult CUDAAPI replace_address(CUtensorMap* map, void* data) {
  replace_map_address(map, data);
  return CUDA_SUCCESS;
}

}  // namespace

cudaError_t launch(const Shape& shape, cudaStream_t stream, const void* kernel,
                   std::function<void()> body) {
  if (const cudaError_t error = machine().refuse(shape); error != cudaSuccess) return keep(error);
  machine().add(stream, launch_item(shape, kernel, std::move(body)));
  return cudaSuccess;
}

}  // namespace deltic::emulator

using namespace deltic::emulator;

extern "C" {

cudaError_t cudaGetLastError() {
  const cudaError_t last = t_last;
  t_last = cudaSuccess;
  return last;
}
cudaError_t cudaPeekAtLastError() { return t_last; }
const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaSuccess ? "no error" : "an error of the emulated GPU";
}
const char* cudaGetErrorName(cudaError_t error) {
  return error == cudaErrorCooperativeLaunchTooLarge ? "cudaErrorCooperativeLaunchTooLarge"
         : error == cudaErrorInvalidConfiguration    ? "cudaErrorInvalidConfiguration"
         : error == cudaErrorMemoryAllocation        ? "cudaErrorMemoryAllocation"
         : error == cudaSuccess                      ? "cudaSuccess"
                                                     : "cudaErrorUnknown";
}

cudaError_t cudaGetDeviceCount(int* number) {
  *number = 1;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  return device == 0 ? cudaSuccess : keep(cudaErrorInvalidDevice);
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  *properties = {};
  std::strcpy(properties->name, "emulated Hopper");
  properties->totalGlobalMem = size_t{16} << 30;
  properties->multiProcessorCount = machine().settings.sms;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrComputeCapabilityMajor         ? 9
           : attribute == cudaDevAttrMultiProcessorCount          ? machine().settings.sms
           : attribute == cudaDevAttrMaxSharedMemoryPerBlockOptin ? 232448
           : attribute == cudaDevAttrL2CacheSize                  ? 1 << 20
                                                                  : 0;
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
cudaError_t cudaGetFuncBySymbol(cudaFunction_t* function, const void* kernel) {
  *function = static_cast<cudaFunction_t>(const_cast<void*>(kernel));
  return cudaSuccess;
}
// Launches go by cuda/tile/start.h, with the types of their parameters.
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void*, void**) {
  return keep(cudaErrorInvalidConfiguration);
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* place) {
  *attributes = {};
  attributes->type = machine().owns(place) ? cudaMemoryTypeDevice : cudaMemoryTypeUnregistered;
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
      {"cuTensorMapEncodeTiled", reinterpret_cast<void*>(encode)},
      {"cuTensorMapReplaceAddress", reinterpret_cast<void*>(replace_address)}};
  const auto found = functions.find(name);
  *result =
      found == functions.end() ? cudaDriverEntryPointSymbolNotFound : cudaDriverEntryPointSuccess;
  *function = found == functions.end() ? nullptr : found->second;
  return cudaSuccess;
}

// --- memory --------------------------------------------------------------------------------------
cudaError_t cudaMalloc(void** place, size_t bytes) {
  *place = machine().allocate(bytes);
  return *place == nullptr ? keep(cudaErrorMemoryAllocation) : cudaSuccess;
}
cudaError_t cudaFree(void* place) {
  machine().free(static_cast<std::byte*>(place));
  return cudaSuccess;
}
cudaError_t cudaHostAlloc(void** place, size_t bytes, unsigned) {
  *place = std::malloc(bytes);
  return *place == nullptr ? keep(cudaErrorMemoryAllocation) : cudaSuccess;
}
cudaError_t cudaFreeHost(void* place) {
  machine().drain();
  std::free(place);
  return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  *free = *total = size_t{8} << 30;
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  machine().drain();
  if (bytes > 0) std::memcpy(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind,
                            cudaStream_t stream) {
  if (bytes > 0) add_work(stream, [=] { std::memcpy(to, from, bytes); });
  return cudaSuccess;
}
cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch,
                              size_t width, size_t rows, cudaMemcpyKind, cudaStream_t stream) {
  add_work(stream, [=] {
    for (size_t i = 0; i < rows; ++i)
      std::memcpy(static_cast<std::byte*>(to) + i * to_pitch,
                  static_cast<const std::byte*>(from) + i * from_pitch, width);
  });
  return cudaSuccess;
}
cudaError_t cudaMemset(void* to, int value, size_t bytes) {
  machine().drain();
  if (bytes > 0) std::memset(to, value, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  if (bytes > 0) add_work(stream, [=] { std::memset(to, value, bytes); });
  return cudaSuccess;
}

// --- streams, events, graphs ---------------------------------------------------------------------
cudaError_t cudaDeviceSynchronize() {
  machine().drain();
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaDeviceSynchronize(); }
cudaError_t cudaStreamQuery(cudaStream_t) { return cudaDeviceSynchronize(); }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  *stream = reinterpret_cast<cudaStream_t>(next_handle());
  machine().stream(*stream);
  return cudaSuccess;
}
cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithFlags(stream, 0); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int) {
  return cudaStreamCreateWithFlags(stream, flags);
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0, *greatest = -5;
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaDeviceSynchronize(); }
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  *status = machine().stream(stream).captured != nullptr ? cudaStreamCaptureStatusActive
                                                         : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  machine().stream(stream).captured = new std::vector<Item>;
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  Stream& s = machine().stream(stream);
  *graph = reinterpret_cast<cudaGraph_t>(new EmulatedGraph{std::move(*s.captured)});
  delete s.captured;
  s.captured = nullptr;
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long) {
  *exec = reinterpret_cast<cudaGraphExec_t>(
      new EmulatedGraph(*reinterpret_cast<EmulatedGraph*>(graph)));
  return cudaSuccess;
}
cudaError_t cudaGraphUpload(cudaGraphExec_t, cudaStream_t) { return cudaSuccess; }
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
  for (const Item& item : reinterpret_cast<EmulatedGraph*>(exec)->items)
    machine().add(stream, item.grid
                              ? launch_item(item.grid->shape, item.grid->kernel, item.grid->body)
                              : item);
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
  delete reinterpret_cast<EmulatedGraph*>(exec);
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete reinterpret_cast<EmulatedGraph*>(graph);
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) {
  *event = reinterpret_cast<cudaEvent_t>(next_handle());
  return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  return cudaEventCreate(event);
}
cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return cudaSuccess; }
cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaDeviceSynchronize(); }
// Everything ahead of the event is done then, whatever stream it is on.
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) {
  return cudaDeviceSynchronize();
}
// There is no time on an emulated GPU.
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t, cudaEvent_t) {
  *ms = 1.0f;
  return cudaDeviceSynchronize();
}

}  // extern "C"
