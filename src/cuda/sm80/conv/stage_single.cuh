// One token of each of a few sequences: everything they need is under way before the first of them
// is looked at. Called by the threads of a warp that have channels, together.
#pragma once

#include "cuda/sm80/conv/stage_drafts.cuh"

namespace deltic::gpu::conv {

// The first `count` lanes of a warp, which have channels.
struct Lanes {
  int lane, count;

  __device__ int at(int i) const { return i * count + lane; }  // a thread's piece of a run's
  __device__ unsigned mask() const { return ~0u >> (32 - count); }
};

// The W - 1 places of a warp's channels in a state on their way through shared memory, by pieces of
// 16 bytes, W - 1 of a thread. In [D,S] the warp's pieces are one run: a thread asks for others
// than it looks at, so that a warp's request is of whole lines.
template <class Tr, Order kOrder>
struct WarpState {
  using E = typename Tr::E;
  static constexpr bool kTogether = kOrder == Order::inputs;
  static constexpr int kPieces = Tr::kBefore, kNumbers = kPieces * Tr::kVec;
  static_assert(Tr::kVec * sizeof(E) == 16);
  uint4* pieces;  // of the warp and sequence: [W][32], the token's input last
  Lanes lanes;

  __device__ int64_t offset(const States& x, int slot, int c, int i) const {
    if (!kTogether) return state_offset(x, slot, c, i);
    return state_offset(x, slot, c - lanes.lane * Tr::kVec, 0) + lanes.at(i) * Tr::kVec;
  }
  __device__ void request(const States& x, int slot, int c) const {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      copy_async(pieces + lanes.at(i), static_cast<const E*>(x.data) + offset(x, slot, c, i));
    }
  }
  __device__ void request_row(const E* from) const { copy_async(pieces + lanes.at(kPieces), from); }
  __device__ Run<E, Tr::kVec> get_row() const {
    const uint4 w = pieces[lanes.at(kPieces)];
    Run<E, Tr::kVec> row;
    memcpy(row.words, &w, sizeof(w));
    return row;
  }
  // All numbers of the thread's channels, once they are there: number(place, channel).
  __device__ static constexpr int number(int place, int k) {
    return kTogether ? k * kPieces + place : place * Tr::kVec + k;
  }
  __device__ Run<E, kNumbers> get() const {
    Run<E, kNumbers> run;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const uint4 w = pieces[kTogether ? lanes.lane * kPieces + i : lanes.at(i)];
      memcpy(run.words + 4 * i, &w, sizeof(w));
    }
    return run;
  }
  __device__ void leave(const States& x, int slot, int c, const Run<E, kNumbers>& run) const {
    uint4 out[kPieces];
    memcpy(out, run.words, sizeof(out));
    if (kTogether) {
#pragma unroll
      for (int i = 0; i < kPieces; ++i) pieces[lanes.lane * kPieces + i] = out[i];
      __syncwarp(lanes.mask());  // and those that other threads leave
#pragma unroll
      for (int i = 0; i < kPieces; ++i) out[i] = pieces[lanes.at(i)];
    }
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      store_vector(static_cast<E*>(x.data) + offset(x, slot, c, i), out[i].x, out[i].y, out[i].z,
                   out[i].w);
    }
  }
};

// The weights of a warp's channels on the same way, W pieces of a thread: from there they are taken
// for each sequence anew, which leaves the registers to its numbers.
template <class Tr>
struct WarpTaps {
  using E = typename Tr::E;
  static constexpr int kPieces = Tr::kTaps;
  static_assert(Tr::kVec * sizeof(E) == 16);
  uint4* pieces;  // [W][32]
  Lanes lanes;

  // Exchanged among four, so that eight threads' pieces meet no bank twice.
  __device__ static int place(int i) { return i ^ (i >> 3 & 3); }
  __device__ void request(const Params& p, int c) const {
    const E* from =
        static_cast<const E*>(p.weight.data) + int64_t{c - lanes.lane * Tr::kVec} * Tr::kTaps;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      copy_async(pieces + place(lanes.at(i)), from + lanes.at(i) * Tr::kVec);
    }
  }
  __device__ Run<E, Tr::kVec * Tr::kTaps> get() const {
    Run<E, Tr::kVec * Tr::kTaps> run;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const uint4 w = pieces[place(lanes.lane * kPieces + i)];
      memcpy(run.words + 4 * i, &w, sizeof(w));
    }
    return run;
  }
};

// The state after one more input.
template <class Tr, Order kOrder>
__device__ Run<typename Tr::E, Tr::kBefore * Tr::kVec> next_state(
    const Run<typename Tr::E, Tr::kBefore * Tr::kVec>& run,
    const Run<typename Tr::E, Tr::kVec>& row) {
  using E = typename Tr::E;
  using State = WarpState<Tr, kOrder>;
  E old[State::kNumbers], x[Tr::kVec], now[State::kNumbers];
  memcpy(old, run.words, sizeof(old)), memcpy(x, row.words, sizeof(x));
#pragma unroll
  for (int k = 0; k < Tr::kVec; ++k) {
#pragma unroll
    for (int i = 0; i < Tr::kBefore; ++i) {
      now[State::number(i, k)] = i + 1 < Tr::kBefore ? old[State::number(i + 1, k)] : x[k];
    }
  }
  Run<E, State::kNumbers> next;
  memcpy(next.words, now, sizeof(now));
  return next;
}

// The same sums as add_taps, channel by channel, so that few of the numbers are floats at once.
template <class Tr, Order kOrder>
__device__ void add_raw_taps(const Params& p, const RawTaps<Tr>& taps,
                             const Run<typename Tr::E, Tr::kBefore * Tr::kVec>& run,
                             const Run<typename Tr::E, Tr::kVec>& row, float (&sum)[Tr::kVec]) {
#pragma unroll
  for (int k = 0; k < Tr::kVec; ++k) {
    sum[k] = p.bias.present ? number_of(taps.bias, k) : 0.0f;
#pragma unroll
    for (int j = 0; j < Tr::kTaps; ++j) {
      const float x =
          j < Tr::kBefore ? number_of(run, WarpState<Tr, kOrder>::number(j, k)) : number_of(row, k);
      sum[k] = fmaf(number_of(taps.weight, k * Tr::kTaps + j), x, sum[k]);
    }
  }
}

// Sequences first to first + kSequences - 1, as far as there are so many. `pieces`: of the warp,
// [kSequences + 1][W][32].
template <class Tr, Order kOrder, int kSequences>
__device__ void run_singles(const Params& p, int first, int c, Lanes lanes, uint4* pieces) {
  using E = typename Tr::E;
  using State = WarpState<Tr, kOrder>;
  const int count = static_cast<int>(p.tokens.N) - first;
  const auto state_of = [&](int i) { return State{pieces + i * Tr::kTaps * 32, lanes}; };
  SlotEntries<int> entries[kSequences];
#pragma unroll
  for (int i = 0; i < kSequences; ++i) {
    if (i >= count) break;
    entries[i] = load_slots<int>(p.slots, first + i);
    state_of(i).request_row(static_cast<const E*>(p.x.data) + (first + i) * p.x.sb + c);
  }
  const WarpTaps<Tr> warp_taps{pieces + kSequences * Tr::kTaps * 32, lanes};
  warp_taps.request(p, c);
  RawTaps<Tr> raw_taps;
  raw_taps.load_bias(p, c);
  Slots<int> slots[kSequences];
#pragma unroll
  for (int i = 0; i < kSequences; ++i) {
    if (i < count) {
      slots[i] = find_slots<int>(p.slots, first + i, entries[i]);
      if (slots[i].from >= 0) state_of(i).request(p.state_in.states, slots[i].from, c);
    }
    copies_commit();
  }
#pragma unroll
  for (int i = 0; i < kSequences; ++i) {
    if (i >= count) break;
    copies_wait(kSequences - 1 - i);
    __syncwarp(lanes.mask());  // other threads' pieces are there
    E* out = static_cast<E*>(p.out.data) + (first + i) * p.out.sb + c;
    float sum[Tr::kVec] = {};
    if (is_skipped(p.slots, first + i, 1, slots[i])) {
      store_run<E, Tr::kVec>(out, sum);
      continue;
    }
    raw_taps.weight = warp_taps.get();
    Run<E, State::kNumbers> run{};
    if (slots[i].from >= 0) run = state_of(i).get();
    const Run<E, Tr::kVec> x = state_of(i).get_row();
    add_raw_taps<Tr, kOrder>(p, raw_taps, run, x, sum);
    store_sums<Tr>(p, sum, out);
    if (slots[i].to >= 0) {
      state_of(i).leave(p.state_out.states, slots[i].to, c, next_state<Tr, kOrder>(run, x));
    }
  }
}

}  // namespace deltic::gpu::conv
