// What a carrying warpgroup has of a chunk and how it is told, and the ends of a job's part: where
// its state comes from, where it is kept and goes to, how o leaves.
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

}  // namespace deltic::gpu::forward
