// The arithmetic of the state chain, by a warpgroup: factors of columns, decays, products of the
// tensor cores with S or values as the operand in registers.
#pragma once
#include "cuda/sm90/forward/stage_carry_parts.cuh"

namespace deltic::gpu::forward {

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

// Accumulators, rounded, as the operand of the next product.
template <class E, int N>
__device__ inline void round_operand(const float (&x)[2 * N], uint32_t (&r)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) r[i] = pack<E>(x[2 * i], x[2 * i + 1]);
}
// A warpgroup's tile of v to registers.
__device__ inline void load_values(const uint8_t* tile, uint32_t (&v)[16]) {
  const uint32_t at = smem_u32(tile) + fragment_offset(carry_tid());
#pragma unroll
  for (int i = 0; i < 4; i++)
    ldmatrix_x4_trans(*reinterpret_cast<uint32_t(*)[4]>(&v[4 * i]), at + i * 2048);
}
// v_new as the state's update takes it, with the decays to the chunk's end.
template <class E, GateKind kGate, class Body>
__device__ inline void update_operand(const Body& body, const uint32_t (&av)[16],
                                      uint32_t (&ah)[16]) {
  if constexpr (kIsHalf<E>) {
    decay_values(update_factor(body), av, ah);
  } else if constexpr (kGate == GateKind::kHead) {
    decay_values(body, av, ah);
  } else {  // they are in the keys
#pragma unroll
    for (int i = 0; i < 16; i++) ah[i] = av[i];
  }
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

}  // namespace deltic::gpu::forward
