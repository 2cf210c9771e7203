// The chain backward: the gradient of the state after every chunk, dz and dv of its tokens. With dS
// the gradient of the state after the chunk:
//
//     dy = P^T do + (k R) dS     dz = (I + T)^T dy     dv = beta dz
//     dS <- exp(G_last) dS + (q E)^T do - (k E)^T (beta dz)
//
// It needs nothing of the chain forward: both run at once, in one launch.
#pragma once

#include "cuda/sm90/backward/states.cuh"

namespace deltic::gpu::gradient {

template <class Tr>
struct ChainStage {
  // k E, k R and q E, or the raw k and q.
  alignas(1024) unsigned char keys[Tr::kPerChannel ? 3 : 2][Tr::kKeyBytes];
  unsigned char T[Tr::kSquareBytes], P[Tr::kSquareBytes];
  unsigned char values[Tr::kValueBytes];  // do, then dz, its rest, then dv
  float last[Tr::K], rows[kChainKinds * kChunk];

  __device__ uint32_t k_start() const { return smem_u32(keys[0]); }
  __device__ uint32_t k_end() const { return smem_u32(keys[Tr::kPerChannel ? 1 : 0]); }
  __device__ uint32_t query() const { return smem_u32(keys[Tr::kPerChannel ? 2 : 1]); }
};

template <class Tr>
__device__ void load_stage(const Params& p, const Maps& maps, const ChainItem<Tr>& at, int c,
                           ChainStage<Tr>& s, uint64_t* full) {
  constexpr int kBytes =
      (Tr::kPerChannel ? 3 * Tr::kKeyBytes : 0) + 2 * Tr::kSquareBytes + Tr::kNumberBytes;
  ChunkLoad<Tr> load(p, at, c, full);
  load.expect(kBytes +
              (Tr::kPerChannel ? 0 : load.bytes_of(maps.k, Tr::K) + load.bytes_of(maps.q, Tr::K)) +
              load.bytes_of(maps.d_o, Tr::kColumns));
  load.values(s.values, maps.d_o, p.d_o);
  if constexpr (Tr::kPerChannel) {
    load.image(s.keys[1], p.work.kR, Tr::kKeyBytes);
  } else {
    load.keys(s.keys[0], maps.k, p.k);
  }
  load.image(s.P, p.work.P, Tr::kSquareBytes);
  load.image(s.T, p.work.T, Tr::kSquareBytes);
  load.numbers(s.last, s.rows);
  if constexpr (Tr::kPerChannel) {
    load.image(s.keys[2], p.work.qE, Tr::kKeyBytes);
    load.image(s.keys[0], p.work.kE, Tr::kKeyBytes);
  } else {
    load.keys(s.keys[1], maps.q, p.q);
  }
  load.done();
}

// dy = P^T do + (k R) dS of the warpgroup's columns, and dS decays. dS goes to the workspace.
// release: see step_states.
template <class Tr, class F>
__device__ void multiply_chain(const Params& p, const ChainItem<Tr>& at, int c, ChainStage<Tr>& s,
                               ChainOut<Tr>& out, F&& release, StepKind kind,
                               const uint32_t (&d_o)[4][4], State<Tr>& dS, float (&dy)[8][4]) {
  using E = typename Tr::E;
  const int lane = thread_index() % 32;
  uint32_t a[Tr::K / 16][4];
  to_operands<Tr>(dS, a);
  // Per head the products with the state have factors that the others have not: two sums, or, as
  // fp16 has no registers left for both, one after the other.
  constexpr bool kTwoSums = !Tr::kPerChannel && !kIsHalf<E>;
  float scores[kTwoSums ? 8 : 1][4];
  begin_product(dy);
  multiply_keys<Tr>(s.k_end(), a, false, dy);
  if constexpr (Tr::kPerChannel) {
    multiply_square<Tr, Major::mn>(smem_u32(s.P), d_o, true, dy);
  } else if constexpr (kTwoSums) {
    fence_operands(flat(scores));
    multiply_square<Tr, Major::mn>(smem_u32(s.P), d_o, false, scores);
  }
  wgmma_commit();
  release();
  const int64_t item = at.item(p, c);
  if (kind.has_outputs) {
    send_operands<Tr>(at, a, out.staging[thread_index() / 32],
                      static_cast<E*>(p.work.dS) + item * (Tr::V * Tr::K));
  }
  if (c + 1 == at.num_chunks()) multiply_rest<Tr>(s.k_end(), dS, a, dy);
  decay_state<Tr>(s.last, dS);
  end_product<0>(dy);
  if constexpr (!Tr::kPerChannel) {
#pragma unroll
    for (int n = 0; n < 8; ++n) scale_columns(dy[n], factors_of(s.rows, kEnd, n, lane));
  }
  if constexpr (kTwoSums) {
    fence_operands(flat(scores));
#pragma unroll
    for (int n = 0; n < 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) dy[n][e] += scores[n][e];
    }
  } else if constexpr (!Tr::kPerChannel) {
    begin_product(dy);
    multiply_square<Tr, Major::mn>(smem_u32(s.P), d_o, true, dy);
    wgmma_commit();
    end_product<0>(dy);
  }
}

// A warp's columns of dv, as rows of 32 bytes in its staging, whose last copy has been read. They
// go by themselves, as stores of threads would be waited for by the fences of the next step; those
// of a partial chunk do not. A fence and __syncwarp() are between the two functions.
template <class Tr>
__device__ void put_dv(unsigned char* staging, const float* rows, const float (&dz)[8][4]) {
  const int lane = thread_index() % 32;
  // Blocks of eight tokens and eight columns, in the order of put_values.
  const uint32_t at = smem_u32(staging) + (lane % 8 + lane / 16 * 8) * 32 + lane / 8 % 2 * 16;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float dv[2][4];
    uint32_t r[4];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) dv[n][e] = dz[2 * i + n][e];
      scale_columns(dv[n], factors_of(rows, kBeta, 2 * i + n, lane));
    }
    to_left<typename Tr::E>(dv, r);
    stmatrix_x4_trans(at + i * 512, r);
  }
}
template <class Tr>
__device__ void send_dv(const Params& p, const RowsMap& map, const ChainItem<Tr>& at, int c,
                        const unsigned char* staging) {
  using E = typename Tr::E;
  const int lane = thread_index() % 32, count = at.count(c);
  const int column = at.slice * Tr::kColumns + thread_index() / 32 * 16;
  if (count == kChunk && map.is_there) {
    if (lane == 0) {
      tensor_store(&map.map, staging, column, static_cast<int>(at.head),
                   static_cast<int>(at.token(c)), static_cast<int>(at.span.batch));
    }
    return;
  }
  const int row = lane / 2;
  E* to = static_cast<E*>(p.dv.data) + offset(p.dv, at.span.batch, at.token(c) + row, at.head) +
          column + lane % 2 * 8;
#pragma unroll 1
  for (int r = row; r < count; r += 16, to += 16 * p.dv.st) {
    *reinterpret_cast<uint4*>(to) =
        *reinterpret_cast<const uint4*>(staging + r * 32 + lane % 2 * 16);
  }
}

// dz and dv of the warp's columns. do has been read.
template <class Tr>
__device__ void send_gradients(const Params& p, const RowsMap& map, const ChainItem<Tr>& at, int c,
                               ChainStage<Tr>& s, ChainOut<Tr>& out, float (&dz)[8][4]) {
  using E = typename Tr::E;
  const int64_t item = at.item(p, c);
  unsigned char* const staging = out.staging[thread_index() / 32];
  bulk_store_wait_read();
  __syncwarp();  // do has been read by all lanes, and the staging
  put_values<Tr>(s.values, dz);
  if (p.dv.present) put_dv<Tr>(staging, s.rows, dz);
  if (p.dbeta.present) {
    to_rests<E>(dz);
    put_values<Tr>(out.rests, dz);
  }
  fence_async_proxy();
  __syncwarp();
  if (p.dv.present) send_dv<Tr>(p, map, at, c, staging);
  send_values<Tr>(at, [&](auto send) {
    send(s.values, static_cast<E*>(p.work.dz) + item * (kChunk * Tr::V));
    if (p.dbeta.present) {
      send(out.rests, static_cast<E*>(p.work.dz_rest) + item * (kChunk * Tr::V));
    }
  });
}

// One chunk by a warpgroup.
template <class Tr, class F>
__device__ void step_chain(const Params& p, const RowsMap& map, const ChainItem<Tr>& at, int c,
                           ChainStage<Tr>& s, ChainOut<Tr>& out, F&& release, StepKind kind,
                           State<Tr>& dS) {
  using E = typename Tr::E;
  const int warp = thread_index() / 32, lane = thread_index() % 32;
  float dy[8][4];
  uint32_t d_o[4][4], a[4][4];
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    load_left_turned<64>(smem_u32(s.values), 16 * k, 16 * warp, lane, d_o[k]);
  }
  multiply_chain<Tr>(p, at, c, s, out, release, kind, d_o, dS, dy);
#pragma unroll
  for (int k = 0; k < 4; ++k) to_left<E>(&dy[2 * k], a[k]);
  float(&dz)[8][4] = dy;
  begin_product(dz);
  multiply_square<Tr, Major::mn>(smem_u32(s.T), a, true, dz);
  wgmma_commit();
  if constexpr (!Tr::kPerChannel) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 q = factors_of(s.rows, kQuery, 2 * k + i / 2, lane), y = unpack<E>(d_o[k][i]);
        d_o[k][i] = pack<E>(y.x * q.x, y.y * q.y);
      }
    }
  }
  begin_product(dS);
  add_outer<Tr>(s.query(), d_o, dS);
  wgmma_commit();
  end_product<1>(dz);
  uint32_t az[4][4];
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    float x[2][4];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      float2 f = factors_of(s.rows, kBeta, 2 * k + n, lane);
      if constexpr (!Tr::kPerChannel) {
        const float2 start = factors_of(s.rows, kStart, 2 * k + n, lane);
        f.x *= start.x, f.y *= start.y;
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) x[n][e] = dz[2 * k + n][e];
      scale_columns(x[n], {-f.x, -f.y});
    }
    to_left<E>(x, az[k]);
  }
  begin_product(dS);
  add_outer<Tr>(s.k_start(), az, dS);
  wgmma_commit();
  if (kind.has_outputs) send_gradients<Tr>(p, map, at, c, s, out, dz);
  end_product<0>(dS);
}

// Chunks of the chain backward, from end_chunk - 1 on: those that lead up to a piece, and its own.
template <class Tr>
__device__ int end_chunk(const ChainItem<Tr>& at) {
  return at.end + max(at.ahead, 0);
}
template <class Tr, bool kTransfer>
__device__ void go_back(const Params& p, const RowsMap& map, ChainShared<Tr, ChainStage<Tr>>& s,
                        State<Tr>& dS) {
  const ChainItem<Tr>& at = s.head.at;
  RingPlace<Tr, ChainStage<Tr>> place;
  for (int c = end_chunk(at) - 1; c >= at.begin; --c, place.next()) {
    const auto release = [&] {
      if (c + 1 < end_chunk(at)) place.release_last(s);
    };
    const StepKind kind{!kTransfer && c < at.end};
    step_chain<Tr>(p, map, at, c, place.wait_full(s), s.out, release, kind, dS);
  }
}
template <class Tr>
__device__ void load_back(const Params& p, const Maps& maps, ChainShared<Tr, ChainStage<Tr>>& s) {
  const ChainItem<Tr>& at = s.head.at;
  const int begin = at.begin;
  RingPlace<Tr, ChainStage<Tr>> place;
  for (int c = end_chunk(at) - 1; c >= begin; --c, place.next()) {
    place.wait_empty(s);
    load_stage<Tr>(p, maps, at, c, s.stages[place.stage], &s.head.full[place.stage]);
  }
}
template <class Tr>
__device__ void begin_back(const Params& p, const ChainItem<Tr>& at, State<Tr>& dS) {
  States given = p.d_final;
  given.present = given.present && at.ahead >= 0 && end_chunk(at) == at.num_chunks();
  load_given<Tr>(at, given, dS);
}

}  // namespace deltic::gpu::gradient
