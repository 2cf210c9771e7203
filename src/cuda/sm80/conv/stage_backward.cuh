// A run of tokens of the gradient. With dpre_t = dy_t act'(pre_t), the gradient of input s is
// complete at token s + W - 1: walking upwards it leaves W - 1 tokens late, and W - 1 tokens behind
// the run are computed again. Each function is called by a thread on its own, for its channels;
// none has a barrier.
#pragma once

#include "cuda/sm80/conv/stage_forward.cuh"
#include "cuda/sm80/conv/stage_pairs.cuh"

namespace deltic::gpu::conv {

// Sums over tokens of a thread's channels.
template <class Tr>
struct Sums {
  float w[Tr::kTaps][Tr::kVec], bias[Tr::kVec];
};

// dpre_t of the token whose input and gradient are given; adds to the sums if the token is the
// run's own. kUsual: the call has SiLU and wants sums, so that no branch parts the instructions.
template <class Tr, bool kUsual = false>
__device__ void gradient_of_sum(const Params& p, const Taps<Tr>& taps,
                                const float (&before)[Tr::kBefore][Tr::kVec],
                                const float (&x)[Tr::kVec], bool is_own, float (&d)[Tr::kVec],
                                Sums<Tr>& sums) {
  if (kUsual || p.is_silu) {
    float pre[Tr::kVec];
    add_taps<Tr>(taps, before, x, pre);
#pragma unroll
    for (int k = 0; k < Tr::kVec; ++k) d[k] *= silu_slope(pre[k]);
  }
  if (!kUsual && (!is_own || !p.wants_sums)) return;
#pragma unroll
  for (int j = 0; j < Tr::kBefore; ++j) {
    if (!taps.has(j)) continue;
#pragma unroll
    for (int k = 0; k < Tr::kVec; ++k) sums.w[j][k] = fmaf(d[k], before[j][k], sums.w[j][k]);
  }
#pragma unroll
  for (int k = 0; k < Tr::kVec; ++k) {
    sums.w[Tr::kBefore][k] = fmaf(d[k], x[k], sums.w[Tr::kBefore][k]);
    sums.bias[k] += d[k];
  }
}

// sum += sum_j w_j dpre: of the input kBefore tokens before the one whose dpre is d; later[i] is
// that of the i-th token from it on.
template <class Tr>
__device__ void add_gradients(const Taps<Tr>& taps, const float (&later)[Tr::kBefore][Tr::kVec],
                              const float (&d)[Tr::kVec], float (&sum)[Tr::kVec]) {
#pragma unroll
  for (int j = Tr::kTaps - 1; j > 0; --j) {
    if (!taps.has(j)) continue;
#pragma unroll
    for (int k = 0; k < Tr::kVec; ++k) {
      sum[k] = fmaf(taps.w[j][k], later[Tr::kTaps - 1 - j][k], sum[k]);
    }
  }
  if (!taps.has(0)) return;
#pragma unroll
  for (int k = 0; k < Tr::kVec; ++k) sum[k] = fmaf(taps.w[0][k], d[k], sum[k]);
}

// The gradient of input `to`, kBefore tokens before the one whose dpre is d: into dx, or the
// initial state's.
template <class Tr>
__device__ void leave_gradient(const Params& p, const Work& s, int to, int c, const Taps<Tr>& taps,
                               const float (&later)[Tr::kBefore][Tr::kVec],
                               const float (&d)[Tr::kVec]) {
  const bool is_token = to >= 0;
  if (is_token ? !p.dx.present : !p.d_initial.states.present || to < -p.kept) return;
  float sum[Tr::kVec] = {};
  const int place = p.kept - s.length + to;  // in the final state
  if (p.d_final.states.present && place >= 0) {
    load_place<Tr::kVec>(p.d_final, s.sequence, c, place, sum);
  }
  add_gradients<Tr>(taps, later, d, sum);
  if (is_token) {
    using E = typename Tr::E;
    store_run<E, Tr::kVec>(row_of<E>(p.dx, s, to, c), sum);
  } else {
    store_place<Tr::kVec>(p.d_initial, s.sequence, c, to + p.kept, sum);
  }
}

// What a state has before the inputs that any token sees went on to the final state, or nowhere.
template <class Tr>
__device__ void leave_old_inputs(const Params& p, const Work& s, int c) {
#pragma unroll 1
  for (int i = 0; i < p.kept - Tr::kBefore; ++i) {
    float d[Tr::kVec] = {};
    const int place = i - s.length;
    if (p.d_final.states.present && place >= 0) {
      load_place<Tr::kVec>(p.d_final, s.sequence, c, place, d);
    }
    store_place<Tr::kVec>(p.d_initial, s.sequence, c, i, d);
  }
}

template <class Tr>
__device__ void run_gradients(const Params& p, const Work& s, int c, const Taps<Tr>& taps,
                              Sums<Tr>& sums, typename Pairs<Tr>::Shared& shared) {
  constexpr int kBefore = Tr::kBefore, kVec = Tr::kVec;
  const bool has_d = p.d_out.present;
  // Tokens whose dpre is not 0, and all that the run's inputs meet.
  const int real = has_d ? min(s.length - s.first, s.count + kBefore) : 0;
  const int steps = s.count + kBefore;
  Pairs<Tr> rows(p, s, c, real, shared);  // none of d_out is none to load
  float before[kBefore][kVec], later[kBefore][kVec] = {};
  load_before<Tr>(p, s, c, before);
  // A step with everything that may be at a sequence's ends.
  const auto run_step = [&](int step) {
    float d[kVec] = {};
    if (step < real) {
      float row[kVec];
      rows.take(row, d);
      gradient_of_sum<Tr>(p, taps, before, row, step < s.count, d, sums);
      shift(before, row);
    }
    // Inputs before a run that is not the first are the run's before it.
    if (step >= kBefore || s.is_first) {
      leave_gradient<Tr>(p, s, s.first + step - kBefore, c, taps, later, d);
    }
    shift(later, d);
  };
  int step = 0;
#pragma unroll 1
  for (; step < kBefore; ++step) run_step(step);
  // Tokens of the run whose late gradients go to dx alone.
  const int inside = p.d_final.states.present ? s.length - p.kept + kBefore - s.first : real;
  const int plain = p.dx.present ? min(min(real, s.count), inside) : 0;
  using E = typename Tr::E;
  E* dx = p.dx.present ? row_of<E>(p.dx, s, s.first, c) : nullptr;
  const auto run_plain = [&]<bool kUsual>(std::bool_constant<kUsual>) {
    float row[kVec], d[kVec], sum[kVec] = {};
    rows.template take<kUsual>(row, d);
    gradient_of_sum<Tr, kUsual>(p, taps, before, row, true, d, sums);
    shift(before, row);
    add_gradients<Tr>(taps, later, d, sum);
    store_run<E, kVec>(dx, sum);
    dx += p.dx.st;
    shift(later, d);
  };
  // Tokens behind which as many more are there as are under way.
  const int usual = p.is_silu && p.wants_sums ? plain - Pairs<Tr>::kPlaces : 0;
#pragma unroll 1
  for (; step + Tr::kAhead <= usual; step += Tr::kAhead) {
#pragma unroll
    for (int u = 0; u < Tr::kAhead; ++u) run_plain(std::true_type{});
  }
#pragma unroll 1
  for (; step < plain; ++step) run_plain(std::false_type{});
#pragma unroll 1
  for (; step < steps; ++step) run_step(step);
  if (s.is_first && p.d_initial.states.present) leave_old_inputs<Tr>(p, s, c);
}

// A part's sums into scratch.
template <class Tr>
__device__ void leave_sums(const Params& p, unsigned part, int c, const Taps<Tr>& taps,
                           const Sums<Tr>& sums) {
  float* to = p.sums + int64_t{part} * (p.taps + 1) * p.channels + c;
#pragma unroll
  for (int j = 0; j < Tr::kTaps; ++j) {
    if (!taps.has(j)) continue;
    *reinterpret_cast<Run<float, Tr::kVec>*>(to) = pack_run<float, Tr::kVec>(sums.w[j]);
    to += p.channels;
  }
  *reinterpret_cast<Run<float, Tr::kVec>*>(to) = pack_run<float, Tr::kVec>(sums.bias);
}

}  // namespace deltic::gpu::conv
