// The state chain: a warpgroup carries 64 value columns of S (V x K, fp32 accumulators) through the
// chunks of its CTA's positions. All products are (value x .) accumulators, so a token's factor is
// a column's. Packets arrive by bulk copy from the ring; with gates per head k and q come as they
// are.
#pragma once
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/flags.cuh"
#include "cuda/ptx/numbers.cuh"
#include "cuda/ptx/registers.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/sm90/forward/stage_move.cuh"
#include "cuda/sm90/forward/stage_states.cuh"

namespace deltic::gpu::forward {

__device__ inline void sync_warpgroup(int tid) {
  named_sync(kCarryBarrier + tid / kWarpgroup, kWarpgroup);
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
// All of the thread's, to be loaded before a product is waited for.
struct Factors {
  float4 f[4];
};
__device__ inline Factors load_factors(const float* table) {
  Factors r;
#pragma unroll
  for (int i = 0; i < 4; i++) r.f[i] = factors_at(table, i);
  return r;
}

// --- what a carrier of packets has of a chunk, and how it is told; fused ones: smem_fused.cuh
// ------
template <GateKind kGate>
__device__ inline bool has_job(const CarrySmem<kGate>& s, const Params& params, int, int n) {
  return n < num_positions(s.seat.plan, carrier_of(s, params));
}
template <GateKind kGate>
__device__ inline int parts_of(const CarrySmem<kGate>& s) {
  return reread(s.seat.plan.parts);
}
template <GateKind kGate>
__device__ inline int seat_of(const CarrySmem<kGate>& s) {
  return reread(s.seat.index);
}
template <GateKind kGate>
__device__ inline uint8_t* keys_of(CarrySmem<kGate>& s, int n) {
  return s.k[n % kKeyStages];
}
template <GateKind kGate>
__device__ inline const uint8_t* queries_of(const CarrySmem<kGate>& s, int n) {
  return s.q[n % s.kQueryStages];
}
// The operand of the state's update: rows with decays to the end (per channel), or k as it is.
template <GateKind kGate>
__device__ inline const uint8_t* update_keys(const CarrySmem<kGate>& s, int n) {
  if constexpr (kGate == GateKind::kChannel)
    return s.body[n % s.kBodyStages].kr;
  else
    return s.k[n % kKeyStages];
}
template <GateKind kGate>
__device__ inline const uint8_t* inverse_of(const CarrySmem<kGate>& s, int n) {
  return s.body[n % s.kBodyStages].solved.t;
}
template <GateKind kGate>
__device__ inline const uint8_t* scores_of(const CarrySmem<kGate>& s, int n) {
  return s.body[n % s.kBodyStages].solved.aqk;
}
template <GateKind kGate>
__device__ inline const auto& factors_of(const CarrySmem<kGate>& s, int n) {
  if constexpr (kGate == GateKind::kChannel)
    return s.body[n % s.kBodyStages];
  else
    return s.body[n % s.kBodyStages].factors;
}
template <GateKind kGate>
__device__ inline void wait_keys(CarrySmem<kGate>& s, int n) {
  barrier_wait(&s.keys_full[n % kKeyStages], (n / kKeyStages) & 1);
}
template <GateKind kGate>
__device__ inline void wait_body(CarrySmem<kGate>& s, int n) {
  barrier_wait(&s.body_full[n % s.kBodyStages], (n / s.kBodyStages) & 1);
}
// The warpgroup is through with the chunk.
template <GateKind kGate>
__device__ inline void free_chunk(CarrySmem<kGate>& s, int n) {
  if constexpr (kGate == GateKind::kHead) warp_arrive(&s.keys_empty[n % kKeyStages]);
  lanes_arrive(&s.body_empty[n % s.kBodyStages]);
}

// Which 64 value columns are this warpgroup's.
template <class Smem>
__device__ inline int value_half(const Smem& s) {
  return reread(s.first_half) + carry_tid() / kWarpgroup;
}
// Is the warpgroup the only one of its CTA that carries?
template <class Smem>
__device__ inline bool is_alone(const Smem& s, const Params& params) {
  return num_carrying(params, parts_of(s)) == 1;
}

// Rows past the sequence's end belong to someone else: replaced by zeros, not multiplied away. Of
// keys (per head) each of two warpgroups clears one half of the channels, and both wait.
template <GateKind kGate, class Smem>
__device__ inline void clear_tail(Smem& s, const Params& params, int n, int tokens_left) {
  // Keys with decays in them have no such rows; of a fused CTA the scores have cleared them.
  constexpr bool kHasKeys = kGate == GateKind::kHead && !Smem::kIsFused;
  const int tid = carry_tid(), row = tid % kWarpgroup / 2;
  const bool alone = is_alone(s, params);
  if constexpr (!kHasKeys) barrier_wait(&s.v_full[n % s.kValues], (n / s.kValues) & 1);
  if (row >= tokens_left) {
    auto* v = reinterpret_cast<uint4*>(s.v[n % s.kValues][tid / kWarpgroup] + row * 128);
    auto* k = reinterpret_cast<uint4*>(keys_of(s, n) + tid / kWarpgroup * kHalfBytes + row * 128);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      v[4 * (tid % 2) + i] = uint4{0, 0, 0, 0};
      if constexpr (kHasKeys) {
        k[4 * (tid % 2) + i] = uint4{0, 0, 0, 0};
        if (alone) k[kHalfBytes / 16 + 4 * (tid % 2) + i] = uint4{0, 0, 0, 0};
      }
    }
  }
  if constexpr (kHasKeys) {
    fence_async_proxy();
    named_sync(kCleanBarrier, alone ? kWarpgroup : 2 * kWarpgroup);  // k and v are clean
  } else {
    sync_warpgroup(tid);  // v of the warpgroup is clean
  }
}

// o of chunk n, rounded, as the fragments that stmatrix takes.
template <class E, GateKind kGate, class Smem>
__device__ inline void round_output(const Smem& s, int n, const float (&o)[32], uint32_t (&r)[16]) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    float4 f = make_float4(1.f, 1.f, 1.f, 1.f);
    if constexpr (kGate == GateKind::kChannel)
      f = factors_at(s.o_factor[n % (s.kBodyStages + 1)], i);
    r[4 * i] = pack_result<E>(o[8 * i] * f.x, o[8 * i + 1] * f.y);
    r[4 * i + 1] = pack_result<E>(o[8 * i + 2] * f.x, o[8 * i + 3] * f.y);
    r[4 * i + 2] = pack_result<E>(o[8 * i + 4] * f.z, o[8 * i + 5] * f.w);
    r[4 * i + 3] = pack_result<E>(o[8 * i + 6] * f.z, o[8 * i + 7] * f.w);
  }
}
// To the place of the chunk's values.
template <class Smem>
__device__ inline void put_output(Smem& s, int n, const uint32_t (&r)[16]) {
  const uint32_t to =
      smem_u32(s.v[n % s.kValues][carry_tid() / kWarpgroup]) + fragment_offset(carry_tid());
#pragma unroll
  for (int i = 0; i < 4; i++)
    stmatrix_x4_trans(to + i * 2048, *reinterpret_cast<const uint32_t(*)[4]>(&r[4 * i]));
}
// Whence it is copied out; a chunk that is not whole leaves from here.
template <class Smem>
__device__ inline void release_output(Smem& s, int n, int tokens_left, const Part& part,
                                      const Params& params) {
  if (tokens_left < kChunk) {
    const int tid = carry_tid(), wg = tid / kWarpgroup;
    const uint8_t* const tile = s.v[n % s.kValues][wg];
    sync_warpgroup(tid);  // the tile is complete
    const int row = tid % kWarpgroup / 2, first = 64 * value_half(s);
    if (row < tokens_left) {
      const Output& o = params.o;
      auto* dst = o.data + part.batch * o.sb + int64_t(part.token + n * kChunk + row) * o.st +
                  part.head * o.sh + first;
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int chunk16 = 4 * (tid % 2) + i;
        if (first + 8 * chunk16 < params.value_width)
          reinterpret_cast<uint4*>(dst)[chunk16] =
              *reinterpret_cast<const uint4*>(tile + swizzled(row, chunk16));
      }
    }
  }
  fence_async_proxy();
  warp_arrive(&s.o_full[n % s.kValues]);
}

// A warp: the first position from n on before which the state is kept. chunk, own_chunk: as in
// Part.
__device__ inline int next_stop(const Params& params, int chunk, int own_chunk, int n, int end) {
  if (params.saved) {
    const int every = int(params.saved_layout.segment), at = max(own_chunk + n, 1);
    end = min(end, (at + every - 1) / every * every - own_chunk);
  }
  if (params.ckpt.count == 0) return end;
  const int lane = carry_tid() % 32;
#pragma unroll 1
  for (; n < end; n += 128) {
    unsigned found[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int at = n + 32 * i + lane;
      found[i] = at < end ? params.ckpt.chunk_stash[chunk + at] >= 0 : 0;
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
      if (const unsigned which = __ballot_sync(~0u, found[i])) return n + 32 * i + __ffs(which) - 1;
  }
  return end;
}
// A warpgroup: the state before position n, a stop, to where it is kept.
__device__ inline void keep_state(Part& part, const Params& params, int n, int half,
                                  const float (&S)[64]) {
  const int chunk = reread(part.chunk), own_chunk = reread(part.own_chunk);
  const SavedLayout& layout = params.saved_layout;
#pragma unroll 1
  for (int i = 0; i < 2; i++) {  // one code for both
    const bool is_saved = i > 0;
    float* to = nullptr;
    if (is_saved) {
      if (params.saved && own_chunk + n > 0 && (own_chunk + n) % int(layout.segment) == 0)
        to = saved_state(layout, params.saved, params.num_value_heads,
                         saved_slot(layout, reread(part.batch), reread(part.token) + n * kChunk),
                         reread(part.head));
    } else if (params.ckpt.count > 0) {
      const int place = params.ckpt.chunk_stash[chunk + n];
      if (place >= 0) to = stash_at(params, place, reread(part.head));
    }
    if (to)
      store_rows(to, half, is_saved ? layout.rows : kWidth, is_saved ? layout.width : kWidth, S);
  }
  const int next = next_stop(params, chunk, own_chunk, n + 1, reread(part.end));
  sync_warpgroup(carry_tid());  // all have seen this stop
  if (carry_tid() % kWarpgroup == 0) part.stop = next;
  sync_warpgroup(carry_tid());  // the next one is known
}

// What is special about position n.
enum StepKind { kIsInside = 1, kIsStop = 2, kIsShort = 4, kIsFirst = 8 };
__device__ inline int step_kind(const Part& part, int n) {
  const int4 x = load_shared_int4(smem_u32(&part));
  return (n < x.x ? kIsInside : 0) | (n == x.y ? kIsStop : 0) | (n >= x.z ? kIsShort : 0) |
         (n == x.w ? kIsFirst : 0);
}

// The part of a job that begins at position n: where it is, and its state.
template <bool kTransfer, class Smem>
__device__ inline void begin_part(Smem& s, const Params& params, int job, int n, float (&S)[64]) {
  const int parts = parts_of(s), half = value_half(s);
  const int from = seat_of(s) + group_of(params, parts);  // who carried the job before
  Part& part = s.part[carry_tid() / kWarpgroup];
  const auto [p, piece] = job_at(s, job);
  const int end = n + p.end - p.begin, chunk = p.first_chunk + p.begin - n;
  const int own_chunk = piece.first_chunk + p.begin - n;
  const int stop = kTransfer ? end : next_stop(params, chunk, own_chunk, n, end);
  sync_warpgroup(carry_tid());  // nobody reads the part before any more
  const bool is_handed_on = !Smem::kIsFused && p.begin > 0;
  if (carry_tid() % kWarpgroup == 0) {
    if (is_handed_on) wait_flag(handoff_flag(params, from), num_carrying(params, parts));
    const int tokens_left = piece.length - (p.begin - n) * kChunk;
    part = {end,         stop,   tokens_left / kChunk, n,     piece.token + (p.begin - n) * kChunk,
            tokens_left, p.head, piece.batch,          chunk, own_chunk,
            job};
  }
  sync_warpgroup(carry_tid());  // the part is known
  if (is_handed_on)             // the state comes from the next carrier
    load_state(params.handoff + int64_t(from) * kStateSize, half, S);
  else if (kTransfer)
    start_state(half, is_identity<kTransfer>(s), S);
  else if (params.split_chunks > 0)
    load_state(
        params.segment_state + (int64_t(p.piece) * params.num_value_heads + p.head) * kStateSize,
        half, S);
  else if (piece.read_slot >= 0)
    load_given(params, piece.read_slot, p.head, half, S);
  else
    start_state(half, false, S);
}
// The end of a job's part: its state to the carrier before, or out.
template <bool kTransfer, class Smem>
__device__ inline void end_part(Smem& s, const Params& params, int job, const float (&S)[64]) {
  const int index = seat_of(s), half = value_half(s);
  const auto [p, piece] = job_at(s, job);
  if (!Smem::kIsFused && p.end < p.count) {
    store_state(params.handoff + int64_t(index) * kStateSize, half, S);
    sync_warpgroup(carry_tid());  // all of the warpgroup's rows are written
    if (carry_tid() % kWarpgroup == 0) add_release(handoff_flag(params, index), 1u);
  } else if (kTransfer && piece.is_short) {  // E alone is the state of the piece behind it
    if (!is_identity<kTransfer>(s))
      store_state(params.segment_state +
                      (int64_t(p.piece + 1) * params.num_value_heads + p.head) * kStateSize,
                  half, S);
  } else if (kTransfer) {
    const int64_t which = is_identity<kTransfer>(s) ? params.max_pieces : 0;
    store_state(
        params.transfer + ((which + p.piece) * params.num_value_heads + p.head) * kStateSize, half,
        S);
  } else {
    if (piece.is_last && piece.write_slot >= 0)
      store_given(params, piece.write_slot, p.head, half, S);
    if (piece.end_stash >= 0) store_state(stash_at(params, piece.end_stash, p.head), half, S);
  }
}

// What T is to be multiplied with, from k S in acc and v, as the operand of the next product. The
// factor is of v, or of k S.
template <class E, bool kOfValues>
__device__ inline void subtract_from_values(const Factors& factors, const uint32_t (&v)[16],
                                            const float (&acc)[32], uint32_t (&av)[16]) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float4 f = factors.f[i];
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const float fx = j < 2 ? f.x : f.z, fy = j < 2 ? f.y : f.w;
      const auto [lo, hi] = unpack<E>(v[4 * i + j]);
      const float x = acc[8 * i + 2 * j], y = acc[8 * i + 2 * j + 1];
      av[4 * i + j] = kOfValues ? pack<E>(fmaf(lo, fx, -x), fmaf(hi, fy, -y))
                                : pack<E>(fmaf(-x, fx, lo), fmaf(-y, fy, hi));
    }
  }
}
__device__ inline const float* v_factor(const HeadFactors& factors) { return factors.ks_factor; }
__device__ inline const float* v_factor(const Packet<GateKind::kChannel>::Body& body) {
  return body.v_factor;
}
__device__ inline const float* new_factor(const HeadFactors& factors) { return factors.new_factor; }
__device__ inline const float* new_factor(const Packet<GateKind::kChannel>::Body& body) {
  return body.new_factor;
}
// Columns (tokens) times their factors.
__device__ inline void multiply_columns(const Factors& factors, float (&x)[32]) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float4 f = factors.f[i];
    x[8 * i] *= f.x, x[8 * i + 1] *= f.y, x[8 * i + 2] *= f.x, x[8 * i + 3] *= f.y;
    x[8 * i + 4] *= f.z, x[8 * i + 5] *= f.w, x[8 * i + 6] *= f.z, x[8 * i + 7] *= f.w;
  }
}
__device__ inline void decay_state(const Packet<GateKind::kChannel>::Body& body, float (&S)[64]) {
  const int x = carry_tid() % 4;
#pragma unroll
  for (int j = 0; j < 8; j++) {
    const float4 d = *reinterpret_cast<const float4*>(body.decay + 32 * x + ((4 * j) ^ (4 * x)));
    S[8 * j] *= d.x, S[8 * j + 1] *= d.y, S[8 * j + 2] *= d.x, S[8 * j + 3] *= d.y;
    S[8 * j + 4] *= d.z, S[8 * j + 5] *= d.w, S[8 * j + 6] *= d.z, S[8 * j + 7] *= d.w;
  }
}
__device__ inline void decay_state(const HeadFactors& factors, float (&S)[64]) {
  const float d = factors.decay;
#pragma unroll
  for (int j = 0; j < 64; j++) S[j] *= d;
}

// Rounded values with the decays to the chunk's end (bf16), as if the factors had fp32's precision.
__device__ inline void decay_values(const HeadFactors& factors, const uint32_t (&av)[16],
                                    uint32_t (&ah)[16]) {
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int at = 2 * (carry_tid() % 4) + i;
    const uint4 high = reinterpret_cast<const uint4*>(factors.v_new_factor[0])[at];
    const uint4 low = reinterpret_cast<const uint4*>(factors.v_new_factor[1])[at];
    const uint32_t h[4] = {high.x, high.y, high.z, high.w}, l[4] = {low.x, low.y, low.z, low.w};
#pragma unroll
    for (int j = 0; j < 8; j++)
      ah[8 * i + j] = fma_bf16x2(av[8 * i + j], h[j / 2],
                                 multiply_packed<__nv_bfloat16>(av[8 * i + j], l[j / 2]));
  }
}
// fp16: what v_new is multiplied with for the state, 1/|k| and perhaps decays to the chunk's end.
__device__ inline const float* update_factor(const HeadFactors& factors) {
  return reinterpret_cast<const float*>(factors.v_new_factor);
}
__device__ inline const float* update_factor(const Packet<GateKind::kChannel>::Body& body) {
  return body.v_factor;
}
// fp16: rounded values times their factors, rounded again.
__device__ inline void decay_values(const float* factor, const uint32_t (&av)[16],
                                    uint32_t (&ah)[16]) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float4 f = factors_at(factor, i);
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const auto [x, y] = unpack<__half>(av[4 * i + j]);
      ah[4 * i + j] = pack<__half>(x * (j < 2 ? f.x : f.z), y * (j < 2 ? f.y : f.w));
    }
  }
}

// Gates per head: the two warpgroups take turns with the first half of a step (to the products with
// T and q): one has the tensor cores while the other converts.
__device__ inline void wait_turn(int n) {
  if (carry_tid() >= kWarpgroup)
    named_sync(kTurnBarrier, 2 * kWarpgroup);
  else if (n > 0)
    named_sync(kTurnBarrier + 1, 2 * kWarpgroup);
}
__device__ inline void pass_turn() {
  named_arrive(carry_tid() >= kWarpgroup ? kTurnBarrier + 1 : kTurnBarrier, 2 * kWarpgroup);
}

// acc = S (as operand) times a tile of keys or queries, under way on return.
// kHalf: bytes from one half of the channels to the other.
template <class E, int kHalf>
__device__ inline void multiply_state(const uint32_t (&as)[32], const uint8_t* tile,
                                      float (&acc)[32]) {
  const uint64_t desc = tile_desc(smem_u32(tile), 16, 1024);
  fence_operands(acc);
  wgmma_arrive();
#pragma unroll
  for (int j = 0; j < 8; j++)
    wgmma<E, Major::k>(acc, &as[4 * j], desc_at(desc, (j / 4) * kHalf + (j % 4) * 32), j > 0);
  wgmma_commit();
}
// acc (+)= a times a 64 x 64 tile, under way on return.
template <class E>
__device__ inline void multiply_tokens(const uint32_t (&a)[16], const uint8_t* tile, bool keep,
                                       float (&acc)[32]) {
  const uint64_t desc = tile_desc(smem_u32(tile), 16, 1024);
  fence_operands(acc);
  wgmma_arrive();
#pragma unroll
  for (int j = 0; j < 4; j++)
    wgmma<E, Major::k>(acc, &a[4 * j], desc_at(desc, j * 32), keep || j > 0);
  wgmma_commit();
}

// S += (k with decays to the end)^T v_new, under way on return.
template <class E, int kHalf>
__device__ inline void add_to_state(const uint32_t (&a)[16], const uint8_t* tile, float (&S)[64]) {
  fence_operands(S);
  wgmma_arrive();
  const uint64_t keys = tile_desc(smem_u32(tile), kHalf, 1024);
#pragma unroll
  for (int j = 0; j < 4; j++) wgmma<E, Major::mn>(S, &a[4 * j], desc_at(keys, j * 2048));
  wgmma_commit();
}

// One or two warpgroups: every position of the carrier. A step, and what runs beside the products:
//   k S           | o of the chunk before rounded; v to registers
//   T (v - k S)   | q S ; o of the chunk before out; S *= decay
//   v_new times its factor
//   S += k^T v_new| per head: q S times its factor
//   o = q S + Aqk v_new
template <class E, GateKind kGate, bool kTransfer>
__device__ inline void carry_state(CarrySmem<kGate>& s, const Params& params) {
  constexpr bool kIsHead = kGate == GateKind::kHead, kHasOutput = !kTransfer;
  float S[64], acc[32], O[32] = {};
  uint32_t av[16];
  auto part = [&]() -> const Part& { return s.part[carry_tid() / kWarpgroup]; };
  const bool alone = is_alone(s, params);
  int n = 0, job = 0;
#pragma unroll 1
  while (has_job(s, params, job, n)) {
    begin_part<kTransfer>(s, params, job, n, S);
    int kind = step_kind(part(), n);
#pragma unroll 1
    do {
      const int now = n, vs = n % kValueStages;
      if (!kTransfer && kind & kIsStop)
        keep_state(s.part[carry_tid() / kWarpgroup], params, n, value_half(s), S);
      wait_keys(s, n);
      if (kind & kIsShort) clear_tail<kGate>(s, params, n, reread(part().tokens_left) - n * kChunk);
      uint32_t as[32];
#pragma unroll
      for (int i = 0; i < 32; i++) as[i] = pack<E>(S[2 * i], S[2 * i + 1]);
      if (kIsHead && !alone) wait_turn(n);
      multiply_state<E, kHalfBytes>(as, keys_of(s, n), acc);
      if constexpr (!kIsHead) barrier_wait(&s.v_full[vs], (n / kValueStages) & 1);
      uint32_t v[16], ob[16];
      {
        const uint32_t at =
            smem_u32(s.v[vs][carry_tid() / kWarpgroup]) + fragment_offset(carry_tid());
#pragma unroll
        for (int i = 0; i < 4; i++)
          ldmatrix_x4_trans(*reinterpret_cast<uint32_t(*)[4]>(&v[4 * i]), at + i * 2048);
      }
      if constexpr (kTransfer) {
        warp_arrive(&s.v_empty[vs]);
      } else if (!(kind & kIsFirst)) {
        round_output<E, kGate>(s, n - 1, O, ob);
        put_output(s, n - 1, ob);
      }
      wait_body(s, n);
      const auto& body = factors_of(s, n);
      {
        const Factors factors = load_factors(v_factor(body));
        wgmma_wait<0>();
        fence_operands(acc);
        subtract_from_values<E, !kIsHead && !kIsHalf<E>>(factors, v, acc, av);
      }
      multiply_tokens<E>(av, inverse_of(s, n), false, acc);  // v_new
      if constexpr (kHasOutput) multiply_state<E, kHalfBytes>(as, queries_of(s, n), O);
      if (kIsHead && !alone) pass_turn();
      if constexpr (kHasOutput) {
        if (!(kind & kIsFirst)) release_output(s, n - 1, kChunk, part(), params);
      }
      decay_state(body, S);
      {
        constexpr bool kHasFactor = kIsHead || !kIsHalf<E>;
        Factors factors;
        if constexpr (kHasFactor) factors = load_factors(new_factor(body));
        wgmma_wait<kHasOutput ? 1 : 0>();
        fence_operands(acc);
        if constexpr (kHasFactor) multiply_columns(factors, acc);
      }
#pragma unroll
      for (int i = 0; i < 16; i++) av[i] = pack<E>(acc[2 * i], acc[2 * i + 1]);
      uint32_t ah[16];  // v_new with the decays to the chunk's end
      if constexpr (kIsHalf<E>) {
        decay_values(update_factor(body), av, ah);
      } else if constexpr (kIsHead) {
        decay_values(body, av, ah);
      } else {
#pragma unroll
        for (int i = 0; i < 16; i++) ah[i] = av[i];
      }
      add_to_state<E, kHalfBytes>(ah, update_keys(s, n), S);
      if constexpr (kHasOutput) {
        if constexpr (kIsHead) {
          const Factors factors = load_factors(body.qs_factor);
          wgmma_wait<1>();
          fence_operands(O);
          multiply_columns(factors, O);
        }
        multiply_tokens<E>(av, scores_of(s, n), true, O);
      }
      n++;
      kind = step_kind(part(), n);
      wgmma_wait<0>();
      fence_operands(S);
      fence_operands(O);
      free_chunk(s, now);
    } while (kind & kIsInside);
    if constexpr (kHasOutput) {  // the part's last chunk, perhaps not a whole one
      uint32_t ob[16];
      round_output<E, kGate>(s, n - 1, O, ob);
      put_output(s, n - 1, ob);
      release_output(s, n - 1, part().tokens_left - (n - 1) * kChunk, part(), params);
    }
    end_part<kTransfer>(s, params, job++, S);
  }
  if (kIsHead && !alone && n > 0 && carry_tid() < kWarpgroup)
    named_sync(kTurnBarrier + 1, 2 * kWarpgroup);  // what the other warpgroup passed last
}

}  // namespace deltic::gpu::forward
