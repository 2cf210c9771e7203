// Stand-alone check and timing of the forward on Hopper through its door: `probe check | small |
// time | rows | gdn FILE | once`.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
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
  run_problem(problem_of(t, cfg, scale, lower_bound), t, stream);
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

__global__ void widen(const bf16* from, float* to, int64_t n) {
  for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < n;
       i += int64_t(gridDim.x) * blockDim.x)
    to[i] = float(from[i]);
}
bool check(const char* name, Config cfg, std::vector<int> lens, int heads, int value_heads, Fills f,
           double limit, deltic_split split = DELTIC_SPLIT_OFF, int w = 128) {
  Tensors t = make_tensors(lens, heads, value_heads, cfg, f, 42, w);
  int64_t n = int64_t(t.tokens) * value_heads * w, m = int64_t(t.seqs) * value_heads * w * w;
  float scale = 1.f / std::sqrt(float(w)), lb = -5.f;
  double *rs, *ro;
  probe::check(cudaMalloc(&rs, m * 8));
  probe::check(cudaMalloc(&ro, n * 8));
  g_split = split;
  auto run_as = [&](const Problem& p, std::vector<bf16>& o, std::vector<float>& s) {
    probe::check(cudaMemset(t.o, 0xff, n * 2));
    probe::check(cudaMemset(t.state_out, 0xff, m * 4));
    run_problem(p, t, nullptr);
    probe::check(cudaDeviceSynchronize());
    o = fetch(t.o, n), s = fetch(t.state_out, m);
  };
  const Problem plain = problem_of(t, cfg, scale, lb);
  auto run = [&](std::vector<bf16>& o, std::vector<float>& s) { run_as(plain, o, s); };
  reference<<<t.seqs * value_heads, w>>>(t, cfg, scale, lb, rs, ro);
  std::vector<bf16> o1, o2;
  std::vector<float> s1, s2;
  run(o1, s1);
  double eo = rms_error(o1, fetch(ro, n)), es = rms_error(s1, fetch(rs, m));
  run(o2, s2);
  auto equal = [&](auto& a, auto& b) {
    return std::memcmp(a.data(), b.data(), a.size() * sizeof(a[0])) == 0;
  };
  bool same = equal(o1, o2) && equal(s1, s2), alone = true, forms = true;
  // Packing: the last sequence alone, from its place in the same tensors.
  if (lens.size() > 1 && split != DELTIC_SPLIT_AUTO) {
    const int last = int(lens.size()) - 1, from = t.tokens - lens[last];
    int host[2] = {from, t.tokens};
    int* cu;
    probe::check(cudaMalloc(&cu, 8));
    probe::check(cudaMemcpy(cu, host, 8, cudaMemcpyHostToDevice));
    const int64_t skip = int64_t(last) * value_heads * w * w, at = int64_t(from) * value_heads * w;
    Problem p = plain;
    p.N = 1, p.cu.data = cu, p.cu.n0 = 2;
    if (p.state_in) p.state_in.data = static_cast<float*>(p.state_in.data) + skip;
    p.state_out.data = static_cast<float*>(p.state_out.data) + skip;
    run_as(p, o2, s2);
    alone = std::memcmp(&o2[at], &o1[at], (n - at) * 2) == 0 &&
            std::memcmp(&s2[skip], &s1[skip], (m - skip) * 4) == 0;
    probe::check(cudaFree(cu));
  }
  {  // 64-bit lengths; a pool with slots backwards; K-first final states; padding behind
    const int seqs = t.seqs;
    std::vector<int64_t> cu{0};
    for (int len : lens) cu.push_back(cu.back() + len);
    std::vector<int> slots(seqs);
    for (int i = 0; i < seqs; i++) slots[i] = seqs - 1 - i;
    int64_t* dcu;
    int* dslots;
    probe::check(cudaMalloc(&dcu, cu.size() * 8));
    probe::check(cudaMalloc(&dslots, seqs * 4));
    probe::check(cudaMemcpy(dcu, cu.data(), cu.size() * 8, cudaMemcpyHostToDevice));
    probe::check(cudaMemcpy(dslots, slots.data(), seqs * 4, cudaMemcpyHostToDevice));
    Problem p = plain;
    p.cu.data = dcu, p.cu.is64 = true;
    p.state_out.s_k = w, p.state_out.s_v = 1;
    p.is_pool = true;
    p.write_index = {dslots, true, false, seqs, 0, 1, 0};
    std::vector<int> identity(seqs);
    for (int i = 0; i < seqs; i++) identity[i] = i;
    int* dread;
    probe::check(cudaMalloc(&dread, seqs * 4));
    probe::check(cudaMemcpy(dread, identity.data(), seqs * 4, cudaMemcpyHostToDevice));
    p.read_index = {dread, true, false, seqs, 0, 1, 0};
    run_as(p, o2, s2);
    forms = equal(o1, o2);
    for (int i = 0; i < seqs; i++)
      for (int h = 0; h < value_heads; h++)
        for (int k = 0; k < w; k++)
          for (int v = 0; v < w; v++) {
            const int64_t a = (int64_t(i) * value_heads + h) * w * w + v * w + k;
            const int64_t b = (int64_t(slots[i]) * value_heads + h) * w * w + k * w + v;
            forms &= std::memcmp(&s1[a], &s2[b], 4) == 0;
          }
    // The last sequence skipped, and the tokens of the one before it padding.
    if (seqs > 2 && split != DELTIC_SPLIT_AUTO) {
      slots[seqs - 1] = identity[seqs - 1] = -1;
      probe::check(cudaMemcpy(dslots, slots.data(), seqs * 4, cudaMemcpyHostToDevice));
      probe::check(cudaMemcpy(dread, identity.data(), seqs * 4, cudaMemcpyHostToDevice));
      run_as(p, o2, s2);
      const int64_t at = cu[seqs - 1] * value_heads * w;
      forms &= std::memcmp(o1.data(), o2.data(), at * 2) == 0;
      for (int64_t i = at; i < n; i++) forms &= float(o2[i]) == 0.f;
      p = plain, p.N = seqs - 1, p.cu.n0 = seqs;
      run_as(p, o2, s2);
      forms &= std::memcmp(o1.data(), o2.data(), at * 2) == 0;
      for (int64_t i = at; i < n; i++) forms &= float(o2[i]) == 0.f;
    }
    probe::check(cudaFree(dcu));
    probe::check(cudaFree(dslots));
    probe::check(cudaFree(dread));
  }
  if (cfg.gate != Gate::none) {  // gates and beta in fp32
    const int64_t ng = cfg.gate == Gate::head ? n / w : n;
    float *g, *beta;
    probe::check(cudaMalloc(&g, ng * 4));
    probe::check(cudaMalloc(&beta, n / w * 4));
    widen<<<64, 256>>>(t.g, g, ng);
    widen<<<64, 256>>>(t.beta, beta, n / w);
    Problem p = plain;
    p.g.data = g, p.beta.data = beta, p.g.dtype = p.beta.dtype = deltic::DType::f32;
    run_as(p, o2, s2);
    forms &= equal(o1, o2) && equal(s1, s2);
    probe::check(cudaFree(g));
    probe::check(cudaFree(beta));
  }
  if (lens.size() == 2 && lens[0] == lens[1] && split == DELTIC_SPLIT_OFF) {  // a dense batch
    Problem p = plain;
    p.packed = false, p.B = 2, p.T = lens[0], p.cu = {};
    for (deltic::Rows* rows : {&p.q, &p.k, &p.v, &p.o, &p.g, &p.beta}) rows->sb = p.T * rows->st;
    run_as(p, o2, s2);
    forms &= equal(o1, o2) && equal(s1, s2);
  }
  // Every token from the middle of each sequence on replaced: the same bits before.
  int64_t row = int64_t(value_heads) * w, krow = int64_t(heads) * w;
  int start = 0;
  for (int len : lens) {
    int from = start + len / 2;
    int64_t count = start + len - from;
    if (count) {
      for (bf16* p : {t.q, t.k})
        fill<<<64, 256>>>(p + from * krow, count * krow, 977, cfg.is_raw ? kUnit : kNormal, heads,
                          w);
      fill<<<64, 256>>>(t.v + from * row, count * row, 979, kNormal, value_heads, w);
      int gw = cfg.gate == Gate::head ? 1 : w;
      fill<<<64, 256>>>(t.g + from * value_heads * gw, count * value_heads * gw, 978,
                        cfg.form == GateForm::kLogDecay ? kGateSoftplus : kNormal, value_heads, gw);
    }
    start += len;
  }
  run(o2, s2);
  bool causal = true;
  start = 0;
  for (int len : lens) {
    causal &= std::memcmp(&o1[start * row], &o2[start * row], (len / 2) * row * 2) == 0;
    start += len;
  }
  bool ok = eo < limit && es < limit && same && causal && alone && forms;
  std::printf("check %-40s o %.3f %%  state %.3f %%  again %s  alone %s  forms %s  causal %s  %s\n",
              name, eo * 100, es * 100, same ? "=" : "NO", alone ? "=" : "NO", forms ? "=" : "NO",
              causal ? "=" : "NO", ok ? "ok" : "FAIL");
  std::fflush(stdout);
  probe::check(cudaFree(rs));
  probe::check(cudaFree(ro));
  free_tensors(t);
  return ok;
}

int g_repeats = 21;
double time_case(std::vector<int> lens, int heads, int value_heads, const char* name, int g_fill,
                 Config cfg, double anchor, deltic_split split = DELTIC_SPLIT_AUTO) {
  int64_t tokens = 0;
  for (int n : lens) tokens += n;
  const double bytes = cfg.gate == Gate::channel
                           ? double(tokens) * heads * (5 * 256 + 2)
                           : double(tokens) * (heads * 512. + value_heads * 516.);
  // Sets of inputs beyond the 60 MB of L2 together.
  int sets = std::max(1, std::min(8, int(std::ceil(150e6 / bytes))));
  std::vector<Tensors> t;
  Fills f;
  f.g = g_fill;
  for (int i = 0; i < sets; i++) t.push_back(make_tensors(lens, heads, value_heads, cfg, f, 7 + i));
  g_split = split;
  const float scale = 1.f / std::sqrt(128.f);
  for (auto& x : t) launch(x, cfg, scale, -5.f, nullptr);  // sizes the workspace, too
  const int segment = deltic::gpu::forward::segment_chunks(problem_of(t[0], cfg, scale, -5.f), 132);
  const std::vector<float> ms = probe::replay_ms(8, g_repeats, 5, [&](int i, cudaStream_t stream) {
    launch(t[i % sets], cfg, scale, -5.f, stream);
  });
  const double med = ms[ms.size() / 2];
  std::printf(
      "time %zu x %6d H %3d/%3d %-8s seg %3d %.4f ms (%.4f..%.4f) %.2f TB/s  anchor %.3f: %.2fx\n",
      lens.size(), lens[0], heads, value_heads, name, segment, med, ms.front(), ms.back(),
      bytes / med * 1e-9, anchor, anchor / med);
  std::fflush(stdout);
  for (auto& x : t) free_tensors(x);
  return med;
}

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "check";
  const Config kda{}, log{Gate::channel, GateForm::kLogDecay},
      soft{Gate::channel, GateForm::kSoftplus}, gdn{Gate::head, GateForm::kLogDecay},
      gdn_soft{Gate::head, GateForm::kSoftplus}, none{Gate::none, GateForm::kLogDecay},
      gdn_raw{Gate::head, GateForm::kLogDecay, true},
      none_raw{Gate::none, GateForm::kLogDecay, true},
      kda_raw{Gate::channel, GateForm::kLogDecay, true};
  if (what == "small") {  // for the sanitizers
    bool ok = check("bounded, ragged", kda, {70, 1, 0, 130}, 2, 2, {}, 6e-3);
    ok &= check("gdn, ragged, 1/2", gdn, {70, 1, 0, 130}, 1, 2, {.g = kGateMix}, 6e-3);
    return !ok;
  }
  if (what == "check") {
    bool ok = true;
    const std::vector<int> ragged{200, 1, 63, 0, 65, 129, 8};
    ok &= check("bounded, 1 x 64", kda, {64}, 2, 2, {}, 6e-3);
    ok &= check("bounded, 1 x 64, no state", kda, {64}, 2, 2, {.state = false}, 6e-3);
    ok &= check("bounded, 1 x 1024", kda, {1024}, 2, 2, {}, 6e-3);
    ok &= check("bounded, ragged", kda, ragged, 3, 3, {}, 6e-3);
    ok &= check("bounded, 2 x 1000", kda, {1000, 1000}, 4, 4, {}, 6e-3);
    ok &= check("bounded, 2 x 1000, 40 heads", kda, {1000, 1000}, 40, 40, {}, 6e-3);
    ok &= check("softplus inside, ragged", soft, ragged, 2, 4, {}, 6e-3);
    ok &= check("slow, ragged", log, {300, 17, 512}, 4, 4, {.g = kGateSlow}, 6e-3);
    ok &= check("slow, 1 x 2048", log, {2048}, 8, 8, {.g = kGateSlow}, 6e-3);
    ok &= check("softplus, 1 x 1000", log, {1000}, 8, 8, {.g = kGateSoftplus}, 6e-3);
    ok &= check("-1e-4..-1000, ragged", log, ragged, 4, 4, {.g = kGateMix}, 6e-3);
    ok &= check("-1e-4..-1000, 1 x 1000", log, {1000}, 8, 8, {.g = kGateMix}, 6e-3);
    ok &= check("-5.4 everywhere, 1 x 500", log, {500}, 4, 4, {.g = kGateDeep}, 6e-3);
    ok &= check("per head, slow, ragged, 2/6", gdn, ragged, 2, 6, {.g = kGateSlow}, 6e-3);
    ok &= check("per head, -1e-4..-1000, 1 x 1000", gdn, {1000}, 4, 8, {.g = kGateMix}, 6e-3);
    ok &= check("per head, softplus inside, 2 x 1000", gdn_soft, {1000, 1000}, 4, 8, {}, 6e-3);
    ok &= check("no gate, ragged", none, ragged, 2, 4, {}, 6e-3);
    ok &= check("per head, norm off, ragged, 2/6", gdn_raw, ragged, 2, 6, {.g = kGateRow}, 6e-3);
    ok &= check("per head, norm off, 1 x 4096, 2/8", gdn_raw, {4096}, 2, 8, {.g = kGateRow}, 6e-3);
    ok &= check("per head, norm off, 2 x 1000, 20/40", gdn_raw, {1000, 1000}, 20, 40,
                {.g = kGateRow}, 6e-3);
    ok &= check("per channel, norm off, ragged", kda_raw, ragged, 4, 4, {.g = kGateSlow}, 6e-3);
    ok &= check("per head, -5.4 everywhere, 1 x 500", gdn, {500}, 2, 4, {.g = kGateDeep}, 6e-3);
    ok &=
        check("bounded, 1 x 4096, by length", kda, {4096}, 2, 2, {}, 6e-3, DELTIC_SPLIT_BY_LENGTH);
    ok &= check("slow, 1 x 8000, by length", log, {8000}, 4, 4, {.g = kGateSlow}, 6e-3,
                DELTIC_SPLIT_BY_LENGTH);
    ok &= check("-1e-4..-1000, ragged, by length", log, {4700, 1, 0, 65, 2300}, 2, 2,
                {.g = kGateMix}, 6e-3, DELTIC_SPLIT_BY_LENGTH);
    ok &= check("per head, slow, 1 x 8192, auto", gdn, {8192}, 2, 4, {.g = kGateSlow}, 6e-3,
                DELTIC_SPLIT_AUTO);
    ok &= check("per head, norm off, ragged, by length", gdn_raw, {4700, 1, 0, 65, 2300}, 2, 4,
                {.g = kGateRow}, 6e-3, DELTIC_SPLIT_BY_LENGTH);
    ok &= check("K = V = 64, per head, ragged", gdn, ragged, 2, 4, {.g = kGateSlow}, 6e-3,
                DELTIC_SPLIT_OFF, 64);
    ok &= check("K = V = 64, bounded, 2 x 500", kda, {500, 500}, 2, 2, {}, 6e-3, DELTIC_SPLIT_OFF,
                64);
    ok &= check("K = V = 64, softplus, by length", soft, {4100}, 2, 2, {}, 6e-3,
                DELTIC_SPLIT_BY_LENGTH, 64);
    check("correlated keys, slow, 1 x 500 (info)", log, {500}, 4, 4,
          {.g = kGateSlow, .k = kCorrelated}, 1);
    std::printf("%s\n", ok ? "ALL OK" : "SOME FAILED");
    return !ok;
  }
  if (what == "time") {
    struct Row {
      std::vector<int> lens;
      int heads;
      double anchor;
    };
    const Row rows[] = {{{8192}, 96, 1.395}, {{8192}, 64, 1.183}, {{8192}, 32, .974},
                        {{8192}, 8, .813},   {{32768}, 8, 3.174}, {{131072}, 4, 12.08}};
    for (const Row& r : rows) time_case(r.lens, r.heads, r.heads, "random", kNormal, kda, r.anchor);
    for (int i = 0; i < 4; i++)
      time_case(rows[i].lens, rows[i].heads, rows[i].heads, "slow", kGateSlow, log, rows[i].anchor);
    time_case({8192}, 96, 96, "softplus", kNormal, soft, 1.395);
    for (int tokens = 256; tokens <= 131072; tokens *= 4)  // growth
      time_case({tokens}, 16, 16, "growth", kNormal, kda, 0);
    time_case({8192}, 16, 32, "none", kGateRow, none_raw, .232);
    time_case({8192}, 16, 32, "gdn raw", kGateRow, gdn_raw, .232, DELTIC_SPLIT_OFF);
    time_case({8192}, 16, 64, "gdn raw", kGateRow, gdn_raw, .357, DELTIC_SPLIT_OFF);
    time_case({8192, 8192, 8192, 8192}, 16, 32, "gdn raw", kGateRow, gdn_raw, .401);
    time_case({8192}, 16, 32, "gdn slow", kGateSlow, gdn, .232);
    time_case({8192}, 16, 64, "gdn slow", kGateSlow, gdn, .357);
    time_case({8192, 8192, 8192, 8192}, 16, 32, "gdn slow", kGateSlow, gdn, .401);
    time_case({32768}, 2, 8, "gdn slow", kGateSlow, gdn, .236);
  }
  if (what == "rows") {  // KDA rows with FlashKDA's times
    struct Row {
      std::vector<int> lens;
      int heads;
      double anchor;
    };
    const std::vector<int> mixed{1300, 547, 2048, 963, 271, 3063};
    const Row rows[] = {{{2048}, 12, .2335},
                        {{2048}, 16, .2407},
                        {{4096}, 8, .4243},
                        {{4096}, 12, .44},
                        {std::vector<int>(4, 2048), 12, .3108},
                        {{8192}, 16, .8652},
                        {{1024}, 4, .1147},
                        {{3072}, 10, .3253},
                        {{8192}, 24, .9217},
                        {std::vector<int>(8, 2048), 16, .4412},
                        {{8192}, 96, 1.3952},
                        {{8192}, 64, 1.1833},
                        {{8192}, 32, .9738},
                        {{8192}, 8, .8127},
                        {mixed, 96, 1.3869},
                        {std::vector<int>(8, 1024), 96, 1.1893},
                        {mixed, 64, 1.0073},
                        {std::vector<int>(8, 1024), 64, .8061},
                        {{32768}, 32, 3.8084},
                        {{32768}, 8, 3.1738},
                        {{131072}, 4, 12.0845}};
    double product = 0;
    for (const Row& r : rows)
      product += std::log(r.anchor /
                          time_case(r.lens, r.heads, r.heads, "random", kNormal, kda, r.anchor));
    std::printf("geometric mean over FlashKDA, %zu rows: %.2fx\n", std::size(rows),
                std::exp(product / std::size(rows)));
  }
  if (what ==
      "gdn") {  // FILE with lines `best heads value_heads length ...`: rows of other kernels
    std::FILE* file = std::fopen(argc > 2 ? argv[2] : "gdn_rows.txt", "r");
    if (!file) return std::printf("no file of rows\n"), 1;
    g_repeats = 11;
    struct Done {
      double ratio;
      std::string line;
    };
    std::vector<Done> done;
    char line[512];
    double product = 0;
    while (std::fgets(line, sizeof line, file)) {
      double best;
      int heads, value_heads, used, at = 0, n;
      std::vector<int> lens;
      if (std::sscanf(line, "%lf %d %d%n", &best, &heads, &value_heads, &at) != 3) continue;
      while (std::sscanf(line + at, "%d%n", &n, &used) == 1) lens.push_back(n), at += used;
      const double ms = time_case(lens, heads, value_heads, "gdn", kGateRow, gdn_raw, best);
      product += std::log(best / ms);
      done.push_back({best / ms, line});
    }
    std::fclose(file);
    std::sort(done.begin(), done.end(), [](auto& a, auto& b) { return a.ratio < b.ratio; });
    for (size_t i = 0; i < done.size() && i < 40; i++)
      std::printf("%.2fx %s", done[i].ratio, done[i].line.c_str());
    std::printf("geometric mean over the best other, %zu rows: %.3fx, median %.2fx\n", done.size(),
                std::exp(product / done.size()), done[done.size() / 2].ratio);
  }
  if (what == "once") {
    const int heads = argc > 2 ? std::atoi(argv[2]) : 96;
    const Config cfg = argc > 3 ? gdn_raw : kda;
    Tensors t = make_tensors({8192}, heads, heads, cfg,
                             {.g = argc > 3 ? kGateRow : kNormal, .state = false}, 1);
    launch(t, cfg, .1f, -5.f, nullptr);
    launch(t, cfg, .1f, -5.f, nullptr);
    probe::check(cudaDeviceSynchronize());
  }
  return 0;
}
