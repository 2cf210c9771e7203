// One token of each of a few sequences: everything they need is under way before the first of them
// is looked at. Called by a thread on its own, for its channels; no barriers.
#pragma once

#include "cuda/sm80/conv/stage_forward.cuh"

namespace deltic::gpu::conv {

// The W - 1 places of a state as they lie in memory: one run of all inputs of the thread's
// channels, or a run of channels per place.
template <class Tr, Order kOrder>
struct RawPlaces {
  static constexpr bool kTogether = kOrder == Order::inputs;
  static constexpr int kRuns = kTogether ? 1 : Tr::kBefore;
  static constexpr int kNumbers = kTogether ? Tr::kBefore * Tr::kVec : Tr::kVec;
  using E = typename Tr::E;
  Run<E, kNumbers> runs[kRuns];

  __device__ void load(const States& x, int slot, int c) {
    const E* from = static_cast<const E*>(x.data) + state_offset(x, slot, c, 0);
#pragma unroll
    for (int i = 0; i < kRuns; ++i) runs[i] = load_run<E, kNumbers>(from + i * x.s_v);
  }
  __device__ void unpack(float (&out)[Tr::kBefore][Tr::kVec]) const {
#pragma unroll
    for (int i = 0; i < kRuns; ++i) {
      float numbers[kNumbers];
      unpack_run<E, kNumbers>(runs[i], numbers);
#pragma unroll
      for (int j = 0; j < kNumbers; ++j) {
        out[kTogether ? j % Tr::kBefore : i][kTogether ? j / Tr::kBefore : j] = numbers[j];
      }
    }
  }
  __device__ static void store(const States& x, int slot, int c,
                               const float (&value)[Tr::kBefore][Tr::kVec]) {
    E* to = static_cast<E*>(x.data) + state_offset(x, slot, c, 0);
#pragma unroll
    for (int i = 0; i < kRuns; ++i) {
      float numbers[kNumbers];
#pragma unroll
      for (int j = 0; j < kNumbers; ++j) {
        numbers[j] = value[kTogether ? j % Tr::kBefore : i][kTogether ? j / Tr::kBefore : j];
      }
      store_run<E, kNumbers>(to + i * x.s_v, numbers);
    }
  }
};

// Sequences first to first + kSequences - 1, as far as there are so many.
template <class Tr, Order kOrder, int kSequences>
__device__ void run_singles(const Params& p, int first, int c) {
  using E = typename Tr::E;
  SlotEntries<int> entries[kSequences];
  Run<E, Tr::kVec> x[kSequences], bias;
#pragma unroll
  for (int i = 0; i < kSequences; ++i) {
    if (first + i >= p.tokens.N) break;
    entries[i] = load_slots<int>(p.slots, first + i);
    x[i] = load_run<E, Tr::kVec>(static_cast<const E*>(p.x.data) + (first + i) * p.x.sb + c);
  }
  const auto weight = load_run<E, Tr::kVec * Tr::kTaps>(static_cast<const E*>(p.weight.data) +
                                                        int64_t{c} * Tr::kTaps);
  if (p.bias.present) bias = load_run<E, Tr::kVec>(static_cast<const E*>(p.bias.data) + c);
  Slots<int> slots[kSequences];
  RawPlaces<Tr, kOrder> places[kSequences];
#pragma unroll
  for (int i = 0; i < kSequences; ++i) {
    if (first + i >= p.tokens.N) break;
    slots[i] = find_slots<int>(p.slots, first + i, entries[i]);
    if (slots[i].from >= 0) places[i].load(p.state_in.states, slots[i].from, c);
  }
  grid_release();  // the next launch may come, and waits for this one
  Taps<Tr> taps;
  taps.skipped = 0;
  {
    float together[Tr::kVec * Tr::kTaps];
    unpack_run<E, Tr::kVec * Tr::kTaps>(weight, together);
#pragma unroll
    for (int i = 0; i < Tr::kVec * Tr::kTaps; ++i) {
      taps.w[i % Tr::kTaps][i / Tr::kTaps] = together[i];
    }
#pragma unroll
    for (int k = 0; k < Tr::kVec; ++k) taps.bias[k] = 0;
    if (p.bias.present) unpack_run<E, Tr::kVec>(bias, taps.bias);
  }
#pragma unroll
  for (int i = 0; i < kSequences; ++i) {
    if (first + i >= p.tokens.N) break;
    E* out = static_cast<E*>(p.out.data) + (first + i) * p.out.sb + c;
    float before[Tr::kBefore][Tr::kVec] = {}, row[Tr::kVec], sum[Tr::kVec] = {};
    if (is_skipped(p.slots, first + i, 1, slots[i])) {
      store_run<E, Tr::kVec>(out, sum);
      continue;
    }
    if (slots[i].from >= 0) places[i].unpack(before);
    unpack_run<E, Tr::kVec>(x[i], row);
    add_taps<Tr>(taps, before, row, sum);
    shift(before, row);
    store_sums<Tr>(p, sum, out);
    if (slots[i].to >= 0) {
      RawPlaces<Tr, kOrder>::store(p.state_out.states, slots[i].to, c, before);
    }
  }
}

}  // namespace deltic::gpu::conv
