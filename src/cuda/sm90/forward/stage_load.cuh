// What a preparing CTA reads.
#pragma once
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/bulk.cuh"
#include "cuda/ptx/flags.cuh"
#include "cuda/ptx/registers.cuh"
#include "cuda/sm90/forward/gates.cuh"
#include "cuda/sm90/forward/stage_rows.cuh"

namespace deltic::gpu::forward {

struct InputMaps {
  const CUtensorMap *q, *k, *g;
};

// A warp's part of what comes by ordinary loads, between issue and use.
struct Fetched {
  uint32_t a_log, beta[2], bias[4];  // bits
};

// The CTA's item n. Items go by step, then carrier, so that all carriers advance together.
template <class Smem, class SpanOf>
__device__ inline Where where_is(Smem& s, const Params& params, const int* prefix, SpanOf span_of,
                                 int n) {
  Plan plan{};
  plan.total = opaque(s.seat.plan.total), plan.carriers = opaque(s.seat.plan.carriers);
  plan.parts = opaque(s.seat.plan.parts), plan.steps = opaque(s.seat.plan.steps);
  plan.num_pieces = opaque(s.seat.plan.num_pieces);
  const int carriers = group_of(params, plan.parts) * plan.carriers;
  const schedule::StepOf item =
      item_at(plan, opaque(s.seat.index) - carriers + n * (opaque(s.seat.count) - carriers));
  const int hv = opaque(params.num_value_heads);
  const Place p = locate(plan, prefix, hv, item.carrier * plan.steps + item.step);
  const PieceSpan span = span_of(p.piece);
  return {span.token + p.chunk * kChunk,
          span.batch,
          min(span.length - p.chunk * kChunk, kChunk),
          p.head,
          divide(p.head, divide(hv, params.num_heads)),
          item.step,
          item.carrier};
}
__device__ inline PieceSpan span_in_memory(const Params& params, int piece) {
  const Piece* p = params.pieces + piece;
  return {p->token, p->length, p->batch};
}
// One thread: raw tiles of an item into place st, which is free.
template <bool kWideGate, bool kQueries>
__device__ inline void load_tiles(PrepareSmem& s, const InputMaps& maps, const Where& w, int st) {
  uint64_t* bar = &s.raw_full[st];
  barrier_expect(bar, (1 + !kWideGate + kQueries) * kTileBytes);
#pragma unroll 1
  for (int h = 0; h < 2; h++) {
    if constexpr (!kWideGate)
      tensor_load(s.g[st] + h * kHalfBytes, maps.g, 64 * h, w.head, w.token, w.batch, bar);
    tensor_load(s.k[st] + h * kHalfBytes, maps.k, 64 * h, w.qk_head, w.token, w.batch, bar);
    if constexpr (kQueries)
      tensor_load(s.q[st] + h * kHalfBytes, maps.q, 64 * h, w.qk_head, w.token, w.batch, bar);
  }
}
// A warp: packets that the CTAs of a carrier have read, a lane for each CTA.
__device__ inline int packets_read(const Params& params, const Plan& plan, int carrier) {
  const int group = group_of(params, reread(plan.parts)), lane = thread_index() % 32;
  return lane < group ? int(load_relaxed(consumed_flag(params, group * carrier + lane)))
                      : 0x7fffffff;
}
// All of them have read what was in a packet's place. count: packets_read() of some time before.
__device__ inline void wait_place(const Params& params, const Plan& plan, int carrier, int step,
                                  int count) {
#pragma unroll 1
  while (!__all_sync(~0u, count > step - params.ring_slots))
    count = packets_read(params, plan, carrier);
  fence_acquire();
  __syncwarp();                // what one lane was told of orders what any of them writes
  fence_async_proxy_global();  // read by bulk copies there, written by bulk copies here
}
// The thread that sent all of a packet by bulk copies, when they are in memory.
__device__ inline void publish(const Params& params, int carrier, int step) {
  bulk_store_wait();
  store_release(ready_flag(params, carrier, step), step + 1);
}
// One warp, gates per channel: what comes by ordinary loads, and the item itself.
__device__ inline void begin_item(Stage& stage, const Params& params, const Where& w, Fetched& f) {
  const int lane = threadIdx.x % 32;
  if (lane == 0) {
    stage.item = {w.tokens_left, w.step, w.carrier, nullptr};
    const Rows& g = params.g_channel;
    if (g.data)
      stage.item.g =
          static_cast<const uint8_t*>(g.data) +
          (w.batch * g.sb + w.token * g.st + w.head * g.sh) * (g.dtype == DType::f32 ? 4 : 2);
  }
  f.a_log = params.a_log.data ? load_bits(params.a_log.data, params.a_log.dtype, w.head) : 0;
  const Flat& bias = params.dt_bias;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    f.bias[i] = 0;
    if (bias.data && 4 * lane < params.key_width)
      f.bias[i] =
          load_bits(bias.data, bias.dtype, int64_t(w.head) * params.key_width + 4 * lane + i);
  }
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int t = 2 * lane + i;
    const Rows& v = params.beta;
    f.beta[i] =
        v.data && t < w.tokens_left
            ? load_bits(v.data, v.dtype, w.batch * v.sb + (w.token + t) * v.st + w.head * v.sh)
            : 0;
  }
  __syncwarp();  // all lanes see the item
}
__device__ inline float beta_of(const Params& params, const Fetched& f, int i, int tokens_left) {
  if (2 * int(threadIdx.x % 32) + i >= tokens_left) return 0.f;
  return params.beta.data ? beta_value(params, number_of(f.beta[i], params.beta.dtype)) : 1.f;
}
// The same warp, later: beta and the parameters of gates per channel.
template <deltic_gate_form kForm>
__device__ inline void finish_item(Stage& stage, const Params& params, const Fetched& f) {
  const int lane = threadIdx.x % 32;
  if constexpr (kForm != DELTIC_GATE_LOG_DECAY) {
    const float slope = -gate_rate(number_of(f.a_log, params.a_log.dtype)) *
                        (kForm == DELTIC_GATE_BOUNDED ? kLog2e : 1.f);
    if (lane == 0) stage.slope = slope;
    const float by = kForm == DELTIC_GATE_BOUNDED ? slope : kLog2e;
    *reinterpret_cast<float4*>(&stage.bias[4 * lane]) =
        make_float4(number_of(f.bias[0], params.dt_bias.dtype) * by,
                    number_of(f.bias[1], params.dt_bias.dtype) * by,
                    number_of(f.bias[2], params.dt_bias.dtype) * by,
                    number_of(f.bias[3], params.dt_bias.dtype) * by);
  }
  *reinterpret_cast<float2*>(&stage.beta[2 * lane]) = make_float2(
      beta_of(params, f, 0, stage.item.tokens_left), beta_of(params, f, 1, stage.item.tokens_left));
}
// All lanes: what they wrote is there.
__device__ inline void arrive_item(uint64_t* raw_full) {
  barrier_arrive(raw_full);
  __syncwarp();
}

}  // namespace deltic::gpu::forward
