// Stand-alone check and timing of the forward probe: `probe check | small | time | rows | segments
// | once`.
#include <cudaTypedefs.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "kernel.cuh"
#include "segments.cuh"

using namespace deltic::gpu;
using bf16 = __nv_bfloat16;

#define CHECK(x)                                                                      \
  do {                                                                                \
    cudaError_t e_ = (x);                                                             \
    if (e_ != cudaSuccess) {                                                          \
      std::printf("%s:%d: %s: %s\n", __FILE__, __LINE__, #x, cudaGetErrorString(e_)); \
      std::exit(1);                                                                   \
    }                                                                                 \
  } while (0)

struct Config {
  Gate gate = Gate::kChannel;
  GateForm form = GateForm::kBounded;
  bool has_gate = true;
  bool is_raw = false;  // keys and queries of length one, beta in (0, 1): norm and sigmoid off
};
struct Tensors {
  bf16 *q, *k, *v, *g, *beta, *o;
  float *a_log, *dt_bias, *state_in, *state_out;
  int* cu;
  int tokens, heads, value_heads, seqs;
  std::vector<int> lens;
  void* workspace;
};
// A call in segments of so many chunks.
struct Split {
  int segments = 0, transfers = 0;
  int *cu = nullptr, *first = nullptr;
  float *transfer = nullptr, *state_in = nullptr, *state_out = nullptr;
  std::vector<int> last;  // segment of each sequence that ends it
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
enum Fill { kNormal, kUnit, kUniform, kGateRow, kGateMix, kGateSlow, kGateSoftplus, kGateDeep, kCorrelated, kStateFill };
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
  double* S = state + (int64_t(blockIdx.x) * 128 + d) * 128;  // [V][K]
  for (int i = 0; i < 128; i++)
    S[i] = t.state_in ? double(t.state_in[(int64_t(blockIdx.x) * 128 + d) * 128 + i]) : 0.;
  for (int n = t.cu[seq]; n < t.cu[seq + 1]; n++) {
    int64_t at = (int64_t(n) * t.value_heads + head) * 128 + d;
    int64_t qk = (int64_t(n) * t.heads + qk_head) * 128 + d;
    __syncthreads();
    k[d] = double(float(t.k[qk])), q[d] = double(float(t.q[qk]));
    double g = 0;
    if (cfg.has_gate) {
      bool per_head = cfg.gate == Gate::kHead;
      g = double(float(t.g[per_head ? at / 128 : at]));
      double bias = double(t.dt_bias[per_head ? head : head * 128 + d]);
      double a = exp(double(t.a_log[head]));
      if (cfg.form == GateForm::kBounded) g = lower_bound / (1. + exp(-a * (g + bias)));
      if (cfg.form == GateForm::kSoftplus) g = -a * log1p(exp(g + bias));
    }
    e[d] = exp(g);
    __syncthreads();
    if (d < 2) {
      double s = 1e-6;
      for (int i = 0; i < 128; i++) s += d ? q[i] * q[i] : k[i] * k[i];
      red[d] = cfg.is_raw ? 1. : 1. / sqrt(s);
    }
    __syncthreads();
    double beta = double(float(t.beta[int64_t(n) * t.value_heads + head]));
    if (!cfg.is_raw) beta = 1. / (1. + exp(-beta));
    double dot = 0;
    for (int i = 0; i < 128; i++) S[i] *= e[i], dot += S[i] * k[i] * red[0];
    double u = beta * (double(float(t.v[at])) - dot), out = 0;
    for (int i = 0; i < 128; i++) S[i] += k[i] * red[0] * u, out += S[i] * q[i] * red[1];
    o[at] = out * scale;
  }
}

// --- launch --------------------------------------------------------------------------------------
CUtensorMap make_map(const bf16* p, int tokens, int heads) {
  static PFN_cuTensorMapEncodeTiled_v12000 encode = [] {
    void* f = nullptr;
    cudaDriverEntryPointQueryResult r;
    CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &f, 12000, cudaEnableDefault,
                                           &r));
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(f);
  }();
  CUtensorMap m;
  cuuint64_t dims[3] = {128, cuuint64_t(heads), cuuint64_t(tokens)};
  cuuint64_t strides[2] = {256, cuuint64_t(heads) * 256};
  cuuint32_t box[3] = {64, 1, 64}, ones[3] = {1, 1, 1};
  CUresult r = encode(&m, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, const_cast<bf16*>(p), dims, strides,
                      box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (r != CUDA_SUCCESS) std::printf("tensor map: error %d\n", int(r)), std::exit(1);
  return m;
}

int g_ctas = 132, g_ring = 8;
float g_carry_us = 0, g_prepare_us = 0;  // other costs for the policy, for experiments

int64_t align(int64_t n) { return (n + 1023) / 1024 * 1024; }
struct Workspace {
  int64_t flags, prefix, handoff, ring, bytes;
};
Workspace workspace_of(int seqs) {
  Workspace w;
  w.flags = 1024;
  w.prefix = w.flags + align(flag_words(g_ctas) * 4);
  w.handoff = w.prefix + align((seqs + 1) * 4);
  w.ring = w.handoff + int64_t(g_ctas) * kWidth * kWidth * 4;
  w.bytes = w.ring + int64_t(g_ctas) * g_ring * sizeof(Packet<Gate::kChannel>);
  return w;
}

template <class... Args>
void launch_after(void (*kernel)(Args...), dim3 grid, int threads, int smem, cudaStream_t stream,
                  Args... args) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid, config.blockDim = threads, config.dynamicSmemBytes = smem;
  config.stream = stream, config.attrs = &attribute, config.numAttrs = 1;
  CHECK(cudaLaunchKernelEx(&config, kernel, args...));
}
template <Gate kGate, GateForm kForm, bool kTransfer>
void launch_kernel(const Tensors& t, Params p, cudaStream_t stream) {
  auto kernel = delta_forward<kGate, kForm, kTransfer>;
  CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmemBytes));
  auto map = [&](bf16* x, int heads) { return make_map(x, t.tokens, heads); };
  Costs costs = costs_of(kGate);
  if (g_carry_us > 0) costs = {g_carry_us, g_prepare_us};
  launch_after(make_plan<512>, 1, 512, 0, stream, p, costs, g_ctas);
  launch_after(kernel, g_ctas, kThreads, kSmemBytes, stream, map(t.q, t.heads), map(t.k, t.heads),
               map(t.v, t.value_heads), map(kGate == Gate::kChannel ? t.g : t.v, t.value_heads),
               map(t.o, t.value_heads), p);
}
Params params_of(const Tensors& t, float scale, float lower_bound, int seqs) {
  const Workspace w = workspace_of(seqs);
  auto* base = static_cast<uint8_t*>(t.workspace);
  Params p{};
  p.cu_seqlens = t.cu, p.beta = t.beta, p.a_log = t.a_log, p.dt_bias = t.dt_bias, p.o = t.o;
  p.g_head = t.g;
  p.state_in = t.state_in, p.state_out = t.state_out, p.scale = scale;
  p.lower_bound = lower_bound;
  p.num_seqs = seqs, p.num_heads = t.heads, p.num_value_heads = t.value_heads;
  p.ring_slots = g_ring;
  p.plan = reinterpret_cast<Plan*>(base);
  p.flags = reinterpret_cast<uint32_t*>(base + w.flags);
  p.chunk_prefix = reinterpret_cast<int*>(base + w.prefix);
  p.handoff = reinterpret_cast<float*>(base + w.handoff);
  p.ring = base + w.ring;
  return p;
}
template <bool kTransfer>
void launch_form(const Tensors& t, Config cfg, const Params& p, cudaStream_t stream) {
  if (cfg.gate == Gate::kHead)
    launch_kernel<Gate::kHead, GateForm::kLogDecay, kTransfer>(t, p, stream);
  else if (cfg.form == GateForm::kLogDecay)
    launch_kernel<Gate::kChannel, GateForm::kLogDecay, kTransfer>(t, p, stream);
  else if (cfg.form == GateForm::kSoftplus)
    launch_kernel<Gate::kChannel, GateForm::kSoftplus, kTransfer>(t, p, stream);
  else
    launch_kernel<Gate::kChannel, GateForm::kBounded, kTransfer>(t, p, stream);
}
void launch_gate(const Tensors& t, Config cfg, Params p, cudaStream_t stream) {
  p.has_gate = cfg.has_gate, p.has_norm = p.has_sigmoid = !cfg.is_raw, p.form = cfg.form;
  if (cfg.form == GateForm::kLogDecay) p.a_log = p.dt_bias = nullptr;
  if (p.is_transfer)
    launch_form<true>(t, cfg, p, stream);
  else
    launch_form<false>(t, cfg, p, stream);
}
void launch(const Tensors& t, Config cfg, float scale, float lower_bound, cudaStream_t stream,
            const Split* split = nullptr) {
  if (!split || !split->segments) {
    launch_gate(t, cfg, params_of(t, scale, lower_bound, t.seqs), stream);
    return;
  }
  const int64_t state = int64_t(t.value_heads) * kWidth * kWidth;
  Params p = params_of(t, scale, lower_bound, split->transfers);
  p.cu_seqlens = split->cu, p.is_transfer = true, p.state_out = split->transfer;
  launch_gate(t, cfg, p, stream);
  CHECK(cudaFuncSetAttribute(merge_segments, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             sizeof(MergeSmem)));
  const MergeParams m{split->transfer, split->first,  t.state_in,
                      split->state_in, t.value_heads, split->transfers};
  launch_after(merge_segments, dim3(kWidth / kMergeRows, t.value_heads, t.seqs), kWidth,
               int(sizeof(MergeSmem)), stream, m);
  p = params_of(t, scale, lower_bound, split->segments);
  p.cu_seqlens = split->cu, p.state_in = split->state_in, p.state_out = split->state_out;
  launch_gate(t, cfg, p, stream);
  for (int i = 0; i < t.seqs; i++)
    CHECK(cudaMemcpyAsync(t.state_out + i * state, split->state_out + split->last[i] * state,
                          state * 4, cudaMemcpyDeviceToDevice, stream));
}
Split make_split(const Tensors& t, int chunks) {
  Split s;
  if (chunks == 0) return s;
  std::vector<int> cu{0}, first;
  int start = 0;
  for (int len : t.lens) {
    first.push_back(int(cu.size()) - 1);
    for (int at = 0; at == 0 || at < len; at += chunks * kChunk)
      cu.push_back(start + std::min(len, at + chunks * kChunk));
    start += len;
    s.last.push_back(int(cu.size()) - 2);
  }
  first.push_back(int(cu.size()) - 1);
  s.segments = int(cu.size()) - 1;
  s.transfers = t.seqs == 1 ? s.segments - 1 : s.segments;  // the last segment needs none
  const int64_t state = int64_t(t.value_heads) * kWidth * kWidth * 4;
  CHECK(cudaMalloc(&s.cu, cu.size() * 4));
  CHECK(cudaMalloc(&s.first, first.size() * 4));
  CHECK(cudaMemcpy(s.cu, cu.data(), cu.size() * 4, cudaMemcpyHostToDevice));
  CHECK(cudaMemcpy(s.first, first.data(), first.size() * 4, cudaMemcpyHostToDevice));
  CHECK(cudaMalloc(&s.transfer, 2 * s.segments * state));
  CHECK(cudaMalloc(&s.state_in, s.segments * state));
  CHECK(cudaMalloc(&s.state_out, s.segments * state));
  return s;
}
void free_split(Split& s) {
  for (void* p :
       {(void*)s.cu, (void*)s.first, (void*)s.transfer, (void*)s.state_in, (void*)s.state_out})
    CHECK(cudaFree(p));
}

struct Fills {
  int g = kNormal, k = kNormal;
  bool state = true;
};
Tensors make_tensors(std::vector<int> lens, int heads, int value_heads, Config cfg, Fills f,
                     uint64_t seed) {
  Tensors t{};
  std::vector<int> cu{0};
  for (int n : lens) cu.push_back(cu.back() + n);
  t.lens = lens;
  t.tokens = cu.back(), t.heads = heads, t.value_heads = value_heads, t.seqs = int(lens.size());
  int64_t nk = int64_t(t.tokens) * heads * 128, n = int64_t(t.tokens) * value_heads * 128;
  int64_t m = int64_t(t.seqs) * value_heads * 128 * 128;
  auto gen = [&](bf16*& p, int64_t count, int kind, int s, int h, int width) {
    CHECK(cudaMalloc(&p, count * 2));
    fill<<<1024, 256>>>(p, count, seed * 100 + s, kind, h, width);
  };
  gen(t.q, nk, kNormal, 1, heads, 128);
  gen(t.k, nk, cfg.is_raw ? kUnit : f.k, 2, heads, 128);
  gen(t.v, n, kNormal, 3, value_heads, 128);
  if (cfg.gate == Gate::kHead)
    gen(t.g, n / 128, f.g, 4, value_heads, 1);
  else
    gen(t.g, n, f.g, 4, value_heads, 128);
  gen(t.beta, n / 128, cfg.is_raw ? kUniform : kNormal, 5, value_heads, 1), gen(t.o, n, kNormal, 6, value_heads, 128);
  auto genf = [&](float*& p, int64_t count, int kind, int s) {
    CHECK(cudaMalloc(&p, count * 4));
    fill<<<1024, 256>>>(p, count, seed * 100 + s, kind, value_heads, 128);
  };
  genf(t.a_log, value_heads, kStateFill, 7), genf(t.dt_bias, value_heads * 128, kStateFill, 8);
  if (f.state) genf(t.state_in, m, kStateFill, 9);
  genf(t.state_out, m, kNormal, 10);
  CHECK(cudaMalloc(&t.cu, cu.size() * 4));
  CHECK(cudaMemcpy(t.cu, cu.data(), cu.size() * 4, cudaMemcpyHostToDevice));
  CHECK(cudaMalloc(&t.workspace, workspace_of(t.seqs + t.tokens / 64 + 1).bytes));
  CHECK(cudaDeviceSynchronize());
  return t;
}
void free_tensors(Tensors& t) {
  for (void* p :
       {(void*)t.q, (void*)t.k, (void*)t.v, (void*)t.g, (void*)t.beta, (void*)t.o, (void*)t.a_log,
        (void*)t.dt_bias, (void*)t.state_in, (void*)t.state_out, (void*)t.cu, t.workspace})
    CHECK(cudaFree(p));
}
template <class X>
std::vector<X> fetch(const X* p, int64_t n) {
  std::vector<X> h(n);
  CHECK(cudaMemcpy(h.data(), p, n * sizeof(X), cudaMemcpyDeviceToHost));
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

bool check(const char* name, Config cfg, std::vector<int> lens, int heads, int value_heads, Fills f,
           double limit, int segment = 0) {
  Tensors t = make_tensors(lens, heads, value_heads, cfg, f, 42);
  Split split = make_split(t, segment);
  int64_t n = int64_t(t.tokens) * value_heads * 128, m = int64_t(t.seqs) * value_heads * 128 * 128;
  float scale = 1.f / std::sqrt(128.f), lb = -5.f;
  double *rs, *ro;
  CHECK(cudaMalloc(&rs, m * 8));
  CHECK(cudaMalloc(&ro, n * 8));
  auto run = [&](std::vector<bf16>& o, std::vector<float>& s) {
    CHECK(cudaMemset(t.o, 0xff, n * 2));
    CHECK(cudaMemset(t.state_out, 0xff, m * 4));
    launch(t, cfg, scale, lb, nullptr, &split);
    CHECK(cudaDeviceSynchronize());
    o = fetch(t.o, n), s = fetch(t.state_out, m);
  };
  reference<<<t.seqs * value_heads, 128>>>(t, cfg, scale, lb, rs, ro);
  std::vector<bf16> o1, o2, o3;
  std::vector<float> s1, s2, s3;
  run(o1, s1);
  double eo = rms_error(o1, fetch(ro, n)), es = rms_error(s1, fetch(rs, m));
  run(o2, s2);
  // Other roles: the bits must not depend on who prepares and who carries what.
  const float c = g_carry_us, pr = g_prepare_us;
  const int ctas = g_ctas, ring = g_ring;
  g_carry_us = 1.f, g_prepare_us = 9.f, g_ring = 4, g_ctas = 29;
  run(o3, s3);
  g_carry_us = c, g_prepare_us = pr, g_ring = ring, g_ctas = ctas;
  auto equal = [&](auto& a, auto& b) {
    return std::memcmp(a.data(), b.data(), a.size() * sizeof(a[0])) == 0;
  };
  bool same = equal(o1, o2) && equal(s1, s2), roles = equal(o1, o3) && equal(s1, s3);
  // Packing: the last sequence alone.
  bool alone = true;
  if (lens.size() > 1 && !segment) {
    const int last = int(lens.size()) - 1, from = t.tokens - lens[last];
    int host[2] = {from, t.tokens};
    Tensors u = t;
    u.seqs = 1;
    CHECK(cudaMalloc(&u.cu, 8));
    CHECK(cudaMemcpy(u.cu, host, 8, cudaMemcpyHostToDevice));
    int64_t skip = int64_t(last) * value_heads * 128 * 128;
    if (u.state_in) u.state_in += skip;
    u.state_out += skip;
    CHECK(cudaMemset(t.o, 0xff, n * 2));
    launch(u, cfg, scale, lb, nullptr);
    CHECK(cudaDeviceSynchronize());
    auto o = fetch(t.o, n);
    auto s = fetch(t.state_out, m);
    int64_t at = int64_t(from) * value_heads * 128;
    alone = std::memcmp(&o[at], &o1[at], (n - at) * 2) == 0 &&
            std::memcmp(&s[skip], &s1[skip], (m - skip) * 4) == 0;
    CHECK(cudaFree(u.cu));
  }
  // Every token from the middle of each sequence on replaced: the same bits before.
  int64_t row = int64_t(value_heads) * 128, krow = int64_t(heads) * 128;
  int start = 0;
  for (int len : lens) {
    int from = start + len / 2;
    int64_t count = start + len - from;
    if (count) {
      for (bf16* p : {t.q, t.k})
        fill<<<64, 256>>>(p + from * krow, count * krow, 977, cfg.is_raw ? kUnit : kNormal, heads,
                          128);
      fill<<<64, 256>>>(t.v + from * row, count * row, 979, kNormal, value_heads, 128);
      int w = cfg.gate == Gate::kHead ? 1 : 128;
      fill<<<64, 256>>>(t.g + from * value_heads * w, count * value_heads * w, 978,
                        cfg.form == GateForm::kLogDecay ? kGateSoftplus : kNormal, value_heads, w);
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
  bool ok = eo < limit && es < limit && same && causal && roles && alone;
  std::printf("check %-40s o %.3f %%  state %.3f %%  again %s  roles %s  alone %s  causal %s  %s\n",
              name, eo * 100, es * 100, same ? "=" : "NO", roles ? "=" : "NO", alone ? "=" : "NO",
              causal ? "=" : "NO", ok ? "ok" : "FAIL");
  std::fflush(stdout);
  CHECK(cudaFree(rs));
  CHECK(cudaFree(ro));
  free_split(split);
  free_tensors(t);
  return ok;
}

int g_repeats = 21;
double time_case(std::vector<int> lens, int heads, int value_heads, const char* name, int g_fill,
                 Config cfg, double anchor, int segment = -1) {
  int64_t tokens = 0, chunks = 0;
  for (int n : lens) tokens += n, chunks += (n + 63) / 64;
  const double bytes = cfg.gate == Gate::kChannel
                           ? double(tokens) * heads * (5 * 256 + 2)
                           : double(tokens) * (heads * 512. + value_heads * 516.);
  // Sets of inputs beyond the 60 MB of L2 together.
  int sets = std::max(1, std::min(8, int(std::ceil(150e6 / bytes))));
  std::vector<Tensors> t;
  Fills f;
  f.g = g_fill;
  for (int i = 0; i < sets; i++) t.push_back(make_tensors(lens, heads, value_heads, cfg, f, 7 + i));
  const int longest = (*std::max_element(lens.begin(), lens.end()) + 63) / 64;
  if (segment < 0)
    segment = choose_segment(measured_costs(cfg.gate), int(chunks) * value_heads, longest, g_ctas);
  std::vector<Split> splits;
  for (auto& x : t) splits.push_back(make_split(x, segment));
  cudaStream_t stream;
  CHECK(cudaStreamCreate(&stream));
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  const int per_graph = 8;
  CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  for (int i = 0; i < per_graph; i++)
    launch(t[i % sets], cfg, 1.f / std::sqrt(128.f), -5.f, stream, &splits[i % sets]);
  CHECK(cudaStreamEndCapture(stream, &graph));
  CHECK(cudaGraphInstantiate(&exec, graph, 0));
  cudaEvent_t a, b;
  CHECK(cudaEventCreate(&a));
  CHECK(cudaEventCreate(&b));
  std::vector<float> ms;
  for (int i = 0; i < g_repeats + 5; i++) {
    CHECK(cudaEventRecord(a, stream));
    CHECK(cudaGraphLaunch(exec, stream));
    CHECK(cudaEventRecord(b, stream));
    CHECK(cudaEventSynchronize(b));
    float x;
    CHECK(cudaEventElapsedTime(&x, a, b));
    if (i >= 5) ms.push_back(x / per_graph);
  }
  std::sort(ms.begin(), ms.end());
  const double med = ms[ms.size() / 2];
  const Plan plan = fetch(static_cast<Plan*>(t[0].workspace), 1)[0];
  std::printf(
      "time %zu x %6d H %3d/%3d %-8s seg %3d %.4f ms (%.4f..%.4f) %.2f TB/s carriers %d steps %d: "
      "%.2f us/step, prepare %.2f us  anchor %.3f: %.2fx\n",
      lens.size(), lens[0], heads, value_heads, name, segment, med, ms.front(), ms.back(),
      bytes / med * 1e-9, plan.carriers, plan.steps, med * 1e3 / plan.steps,
      med * 1e3 * (g_ctas - plan.carriers) / plan.total, anchor, anchor / med);
  std::fflush(stdout);
  CHECK(cudaGraphExecDestroy(exec));
  CHECK(cudaGraphDestroy(graph));
  CHECK(cudaStreamDestroy(stream));
  for (auto& x : splits) free_split(x);
  for (auto& x : t) free_tensors(x);
  return med;
}

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "check";
  int device_sms = 0;
  CHECK(cudaDeviceGetAttribute(&device_sms, cudaDevAttrMultiProcessorCount, 0));
  g_ctas = device_sms;
  const Config kda{}, log{Gate::kChannel, GateForm::kLogDecay},
      soft{Gate::kChannel, GateForm::kSoftplus}, gdn{Gate::kHead, GateForm::kLogDecay},
      gdn_soft{Gate::kHead, GateForm::kSoftplus}, none{Gate::kHead, GateForm::kLogDecay, false},
      gdn_raw{Gate::kHead, GateForm::kLogDecay, true, true},
      kda_raw{Gate::kChannel, GateForm::kLogDecay, true, true};
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
    ok &= check("bounded, 1 x 4096, segments of 8", kda, {4096}, 2, 2, {}, 6e-3, 8);
    ok &= check("slow, 1 x 4000, segments of 5", log, {4000}, 4, 4, {.g = kGateSlow}, 6e-3, 5);
    ok &= check("-1e-4..-1000, ragged, segments of 2", log, {700, 1, 0, 65, 300}, 2, 2,
                {.g = kGateMix}, 6e-3, 2);
    ok &= check("per head, slow, 1 x 4096, segments of 8", gdn, {4096}, 2, 4, {.g = kGateSlow},
                6e-3, 8);
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
    for (int i = 2; i + 1 < argc; i += 2) {
      if (argv[i][0] == 'r') g_ring = std::atoi(argv[i + 1]);
      if (argv[i][0] == 'c') g_carry_us = std::atof(argv[i + 1]), g_prepare_us = 2.6f;
      if (argv[i][0] == 'p') g_prepare_us = std::atof(argv[i + 1]);
    }
    const Row rows[] = {{{8192}, 96, 1.395}, {{8192}, 64, 1.183}, {{8192}, 32, .974},
                        {{8192}, 8, .813},   {{32768}, 8, 3.174}, {{131072}, 4, 12.08}};
    for (const Row& r : rows) time_case(r.lens, r.heads, r.heads, "random", kNormal, kda, r.anchor);
    for (int i = 0; i < 4; i++)
      time_case(rows[i].lens, rows[i].heads, rows[i].heads, "slow", kGateSlow, log, rows[i].anchor);
    time_case({8192}, 16, 32, "none", kGateRow, {Gate::kHead, GateForm::kLogDecay, false, true},
              .232);
    time_case({8192}, 16, 32, "gdn raw", kGateRow, gdn_raw, .232, 0);
    time_case({8192}, 16, 64, "gdn raw", kGateRow, gdn_raw, .357, 0);
    time_case({8192, 8192, 8192, 8192}, 16, 32, "gdn raw", kGateRow, gdn_raw, .401);
    time_case({8192}, 16, 32, "gdn slow", kGateSlow, gdn, .232);
    time_case({8192}, 16, 64, "gdn slow", kGateSlow, gdn, .357);
    time_case({8192, 8192, 8192, 8192}, 16, 32, "gdn slow", kGateSlow, gdn, .401);
    time_case({32768}, 2, 8, "gdn slow", kGateSlow, gdn, .236);
  }
#ifdef DELTIC_TRACE
  if (what == "trace") {  // clock reads of the first carrier and the last preparer
    const int heads = argc > 2 ? std::atoi(argv[2]) : 96;
    const bool is_gdn = argc > 3;
    const Config cfg = is_gdn ? gdn_raw : kda;
    Tensors t = make_tensors({4096}, heads, heads, cfg, {.g = is_gdn ? kGateRow : kNormal}, 1);
    for (int i = 0; i < 3; i++) launch(t, cfg, .1f, -5.f, nullptr);
    CHECK(cudaDeviceSynchronize());
    std::vector<long long> h(132 * 4 * 64 * 16);
    CHECK(cudaMemcpyFromSymbol(h.data(), g_trace, h.size() * 8));
    auto line = [&](int cta, int wg, int n, int points, long long zero) {
      std::printf("cta %3d %d item %2d:", cta, wg, n);
      for (int i = 0; i < points; i++)
        std::printf(" %6lld", h[((cta * 4 + wg) * 64 + n) * 16 + i] - zero);
      std::printf("\n");
    };
    for (int n = 20; n < 24; n++)
      for (int wg : {0, 1, 2}) line(0, wg, n, wg == 2 ? 4 : 10, h[20 * 16]);
    for (int n = 2; n < 7; n++)
      for (int wg : {0, 1})
        for (int w : {0, 32}) line(131, wg, n + w, 14, h[((131 * 4) * 64 + 2) * 16]);
  }
#endif
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
  if (what == "gdn") {  // FILE with lines `best heads value_heads length ...`: rows of other kernels
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
  if (what == "segments") {
    for (int seg : {0, 8, 12, 16, 24, 32, 43, 64})
      time_case({8192}, 8, 8, "random", kNormal, kda, .813, seg);
    for (int seg : {0, 16, 32, 64, 128})
      time_case({32768}, 8, 8, "random", kNormal, kda, 3.17, seg);
    for (int seg : {64, 128, 256, 512})
      time_case({131072}, 4, 4, "random", kNormal, kda, 12.08, seg);
    for (int seg : {16, 32, 64, 128})
      time_case({32768}, 2, 8, "gdn slow", kGateSlow, gdn, .236, seg);
  }
  if (what == "once") {
    const int heads = argc > 2 ? std::atoi(argv[2]) : 96;
    const Config cfg = argc > 3 ? gdn_raw : kda;
    Tensors t = make_tensors({8192}, heads, heads, cfg,
                             {.g = argc > 3 ? kGateRow : kNormal, .state = false}, 1);
    launch(t, cfg, .1f, -5.f, nullptr);
    launch(t, cfg, .1f, -5.f, nullptr);
    CHECK(cudaDeviceSynchronize());
  }
  return 0;
}
