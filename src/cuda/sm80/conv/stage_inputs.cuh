// Where a run of tokens lies, and the inputs before it: of the sequence, or of its state. Each
// function is called by a thread on its own, for its channels; none has a barrier.
#pragma once

#include "cuda/sm80/conv/params.h"
#include "cuda/sm80/conv/traits.h"
#include "cuda/tile/chunks.cuh"
#include "cuda/tile/runs.cuh"

namespace deltic::gpu::conv {

// Tokens first, first + 1, ... of a sequence.
struct Work {
  int sequence, batch;  // row of the B dimension
  int begin, length;    // of the sequence: first token in the T dimension, tokens
  int first, count;
  int from, to;     // slots; -1: zeros, nowhere
  int inputs;       // of the state it starts from so many count, from place 0 on
  int left_from;    // the input that place 0 of the state left behind holds
  bool is_first;    // run of the sequence: it leaves the state behind
  bool is_skipped;  // its outputs are 0
};

__device__ inline Work find_work(const Params& p, int number) {
  Work s;
  int run = 0;
  if (p.run_log2 < 0) {
    s.sequence = number;
  } else if (!p.tokens.packed) {
    s.sequence = static_cast<int>(static_cast<unsigned>(number) / p.runs_dense);
    run = number - s.sequence * static_cast<int>(p.runs_dense);
  } else {
    const TilePlace place = place_of_tile(p.tokens, number, p.run_log2);
    s.sequence = static_cast<int>(place.sequence), run = static_cast<int>(place.tile);
  }
  const Span span = span_of(p.tokens, s.sequence);
  s.batch = static_cast<int>(span.batch), s.begin = static_cast<int>(span.begin);
  s.length = static_cast<int>(span.length);
  s.is_first = run == 0;
  s.first = 0, s.count = s.length;
  if (p.run_log2 >= 0) {
    // No run: a number before the first of a list that decreases, or behind the sequence's last.
    const bool is_run = run >= 0 && run <= s.length >> p.run_log2;
    s.first = is_run ? run << p.run_log2 : 0;
    s.count = is_run ? min(s.length - s.first, 1 << p.run_log2) : 0;
  }
  const Slots<int> slots = find_slots<int>(p.slots, s.sequence);
  s.is_skipped = is_skipped(p.slots, s.sequence, s.length, slots);
  s.from = slots.from, s.to = slots.to;
  s.inputs = p.kept, s.left_from = s.length - p.kept;
  if (p.accepted.present && s.length > 0) {
    const int accepted = load_entry<int>(p.accepted, s.sequence);
    s.inputs = min(max(accepted, 1), p.kept - p.taps + 2) + p.taps - 2;
    s.left_from = 2 - p.taps;
  }
  return s;
}

__device__ inline int64_t state_offset(const States& x, int slot, int channel, int64_t place) {
  return slot * x.s_slot + channel * x.s_k + place * x.s_v;
}

// Calls f with a null pointer of the state's type. The dtype is looked at once for all that f
// loads, so that it is under way together.
template <class F>
__device__ void with_element(const Inputs& x, F&& f) {
  with_dtype(x.states.dtype, [&](auto* tag) {
    f(static_cast<std::remove_pointer_t<decltype(tag)>*>(x.states.data));
  });
}

// One place of a state, of a thread's channels: as it lies in memory.
template <class E, int kVec>
__device__ Run<E, kVec> get_place(const Inputs& x, const E* data, int slot, int c, int place) {
  const E* from = data + state_offset(x.states, slot, c, place);
  if (x.order == Order::channels) return load_run<E, kVec>(from);
  float values[kVec];
#pragma unroll
  for (int k = 0; k < kVec; ++k) values[k] = to_float(from[k * x.states.s_k]);
  return pack_run<E, kVec>(values);
}
template <class E, int kVec>
__device__ void put_place(const Inputs& x, E* data, int slot, int c, int place,
                          const float (&value)[kVec]) {
  E* to = data + state_offset(x.states, slot, c, place);
  if (x.order == Order::channels) return store_run<E, kVec>(to, value);
#pragma unroll
  for (int k = 0; k < kVec; ++k) to[k * x.states.s_k] = from_float<E>(value[k]);
}
template <int kVec>
__device__ void load_place(const Inputs& x, int slot, int c, int place, float (&out)[kVec]) {
  with_element(x, [&](auto* data) {
    using E = std::remove_pointer_t<decltype(data)>;
    unpack_run<E, kVec>(get_place<E, kVec>(x, data, slot, c, place), out);
  });
}
template <int kVec>
__device__ void store_place(const Inputs& x, int slot, int c, int place,
                            const float (&value)[kVec]) {
  with_element(x, [&](auto* data) { put_place(x, data, slot, c, place, value); });
}

// All W - 1 places of a state that has no more: one run where its channels follow one another.
template <int kPlaces, int kVec>
__device__ void load_places(const Inputs& x, int slot, int c, float (&out)[kPlaces][kVec]) {
  with_element(x, [&](auto* data) {
    using E = std::remove_pointer_t<decltype(data)>;
    if (x.order != Order::inputs) {
      Run<E, kVec> runs[kPlaces];
#pragma unroll
      for (int i = 0; i < kPlaces; ++i) runs[i] = get_place<E, kVec>(x, data, slot, c, i);
#pragma unroll
      for (int i = 0; i < kPlaces; ++i) unpack_run<E, kVec>(runs[i], out[i]);
      return;
    }
    float together[kVec * kPlaces];
    const E* from = data + state_offset(x.states, slot, c, 0);
    unpack_run<E, kVec * kPlaces>(load_run<E, kVec * kPlaces>(from), together);
#pragma unroll
    for (int i = 0; i < kPlaces; ++i) {
#pragma unroll
      for (int k = 0; k < kVec; ++k) out[i][k] = together[k * kPlaces + i];
    }
  });
}
template <int kPlaces, int kVec>
__device__ void store_places(const Inputs& x, int slot, int c,
                             const float (&value)[kPlaces][kVec]) {
  with_element(x, [&](auto* data) {
    using E = std::remove_pointer_t<decltype(data)>;
    if (x.order != Order::inputs) {
#pragma unroll
      for (int i = 0; i < kPlaces; ++i) put_place(x, data, slot, c, i, value[i]);
      return;
    }
    float together[kVec * kPlaces];
#pragma unroll
    for (int i = 0; i < kPlaces; ++i) {
#pragma unroll
      for (int k = 0; k < kVec; ++k) together[k * kPlaces + i] = value[i][k];
    }
    store_run<E, kVec * kPlaces>(data + state_offset(x.states, slot, c, 0), together);
  });
}

// Where a thread's channels of a sequence's token t are.
template <class E>
__device__ E* row_of(const Rows& x, const Work& s, int t, int c) {
  return static_cast<E*>(x.data) + offset(x, s.batch, s.begin + t, 0) + c;
}

// The input at token t < length; before the first one what the state has, or 0.
template <class Tr>
__device__ void load_input(const Params& p, const Work& s, int t, int c, float (&out)[Tr::kVec]) {
  using E = typename Tr::E;
  if (t >= 0) {
    unpack_run<E, Tr::kVec>(load_run<E, Tr::kVec>(row_of<E>(p.x, s, t, c)), out);
  } else if (s.from >= 0 && s.inputs + t >= 0) {
    load_place<Tr::kVec>(p.state_in, s.from, c, s.inputs + t, out);
  } else {
#pragma unroll
    for (int k = 0; k < Tr::kVec; ++k) out[k] = 0;
  }
}

// A state has just the inputs that a token sees, the last call's end: they move together.
template <class Tr>
__device__ bool has_all_places(const Params& p) {
  return Tr::kExact && p.kept == Tr::kBefore && !p.accepted.present;
}

// The inputs before token s.first, most recent last.
template <class Tr>
__device__ void load_before(const Params& p, const Work& s, int c,
                            float (&before)[Tr::kBefore][Tr::kVec]) {
  if (s.first == 0 && s.from >= 0 && has_all_places<Tr>(p)) {
    return load_places<Tr::kBefore, Tr::kVec>(p.state_in, s.from, c, before);
  }
#pragma unroll
  for (int i = 0; i < Tr::kBefore; ++i) {
    load_input<Tr>(p, s, s.first - Tr::kBefore + i, c, before[i]);
  }
}

// A thread's weights and bias. Place j of kTaps; without kExact the first kTaps - W are none.
template <class Tr>
struct Taps {
  float w[Tr::kTaps][Tr::kVec], bias[Tr::kVec];
  int skipped;

  __device__ bool has(int j) const { return Tr::kExact || j >= skipped; }
};
template <class Tr>
__device__ void load_taps(const Params& p, int c, Taps<Tr>& taps) {
  taps.skipped = Tr::kTaps - p.taps;
  if (Tr::kExact && p.has_weight_runs) {
    float together[Tr::kVec * Tr::kTaps];
    load_run<Tr::kVec * Tr::kTaps>(p.weight.data, p.weight.dtype, int64_t{c} * Tr::kTaps, together);
#pragma unroll
    for (int j = 0; j < Tr::kTaps; ++j) {
#pragma unroll
      for (int k = 0; k < Tr::kVec; ++k) taps.w[j][k] = together[k * Tr::kTaps + j];
    }
  } else {
#pragma unroll
    for (int j = 0; j < Tr::kTaps; ++j) {
#pragma unroll
      for (int k = 0; k < Tr::kVec; ++k) {
        taps.w[j][k] =
            taps.has(j) ? load(p.weight.data, p.weight.dtype, p.weight.at(c + k, j - taps.skipped))
                        : 0.0f;
      }
    }
  }
  // Together: one by one, each would be waited for.
  if (p.has_bias_runs) return load_run<Tr::kVec>(p.bias.data, p.bias.dtype, c, taps.bias);
#pragma unroll
  for (int k = 0; k < Tr::kVec; ++k) {
    taps.bias[k] = p.bias.present ? load(p.bias.data, p.bias.dtype, p.bias.at(c + k)) : 0.0f;
  }
}

// bias + sum_j w_j x_j, oldest first.
template <class Tr>
__device__ void add_taps(const Taps<Tr>& taps, const float (&before)[Tr::kBefore][Tr::kVec],
                         const float (&x)[Tr::kVec], float (&sum)[Tr::kVec]) {
#pragma unroll
  for (int k = 0; k < Tr::kVec; ++k) sum[k] = taps.bias[k];
#pragma unroll
  for (int j = 0; j < Tr::kBefore; ++j) {
    if (!taps.has(j)) continue;
#pragma unroll
    for (int k = 0; k < Tr::kVec; ++k) sum[k] = fmaf(taps.w[j][k], before[j][k], sum[k]);
  }
#pragma unroll
  for (int k = 0; k < Tr::kVec; ++k) sum[k] = fmaf(taps.w[Tr::kBefore][k], x[k], sum[k]);
}

// The oldest leaves, x comes.
template <int kBefore, int kVec>
__device__ void shift(float (&before)[kBefore][kVec], const float (&x)[kVec]) {
#pragma unroll
  for (int i = 0; i + 1 < kBefore; ++i) {
#pragma unroll
    for (int k = 0; k < kVec; ++k) before[i][k] = before[i + 1][k];
  }
#pragma unroll
  for (int k = 0; k < kVec; ++k) before[kBefore - 1][k] = x[k];
}

}  // namespace deltic::gpu::conv
