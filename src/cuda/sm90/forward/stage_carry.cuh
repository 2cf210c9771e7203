// The state chain: a warpgroup carries 64 value columns of S (V x K, fp32 accumulators) through the
// chunks of its CTA's positions. All products are (value x .) accumulators, so a token's factor is
// a column's. Packets arrive by bulk copy from the ring; with gates per head k and q come as they
// are.
#pragma once
#include "cuda/ptx/async.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/sm90/forward/plan.cuh"
#include "cuda/sm90/forward/smem.h"

namespace deltic::gpu::forward {

// The second CTA of a transfer's carrier has M instead of values.
template <bool kTransfer>
__device__ inline bool is_identity() {
  return kTransfer && blockIdx.x % 2 == 1;
}
__device__ inline int num_positions(const Plan& plan, int carrier) {
  return max(0, min(plan.total - carrier * plan.steps, plan.steps));
}
template <GateKind kGate, bool kTransfer>
__device__ inline void init_carry_barriers(CarrySmem<kGate>& s) {
  for (int i = 0; i < kKeyStages; i++)
    barrier_init(&s.keys_full[i], 1), barrier_init(&s.keys_empty[i], 8);
  for (int i = 0; i < s.kRestStages; i++)
    barrier_init(&s.rest_full[i], 1), barrier_init(&s.rest_empty[i], 8);
  for (int i = 0; i < kValueStages; i++)  // freed by a thread that saw o leave, or by warps
    barrier_init(&s.v_full[i], 1), barrier_init(&s.v_empty[i], kTransfer ? 8 : 2);
}

struct CarryMaps {
  const CUtensorMap *q, *k, *v;
};
// One thread: packets, keys and values of every position of carrier i.
template <GateKind kGate, bool kTransfer>
__device__ inline void load_packets(CarrySmem<kGate>& s, const Params& params, const Plan& plan,
                                    CarryMaps maps, int carrier) {
  const int count = num_positions(plan, carrier);
  int token = 0, v_token = 0, batch = 0, head = 0, qk_head = 0, left = 0;
#pragma unroll 1
  for (int n = 0; n < count; n++) {
    if (left == 0) {  // the next job, or part of one
      const Place p = place_of(params, plan, carrier * plan.steps + n);
      const Piece* piece = params.pieces + p.piece;
      token = v_token = __ldg(&piece->token) + p.chunk * kChunk, batch = __ldg(&piece->batch);
      head = p.head;
      qk_head = divide(head, divide(params.num_value_heads, params.num_heads));
      left = p.end - p.begin;
      if (is_identity<kTransfer>()) v_token = 1 << 30;  // outside: zeros arrive
    }
    const int ks = n % kKeyStages, rs = n % s.kRestStages, vs = n % kValueStages;
    const int slot = n & (params.ring_slots - 1);
    auto* packet = reinterpret_cast<const Packet<kGate>*>(params.ring) +
                   int64_t(carrier) * params.ring_slots + slot;
    auto load_keys = [&] {
      barrier_wait(&s.keys_empty[ks], (n / kKeyStages & 1) ^ 1);
      barrier_expect(&s.keys_full[ks], 2 * kTile);
      if constexpr (kGate == GateKind::kChannel) {
        bulk_load(s.k[ks], packet->keys.k, kTile, &s.keys_full[ks]);
        bulk_load(s.q[ks], packet->keys.q, kTile, &s.keys_full[ks]);
      } else {
#pragma unroll
        for (int h = 0; h < 2; h++) {
          tensor_load<kEvictNormal>(s.k[ks] + h * kHalf, maps.k, 64 * h, qk_head, token, batch,
                                    &s.keys_full[ks]);
          tensor_load<kEvictNormal>(s.q[ks] + h * kHalf, maps.q, 64 * h, qk_head, token, batch,
                                    &s.keys_full[ks]);
        }
      }
    };
    if constexpr (kGate == GateKind::kHead) load_keys();
    barrier_wait(&s.v_empty[vs], (n / kValueStages & 1) ^ 1);
    barrier_expect(&s.v_full[vs], kTile);
    tensor_load(s.v[vs][0], maps.v, 0, head, v_token, batch, &s.v_full[vs]);
    tensor_load(s.v[vs][1], maps.v, 64, head, v_token, batch, &s.v_full[vs]);
    if (n > 1) {  // all of the packet before the last is here: its place in the ring is free
      const int m = n - 2;
      barrier_wait(&s.rest_full[m % s.kRestStages], (m / s.kRestStages) & 1);
      if constexpr (kGate == GateKind::kChannel)
        barrier_wait(&s.keys_full[m % kKeyStages], (m / kKeyStages) & 1);
      store_relaxed(consumed_flag(params, blockIdx.x), n - 1);
    }
    wait_flag<true>(ready_flag(params, carrier, slot), n + 1);
    fence_async_proxy_all();  // packets per channel are written by ordinary stores
    if constexpr (kGate == GateKind::kChannel) load_keys();
    barrier_wait(&s.rest_empty[rs], (n / s.kRestStages & 1) ^ 1);
    barrier_expect(&s.rest_full[rs], kRestBytes<kGate>);
    bulk_load(&s.rest[rs], &packet->rest, kRestBytes<kGate>, &s.rest_full[rs]);
    token += kChunk, v_token += kChunk, left--;
  }
}

__device__ inline int carry_tid() { return thread_index(); }
__device__ inline void warp_arrive(uint64_t* barrier) {
  __syncwarp();
  if (carry_tid() % 32 == 0) barrier_arrive(barrier);
}
// Lane's byte offset for ldmatrix / stmatrix of token groups 0, 1 in a 64 x 64 half tile of v or o.
__device__ inline uint32_t fragment_offset(int tid) {
  const int lane = tid % 32, token = (lane >> 4) * 8 + lane % 8;
  return swizzled(token, 2 * ((tid / 32) & 3) + ((lane >> 3) & 1));
}
// Factors of columns 16 i + 2 x, + 1, + 8, + 9 (factor_place).
__device__ inline float4 factors_at(const float* table, int i) {
  const int x = carry_tid() % 4;
  return *reinterpret_cast<const float4*>(table + 16 * x + ((4 * i) ^ (4 * (x / 2))));
}

// Rows past the sequence's end belong to someone else: replaced by zeros, not multiplied away.
template <GateKind kGate>
__device__ inline void clear_tail(CarrySmem<kGate>& s, int n, int rest) {
  const int tid = carry_tid(), row = tid % 128 / 2;
  barrier_wait(&s.v_full[n % kValueStages], (n / kValueStages) & 1);
  if (row >= rest) {
    uint8_t* v = s.v[n % kValueStages][tid / 128] + row * 128;
    uint8_t* k = s.k[n % kKeyStages] + row * 128;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int at = 4 * (tid % 2) + i;
      reinterpret_cast<uint4*>(v)[at] = uint4{0, 0, 0, 0};
      if constexpr (kGate == GateKind::kHead) {  // both warpgroups do, for their own products
        reinterpret_cast<uint4*>(k)[at] = uint4{0, 0, 0, 0};
        reinterpret_cast<uint4*>(k + kHalf)[at] = uint4{0, 0, 0, 0};
      }
    }
  }
  fence_async_proxy();
  named_sync(1 + tid / 128, 128);  // k and v of the warpgroup are clean
}

// o of chunk n, rounded, as the fragments that stmatrix takes.
template <GateKind kGate>
__device__ inline void round_output(const CarrySmem<kGate>& s, int n, const float (&o)[32],
                                    uint32_t (&r)[16]) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    float4 f = make_float4(1.f, 1.f, 1.f, 1.f);
    if constexpr (kGate == GateKind::kChannel)
      f = factors_at(s.rest[n % s.kRestStages].o_factor, i);
    r[4 * i] = pack_bf16(o[8 * i] * f.x, o[8 * i + 1] * f.y);
    r[4 * i + 1] = pack_bf16(o[8 * i + 2] * f.x, o[8 * i + 3] * f.y);
    r[4 * i + 2] = pack_bf16(o[8 * i + 4] * f.z, o[8 * i + 5] * f.w);
    r[4 * i + 3] = pack_bf16(o[8 * i + 6] * f.z, o[8 * i + 7] * f.w);
  }
}
// To the place of the chunk's values, and out. Frees the place of the chunk before.
template <GateKind kGate>
__device__ inline void store_output(CarrySmem<kGate>& s, int n, int rest, const Part& part,
                                    const uint32_t (&r)[16], const Params& params,
                                    const CUtensorMap* map) {
  const int tid = carry_tid(), wg = tid / 128;
  uint8_t* const tile = s.v[n % kValueStages][wg];
  const uint32_t ob = smem_u32(tile) + fragment_offset(tid);
#pragma unroll
  for (int i = 0; i < 4; i++)
    stmatrix_x4_trans(ob + i * 2048, *reinterpret_cast<const uint32_t(*)[4]>(&r[4 * i]));
  fence_async_proxy();
  if (tid % 128 == 0) {
    tensor_store_wait_read();
    if (n > 0) barrier_arrive(&s.v_empty[(n - 1) % kValueStages]);
  }
  named_sync(1 + wg, 128);  // the tile is complete
  if (rest >= kChunk) {
    if (tid % 128 == 0)
      tensor_store(map, tile, 64 * wg, reread(part.head), reread(part.token) + n * kChunk,
                   reread(part.batch));
  } else {
    const int row = tid % 128 / 2;
    if (row < rest) {
      const Output& o = params.o;
      auto* dst = o.data + part.batch * o.sb + int64_t(part.token + n * kChunk + row) * o.st +
                  part.head * o.sh + 64 * wg;
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int chunk16 = 4 * (tid % 2) + i;
        if (64 * wg + 8 * chunk16 < params.value_width)
          reinterpret_cast<uint4*>(dst)[chunk16] =
              *reinterpret_cast<uint4*>(tile + swizzled(row, chunk16));
      }
    }
    named_sync(1 + wg, 128);  // the tile has been read
  }
}

// The thread's elements of a state: rows (values) v, v + 8, columns (channels) k + 8 j, + 1.
struct StatePlace {
  int v, k;
  __device__ StatePlace()
      : v(16 * (carry_tid() / 32) + carry_tid() % 32 / 4), k(2 * (carry_tid() % 4)) {}
};
// States in the workspace: fp32, [V,K] of 128 x 128.
__device__ inline void load_state(const float* from, float (&S)[64]) {
  const StatePlace at;
#pragma unroll
  for (int i = 0; i < 32; i++) {
    const float2 f = __ldcg(reinterpret_cast<const float2*>(from + (at.v + (i & 1) * 8) * kWidth +
                                                            at.k + (i >> 1) * 8));
    S[2 * i] = f.x, S[2 * i + 1] = f.y;
  }
}
__device__ inline void store_state(float* to, const float (&S)[64]) {
  const StatePlace at;
#pragma unroll
  for (int i = 0; i < 32; i++)
    *reinterpret_cast<float2*>(to + (at.v + (i & 1) * 8) * kWidth + at.k + (i >> 1) * 8) =
        make_float2(S[2 * i], S[2 * i + 1]);
}
__device__ inline void start_state(float (&S)[64], bool is_identity) {
  const StatePlace at;
#pragma unroll
  for (int i = 0; i < 64; i++)
    S[i] = is_identity && at.v + (i >> 1 & 1) * 8 == at.k + (i >> 2) * 8 + (i & 1) ? 1.f : 0.f;
}
// The caller's, either layout, fp32 or bf16; what lies beyond its K and V is 0. One loop per type:
// a branch around each load would make them wait for one another.
template <class Element>
__device__ inline void load_given(const Element* from, const StateView& view, const Params& params,
                                  float (&S)[64]) {
  const StatePlace at;
#pragma unroll
  for (int i = 0; i < 64; i++) {
    const int v = at.v + (i >> 1 & 1) * 8, k = at.k + (i >> 2) * 8 + (i & 1);
    Element x = Element(0.f);
    if (v < params.value_width && k < params.key_width) x = from[k * view.s_k + v * view.s_v];
    S[i] = float(x);
  }
}
template <class Element>
__device__ inline void store_given(Element* to, const StateView& view, const Params& params,
                                   const float (&S)[64]) {
  const StatePlace at;
#pragma unroll
  for (int i = 0; i < 64; i++) {
    const int v = at.v + (i >> 1 & 1) * 8, k = at.k + (i >> 2) * 8 + (i & 1);
    if (v < params.value_width && k < params.key_width)
      to[k * view.s_k + v * view.s_v] = Element(S[i]);
  }
}
__device__ inline void load_given(const Params& params, int slot, int head, float (&S)[64]) {
  const StateView& view = params.state_in;
  const int64_t at = slot * view.s_slot + head * view.s_head;
  if (view.type == Number::kF32)
    load_given(static_cast<const float*>(view.data) + at, view, params, S);
  else
    load_given(static_cast<const __nv_bfloat16*>(view.data) + at, view, params, S);
}
__device__ inline void store_given(const Params& params, int slot, int head, const float (&S)[64]) {
  const StateView& view = params.state_out;
  const int64_t at = slot * view.s_slot + head * view.s_head;
  if (view.type == Number::kF32)
    store_given(static_cast<float*>(view.data) + at, view, params, S);
  else
    store_given(static_cast<__nv_bfloat16*>(view.data) + at, view, params, S);
}

constexpr int64_t kStateSize = kWidth * kWidth;
// The part of a job that begins at position n: where it is, and its state.
template <bool kTransfer>
__device__ inline void begin_part(Part& part, const Params& params, const Plan& plan, int n,
                                  float (&S)[64]) {
  constexpr int group = kTransfer ? 2 : 1;
  const Place p = place_of(params, plan, blockIdx.x / group * plan.steps + n);
  const Piece piece = params.pieces[p.piece];
  named_sync(1 + carry_tid() / 128, 128);  // nobody reads the part before any more
  if (carry_tid() % 128 == 0) {
    if (p.begin > 0) wait_flag<true>(handoff_flag(params, blockIdx.x + group), 2);
    part = {piece.token + (p.begin - n) * kChunk,
            piece.length - (p.begin - n) * kChunk,
            p.head,
            piece.batch,
            n,
            n + p.end - p.begin};
  }
  named_sync(1 + carry_tid() / 128, 128);  // the part is known
  if (p.begin > 0)                         // the state comes from the next carrier
    load_state(params.handoff + int64_t(blockIdx.x + group) * kStateSize, S);
  else if (kTransfer)
    start_state(S, is_identity<kTransfer>());
  else if (params.segment_chunks > 0)
    load_state(
        params.segment_state + (int64_t(p.piece) * params.num_value_heads + p.head) * kStateSize,
        S);
  else if (piece.read_slot >= 0)
    load_given(params, piece.read_slot, p.head, S);
  else
    start_state(S, false);
}
// The part whose last position is n: its state to the carrier before, or out.
template <bool kTransfer>
__device__ inline void end_part(const Params& params, const Plan& plan, int n,
                                const float (&S)[64]) {
  constexpr int group = kTransfer ? 2 : 1;
  const Place p = place_of(params, plan, blockIdx.x / group * plan.steps + n);
  if (p.end < p.count) {
    store_state(params.handoff + int64_t(blockIdx.x) * kStateSize, S);
    __threadfence();
    named_sync(1 + carry_tid() / 128, 128);
    if (carry_tid() % 128 == 0) atomicAdd(handoff_flag(params, blockIdx.x), 1u);
  } else if (kTransfer) {
    const int64_t which = is_identity<kTransfer>() ? params.max_pieces : 0;
    store_state(
        params.transfer + ((which + p.piece) * params.num_value_heads + p.head) * kStateSize, S);
  } else {
    const Piece* piece = params.pieces + p.piece;
    if (piece->is_last && piece->write_slot >= 0) store_given(params, piece->write_slot, p.head, S);
  }
}

// acc = what T is to be multiplied with, from k S in acc and v, as the operand of the next product.
template <GateKind kGate>
__device__ inline void subtract_from_values(const float* factor, const uint32_t (&v)[16],
                                            const float (&acc)[32], uint32_t (&av)[16]) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float4 f = factors_at(factor, i);
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const float fx = j < 2 ? f.x : f.z, fy = j < 2 ? f.y : f.w;
      const float lo = bf16_lo(v[4 * i + j]), hi = bf16_hi(v[4 * i + j]);
      const float x = acc[8 * i + 2 * j], y = acc[8 * i + 2 * j + 1];
      av[4 * i + j] = kGate == GateKind::kChannel ? pack_bf16(fmaf(lo, fx, -x), fmaf(hi, fy, -y))
                                                  : pack_bf16(fmaf(-x, fx, lo), fmaf(-y, fy, hi));
    }
  }
}
// The operand of the state's update: rows with decays to the end (per channel), or k as it is.
template <GateKind kGate>
__device__ inline uint64_t update_keys(CarrySmem<kGate>& s, int ks, int rs) {
  const uint8_t* tile;
  if constexpr (kGate == GateKind::kChannel)
    tile = s.rest[rs].kr;
  else
    tile = s.k[ks];
  return tile_desc(smem_u32(tile), kHalf, 1024);
}
template <GateKind kGate>
__device__ inline void decay_state(const float* decay, float (&S)[64]) {
  if constexpr (kGate == GateKind::kChannel) {
    const int x = carry_tid() % 4;
#pragma unroll
    for (int j = 0; j < 8; j++) {
      const float4 d = *reinterpret_cast<const float4*>(decay + 32 * x + ((4 * j) ^ (4 * x)));
      S[8 * j] *= d.x, S[8 * j + 1] *= d.y, S[8 * j + 2] *= d.x, S[8 * j + 3] *= d.y;
      S[8 * j + 4] *= d.z, S[8 * j + 5] *= d.w, S[8 * j + 6] *= d.z, S[8 * j + 7] *= d.w;
    }
  } else {
    const float d = *decay;
#pragma unroll
    for (int j = 0; j < 64; j++) S[j] *= d;
  }
}

// Gates per head: the two warpgroups take turns with the first half of a step (to the products with
// T and q): one has the tensor cores while the other converts. Named barriers 3 and 4: warpgroup 0,
// 1 is through.
__device__ inline void wait_turn(int n) {
  if (carry_tid() >= 128)
    named_sync(3, 256);
  else if (n > 0)
    named_sync(4, 256);
}
__device__ inline void pass_turn() { named_arrive(carry_tid() >= 128 ? 4 : 3, 256); }

// Two warpgroups: every position of the carrier. A step, and what runs beside the products:
//   k S           | o of the chunk before rounded; v to registers
//   T (v - k S)   | q S ; o of the chunk before out; S *= decay
//   S += k^T v_new| per head: q S times its factor
//   o = q S + Aqk v_new
template <GateKind kGate, bool kTransfer>
__device__ inline void carry_state(CarrySmem<kGate>& s, const Params& params,
                                   const CUtensorMap* map_o) {
  constexpr bool kIsHead = kGate == GateKind::kHead;
  constexpr int kRestStages = CarrySmem<kGate>::kRestStages;
  float S[64], acc[32], O[32] = {};
  uint32_t av[16];
  auto part = [&]() -> const Part& { return s.part[carry_tid() / 128]; };
  int n = 0;
#pragma unroll 1
  while (n < num_positions(*params.plan, blockIdx.x / (kTransfer ? 2 : 1))) {
    begin_part<kTransfer>(s.part[carry_tid() / 128], params, *params.plan, n, S);
#pragma unroll 1
    do {
      const int ks = n % kKeyStages, rs = n % kRestStages, vs = n % kValueStages;
      barrier_wait(&s.keys_full[ks], (n / kKeyStages) & 1);
      if (reread(part().rest) - n * kChunk < kChunk)
        clear_tail(s, n, reread(part().rest) - n * kChunk);
      const uint64_t kd = tile_desc(smem_u32(s.k[ks]), 16, 1024);
      const uint64_t qd = tile_desc(smem_u32(s.q[ks]), 16, 1024);
      uint32_t as[32];
#pragma unroll
      for (int i = 0; i < 32; i++) as[i] = pack_bf16(S[2 * i], S[2 * i + 1]);
      if constexpr (kIsHead) wait_turn(n);
      fence_operands(acc);
      wgmma_arrive();
#pragma unroll
      for (int j = 0; j < 8; j++)  // k S
        wgmma<__nv_bfloat16, Major::k>(acc, &as[4 * j], desc_at(kd, (j / 4) * kHalf + (j % 4) * 32),
                                       j > 0);
      wgmma_commit();
      barrier_wait(&s.v_full[vs], (n / kValueStages) & 1);
      uint32_t v[16], ob[16];
      {
        const uint32_t vb = smem_u32(s.v[vs][carry_tid() / 128]) + fragment_offset(carry_tid());
#pragma unroll
        for (int i = 0; i < 4; i++)
          ldmatrix_x4_trans(*reinterpret_cast<uint32_t(*)[4]>(&v[4 * i]), vb + i * 2048);
      }
      if constexpr (kTransfer)
        warp_arrive(&s.v_empty[vs]);
      else if (n > 0)
        round_output(s, n - 1, O, ob);  // not used if another job begins
      barrier_wait(&s.rest_full[rs], (n / kRestStages) & 1);
      auto& rest = s.rest[rs];
      const uint64_t td = tile_desc(smem_u32(rest.solved.t), 16, 1024);
      const uint64_t aq = tile_desc(smem_u32(rest.solved.aqk), 16, 1024);
      wgmma_wait<0>();
      fence_operands(acc);
      if constexpr (kIsHead)
        subtract_from_values<kGate>(rest.ks_factor, v, acc, av);
      else
        subtract_from_values<kGate>(rest.v_factor, v, acc, av);
      fence_operands(acc);
      wgmma_arrive();
#pragma unroll
      for (int j = 0; j < 4; j++)  // v_new
        wgmma<__nv_bfloat16, Major::k>(acc, &av[4 * j], desc_at(td, j * 32), j > 0);
      wgmma_commit();
      if constexpr (!kTransfer) {
        fence_operands(O);
        wgmma_arrive();
#pragma unroll
        for (int j = 0; j < 8; j++)  // q S
          wgmma<__nv_bfloat16, Major::k>(O, &as[4 * j], desc_at(qd, (j / 4) * kHalf + (j % 4) * 32),
                                         j > 0);
        wgmma_commit();
      }
      if constexpr (kIsHead) pass_turn();
      if constexpr (!kTransfer) {
        if (n > 0) warp_arrive(&s.rest_empty[(n - 1) % kRestStages]);
        if (n > reread(part().first)) store_output(s, n - 1, kChunk, part(), ob, params, map_o);
      }
      decay_state<kGate>(rest.decay, S);
      uint32_t h[8];
      if constexpr (kIsHead) {
        const uint4* t = reinterpret_cast<const uint4*>(rest.v_new_factor) + 2 * (carry_tid() % 4);
        const uint4 a = t[0], b = t[1];
        h[0] = a.x, h[1] = a.y, h[2] = a.z, h[3] = a.w;
        h[4] = b.x, h[5] = b.y, h[6] = b.z, h[7] = b.w;
      }
      wgmma_wait<kTransfer ? 0 : 1>();
      fence_operands(acc);
      uint32_t ah[16];  // v_new with the decays to the chunk's end
#pragma unroll
      for (int i = 0; i < 16; i++) {
        av[i] = pack_bf16(acc[2 * i], acc[2 * i + 1]);
        ah[i] = kIsHead ? mul_bf16x2(av[i], h[i / 2]) : av[i];
      }
      fence_operands(S);
      wgmma_arrive();
      const uint64_t kr = update_keys(s, ks, rs);
#pragma unroll
      for (int j = 0; j < 4; j++)  // S += (k with decays to the end)^T v_new
        wgmma<__nv_bfloat16, Major::mn>(S, &ah[4 * j], desc_at(kr, j * 2048));
      wgmma_commit();
      if constexpr (!kTransfer) {
        if constexpr (kIsHead) {
          wgmma_wait<1>();
          fence_operands(O);
#pragma unroll
          for (int i = 0; i < 4; i++) {
            const float4 f = factors_at(rest.qs_factor, i);
            O[8 * i] *= f.x, O[8 * i + 1] *= f.y, O[8 * i + 2] *= f.x, O[8 * i + 3] *= f.y;
            O[8 * i + 4] *= f.z, O[8 * i + 5] *= f.w, O[8 * i + 6] *= f.z, O[8 * i + 7] *= f.w;
          }
        }
        fence_operands(O);
        wgmma_arrive();
#pragma unroll
        for (int j = 0; j < 4; j++)  // o
          wgmma<__nv_bfloat16, Major::k>(O, &av[4 * j], desc_at(aq, j * 32));
        wgmma_commit();
      }
      wgmma_wait<0>();
      fence_operands(S);
      fence_operands(O);
      warp_arrive(&s.keys_empty[n % kKeyStages]);
      if constexpr (kTransfer) warp_arrive(&s.rest_empty[n % kRestStages]);
      n++;
    } while (n < reread(part().end));
    if constexpr (!kTransfer) {
      uint32_t ob[16];
      round_output(s, n - 1, O, ob);
      store_output(s, n - 1, part().rest - (n - 1) * kChunk, part(), ob, params, map_o);
    }
    end_part<kTransfer>(params, *params.plan, n - 1, S);
  }
  if (kIsHead && n > 0 && carry_tid() < 128)
    named_sync(4, 256);  // what the other warpgroup passed last
  if (carry_tid() % 128 == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

}  // namespace deltic::gpu::forward
