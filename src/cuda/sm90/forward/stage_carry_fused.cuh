// The state chain of a fused CTA: the arithmetic of carry_state(), in an order that needs fewer
// registers, as three warpgroups share them with the two that carry.
#pragma once
#include "cuda/sm90/forward/smem_fused.cuh"
#include "cuda/sm90/forward/stage_carry.cuh"

namespace deltic::gpu::forward {

// One or two warpgroups: every chunk of the CTA's jobs. A step, and what runs beside the products:
//   k S, q S      | v to registers; o of the chunk before out
//   T (v - k S)   | q S times its factor ; S *= decay
//   v_new times its factor
//   S += k^T v_new
//   o = q S + Aqk v_new
// S as an operand is done with before T's product begins; q S after it, as in carry_state(), would
// keep its 32 registers, and 200 are needed then.
template <class E>
__device__ inline void carry_fused(FusedSmem& s, const Params& params) {
  float S[64];
  auto part = [&]() -> const Part& { return s.part[carry_tid() / kWarpgroup]; };
  int n = 0, job = 0;
#pragma unroll 1
  while (has_job(s, params, job, n)) {
    begin_part<false>(s, params, job, n, S);
    float acc[32], O[32] = {};
    uint32_t av[16];
    int kind = step_kind(part(), n);
#pragma unroll 1
    do {
      // Read anew: else places that depend on it are kept in registers beside the products.
      auto now = [&] { return opaque(n); };
      if (kind & kIsStop) keep_state(s.part[carry_tid() / kWarpgroup], params, n, value_half(s), S);
      if (!(kind & kIsFirst)) {
        uint32_t ob[16];
        round_output<E, GateKind::kHead>(s, n - 1, O, ob);
        put_output(s, n - 1, ob);
      }
      wait_keys(s, n);
      if (kind & kIsShort)
        clear_tail<GateKind::kHead>(s, params, n, reread(part().tokens_left) - n * kChunk);
      {
        uint32_t as[32];
        round_operand<E>(S, as);
        multiply_state<E, FusedSmem::kHalf>(as, keys_of(s, n), acc);
        multiply_state<E, FusedSmem::kHalf>(as, queries_of(s, now()), O);
      }
      if (!(kind & kIsFirst)) release_output(s, now() - 1, kChunk, part(), params);
      {
        const int at = now();
        barrier_wait(&s.v_full[at % s.kValues], at / s.kValues & 1);
      }
      const HeadFactors& factors = factors_of(s, now());
      wgmma_wait<0>();
      fence_operands(acc);
      fence_operands(O);
      {
        uint32_t v[16];
        load_values(s.v[now() % s.kValues][carry_tid() / kWarpgroup], v);
        subtract_from_values<E, false>(load_factors(v_factor(factors)), v, acc, av);
      }
      multiply_tokens<E>(av, inverse_of(s, now()), false, acc);  // v_new
      multiply_columns(load_factors(factors.qs_factor), O);
      decay_state(factors, S);
      {
        const Factors f = load_factors(new_factor(factors));
        wgmma_wait<0>();
        fence_operands(acc);
        multiply_columns(f, acc);
      }
      round_operand<E>(acc, av);
      uint32_t ah[16];
      update_operand<E, GateKind::kHead>(factors, av, ah);
      add_to_state<E, FusedSmem::kHalf>(ah, update_keys(s, now()), S);
      multiply_tokens<E>(av, scores_of(s, now()), true, O);
      n++;
      kind = step_kind(part(), n);
      wgmma_wait<0>();
      fence_operands(S);
      fence_operands(O);
      free_chunk(s, n - 1);
    } while (kind & kIsInside);
    {  // the job's last chunk, perhaps not a whole one
      uint32_t ob[16];
      round_output<E, GateKind::kHead>(s, n - 1, O, ob);
      put_output(s, n - 1, ob);
      release_output(s, n - 1, part().tokens_left - (n - 1) * kChunk, part(), params);
    }
    job = reread(part().job);  // not kept beside the products
    end_part<false>(s, params, job, S);
    job = reread(part().job) + 1;
  }
}

}  // namespace deltic::gpu::forward
