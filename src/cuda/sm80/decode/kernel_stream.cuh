// Several tokens of many sequences by CTAs that stay: a CTA has one part of a state after the
// other, and while one is worked on the next one and its tokens are on their way to shared memory.
#pragma once

#include <cstddef>

#include "cuda/ptx/launch_order.cuh"
#include "cuda/sm80/decode/kernel.cuh"

namespace deltic::gpu::decode {

// A part's tokens as they lie in memory, and the stage that is made of them. X: of q, k, v and o.
template <class Tr, class X>
struct StreamStage {
  static constexpr int kT = Tr::kStageTokens;
  Stage<Tr> stage;
  alignas(16) X keys[2][kT][Tr::kWidth];  // q, k
  alignas(16) X values[kT][Tr::kSpan];
  alignas(16) uint4 gates[Tr::kPerChannel ? kT * Tr::kWidth / 4 : 1];  // fp32, or half as long
  alignas(16) uint4 bias[Tr::kPerChannel ? Tr::kWidth / 4 : 1];
};
// Numbers of a token and a head.
struct RawNumbers {
  RawOne gate, bias, rate, beta;
};

// All of a part's tokens but the state, asked for.
template <class Tr, class X>
__device__ void request_tokens(const Params& p, const Slice& at, StreamStage<Tr, X>& f,
                               RawNumbers& raw) {
  const int T = static_cast<int>(p.tokens.T), thread = static_cast<int>(threadIdx.x);
  constexpr int kN = 16 / sizeof(X), kRow = Tr::kWidth / kN, kStage = Tr::kStageTokens;
  const int64_t key_head = p.by_group.quotient(at.head);
#pragma unroll
  for (int i = 0; i < (2 * kStage * kRow + Tr::kThreads - 1) / Tr::kThreads; ++i) {
    const int x = thread + i * Tr::kThreads, c = x % kRow, t = x / kRow % kStage;
    const Rows& rows = x / kRow / kStage == 0 ? p.q : p.k;
    if (t < T && x < 2 * kStage * kRow) {
      copy_async(&f.keys[0][0][0] + kN * x,
                 static_cast<const X*>(rows.data) + offset(rows, at.n, t, key_head) + kN * c);
    }
  }
  constexpr int kSpanRow = Tr::kSpan / kN;
#pragma unroll
  for (int i = 0; i < (kStage * kSpanRow + Tr::kThreads - 1) / Tr::kThreads; ++i) {
    const int x = thread + i * Tr::kThreads, c = x % kSpanRow, t = x / kSpanRow;
    if (t < T && x < kStage * kSpanRow && kN * c < at.count) {
      copy_async(&f.values[0][0] + kN * x, static_cast<const X*>(p.v.data) +
                                               offset(p.v, at.n, t, at.head) + at.first + kN * c);
    }
  }
  if (p.gate != Gate::none) {
    if constexpr (Tr::kPerChannel) {
      const int row = static_cast<int>(size_of(p.g.dtype)) * Tr::kWidth / 16;
      const int log2 = Tr::kWidth == 128 ? (row == 32 ? 5 : 4) : row == 16 ? 4 : 3;
      for (int x = thread; x < T << log2; x += Tr::kThreads) {
        const int t = x >> log2, c = x & (row - 1);
        copy_async(f.gates + x,
                   place_of(p.g.data, p.g.dtype, offset(p.g, at.n, t, at.head)) + 16 * c);
      }
      if (p.dt_bias.present &&
          thread < static_cast<int>(size_of(p.dt_bias.dtype)) * Tr::kWidth / 16) {
        copy_async(f.bias + thread, place_of(p.dt_bias.data, p.dt_bias.dtype,
                                             static_cast<int64_t>(at.head) * Tr::kWidth) +
                                        16 * thread);
      }
    } else {
      if (thread < T) {
        raw.gate = load_raw<Tr>(p.g.data, p.g.dtype, offset(p.g, at.n, thread, at.head));
      }
      if (p.dt_bias.present) raw.bias = load_raw<Tr>(p.dt_bias.data, p.dt_bias.dtype, at.head);
    }
    if (p.A_log.present) raw.rate = load_raw<Tr>(p.A_log.data, p.A_log.dtype, at.head);
  }
  if (p.beta_kind == BetaKind::head && thread < T) {
    raw.beta = load_raw<Tr>(p.beta.data, p.beta.dtype, offset(p.beta, at.n, thread, at.head));
  }
}

// Four neighbours in shared memory.
__device__ inline void read_four(const void* row, DType type, int at, float (&x)[4]) {
  if (type == DType::f32) {
    return value_of(reinterpret_cast<const uint4*>(row)[at / 4], type, x);
  }
  const uint2 w = reinterpret_cast<const uint2*>(row)[at / 4];
  value_of(uint4{w.x, w.y, 0, 0}, type, x);
}

// The stage, made of what has arrived.
template <class Tr, class X>
__device__ void lay_stage(const Params& p, StreamStage<Tr, X>& f, const RawNumbers& raw) {
  const int T = static_cast<int>(p.tokens.T), thread = static_cast<int>(threadIdx.x);
  constexpr int kN = 16 / sizeof(X), kStage = Tr::kStageTokens;
  constexpr int kTokenThreads = Tr::kThreads / Tr::kPieces;  // tokens at once
  Stage<Tr>& s = f.stage;
#pragma unroll 1
  for (int first = 0; first < T; first += kTokenThreads) {
    const int t = first + thread / Tr::kPieces, piece = thread % Tr::kPieces;
    if (first + thread / 32 * 32 / Tr::kPieces >= T) break;  // the same for a warp
    float q[kChannels], k[kChannels];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int d = channel_of<Tr>(piece, j);
      const uint2 a = *reinterpret_cast<const uint2*>(&f.keys[0][t][d]);
      const uint2 b = *reinterpret_cast<const uint2*>(&f.keys[1][t][d]);
      float x[kN], y[kN];
      unpack<X>(uint4{a.x, a.y, 0, 0}, x), unpack<X>(uint4{b.x, b.y, 0, 0}, y);
#pragma unroll
      for (int i = 0; i < 4; ++i) q[4 * j + i] = x[i], k[4 * j + i] = y[i];
    }
    put_keys<Tr>(p, t, piece, T, q, k, s);
  }
  // Values, from the last warps on: the first ones have the keys.
  constexpr int kSpanRow = Tr::kSpan / kN;
#pragma unroll
  for (int i = 0; i < (kStage * kSpanRow + Tr::kThreads - 1) / Tr::kThreads; ++i) {
    const int x = Tr::kThreads - 1 - thread + i * Tr::kThreads;
    if (x < T * kSpanRow) {
      float v[kN];
      unpack<X>(reinterpret_cast<const uint4*>(f.values)[x], v);
#pragma unroll
      for (int e = 0; e < kN; e += 4) {
        reinterpret_cast<float4*>(&s.v[0][0])[x * (kN / 4) + e / 4] =
            float4{v[e], v[e + 1], v[e + 2], v[e + 3]};
      }
    }
  }
  const bool has_gate = p.gate != Gate::none;
  const float rate = p.A_log.present ? gate_rate(value_of(raw.rate, p.A_log.dtype)) : 1.0f;
  const auto decay = [&](float g, float bias) {
    return has_gate ? decay_of(log_decay(p.gate_form, p.lower_bound, g, rate, bias)) : 1.0f;
  };
  if constexpr (Tr::kPerChannel) {
    constexpr int kGates = Tr::kWidth / 4;  // threads of a token
    const int x = thread % kGates, d = channel_of<Tr>(x % Tr::kPieces, x / Tr::kPieces);
    float bias[4] = {};
    if (p.dt_bias.present) read_four(f.bias, p.dt_bias.dtype, d, bias);
#pragma unroll 1
    for (int t = thread / kGates; t < T; t += Tr::kThreads / kGates) {
      float g[4] = {};
      if (has_gate) read_four(f.gates, p.g.dtype, t * Tr::kWidth + d, g);
      *reinterpret_cast<float4*>(&s.decay[t][4 * x]) = float4{
          decay(g[0], bias[0]), decay(g[1], bias[1]), decay(g[2], bias[2]), decay(g[3], bias[3])};
    }
  } else if (thread < T) {
    s.decay[thread][0] = decay(value_of(raw.gate, p.g.dtype), value_of(raw.bias, p.dt_bias.dtype));
  }
  if (thread < T) {
    s.beta[thread] = p.beta_kind == BetaKind::none
                         ? 1.0f
                         : beta_value(p.beta_form, value_of(raw.beta, p.beta.dtype));
  }
}

// The tokens of a part, whose state is in registers.
template <class Tr, class X>
__device__ void run_part(const Params& p, const Slice& at, const Part& part, int last,
                         const Stage<Tr>& s, Held<Tr>& S) {
  const int T = static_cast<int>(p.tokens.T);
  const int column = held_column<Tr>(part);
  X* o = static_cast<X*>(p.o.data) + offset(p.o, at.n, 0, at.head) + at.first + column;
  // Columns of o that the lane leaves.
  const int left = leaves_held<Tr>(part) ? at.count - column : 0;
  const bool per_token = p.slots.per_token;
  HeldToken<Tr> token(s, part, 0, 0);
#pragma unroll 1
  for (int t = 0;; o += p.o.st, token.advance()) {
    float u[Tr::kColumns];
    solve_held<Tr>(part, token, S, u, [&](int j, float x) {
      if (j < left) o[j] = from_float<X>(x);
    });
    const bool is_last = ++t == T;
    int slot = -1;
    if (is_last || per_token) slot = per_token ? token_slot(p.slots, at.n, t - 1) : last;
    if (is_last && slot < 0) return;  // nobody sees what would be left
    update_held<Tr>(token, u, S);
    if (slot >= 0) store_held<Tr>(p, at, part, slot, S);
    if (is_last) return;
  }
}

// Grids are of any size: part after part, blockIdx.x + i gridDim.x. Dense, at most kStageTokens of
// a sequence.
template <class Tr, class X>
__global__ void __launch_bounds__(Tr::kThreads, ctas_per_sm(Tr::kCtasPerSm, Tr::kCtasElsewhere))
    stream_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(16) std::byte memory[];
  auto& f = *reinterpret_cast<StreamStage<Tr, X>*>(memory);
  grid_wait();
  grid_release();  // CTAs of the next launch wait for this one, wherever there is room for them
  if (is_wrong(p.tokens)) return;
  const unsigned parts = static_cast<unsigned>(p.tokens.N) * p.HV * p.num_slices;
  unsigned index = blockIdx.x;
  if (index >= parts) return;
  const Part part = part_of<Tr>(threadIdx.x);
  RawNumbers raw{};
  Slots<int> slots;
  SlotEntries<int> entries = load_slots<int>(p.slots, find_slice<Tr>(p, index).n);
  const auto request = [&] {
    const Slice at = find_slice<Tr>(p, index);
    slots = find_slots<int>(p.slots, at.n, entries);
    request_tokens<Tr, X>(p, at, f, raw);
    request_state<Tr>(p, at, part, slots.from, 0, f.stage);
    copies_commit();
    if (index + gridDim.x < parts) {
      entries = load_slots<int>(p.slots, find_slice<Tr>(p, index + gridDim.x).n);
    }
  };
  request();
#pragma unroll 1
  for (;;) {
    copies_wait<0>();
    __syncthreads();  // tokens are there, and the stage before has been read, of all threads
    lay_stage<Tr, X>(p, f, raw);
    Held<Tr> S;
    get_held<Tr>(f.stage, 0, S);
    __syncthreads();  // the stage is there, and the tokens have been read, of all threads
    const Slice at = find_slice<Tr>(p, index);
    const int T = static_cast<int>(p.tokens.T), to = slots.to;
    const bool is_out = is_skipped(p.slots, at.n, T, slots);
    index += gridDim.x;
    if (index < parts) request();
    if (is_out) {
      zero_outputs(p, at, {static_cast<int>(at.n), 0, T});
    } else {
      run_part<Tr, X>(p, at, part, to, f.stage, S);
    }
    if (index >= parts) return;
  }
}

}  // namespace deltic::gpu::decode
