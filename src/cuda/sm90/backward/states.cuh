// The chain forward: the state before every chunk, and e = v - S'^T k of its tokens.
//
//     x = v - (k E) S      y = (I + T) beta x      e = y / beta      S <- exp(G_last) S + (k R)^T y
#pragma once

#include "cuda/sm90/backward/stage_chain.cuh"

namespace deltic::gpu::gradient {

template <class Tr>
struct StatesStage {
  // k E and k R, or the raw k.
  alignas(1024) unsigned char keys[Tr::kPerChannel ? 2 : 1][Tr::kKeyBytes];
  unsigned char T[Tr::kSquareBytes];
  unsigned char values[Tr::kValueBytes];  // v, then e
  float last[Tr::K], rows[kChainKinds * kChunk];
};

template <class Tr>
__device__ void load_stage(const Params& p, const Maps& maps, const ChainItem<Tr>& at, int c,
                           bool has_values, StatesStage<Tr>& s, uint64_t* full) {
  constexpr int kBytes =
      (Tr::kPerChannel ? 2 * Tr::kKeyBytes : 0) + Tr::kSquareBytes + Tr::kNumberBytes;
  ChunkLoad<Tr> load(p, at, c, full);
  load.expect(kBytes + (Tr::kPerChannel ? 0 : load.bytes_of(maps.k, Tr::K)) +
              (has_values ? load.bytes_of(maps.v, Tr::kColumns) : 0));
  if constexpr (Tr::kPerChannel) {
    load.image(s.keys[0], p.work.kE, Tr::kKeyBytes);
  } else {
    load.keys(s.keys[0], maps.k, p.k);
  }
  if (has_values) load.values(s.values, maps.v, p.v);
  load.image(s.T, p.work.T, Tr::kSquareBytes);
  load.numbers(s.last, s.rows);
  if constexpr (Tr::kPerChannel) load.image(s.keys[1], p.work.kR, Tr::kKeyBytes);
  load.done();
}

// What a step does besides: results of its chunk go out; it has values, or they are 0.
struct StepKind {
  bool has_outputs = true, has_values = true;
};

// x = beta (v - k S) from k S, and as an operand; v: as operands.
template <class Tr>
__device__ void subtract_from_values(const float* rows, const uint32_t (&v)[4][4], int lane,
                                     float (&x)[8][4], uint32_t (&ax)[4][4]) {
  using E = typename Tr::E;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      float(&y)[4] = x[2 * i + n];
      if constexpr (!Tr::kPerChannel) scale_columns(y, factors_of(rows, kStart, 2 * i + n, lane));
      const float2 low = unpack<E>(v[i][2 * n]), high = unpack<E>(v[i][2 * n + 1]);
      y[0] = low.x - y[0], y[1] = low.y - y[1], y[2] = high.x - y[2], y[3] = high.y - y[3];
      scale_columns(y, factors_of(rows, kBeta, 2 * i + n, lane));
    }
    to_left<E>(&x[2 * i], ax[i]);
  }
}
// e = y / beta to the workspace, from the place of v; of a first chunk what rounding left, too.
template <class Tr>
__device__ void send_left(const Params& p, const ChainItem<Tr>& at, int c, int64_t item, int lane,
                          StatesStage<Tr>& s, ChainOut<Tr>& out, float (&y)[8][4]) {
  using E = typename Tr::E;
#pragma unroll
  for (int n = 0; n < 8; ++n) scale_columns(y[n], factors_of(s.rows, kInverse, n, lane));
  const bool has_rest = c == 0 && p.dbeta.present;
  __syncwarp();  // v has been read by all lanes
  put_values<Tr>(s.values, y);
  if (has_rest) {
    to_rests<E>(y);
    put_values<Tr>(out.rests, y);
  }
  fence_async_proxy();
  send_values<Tr>(at, [&](auto send) {
    send(s.values, static_cast<E*>(p.work.e) + item * (kChunk * Tr::V));
    if (has_rest) {
      send(out.rests, static_cast<E*>(p.work.e_rest) + at.sequence_item(p) * (kChunk * Tr::V));
    }
  });
}

// One chunk by a warpgroup. release: of the stage before, when the first product is under way.
template <class Tr, class F>
__device__ void step_states(const Params& p, const ChainItem<Tr>& at, int c, StatesStage<Tr>& s,
                            ChainOut<Tr>& out, F&& release, StepKind kind, State<Tr>& S) {
  using E = typename Tr::E;
  const int warp = thread_index() / 32, lane = thread_index() % 32;
  const int64_t item = at.item(p, c);
  float x[8][4];
  uint32_t v[4][4], ax[4][4];
  {
    uint32_t a[Tr::K / 16][4];
    to_operands<Tr>(S, a);
    begin_product(x);
    multiply_keys<Tr>(smem_u32(s.keys[0]), a, false, x);
    wgmma_commit();
    release();
    if (kind.has_outputs) {
      send_operands<Tr>(at, a, out.staging[warp],
                        static_cast<E*>(p.work.S) + item * (Tr::V * Tr::K));
    }
    if (c == 0) multiply_rest<Tr>(smem_u32(s.keys[0]), S, a, x);
    decay_state<Tr>(s.last, S);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (kind.has_values) {
        load_left_turned<64>(smem_u32(s.values), 16 * i, 16 * warp, lane, v[i]);
      } else {
        v[i][0] = v[i][1] = v[i][2] = v[i][3] = 0;
      }
    }
    end_product<0>(x);
  }
  subtract_from_values<Tr>(s.rows, v, lane, x, ax);
  float(&y)[8][4] = x;
  begin_product(y);
  multiply_square<Tr, Major::k>(smem_u32(s.T), ax, true, y);
  wgmma_commit();
  end_product<0>(y);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float operand[2][4];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int j = 0; j < 4; ++j) operand[n][j] = y[2 * i + n][j];
      if constexpr (!Tr::kPerChannel) {
        scale_columns(operand[n], factors_of(s.rows, kEnd, 2 * i + n, lane));
      }
    }
    to_left<E>(operand, ax[i]);
  }
  begin_product(S);
  add_outer<Tr>(smem_u32(s.keys[Tr::kPerChannel ? 1 : 0]), ax, S);
  wgmma_commit();
  if (kind.has_outputs) send_left<Tr>(p, at, c, item, lane, s, out, y);
  end_product<0>(S);
}

// Chunks of the chain forward: those that lead up to a piece, and its own.
template <class Tr>
__device__ int first_chunk(const ChainItem<Tr>& at) {
  return at.begin - max(at.ahead, 0);
}
// From the state before the first of them, by those that multiply, and by the warp that loads.
// place: goes on with it; the last stage is not given back.
template <class Tr, bool kTransfer>
__device__ void go_forward(const Params& p, ChainShared<Tr, StatesStage<Tr>>& s, bool has_values,
                           State<Tr>& S, RingPlace<Tr, StatesStage<Tr>>& place) {
  const ChainItem<Tr>& at = s.head.at;
  for (int c = first_chunk(at); c < at.end; ++c, place.next()) {
    const auto release = [&] {
      if (c > first_chunk(at)) place.release_last(s);
    };
    const StepKind kind{!kTransfer && c >= at.begin, !kTransfer || has_values};
    step_states<Tr>(p, at, c, place.wait_full(s), s.out, release, kind, S);
  }
}
template <class Tr>
__device__ void load_forward(const Params& p, const Maps& maps, bool has_values,
                             ChainShared<Tr, StatesStage<Tr>>& s,
                             RingPlace<Tr, StatesStage<Tr>>& place) {
  const ChainItem<Tr>& at = s.head.at;
  const int end = at.end;
  for (int c = first_chunk(at); c < end; ++c, place.next()) {
    place.wait_empty(s);
    load_stage<Tr>(p, maps, at, c, has_values, s.stages[place.stage], &s.head.full[place.stage]);
  }
}
// What it starts from: 0, or what the call gave.
template <class Tr>
__device__ void begin_forward(const Params& p, const ChainItem<Tr>& at, State<Tr>& S) {
  States given = p.initial;
  given.present = given.present && at.ahead >= 0 && first_chunk(at) == 0;
  load_given<Tr>(at, given, S);
}

}  // namespace deltic::gpu::gradient
