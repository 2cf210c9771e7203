// What a call of the forward probe is given: shapes, options, tensors, workspace.
#pragma once
#include <cuda.h>
#include <cuda_bf16.h>

#include <cstdint>

namespace deltic::gpu {

enum class Gate { kNone, kHead, kChannel };              // decay 1 | one per head | one per channel
enum class GateForm { kLogDecay, kBounded, kSoftplus };  // spec.md 2

constexpr int kChunk = 64, kWidth = 128;  // tokens per chunk; K = V
constexpr int kHalf = kChunk * 64 * 2;    // 64 tokens x 64 channels, 128-byte rows and swizzle
constexpr int kTile = 2 * kHalf;

// Operands of one chunk and head, as the carrying CTA wants them in shared memory.
struct PacketKeys {
  uint8_t kd[kTile];  // k exp(G)
  uint8_t qd[kTile];  // q exp(G)
};
struct PacketRest {
  uint8_t kr[kTile];    // k exp(G_last - G)
  uint8_t t[kHalf];     // -(I + D L)^-1 D, D = beta/|k|^2, L = k k^T with decays, i > j
  uint8_t aqk[kHalf];   // q k^T with decays, i >= j
  float decay[kWidth];  // exp(G_last)
};
struct Packet {
  PacketKeys keys;
  float scales[2 * kChunk];  // -|k|, then scale/|q|
  PacketRest rest;
};
static_assert(sizeof(Packet) == 65 * 1024 && sizeof(PacketRest) % 16 == 0);

// Who does what; written by the planning kernel, the same for every CTA of a call.
struct Plan {
  int total;     // chunks of all jobs; a job is (sequence, value head), in this order
  int carriers;  // times one CTA (transfer: two) carry a state; the others prepare
  int steps;     // chunks per carrier: carrier i has positions [i steps, (i + 1) steps)
  int num_seqs;
};

struct Params {
  const int* cu_seqlens;        // [N+1]
  const __nv_bfloat16* beta;    // [T,HV] logits
  const __nv_bfloat16* g_head;  // [T,HV], Gate::kHead only
  const float* a_log;           // [HV]        bounded, softplus
  const float* dt_bias;         // [HV,128] or (kHead) [HV], or null
  __nv_bfloat16* o;             // [T,HV,128]
  const float* state_in;        // [N,HV,V,K] or null
  float* state_out;             // [N,HV,V,K] or null
  float scale, lower_bound;
  int num_seqs, num_heads, num_value_heads;
  // Transfer (S_out = M S_in + E): every carrier is two CTAs that read the same packets, one for E
  // (state from 0), one for M (values 0, state from the identity); no o; state_out is [2,N,HV,V,K]:
  // E, then M transposed.
  bool is_transfer;
  // Workspace.
  int ring_slots;  // packets per carrier, a power of two
  Plan* plan;
  int* chunk_prefix;  // [N+1] chunks before each sequence
  uint32_t* flags;    // ready [CTAs][kMaxRing], consumed [CTAs][32], handoff [CTAs][32]
  Packet* ring;       // [CTAs][ring_slots]
  float* handoff;     // [CTAs][V,K] states that go from one carrier to another
};
constexpr int kMaxRing = 32;

__host__ __device__ inline int64_t flag_words(int ctas) { return int64_t(ctas) * (kMaxRing + 64); }
__device__ inline uint32_t* ready_flag(const Params& p, int carrier, int slot) {
  return p.flags + carrier * kMaxRing + slot;
}
// Of carrying CTAs: group * carrier + which of the group.
__device__ inline uint32_t* consumed_flag(const Params& p, int cta) {
  return p.flags + gridDim.x * kMaxRing + cta * 32;
}
__device__ inline uint32_t* handoff_flag(const Params& p, int cta) {
  return p.flags + gridDim.x * (kMaxRing + 32) + cta * 32;
}
__host__ __device__ inline int group_of(const Params& p) { return p.is_transfer ? 2 : 1; }

}  // namespace deltic::gpu
