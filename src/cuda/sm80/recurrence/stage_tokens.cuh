// A stage of tokens: loaded ahead into registers, then gates, norms and beta applied on the way to
// shared memory. Called by all warps; warp w has token w of the stage.
#pragma once

#include "cuda/sm80/recurrence/params.h"
#include "cuda/sm80/recurrence/traits.h"
#include "cuda/tile/gates.cuh"
#include "cuda/tile/norms.cuh"

namespace deltic::gpu::recurrence {

// Who works on what: a head of a sequence and a slice of its value columns.
struct Slice {
  unsigned n, head;
  int64_t first;  // column
  int count;      // columns of the slice, at most kColumns
};
// And where the states of the sequence come from and go to. In shared memory: the same for all
// threads, and as registers it would cost a quarter of them.
struct Place : Slice {
  Span span;
  int64_t k_head;
  float rate;                     // gate_rate(A_log), or 1
  int64_t read_slot, write_slot;  // -1: zero; nowhere, or token_slot says where
  int64_t ckpt_begin, ckpt_end;
  bool skipped;
};

template <class Tr>
struct Stage {
  Place place;
  alignas(
      16) float q[kStageTokens][Tr::kWidth];  // normalised, times scale; per channel times decay
  alignas(16) float k[kStageTokens][Tr::kWidth];
  alignas(16) float kd[kStageTokens][Tr::kPerChannel ? Tr::kWidth : 1];  // k times decay
  alignas(16) float decay[kStageTokens][Tr::kPerChannel ? Tr::kWidth : 1];
  alignas(16) float bias[Tr::kPerChannel ? Tr::kWidth : 1];  // dt_bias of the head
  float kq[kStageTokens];                                    // (k, q) of the above
  alignas(8) float v[kStageTokens][kColumns], beta[kStageTokens][kColumns];
  alignas(8) float value_decay[kStageTokens][kColumns];
  float o[kStageTokens][kColumns];
};

// What a lane holds of one token before it is ready: channels lane, lane + 32, ... and two columns.
template <class Tr>
struct RawToken {
  float q[Tr::kBlocks], k[Tr::kBlocks], g[Tr::kPerChannel ? Tr::kBlocks : 1];
  float v[2], beta[2], gv[2];
};

template <class Tr>
__device__ void load_token(const Params& p, const Place& at, int64_t t, int lane,
                           RawToken<Tr>& raw) {
  if (t >= at.span.length) return;
  const int64_t b = at.span.batch, token = at.span.begin + t, h = at.head, hk = at.k_head;
  load_lanes(p.q.data, p.q.dtype, offset(p.q, b, token, hk), lane, p.K, raw.q);
  load_lanes(p.k.data, p.k.dtype, offset(p.k, b, token, hk), lane, p.K, raw.k);
  if (p.gate != Gate::none) {
    // One number for all lanes, or one per channel.
    load_lanes(p.g.data, p.g.dtype, offset(p.g, b, token, h), Tr::kPerChannel ? lane : 0,
               Tr::kPerChannel ? p.K : 1, raw.g);
  }
  load_lanes(p.v.data, p.v.dtype, offset(p.v, b, token, h) + at.first, lane, at.count, raw.v);
  if (p.beta_kind == BetaKind::value) {
    load_lanes(p.beta.data, p.beta.dtype, offset(p.beta, b, token, h) + at.first, lane, at.count,
               raw.beta);
  } else if (p.beta_kind == BetaKind::head) {
    raw.beta[0] = raw.beta[1] = load(p.beta.data, p.beta.dtype, offset(p.beta, b, token, h));
  }
  if (p.gv.present) {
    load_lanes(p.gv.data, p.gv.dtype, offset(p.gv, b, token, h) + at.first, lane, at.count, raw.gv);
  }
}

// Leaves token w of the stage in shared memory; the caller's barrier makes it visible.
template <class Tr>
__device__ void finish_token(const Params& p, const Place& at, int64_t t, int warp, int lane,
                             RawToken<Tr>& raw, Stage<Tr>& s) {
  if (t >= at.span.length) return;  // the same for all lanes of the warp
    // Columns and gates first: the registers that held them are free again for the norms.
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int c = lane + 32 * i;
    s.v[warp][c] = raw.v[i];
    s.beta[warp][c] = p.beta_kind == BetaKind::none ? 1.0f : beta_value(p.beta_form, raw.beta[i]);
    if (p.gv.present) s.value_decay[warp][c] = decay_of(raw.gv[i]);
  }
  if constexpr (Tr::kPerChannel) {
#pragma unroll
    for (int i = 0; i < Tr::kBlocks; ++i) {
      const int d = lane + 32 * i;
      const float g = log_decay(p.gate_form, p.lower_bound, raw.g[i], at.rate, s.bias[d]);
      s.decay[warp][d] = d < p.K ? decay_of(g) : 1.0f;
    }
  } else if (lane == 0) {
    const float g = log_decay(p.gate_form, p.lower_bound, raw.g[0], at.rate, s.bias[0]);
    s.decay[warp][0] = p.gate == Gate::none ? 1.0f : decay_of(g);
  }
  float rq = 1, rk = 1;
  if (p.l2norm) reciprocal_norms(raw.q, raw.k, rq, rk);
  rq *= p.scale;
  float kq = 0;
#pragma unroll
  for (int i = 0; i < Tr::kBlocks; ++i) {
    const int d = lane + 32 * i;
    const float q = raw.q[i] * rq, k = raw.k[i] * rk;
    kq += q * k;
    s.k[warp][d] = k;
    if constexpr (Tr::kPerChannel) {
      const float decay = s.decay[warp][d];  // the lane's own
      s.kd[warp][d] = k * decay, s.q[warp][d] = q * decay;
    } else {
      s.q[warp][d] = q;
    }
  }
  kq = warp_sum(kq);
  if (lane == 0) s.kq[warp] = kq;
}

// dt_bias of the head into s.bias; a barrier must follow.
template <class Tr>
__device__ void load_bias(const Params& p, int64_t head, Stage<Tr>& s) {
  constexpr int kCount = Tr::kPerChannel ? Tr::kWidth : 1;
  static_assert(kCount <= kThreads, "a thread has one");
  const int width = Tr::kPerChannel ? p.K : 1, d = static_cast<int>(threadIdx.x);
  if (d >= kCount) return;
  s.bias[d] = p.dt_bias.present && d < width ? load_param(p.dt_bias, head * width + d) : 0.0f;
}

// o of a finished stage, after the barrier that ends its tokens: warp w writes token w.
template <class Tr>
__device__ void store_o(const Params& p, const Place& at, int64_t t, int warp, int lane,
                        const Stage<Tr>& s) {
  if (t >= at.span.length || !p.o.present) return;
  const int64_t row = offset(p.o, at.span.batch, at.span.begin + t, at.head) + at.first;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int c = lane + 32 * i;
    if (c < at.count) store(p.o.data, p.o.dtype, row + c, s.o[warp][c]);
  }
}

}  // namespace deltic::gpu::recurrence
