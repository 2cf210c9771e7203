// Warpgroups, registers and shared memory of the two roles.
#pragma once
#include "params.h"

namespace deltic::gpu {

// Preparing CTA: warpgroups 0, 1 form operands; 2, 3 (every other chunk each) scores and inverse.
// Carrying CTA:  warpgroups 0, 1 carry 64 value columns each; 2, 3 leave.
// In both one more warp loads.
constexpr int kThreads = 544, kLoadWarp = 16;
constexpr int kRowThreads = 256, kScoreThreads = 128;
// setmaxnreg values; 544 threads start with 120 registers, so four warpgroups share 480 x 128 and
// the loading warp keeps its own.
constexpr int kRowRegs = 144, kScoreRegs = 96, kCarryRegs = 216, kIdleRegs = 24;
static_assert(2 * kRowRegs + 2 * kScoreRegs <= 480 && 2 * kCarryRegs + 2 * kIdleRegs <= 480);

constexpr int kRawStages = 2;
constexpr int kLevelBuffers = 3;  // operands of three score levels between rows and scores
constexpr int kPitch = 68;        // floats per row of L: 2x-th rows fall on different banks

struct Level {  // of the 32 upper tokens k, then q; of the 32 lower tokens k
  uint8_t rows[2 * 64 * 128];
  uint8_t columns[2 * 32 * 128];
};
struct Item {  // one chunk of one head to prepare
  int token, rest, head, valid;  // first token, tokens in the chunk
  Packet* packet;
  uint32_t* ready;
  uint32_t ready_value;
};
struct Stage {
  Item item;
  float slope;          // bounded, softplus
  float bias[kWidth];   // kChannel: slope times bias
  float beta[kChunk];   // 0 past the end
  float g_sum[kChunk];  // kHead: cumulative log2 decay
  uint32_t f[kChunk], h[kChunk];  // kHead: exp(G), exp(G_last - G), twice bf16
};
struct Scores {
  float l[kChunk * kPitch];       // L, then its inverse block by block in place
  uint8_t aqk[kHalf];             // above the diagonal zero
  float k_scale[kChunk], beta_k[kChunk];  // 1/|k|, beta/|k|
};
struct PrepareSmem {
  alignas(1024) uint8_t k[kRawStages][kTile], q[kRawStages][kTile], g[kRawStages][kTile];
  alignas(1024) Level level[kLevelBuffers];
  alignas(1024) Scores scores[2];
  float total[2][4][kWidth];  // decay of 16 tokens
  Stage stage[kRawStages];
  uint64_t raw_full[kRawStages], raw_empty[kRawStages];
  uint64_t level_full[kLevelBuffers], level_empty[kLevelBuffers], rows_done[2];
};
static_assert(sizeof(PrepareSmem) <= 232448);

constexpr int kKeyStages = 3, kRestStages = 2;
struct CarrySmem {
  alignas(1024) PacketKeys keys[kKeyStages];
  alignas(1024) PacketRest rest[kRestStages];
  alignas(1024) uint8_t v[kRestStages][2][kHalf];  // [warpgroup]
  alignas(1024) uint8_t o[2][kHalf];
  uint64_t keys_full[kKeyStages], keys_empty[kKeyStages];
  uint64_t rest_full[kRestStages], rest_empty[kRestStages];
};
static_assert(sizeof(CarrySmem) <= 232448);
constexpr int kSmemBytes =
    sizeof(PrepareSmem) > sizeof(CarrySmem) ? sizeof(PrepareSmem) : sizeof(CarrySmem);

}  // namespace deltic::gpu
