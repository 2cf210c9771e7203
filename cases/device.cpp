// Memory and time on a GPU through the CUDA runtime.
#include "cases/device.h"

#include <cuda_runtime.h>

#include "deltic/deltic.hpp"

namespace deltic::cases::device {
namespace {

void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  static_cast<void>(cudaGetLastError());
  throw Error(error == cudaErrorMemoryAllocation ? ErrorKind::out_of_memory : ErrorKind::runtime,
              std::string(what) + ": " + cudaGetErrorString(error));
}

}  // namespace

std::string missing() {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  static_cast<void>(cudaGetLastError());
  if (error == cudaErrorInsufficientDriver)
    return "there is no NVIDIA driver, or one older than CUDA " +
           std::to_string(CUDART_VERSION / 1000);
  if (error != cudaSuccess) return std::string("there is no GPU: ") + cudaGetErrorString(error);
  return count > 0 ? "" : "there is no GPU";
}

std::string name() {
  int index = 0;
  check(cudaGetDevice(&index), "cudaGetDevice");
  cudaDeviceProp properties;
  check(cudaGetDeviceProperties(&properties, index), "cudaGetDeviceProperties");
  return properties.name;
}

size_t cache_bytes() {
  int index = 0, bytes = 0;
  check(cudaGetDevice(&index), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&bytes, cudaDevAttrL2CacheSize, index), "cudaDeviceGetAttribute");
  return static_cast<size_t>(bytes);
}

size_t memory_bytes() {
  size_t free = 0, total = 0;
  check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
  return free;
}

std::shared_ptr<std::byte> allocate(size_t bytes) {
  void* p = nullptr;
  check(cudaMalloc(&p, bytes > 0 ? bytes : 1), "cudaMalloc");
  return {static_cast<std::byte*>(p), [](std::byte* q) { static_cast<void>(cudaFree(q)); }};
}

// Of a few bytes cudaMemcpy returns before they are there, and other streams do not wait for them.
void upload(std::byte* to, const std::byte* from, size_t bytes) {
  check(cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice), "cudaMemcpy");
  check(cudaStreamSynchronize(nullptr), "cudaStreamSynchronize");
}
void download(std::byte* to, const std::byte* from, size_t bytes) {
  check(cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToHost), "cudaMemcpy");
}
void copy(std::byte* to, const std::byte* from, size_t bytes, void* stream) {
  check(
      cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, static_cast<cudaStream_t>(stream)),
      "cudaMemcpyAsync");
}
void copy_2d(std::byte* to, size_t to_pitch, const std::byte* from, size_t from_pitch, size_t width,
             size_t rows) {
  if (rows == 0 || width == 0) return;
  check(cudaMemcpy2DAsync(to, to_pitch, from, from_pitch, width, rows, cudaMemcpyDeviceToDevice,
                          nullptr),
        "cudaMemcpy2DAsync");
}
void set(std::byte* to, uint8_t value, size_t bytes) {
  check(cudaMemset(to, value, bytes), "cudaMemset");
}
void synchronize() { check(cudaDeviceSynchronize(), "cudaDeviceSynchronize"); }

struct Graph::Handles {
  cudaStream_t stream = nullptr;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  cudaEvent_t begin = nullptr, end = nullptr;

  ~Handles() {
    if (exec != nullptr) static_cast<void>(cudaGraphExecDestroy(exec));
    if (graph != nullptr) static_cast<void>(cudaGraphDestroy(graph));
    if (begin != nullptr) static_cast<void>(cudaEventDestroy(begin));
    if (end != nullptr) static_cast<void>(cudaEventDestroy(end));
    if (stream != nullptr) static_cast<void>(cudaStreamDestroy(stream));
  }
};

Graph::Graph(const std::function<void(void*)>& calls) : handles_(std::make_unique<Handles>()) {
  Handles& h = *handles_;
  check(cudaStreamCreateWithFlags(&h.stream, cudaStreamNonBlocking), "cudaStreamCreate");
  check(cudaEventCreate(&h.begin), "cudaEventCreate");
  check(cudaEventCreate(&h.end), "cudaEventCreate");
  check(cudaStreamBeginCapture(h.stream, cudaStreamCaptureModeThreadLocal),
        "cudaStreamBeginCapture");
  try {
    calls(h.stream);
  } catch (...) {
    static_cast<void>(cudaStreamEndCapture(h.stream, &h.graph));
    static_cast<void>(cudaGetLastError());
    throw;
  }
  check(cudaStreamEndCapture(h.stream, &h.graph), "cudaStreamEndCapture");
  check(cudaGraphInstantiate(&h.exec, h.graph, 0), "cudaGraphInstantiate");
  check(cudaGraphUpload(h.exec, h.stream), "cudaGraphUpload");
}
Graph::~Graph() = default;

double Graph::replay_ms() {
  return calls_ms(
      [&](void*) { check(cudaGraphLaunch(handles_->exec, handles_->stream), "cudaGraphLaunch"); });
}
double Graph::calls_ms(const std::function<void(void*)>& calls) {
  Handles& h = *handles_;
  check(cudaEventRecord(h.begin, h.stream), "cudaEventRecord");
  calls(h.stream);
  check(cudaEventRecord(h.end, h.stream), "cudaEventRecord");
  check(cudaStreamSynchronize(h.stream), "cudaStreamSynchronize");
  float ms = 0;
  check(cudaEventElapsedTime(&ms, h.begin, h.end), "cudaEventElapsedTime");
  return static_cast<double>(ms);
}

void Graph::replay() {
  Handles& h = *handles_;
  check(cudaGraphLaunch(h.exec, h.stream), "cudaGraphLaunch");
  check(cudaStreamSynchronize(h.stream), "cudaStreamSynchronize");
}

}  // namespace deltic::cases::device
