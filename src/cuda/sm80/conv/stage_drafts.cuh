// A few tokens of a sequence that has W - 1 inputs before them in its state, or a window of drafts:
// everything it needs is under way before anything is looked at, and the state that it leaves is
// made of what is in registers then. Called by all threads of a CTA together, which have the same
// sequence; barriers only for states in [D,S].
#pragma once

#include "cuda/sm80/conv/stage_forward.cuh"
#include "cuda/tile/vectors.cuh"

namespace deltic::gpu::conv {

// The place of a state from which a sequence's first token sees three inputs, of windows of drafts.
__device__ inline int window_of(const Params& p, int accepted) {
  return min(max(accepted, 1), p.kept - p.taps + 2) - 1;
}

// A CTA's channels of a state in [D,S], one run in memory, on their way through shared memory: 16
// bytes at a time there, number by number here.
template <class Tr>
struct StagedState {
  using E = typename Tr::E;
  E* numbers;  // in shared memory, [channels of the CTA][S]
  int kept;
  int first, channels;  // of the CTA

  __device__ int num_pieces() const { return channels * kept * static_cast<int>(sizeof(E)) / 16; }
  __device__ E* at(const States& x, int slot) const {
    return static_cast<E*>(x.data) + state_offset(x, slot, first, 0);
  }
  __device__ void request(const States& x, int slot) const {
    const auto* from = reinterpret_cast<const uint4*>(at(x, slot));
    for (int i = static_cast<int>(threadIdx.x); i < num_pieces();
         i += static_cast<int>(blockDim.x)) {
      copy_async(reinterpret_cast<uint4*>(numbers) + i, from + i);
    }
  }
  __device__ void leave(const States& x, int slot) const {
    E* to = at(x, slot);
    for (int i = static_cast<int>(threadIdx.x); i < num_pieces();
         i += static_cast<int>(blockDim.x)) {
      const uint4 w = reinterpret_cast<const uint4*>(numbers)[i];
      store_vector(to + i * 16 / static_cast<int>(sizeof(E)), w.x, w.y, w.z, w.w);
    }
  }
  // The inputs of a place, of a thread's channels.
  __device__ Run<E, Tr::kVec> get(int place) const {
    E values[Tr::kVec];
#pragma unroll
    for (int k = 0; k < Tr::kVec; ++k) {
      values[k] = numbers[(static_cast<int>(threadIdx.x) * Tr::kVec + k) * kept + place];
    }
    Run<E, Tr::kVec> run;
    memcpy(&run, values, sizeof(run));
    return run;
  }
  __device__ void put(int place, const Run<E, Tr::kVec>& run) const {
    E values[Tr::kVec];
    memcpy(values, &run, sizeof(run));
#pragma unroll
    for (int k = 0; k < Tr::kVec; ++k) {
      numbers[(static_cast<int>(threadIdx.x) * Tr::kVec + k) * kept + place] = values[k];
    }
  }
};

// Weights as they lie in memory, of x's dtype.
template <class Tr>
struct RawTaps {
  using E = typename Tr::E;
  Run<E, Tr::kVec * Tr::kTaps> weight;
  Run<E, Tr::kVec> bias;

  __device__ void load(const Params& p, int c) {
    weight = load_run<E, Tr::kVec * Tr::kTaps>(static_cast<const E*>(p.weight.data) +
                                               int64_t{c} * Tr::kTaps);
    load_bias(p, c);
  }
  __device__ void load_bias(const Params& p, int c) {
    if (p.bias.present) bias = load_run<E, Tr::kVec>(static_cast<const E*>(p.bias.data) + c);
  }
  __device__ void unpack(const Params& p, Taps<Tr>& taps) const {
    taps.skipped = 0;
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
};

// The inputs that a sequence's tokens see: W - 1 before them, and theirs. T is at most kTokens.
template <class Tr, int kTokens>
struct SeenInputs {
  using E = typename Tr::E;
  Run<E, Tr::kVec> runs[Tr::kBefore + kTokens];

  __device__ void load_tokens(const Params& p, int n, int c) {
    const E* x = static_cast<const E*>(p.x.data) + n * p.x.sb + c;
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      if (t < p.tokens.T) runs[Tr::kBefore + t] = load_run<E, Tr::kVec>(x + t * p.x.st);
    }
  }
  __device__ void run_tokens(const Params& p, int n, int c, const Taps<Tr>& taps) const {
    float before[Tr::kBefore][Tr::kVec];
#pragma unroll
    for (int i = 0; i < Tr::kBefore; ++i) unpack_run<E, Tr::kVec>(runs[i], before[i]);
    E* out = static_cast<E*>(p.out.data) + n * p.out.sb + c;
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      if (t >= p.tokens.T) break;
      float row[Tr::kVec], sum[Tr::kVec];
      unpack_run<E, Tr::kVec>(runs[Tr::kBefore + t], row);
      add_taps<Tr>(taps, before, row, sum);
      shift(before, row);
      store_sums<Tr>(p, sum, out);
      out += p.out.st;
    }
  }
  // Calls put(place, run) for every place of the state that is left behind: the last inputs, or a
  // window that begins two inputs before the tokens.
  template <class F>
  __device__ void for_places(const Params& p, F&& put) const {
    const int T = static_cast<int>(p.tokens.T);
    const int first = p.accepted.present ? 1 : T;  // which of `runs` place 0 gets
#pragma unroll
    for (int u = 0; u < Tr::kBefore + kTokens; ++u) {
      const int place = u - first;
      if (place >= 0 && place < p.kept && u < Tr::kBefore + T) put(place, runs[u]);
    }
    const Run<E, Tr::kVec> zeros{};
#pragma unroll 1
    for (int place = Tr::kBefore + T - first; place < p.kept; ++place) put(place, zeros);
  }
};

template <class Tr, Order kOrder, int kTokens>
__device__ void run_drafts(const Params& p, int n, int c, const StagedState<Tr>& staged) {
  using E = typename Tr::E;
  constexpr bool kStaged = kOrder != Order::channels;
  const bool has_channels = c < p.channels;
  const States &from = p.state_in.states, &to = p.state_out.states;
  const SlotEntries<int> entries = load_slots<int>(p.slots, n);
  const int accepted = p.accepted.present ? load_entry<int>(p.accepted, n) : 1;
  SeenInputs<Tr, kTokens> inputs{};
  RawTaps<Tr> raw_taps;
  if (has_channels) inputs.load_tokens(p, n, c), raw_taps.load(p, c);
  const Slots<int> slots = find_slots<int>(p.slots, n, entries);
  const bool is_out = is_skipped(p.slots, n, static_cast<int>(p.tokens.T), slots);
  const int window = p.accepted.present ? window_of(p, accepted) : 0;
  if constexpr (kStaged) {
    if (slots.from >= 0) staged.request(from, slots.from);
    copies_commit();
    copies_wait<0>();
    __syncthreads();  // the state is there, for all threads
    if (slots.from >= 0 && has_channels) {
#pragma unroll
      for (int i = 0; i < Tr::kBefore; ++i) inputs.runs[i] = staged.get(window + i);
    }
  } else {
    const E* state = static_cast<const E*>(from.data) + state_offset(from, slots.from, c, window);
#pragma unroll
    for (int i = 0; i < Tr::kBefore; ++i) {
      if (slots.from >= 0 && has_channels) {
        inputs.runs[i] = load_run<E, Tr::kVec>(state + i * from.s_v);
      }
    }
  }
  if (has_channels && is_out) {
    const float zeros[Tr::kVec] = {};
    for (int t = 0; t < static_cast<int>(p.tokens.T); ++t) {
      store_run<E, Tr::kVec>(static_cast<E*>(p.out.data) + n * p.out.sb + t * p.out.st + c, zeros);
    }
  } else if (has_channels) {
    Taps<Tr> taps;
    raw_taps.unpack(p, taps);
    inputs.run_tokens(p, n, c, taps);
  }
  if (is_out || slots.to < 0) return;  // the same for all threads
  if constexpr (kStaged) {
    if (has_channels) {
      inputs.for_places(p, [&](int place, const auto& run) { staged.put(place, run); });
    }
    __syncthreads();  // the state's new numbers are there, for all threads
    staged.leave(to, slots.to);
  } else if (has_channels) {
    E* state = static_cast<E*>(to.data) + state_offset(to, slots.to, c, 0);
    inputs.for_places(p, [&](int place, const auto& run) {
      store_raw_run<E, Tr::kVec>(state + place * to.s_v, run);
    });
  }
}

}  // namespace deltic::gpu::conv
