// What the race checker of compute-sanitizer makes of correct kernels: `probe bulk | named |
// named96 | groups`, each to be run under `compute-sanitizer --tool racecheck`. Exit code 0: right
// results.
#include <cuda_runtime.h>

#include <cstdio>
#include <cstring>
#include <vector>

#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/bulk.cuh"

using namespace deltic::gpu;

constexpr int kRounds = 8, kWords = 256;

// A thread copies kWords words from global memory round by round into two places, 128 others read
// them: full (bytes) and empty (a lane of each warp arrives) barriers, as the forward has them.
__global__ void bulk(const float* from, float* sums) {
  __shared__ alignas(128) float place[2][kWords];
  __shared__ uint64_t full[2], empty[2];
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; i++) barrier_init(&full[i], 1), barrier_init(&empty[i], 4);
    asm volatile("fence.mbarrier_init.release.cluster;");
  }
  __syncthreads();
  if (threadIdx.x == 128) {
    for (int n = 0; n < kRounds; n++) {
      barrier_wait(&empty[n & 1], (n / 2 & 1) ^ 1);
      barrier_expect(&full[n & 1], sizeof place[0]);
      bulk_load(place[n & 1], from + n * kWords, sizeof place[0], &full[n & 1]);
    }
  } else if (threadIdx.x < 128) {
    float sum = 0.f;
    for (int n = 0; n < kRounds; n++) {
      barrier_wait(&full[n & 1], n / 2 & 1);
      for (int i = threadIdx.x; i < kWords; i += 128) sum += place[n & 1][i];
      __syncwarp();
      if (threadIdx.x % 32 == 0) barrier_arrive(&empty[n & 1]);
    }
    sums[threadIdx.x] = sum;
  }
}

// Warps write words that other warps read after a named barrier of kFew of the group's 128 threads,
// and again; the rest of the threads take part in the other barriers only. Each group of 128 has
// numbers of its own, in a register.
template <int kFew>
__global__ void named(float* sums, int first_id) {
  __shared__ float places[2][128];
  const int group = threadIdx.x / 128, t = threadIdx.x % 128, id = first_id + 2 * group;
  float* const place = places[group];
  float sum = 0.f;
  for (int n = 0; n < kRounds; n++) {
    if (t < kFew) {
      place[t] = float(n + t);
      named_sync(id + 1, kFew);  // the few have written
      sum += place[(t + 32) % kFew];
    }
    named_sync(id, 128);  // all have read
    if (t < kFew) place[t] = float(2 * n + t);
    named_sync(id, 128);  // written
    sum += place[(t + 64) % kFew];
    named_sync(id, 128);  // read
  }
  sums[threadIdx.x] = sum;
}

int main(int argc, char** argv) {
  const char* what = argc > 1 ? argv[1] : "bulk";
  std::vector<float> input(kRounds * kWords), out(256);
  for (size_t i = 0; i < input.size(); i++) input[i] = float(i % 7);
  float *from, *sums;
  cudaMalloc(&from, input.size() * 4), cudaMalloc(&sums, 256 * 4);
  cudaMemcpy(from, input.data(), input.size() * 4, cudaMemcpyHostToDevice);
  if (!std::strcmp(what, "bulk")) bulk<<<1, 160>>>(from, sums);
  if (!std::strcmp(what, "named")) named<128><<<1, 128>>>(sums, 3);
  if (!std::strcmp(what, "named96")) named<96><<<1, 128>>>(sums, 3);
  if (!std::strcmp(what, "groups")) named<96><<<1, 256>>>(sums, 3);
  const cudaError_t error = cudaMemcpy(out.data(), sums, 256 * 4, cudaMemcpyDeviceToHost);
  bool ok = error == cudaSuccess;
  for (int t = 0; t < 128 && ok; t++) {
    float want = 0.f;
    const int few = std::strcmp(what, "named") ? 96 : 128;
    for (int n = 0; n < kRounds; n++) {
      if (!std::strcmp(what, "bulk"))
        for (int i = t; i < kWords; i += 128) want += input[size_t(n * kWords + i)];
      else
        want += (t < few ? float(n + (t + 32) % few) : 0.f) + float(2 * n + (t + 64) % few);
    }
    ok = out[size_t(t)] == want;
  }
  std::printf("%s: %s %s\n", what, ok ? "right" : "WRONG", cudaGetErrorString(error));
  return !ok;
}
