// Where a program's tensors lie: in host memory, or on a GPU. The latter where it was compiled with
// the CUDA runtime (SERVING_LOOP_CUDA) and deltic finds a GPU that it has kernels for.
#pragma once

#include <cstddef>
#include <cstring>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "deltic/deltic.hpp"
#ifdef SERVING_LOOP_CUDA
#include <cuda_runtime_api.h>
#endif

#ifdef SERVING_LOOP_CUDA
inline void check_cuda(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

// Work that was captured once and runs again with whatever its memory holds then.
class Graph {
 public:
  Graph(cudaStream_t stream, const std::function<void()>& work) : stream_(stream) {
    cudaGraph_t graph = nullptr;
    check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    work();
    check_cuda(cudaStreamEndCapture(stream, &graph));
    const cudaError_t error = cudaGraphInstantiate(&exec_, graph, 0);
    cudaGraphDestroy(graph);
    check_cuda(error);
  }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  ~Graph() { cudaGraphExecDestroy(exec_); }
  void replay() const { check_cuda(cudaGraphLaunch(exec_, stream_)); }

 private:
  cudaStream_t stream_;
  cudaGraphExec_t exec_ = nullptr;
};
#endif

class Place {
 public:
  Place() {
#ifdef SERVING_LOOP_CUDA
    why_not_ = "deltic was built without CUDA";
    for (const auto& found :
         deltic::implementations(deltic::Op::decode, deltic::DeviceType::cuda)) {
      why_not_ = found.runs_here ? "" : found.sentence;
      if (found.runs_here) break;
    }
    auto* stream = static_cast<cudaStream_t>(nullptr);
    if (is_gpu()) check_cuda(cudaStreamCreate(&stream));
    stream_ = stream;
#else
    why_not_ = "this program was built without the CUDA runtime";
#endif
  }
  Place(const Place&) = delete;
  Place& operator=(const Place&) = delete;
  ~Place() {
#ifdef SERVING_LOOP_CUDA
    if (stream_ != nullptr) cudaStreamDestroy(static_cast<cudaStream_t>(stream_));
#endif
  }

  bool is_gpu() const { return why_not_.empty(); }
  const std::string& why_not() const { return why_not_; }
  void* stream() const { return stream_; }

  // Memory of zeros, aligned to 64 bytes at least.
  std::shared_ptr<void> take(size_t bytes) const {
    bytes = (bytes + 63) / 64 * 64 + 64;
#ifdef SERVING_LOOP_CUDA
    if (is_gpu()) {
      void* data = nullptr;
      check_cuda(cudaMalloc(&data, bytes));
      std::shared_ptr<void> owner(data, [](void* p) { cudaFree(p); });
      check_cuda(cudaMemset(data, 0, bytes));
      return owner;
    }
#endif
    const auto free = [](void* p) { ::operator delete (p, std::align_val_t{64}); };
    std::shared_ptr<void> owner(::operator new (bytes, std::align_val_t{64}), free);
    std::memset(owner.get(), 0, bytes);
    return owner;
  }

  // Both wait for what the stream has to do.
  void upload(void* to, const void* from, size_t bytes) const { copy(to, from, bytes); }
  void download(void* to, const void* from, size_t bytes) const { copy(to, from, bytes); }

  // The work again and again: on a GPU as a graph that is captured here.
  std::function<void()> repeated(const std::function<void()>& work) const {
#ifdef SERVING_LOOP_CUDA
    if (is_gpu()) {
      auto graph = std::make_shared<Graph>(static_cast<cudaStream_t>(stream_), work);
      return [graph] { graph->replay(); };
    }
#endif
    return work;
  }

 private:
  void copy(void* to, const void* from, size_t bytes) const {
#ifdef SERVING_LOOP_CUDA
    if (is_gpu()) {
      const auto stream = static_cast<cudaStream_t>(stream_);
      check_cuda(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream));
      check_cuda(cudaStreamSynchronize(stream));
      return;
    }
#endif
    if (bytes > 0) std::memcpy(to, from, bytes);
  }

  std::string why_not_{};
  void* stream_ = nullptr;
};

// So many numbers there.
template <class T>
class Memory {
 public:
  Memory() = default;
  Memory(const Place& place, int64_t count)
      : place_(&place), count_(count), owner_(place.take(static_cast<size_t>(count) * sizeof(T))) {}
  Memory(const Place& place, const std::vector<T>& from)
      : Memory(place, static_cast<int64_t>(from.size())) {
    upload(from);
  }

  T* data() const { return static_cast<T*>(owner_.get()); }
  int64_t count() const { return count_; }
  void upload(const std::vector<T>& from) const {
    place_->upload(data(), from.data(), from.size() * sizeof(T));
  }
  std::vector<T> download(int64_t count) const {
    std::vector<T> found(static_cast<size_t>(count));
    place_->download(found.data(), data(), found.size() * sizeof(T));
    return found;
  }
  // Contiguous, from the given place on.
  deltic::TensorView view(int64_t at, std::initializer_list<int64_t> shape) const {
    const auto type = place_->is_gpu() ? deltic::DeviceType::cuda : deltic::DeviceType::cpu;
    if constexpr (sizeof(T) == 1) {
      return deltic::TensorView(data() + at, deltic::DType::u8, shape).on(type);
    } else {
      return deltic::TensorView(data() + at, shape).on(type);
    }
  }

 private:
  const Place* place_ = nullptr;
  int64_t count_ = 0;
  std::shared_ptr<void> owner_{};
};
