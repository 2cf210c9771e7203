// Warpgroups, registers and shared memory of the two roles.
#pragma once
#include <cstddef>

#include "cuda/ptx/wgmma.cuh"
#include "cuda/sm90/chunk/heads.cuh"
#include "cuda/sm90/chunk/levels.cuh"
#include "cuda/sm90/chunk/scores.cuh"
#include "cuda/sm90/forward/params.h"

namespace deltic::gpu::forward {

// Carrying CTA: warpgroups 0, 1 carry 64 value columns each, or 0 alone those that the CTA has;
// threads of 2 load packets, free their places, load inputs and send o out; 3 leaves.
// Preparing CTA, gates per channel: warpgroups 0, 1 form operands; 2, 3 (every other chunk each)
// load, scores, inverse. Gates per head: 0, 1 form scores, every other chunk each; every warp of 2,
// 3 loads and solves chunks of its own.
constexpr int kThreads = 512;
constexpr int kRowThreads = 2 * kWarpgroup, kScoreThreads = kWarpgroup;
// setmaxnreg values; 512 threads start with 128 registers. A separate loading warp would cost a
// fifth of that: registers belong to the four quarters of an SM, and 17 warps leave 96 to each.
constexpr int kRowRegs = 168, kScoreRegs = 88, kCarryRegs = 224, kLoadRegs = 32;
static_assert(2 * kRowRegs + 2 * kScoreRegs <= 512 && 2 * kCarryRegs + 2 * kLoadRegs <= 512);

constexpr int kRawStages = 2;
constexpr int kLevels = 6, kLevelBuffers = 3;  // operands of three levels of scores are under way
// At raw_full of a preparing CTA: the lanes of the warp that brought numbers, and the thread that
// expects the tiles' bytes.
constexpr int kRawArrivals = 32 + 1;
// Gates per channel: of a scoring warpgroup two warps invert, one looks up items and loads numbers,
// one moves tiles, by its first thread.
constexpr int kNumberWarp = 2, kTileWarp = 3, kTileThread = 32 * kTileWarp;
// Named barriers of a preparing CTA, gates per channel. A warp arrives at these as one; at an
// mbarrier each lane does. Of row threads; of a scoring warpgroup (+ which), of its two warps that
// invert; + buffer: row threads have filled a level's buffer (they arrive, one scoring warpgroup
// waits), its product is done (the other way round).
constexpr int kRowBarrier = 1, kScoreBarrier = 2, kInvertBarrier = 4;
constexpr int kFullBarrier = 6, kEmptyBarrier = kFullBarrier + kLevelBuffers;
static_assert(kLevels % kLevelBuffers == 0, "the last item's waits and arrivals go by it");
static_assert(kLevelBuffers <= 4, "levels 4 and 5 always wait");
static_assert(kEmptyBarrier + kLevelBuffers <= 16);

// A CTA's part in the launch: who does what, which of those that take part it is, and how many they
// are.
struct Seat {
  Plan plan;
  int index, count;
};
struct Item {                      // one chunk of one head to prepare
  int tokens_left, step, carrier;  // in the chunk; which of its carrier's packets it is
  const void* g;  // the chunk's first row of gates, where they come by ordinary loads
};
struct PieceSpan {  // of a piece
  int token, length, batch;
};
struct Where {  // is that chunk
  int token, batch, tokens_left, head, qk_head, step, carrier;
};
struct Stage {
  Item item;
  float slope;                     // bounded, softplus
  alignas(16) float beta[kChunk];  // 0 past the end
  alignas(16) float bias[kWidth];  // slope times bias
};
// Raw tiles leave as the packet's operands: of k exp(G), q exp(G), k exp(G_last - G), in the places
// of k, q and g.
struct PrepareSmem {
  alignas(1024) uint8_t k[kRawStages][kTileBytes], q[kRawStages][kTileBytes],
      g[kRawStages][kTileBytes];
  alignas(1024) chunk::Level level[kLevelBuffers];
  alignas(1024) chunk::Scores scores[2];
  float total[2][4][kWidth];  // decay of 16 tokens
  Stage stage[kRawStages];
  Where where[kRawStages][2];  // the item that comes next into the place, and the one after it
  Seat seat;
  // raw_full: tiles and numbers of an item, for rows and scores; rows_done: its operands, for the
  // warp that sends them; turn: levels of the other scoring warpgroup are through; inverse_read:
  // between a scoring warpgroup's reads of the inverse and its writes of T.
  uint64_t raw_full[kRawStages], rows_done[kRawStages];
  uint64_t turn[2], inverse_read[2];
};
static_assert(sizeof(PrepareSmem) <= 232448);

// Gates per head, or none. Named barrier + which: of a scoring warpgroup.
constexpr int kHeadScoreBarrier = 1;
constexpr int kScorers = 2, kSolvers = 8, kRawTiles = 3;
static_assert(kSolvers % kScorers == 0, "a solver's chunks have one scorer, in order");
constexpr int kTablePieces = 127;      // pieces whose place is kept in shared memory
struct HeadWork : chunk::HeadScores {  // of one solver's chunk
  Where where[2];  // the chunk, and the one before until it is published or the next
};
struct HeadSmem {
  alignas(1024) uint8_t raw[kRawTiles][2 * kTileBytes];  // halves of k and q in turn
  HeadWork work[kSolvers];
  alignas(128) uint8_t aqk[kScorers][kHalfBytes];
  int prefix[kTablePieces + 1];
  PieceSpan spans[kTablePieces + 1];
  Seat seat;
  int num_loaded;  // chunks
  uint64_t raw_full[kRawTiles], raw_empty[kRawTiles], l_full[kSolvers];
  uint64_t turn[kScorers], aqk_empty[kScorers];
};
static_assert(sizeof(HeadSmem) <= 232448);

struct Job {  // or part of one, as a carrier comes to it
  Place place;
  Piece piece;
};
struct Part {  // of a job, in places of the carrier's positions
  // Positions: after the last, the next before which the state is kept, the first whose chunk is
  // not a whole one, the first. Read together, in a step before they are needed.
  alignas(16) int end;
  int stop, short_one, first;
  int token;        // first token of the chunk at position 0 if the job began there
  int tokens_left;  // of the job from there on
  int head, batch;
  int chunk;      // of all sequences, at position 0
  int own_chunk;  // of the sequence, likewise
  int job;        // of the carrier
};
// Named barriers of a carrying CTA, + warpgroup: its own; gates per head, it is through with the
// first half of a step. Of all that carry: the tail is clean.
constexpr int kCarryBarrier = 1, kTurnBarrier = 3, kCleanBarrier = 5;
// Warps of which one thread works beside those that carry.
enum class Mover { kPackets = 8, kInputs, kOutputs, kPlaces };
// Carrying CTA. v also takes o: a chunk's values are read early, its outputs leave from their
// place.
constexpr int kKeyStages = 3, kValueStages = 4;
template <GateKind kGate>
struct CarrySmem {
  static constexpr bool kIsFused = false;
  static constexpr int kHalf = kHalfBytes;  // from one half of the channels of k or q to the other
  static constexpr int kBodyStages = kGate == GateKind::kChannel ? 2 : 3;
  // Per channel k and q are with decays, and q, which is not needed at once, comes with the body.
  static constexpr int kQueryStages = kGate == GateKind::kChannel ? kBodyStages : kKeyStages;
  alignas(1024) uint8_t k[kKeyStages][kTileBytes], q[kQueryStages][kTileBytes];
  static constexpr int kValues = kValueStages;
  alignas(1024) uint8_t v[kValues][2][kHalfBytes];  // [warpgroup]
  alignas(1024) typename Packet<kGate>::Body body[kBodyStages];
  // Per channel: of a chunk whose o leaves in the step after it.
  alignas(16) float o_factor[kGate == GateKind::kChannel ? kBodyStages + 1 : 1][kChunk];
  // Jobs that are known ahead: loads are at most four chunks and a job ahead.
  static constexpr int kJobs = 8;
  Job job[kJobs];
  Part part[2];
  Seat seat;
  int first_half;   // which half of the values the first warpgroup has
  int state_bytes;  // of a given state that may be fetched ahead (dense_bytes)
  uint64_t keys_full[kKeyStages], keys_empty[kKeyStages];  // keys_empty: per head
  uint64_t body_full[kBodyStages], body_empty[kBodyStages];
  uint64_t job_full[kJobs];
  uint64_t v_full[kValueStages], v_empty[kValueStages], o_full[kValueStages];
};
constexpr int kSmemBytes = 232448;  // all that an SM gives a CTA
static_assert(sizeof(CarrySmem<GateKind::kChannel>) <= kSmemBytes);
static_assert(sizeof(CarrySmem<GateKind::kHead>) <= kSmemBytes);

}  // namespace deltic::gpu::forward
