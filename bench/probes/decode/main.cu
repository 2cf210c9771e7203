// On a GPU: states moved in several patterns, and the decode kernel, checked against the recurrence
// in fp64 on random inputs and against itself token by token; timed by graph replays over states
// beyond L2.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "../probe.h"
#include "cuda/sm80/decode/kernel_alone.cuh"
#include "cuda/sm80/decode/kernel_stream.cuh"
#include "cuda/tile/launch.h"
#include "move.cuh"

// What launch_after asks: the probe is for Hopper.
bool deltic::gpu::overlaps_launches() { return true; }
cudaError_t deltic::gpu::launch_kernel(const Launch& launch, const void* kernel, void** arguments) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  const cudaLaunchConfig_t config{launch.grid,   dim3(launch.threads), launch.smem,
                                  launch.stream, &attribute,           launch.is_early ? 1u : 0u};
  return cudaLaunchKernelExC(&config, kernel, arguments);
}

namespace {

using namespace deltic;
using gpu::decode::Choice;
using gpu::decode::Params;
using gpu::decode::Products;
using gpu::decode::Traits;
using probe::check;

struct Variant {
  DType state;
  bool v_first;
  Gate gate;
  std::string name;
  std::function<void(Params, cudaStream_t)> launch;
  int registers, spilled, ctas_per_sm;
  int most_tokens;
};

std::vector<Variant> variants;

// most: CTAs per SM, kept to by shared memory that nobody uses; 0: as many as fit. ahead: what the
// library's distance of hints is multiplied by.
template <class E, bool kVFirst, bool kPerChannel, Choice kChoice>
void add(const std::string& name, int most, int ahead) {
  using Tr = Traits<E, 128, kVFirst, kPerChannel, false, kChoice>;
  const auto kernel = gpu::decode::decode_kernel<Tr>;
  cudaFuncAttributes a{};
  check(cudaFuncGetAttributes(&a, kernel));
  int smem = int(sizeof(gpu::decode::Stage<Tr>));
  if (most > 0) smem = std::max(smem, 227 * 1024 / most - 1024);
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem));
  int ctas = 0;
  check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&ctas, kernel, Tr::kThreads, size_t(smem)));
  variants.push_back({sizeof(E) == 4 ? DType::f32 : DType::bf16, kVFirst,
                      kPerChannel ? Gate::channel : Gate::head, name,
                      [=](Params p, cudaStream_t stream) {
                        p.num_slices = unsigned((p.V + Tr::kSpan - 1) / Tr::kSpan);
                        p.by_slices = gpu::Divisor(p.num_slices);
                        const unsigned grid = unsigned(p.tokens.N) * p.HV * p.num_slices;
                        p.ahead = ahead * (gpu::decode::kAheadThreads / Tr::kThreads) * 132;
                        if constexpr (Tr::kStartsEarly) {
                          check(
                              gpu::launch_after(kernel, dim3(grid), Tr::kThreads, smem, stream, p));
                        } else {
                          kernel<<<grid, Tr::kThreads, size_t(smem), stream>>>(p);
                          check(cudaGetLastError());
                        }
                      },
                      a.numRegs, int(a.localSizeBytes), ctas, Tr::kSingle ? 1 : 1 << 20});
}
// CTAs that stay: as many as fit.
template <class E, bool kPerChannel, int kThreads, int kCtas>
void add_stream(const std::string& name) {
  constexpr Choice kChoice{.threads = kThreads, .ctas = kCtas, .starts_early = true, .held = true};
  using Tr = Traits<E, 128, true, kPerChannel, false, kChoice>;
  using X = __nv_bfloat16;
  const auto kernel = gpu::decode::stream_kernel<Tr, X>;
  cudaFuncAttributes a{};
  check(cudaFuncGetAttributes(&a, kernel));
  const int smem = int(sizeof(gpu::decode::StreamStage<Tr, X>));
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem));
  int ctas = 0, sms = 0;
  check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&ctas, kernel, kThreads, size_t(smem)));
  check(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
  variants.push_back({sizeof(E) == 4 ? DType::f32 : DType::bf16, true,
                      kPerChannel ? Gate::channel : Gate::head, name,
                      [=](Params p, cudaStream_t stream) {
                        p.num_slices = unsigned((p.V + Tr::kSpan - 1) / Tr::kSpan);
                        p.by_slices = gpu::Divisor(p.num_slices);
                        const unsigned parts = unsigned(p.tokens.N) * p.HV * p.num_slices;
                        const unsigned grid = std::min(parts, unsigned(ctas * sms));
                        check(gpu::launch_after(kernel, dim3(grid), kThreads, smem, stream, p));
                      },
                      a.numRegs, int(a.localSizeBytes), ctas, Tr::kStageTokens});
}
// One token by warps that work alone.
template <class E, bool kPerChannel>
void add_alone(const std::string& name) {
  using Tr = gpu::decode::TraitsOf<E, 128, true, kPerChannel, gpu::decode::Kind::alone>;
  const auto kernel = gpu::decode::alone_kernel<Tr>;
  cudaFuncAttributes a{};
  check(cudaFuncGetAttributes(&a, kernel));
  int ctas = 0;
  constexpr int kThreads = Tr::kThreads + 32;
  check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&ctas, kernel, kThreads, 0));
  variants.push_back(
      {sizeof(E) == 4 ? DType::f32 : DType::bf16, true, kPerChannel ? Gate::channel : Gate::head,
       name,
       [=](const Params& p, cudaStream_t stream) {
         const dim3 grid(unsigned((p.V + Tr::kSlice - 1) / Tr::kSlice), p.HV, unsigned(p.tokens.N));
         check(gpu::launch_after(kernel, grid, kThreads, 0, stream, gpu::decode::alone_params(p)));
       },
       a.numRegs, int(a.localSizeBytes), ctas, 1});
}
// Of both gates.
template <class E, bool kVFirst, Choice kChoice>
void add_gates(const std::string& name, int most = 0, int ahead = 1) {
  add<E, kVFirst, false, kChoice>(name, most, ahead);
  add<E, kVFirst, true, kChoice>(name, most, ahead);
}
// Not in the library: a choice with hints, K-first; and with as many threads.
constexpr Choice with_hints(Choice x) {
  x.hints = true;
  return x;
}
constexpr Choice with_threads(Choice x, int threads, int ctas) {
  x.threads = threads, x.ctas = ctas;
  return x;
}

// Of both gates.
template <class E, int kThreads, int kCtas>
void add_streams(const std::string& name) {
  add_stream<E, false, kThreads, kCtas>(name), add_stream<E, true, kThreads, kCtas>(name);
}
template <class E>
void add_alones(const std::string& name) {
  add_alone<E, false>(name), add_alone<E, true>(name);
}

void add_all() {
  using bf16 = __nv_bfloat16;
  using gpu::decode::choice_of;
  using enum gpu::decode::Kind;
  add_gates<float, true, choice_of<float, 128, true>(several)>("several");
  add_gates<float, true, choice_of<float, 128, true>(held)>("held");
  add_streams<float, 256, 2>("stream"), add_streams<float, 128, 4>("stream4");
  add_gates<float, true, choice_of<float, 128, true>(single)>("single");
  add_alones<float>("alone");
  add_gates<bf16, true, choice_of<bf16, 128, true>(several)>("several");
  add_gates<bf16, true, choice_of<bf16, 128, true>(held)>("held");
  add_gates<bf16, true, choice_of<bf16, 128, true>(pairs)>("pairs");
  add_streams<bf16, 256, 2>("stream"), add_streams<bf16, 128, 4>("stream4");
  add_gates<bf16, true, choice_of<bf16, 128, true>(single)>("single");
  add_gates<bf16, true, with_threads(choice_of<bf16, 128, true>(single), 128, 7)>("wide");
  add_alones<bf16>("alone");
  add_gates<float, false, choice_of<float, 128, false>(several)>("several");
  add_gates<float, false, choice_of<float, 128, false>(single)>("single");
  add_gates<float, false, with_hints(choice_of<float, 128, false>(single))>("hints");
  add_gates<float, false, with_hints(choice_of<float, 128, false>(single))>("hints x2", 0, 2);
  add_gates<bf16, false, choice_of<bf16, 128, false>(several)>("several");
  add_gates<bf16, false, choice_of<bf16, 128, false>(single)>("single");
  add_gates<bf16, false, with_hints(choice_of<bf16, 128, false>(single))>("hints");
  add_gates<bf16, false, choice_of<bf16, 128, false>(many)>("many");
  add_gates<bf16, false, with_hints(choice_of<bf16, 128, false>(many))>("hints8");
}

// --- buffers -------------------------------------------------------------------------------------
__global__ void fill(void* x, bool is_bf16, int64_t n, float low, float high, uint32_t seed) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < n;
       i += int64_t{gridDim.x} * blockDim.x) {
    uint32_t h = static_cast<uint32_t>(i) * 2654435761u + seed;
    h ^= h >> 16, h *= 0x85EBCA6Bu, h ^= h >> 13, h *= 0xC2B2AE35u, h ^= h >> 16;
    const float v = low + (high - low) * (h * 0x1p-32f);
    if (is_bf16) {
      static_cast<__nv_bfloat16*>(x)[i] = __float2bfloat16_rn(v);
    } else {
      static_cast<float*>(x)[i] = v;
    }
  }
}

struct Buffer {
  void* data = nullptr;
  DType type = DType::f32;
  int64_t n = 0;
  Buffer() = default;
  Buffer(DType t, int64_t count, float low, float high, uint32_t seed) : type(t), n(count) {
    check(cudaMalloc(&data, size_t(n * size_of(t)) + 16));
    fill<<<1024, 256>>>(data, t == DType::bf16, n, low, high, seed);
    check(cudaGetLastError());
  }
  Buffer(const std::vector<int>& x) : n(int64_t(x.size())) {
    check(cudaMalloc(&data, x.size() * 4 + 16));
    check(cudaMemcpy(data, x.data(), x.size() * 4, cudaMemcpyHostToDevice));
  }
  Buffer(Buffer&& o) { std::swap(data, o.data), type = o.type, n = o.n; }
  Buffer& operator=(Buffer&& o) {
    std::swap(data, o.data), type = o.type, n = o.n;
    return *this;
  }
  ~Buffer() { cudaFree(data); }
  std::vector<double> host() const {
    std::vector<double> out(static_cast<size_t>(n));
    if (type == DType::bf16) {
      std::vector<uint16_t> x(out.size());
      check(cudaMemcpy(x.data(), data, x.size() * 2, cudaMemcpyDeviceToHost));
      for (size_t i = 0; i < x.size(); ++i) {
        const uint32_t w = uint32_t{x[i]} << 16;
        float f;
        std::memcpy(&f, &w, 4);
        out[i] = double(f);
      }
    } else {
      std::vector<float> x(out.size());
      check(cudaMemcpy(x.data(), data, x.size() * 4, cudaMemcpyDeviceToHost));
      for (size_t i = 0; i < x.size(); ++i) out[i] = double(x[i]);
    }
    return out;
  }
};

constexpr int64_t kH = 16, kHV = 32, kK = 128, kV = 128;

Rows rows(const Buffer& b, int64_t T, int64_t H, int64_t width) {
  return {b.data, b.type, true, T * H * width, H * width, width};
}

// Inputs of one call: bf16, softplus gate per head or bounded gate per channel, as models have.
struct Call {
  Buffer q, k, v, o, g, beta, A_log, dt_bias;
  int64_t B, T, H, HV;
  Call(int64_t b, int64_t t, int64_t h, int64_t hv, Gate gate, uint32_t seed)
      : B(b), T(t), H(h), HV(hv) {
    const DType x = DType::bf16;
    q = Buffer(x, B * T * H * kK, -1, 1, seed + 1), k = Buffer(x, B * T * H * kK, -1, 1, seed + 2);
    v = Buffer(x, B * T * HV * kV, -1, 1, seed + 3);
    o = Buffer(x, B * T * HV * kV, 77, 78, seed + 4);
    const int64_t w = gate == Gate::channel ? kK : 1;
    g = Buffer(x, B * T * HV * w, -2, 2, seed + 5), beta = Buffer(x, B * T * HV, -2, 2, seed + 6);
    A_log = Buffer(DType::f32, HV, -2, 0.5f, seed + 7);
    dt_bias = Buffer(DType::f32, HV * w, -1, 1, seed + 8);
  }
  Params params(Gate gate, bool v_first, const Buffer& pool, int64_t slots,
                const int* index) const {
    const int64_t w = gate == Gate::channel ? kK : 1;
    Params p{};
    p.tokens = {{}, false, B, T, nullptr};
    p.V = kV, p.HV = uint32_t(HV), p.group = uint32_t(HV / H);
    p.by_heads = gpu::Divisor(p.HV), p.by_group = gpu::Divisor(p.group);
    p.gate = gate;
    p.gate_form = gate == Gate::channel ? DELTIC_GATE_BOUNDED : DELTIC_GATE_SOFTPLUS;
    p.beta_kind = BetaKind::head, p.beta_form = DELTIC_BETA_SIGMOID;
    p.l2norm = p.slots.is_pool = true;
    p.scale = 0.0883883f, p.lower_bound = -5;
    p.q = rows(q, T, H, kK), p.k = rows(k, T, H, kK), p.v = rows(v, T, HV, kV);
    p.o = rows(o, T, HV, kV), p.g = rows(g, T, HV, w), p.beta = rows(beta, T, HV, 1);
    p.A_log = {A_log.data, DType::f32, true, true, 1, {HV}, {1}};
    p.dt_bias = {dt_bias.data, DType::f32, true, true, 1, {HV * w}, {1}};
    p.state_in = {pool.data,        pool.type,       true, slots, HV * kK * kV, kK * kV,
                  v_first ? 1 : kV, v_first ? kK : 1};
    p.state_out = p.state_in;
    p.slots.read = p.slots.write = {index, true, false, B, 0, 1, 0};
    p.slots.read_slots = p.slots.write_slots = slots;
    return p;
  }
};

// --- checks --------------------------------------------------------------------------------------
double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }
double round_bf16(double x) {
  float f = float(x);
  uint32_t w;
  std::memcpy(&w, &f, 4);
  w = (w + 0x7fffu + ((w >> 16) & 1)) & 0xffff0000u;
  std::memcpy(&f, &w, 4);
  return double(f);
}

struct Errors {
  double o, state;
};
double error(const std::vector<double>& x, const std::vector<double>& ref) {
  double d = 0, n = 0;
  for (size_t i = 0; i < x.size(); ++i)
    d += (x[i] - ref[i]) * (x[i] - ref[i]), n += ref[i] * ref[i];
  return std::sqrt(d / n);
}

// The recurrence in fp64; a bf16 state is rounded after every token. Slot -1: zeros, nothing kept.
void reference(const Call& c, Gate gate, bool v_first, bool is_bf16, const std::vector<int>& slots,
               std::vector<double>& pool, std::vector<double>& o) {
  const auto q = c.q.host(), k = c.k.host(), v = c.v.host(), g = c.g.host(), beta = c.beta.host();
  const auto A = c.A_log.host(), bias = c.dt_bias.host();
  std::vector<double> S(size_t(kK * kV));
  const auto place = [&](int64_t d, int64_t j) { return v_first ? j * kK + d : d * kV + j; };
  for (int64_t b = 0; b < c.B; ++b)
    for (int64_t h = 0; h < c.HV; ++h) {
      const int64_t base = (slots[size_t(b)] * c.HV + h) * kK * kV;
      for (int64_t i = 0; i < kK * kV; ++i) {
        S[size_t(i)] = slots[size_t(b)] < 0 ? 0 : pool[size_t(base + i)];
      }
      for (int64_t t = 0; t < c.T; ++t) {
        const int64_t bt = b * c.T + t, qk = (bt * c.H + h / (c.HV / c.H)) * kK, hv = bt * c.HV + h;
        double nq = 1e-6, nk = 1e-6, kq = 0;
        for (int64_t d = 0; d < kK; ++d) {
          nq += q[size_t(qk + d)] * q[size_t(qk + d)], nk += k[size_t(qk + d)] * k[size_t(qk + d)];
        }
        nq = double(0.0883883f) / std::sqrt(nq), nk = 1 / std::sqrt(nk);
        for (int64_t d = 0; d < kK; ++d) kq += q[size_t(qk + d)] * nq * k[size_t(qk + d)] * nk;
        const double a = std::exp(A[size_t(h)]), be = sigmoid(beta[size_t(hv)]);
        const auto decay = [&](int64_t d) {
          if (gate == Gate::head) {
            return std::exp(-a * std::log1p(std::exp(g[size_t(hv)] + bias[size_t(h)])));
          }
          return std::exp(-5 * sigmoid(a * (g[size_t(hv * kK + d)] + bias[size_t(h * kK + d)])));
        };
        std::vector<double> dec(static_cast<size_t>(kK));
        for (int64_t d = 0; d < kK; ++d) dec[size_t(d)] = decay(d);
        for (int64_t j = 0; j < kV; ++j) {
          double rk = 0, rq = 0;
          for (int64_t d = 0; d < kK; ++d) {
            double& x = S[size_t(place(d, j))];
            x *= dec[size_t(d)];
            rk += x * k[size_t(qk + d)] * nk, rq += x * q[size_t(qk + d)] * nq;
          }
          const double u = be * (v[size_t(hv * kV + j)] - rk);
          o[size_t(hv * kV + j)] = slots[size_t(b)] < 0 ? 0 : rq + kq * u;
          for (int64_t d = 0; d < kK; ++d) {
            double& x = S[size_t(place(d, j))];
            x += k[size_t(qk + d)] * nk * u;
            if (is_bf16) x = round_bf16(x);
          }
        }
      }
      if (slots[size_t(b)] < 0) continue;
      for (int64_t i = 0; i < kK * kV; ++i) pool[size_t(base + i)] = S[size_t(i)];
    }
}

__global__ void empty_kernel(int) {}

// Errors of o and the pool; and whether single tokens give the same bits.
bool verify(const Variant& x, uint32_t seed, int64_t T) {
  const int64_t B = 5, HV = 4, slots = 9;
  const std::vector<int> index{7, 2, -1, 0, 5};
  const Call c(B, T, 2, HV, x.gate, seed);
  const Buffer list(index);
  Buffer pool(x.state, slots * HV * kK * kV, -1, 1, seed),
      pool1(x.state, slots * HV * kK * kV, -1, 1, seed);
  Buffer o1(DType::bf16, B * T * HV * kV, 77, 78, seed);
  auto want = pool.host();
  std::vector<double> want_o(size_t(B * T * HV * kV));
  // All variants of a state, layout and gate have the bits of the first one that takes several
  // tokens; that one is compared with the recurrence.
  const auto any = std::find_if(variants.begin(), variants.end(), [&](const Variant& y) {
    return y.most_tokens > 1 && y.state == x.state && y.v_first == x.v_first && y.gate == x.gate;
  });
  const bool is_first = &*any == &x;
  if (is_first) reference(c, x.gate, x.v_first, x.state == DType::bf16, index, want, want_o);
  const Params p = c.params(x.gate, x.v_first, pool, slots, static_cast<const int*>(list.data));
  any->launch(p, nullptr);
  Buffer pool2(x.state, slots * HV * kK * kV, -1, 1, seed);
  Buffer o2(DType::bf16, B * T * HV * kV, 77, 78, seed);
  Params again = c.params(x.gate, x.v_first, pool2, slots, static_cast<const int*>(list.data));
  again.o = rows(o2, T, HV, kV);
  empty_kernel<<<1, 32>>>(0);
  (T > x.most_tokens ? any->launch : x.launch)(again, nullptr);
  Params one = c.params(x.gate, x.v_first, pool1, slots, static_cast<const int*>(list.data));
  one.o = rows(o1, T, HV, kV), one.tokens.T = 1;
  for (int64_t t = 0; t < T; ++t) {
    Params step = one;
    for (Rows* r : {&step.q, &step.k, &step.v, &step.o, &step.g, &step.beta}) {
      r->data = static_cast<char*>(r->data) + t * r->st * size_of(r->dtype);
    }
    x.launch(step, nullptr);
  }
  check(cudaDeviceSynchronize());
  const auto got = pool.host(), got_o = c.o.host();
  const Errors e = is_first ? Errors{error(got_o, want_o), error(got, want)} : Errors{};
  const bool same =
      got == pool1.host() && got_o == o1.host() && got == pool2.host() && got_o == o2.host();
  const double limit = x.state == DType::bf16 ? 4e-3 : 2e-6;
  const bool fine = e.o < 4e-3 && e.state < limit && same;
  if (!fine) {
    std::printf("WRONG %s %s %s %s T=%ld: o %.1e, state %.1e, %s\n", name_of(x.state),
                x.v_first ? "V-first" : "K-first", x.gate == Gate::head ? "head" : "channel",
                x.name.c_str(), T, e.o, e.state, same ? "same bits" : "bits differ");
  }
  return fine;
}

// --- times ---------------------------------------------------------------------------------------
// writes: the state after the last token is kept.
double time_us(const Variant& x, int64_t B, int64_t T, bool writes = true, bool is_log = false) {
  const int64_t bytes = B * kHV * kK * kV * size_of(x.state);
  const int sets = int(std::max<int64_t>(2, (int64_t{400} << 20) / bytes));
  Buffer pool(x.state, sets * B * kHV * kK * kV, -1, 1, 5);
  const Call c(B, T, x.gate == Gate::channel ? kHV : kH, kHV, x.gate, 3);
  std::vector<int> index;
  for (int s = 0; s < sets; ++s) {
    for (int64_t b = 0; b < B; ++b) index.push_back(int(s * B + (b * 37 + 11) % B));
  }
  const Buffer list(index);
  const int calls = std::max(sets, 8);
  const auto ms = probe::replay_ms(calls, 15, 3, [&](int i, cudaStream_t stream) {
    Params p = c.params(x.gate, x.v_first, pool, sets * B,
                        static_cast<const int*>(list.data) + i % sets * B);
    if (!writes) p.slots.write_slots = 0;
    if (is_log) p.gate_form = DELTIC_GATE_LOG_DECAY, p.A_log = p.dt_bias = {};
    x.launch(p, stream);
  });
  return double(ms[ms.size() / 2]) * 1e3;
}

double copy_us(int64_t bytes) {
  const int sets = int(std::max<int64_t>(2, (int64_t{400} << 20) / bytes));
  Buffer from(DType::f32, sets * bytes / 4, 0, 1, 1), to(DType::f32, sets * bytes / 4, 0, 1, 1);
  const auto ms = probe::replay_ms(std::max(sets, 8), 15, 3, [&](int i, cudaStream_t stream) {
    const int64_t at = i % sets * bytes;
    check(cudaMemcpyAsync(static_cast<char*>(to.data) + at, static_cast<char*>(from.data) + at,
                          size_t(bytes), cudaMemcpyDeviceToDevice, stream));
  });
  return double(ms[ms.size() / 2]) * 1e3;
}

// --- moves ---------------------------------------------------------------------------------------
using probe::Hint;
using probe::Order;
using probe::Pattern;
using probe::Via;

struct Moves {
  Buffer pool{DType::f32, int64_t{200} << 20, 0, 1, 1};  // 800 MB, more than L2 has
  Buffer list;

  // smem: bytes beyond the kernel's own, so that fewer CTAs fit.
  template <int kThreads, int kVectors, Pattern kPattern = Pattern::linear, int kRow = 0,
            Via kVia = Via::registers, Hint kLoad = Hint::none, Hint kStore = Hint::none,
            Order kOrder = Order::states>
  void row(const char* name, int smem = 0, bool in_place = true, int state_bytes = 65536) {
    const auto kernel =
        probe::move_kernel<kThreads, kVectors, kPattern, kRow, kVia, kLoad, kStore, kOrder>;
    constexpr int kBytes = kThreads * kVectors * 16;
    smem += kVia == Via::registers ? 0 : kBytes;
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem));
    int ctas = 0;
    check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&ctas, kernel, kThreads, size_t(smem)));
    std::printf("%-46s %5d %3d %3d |", name, kThreads, kBytes / 1024, ctas);
    for (const int64_t B : {1, 64, 128}) {
      const int64_t bytes = B * kHV * state_bytes, half = pool.n * 2;  // two pools of 400 MB
      const int sets = int((in_place ? 2 : 1) * half / bytes);
      const int used = std::min(sets, 64);
      std::vector<int> index;
      for (int s = 0; s < used; ++s) {
        for (int64_t b = 0; b < B; ++b) index.push_back(int(s * B + (b * 37 + 11) % B));
      }
      list = Buffer(index);
      const auto ms = probe::replay_ms(std::max(used, 8), 9, 2, [&](int i, cudaStream_t stream) {
        probe::Move p{static_cast<char*>(pool.data),
                      static_cast<char*>(pool.data),
                      static_cast<const int*>(list.data) + i % used * B,
                      kHV * state_bytes,
                      state_bytes,
                      int(kHV)};
        if (!in_place) p.to += half;
        kernel<<<unsigned(bytes / kBytes), kThreads, size_t(smem), stream>>>(p);
        check(cudaGetLastError());
      });
      std::printf(" %7.2f", double(ms[ms.size() / 2]) * 1e3);
    }
    std::printf("\n");
    std::fflush(stdout);
  }
};

void run_moves() {
  std::printf("%-46s  thr  KB /SM |     B=1    B=64   B=128\n", "moves of fp32 states, us");
  Moves m;
  using enum Pattern;
  constexpr Via kRegs = Via::registers, kShared = Via::shared, kBulk = Via::bulk;
  constexpr Hint kNone = Hint::none, kStreamed = Hint::streamed, kFirst = Hint::first;
  m.row<128, 8>("linear");
  m.row<128, 8>("linear, out of place", 0, false);
  m.row<128, 8, halves>("halves");
  m.row<128, 8, warps>("warps");
  m.row<128, 8, linear, 0, kRegs, kStreamed>("linear, loads streamed");
  m.row<128, 8, linear, 0, kRegs, kFirst>("linear, loads evict first");
  m.row<128, 8, linear, 0, kRegs, kNone, kStreamed>("linear, stores .cs");
  m.row<128, 8, linear, 0, kRegs, kNone, kFirst>("linear, stores evict first");
  m.row<128, 8, linear, 0, kRegs, kStreamed, kStreamed>("linear, both streamed");
  m.row<128, 8, linear, 0, kRegs, kFirst, kFirst>("linear, both evict first");
  m.row<128, 8, linear, 0, kRegs, kNone, kNone, Order::mixed>("linear, order mixed");
  m.row<128, 8, linear, 0, kRegs, kNone, kNone, Order::slices>("linear, slice after slice");
  m.row<64, 8>("linear"), m.row<64, 16>("linear");
  m.row<128, 4>("linear"), m.row<128, 16>("linear");
  m.row<256, 4>("linear"), m.row<256, 8>("linear"), m.row<256, 16>("linear");
  m.row<512, 4>("linear"), m.row<512, 8>("linear"), m.row<1024, 4>("linear");
  m.row<128, 8, linear, 0, kShared>("shared");
  m.row<128, 8, linear, 0, kShared>("shared, 8 per SM", 10 * 1024);
  m.row<128, 8, linear, 0, kShared>("shared, 6 per SM", 20 * 1024);
  m.row<128, 8, linear, 0, kShared>("shared, 4 per SM", 38 * 1024);
  m.row<128, 8, linear, 0, kShared>("shared, 3 per SM", 56 * 1024);
  m.row<128, 8, linear, 0, kShared, kFirst, kFirst>("shared, 6 per SM, evict first", 20 * 1024);
  m.row<128, 8, linear, 0, kShared, kNone, kFirst>("shared, 6 per SM, stores evict first",
                                                   20 * 1024);
  m.row<128, 8, halves, 0, kShared>("shared, 6 per SM, halves", 20 * 1024);
  m.row<256, 8, linear, 0, kShared>("shared, 4 per SM", 20 * 1024);
  m.row<512, 8, linear, 0, kShared>("shared, 64 KB");
  m.row<32, 16, linear, 0, kBulk>("bulk"), m.row<32, 32, linear, 0, kBulk>("bulk");
  m.row<32, 64, linear, 0, kBulk>("bulk"), m.row<32, 128, linear, 0, kBulk>("bulk");
  m.row<128, 8, rows_of, 128>("K-first, rows of 128 bytes, 8 a thread");
  m.row<128, 8, rows, 128>("K-first, rows of 128 bytes");
  m.row<256, 8, rows_of, 256>("K-first, rows of 256 bytes, 8 a thread");
  m.row<256, 8, rows, 256>("K-first, rows of 256 bytes");
  m.row<512, 8, rows_of, 512>("K-first, rows of 512 bytes, 8 a thread");
  m.row<512, 8, rows, 512>("K-first, rows of 512 bytes");
  m.row<128, 16, rows_of, 256>("K-first, rows of 256 bytes, 16 a thread");
  m.row<128, 8, rows_of, 128, kShared>("K-first, shared, 6 per SM, 128 bytes", 20 * 1024);
  m.row<256, 8, rows_of, 256, kShared>("K-first, shared, 4 per SM, 256 bytes", 20 * 1024);
  m.row<512, 8, rows_of, 512, kShared>("K-first, shared, 512 bytes");
  const auto ms = probe::replay_ms(64, 9, 2, [](int, cudaStream_t stream) {
    empty_kernel<<<128, 128, 0, stream>>>(0);
    check(cudaGetLastError());
  });
  std::printf("a kernel of 128 CTAs that does nothing: %.2f us\n", double(ms[ms.size() / 2]) * 1e3);
}

}  // namespace

// decode_probe: the decode kernel in its forms, checked and timed. decode_probe moves: after moves
// of states alone. decode_probe check: the checks alone, for compute-sanitizer. decode_probe
// profile NAME: four tokens of bf16 states by variants of this name, for a profiler.
int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "";
  const bool is_timed = what != "check" && what != "profile";
  for (const int64_t B : is_timed ? std::vector<int64_t>{1, 64, 256} : std::vector<int64_t>{}) {
    const int64_t bytes = B * kHV * kK * kV * 4;
    std::printf("copy of B=%ld: fp32 %.2f us, bf16 %.2f us\n", B, copy_us(bytes),
                copy_us(bytes / 2));
  }
  if (what == "moves") run_moves();
  add_all();
  if (what == "profile") {
    for (const Variant& x : variants) {
      if (argc > 2 && x.name == argv[2] && x.state == DType::bf16) time_us(x, 64, 4);
    }
    return 0;
  }
  std::printf("us, gate per head / per channel; log: of log decays; not written: 8 tokens\n");
  std::printf("%-14s regs  /SM |", "decode");
  for (const char* column : {"B=1", "log", "B=4", "B=8", "B=16", "B=32", "B=64", "B=256", "T=4 B=1",
                             "16", "64", "64 not written"}) {
    std::printf("%13s", column);
  }
  std::printf("\n");
  const auto times = [](const Variant& x) {
    std::vector<double> t{time_us(x, 1, 1), time_us(x, 1, 1, true, true)};
    for (const int64_t B : {4, 8, 16, 32, 64, 256}) t.push_back(time_us(x, B, 1));
    if (x.most_tokens == 1) return t;
    for (const int64_t B : {1, 16, 64}) t.push_back(time_us(x, B, 4));
    t.push_back(time_us(x, 64, 8, false));
    return t;
  };
  int wrong = 0;
  for (size_t i = 0; i < variants.size(); i += 2) {  // gates per head and per channel
    const Variant *head = &variants[i], *channel = &variants[i + 1];
    bool fine = true;
    for (const Variant* x : {head, channel}) {
      fine &= verify(*x, 1, 1) & verify(*x, 2, 3) & verify(*x, 3, std::min(x->most_tokens, 11));
    }
    wrong += !fine;
    if (!is_timed) continue;
    const auto a = times(*head), b = times(*channel);
    std::printf("%s%c %-8s %3d/%3d %2d/%2d |", name_of(head->state), head->v_first ? 'v' : 'k',
                head->name.c_str(), head->registers, channel->registers, head->ctas_per_sm,
                channel->ctas_per_sm);
    for (size_t j = 0; j < a.size(); ++j) {
      const bool is_short = a[j] < 20;
      std::printf(is_short ? "%6.2f /%5.2f" : "%6.1f /%5.1f", a[j], b[j]);
    }
    std::printf("%s\n", fine ? "" : "  WRONG");
    std::fflush(stdout);
  }
  check(cudaDeviceSynchronize());
  std::printf(wrong == 0 ? "all right\n" : "%d wrong\n", wrong);
  return wrong != 0;
}
