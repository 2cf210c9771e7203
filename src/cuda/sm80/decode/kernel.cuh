// Decode: one CTA per (sequence, value head, slice of value columns). The state is read once and
// written once; until its first token is ready it is on its way to shared memory.
#pragma once

#include <cstddef>

#include "cuda/ptx/launch_order.cuh"
#include "cuda/ptx/prefetch.cuh"
#include "cuda/ptx/registers.cuh"
#include "cuda/sm80/decode/stage_held.cuh"
#include "cuda/tile/bounds.cuh"

namespace deltic::gpu::decode {

// index: (sequence, value head, slice), slices fastest: they share q and k.
template <class Tr>
__device__ Slice find_slice(const Params& p, unsigned index) {
  const unsigned job = p.by_slices.quotient(index), n = p.by_heads.quotient(job);
  Slice at;
  at.n = n, at.head = job - n * p.HV;
  at.first = static_cast<int>(index - job * p.num_slices) * Tr::kSpan;
  at.count = static_cast<int>(min(static_cast<int64_t>(Tr::kSpan), p.V - at.first));
  return at;
}

// Out of range it is undefined, but never an access outside of the tensors.
__device__ inline Place find_place(const Tokens& x, unsigned n) {
  if (x.spans != nullptr) {
    const Span span = x.spans[n];
    return {static_cast<int>(span.batch), static_cast<int>(span.begin),
            static_cast<int>(span.length)};
  }
  const int T = static_cast<int>(x.T);
  if (!x.packed) return {static_cast<int>(n), 0, T};
  const int begin = min(max(load_entry<int>(x.cu, n), 0), T), end = load_entry<int>(x.cu, n + 1);
  return {0, begin, min(max(end, begin), T) - begin};
}

// kLists: what the lengths say of a sequence, looked at when all is under way; dense: what is
// mostly so in a packed call, which is that its one token is row n.
struct Offsets {
  int begin, end;
};
__device__ inline Offsets load_offsets(const Tokens& x, unsigned n) {
  const int i = static_cast<int>(n);
  if (!x.packed) return {i, i + 1};
  return {load_entry<int>(x.cu, n), load_entry<int>(x.cu, n + 1)};
}

__device__ inline void zero_outputs(const Params& p, const Slice& at, const Place& place) {
  for (int t = 0; t < place.length; ++t) {
    const int64_t row = offset(p.o, place.batch, place.begin + t, at.head) + at.first;
    for (int c = threadIdx.x; c < at.count; c += blockDim.x) {
      store(p.o.data, p.o.dtype, row + c, 0.0f);
    }
  }
}

template <class Tr>
__device__ int tokens_from(const Place& place, int first) {
  return Tr::kSingle ? 1 : min(place.length - first, Tr::kStageTokens);
}

// The tokens of a stage over one tile.
template <class Tr>
__device__ void run_tile(const Params& p, const Part& part, Stage<Tr>& s, int first, int count,
                         int tile, RawTile<Tr>& raw) {
  copies_wait(Tr::kTiles - 1 - tile);
  if constexpr (Tr::kHeld) return run_held<Tr>(p, part, s, first, count, tile);
  if constexpr (Tr::kMma) __syncwarp();  // what other lanes asked for is there
  if constexpr (!Tr::kStays) get_state<Tr>(s, tile, raw);
#pragma unroll 1
  for (int t = 0; t < count; ++t) {
    if constexpr (Tr::kTrees) load_branch<Tr>(p, part, first + t, tile, s, raw);
    step<Tr>(
        p, part, [&] { return load_work(s.work); }, first + t, tile, s, t, raw);
    const auto [at, place, to] = load_work(s.work);
    const int slot = p.slots.per_token               ? token_slot(p.slots, at.n, first + t)
                     : first + t + 1 == place.length ? to
                                                     : -1;
    if (slot >= 0) store_state<Tr>(p, tile_of<Tr>(at, tile), part, slot, tile, raw, s);
  }
}

// Of a sequence without tokens, as they came.
template <class Tr>
__device__ void keep_states(const Params& p, const Slice& at, const Part& part, int slot,
                            const Stage<Tr>& s) {
  copies_wait<0>();
#pragma unroll 1
  for (int tile = 0; tile < Tr::kTiles && slot >= 0; ++tile) {
    keep_state<Tr>(p, tile_of<Tr>(at, tile), part, slot, tile, s);
  }
}

// Stage after stage; the first one's tokens and the state are under way.
template <class Tr>
__device__ void run_stages(const Params& p, const Part& part, Stage<Tr>& s, RawTokens& tokens,
                           RawTile<Tr>& raw) {
#pragma unroll 1
  for (int first = 0;;) {
    const int count = tokens_from<Tr>(load_work(s.work).place, first);
    if constexpr (!Tr::kGatesFirst) lay_keys<Tr>(p, count, tokens, s);
    lay_gates<Tr>(p, count, tokens, s), lay_values<Tr>(p, count, tokens, s);
    if constexpr (Tr::kGatesFirst) lay_keys<Tr>(p, count, tokens, s);
    __syncthreads();  // the stage is there, for all threads
#pragma unroll 1
    for (int tile = 0; tile < Tr::kTiles; ++tile) {
      run_tile<Tr>(p, part, s, first, count, tile, raw);
      if constexpr (!Tr::kStays && !Tr::kHeld) {
        if (first + count < load_work(s.work).place.length) put_state<Tr>(raw, tile, s);
      }
    }
    first += Tr::kStageTokens;
    const auto [at, place, to] = load_work(s.work);
    if (first >= place.length) return;
    const int next = tokens_from<Tr>(place, first);
    load_keys<Tr>(p, place, at, first, next, tokens);
    load_values<Tr>(p, place, at, first, next, tokens);
    __syncthreads();  // the stage has been read by all threads
  }
}

// A sequence of a packed call whose tokens are not the one that was asked for: none, or another
// one, or several. The state is under way; all else is looked up again, so that nobody keeps it.
template <class Tr>
__device__ void run_others(const Params& p, std::byte* memory) {
  auto& s = *reinterpret_cast<Stage<Tr>*>(memory);
  const Slice at = find_slice<Tr>(p, blockIdx.x);
  const Part part = part_of<Tr>(threadIdx.x);
  const Place place = find_place(p.tokens, at.n);
  const Slots<int> slots = find_slots<int>(p.slots, at.n);
  if (is_skipped(p.slots, at.n, place.length, slots)) return zero_outputs(p, at, place);
  if (place.length == 0) return keep_states<Tr>(p, at, part, slots.to, s);
  if (threadIdx.x == 0) s.work = {at, place, slots.to};
  RawTokens tokens;
  RawTile<Tr> raw;
  load_keys<Tr>(p, place, at, 0, 1, tokens);
  load_values<Tr>(p, place, at, 0, 1, tokens);
  __syncthreads();  // s.work is there, for all threads
  run_stages<Tr>(p, part, s, tokens, raw);
}

// A token and no more: nothing waits in shared memory for later tokens.
template <class Tr>
__device__ void run_single(const Params& p, const Part& part, const Work& work, Stage<Tr>& s,
                           RawTokens& tokens, RawTile<Tr>& raw) {
  lay_keys<Tr>(p, 1, tokens, s);
  lay_gates<Tr>(p, 1, tokens, s), lay_values<Tr>(p, 1, tokens, s);
  __syncthreads();  // the token is there, for all threads
  copies_wait<0>();
  if constexpr (!Tr::kStays) get_state<Tr>(s, 0, raw);
  step<Tr>(
      p, part, [&] { return work; }, 0, 0, s, 0, raw);
  const int slot = p.slots.per_token ? token_slot(p.slots, work.slice.n, 0) : work.to;
  if (slot >= 0) store_state<Tr>(p, work.slice, part, slot, 0, raw, s);
}

// The parameters' lines of the constant cache, by a lane each: one after the other, where they are
// used, every one of them would be waited for.
__device__ inline void touch_params(const Params& p) {
  constexpr int kLine = 64, kLines = (sizeof(Params) + kLine - 1) / kLine;
  static_assert(kLines <= 32 && alignof(Params) >= 4);
  const int line = min(static_cast<int>(threadIdx.x % 32), kLines - 1);
  touch(reinterpret_cast<const uint32_t*>(&p)[line * (kLine / 4)]);
}

// A line per thread of the state of a CTA that comes later, to L2: when that CTA asks for it,
// memory has been read. p.ahead CTAs later, a quarter of those that run at once.
template <class Tr>
__device__ void hint_ahead(const Params& p) {
  using E = typename Tr::E;
  // V-first a run is a value column, K-first the slice's part of a row of channels.
  constexpr int kRun = Tr::kVFirst ? Tr::kWidth : Tr::kSlice;
  constexpr int kLines = kRun * static_cast<int>(sizeof(E)) / 128;
  static_assert((Tr::kVFirst ? Tr::kSlice : Tr::kWidth) * kLines == Tr::kThreads);
  const unsigned index = blockIdx.x + p.ahead;
  if (index >= gridDim.x) return;
  const Slice at = find_slice<Tr>(p, index);
  if (Tr::kLists && at.n >= p.tokens.N) return;  // a CTA that writes padding
  const int run = static_cast<int>(threadIdx.x) / kLines;
  const int column = Tr::kVFirst ? run : threadIdx.x % kLines * (128 / static_cast<int>(sizeof(E)));
  const auto load = [&] {
    if constexpr (Tr::kLists) return load_slots<int>(p.slots, at.n).read;
    return load_entry<int>(p.slots.read, at.n);
  };
  const int slot = p.slots.read.present ? named_slot(load(), p.slots.null_slot, p.slots.read_slots)
                                        : static_cast<int>(at.n);
  if (slot < 0 || slot >= p.slots.read_slots || column >= at.count) return;
  const E* row =
      static_cast<const E*>(p.state_in.data) + static_cast<int64_t>(slot) * p.state_in.s_slot +
      at.head * p.state_in.s_head +
      (Tr::kVFirst ? (at.first + run) * p.state_in.s_v : run * p.state_in.s_k + at.first);
  line_prefetch_as_is(reinterpret_cast<const char*>(row) + threadIdx.x % kLines * 128);
}

// CTAs are (sequence, value head, slice), slices fastest; the last kPaddingCtas of a packed call
// write zeros to the rows of no sequence.
template <class Tr>
__global__ void __launch_bounds__(Tr::kThreads, ctas_per_sm(Tr::kCtasPerSm, Tr::kCtasElsewhere))
    decode_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(16) std::byte memory[];
  auto& s = *reinterpret_cast<Stage<Tr>*>(memory);
  if constexpr (Tr::kTouches) touch_params(p);
  if constexpr (Tr::kStartsEarly) grid_wait();
  if (is_wrong(p.tokens)) return;
  if ((!Tr::kSingle || Tr::kLists) && is_past_slices(p)) return;  // kSingle: else not packed
  const Slice at = find_slice<Tr>(p, blockIdx.x);
  const Part part = part_of<Tr>(threadIdx.x);
  // Everything is under way before anything is looked at: lengths and slots first, on which the
  // others wait, then the tokens, then the state: what is asked for after it comes after it.
  const SlotEntries<int> entries = load_slots<int>(p.slots, at.n);
  constexpr bool kSlotsLate = Tr::kSingle || Tr::kHeld;  // costs registers
  Slots<int> slots;
  if constexpr (!kSlotsLate) slots = find_slots<int>(p.slots, at.n, entries);
  const Place place =
      Tr::kSingle ? Place{static_cast<int>(at.n), 0, 1} : find_place(p.tokens, at.n);
  [[maybe_unused]] Offsets offsets;
  if constexpr (Tr::kLists) offsets = load_offsets(p.tokens, at.n);
  RawTokens tokens;
  load_keys<Tr>(p, place, at, 0, tokens_from<Tr>(place, 0), tokens);
  load_values<Tr>(p, place, at, 0, tokens_from<Tr>(place, 0), tokens);
  if constexpr (kSlotsLate) slots = find_slots<int>(p.slots, at.n, entries);
  RawTile<Tr> raw;
#pragma unroll
  for (int tile = 0; tile < Tr::kTiles; ++tile) {
    request_state<Tr>(p, tile_of<Tr>(at, tile), part, slots.from, tile, s);
    copies_commit();
  }
  if constexpr (Tr::kStartsEarly) grid_release();  // the next launch may come, and waits likewise
  if constexpr (Tr::kHintsAhead) hint_ahead<Tr>(p);
  if constexpr (Tr::kLists) {
    const bool is_likely = offsets.begin == place.batch && offsets.end == place.batch + 1;
    if (!is_likely) return run_others<TokenByToken<Tr>>(p, memory);
  }
  if (is_skipped(p.slots, at.n, place.length, slots)) return zero_outputs(p, at, place);
  if constexpr (Tr::kSingle) {
    return run_single<Tr>(p, part, {at, place, slots.to}, s, tokens, raw);
  }
  if (threadIdx.x == 0) s.work = {at, place, slots.to};
  if (place.length == 0) return keep_states<Tr>(p, at, part, slots.to, s);
  __syncthreads();  // s.work is there, for all threads
  run_stages<Tr>(p, part, s, tokens, raw);
}

}  // namespace deltic::gpu::decode
