// A stage of tokens in shared memory: norms, gates and beta applied. Called by all threads of the
// CTA; the caller's barrier makes it visible.
#pragma once

#include "cuda/ptx/shared.cuh"
#include "cuda/sm80/decode/params.h"
#include "cuda/sm80/decode/traits.h"
#include "cuda/tile/gates.cuh"
#include "cuda/tile/vectors.cuh"

namespace deltic::gpu::decode {

// Who works on what: a head of a sequence and a slice of its value columns.
struct Slice {
  unsigned n, head;
  int first, count;  // columns; at most kSpan of them
};
// Where its tokens lie.
struct Place {
  int batch, begin, length;
};
// Both, and where the last state goes (-1: nowhere, or write_index says where). In shared memory,
// and read where it is used: the registers are wanted for the state.
struct alignas(16) Work {
  Slice slice;
  Place place;
  int to;
};
__device__ inline Work load_work(const Work& s_work) {
  uint4 w[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) w[i] = load_shared_volatile(smem_u32(&s_work) + 16 * i);
  return {{w[0].x, w[0].y, static_cast<int>(w[0].z), static_cast<int>(w[0].w)},
          {static_cast<int>(w[1].x), static_cast<int>(w[1].y), static_cast<int>(w[1].z)},
          static_cast<int>(w[1].w)};
}

// Channels of piece x: 0 to 3 at [0][4 x], 4 to 7 at [1][4 x]: whoever has a piece reads it without
// conflicts of banks.
template <class Tr>
struct Stage {
  static constexpr int kT = Tr::kStageTokens;
  Work work;
  alignas(16) float q[Tr::kMma ? 1 : kT][Tr::kMma ? 4 : Tr::kRowPitch];  // normalised, times scale
  alignas(16) float k[kT][Tr::kRowPitch];
  // kMma: k and q, times decays per channel, each as the sum of three bf16 numbers, largest first.
  // Rows apart so that eight lanes of a load, of two rows, meet no bank twice.
  alignas(16) uint32_t parts[Tr::kMma ? kT : 1][6][Tr::kMma ? Tr::kWidth / 2 + 16 : 4];
  alignas(16) float decay[kT][Tr::kPerChannel ? Tr::kWidth : 4];
  float kq[kT], beta[kT];
  alignas(16) float v[kT][Tr::kDrafts ? 4 : Tr::kSpan];
  // A thread's vectors of the state, one every kThreads: until its first token is ready it waits
  // here, not in registers.
  uint4 state[Tr::kTiles][Tr::kDirect ? 1 : Tr::kSlice * Tr::kWidth / Vector<typename Tr::E>::N];
  // K-first: a warp's sums of k and q, by turns.
  alignas(16) float sums[Tr::kVFirst || Tr::kSingle || Tr::kDrafts ? 1 : 2][Tr::kWarps][2]
                        [Tr::kVFirst || Tr::kDrafts ? 4 : Tr::kSlice];
};

// The first channel of half j (four channels) of a piece.
template <class Tr>
__device__ constexpr int channel_of(int piece, int j) {
  return Tr::kHalves ? j * (Tr::kWidth / 2) + 4 * piece : 8 * piece + 4 * j;
}

// One element or four neighbours as they lie in memory, so that all loads of a thread are under way
// before the first is looked at. kSingle: in halves, of which 16-bit numbers have the lower one: a
// register that either of two loads may fill has the second wait for the first, taken or not. With
// several tokens to a stage the registers are worth more than these waits.
struct RawOne {
  uint32_t low, high;
};
__device__ inline const char* place_of(const void* data, DType type, int64_t at) {
  return static_cast<const char*>(data) + (at << (type == DType::f32 ? 2 : 1));
}
template <class Tr>
__device__ RawOne load_raw(const void* data, DType type, int64_t at) {
  if constexpr (!Tr::kSingle) {
    return {type == DType::f32 ? static_cast<const uint32_t*>(data)[at]
                               : static_cast<const uint16_t*>(data)[at],
            0};
  }
  const auto* halves = reinterpret_cast<const uint16_t*>(place_of(data, type, at));
  RawOne x{halves[0], 0};
  if (type == DType::f32) x.high = halves[1];
  return x;
}
template <class Tr>
__device__ uint4 load_four(const void* data, DType type, int64_t at) {
  if constexpr (!Tr::kSingle) {
    if (type == DType::f32) {
      return *reinterpret_cast<const uint4*>(static_cast<const float*>(data) + at);
    }
    const uint2 w = *reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(data) + at);
    return {w.x, w.y, 0, 0};
  }
  const auto* halves = reinterpret_cast<const uint2*>(place_of(data, type, at));
  const uint2 low = halves[0];
  uint2 high{0, 0};
  if (type == DType::f32) high = halves[1];
  return {low.x, low.y, high.x, high.y};
}
__device__ inline void value_of(const uint4& raw, DType type, float (&x)[4]) {
  with_dtype(type, [&](auto* tag) {
    using E = std::remove_pointer_t<decltype(tag)>;
    float all[Vector<E>::N];
    unpack<E>(raw, all);
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = all[i];
  });
}
__device__ inline float value_of(const RawOne& raw, DType type) {
  float x[4];
  value_of(uint4{raw.low | raw.high << 16, 0, 0, 0}, type, x);
  return x[0];
}

template <class Tr>
__device__ void store_piece(float* row, int piece, const float (&x)[kChannels]) {
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    *reinterpret_cast<float4*>(row + j * (Tr::kWidth / 2) + 4 * piece) =
        float4{x[4 * j], x[4 * j + 1], x[4 * j + 2], x[4 * j + 3]};
  }
}
// Channels first to first + N of a piece.
template <class Tr, int N>
__device__ void read_run(const float* row, int piece, int first, float (&x)[N]) {
  static_assert(N % 4 == 0);
#pragma unroll
  for (int i = 0; i < N; i += 4) {
    const int j = (first + i) / 4;
    const float4 four = *reinterpret_cast<const float4*>(row + j * (Tr::kWidth / 2) + 4 * piece);
    x[i] = four.x, x[i + 1] = four.y, x[i + 2] = four.z, x[i + 3] = four.w;
  }
}

// x / sqrt(sum x^2 + 1e-6), over kLanes lanes; sum: of the squares. Those of large numbers overflow
// fp32: such rows are made smaller by a power of two first, beside which 1e-6 is nothing.
template <int kLanes>
__device__ void normalize(float (&x)[kChannels], float sum) {
  constexpr float kSmall = 0x1p-70f;
  const bool is_large = !(sum <= 3e38f);
  float factor = rsqrtf(sum + static_cast<float>(kNormEps));
  if (__any_sync(0xFFFFFFFFu, is_large)) {
    float small = 0;
#pragma unroll
    for (int i = 0; i < kChannels; ++i) small += (x[i] * kSmall) * (x[i] * kSmall);
    small = sum_lanes<kLanes>(small);
    if (is_large) {
      factor = rsqrtf(small);
#pragma unroll
      for (int i = 0; i < kChannels; ++i) x[i] *= kSmall;
    }
  }
#pragma unroll
  for (int i = 0; i < kChannels; ++i) x[i] *= factor;
}
// Of two rows: their sums go over the lanes together.
template <int kLanes>
__device__ void normalize(float (&x)[kChannels], float (&y)[kChannels]) {
  float xx = 0, yy = 0;
#pragma unroll
  for (int i = 0; i < kChannels; ++i) xx += x[i] * x[i], yy += y[i] * y[i];
#pragma unroll
  for (int m = kLanes / 2; m > 0; m /= 2) {
    xx += __shfl_xor_sync(0xFFFFFFFFu, xx, m);
    yy += __shfl_xor_sync(0xFFFFFFFFu, yy, m);
  }
  normalize<kLanes>(x, xx), normalize<kLanes>(y, yy);
}

// What a thread has of a stage before it is ready, asked for all at once: what is asked for later
// comes behind the state. A piece of q and k of one token; of g and v one every kThreads.
struct RawTokens {
  uint4 q[2], k[2], g[2], bias;  // g, bias: of one number its halves are x and y
  RawOne beta, rate, v[8];
};

// Per channel a thread has four channels at places 4 x of the stage's row. Of a single token the
// first warp has the keys, and the second these.
template <class Tr>
inline constexpr int kGateThreads = Tr::kPerChannel ? Tr::kWidth / 4 : 1;
// Loads of g and v by a thread, and the tokens between two of them.
template <class Tr>
inline constexpr int kGateStep = Tr::kThreads / kGateThreads<Tr>;
template <class Tr>
inline constexpr int kGateLoads = (Tr::kStageTokens + kGateStep<Tr> - 1) / kGateStep<Tr>;
template <class Tr>
inline constexpr int kValueStep = Tr::kThreads / Tr::kSpan;
template <class Tr>
inline constexpr int kValueLoads = (Tr::kStageTokens + kValueStep<Tr> - 1) / kValueStep<Tr>;
template <class Tr>
__device__ int gate_thread() {
  return Tr::kSingle && Tr::kWarps > 1 ? threadIdx.x ^ 32 : threadIdx.x;
}
template <class Tr>
__device__ int gate_channel(int thread) {
  constexpr int kHalf = Tr::kPieces;  // threads for half a row
  const int x = thread % kGateThreads<Tr>;
  return Tr::kPerChannel ? channel_of<Tr>(x % kHalf, x / kHalf) : 0;
}

template <class Tr>
__device__ void load_gate(const Params& p, int64_t row, int d, uint4& g) {
  if constexpr (Tr::kPerChannel) {
    g = load_four<Tr>(p.g.data, p.g.dtype, row + d);
  } else {
    const RawOne one = load_raw<Tr>(p.g.data, p.g.dtype, row);
    g.x = one.low, g.y = one.high;
  }
}

template <class Tr>
__device__ void load_keys(const Params& p, const Place& place, const Slice& at, int first,
                          int count, RawTokens& raw) {
  const int thread = threadIdx.x, piece = thread % Tr::kPieces;
  raw = {};
  if (const int t = thread / Tr::kPieces; t < count) {
    const int64_t token = Tr::kIsRow ? 0 : place.begin + first + t;
    const int64_t head = p.by_group.quotient(at.head);
    const int64_t q = offset(p.q, place.batch, token, head);
    const int64_t k = offset(p.k, place.batch, token, head);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int d = channel_of<Tr>(piece, j);
      raw.q[j] = load_four<Tr>(p.q.data, p.q.dtype, q + d);
      raw.k[j] = load_four<Tr>(p.k.data, p.k.dtype, k + d);
    }
  }
}
// All but q and k.
template <class Tr>
__device__ void load_values(const Params& p, const Place& place, const Slice& at, int first,
                            int count, RawTokens& raw) {
  const int thread = threadIdx.x;
  if (p.gate != Gate::none) {
    const int d = gate_channel<Tr>(gate_thread<Tr>());
    static_assert(kGateLoads<Tr> <= 2 && kValueLoads<Tr> <= 8);
#pragma unroll
    for (int i = 0; i < kGateLoads<Tr>; ++i) {
      const int t = gate_thread<Tr>() / kGateThreads<Tr> + i * kGateStep<Tr>;
      if (t < count) {
        load_gate<Tr>(p, offset(p.g, place.batch, place.begin + first + t, at.head), d, raw.g[i]);
      }
    }
    if (p.dt_bias.present) {
      if constexpr (Tr::kPerChannel) {
        const int64_t i = static_cast<int64_t>(at.head) * Tr::kWidth + d;
        raw.bias = load_four<Tr>(p.dt_bias.data, p.dt_bias.dtype, i);
      } else {
        const RawOne one = load_raw<Tr>(p.dt_bias.data, p.dt_bias.dtype, at.head);
        raw.bias.x = one.low, raw.bias.y = one.high;
      }
    }
    if (p.A_log.present) raw.rate = load_raw<Tr>(p.A_log.data, p.A_log.dtype, at.head);
  }
  if (p.beta_kind == BetaKind::head && thread < count) {
    const int64_t row = offset(p.beta, place.batch, place.begin + first + thread, at.head);
    raw.beta = load_raw<Tr>(p.beta.data, p.beta.dtype, row);
  }
  const int c = thread % Tr::kSpan;
  if (c >= at.count) return;  // before the offset, which is registers
  int t = thread / Tr::kSpan;
  int64_t row = offset(p.v, place.batch, place.begin + first + t, at.head) + at.first + c;
#pragma unroll
  for (int i = 0; i < kValueLoads<Tr>; ++i) {
    if (t < count) raw.v[i] = load_raw<Tr>(p.v.data, p.v.dtype, row);
    t += kValueStep<Tr>, row += kValueStep<Tr> * p.v.st;
  }
}

// Three bf16 numbers of a pair that add up to it, cut off and not rounded: 8 bits of the 24 each.
// Numbers of the bottom of fp32's range lose what bf16 has no bits for.
__device__ inline void split_pair(float x, float y, uint32_t (&part)[3]) {
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    const uint32_t a = __float_as_uint(x), b = __float_as_uint(y);
    part[i] = __byte_perm(a, b, 0x7632);
    x -= __uint_as_float(a & 0xFFFF0000u), y -= __uint_as_float(b & 0xFFFF0000u);
  }
}
// k or q of a piece, times decays per channel, into three rows.
template <class Tr>
__device__ void lay_parts(int t, int piece, int first_row, const float (&x)[kChannels],
                          Stage<Tr>& s) {
  float decay[kChannels];
  if constexpr (Tr::kPerChannel) read_run<Tr>(s.decay[t], piece, 0, decay);
  uint32_t parts[kChannels / 2][3];
#pragma unroll
  for (int i = 0; i < kChannels; i += 2) {
    const float a = Tr::kPerChannel ? decay[i] * x[i] : x[i];
    const float b = Tr::kPerChannel ? decay[i + 1] * x[i + 1] : x[i + 1];
    split_pair(a, b, parts[i / 2]);
  }
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    *reinterpret_cast<uint4*>(&s.parts[t][first_row + i][kChannels / 2 * piece]) =
        uint4{parts[0][i], parts[1][i], parts[2][i], parts[3][i]};
  }
}

// Norms, scale, k times q, of a token that kPieces lanes have. All lanes of a warp; tokens from
// `count` on are not laid down. kGatesFirst: a barrier inside, behind which the decays are there.
template <class Tr>
__device__ void put_keys(const Params& p, int t, int piece, int count, float (&q)[kChannels],
                         float (&k)[kChannels], Stage<Tr>& s) {
  if (p.l2norm) normalize<Tr::kPieces>(q, k);
  float kq = 0;
#pragma unroll
  for (int i = 0; i < kChannels; ++i) q[i] *= p.scale, kq += q[i] * k[i];
  kq = sum_lanes<Tr::kPieces>(kq);
  if constexpr (Tr::kGatesFirst) __syncthreads();  // decays are there, for all threads
  if (t >= count) return;
  if constexpr (Tr::kMma) {
    lay_parts<Tr>(t, piece, 0, k, s), lay_parts<Tr>(t, piece, 3, q, s);
  } else {
    store_piece<Tr>(s.q[t], piece, q);
  }
  store_piece<Tr>(s.k[t], piece, k);
  if (piece == 0) s.kq[t] = kq;
}

// q, k and their product, from what was asked for.
template <class Tr>
__device__ void lay_keys(const Params& p, int count, const RawTokens& raw, Stage<Tr>& s) {
  const int t = threadIdx.x / Tr::kPieces, piece = threadIdx.x % Tr::kPieces;
  // The same for a warp.
  const bool has_token = static_cast<int>(threadIdx.x / 32 * 32 / Tr::kPieces) < count;
  if (!Tr::kGatesFirst && !has_token) return;
  float q[kChannels], k[kChannels];
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    float x[4], y[4];
    value_of(raw.q[j], p.q.dtype, x), value_of(raw.k[j], p.k.dtype, y);
#pragma unroll
    for (int i = 0; i < 4; ++i) q[4 * j + i] = x[i], k[4 * j + i] = y[i];
  }
  put_keys<Tr>(p, t, piece, count, q, k, s);
}

template <class Tr>
__device__ void lay_gates(const Params& p, int count, const RawTokens& raw, Stage<Tr>& s) {
  constexpr int kN = Tr::kPerChannel ? 4 : 1;
  const int x = gate_thread<Tr>() % kGateThreads<Tr>;
  const bool has_gate = p.gate != Gate::none;
  const auto values = [](const uint4& four, DType type, float(&y)[4]) {
    if constexpr (Tr::kPerChannel) {
      value_of(four, type, y);
    } else {
      y[0] = value_of(RawOne{four.x, four.y}, type);
    }
  };
  float bias[4];
  values(raw.bias, p.dt_bias.dtype, bias);
  const float rate = p.A_log.present ? gate_rate(value_of(raw.rate, p.A_log.dtype)) : 1.0f;
#pragma unroll
  for (int j = 0; j < kGateLoads<Tr>; ++j) {
    const int t = gate_thread<Tr>() / kGateThreads<Tr> + j * kGateStep<Tr>;
    if (t >= count) return;
    float g[4];
    values(raw.g[j], p.g.dtype, g);
#pragma unroll
    for (int i = 0; i < kN; ++i) {
      s.decay[t][kN * x + i] =
          has_gate ? decay_of(log_decay(p.gate_form, p.lower_bound, g[i], rate, bias[i])) : 1.0f;
    }
  }
}

template <class Tr>
__device__ void lay_betas(const Params& p, int count, const RawTokens& raw, Stage<Tr>& s) {
  if (threadIdx.x < count) {
    s.beta[threadIdx.x] = p.beta_kind == BetaKind::none
                              ? 1.0f
                              : beta_value(p.beta_form, value_of(raw.beta, p.beta.dtype));
  }
}
// Rows of kSpan columns.
template <class Tr, int kColumns>
__device__ void lay_columns(const Params& p, int count, const RawTokens& raw,
                            float (*v)[kColumns]) {
  const int c = threadIdx.x % Tr::kSpan;
#pragma unroll
  for (int i = 0; i < kValueLoads<Tr>; ++i) {
    const int t = threadIdx.x / Tr::kSpan + i * kValueStep<Tr>;
    if (t < count) v[t][c] = value_of(raw.v[i], p.v.dtype);
  }
}
template <class Tr>
__device__ void lay_values(const Params& p, int count, const RawTokens& raw, Stage<Tr>& s) {
  lay_betas<Tr>(p, count, raw, s);
  lay_columns<Tr>(p, count, raw, s.v);
}

}  // namespace deltic::gpu::decode
