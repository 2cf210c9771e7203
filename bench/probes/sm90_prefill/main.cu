// Stand-alone check and timing of the fused KDA prefill kernel: `probe check`, `probe time`, `probe
// once H`.
#include <cudaTypedefs.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "../probe.h"
#include "kernel.cuh"

using namespace deltic::gpu;
using bf16 = __nv_bfloat16;

struct Tensors {
  bf16 *q, *k, *v, *g, *beta, *o;
  float *a_log, *dt_bias, *state_in, *state_out;
  int* cu;
  int tokens, heads, seqs;
};

// --- inputs --------------------------------------------------------------------------------------
__device__ uint32_t hash32(uint64_t x) {
  x ^= x >> 33, x *= 0xff51afd7ed558ccdull, x ^= x >> 33, x *= 0xc4ceb9fe1a85ec53ull, x ^= x >> 33;
  return uint32_t(x);
}
__device__ float uniform(uint64_t i) { return (hash32(i) + 0.5f) * (1.f / 4294967296.f); }
__device__ float normal(uint64_t i) {
  return sqrtf(-2.f * logf(uniform(2 * i))) * cospif(2.f * uniform(2 * i + 1));
}
enum Fill { kNormal, kGateMix, kGateSlow, kGateSoftplus, kGateDeep, kCorrelated, kStateFill };
template <class X>
__global__ void fill(X* p, int64_t n, uint64_t seed, int kind, int heads) {
  for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < n;
       i += int64_t(gridDim.x) * blockDim.x) {
    uint64_t s = seed * 0x9E3779B97F4A7C15ull + i;
    float r = normal(s), u = uniform(s ^ 0x5555555555ull);
    int channel = i % 128, head = (i / 128) % heads;
    bool slow = head % 4 == 0 || channel % 4 == 0;
    float x = r;
    if (kind == kGateMix)
      x = u < .3f    ? -1e-4f
          : u < .6f  ? -5.f * uniform(s + 7)
          : u < .8f  ? -20.f * uniform(s + 9)
          : u < .95f ? -.05f
                     : -1000.f;
    if (kind == kGateSlow) x = slow ? -1e-4f : -5.f / (1.f + expf(-r));
    if (kind == kGateSoftplus) x = -(1.f + 15.f * uniform(head + 77)) * log1pf(expf(r));
    if (kind == kGateDeep) x = -5.4f;
    if (kind == kCorrelated) x = .45f * r + .9f * normal(channel + 1000 * head + 12345);
    if (kind == kStateFill) x = .3f * r;
    p[i] = X(x);
  }
}

// --- reference: the recurrence in fp64, one block per (sequence, head), a thread per value column
// ----
__global__ void reference(Tensors t, Gate gate, float scale, float lower_bound, double* state,
                          double* o) {
  __shared__ double k[128], q[128], e[128], red[2];
  int head = blockIdx.x % t.heads, seq = blockIdx.x / t.heads, d = threadIdx.x;
  double* S = state + (int64_t(blockIdx.x) * 128 + d) * 128;  // [V][K]
  for (int i = 0; i < 128; i++)
    S[i] = t.state_in ? double(t.state_in[(int64_t(blockIdx.x) * 128 + d) * 128 + i]) : 0.;
  for (int n = t.cu[seq]; n < t.cu[seq + 1]; n++) {
    int64_t at = (int64_t(n) * t.heads + head) * 128 + d;
    __syncthreads();
    k[d] = double(float(t.k[at])), q[d] = double(float(t.q[at]));
    double g = double(float(t.g[at]));
    if (gate == Gate::kBounded)
      g = lower_bound /
          (1. + exp(-exp(double(t.a_log[head])) * (g + double(t.dt_bias[head * 128 + d]))));
    e[d] = exp(g);
    __syncthreads();
    if (d < 2) {
      double s = 1e-6;
      for (int i = 0; i < 128; i++) s += d ? q[i] * q[i] : k[i] * k[i];
      red[d] = 1. / sqrt(s);
    }
    __syncthreads();
    double beta = 1. / (1. + exp(-double(float(t.beta[int64_t(n) * t.heads + head]))));
    double dot = 0;
    for (int i = 0; i < 128; i++) S[i] *= e[i], dot += S[i] * k[i] * red[0];
    double u = beta * (double(float(t.v[at])) - dot), out = 0;
    for (int i = 0; i < 128; i++) S[i] += k[i] * red[0] * u, out += S[i] * q[i] * red[1];
    o[at] = out * scale;
  }
}

// --- launch --------------------------------------------------------------------------------------
CUtensorMap make_map(bf16* p, int tokens, int heads) {
  static PFN_cuTensorMapEncodeTiled_v12000 encode = [] {
    void* f = nullptr;
    cudaDriverEntryPointQueryResult r;
    probe::check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &f, 12000,
                                                  cudaEnableDefault, &r));
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(f);
  }();
  CUtensorMap m;
  cuuint64_t dims[3] = {128, cuuint64_t(heads), cuuint64_t(tokens)};
  cuuint64_t strides[2] = {256, cuuint64_t(heads) * 256};
  cuuint32_t box[3] = {64, 1, 64}, ones[3] = {1, 1, 1};
  CUresult r = encode(&m, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, p, dims, strides, box, ones,
                      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (r != CUDA_SUCCESS) std::printf("tensor map: error %d\n", int(r)), std::exit(1);
  return m;
}

long long* g_trace = nullptr;

void launch(const Tensors& t, Gate gate, float scale, float lower_bound, cudaStream_t stream) {
  auto kernel = gate == Gate::kBounded ? kda_prefill<Gate::kBounded> : kda_prefill<Gate::kLogDecay>;
  probe::check(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Smem)));
  Params p{t.cu,        t.beta,  t.a_log, t.dt_bias,   t.o,    t.state_in,
           t.state_out, t.heads, scale,   lower_bound, g_trace};
  auto map = [&](bf16* x) { return make_map(x, t.tokens, t.heads); };
  kernel<<<t.seqs * t.heads, kThreads, sizeof(Smem), stream>>>(map(t.q), map(t.k), map(t.v),
                                                               map(t.g), map(t.o), p);
  probe::check(cudaGetLastError());
}

struct Fills {
  int g = kNormal, k = kNormal;
  bool state = true;
};
Tensors make_tensors(std::vector<int> lens, int heads, Fills f, uint64_t seed) {
  Tensors t{};
  std::vector<int> cu{0};
  for (int n : lens) cu.push_back(cu.back() + n);
  t.tokens = cu.back(), t.heads = heads, t.seqs = int(lens.size());
  int64_t n = int64_t(t.tokens) * heads * 128, m = int64_t(t.seqs) * heads * 128 * 128;
  auto gen = [&](bf16*& p, int64_t count, int kind, int s) {
    probe::check(cudaMalloc(&p, count * 2));
    fill<<<1024, 256>>>(p, count, seed * 100 + s, kind, heads);
  };
  gen(t.q, n, kNormal, 1), gen(t.k, n, f.k, 2), gen(t.v, n, kNormal, 3), gen(t.g, n, f.g, 4);
  gen(t.beta, n / 128, kNormal, 5), gen(t.o, n, kNormal, 6);
  auto genf = [&](float*& p, int64_t count, int kind, int s) {
    probe::check(cudaMalloc(&p, count * 4));
    fill<<<1024, 256>>>(p, count, seed * 100 + s, kind, heads);
  };
  genf(t.a_log, heads, kStateFill, 7), genf(t.dt_bias, heads * 128, kStateFill, 8);
  if (f.state) genf(t.state_in, m, kStateFill, 9);
  genf(t.state_out, m, kNormal, 10);
  probe::check(cudaMalloc(&t.cu, cu.size() * 4));
  probe::check(cudaMemcpy(t.cu, cu.data(), cu.size() * 4, cudaMemcpyHostToDevice));
  probe::check(cudaDeviceSynchronize());
  return t;
}
void free_tensors(Tensors& t) {
  for (void* p :
       {(void*)t.q, (void*)t.k, (void*)t.v, (void*)t.g, (void*)t.beta, (void*)t.o, (void*)t.a_log,
        (void*)t.dt_bias, (void*)t.state_in, (void*)t.state_out, (void*)t.cu})
    probe::check(cudaFree(p));
}
template <class X>
std::vector<X> fetch(const X* p, int64_t n) {
  std::vector<X> h(n);
  probe::check(cudaMemcpy(h.data(), p, n * sizeof(X), cudaMemcpyDeviceToHost));
  return h;
}
template <class X>
double rms_error(const std::vector<X>& x, const std::vector<double>& ref) {
  double a = 0, b = 0;
  for (size_t i = 0; i < x.size(); i++) {
    double d = double(float(x[i])) - ref[i];
    a += d * d, b += ref[i] * ref[i];
  }
  return std::isfinite(a) ? std::sqrt(a / b) : INFINITY;
}

bool check(const char* name, Gate gate, std::vector<int> lens, int heads, Fills f, double limit) {
  Tensors t = make_tensors(lens, heads, f, 42);
  int64_t n = int64_t(t.tokens) * heads * 128, m = int64_t(t.seqs) * heads * 128 * 128;
  float scale = 1.f / std::sqrt(128.f), lb = -5.f;
  double *rs, *ro;
  probe::check(cudaMalloc(&rs, m * 8));
  probe::check(cudaMalloc(&ro, n * 8));
  probe::check(cudaMemset(t.o, 0xff, n * 2));
  probe::check(cudaMemset(t.state_out, 0xff, m * 4));
  reference<<<t.seqs * heads, 128>>>(t, gate, scale, lb, rs, ro);
  launch(t, gate, scale, lb, nullptr);
  probe::check(cudaDeviceSynchronize());
  auto o1 = fetch(t.o, n);
  auto s1 = fetch(t.state_out, m);
  double eo = rms_error(o1, fetch(ro, n)), es = rms_error(s1, fetch(rs, m));
  // Same bits again, and after every token from the middle of each sequence on has been replaced,
  // the same bits before.
  launch(t, gate, scale, lb, nullptr);
  probe::check(cudaDeviceSynchronize());
  auto o2 = fetch(t.o, n);
  bool same = std::memcmp(o1.data(), o2.data(), n * 2) == 0;
  int64_t row = int64_t(heads) * 128;
  int start = 0;
  for (int len : lens) {
    int from = start + len / 2;
    int64_t count = (start + len - from) * row;
    for (bf16* p : {t.q, t.k, t.v})
      if (count) fill<<<64, 256>>>(p + from * row, count, 977, kNormal, heads);
    if (count)
      fill<<<64, 256>>>(t.g + from * row, count, 978,
                        gate == Gate::kBounded ? kNormal : kGateSoftplus, heads);
    start += len;
  }
  launch(t, gate, scale, lb, nullptr);
  probe::check(cudaDeviceSynchronize());
  auto o3 = fetch(t.o, n);
  bool causal = true;
  start = 0;
  for (int len : lens) {
    causal &= std::memcmp(&o1[start * row], &o3[start * row], (len / 2) * row * 2) == 0;
    start += len;
  }
  bool ok = eo < limit && es < limit && same && causal;
  std::printf("check %-34s o %.3f %%  state %.3f %%  same bits %s  causal %s  %s\n", name, eo * 100,
              es * 100, same ? "yes" : "NO", causal ? "yes" : "NO", ok ? "ok" : "FAIL");
  probe::check(cudaFree(rs));
  probe::check(cudaFree(ro));
  free_tensors(t);
  return ok;
}

void time_case(int heads, int tokens, const char* name, int g_fill, Gate gate, double anchor,
               double goal) {
  int sets = heads >= 64 ? 1 : heads >= 32 ? 2 : 4;  // one set beyond the 60 MB of L2, or several
  std::vector<Tensors> t;
  Fills f;
  f.g = g_fill, f.state = false;
  for (int i = 0; i < sets; i++) t.push_back(make_tensors({tokens}, heads, f, 7 + i));
  const std::vector<float> ms = probe::replay_ms(8, 25, 8, [&](int i, cudaStream_t stream) {
    launch(t[i % sets], gate, 1.f / std::sqrt(128.f), -5.f, stream);
  });
  double med = ms[ms.size() / 2], chunks = (tokens + 63) / 64;
  double bytes = double(tokens) * heads * (5 * 256 + 2), flops = chunks * heads * 12e6;
  std::printf(
      "time T %6d H %3d %-9s %.4f ms (%.4f..%.4f)  %.3f us/chunk  %.2f TB/s  %.0f TFLOP/s  "
      "FlashKDA %.3f: %.2fx  goal %.2f\n",
      tokens, heads, name, med, ms.front(), ms.back(), med * 1e3 / chunks, bytes / med * 1e-9,
      flops / med * 1e-9, anchor, anchor / med, goal);
  for (auto& x : t) free_tensors(x);
}

int main(int argc, char** argv) {
  std::string what = argc > 1 ? argv[1] : "check";
  if (what == "check") {
    bool ok = true;
    auto B = Gate::kBounded, L = Gate::kLogDecay;
    ok &= check("bounded, 1 x 64", B, {64}, 2, {}, 6e-3);
    ok &= check("bounded, 1 x 64, no state", B, {64}, 2, {.state = false}, 6e-3);
    ok &= check("bounded, ragged", B, {200, 1, 63, 0, 65, 129, 8}, 3, {}, 6e-3);
    ok &= check("bounded, 2 x 1000", B, {1000, 1000}, 4, {}, 6e-3);
    ok &= check("slow, ragged", L, {300, 17, 512}, 4, {.g = kGateSlow}, 6e-3);
    ok &= check("slow, 1 x 2048", L, {2048}, 8, {.g = kGateSlow}, 6e-3);
    ok &= check("softplus, 1 x 1000", L, {1000}, 8, {.g = kGateSoftplus}, 6e-3);
    ok &= check("-1e-4..-1000, ragged", L, {200, 1, 63, 0, 65, 129, 8}, 4, {.g = kGateMix}, 6e-3);
    ok &= check("-1e-4..-1000, 1 x 1000", L, {1000}, 8, {.g = kGateMix}, 6e-3);
    ok &= check("-5.4 everywhere, 1 x 500", L, {500}, 4, {.g = kGateDeep}, 6e-3);
    check("correlated keys, slow, 1 x 500 (info)", L, {500}, 4, {.g = kGateSlow, .k = kCorrelated},
          1);
    std::printf("%s\n", ok ? "ALL OK" : "SOME FAILED");
    return !ok;
  }
  if (what == "time") {
    double anchor[] = {1.395, 1.183, .974, .813}, goal[] = {.36, .30, .20, .09};
    int heads[] = {96, 64, 32, 8};
    for (int i = 0; i < 4; i++)
      time_case(heads[i], 8192, "random", kNormal, Gate::kBounded, anchor[i], goal[i]);
    for (int i = 0; i < 4; i++)
      time_case(heads[i], 8192, "slow", kGateSlow, Gate::kLogDecay, anchor[i], goal[i]);
    time_case(132, 8192, "random", kNormal, Gate::kBounded, 0, 0);
  }
  if (what == "trace") {  // clock reads of block 0, a few chunks in the middle
    const int chunks = 32;
    Tensors t =
        make_tensors({64 * chunks}, argc > 2 ? std::atoi(argv[2]) : 96, {.state = false}, 1);
    probe::check(cudaMalloc(&g_trace, chunks * 256 * 8));
    probe::check(cudaMemset(g_trace, 0, chunks * 256 * 8));
    launch(t, Gate::kBounded, .1f, -5.f, nullptr);
    launch(t, Gate::kBounded, .1f, -5.f, nullptr);
    probe::check(cudaDeviceSynchronize());
    auto h = fetch(g_trace, chunks * 256);
    long long zero = h[(16 * 16) * 16];
    for (int c = 16; c < 19; c++)
      for (int w = 0; w < 16; w++) {
        std::printf("chunk %d %s %2d:", c, w < 8 ? "slab " : "carry", w);
        for (int i = 0; i < (w < 8 ? 8 : 11); i++)
          std::printf(" %6lld", h[(c * 16 + w) * 16 + i] - zero);
        std::printf("\n");
      }
  }
  if (what == "once") {
    Tensors t = make_tensors({2048}, argc > 2 ? std::atoi(argv[2]) : 96, {.state = false}, 1);
    launch(t, Gate::kBounded, .1f, -5.f, nullptr);
    probe::check(cudaDeviceSynchronize());
  }
  return 0;
}
