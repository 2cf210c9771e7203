// States and their way forward through a chunk. Called by all threads: thread t has column
// t % kColumns and the keys of part t / kColumns.
#pragma once

#include "cuda/sm80/backward/stage_tokens.cuh"

namespace deltic::gpu::backward {

template <class Tr>
struct Lane {
  int column, first_key;
  __device__ Lane()
      : column(static_cast<int>(threadIdx.x) % Tr::kColumns),
        first_key(static_cast<int>(threadIdx.x) / Tr::kColumns * Tr::kPartKeys) {}
  __device__ int part() const { return first_key / Tr::kPartKeys; }
};

// f(key, column, value in shared memory) for the thread's elements of a state.
template <class Tr, class F>
__device__ void for_state(float (&state)[Tr::kWidth][Tr::kStatePitch], F&& f) {
  const Lane<Tr> at;
  for (int d = at.first_key; d < at.first_key + Tr::kPartKeys; ++d) {
    f(d, at.column, state[d][at.column]);
  }
}

// A state of the call, any strides and dtype; absent: zeros. A thread touches only what it owns.
template <class Tr>
__device__ void load_given_state(const Params& p, const States& x, const Shared<Tr>& s,
                                 float (&state)[Tr::kWidth][Tr::kStatePitch]) {
  const int64_t first = int64_t{s.item.slice} * Tr::kColumns;
  const int64_t base = int64_t{s.item.n} * x.s_slot + s.item.head * x.s_head;
  for_state<Tr>(state, [&](int d, int c, float& value) {
    const bool is_there = x.present && d < p.K && first + c < p.V;
    value = is_there ? load(x.data, x.dtype, base + d * x.s_k + (first + c) * x.s_v) : 0.0f;
  });
}
template <class Tr>
__device__ void store_given_state(const Params& p, const States& x, const Shared<Tr>& s,
                                  float (&state)[Tr::kWidth][Tr::kStatePitch]) {
  const int64_t first = int64_t{s.item.slice} * Tr::kColumns;
  const int64_t base = int64_t{s.item.n} * x.s_slot + s.item.head * x.s_head;
  for_state<Tr>(state, [&](int d, int c, float value) {
    if (!x.present || d >= p.K || first + c >= p.V) return;
    store(x.data, x.dtype, base + d * x.s_k + (first + c) * x.s_v, value);
  });
}

// A state in scratch: [key][column].
template <class Tr>
__device__ void load_state(const float* from, float (&state)[Tr::kWidth][Tr::kStatePitch]) {
  for_state<Tr>(state, [&](int d, int c, float& value) { value = from[d * Tr::kColumns + c]; });
}
template <class Tr>
__device__ void store_state(float* to, float (&state)[Tr::kWidth][Tr::kStatePitch]) {
  for_state<Tr>(state, [&](int d, int c, float value) { to[d * Tr::kColumns + c] = value; });
}
template <class Tr>
__device__ float* start_of(const Params& p, const Shared<Tr>& s, int64_t token) {
  const int64_t slot = start_slot(p, s.span.batch, token);
  return p.scratch.starts +
         ((slot * p.HV + s.item.head) * p.num_slices + s.item.slice) * Tr::kState;
}

// sum[i] += sum_d factor[d][i] state[d][column] over the thread's keys.
template <class Tr>
__device__ void multiply_keys(const float (&factor)[Tr::kWidth][kChunk],
                              const float (&state)[Tr::kWidth][Tr::kStatePitch], const Lane<Tr>& at,
                              float (&sum)[kChunk]) {
  for (int d = at.first_key; d < at.first_key + Tr::kPartKeys; ++d) {
    const float x = state[d][at.column];
#pragma unroll
    for (int i = 0; i < kChunk; i += 4) {
      const float4 f = *reinterpret_cast<const float4*>(&factor[d][i]);
      sum[i] += f.x * x, sum[i + 1] += f.y * x, sum[i + 2] += f.z * x, sum[i + 3] += f.w * x;
    }
  }
}

// The sums of all parts, in order; every part gets them. Two barriers inside: one makes the sums
// visible, and the caller's next barrier must stand before `parts` is used again.
template <class Tr>
__device__ void add_parts(Shared<Tr>& s, const Lane<Tr>& at, float (&sum)[kChunk]) {
#pragma unroll
  for (int i = 0; i < kChunk; ++i) s.parts[at.part()][i][at.column] = sum[i];
  __syncthreads();  // all parts are there
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    sum[i] = 0;
#pragma unroll
    for (int n = 0; n < Tr::kKeyParts; ++n) sum[i] += s.parts[n][i][at.column];
  }
}

// e_i = v_i - (k E)_i S - sum_{j<i} L_ij y_j and y_i = beta_i e_i of the thread's column. On entry
// tokens, factors and scores are visible; parts are free. With decays of columns every term has
// those between its tokens: y_j has them up to the last one in the end.
template <class Tr>
__device__ void solve(Shared<Tr>& s, const Lane<Tr>& at, const float (&v)[kChunk],
                      const float (&beta)[kChunk], float (&e)[kChunk], float (&y)[kChunk]) {
  float x[kChunk] = {};
  multiply_keys<Tr>(s.kE, s.S, at, x);
  add_parts<Tr>(s, at, x);
  float b[kChunk], from_start = 1;
  if constexpr (Tr::kHasGv) read_tokens(s.gv.b[at.column], b);
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    if constexpr (Tr::kHasGv) {
      from_start *= b[i];
      x[i] *= from_start;
#pragma unroll
      for (int j = 0; j < i; ++j) y[j] *= b[i];
    }
    e[i] = v[i] - x[i];
#pragma unroll
    for (int j = 0; j < i; ++j) e[i] -= s.L[i][j] * y[j];
    y[i] = beta[i] * e[i];
  }
}

// What is left of a column of the state at the chunk's end.
template <class Tr>
__device__ float column_total(const Shared<Tr>& s, int column) {
  if constexpr (Tr::kHasGv) {
    return s.gv.total[column];
  } else {
    return 1.0f;
  }
}

// S <- exp(G_last) S + (k R)^T y, the thread's own elements.
template <class Tr>
__device__ void advance(Shared<Tr>& s, const Lane<Tr>& at, const float (&y)[kChunk]) {
  const float total = column_total<Tr>(s, at.column);
  for (int d = at.first_key; d < at.first_key + Tr::kPartKeys; ++d) {
    float x = s.last[d] * total * s.S[d][at.column];
#pragma unroll
    for (int i = 0; i < kChunk; i += 4) {
      const float4 f = *reinterpret_cast<const float4*>(&s.kR[d][i]);
      x += f.x * y[i] + f.y * y[i + 1] + (f.z * y[i + 2] + f.w * y[i + 3]);
    }
    s.S[d][at.column] = x;
  }
}

// One chunk forward: s.S becomes the state after it. Where given, keeps what backward needs of the
// chunk: the state before it, e, L and P. Ends with a barrier.
template <class Tr>
__device__ void go_forward(const Params& p, int64_t first, int count, Shared<Tr>& s, float* state,
                           float* errors, float* scores) {
  const Lane<Tr> at;
  load_tokens<Tr>(p, first, count, scores != nullptr, s);
  if constexpr (Tr::kHasGv) lay_column_decays<Tr>(p, first, count, s);
  __syncthreads();  // tokens
  lay_factors<Tr>(p, s);
  lay_scores<Tr>(p, s);
  float v[kChunk], beta[kChunk], e[kChunk], y[kChunk];
  load_values<Tr>(p, p.v, s, first, count, v);
  load_betas<Tr>(p, s, first, count, beta);
  __syncthreads();  // factors, scores
  if (state != nullptr) store_state<Tr>(state, s.S);
  if (scores != nullptr) {
    scores[threadIdx.x] = (&s.L[0][0])[threadIdx.x];
    scores[kChunk * kChunk + threadIdx.x] = (&s.P[0][0])[threadIdx.x];
  }
  solve<Tr>(s, at, v, beta, e, y);
  if (errors != nullptr && at.part() == 0) {
#pragma unroll
    for (int i = 0; i < kChunk; ++i) errors[i * Tr::kColumns + at.column] = e[i];
  }
  advance<Tr>(s, at, y);
  __syncthreads();  // parts, factors and scores have been read
}
static_assert(kChunk * kChunk == kThreads, "a thread has one pair of tokens");

}  // namespace deltic::gpu::backward
