// Parameters and shared memory of the prefill probe.
#pragma once
#include <cuda.h>
#include <cuda_bf16.h>

#include <cstdint>

namespace deltic::gpu {

constexpr int kChunk = 64, kWidth = 128;
constexpr int kStages = 3;              // load c+1 | prepare c | carry c-1
constexpr int kHalf = kChunk * 64 * 2;  // 64 tokens x 64 channels, 128-byte rows, 128-byte swizzle
constexpr int kTile = 2 * kHalf;
constexpr int kSlabs = 8;  // groups of 8 tokens
// Warpgroups 0 and 1 work inside slabs; 2 and 3 between slabs, and carry the state.
constexpr int kSlabThreads = 256, kCarryThreads = 256, kThreads = kSlabThreads + kCarryThreads;
constexpr int kSlabRegs = 96, kCarryRegs = 160;
static_assert(2 * kSlabRegs + 2 * kCarryRegs == 512, "128 threads each, 65536 registers");

#ifdef DELTIC_TRACE
#define TRACE(c, i)                                             \
  if (params.trace && blockIdx.x == 0 && threadIdx.x % 32 == 0) \
  params.trace[((c)*16 + threadIdx.x / 32) * 16 + (i)] = clock64()
#else
#define TRACE(c, i)
#endif

enum class Gate { kLogDecay, kBounded };

struct Params {
  const int* cu_seqlens;      // [N+1]
  const __nv_bfloat16* beta;  // [T,H] logits
  const float* a_log;         // [H]      bounded only
  const float* dt_bias;       // [H,128]  bounded only
  __nv_bfloat16* o;           // [T,H,128], for the rows of a partial chunk
  const float* state_in;      // [N,H,V,K] or null
  float* state_out;           // [N,H,V,K] or null
  int num_heads;
  float scale, lower_bound;
  long long* trace;  // [chunk][warp][16] clock reads of block 0, built with DELTIC_TRACE only
};

struct Smem {
  // Raw tiles arrive by bulk copy and are overwritten in place by the thread that read them.
  alignas(1024) uint8_t q[kStages][kTile];  // q      -> q P8 -> q exp(G)
  alignas(1024) uint8_t k[kStages][kTile];  // k      -> k P8 -> k exp(G)
  alignas(1024) uint8_t g[kStages][kTile];  // raw g  -> k S8 -> k exp(G_last - G)
  alignas(1024) uint8_t t[2][kHalf];        // Scratch while the chunk is prepared, then the inverse
  alignas(1024) uint8_t aqk[2][kHalf];      // blocks above the diagonal stay zero
  alignas(1024) uint8_t v[2][2][kHalf];     // [carrying warpgroup][c & 1], then o of the same chunk
  float l_block[28][64];                    // strictly lower 8x8 blocks of L, tf32, packed for B
  float t_block[14][64];                    // blocks of the inverse that other warps read, likewise
  float total[kSlabs][kWidth];              // decay of a whole 8-token slab
  float decay[2][kWidth];                   // decay of the chunk
  float v_scale[2][kChunk];                 // |k|: v is divided by 1/|k|, see kernel.cuh
  float o_scale[2][kChunk];                 // scale / |q|
  float k_scale[2][kChunk];                 // 1 / |k|
  float beta_k[2][kChunk];                  // beta / |k|
  float bias[kWidth];                       // [step][k-step][x][4]: without bank conflicts
  int head, begin, len;
  uint64_t raw_full[kStages], ops_empty[kStages], slabs_full[2], v_full[2][2];
};
static_assert(sizeof(Smem) <= 232448);

// What Smem::t holds between the two preparing stages.
struct Scratch {
  // Decay factors of whole slabs, bf16. Rows 0..27 of the tile: read until the operands are
  // finished.
  __nv_bfloat16 prefix[7][kWidth];  // all before slabs 1 .. 7
  __nv_bfloat16 suffix[7][kWidth];  // all after slabs 0 .. 6
  // Between slab and level boundary; dead once the scores are done.
  __nv_bfloat16 level16[4][kWidth];  // slabs 0, 3, 4, 7
  __nv_bfloat16 level32[6][kWidth];  // slabs 0, 1, 2, 5, 6, 7
  float inverse[kSlabs]
               [64];  // of I + L inside the slab, packed for B; dead after level 8 of the inverse
};
static_assert(sizeof(Scratch) == kHalf);

}  // namespace deltic::gpu
