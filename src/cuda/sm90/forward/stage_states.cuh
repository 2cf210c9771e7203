// A carried state's way in and out: 64 value columns as a warpgroup's accumulators, to and from the
// workspace and the caller's tensors.
#pragma once
#include "cuda/ptx/registers.cuh"
#include "cuda/sm90/forward/smem.h"

namespace deltic::gpu::forward {

__device__ inline int carry_tid() { return thread_index(); }
// The thread's elements of a state: rows (values) v, v + 8, columns (channels) k + 8 j, + 1.
struct StatePlace {
  int v, k;
  __device__ explicit StatePlace(int half)
      : v(64 * half + 16 * (carry_tid() / 32 % 4) + carry_tid() % 32 / 4),
        k(2 * (carry_tid() % 4)) {}
};
// States in the workspace: fp32, [V,K] of 128 x 128.
__device__ inline void load_state(const float* from, int half, float (&S)[64]) {
  const StatePlace at(half);
#pragma unroll
  for (int i = 0; i < 32; i++) {
    const float2 f = __ldcg(reinterpret_cast<const float2*>(from + (at.v + (i & 1) * 8) * kWidth +
                                                            at.k + (i >> 1) * 8));
    S[2 * i] = f.x, S[2 * i + 1] = f.y;
  }
}
__device__ inline void store_state(float* to, int half, const float (&S)[64]) {
  const StatePlace at(half);
#pragma unroll
  for (int i = 0; i < 32; i++)
    *reinterpret_cast<float2*>(to + (at.v + (i & 1) * 8) * kWidth + at.k + (i >> 1) * 8) =
        make_float2(S[2 * i], S[2 * i + 1]);
}
// [V,K] of another size, a multiple of 16.
__device__ inline void store_rows(float* to, int half, int rows, int width, const float (&S)[64]) {
  const StatePlace at(half);
#pragma unroll
  for (int i = 0; i < 32; i++) {
    const int v = at.v + (i & 1) * 8, k = at.k + (i >> 1) * 8;
    if (v < rows && k < width)
      *reinterpret_cast<float2*>(to + v * width + k) = make_float2(S[2 * i], S[2 * i + 1]);
  }
}
__device__ inline void start_state(int half, bool is_identity, float (&S)[64]) {
  const StatePlace at(half);
#pragma unroll
  for (int i = 0; i < 64; i++)
    S[i] = is_identity && at.v + (i >> 1 & 1) * 8 == at.k + (i >> 2) * 8 + (i & 1) ? 1.f : 0.f;
}
// The caller's, either layout; what lies beyond its K and V is 0. One loop for fp32 and one for 16
// bits, bf16 or fp16: a branch around each load would make them wait for one another.
__device__ inline float element_of(float x, DType) { return x; }
__device__ inline float element_of(uint16_t x, DType type) { return number_of(x, type); }
__device__ inline void put_element(float& to, float x, DType) { to = x; }
__device__ inline void put_element(uint16_t& to, float x, DType type) { to = narrow_bits(x, type); }
template <class Element>
__device__ inline void load_given(const Element* from, const StateView& view, const Params& params,
                                  int half, float (&S)[64]) {
  const StatePlace at(half);
#pragma unroll
  for (int i = 0; i < 64; i++) {
    const int v = at.v + (i >> 1 & 1) * 8, k = at.k + (i >> 2) * 8 + (i & 1);
    Element x = 0;
    if (v < params.value_width && k < params.key_width) x = from[k * view.s_k + v * view.s_v];
    S[i] = element_of(x, view.dtype);
  }
}
template <class Element>
__device__ inline void store_given(Element* to, const StateView& view, const Params& params,
                                   int half, const float (&S)[64]) {
  const StatePlace at(half);
#pragma unroll
  for (int i = 0; i < 64; i++) {
    const int v = at.v + (i >> 1 & 1) * 8, k = at.k + (i >> 2) * 8 + (i & 1);
    if (v < params.value_width && k < params.key_width)
      put_element(to[k * view.s_k + v * view.s_v], S[i], view.dtype);
  }
}
__device__ inline void load_given(const Params& params, int slot, int head, int half,
                                  float (&S)[64]) {
  const StateView& view = params.state_in;
  const int64_t at = slot * view.s_slot + head * view.s_head;
  if (is_plain(view, params))
    load_state(static_cast<const float*>(view.data) + at, half, S);
  else if (view.dtype == DType::f32)
    load_given(static_cast<const float*>(view.data) + at, view, params, half, S);
  else
    load_given(static_cast<const uint16_t*>(view.data) + at, view, params, half, S);
}
__device__ inline void store_given(const Params& params, int slot, int head, int half,
                                   const float (&S)[64]) {
  const StateView& view = params.state_out;
  const int64_t at = slot * view.s_slot + head * view.s_head;
  if (is_plain(view, params))
    store_state(static_cast<float*>(view.data) + at, half, S);
  else if (view.dtype == DType::f32)
    store_given(static_cast<float*>(view.data) + at, view, params, half, S);
  else
    store_given(static_cast<uint16_t*>(view.data) + at, view, params, half, S);
}

}  // namespace deltic::gpu::forward
