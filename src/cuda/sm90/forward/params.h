// What a launch of the forward is given: packets, tensors, workspace. Plain data; strides in
// elements.
#pragma once
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstddef>
#include <cstdint>

#include "cuda/ptx/registers.cuh"
#include "cuda/saved.h"
#include "cuda/schedule/order.cuh"
#include "cuda/schedule/pieces.cuh"
#include "cuda/schedule/tickets.cuh"
#include "cuda/sm90/chunk/tiles.h"
#include "cuda/tile/slots.cuh"

namespace deltic::gpu::forward {

using chunk::kHalfBytes, chunk::kTileBytes;
using schedule::divide, schedule::kChunk, schedule::kWidth, schedule::Piece, schedule::Place,
    schedule::Plan;

// spec.md 2. For the planning kernels alone, and numbered as they were measured: with
// deltic_gate_form they are other machine code.
enum class GateForm { kLogDecay, kBounded, kSoftplus };

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
  uint8_t t[kHalfBytes];    // the inverse with its scales
  uint8_t aqk[kHalfBytes];  // q k^T with decays, i >= j
};
template <GateKind>
struct Packet;
// Gates per channel: operands with decays in them; norms are factors of v and o. With D =
// beta/|k|^2 and L = k k^T with decays (i > j), unnormalised, T = (I + L D)^-1, whose diagonal no
// rounding touches, and v_new/|k| = D T (|k| v - k S). In fp16 1/|k|^2 would leave the range, so
// all of T, Aqk and v_new are with normalised k there: T = (I + D L)^-1 D, v_new = |k| T |k| (v - k
// S/|k|).
template <>
struct Packet<GateKind::kChannel> {
  uint8_t k[kTileBytes];  // k exp(G)
  uint8_t q[kTileBytes];  // q exp(G)
  struct alignas(1024) Body {
    uint8_t kr[kTileBytes];  // k exp(G_last - G)
    Solved solved;
    float decay[kWidth];       // exp(G_last)
    float v_factor[kChunk];    // |k|; fp16: 1/|k|, of k S and of v_new for the state
    float new_factor[kChunk];  // D; not in fp16
  } body;
  alignas(16) float o_factor[kChunk];  // scale/|q|; needed longer than the body
};
// Gates per head, or none: the carrier takes k and q as they are and multiplies accumulators. Aqk
// is that of spec.md, all norms and scales in it; T = (I + M beta)^-1 with M = L/beta by rows, so
// that v_new = beta T (v - k S) and no rounding touches T's diagonal.
struct alignas(16) HeadFactors {
  float ks_factor[kChunk];   // exp(G)/|k|, of k S
  float qs_factor[kChunk];   // exp(G) scale/|q|, of q S
  float new_factor[kChunk];  // beta, of T (v - k S)
  // exp(G_last - G)/|k|: of pairs of columns as the sum of two bf16 (pair_place); with fp16
  // operands 64 numbers of fp32 (factor_place).
  uint32_t v_new_factor[2][kChunk / 2];
  float decay;  // exp(G_last)
};
template <>
struct Packet<GateKind::kHead> {
  struct alignas(1024) Body {
    Solved solved;
    HeadFactors factors;
  } body;
};
template <GateKind kGate>
constexpr int kBodyBytes = kGate == GateKind::kChannel ? sizeof(Packet<GateKind::kChannel>::Body)
                                                       : sizeof(Solved) + sizeof(HeadFactors);
static_assert(offsetof(Packet<GateKind::kChannel>::Body, solved) == kTileBytes,
              "kr and T in one copy");
static_assert(sizeof(Packet<GateKind::kChannel>) == 66 * 1024);
static_assert(sizeof(Packet<GateKind::kHead>) == 18 * 1024);
static_assert(sizeof(HeadFactors) == 1040);

// Beside Rows these are less than the Param, States and Indices of other kernels: parameters that
// are contiguous, states without layers, lists of one column in memory that is constant to the
// launch. With the larger ones all that follows would lie elsewhere in the kernels' parameters, and
// lists would be read by other instructions.
struct Flat {  // A_log, dt_bias
  const void* data;
  DType dtype;
};
struct StateView {  // [slot, HV, ...]
  void* data;
  DType dtype;
  int64_t s_slot, s_head, s_k, s_v;
};
struct IndexList {
  const void* data;
  bool is64;
  int64_t stride;
};
__device__ inline int64_t load_index(const IndexList& list, int64_t i) {
  return list.is64 ? __ldg(static_cast<const int64_t*>(list.data) + i * list.stride)
                   : __ldg(static_cast<const int*>(list.data) + i * list.stride);
}
// States inside of sequences (spec.md 2). The carrier leaves the state before a chunk that has
// checkpoints in the place of one of them in `stash`, likewise the state after the last token; what
// is left, at most 63 tokens, is the recurrence's.
struct Checkpoints {
  IndexList cu, tokens, slots;
  int count;         // M
  int num_slots;     // of the destination
  int* chunk_stash;  // [chunks of all sequences] whose place takes the state before the chunk; -1
  Span* spans;       // [M] the tokens that are left
  int *from, *to;    // [M] place in `stash`, slot of the destination; -1: unused
  float* stash;      // [M][HV][V,K]
};
struct Output {  // [B,T,HV,V] bf16 or fp16
  uint16_t* data;
  int64_t sb, st, sh;
};

struct Params {
  // Without data where there is none.
  Rows beta, g_head;    // none: 1; decay 1
  Rows g_channel;       // [B,T,HV,K], where it does not come as bf16 tiles
  Rows look_g, look_k;  // [B,T,HV,K], [B,T,H,K] as they are, for find_forgotten()
  Flat a_log, dt_bias;
  Output o;
  StateView state_in, state_out;
  float scale, lower_bound, beta_scale;
  int num_batches, num_tokens, num_sequences, num_heads, num_value_heads, key_width, value_width;
  bool has_norm, has_sigmoid;
  GateForm form;  // kHead
  // Lengths and slots, for the planning kernel.
  bool is_packed;
  IndexList cu_seqlens;
  const Span* spans;  // [N] the first tokens of each sequence that run; null: all of them
  SlotLists slots;
  const uint64_t* record;  // of checked mode: all ones, or there is no work; null: not checked
  int split_chunks;        // of a piece; 0: sequences stay whole
  Checkpoints ckpt;
  void* saved;  // for backward; null: nothing is kept
  SavedLayout saved_layout;
  // Transfer (S_out = M S_in + E) of all pieces but the last of each sequence: a carrier has two
  // states, E (from 0) and M (values 0, from the identity); no o.
  bool is_transfer;
  // Workspace. States in it are fp32, [V,K] of 128 x 128.
  int max_pieces;
  int ring_slots;  // packets per carrier, a power of two
  Plan* plan;
  Piece* pieces;      // [max_pieces]
  int* chunk_prefix;  // [max_pieces + 1] chunks before each piece
  int* first_piece;   // [N + 1]
  // ready [CTAs][kMaxRing], consumed [CTAs][32], handoff [CTAs][32], attendance [CTAs]; of fused
  // CTAs a Tickets behind them
  uint32_t* flags;
  uint8_t* ring;         // [CTAs][ring_slots] packets
  float* handoff;        // [CTAs][V,K] states that go from one carrier to another
  float* transfer;       // [2][max_pieces][HV][V,K]: E, then M transposed; if split
  float* segment_state;  // [max_pieces][HV][V,K] before each piece; if split
  float2* head_rows;     // [HV][B T] log2 decay and beta, of gates per head
  // [windows][HV, filled up to fours] whether the state is forgotten at a border (pieces.cuh);
  // null: transfers are whole.
  uint8_t* forgotten;
};
constexpr int kMaxRing = 32;
constexpr int kMaxWindows = 2048;  // whose borders are looked at
__host__ __device__ inline int forgotten_stride(int value_heads) {
  return (value_heads + 3) / 4 * 4;
}
constexpr int64_t kStateSize = kWidth * kWidth;
__device__ inline float* stash_at(const Params& p, int place, int head) {
  return p.ckpt.stash + (int64_t(place) * p.num_value_heads + head) * kStateSize;
}

// Words before the attendance, and of all flags. CTAs: of the grid, whether they take part or not.
__host__ __device__ inline int64_t attendance_place(int ctas) {
  return int64_t(ctas) * (kMaxRing + 64);
}
__host__ __device__ inline int64_t tickets_place(int ctas) { return attendance_place(ctas) + ctas; }
__host__ __device__ inline int64_t flag_words(int ctas) {
  return tickets_place(ctas) + int64_t(sizeof(schedule::Tickets) / 4);
}
// The carrier's packet of a step, and its flag.
__device__ inline int slot_at(const Params& p, int step) { return step & (p.ring_slots - 1); }
template <GateKind kGate>
__device__ inline Packet<kGate>* packet_at(const Params& p, int carrier, int step) {
  return reinterpret_cast<Packet<kGate>*>(p.ring) + int64_t(carrier) * p.ring_slots +
         slot_at(p, step);
}
__device__ inline uint32_t* ready_flag(const Params& p, int carrier, int step) {
  return p.flags + carrier * kMaxRing + slot_at(p, step);
}
// Of carrying CTAs: group * carrier + which of the group.
__device__ inline uint32_t* consumed_flag(const Params& p, int cta) {
  return p.flags + grid_size() * kMaxRing + cta * 32;
}
__device__ inline uint32_t* handoff_flag(const Params& p, int cta) {
  return p.flags + grid_size() * (kMaxRing + 32) + cta * 32;
}
// Whether a CTA of the grid takes part (schedule/attendance.h).
__device__ inline uint32_t* attendance_word(const Params& p, int cta) {
  return p.flags + attendance_place(grid_size()) + cta;
}
__device__ inline schedule::Tickets& tickets_of(const Params& p, int ctas) {
  return *reinterpret_cast<schedule::Tickets*>(p.flags + tickets_place(ctas));
}
__device__ inline int num_states(const Params& p) { return p.is_transfer ? 2 : 1; }
// CTAs to a carrier; they read the same packets.
__device__ inline int group_of(const Params& p, int parts) { return num_states(p) * parts; }
// Rows of a carried state: values, or those of M, which are keys.
__device__ inline int num_rows(const Params& p) {
  return p.is_transfer && p.key_width > p.value_width ? p.key_width : p.value_width;
}
// Warpgroups of a carrying CTA that carry.
__device__ inline int num_carrying(const Params& p, int parts) {
  return num_rows(p) > kWidth / 2 && parts == 1 ? 2 : 1;
}

// A state as those in the workspace: pairs of numbers, half of the instructions, a single copy.
__device__ inline bool is_plain(const StateView& view, const Params& params) {
  return view.dtype == DType::f32 && view.s_k == 1 && view.s_v == kWidth &&
         params.key_width == kWidth && params.value_width == kWidth &&
         (reinterpret_cast<uintptr_t>(view.data) | 4 * view.s_slot | 4 * view.s_head) % 8 == 0;
}

// Bytes of a state whose numbers lie next to each other, in either layout: a multiple of 128, as K
// and V are of 8. 0: they do not, or there is none.
__device__ inline int dense_bytes(const StateView& view, const Params& params) {
  const int k = params.key_width, v = params.value_width;
  const bool is_dense =
      view.data && ((view.s_k == 1 && view.s_v == k) || (view.s_v == 1 && view.s_k == v));
  return is_dense ? k * v * (view.dtype == DType::f32 ? 4 : 2) : 0;
}

// A number's bits, and the number: apart, so that several loads are under way before one is used.
__device__ inline uint32_t load_bits(const void* data, DType type, int64_t at) {
  return type == DType::f32 ? __ldg(static_cast<const unsigned*>(data) + at)
                            : __ldg(static_cast<const unsigned short*>(data) + at);
}
__device__ inline float number_of(uint32_t bits, DType type) {
  return type == DType::f32    ? __uint_as_float(bits)
         : type == DType::bf16 ? __uint_as_float(bits << 16)
                               : __half2float(__ushort_as_half((unsigned short)bits));
}
__device__ inline float load_number(const void* data, DType type, int64_t at) {
  return number_of(load_bits(data, type, at), type);
}
// Bits of a number of 16 bits.
__device__ inline uint16_t narrow_bits(float x, DType type) {
  return type == DType::bf16 ? __bfloat16_as_ushort(__float2bfloat16_rn(x))
                             : __half_as_ushort(__float2half_rn(x));
}
// A number of a state. The launch may write states in place, so these are no loads of constant
// memory, as those above are.
__device__ inline float state_number(const StateView& view, int64_t at) {
  return view.dtype == DType::f32
             ? static_cast<const float*>(view.data)[at]
             : number_of(static_cast<const uint16_t*>(view.data)[at], view.dtype);
}
__device__ inline void store_number(const StateView& view, int64_t at, float x) {
  if (view.dtype == DType::f32)
    static_cast<float*>(view.data)[at] = x;
  else
    static_cast<uint16_t*>(view.data)[at] = narrow_bits(x, view.dtype);
}

}  // namespace deltic::gpu::forward
