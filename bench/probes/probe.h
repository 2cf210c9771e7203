// What the probes share: errors of CUDA end them, and a call is timed by replays of a graph.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <source_location>
#include <vector>

namespace probe {

inline void check(cudaError_t error,
                  const std::source_location& at = std::source_location::current()) {
  if (error == cudaSuccess) return;
  std::printf("%s:%u: CUDA: %s\n", at.file_name(), static_cast<unsigned>(at.line()),
              cudaGetErrorString(error));
  std::exit(1);
}

// Milliseconds of one of `calls`, sorted: `repeats` replays of a graph that has all of them, after
// `warm_up` that do not count. call(i, stream) is captured.
template <class Call>
std::vector<float> replay_ms(int calls, int repeats, int warm_up, Call call) {
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  cudaEvent_t begin, end;
  check(cudaStreamCreate(&stream)), check(cudaEventCreate(&begin)), check(cudaEventCreate(&end));
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  for (int i = 0; i < calls; ++i) call(i, stream);
  check(cudaStreamEndCapture(stream, &graph));
  check(cudaGraphInstantiate(&exec, graph, 0));
  std::vector<float> ms;
  for (int i = 0; i < warm_up + repeats; ++i) {
    check(cudaEventRecord(begin, stream));
    check(cudaGraphLaunch(exec, stream));
    check(cudaEventRecord(end, stream));
    check(cudaEventSynchronize(end));
    float x;
    check(cudaEventElapsedTime(&x, begin, end));
    if (i >= warm_up) ms.push_back(x / static_cast<float>(calls));
  }
  check(cudaGraphExecDestroy(exec)), check(cudaGraphDestroy(graph));
  check(cudaEventDestroy(begin)), check(cudaEventDestroy(end)), check(cudaStreamDestroy(stream));
  std::sort(ms.begin(), ms.end());
  return ms;
}

}  // namespace probe
