// PTX of sm_90 around a kernel's products: barriers, flags, bulk copies, chained launches,
// approximate functions, packed bf16 and fp16, warp products.
#pragma once
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace deltic::gpu {

__device__ inline uint32_t smem_u32(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// --- mbarriers -----------------------------------------------------------------------------------
__device__ inline void barrier_init(uint64_t* b, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_u32(b)), "r"(arrivals));
}
__device__ inline void barrier_arrive(uint64_t* b) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(smem_u32(b)) : "memory");
}
__device__ inline void barrier_expect(uint64_t* b, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_u32(b)),
               "r"(bytes)
               : "memory");
}
__device__ inline void barrier_wait(uint64_t* b, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred P;\nWAIT: mbarrier.try_wait.parity.shared::cta.b64 P, [%0], %1;\n@P bra "
      "DONE;\n"
      "bra WAIT;\nDONE:\n}" ::"r"(smem_u32(b)),
      "r"(parity)
      : "memory");
}
// Whole warps. Lanes that come one after the other would count as several warps.
__device__ inline void named_sync(int id, int threads) {
  __syncwarp();
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ inline void named_arrive(int id, int threads) {
  __syncwarp();
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ inline void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Global memory alone: the fence of all memory is one of the GPU's, a trip to L2.
__device__ inline void fence_async_proxy_global() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

// --- flags in global memory ----------------------------------------------------------------------
// Orders nothing by itself: a look that succeeded is followed by fence_acquire.
__device__ inline uint32_t load_relaxed(const uint32_t* p) {
  uint32_t v;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
// After a relaxed load, an acquire: L1 forgets what it has. The load may be long under way, where
// an acquiring load is waited for at once; the older fence is a trip to L2.
__device__ inline void fence_acquire() {
#if __CUDACC_VER_MAJOR__ > 12 || (__CUDACC_VER_MAJOR__ == 12 && __CUDACC_VER_MINOR__ >= 8)
  asm volatile("fence.acquire.gpu;" ::: "memory");
#else
  asm volatile("fence.acq_rel.gpu;" ::: "memory");
#endif
}
__device__ inline void store_release(uint32_t* p, uint32_t v) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
// All threads that a barrier put before this one have written too.
__device__ inline void add_release(uint32_t* p, uint32_t v) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
// Whoever sets the flag runs: all CTAs of the grid do (launch_after of tile/launch.h, kTogether).
__device__ inline void wait_flag(const uint32_t* p, uint32_t at_least) {
  while (load_relaxed(p) < at_least) {
  }
  fence_acquire();
}

// --- bulk copies of contiguous bytes -------------------------------------------------------------
__device__ inline void bulk_load(void* dst, const void* src, int bytes, uint64_t* bar) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(smem_u32(dst)),
      "l"(src), "r"(bytes), "r"(smem_u32(bar))
      : "memory");
}

// Into L2.
__device__ inline void bulk_prefetch(const void* src, int bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(__cvta_generic_to_global(src)),
               "r"(bytes)
               : "memory");
}

// Inputs and outputs pass through L2 once; the ring of packets is to stay there.
constexpr uint64_t kEvictFirst = 0x12F0000000000000ull;  // what createpolicy gives for evict_first
constexpr uint64_t kEvictLast = 0x14F0000000000000ull;
constexpr uint64_t kEvictNormal = 0x1000000000000000ull;
__device__ inline void bulk_store(void* dst, const void* src, int bytes) {
  asm volatile(
      "cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%0], [%1], %2, %3;\n"
      "cp.async.bulk.commit_group;" ::"l"(__cvta_generic_to_global(dst)),
      "r"(smem_u32(src)), "r"(bytes), "l"(kEvictLast)
      : "memory");
}
// Everything this thread stored by bulk copies, tensors too, is written; or has only been read.
__device__ inline void bulk_store_wait() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
__device__ inline void bulk_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
__device__ inline void store_packet(void* p, uint32_t v) {
  asm volatile("st.global.L2::cache_hint.u32 [%0], %1, %2;" ::"l"(__cvta_generic_to_global(p)),
               "r"(v), "l"(kEvictLast)
               : "memory");
}

// --- bulk tensor copies, maps of (channel, head, token, batch) -----------------------------------
template <uint64_t kPolicy = kEvictFirst>
__device__ inline void tensor_load(void* dst, const CUtensorMap* map, int channel, int head,
                                   int token, int batch, uint64_t* bar) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(smem_u32(dst)),
      "l"(map), "r"(channel), "r"(head), "r"(token), "r"(batch), "r"(smem_u32(bar)), "l"(kPolicy)
      : "memory");
}
__device__ inline void tensor_store(const CUtensorMap* map, const void* src, int channel, int head,
                                    int token, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group.L2::cache_hint "
      "[%0, {%1, %2, %3, %4}], [%5], %6;\ncp.async.bulk.commit_group;" ::"l"(map),
      "r"(channel), "r"(head), "r"(token), "r"(batch), "r"(smem_u32(src)), "l"(kEvictFirst)
      : "memory");
}

// Shared memory read again instead of a register held.
template <class X>
__device__ inline X reread(const X& x) {
  return *reinterpret_cast<const volatile X*>(&x);
}

// The same value, but what is computed from it is computed here and not kept from before.
__device__ inline int opaque(int x) {
  asm volatile("" : "+r"(x));
  return x;
}
// The thread's index, read anew: else dozens of addresses that depend on it are kept, and spilled.
__device__ inline int thread_index() {
  int t;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(t));
  return t;
}

// The number of CTAs, likewise.
__device__ inline int grid_size() {
  int n;
  asm volatile("mov.u32 %0, %%nctaid.x;" : "=r"(n));
  return n;
}

// --- launches one after the other ----------------------------------------------------------------
// The next launch of the stream may start; it waits itself for what it reads.
__device__ inline void grid_release() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
// The launch before is complete, and what it wrote is visible.
__device__ inline void grid_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// --- numbers -------------------------------------------------------------------------------------
__device__ inline float exp2_approx(float x) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
__device__ inline float rcp_approx(float x) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
__device__ inline float log2_approx(float x) {
  float r;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
__device__ inline uint32_t pack_bf16(float lo, float hi) {
  uint32_t r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}
__device__ inline float bf16_lo(uint32_t v) { return __uint_as_float(v << 16); }
__device__ inline float bf16_hi(uint32_t v) { return __uint_as_float(v & 0xffff0000u); }
// Pairs of operands of type E, bf16 or fp16.
template <class E>
constexpr bool kIsHalf = __is_same(E, __half);
// Rounded. fp16 operands stop at 65504 instead of becoming infinite, which costs nothing.
template <class E>
__device__ inline uint32_t pack(float lo, float hi) {
  if constexpr (!kIsHalf<E>) return pack_bf16(lo, hi);
  uint32_t r;
  asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}
// The same for results.
template <class E>
__device__ inline uint32_t pack_result(float lo, float hi) {
  if constexpr (!kIsHalf<E>) return pack_bf16(lo, hi);
  uint32_t r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}
template <class E>
__device__ inline float2 unpack(uint32_t v) {
  if constexpr (!kIsHalf<E>) return make_float2(bf16_lo(v), bf16_hi(v));
  return __half22float2(*reinterpret_cast<const __half2*>(&v));
}
template <class E>
__device__ inline uint32_t multiply_packed(uint32_t a, uint32_t b) {
  uint32_t r;
  if constexpr (kIsHalf<E>)
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  else
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
__device__ inline uint32_t fma_bf16x2(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t r;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
  return r;
}
// To nearest, ties away from zero: the tensor cores drop the low 13 bits. One instruction; cvt.rna
// is three because of infinities, which here may become NaN.
constexpr uint32_t kHalfTf32 = 0x1000u;
__device__ inline uint32_t to_tf32(float x) { return __float_as_uint(x) + kHalfTf32; }

// --- mma.sync ------------------------------------------------------------------------------------
// Rows 0..7 of A are (k_lo, k_hi), rows 8..15 (q_lo, q_hi); lo / hi are contraction indices 0..7 /
// 8..15.
template <class E>
__device__ inline void mma_pairs(float (&d)[4], uint32_t k_lo, uint32_t q_lo, uint32_t k_hi,
                                 uint32_t q_hi, uint32_t b_lo, uint32_t b_hi) {
  if constexpr (kIsHalf<E>)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(k_lo), "r"(q_lo), "r"(k_hi), "r"(q_hi), "r"(b_lo), "r"(b_hi));
  else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(k_lo), "r"(q_lo), "r"(k_hi), "r"(q_hi), "r"(b_lo), "r"(b_hi));
}
__device__ inline float round_tf32(float x) { return __uint_as_float(to_tf32(x) & 0xffffe000u); }
// d (16 x 8) += a (16 x 8) b (8 x 8), operands rounded before; contraction index 2x, 2x + 1 of lane
// x stands for x, x + 4, in both operands, so that an accumulator is an operand as it stands.
__device__ inline void mma_tf32(float (&d)[4], const float (&a)[4], float b0, float b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[2])), "r"(__float_as_uint(a[1])),
        "r"(__float_as_uint(a[3])), "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
}
__device__ inline void ldmatrix_x4(uint32_t (&r)[4], uint32_t addr) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(addr)
               : "memory");
}
__device__ inline void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t addr) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(addr)
               : "memory");
}
__device__ inline void stmatrix_x4(uint32_t addr, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(addr),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}
__device__ inline void stmatrix_x4_trans(uint32_t addr, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(addr),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}
__device__ inline void store_shared(uint32_t addr, uint32_t v) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(addr), "r"(v) : "memory");
}
__device__ inline uint32_t load_shared(uint32_t addr) {
  uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(addr) : "memory");
  return v;
}
// Byte offset of 16 bytes in a 64-channel half tile.
__device__ inline uint32_t swizzled(int row, int chunk16) {
  return row * 128 + ((chunk16 ^ (row & 7)) << 4);
}

}  // namespace deltic::gpu
