// What a carrying CTA's other threads do: one brings packets, one frees their places in the ring,
// one brings inputs, one takes o away. Barriers of the carrier, and its jobs as they come.
#pragma once
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/bulk.cuh"
#include "cuda/ptx/flags.cuh"
#include "cuda/ptx/registers.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/sm90/forward/smem.h"

namespace deltic::gpu::forward {

__device__ inline void warp_arrive(uint64_t* barrier) {
  __syncwarp();
  if (thread_index() % 32 == 0) barrier_arrive(barrier);
}
// Every lane, where ordinary reads come before: of one that arrives for its warp the race checker
// knows that lane alone.
__device__ inline void lanes_arrive(uint64_t* barrier) {
  barrier_arrive(barrier);
  __syncwarp();
}

// The second state of a transfer's carrier is M, without values.
template <bool kTransfer, class Smem>
__device__ inline bool is_identity(const Smem& s) {
  return kTransfer && reread(s.seat.index) / reread(s.seat.plan.parts) % 2 == 1;
}
// Which of the carriers this CTA is, or one of its group.
template <class Smem>
__device__ inline int carrier_of(const Smem& s, const Params& params) {
  return reread(s.seat.index) / group_of(params, reread(s.seat.plan.parts));
}
template <GateKind kGate, bool kTransfer>
__device__ inline void init_carry_barriers(CarrySmem<kGate>& s, int warpgroups) {
  for (int i = 0; i < kKeyStages; i++)
    barrier_init(&s.keys_full[i], 1), barrier_init(&s.keys_empty[i], kWarpgroupWarps * warpgroups);
  for (int i = 0; i < s.kBodyStages; i++)  // read by lanes, and seen by the thread of free_places
    barrier_init(&s.body_full[i], 1), barrier_init(&s.body_empty[i], kWarpgroup * warpgroups + 1);
  for (int i = 0; i < kValueStages; i++)  // freed by the thread that saw o leave, or by warps
    barrier_init(&s.v_full[i], 1),
        barrier_init(&s.v_empty[i], kTransfer ? kWarpgroupWarps * warpgroups : 1),
        barrier_init(&s.o_full[i], kWarpgroupWarps * warpgroups);
  for (int i = 0; i < s.kJobs; i++) barrier_init(&s.job_full[i], 1);
}

// Who is told of values: gates per channel have a barrier for them, per head they come with the
// keys.
template <GateKind kGate>
__device__ inline uint64_t* values_full(CarrySmem<kGate>& s, int n) {
  return kGate == GateKind::kChannel ? &s.v_full[n % kValueStages] : &s.keys_full[n % kKeyStages];
}
// Rows of the chunk at position n, whose place is free.
template <GateKind kGate>
__device__ inline void load_values(CarrySmem<kGate>& s, const CUtensorMap* map, int n,
                                   int warpgroups, int head, int token, int batch) {
  for (int i = 0; i < warpgroups; i++)
    tensor_load(s.v[n % kValueStages][i], map, 64 * (s.first_half + i), head, token, batch,
                values_full(s, n));
}
constexpr int kOutside = 1 << 30;  // a token in no tensor: zeros arrive

struct CarryMaps {
  const CUtensorMap *q, *k, *v;
};
__device__ inline Place place_of(const Params& params, const Plan& plan, int position) {
  return locate(plan, params.chunk_prefix, opaque(params.num_value_heads), position);
}
// The carrier's job of this number.
template <class Smem>
__device__ inline const Job& job_at(Smem& s, int job) {
  barrier_wait(&s.job_full[job % s.kJobs], job / s.kJobs & 1);
  return s.job[job % s.kJobs];
}
// The job's given state to L2, if it is so many bytes in a row; 0: it is not.
__device__ inline void fetch_state(const Params& params, const Job& j, int bytes) {
  if (j.piece.read_slot < 0 || bytes == 0) return;
  const StateView& view = params.state_in;
  const auto* const state = static_cast<const uint16_t*>(view.data) +
                            ((j.piece.read_slot * view.s_slot + j.place.head * view.s_head)
                             << (view.dtype == DType::f32));
  if (reinterpret_cast<uintptr_t>(state) % 16 == 0) bulk_prefetch(state, bytes);
}
// One thread: the job that begins at position n, for all others; returns where the next one begins.
// Lookups in memory take long, and so do states that come from there.
template <GateKind kGate, bool kTransfer>
__device__ inline int find_job(CarrySmem<kGate>& s, const Params& params, int carrier, int job,
                               int n) {
  Job& j = s.job[job % s.kJobs];
  j.place = place_of(params, s.seat.plan, carrier * s.seat.plan.steps + n);
  j.piece = params.pieces[j.place.piece];
  barrier_arrive(&s.job_full[job % s.kJobs]);
  if (!kTransfer && j.place.begin == 0) fetch_state(params, j, s.state_bytes);
  return n + j.place.end - j.place.begin;
}
// The carrier's positions one after the other, for a thread that follows them.
template <GateKind kGate>
struct Walk {
  int token = 0, tokens_left = 0, batch = 0, head = 0;  // tokens_left: of the job from here on
  int left = 0, job = 0;
  __device__ void step(CarrySmem<kGate>& s) {
    token += kChunk, tokens_left -= kChunk;
    if (left-- > 0) return;
    const Job& j = job_at(s, job++);
    token = j.piece.token + j.place.begin * kChunk, batch = j.piece.batch;
    tokens_left = j.piece.length - j.place.begin * kChunk;
    head = j.place.head, left = j.place.end - j.place.begin - 1;
  }
};

// Keys, and queries where there is an o.
template <bool kTransfer>
constexpr int kKeyBytes = kTransfer ? kTileBytes : 2 * kTileBytes;

// One thread: values, and per head keys and queries, of every position. It also finds the jobs for
// the other threads.
template <GateKind kGate, bool kTransfer>
__device__ inline void load_inputs(CarrySmem<kGate>& s, const Params& params, CarryMaps maps,
                                   int carrier) {
  const Plan& plan = s.seat.plan;
  const int count = num_positions(plan, carrier), warpgroups = num_carrying(params, plan.parts);
  const bool has_values = !is_identity<kTransfer>(s);
  Walk<kGate> at;
  const auto find = [&](int job, int n) {
    return find_job<kGate, kTransfer>(s, params, carrier, job, n);
  };
  int next_job = count > 0 ? find(0, 0) : 0;
#pragma unroll 1
  for (int n = 0; n < count; n++) {
    const int job = at.job;
    at.step(s);
    const int value_bytes = warpgroups * kHalfBytes;
    barrier_wait(&s.v_empty[n % kValueStages], (n / kValueStages & 1) ^ 1);
    if constexpr (kGate == GateKind::kHead) {
      const int ks = n % kKeyStages;
      const int qk_head = divide(at.head, divide(params.num_value_heads, params.num_heads));
      barrier_wait(&s.keys_empty[ks], (n / kKeyStages & 1) ^ 1);
      barrier_expect(&s.keys_full[ks], kKeyBytes<kTransfer> + value_bytes);
#pragma unroll
      for (int h = 0; h < 2; h++) {
        tensor_load<kEvictNormal>(s.k[ks] + h * kHalfBytes, maps.k, 64 * h, qk_head, at.token,
                                  at.batch, &s.keys_full[ks]);
        if constexpr (!kTransfer)
          tensor_load<kEvictNormal>(s.q[ks] + h * kHalfBytes, maps.q, 64 * h, qk_head, at.token,
                                    at.batch, &s.keys_full[ks]);
      }
    } else {
      barrier_expect(&s.v_full[n % kValueStages], value_bytes);
    }
    load_values(s, maps.v, n, warpgroups, at.head, has_values ? at.token : kOutside, at.batch);
    if (at.job > job && next_job < count)  // the next job, as soon as this one is under way
      next_job = find(at.job, next_job);
  }
}
// One thread: tells preparers of every packet that is here, whose place in the ring is free then.
// Apart from the loads because a release is a trip to L2.
template <GateKind kGate>
__device__ inline void free_places(CarrySmem<kGate>& s, const Params& params, int carrier) {
  constexpr int kBodyStages = CarrySmem<kGate>::kBodyStages;
  const int count = num_positions(s.seat.plan, carrier);
  uint32_t* const flag = consumed_flag(params, s.seat.index);
#pragma unroll 1
  for (int n = 0; n < count; n++) {
    if constexpr (kGate == GateKind::kChannel)
      barrier_wait(&s.keys_full[n % kKeyStages], (n / kKeyStages) & 1);
    barrier_wait(&s.body_full[n % kBodyStages], (n / kBodyStages) & 1);
    barrier_arrive(&s.body_empty[n % kBodyStages]);  // both phases seen: the next ones may begin
    store_release(flag, n + 1);
  }
}
// One thread: packets of every position. Flags in memory and fences take long, so they come before
// the wait for a place here.
template <GateKind kGate, bool kTransfer>
__device__ inline void load_packets(CarrySmem<kGate>& s, const Params& params, int carrier) {
  constexpr int kBodyStages = CarrySmem<kGate>::kBodyStages;
  const int count = num_positions(s.seat.plan, carrier);
#pragma unroll 1
  for (int n = 0; n < count; n++) {
    const Packet<kGate>* const packet = packet_at<kGate>(params, carrier, n);
    wait_flag(ready_flag(params, carrier, n), n + 1);
    fence_async_proxy_global();  // parts of packets are written by ordinary stores
    if constexpr (kGate == GateKind::kChannel) {
      const int ks = n % kKeyStages;
      static_assert(kKeyStages == kBodyStages + 1);  // free since the body before has its place
      barrier_expect(&s.keys_full[ks], kTileBytes);
      bulk_load(s.k[ks], packet->k, kTileBytes, &s.keys_full[ks]);
    }
    const int rs = n % kBodyStages;
    barrier_wait(&s.body_empty[rs], (n / kBodyStages & 1) ^ 1);
    auto& to = s.body[rs];
    uint64_t* const full = &s.body_full[rs];
    if constexpr (kGate == GateKind::kChannel && kTransfer) {  // neither queries nor Aqk
      constexpr int kFactors = sizeof(to.decay) + sizeof(to.v_factor) + sizeof(to.new_factor);
      barrier_expect(full, kTileBytes + kHalfBytes + kFactors);
      bulk_load(to.kr, packet->body.kr, kTileBytes + kHalfBytes, full);  // with T
      bulk_load(to.decay, packet->body.decay, kFactors, full);
    } else if constexpr (kGate == GateKind::kChannel) {
      constexpr int kMore = sizeof(s.o_factor[0]);
      barrier_expect(full, kTileBytes + kBodyBytes<kGate> + kMore);
      bulk_load(s.q[rs], packet->q, kTileBytes, full);
      bulk_load(&to, &packet->body, kBodyBytes<kGate>, full);
      bulk_load(s.o_factor[n % (kBodyStages + 1)], packet->o_factor, kMore, full);
    } else if constexpr (kTransfer) {  // no Aqk
      barrier_expect(full, kHalfBytes + sizeof(HeadFactors));
      bulk_load(to.solved.t, packet->body.solved.t, kHalfBytes, full);
      bulk_load(&to.factors, &packet->body.factors, sizeof(HeadFactors), full);
    } else {
      barrier_expect(full, kBodyBytes<kGate>);
      bulk_load(&to, &packet->body, kBodyBytes<kGate>, full);
    }
  }
}
// One thread: o of every whole chunk from its place in shared memory, which is free then.
template <GateKind kGate>
__device__ inline void store_outputs(CarrySmem<kGate>& s, const Params& params,
                                     const CUtensorMap* map, int carrier) {
  const Plan& plan = s.seat.plan;
  const int count = num_positions(plan, carrier), warpgroups = num_carrying(params, plan.parts);
  Walk<kGate> at;
#pragma unroll 1
  for (int n = 0; n < count; n++) {
    const int vs = n % kValueStages;
    at.step(s);
    barrier_wait(&s.o_full[vs], (n / kValueStages) & 1);
    if (at.tokens_left >= kChunk)
      for (int i = 0; i < warpgroups; i++)
        tensor_store(map, s.v[vs][i], 64 * (s.first_half + i), at.head, at.token, at.batch);
    bulk_store_wait_read();
    barrier_arrive(&s.v_empty[vs]);
  }
  bulk_store_wait();
}

}  // namespace deltic::gpu::forward
