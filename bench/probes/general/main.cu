// Times of the general kernels on a GPU at the sizes that have a target, and the fused scores with
// inverse against the two operations alone. Values against the oracle: `deltic verify --device
// cuda`.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "../probe.h"
#include "core/problem.h"
#include "cuda/sm80/inverse/launch.h"
#include "cuda/sm80/recurrence/launch.h"
#include "cuda/sm80/scores/launch.h"

namespace {

using namespace deltic;
using probe::check;

// uniform in [low, high), a hash of the index.
template <class E>
__global__ void fill(E* x, int64_t n, float low, float high, uint32_t seed) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < n;
       i += int64_t{gridDim.x} * blockDim.x) {
    uint32_t h = static_cast<uint32_t>(i) * 2654435761u + seed;
    h ^= h >> 16, h *= 0x85EBCA6Bu, h ^= h >> 13, h *= 0xC2B2AE35u, h ^= h >> 16;
    x[i] = static_cast<E>(low + (high - low) * (h * 0x1p-32f));
  }
}

// G: chunk-local sums of uniform log decays in [-depth, 0].
__global__ void fill_gates(float* x, int64_t T, int64_t row, int64_t columns, float depth) {
  const int64_t c = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (c >= columns) return;
  float* at = x + c / row * T * row + c % row;
  float sum = 0;
  for (int64_t t = 0; t < T; ++t) {
    if (t % 64 == 0) sum = 0;
    uint32_t h = static_cast<uint32_t>(c * 40503 + t) * 2654435761u;
    h ^= h >> 15, h *= 0x85EBCA6Bu, h ^= h >> 13;
    sum -= depth * (h * 0x1p-32f);
    at[t * row] = sum;
  }
}

struct Tensors {
  std::vector<void*> all;
  ~Tensors() {
    for (void* x : all) cudaFree(x);
  }
  Rows rows(DType type, int64_t B, int64_t T, int64_t H, int64_t width, float low, float high) {
    Rows x;
    const int64_t n = B * T * H * width;
    check(cudaMalloc(&x.data, static_cast<size_t>(n * size_of(type))));
    all.push_back(x.data);
    const uint32_t seed = static_cast<uint32_t>(all.size()) * 7919u;
    if (type == DType::f32) {
      fill<<<1024, 256>>>(static_cast<float*>(x.data), n, low, high, seed);
    } else if (type == DType::f16) {
      fill<<<1024, 256>>>(static_cast<__half*>(x.data), n, low, high, seed);
    } else {
      fill<<<1024, 256>>>(static_cast<__nv_bfloat16*>(x.data), n, low, high, seed);
    }
    x.dtype = type, x.present = true;
    x.sh = width, x.st = H * width, x.sb = T * H * width;
    return x;
  }
};

// Milliseconds of one launch: the median of 7 rounds of 10.
double time(const std::function<void()>& f) {
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin)), check(cudaEventCreate(&end));
  for (int i = 0; i < 3; ++i) f();
  std::vector<double> rounds;
  for (int r = 0; r < 7; ++r) {
    check(cudaEventRecord(begin));
    for (int i = 0; i < 10; ++i) f();
    check(cudaEventRecord(end));
    check(cudaEventSynchronize(end));
    float ms = 0;
    check(cudaEventElapsedTime(&ms, begin, end));
    rounds.push_back(ms / 10);
  }
  std::sort(rounds.begin(), rounds.end());
  return rounds[3];
}

void line(const char* name, double ms, double bytes, double anchor = 0) {
  std::printf("%-54s %8.4f ms %6.2f TB/s %4.0f %% of copy", name, ms, bytes / ms * 1e-9,
              bytes / ms * 1e-9 / 4.27 * 100);
  anchor > 0 ? std::printf("   %.2f times %.3f\n", anchor / ms, anchor) : std::printf("\n");
}

double difference(const void* a, const void* b, int64_t n) {
  std::vector<__half> x(static_cast<size_t>(n)), y(static_cast<size_t>(n));
  check(cudaMemcpy(x.data(), a, x.size() * 2, cudaMemcpyDeviceToHost));
  check(cudaMemcpy(y.data(), b, y.size() * 2, cudaMemcpyDeviceToHost));
  double diff = 0, norm = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    const double p = __half2float(x[i]), q = __half2float(y[i]);
    diff += (p - q) * (p - q), norm += q * q;
  }
  return std::sqrt(diff / norm);
}

void scores_inverse(int64_t B, int64_t T, int64_t H, int64_t K, double anchor) {
  Tensors t;
  Problem p;
  p.op = DELTIC_SCORES_INVERSE, p.B = p.N = B, p.T = T, p.H = p.HV = H, p.K = K;
  p.gate = Gate::channel, p.beta_kind = BetaKind::head, p.scale = 1 / std::sqrt(float(K));
  const float r = std::sqrt(3.0f / static_cast<float>(K));
  p.q = t.rows(DType::f16, B, T, H, K, -r, r), p.k = t.rows(DType::f16, B, T, H, K, -r, r);
  p.g = t.rows(DType::f32, B, T, H, K, 0, 0);
  fill_gates<<<static_cast<unsigned>((B * H * K + 255) / 256), 256>>>(static_cast<float*>(p.g.data),
                                                                      T, H * K, B * H * K, 1.0f);
  p.beta = t.rows(DType::f16, B, T, H, 1, 0, 1);
  p.out = t.rows(DType::f16, B, T, H, 64, 7, 7);
  p.inverse = t.rows(DType::f16, B, T, H, 64, 7, 7);
  const double rows = double(B * T * H);
  char name[96];
  std::snprintf(name, sizeof name, "scores + inverse, one pass, B=%ld T=%ld H=%ld K=%ld", B, T, H,
                K);
  line(name, time([&] { gpu::scores::run(p, nullptr); }), rows * (K * 8 + 256 + 2), anchor);

  // The same as three operations.
  Problem scores = p;
  scores.op = DELTIC_SCORES, scores.inverse = {};
  Problem kkt = scores, inv = scores;
  kkt.op = DELTIC_KKT, kkt.out = t.rows(DType::f32, B, T, H, 64, 7, 7);
  inv.op = DELTIC_INVERSE, inv.a = kkt.out, inv.out = t.rows(DType::f16, B, T, H, 64, 7, 7);
  scores.out = t.rows(DType::f16, B, T, H, 64, 7, 7);
  line("  as scores, kkt, inverse", time([&] {
         gpu::scores::run(scores, nullptr);
         gpu::scores::run(kkt, nullptr);
         gpu::inverse::run(inv, nullptr);
       }),
       rows * (K * 8 + 128 + K * 6 + 256 + 256 + 128), anchor);
  check(cudaDeviceSynchronize());
  const int64_t n = 1 << 22;
  std::printf("  differences: scores %.1e, inverse %.1e\n",
              difference(p.out.data, scores.out.data, n),
              difference(p.inverse.data, inv.out.data, n));
}

void blocks(int64_t H, int W) {
  Tensors t;
  Problem p;
  p.op = DELTIC_INVERSE, p.B = p.N = 8, p.T = 4096, p.H = p.HV = H, p.K = 1, p.chunk = W;
  const double rows = double(p.B * p.T * H);
  char name[96];
  for (const DType type : {DType::f32, DType::bf16}) {
    p.a = t.rows(type, p.B, p.T, H, W, -0.1f, 0.1f), p.out = t.rows(type, p.B, p.T, H, W, 7, 7);
    std::snprintf(name, sizeof name, "inverse %s H=%ld W=%d", name_of(type), H, W);
    line(name, time([&] { gpu::inverse::run(p, nullptr); }),
         rows * W * 2 * static_cast<double>(size_of(type)));
  }
  p.op = DELTIC_KKT, p.K = 128, p.beta_kind = BetaKind::head;
  p.k = t.rows(DType::bf16, p.B, p.T, H, 128, -0.1f, 0.1f);
  p.beta = t.rows(DType::f32, p.B, p.T, H, 1, 0, 1);
  p.out = t.rows(DType::bf16, p.B, p.T, H, W, 7, 7);
  std::snprintf(name, sizeof name, "kkt bf16 K=128 H=%ld W=%d", H, W);
  line(name, time([&] { gpu::scores::run(p, nullptr); }), rows * (256 + 2 * W + 4));
}

void recurrence(deltic_op op, int64_t B, int64_t T, Gate gate, bool v_first, DType state) {
  Tensors t;
  Problem p;
  p.op = op, p.B = p.N = B, p.T = T, p.H = 16, p.HV = 32, p.K = p.V = 128;
  p.gate = gate, p.beta_kind = BetaKind::head, p.scale = 0.088f, p.l2norm = true;
  p.v_first = v_first;
  p.q = t.rows(DType::bf16, B, T, 16, 128, -1, 1), p.k = t.rows(DType::bf16, B, T, 16, 128, -1, 1);
  p.v = t.rows(DType::bf16, B, T, 32, 128, -1, 1), p.o = t.rows(DType::bf16, B, T, 32, 128, 7, 7);
  p.beta = t.rows(DType::bf16, B, T, 32, 1, 0, 1);
  if (gate != Gate::none) p.g = t.rows(DType::bf16, B, T, 32, gate == Gate::head ? 1 : 128, -1, 0);
  const Rows memory = t.rows(state, B, 32, 128, 128, -1, 1);
  p.state_in =
      States{memory.data, state, true, B, 32 * 16384, 16384, v_first ? 1 : 128, v_first ? 128 : 1};
  p.state_out = p.state_in;
  char name[96];
  std::snprintf(name, sizeof name, "%s B=%ld T=%ld gate %s %s %s",
                op == DELTIC_DECODE ? "decode" : "forward", B, T,
                gate == Gate::head   ? "head"
                : gate == Gate::none ? "none"
                                     : "channel",
                v_first ? "V-first" : "K-first", name_of(state));
  line(name, time([&] { gpu::recurrence::run(p, nullptr); }),
       double(B * 32) * 16384 * 2 * static_cast<double>(size_of(state)) +
           double(B * T) * (32 * 512 + 16 * 512));
}

}  // namespace

// Without arguments everything; else one kernel, for a profiler: scores, blocks, decode, forward.
int main(int argc, char** argv) {
  if (argc > 1) {
    const std::string what = argv[1];
    if (what == "scores") scores_inverse(4, 8192, 32, 128, 2.356);
    if (what == "blocks") blocks(64, 64);
    if (what == "decode") recurrence(DELTIC_DECODE, 64, 1, Gate::head, true, DType::f32);
    if (what == "forward") recurrence(DELTIC_FORWARD, 1, 2048, Gate::head, true, DType::f32);
    return 0;
  }
  scores_inverse(4, 8192, 32, 128, 2.356);
  scores_inverse(8, 4096, 32, 128, 2.369);
  scores_inverse(16, 4096, 16, 64, 1.760);
  scores_inverse(8, 8192, 16, 64, 1.772);
  for (const int64_t H : {16, 64}) {
    for (const int W : {16, 32, 64}) blocks(H, W);
  }
  for (const int64_t B : {1, 64, 256}) {
    for (const bool v_first : {true, false}) {
      recurrence(DELTIC_DECODE, B, 1, Gate::head, v_first, DType::f32);
    }
    recurrence(DELTIC_DECODE, B, 1, Gate::channel, true, DType::f32);
    recurrence(DELTIC_DECODE, B, 1, Gate::head, true, DType::bf16);
  }
  recurrence(DELTIC_FORWARD, 1, 2048, Gate::head, true, DType::f32);
  recurrence(DELTIC_FORWARD, 1, 2048, Gate::channel, true, DType::f32);
  recurrence(DELTIC_FORWARD, 8, 2048, Gate::channel, true, DType::f32);
  check(cudaDeviceSynchronize());
  return 0;
}
