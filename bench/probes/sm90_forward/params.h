// What a call of the forward probe is given: shapes, options, tensors, workspace.
#pragma once
#include <cuda.h>
#include <cuda_bf16.h>

#include <cstddef>
#include <cstdint>

namespace deltic::gpu {

enum class Gate { kHead, kChannel };                     // one decay per head (or none), one per channel
enum class GateForm { kLogDecay, kBounded, kSoftplus };  // spec.md 2

constexpr int kChunk = 64, kWidth = 128;  // tokens per chunk; K = V
constexpr int kHalf = kChunk * 64 * 2;    // 64 tokens x 64 channels, 128-byte rows and swizzle
constexpr int kTile = 2 * kHalf;

// Per-token factors of one chunk as the carrying threads read them: lane x of four needs columns
// 8 j + 2 x and the next, j = 0 .. 7, in a row; blocks of four are exchanged between lanes so that
// the four lanes' 16-byte loads fall on different banks.
__host__ __device__ constexpr int factor_place(int column) {
  const int x = column % 8 / 2, j = column / 8;
  return 16 * x + 4 * ((j / 2) ^ (x / 2)) + 2 * (j % 2) + column % 2;
}
// Of a channel, the same with 16 pairs per lane.
__host__ __device__ constexpr int decay_place(int channel) {
  const int x = channel % 8 / 2, j = channel / 8;
  return 32 * x + 4 * ((j / 2) ^ x) + 2 * (j % 2) + channel % 2;
}
// Of a pair of columns.
__host__ __device__ constexpr int pair_place(int column) {
  return 8 * (column % 8 / 2) + column / 8;
}

// What the carrying CTA needs of one chunk and head, as it wants it in shared memory.
struct Solved {
  uint8_t t[kHalf];    // the inverse with its scales
  uint8_t aqk[kHalf];  // q k^T with decays, i >= j
};
template <Gate>
struct Packet;
// Gates per channel: operands with decays in them; norms are factors of v and o. With D = beta/|k|^2
// and L = k k^T with decays (i > j), unnormalised, T = (I + D L)^-1 D and v_new/|k| = T (|k| v - k S).
template <>
struct Packet<Gate::kChannel> {
  struct Keys {
    uint8_t k[kTile];  // k exp(G)
    uint8_t q[kTile];  // q exp(G)
  } keys;
  struct alignas(1024) Rest {
    uint8_t kr[kTile];  // k exp(G_last - G)
    Solved solved;
    float decay[kWidth];     // exp(G_last)
    float v_factor[kChunk];  // |k|
    float o_factor[kChunk];  // scale/|q|
  } rest;
};
// Gates per head, or none: the carrier takes k and q as they are and multiplies accumulators; T and Aqk are
// those of spec.md, all norms and scales in them.
template <>
struct Packet<Gate::kHead> {
  struct alignas(1024) Rest {
    Solved solved;
    float ks_factor[kChunk];             // exp(G)/|k|, of k S
    float qs_factor[kChunk];             // exp(G) scale/|q|, of q S
    uint32_t v_new_factor[kChunk / 2];  // exp(G_last - G)/|k|, bf16 pairs
    float decay[4];                      // exp(G_last), four times
  } rest;
};
template <Gate kGate>
constexpr int kRestBytes = kGate == Gate::kChannel ? 33 * 1024 : 2 * kHalf + 656;
static_assert(sizeof(Packet<Gate::kChannel>) == 65 * 1024 && sizeof(Packet<Gate::kHead>) == 17 * 1024);
static_assert(offsetof(Packet<Gate::kHead>::Rest, decay) + 16 == kRestBytes<Gate::kHead>);

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
  bool has_gate, has_norm, has_sigmoid;
  GateForm form;  // kHead
  // Workspace.
  int ring_slots;  // packets per carrier, a power of two
  Plan* plan;
  int* chunk_prefix;  // [N+1] chunks before each sequence
  uint32_t* flags;    // ready [CTAs][kMaxRing], consumed [CTAs][32], handoff [CTAs][32]
  uint8_t* ring;      // [CTAs][ring_slots] packets
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
