// Compile-time choices of the decode kernel.
#pragma once

#include "cuda/ptx/numbers.cuh"

namespace deltic::gpu::decode {

// A thread has 8 channels (a "piece" of the state's width) of kColumns value columns, 64 or 128
// bytes on their way: four or eight requests of 16 bytes. V-first the pieces of a column are
// neighbouring lanes, and a warp needs no other. K-first the lanes along V come first, so that a
// row of the slice is read in whole lines, and the pieces are over all warps.
inline constexpr int kChannels = 8;

// Who makes the sums over channels: multiply-adds and shuffles, or matrix instructions.
enum class Products { fma, mma };

// How a kernel is laid out; 0: as Traits says.
struct Choice {
  int threads = 0;
  int ctas = 0;     // per SM, at least: bounds the registers
  int columns = 0;  // of a thread
  int tokens = 0;   // of a stage
  int tiles = 1;    // parts of the state that a CTA has one after the other, all under way at once
  bool stays = false;                 // the state in shared memory between tokens
  Products products = Products::fma;  // mma: bf16 V-first
  bool starts_early = false;          // before the launch ahead of it on the stream ends
  bool single = false;                // dense, and one token per sequence
  bool lists = false;                 // single: as many tokens as sequences, which may be packed
  bool direct = false;                // the state straight into registers
  bool seeded = false;                // 16-bit states are rounded by chance
  bool touches = false;               // the parameters first, all at once
  bool held = false;    // V-first: unpacked in registers from the first token to the last
  bool drafts = false;  // all tokens at once, from a state that stays (kernel_drafts.cuh)
  bool hints = false;   // `single` K-first: the state of a later CTA to L2, as V-first always
};

// kTrees: tokens may start from the state after another one than the one before them.
template <class E_, int kWidth_, bool kVFirst_, bool kPerChannel_, bool kTrees_ = false,
          Choice kChoice = Choice{}>
struct Traits {
  using E = E_;                           // of the states: fp32, bf16 or fp16
  static constexpr int kWidth = kWidth_;  // K
  static constexpr bool kVFirst = kVFirst_, kPerChannel = kPerChannel_, kTrees = kTrees_;
  static constexpr bool kStartsEarly = kChoice.starts_early;
  static constexpr bool kSingle = kChoice.single, kDirect = kChoice.direct;
  static constexpr bool kLists = kChoice.lists;
  static constexpr bool kIsRow = kSingle;  // a sequence's token is its only one
  // The state of a later CTA to L2.
  static constexpr bool kHintsAhead =
      kChoice.single && !kChoice.direct && (kVFirst_ || kChoice.hints);
  static constexpr bool kSeeded = kChoice.seeded, kTouches = kChoice.touches;
  // A warp has 16 columns, four lanes along the channels and eight along the columns, two of which
  // each: the matrix instruction's left factor as it lies in memory.
  static constexpr bool kMma = kChoice.products == Products::mma;
  // Then decays per channel are in k and q, and must be there before them.
  static constexpr bool kGatesFirst = kMma && kPerChannel;
  // A thread has two pieces, half a width apart: the sums' first step over pieces is its own, and
  // what comes with a token whatever the part's size is shared by twice as many elements.
  static constexpr bool kHeld = kChoice.held;
  static constexpr bool kDrafts = kChoice.drafts;
  static constexpr int kOwnPieces = kHeld ? 2 : 1;
  static constexpr int kThreads = kChoice.threads > 0 ? kChoice.threads : 128;
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kColumns = kMma                  ? 2
                                  : kChoice.columns > 0 ? kChoice.columns
                                  : kHeld               ? 4
                                                        : 16 / sizeof(E);
  static constexpr int kPieces = kWidth / kChannels;
  static constexpr int kLanesK = kMma ? 4 : kPieces / kOwnPieces;        // V-first: of a column
  static constexpr int kLanesV = kThreads / kLanesK;                     // threads along V
  static constexpr int kSlice = kLanesV * kColumns;                      // value columns of a tile
  static constexpr int kTiles = kChoice.tiles, kSpan = kTiles * kSlice;  // and of a CTA
  // Tokens that are prepared together: what shared memory has beside the states.
  static constexpr int kStageTokens = kSingle              ? 1
                                      : kChoice.tokens > 0 ? kChoice.tokens
                                      : kMma               ? 4
                                                           : 8;
  // The most whose registers do not spill (README.md has them).
  static constexpr int kMostCtas = kMma                      ? 7
                                   : kHeld && sizeof(E) == 2 ? 4
                                   : kHeld                   ? (kPerChannel ? 3 : 4)
                                   : sizeof(E) == 2          ? (kVFirst ? 7 : 6)
                                   : kVFirst || (kWidth == 128 && !kPerChannel) ? 6
                                                                                : 5;
  static constexpr int kCtasPerSm = kChoice.ctas > 0 ? kChoice.ctas : kMostCtas - (kTrees ? 1 : 0);
  // `stream` is one of 256 threads: before Hopper shared memory has no room for two.
  static constexpr int kCtasElsewhere =
      kHeld && kThreads == 256 ? 1
      : kSingle                ? kCtasPerSm * 3 / 4
                               : kCtasPerSm - ((kVFirst ? sizeof(E) == 2 || (kHeld && kColumns == 2)
                                                        : sizeof(E) == 4 && kWidth == 128)
                                                   ? 1
                                                   : 0);
  // The state stays in shared memory between the two passes of a token: bf16, whose numbers
  // unpacked are more than the registers hold.
  static constexpr bool kStays = !kDirect && !kHeld && (sizeof(E) == 2 || kChoice.stays);
  // And goes back there vector by vector, where a token more may come: the registers of a whole
  // part are a CTA per SM.
  static constexpr bool kGoesBack = kStays && !kSingle && !kMma;
  // fp32 V-first: two runs of four channels half a width apart, so that lanes read neighbours.
  // kDrafts: then rows have their channels in order.
  static constexpr bool kHalves = (kVFirst || kDrafts) && sizeof(E) == 4;
  // kDrafts: eight lanes of a fragment's load, of two rows, meet no bank twice.
  static constexpr int kRowPitch = kWidth + (kDrafts ? 16 : 0);
  static_assert(kPieces == 8 || kPieces == 16, "a warp has whole columns of pieces");
  static_assert(kThreads / kPieces >= kStageTokens, "kPieces threads prepare a token");
  static_assert(kVFirst || kLanesV <= 32, "K-first a warp has whole rows of the slice");
  static_assert(!kMma || (kVFirst && sizeof(E) == 2), "fragments of 16-bit numbers along K");
  static_assert(kVFirst || kTiles == 1, "the sums of two tokens take turns, those of tiles do not");
  static_assert(kSpan <= kThreads, "a thread loads one value column of a token");
  static_assert(!kSingle || (kTiles == 1 && !kHeld && !kTrees && !kMma));
  static_assert(!kDirect || kSingle);
  static_assert(!kLists || (kSingle && kVFirst));
  static_assert(!kHeld || (kVFirst && !kTrees && !kMma && !kDirect));
  static_assert(!kSeeded || (sizeof(E) == 2 && !kMma));
  static_assert(!kDrafts ||
                    (sizeof(E) == 4 && kSlice % (16 * kWarps) == 0 && kStageTokens == 2 * kWarps),
                "a warp has runs of 16 columns, and walks the paths of two tokens");
};

// A kernel of one token per sequence where a sequence has more: with each the state goes back to
// where it waited.
template <class Tr>
struct TokenByToken : Tr {
  static_assert(Tr::kSingle && Tr::kStays);
  static constexpr bool kGoesBack = true, kIsRow = false;
};

// What the tokens of a call are. All kinds have the same bits.
enum class Kind {
  several,  // any number of them, or packed
  held,     // the same V-first, states in registers
  pairs,    // held, of so many heads that a CTA has two parts: 16-bit, K = 128
  few,      // held, of so few heads that small parts of them all run at once
  stream,   // held, dense, up to eight tokens: by CTAs that stay (kernel_stream.cuh); fp32, K = 128
  single,   // one per sequence, dense: few threads per CTA, and nothing kept for later tokens
  many,     // the same of many sequences, where longer rows are worth more: 16-bit K-first
  alone,    // the same by warps that need no other, V-first (kernel_alone.cuh)
  listed,   // single, V-first, packed with as many tokens as sequences, or slots of a table
  listed_alone,  // alone of such calls
  trees,         // a token may start from another one than the one before it
  seeded         // any of them, 16-bit states rounded by chance
};
// K-first a CTA's rows are 256 bytes long; of 16-bit states 128, where there are few. V-first fp32
// states have half as many CTAs to compute a head's decays as 16-bit ones.
template <class E, int kWidth, bool kVFirst>
constexpr Choice single_choice(bool has_many) {
  const bool is_half = sizeof(E) == 2;
  if (kVFirst) {
    return {.threads = is_half ? 64 : 128,
            .ctas = !is_half       ? 7
                    : kWidth == 64 ? 10
                                   : 14,
            .stays = true,
            .starts_early = true,
            .single = true};
  }
  const int row_threads = is_half && !has_many ? kWidth : 2 * kWidth;
  return {.threads = row_threads,
          .ctas = is_half && kWidth == 64 ? 640 / row_threads : 1024 / row_threads,
          .stays = true,
          .starts_early = true,
          .single = true,
          .touches = true};
}
// States in registers. Of `pairs` a head's norms and gates are made once, not by two CTAs.
template <class E, int kWidth>
constexpr Choice held_choice(Kind kind) {
  Choice x{.starts_early = true, .touches = true, .held = true};
  if (kind == Kind::pairs) x.ctas = 4, x.tiles = 2;
  if (kind == Kind::few) x.ctas = sizeof(E) == 4 && kWidth == 64 ? 4 : 5, x.columns = 2;
  if (kind == Kind::stream) x.threads = 256, x.ctas = 2;
  return x;
}
// Of up to 8 or 16 tokens. 128 columns to a CTA, mostly a head: tokens are prepared once.
constexpr Choice drafts_choice(int width, int tokens) {
  return {.threads = 16 * tokens,
          .ctas = tokens == 8 ? 3 : 2,
          .columns = width / tokens,
          .tokens = tokens,
          .starts_early = true,
          .drafts = true};
}
template <int kWidth, bool kVFirst, bool kPerChannel, int kTokens>
using DraftTraits =
    Traits<float, kWidth, kVFirst, kPerChannel, false, drafts_choice(kWidth, kTokens)>;
template <class E, int kWidth, bool kVFirst>
constexpr Choice choice_of(Kind kind) {
  if (kind == Kind::single) return single_choice<E, kWidth, kVFirst>(false);
  if (kind == Kind::many) return single_choice<E, kWidth, kVFirst>(true);
  if (kind == Kind::listed) {
    Choice x = single_choice<E, kWidth, kVFirst>(false);
    x.lists = true;
    if (sizeof(E) == 2) x.ctas = 14;
    return x;
  }
  if (kind == Kind::alone || kind == Kind::listed_alone) {
    return {.threads = 128,
            .ctas = 1,
            .columns = 4,
            .starts_early = true,
            .single = true,
            .lists = kind == Kind::listed_alone,
            .direct = true};
  }
  if (kind == Kind::seeded) return {.ctas = 3, .seeded = true};
  if (kind == Kind::several || kind == Kind::trees) return {};
  return held_choice<E, kWidth>(kind);
}
template <class E, int kWidth, bool kVFirst, bool kPerChannel, Kind kKind>
using TraitsOf =
    Traits<E, kWidth, kVFirst, kPerChannel, kKind == Kind::trees || kKind == Kind::seeded,
           choice_of<E, kWidth, kVFirst>(kKind)>;
// Heads of sequences that are many: measured are 32, which are few, and 2048, which are not.
inline constexpr int64_t kManyHeads = 512;
// Threads per SM whose state is asked for ahead by Kind::single, 128 bytes each.
inline constexpr int kAheadThreads = 256;
// Heads of sequences from which on one token V-first goes through Kind::single although Kind::alone
// takes it; of fp32 states with decays per channel never, which `single` computes four times a
// head. Measured are 1024, 2048 and 8192.
template <class E>
inline constexpr int64_t kSingleHeads = sizeof(E) == 4 ? 4096 : 2048;

}  // namespace deltic::gpu::decode
