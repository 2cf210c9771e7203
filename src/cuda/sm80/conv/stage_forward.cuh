// A run of tokens: outputs, and the state that the sequence leaves behind. Each function is called
// by a thread on its own, for its channels; none has a barrier.
#pragma once

#include "cuda/sm80/conv/stage_inputs.cuh"
#include "cuda/tile/activations.cuh"

namespace deltic::gpu::conv {

// Rows on their way: token t of a run is in place t % kAhead, and leaves it to token t + kAhead.
template <class Tr>
struct Ring {
  using E = typename Tr::E;
  Run<E, Tr::kVec> rows[Tr::kAhead];
  const E* next;  // where the token is that is asked for next
  int64_t stride;
  int left;  // tokens that have not been asked for

  __device__ Ring(const Rows& x, const Work& s, int c, int count)
      : next(row_of<E>(x, s, s.first, c)), stride(x.st), left(count) {
#pragma unroll
    for (int u = 0; u < Tr::kAhead; ++u) request(u);
  }
  __device__ void request(int place) {
    if (left > 0) rows[place] = load_run<E, Tr::kVec>(next);
    next += stride, --left;
  }
  __device__ void take(int place, float (&row)[Tr::kVec]) {
    unpack_run<E, Tr::kVec>(rows[place], row);
    request(place);
  }
  // The same of the last tokens, fewer than places, which move up.
  __device__ void take_first(float (&row)[Tr::kVec]) {
    unpack_run<E, Tr::kVec>(rows[0], row);
#pragma unroll
    for (int u = 0; u + 1 < Tr::kAhead; ++u) rows[u] = rows[u + 1];
    request(Tr::kAhead - 1);
  }
};

template <class Tr>
__device__ void zero_run(const Params& p, const Work& s, int c) {
  const float zeros[Tr::kVec] = {};
  for (int t = s.first; t < s.first + s.count; ++t) {
    store_run<typename Tr::E, Tr::kVec>(row_of<typename Tr::E>(p.out, s, t, c), zeros);
  }
}

template <class Tr>
__device__ void store_sums(const Params& p, float (&sum)[Tr::kVec], typename Tr::E* out) {
  if (p.is_silu) {
#pragma unroll
    for (int k = 0; k < Tr::kVec; ++k) sum[k] = silu(sum[k]);
  }
  store_run<typename Tr::E, Tr::kVec>(out, sum);
}

// `before` becomes what the token after the run would see.
template <class Tr>
__device__ void run_tokens(const Params& p, const Work& s, int c, const Taps<Tr>& taps, Ring<Tr>& x,
                           float (&before)[Tr::kBefore][Tr::kVec]) {
  using E = typename Tr::E;
  E* out = row_of<E>(p.out, s, s.first, c);
  const auto run_token = [&](float(&row)[Tr::kVec]) {
    float sum[Tr::kVec];
    add_taps<Tr>(taps, before, row, sum);
    shift(before, row);
    store_sums<Tr>(p, sum, out);
    out += p.out.st;
  };
  int t = 0;
#pragma unroll 1
  for (; t + Tr::kAhead <= s.count; t += Tr::kAhead) {
#pragma unroll
    for (int u = 0; u < Tr::kAhead; ++u) {
      float row[Tr::kVec];
      x.take(u, row);
      run_token(row);
    }
  }
#pragma unroll 1
  for (; t < s.count; ++t) {
    float row[Tr::kVec];
    x.take_first(row);
    run_token(row);
  }
}

// By the run that read the state the sequence started from: nobody else has to have read it when
// the slot is the same. `before` is what a token after the run would see.
template <class Tr>
__device__ void leave_state(const Params& p, const Work& s, int c,
                            const float (&before)[Tr::kBefore][Tr::kVec]) {
  if (has_all_places<Tr>(p)) {
    if (s.count == s.length) {
      return store_places<Tr::kBefore, Tr::kVec>(p.state_out, s.to, c, before);
    }
    float last[Tr::kBefore][Tr::kVec];
#pragma unroll
    for (int i = 0; i < Tr::kBefore; ++i) {
      load_input<Tr>(p, s, s.length - Tr::kBefore + i, c, last[i]);
    }
    return store_places<Tr::kBefore, Tr::kVec>(p.state_out, s.to, c, last);
  }
  // Upwards, a few at a time: a state updated in place is read at or above what is written.
  constexpr int kTogether = Tr::kVec == 1 ? 4 : 2;
#pragma unroll 1
  for (int i = 0; i < p.kept; i += kTogether) {
    float x[kTogether][Tr::kVec] = {};
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
      const int t = s.left_from + i + j;
      if (i + j < p.kept && t < s.length) load_input<Tr>(p, s, t, c, x[j]);
    }
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
      if (i + j < p.kept) store_place<Tr::kVec>(p.state_out, s.to, c, i + j, x[j]);
    }
  }
}

// Where the sequence's part of a checkpoint list says: the last inputs after so many tokens.
template <class Tr>
__device__ void leave_checkpoint(const Params& p, const Work& s, int tokens, int slot, int c) {
#pragma unroll 1
  for (int i = 0; i < p.kept; ++i) {
    float x[Tr::kVec];
    load_input<Tr>(p, s, tokens - p.kept + i, c, x);
    store_place<Tr::kVec>(p.ckpt, slot, c, i, x);
  }
}

}  // namespace deltic::gpu::conv
