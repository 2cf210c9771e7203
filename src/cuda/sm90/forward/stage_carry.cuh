// The state chain: a warpgroup carries 64 value columns of S (V x K, fp32 accumulators) through the
// chunks of its CTA's positions. All products are (value x .) accumulators, so a token's factor is
// a column's. Packets arrive by bulk copy from the ring; with gates per head k and q come as they
// are.
#pragma once
#include "cuda/sm90/forward/stage_carry_parts.cuh"
#include "cuda/sm90/forward/stage_carry_products.cuh"

namespace deltic::gpu::forward {

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
      round_operand<E>(S, as);
      if (kIsHead && !alone) wait_turn(n);
      multiply_state<E, kHalfBytes>(as, keys_of(s, n), acc);
      if constexpr (!kIsHead) barrier_wait(&s.v_full[vs], (n / kValueStages) & 1);
      uint32_t v[16], ob[16];
      load_values(s.v[vs][carry_tid() / kWarpgroup], v);
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
      round_operand<E>(acc, av);
      uint32_t ah[16];
      update_operand<E, kGate>(body, av, ah);
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
