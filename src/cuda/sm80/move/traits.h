// Compile-time choices of the move's kernels.
#pragma once

namespace deltic::gpu::move {

inline constexpr int kThreads = 256;

// In, Out: element types; void: as the call says, number by number. kVec numbers at once, 16 bytes
// of the wider type. kEdge: where rows become columns, blocks of kVec x kVec along a tile's edge, a
// thread each.
template <class In_, class Out_, bool kTransposed_, int kEdge_ = 16>
struct Traits {
  using In = In_;
  using Out = Out_;
  static constexpr bool kTransposed = kTransposed_;
  static constexpr int kVec = sizeof(In) == 2 && sizeof(Out) == 2 ? 8 : 4;
  static constexpr int kEdge = kEdge_;
  static constexpr bool kBlocks = kTransposed;  // a thread turns a block in its registers
};
template <bool kTransposed_>
struct Traits<void, void, kTransposed_> {
  using In = void;
  using Out = void;
  static constexpr bool kTransposed = kTransposed_;
  static constexpr int kVec = 1;
  static constexpr bool kBlocks = false;
};

// A CTA's tile. Rows that stay rows, and single numbers: rows of 64 numbers, of which a thread has
// kRuns requests under way: four where rows stay rows, else a square of 64. Blocks: a square of
// kEdge blocks, a thread has the kVec runs of one under way.
template <class Tr>
struct Tile {
  static constexpr int kColumns = 64;
  static constexpr int kThreads = move::kThreads;
  static constexpr int kLanes = kColumns / Tr::kVec;  // threads along a row
  static constexpr int kStep = kThreads / kLanes;     // rows at a time
  static constexpr int kRows = Tr::kTransposed ? kColumns : 4 * kStep;
  static constexpr int kRuns = kRows / kStep;
  static_assert(kThreads % kLanes == 0 && kRows % kStep == 0, "all threads have as many runs");
};
template <class Tr>
requires Tr::kBlocks struct Tile<Tr> {
  static constexpr int kThreads = Tr::kEdge * Tr::kEdge;
  static constexpr int kColumns = Tr::kEdge * Tr::kVec, kRows = kColumns;
  // A block's column as it is written, kVec numbers of Out. As many as 128 bytes hold meet no bank
  // twice.
  static constexpr int kWords = Tr::kVec * int{sizeof(typename Tr::Out)} / 4;
  static constexpr unsigned kChunksOfBanks = 32 / kWords;
};

// CTAs per SM, by which registers are given: 96 KB and more under way where 13 KB keep memory busy,
// because loads and stores of one CTA do not overlap. Numbers of any type, one by one, need more
// registers than six leave; a block of 8 x 8 short ones has 64 of them, of 4 x 4 words 32.
template <class Tr>
constexpr int ctas_per_sm() {
  if constexpr (!Tr::kBlocks) {
    return Tr::kVec == 1 ? 4 : 6;
  } else {
    return (Tr::kVec == 8 ? 3 : 5) * (256 / Tile<Tr>::kThreads);
  }
}

}  // namespace deltic::gpu::move
