// What lies beside the sequences: padding, skipped and empty ones.
#pragma once
#include "cuda/ptx/registers.cuh"
#include "cuda/sm90/forward/smem.h"

namespace deltic::gpu::forward {

// All CTAs, so many threads of each: o of padding and of skipped sequences is 0; empty sequences
// hand their state on.
__device__ inline void fill_outside(const Params& params, const Seat& seat, int thread,
                                    int threads) {
  const Plan& plan = seat.plan;
  const int hv = params.num_value_heads;
  auto clear = [&](int batch, int token, int count) {
    const Output& o = params.o;
    for (int64_t j = seat.index; j < int64_t(count) * hv; j += seat.count)
      for (int i = thread; i < params.value_width; i += threads)
        o.data[batch * o.sb + (token + j / hv) * o.st + (j % hv) * o.sh + i] = 0;
  };
  if (plan.padding < params.num_tokens) clear(0, plan.padding, params.num_tokens - plan.padding);
  if (params.slots.is_pool)
    for (int i = 0; i < plan.num_pieces; i++)
      if (params.pieces[i].zero > 0)
        clear(params.pieces[i].batch, params.pieces[i].token, params.pieces[i].zero);
  if (plan.has_empty && (params.state_out.data || params.ckpt.count > 0))
    for (int64_t j = seat.index; j < int64_t(plan.num_pieces) * hv; j += seat.count) {
      const Piece piece = params.pieces[j / hv];
      if (piece.length > 0 || (piece.write_slot < 0 && piece.end_stash < 0)) continue;
      const StateView &in = params.state_in, &out = params.state_out;
      for (int i = thread; i < params.key_width * params.value_width; i += threads) {
        const int k = i / params.value_width, v = i % params.value_width;
        const int64_t from =
            piece.read_slot * in.s_slot + (j % hv) * in.s_head + k * in.s_k + v * in.s_v;
        const int64_t to =
            piece.write_slot * out.s_slot + (j % hv) * out.s_head + k * out.s_k + v * out.s_v;
        const float x = piece.read_slot >= 0 ? state_number(in, from) : 0.f;
        if (piece.end_stash >= 0)
          stash_at(params, piece.end_stash, int(j % hv))[v * kWidth + k] = x;
        if (piece.write_slot >= 0) store_number(out, to, x);
      }
    }
}

}  // namespace deltic::gpu::forward
