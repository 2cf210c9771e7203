// Inputs of the probe, the recurrence in fp64, and a call of the forward through its door.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "../probe.h"
#include "core/error.h"
#include "cuda/sm90/forward/launch.h"

using deltic::Gate;
using deltic::Problem;
using bf16 = __nv_bfloat16;
enum class GateForm { kLogDecay, kSoftplus, kBounded };  // as deltic_gate_form

struct Config {
  Gate gate = Gate::channel;
  GateForm form = GateForm::kBounded;
  bool is_raw = false;  // keys and queries of length one, beta in (0, 1): norm and sigmoid off
};
struct Tensors {
  bf16 *q, *k, *v, *g, *beta, *o;
  float *a_log, *dt_bias, *state_in, *state_out;
  int* cu;
  int tokens, heads, value_heads, seqs;
  int width = 128;  // K = V
  std::vector<int> lens;
  void* workspace = nullptr;
  size_t workspace_bytes = 0;
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
enum Fill {
  kNormal,
  kUnit,
  kUniform,
  kGateRow,
  kGateMix,
  kGateSlow,
  kGateSoftplus,
  kGateDeep,
  kCorrelated,
  kStateFill
};
// width: elements per head (128, or 1 for gates per head)
template <class X>
__global__ void fill(X* p, int64_t n, uint64_t seed, int kind, int heads, int width) {
  for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < n;
       i += int64_t(gridDim.x) * blockDim.x) {
    uint64_t s = seed * 0x9E3779B97F4A7C15ull + i;
    float r = normal(s), u = uniform(s ^ 0x5555555555ull);
    int channel = i % width, head = (i / width) % heads;
    bool slow = head % 4 == 0 || (width > 1 && channel % 4 == 0);
    float x = r;
    if (kind == kUnit) x = r * .08838835f;
    if (kind == kUniform) x = u;
    if (kind == kGateRow) x = head % 4 == 0 ? 0.f : -log1pf(expf(-r)) / 16.f;
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
__global__ void reference(Tensors t, Config cfg, float scale, float lower_bound, double* state,
                          double* o) {
  __shared__ double k[128], q[128], e[128], red[2];
  int head = blockIdx.x % t.value_heads, seq = blockIdx.x / t.value_heads, d = threadIdx.x;
  int qk_head = head / (t.value_heads / t.heads);
  const int w = blockDim.x;
  double* S = state + (int64_t(blockIdx.x) * w + d) * w;  // [V][K]
  for (int i = 0; i < w; i++)
    S[i] = t.state_in ? double(t.state_in[(int64_t(blockIdx.x) * w + d) * w + i]) : 0.;
  for (int n = t.cu[seq]; n < t.cu[seq + 1]; n++) {
    int64_t at = (int64_t(n) * t.value_heads + head) * w + d;
    int64_t qk = (int64_t(n) * t.heads + qk_head) * w + d;
    __syncthreads();
    k[d] = double(float(t.k[qk])), q[d] = double(float(t.q[qk]));
    double g = 0;
    if (cfg.gate != Gate::none) {
      bool per_head = cfg.gate == Gate::head;
      g = double(float(t.g[per_head ? at / w : at]));
      double bias = double(t.dt_bias[per_head ? head : head * w + d]);
      double a = exp(double(t.a_log[head]));
      if (cfg.form == GateForm::kBounded) g = lower_bound / (1. + exp(-a * (g + bias)));
      if (cfg.form == GateForm::kSoftplus) g = -a * log1p(exp(g + bias));
    }
    e[d] = exp(g);
    __syncthreads();
    if (d < 2) {
      double s = 1e-6;
      for (int i = 0; i < w; i++) s += d ? q[i] * q[i] : k[i] * k[i];
      red[d] = cfg.is_raw ? 1. : 1. / sqrt(s);
    }
    __syncthreads();
    double beta = double(float(t.beta[int64_t(n) * t.value_heads + head]));
    if (!cfg.is_raw) beta = 1. / (1. + exp(-beta));
    double dot = 0;
    for (int i = 0; i < w; i++) S[i] *= e[i], dot += S[i] * k[i] * red[0];
    double u = beta * (double(float(t.v[at])) - dot), out = 0;
    for (int i = 0; i < w; i++) S[i] += k[i] * red[0] * u, out += S[i] * q[i] * red[1];
    o[at] = out * scale;
  }
}

// --- launch --------------------------------------------------------------------------------------
deltic_split g_split = DELTIC_SPLIT_OFF;

deltic::Rows rows_of(void* data, deltic::DType type, int64_t heads, int64_t width) {
  return {data, type, true, 0, heads * width, width};
}
Problem problem_of(const Tensors& t, Config cfg, float scale, float lower_bound) {
  using deltic::DType;
  Problem p;
  const int w = t.width;
  p.device = DELTIC_CUDA;
  p.B = 1, p.T = t.tokens, p.N = t.seqs, p.H = t.heads, p.HV = t.value_heads, p.K = p.V = w;
  p.packed = true;
  p.gate = cfg.gate, p.gate_form = deltic_gate_form(int(cfg.form));
  p.beta_kind = deltic::BetaKind::head;
  p.beta_form = cfg.is_raw ? DELTIC_BETA_VALUE : DELTIC_BETA_SIGMOID;
  p.l2norm = !cfg.is_raw, p.v_first = true;
  p.scale = scale, p.lower_bound = lower_bound;
  p.split = g_split;
  p.q = rows_of(t.q, DType::bf16, t.heads, w), p.k = rows_of(t.k, DType::bf16, t.heads, w);
  p.v = rows_of(t.v, DType::bf16, t.value_heads, w);
  p.o = rows_of(t.o, DType::bf16, t.value_heads, w);
  p.beta = rows_of(t.beta, DType::bf16, t.value_heads, 1);
  if (cfg.gate == Gate::head) p.g = rows_of(t.g, DType::bf16, t.value_heads, 1);
  if (cfg.gate == Gate::channel) p.g = rows_of(t.g, DType::bf16, t.value_heads, w);
  if (cfg.form != GateForm::kLogDecay && cfg.gate != Gate::none) {
    p.A_log.data = t.a_log, p.A_log.present = p.A_log.contiguous = true;
    p.dt_bias.data = t.dt_bias, p.dt_bias.present = p.dt_bias.contiguous = true;
  }
  p.cu = {t.cu, true, false, t.seqs + 1, 0, 1, 0};
  auto states = [&](float* data) {
    return deltic::States{
        data, DType::f32, data != nullptr, t.seqs, int64_t(t.value_heads) * w * w, int64_t(w) * w,
        1,    w};
  };
  p.state_in = states(t.state_in), p.state_out = states(t.state_out);
  return p;
}
void run_problem(const Problem& p, Tensors& t, cudaStream_t stream) {
  if (const char* reason = deltic::gpu::forward::refuse(p))
    std::printf("refused: %s\n", reason), std::exit(1);
  const size_t bytes = deltic::gpu::forward::workspace_bytes(p);
  if (bytes > t.workspace_bytes) {
    if (t.workspace) probe::check(cudaFree(t.workspace));
    probe::check(cudaMalloc(&t.workspace, bytes));
    probe::check(cudaMemset(t.workspace, 0xab, bytes));
    t.workspace_bytes = bytes;
  }
  deltic::gpu::forward::run(p, t.workspace, stream);
}
void launch(Tensors& t, Config cfg, float scale, float lower_bound, cudaStream_t stream) {
  Problem p = problem_of(t, cfg, scale, lower_bound);
  p.stream = stream;
  run_problem(p, t, stream);
}

struct Fills {
  int g = kNormal, k = kNormal;
  bool state = true;
};
Tensors make_tensors(std::vector<int> lens, int heads, int value_heads, Config cfg, Fills f,
                     uint64_t seed, int width = 128) {
  Tensors t{};
  t.width = width;
  std::vector<int> cu{0};
  for (int n : lens) cu.push_back(cu.back() + n);
  t.lens = lens;
  t.tokens = cu.back(), t.heads = heads, t.value_heads = value_heads, t.seqs = int(lens.size());
  int64_t nk = int64_t(t.tokens) * heads * width, n = int64_t(t.tokens) * value_heads * width;
  int64_t m = int64_t(t.seqs) * value_heads * width * width;
  auto gen = [&](bf16*& p, int64_t count, int kind, int s, int h, int width) {
    probe::check(cudaMalloc(&p, count * 2));
    fill<<<1024, 256>>>(p, count, seed * 100 + s, kind, h, width);
  };
  gen(t.q, nk, kNormal, 1, heads, width);
  gen(t.k, nk, cfg.is_raw ? kUnit : f.k, 2, heads, width);
  gen(t.v, n, kNormal, 3, value_heads, width);
  if (cfg.gate == Gate::head)
    gen(t.g, n / width, f.g, 4, value_heads, 1);
  else
    gen(t.g, n, f.g, 4, value_heads, width);
  gen(t.beta, n / width, cfg.is_raw ? kUniform : kNormal, 5, value_heads, 1),
      gen(t.o, n, kNormal, 6, value_heads, width);
  auto genf = [&](float*& p, int64_t count, int kind, int s) {
    probe::check(cudaMalloc(&p, count * 4));
    fill<<<1024, 256>>>(p, count, seed * 100 + s, kind, value_heads, width);
  };
  genf(t.a_log, value_heads, kStateFill, 7), genf(t.dt_bias, value_heads * width, kStateFill, 8);
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
        (void*)t.dt_bias, (void*)t.state_in, (void*)t.state_out, (void*)t.cu, t.workspace})
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
