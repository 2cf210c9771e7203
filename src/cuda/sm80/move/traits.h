// Compile-time choices of the move's kernels.
#pragma once

namespace deltic::gpu::move {

inline constexpr int kThreads = 256;

// In, Out: element types; void: as the call says, number by number. kVec numbers at once, 16 bytes
// of the wider type.
template <class In_, class Out_, bool kTransposed_>
struct Traits {
  using In = In_;
  using Out = Out_;
  static constexpr bool kTransposed = kTransposed_;
  static constexpr int kVec = sizeof(In) == 2 && sizeof(Out) == 2 ? 8 : 4;
};
template <bool kTransposed_>
struct Traits<void, void, kTransposed_> {
  using In = void;
  using Out = void;
  static constexpr bool kTransposed = kTransposed_;
  static constexpr int kVec = 1;
};

// A CTA's tile: rows of 64 numbers. A thread has kRuns requests under way: four where rows stay
// rows; a square of 64 where they become columns, 16 KB in shared memory.
inline constexpr int kColumns = 64;
template <class Tr>
struct Tile {
  static constexpr int kLanes = kColumns / Tr::kVec;  // threads along a row
  static constexpr int kStep = kThreads / kLanes;     // rows at a time
  static constexpr int kRows = Tr::kTransposed ? kColumns : 4 * kStep;
  static constexpr int kRuns = kRows / kStep;
  static_assert(kThreads % kLanes == 0 && kRows % kStep == 0, "all threads have as many runs");
};

}  // namespace deltic::gpu::move
