// What the two chains over chunks have in common: a CTA's place, states in registers, and their way
// in and out.
//
// A warpgroup has 64 value columns of a state, turned: accumulators of (value x key), sixteen
// columns a warp. A product's result is the next one's left operand as it stands; tiles of tokens
// in shared memory are the right operands, brought by a warp that does nothing else.
#pragma once

#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/bulk.cuh"
#include "cuda/ptx/registers.cuh"
#include "cuda/sm90/backward/pieces.cuh"
#include "cuda/sm90/backward/tiles.cuh"

namespace deltic::gpu::gradient {

template <class E_, int K_, int V_, int kColumns_, bool kPerChannel_>
struct ChainTraits {
  using E = E_;
  static constexpr int K = K_, V = V_, kColumns = kColumns_;
  static constexpr bool kPerChannel = kPerChannel_;
  // Warps that multiply, and one that loads; three warpgroups, by which registers are given out.
  static constexpr int kWarps = kColumns / 16, kGroups = kWarps / kWarpgroupWarps;
  static constexpr int kThreads = 3 * kWarpgroup;
  static_assert(kGroups <= 2);
  static constexpr int kKeyBytes = kChunk * K * 2, kSquareBytes = kChunk * kChunk * 2;
  static constexpr int kValueBytes = kChunk * kColumns * 2;
  static constexpr int kNumberBytes = (K + kChainKinds * kChunk) * 4;
  static_assert(kColumns % 64 == 0 && V % kColumns == 0 && K % 64 == 0);
};

// Whose state it is, its columns and tokens.
template <class Tr>
struct ChainItem {
  int64_t n, head, first_tile, piece;
  int slice;
  int begin, end;  // chunks of the piece
  int ahead;       // chunks that lead up to it (chunks_ahead); -1: the state comes from elsewhere
  Span span;
  __device__ ChainItem(const Params& p, unsigned job, unsigned columns) {
    slice = static_cast<int>(columns);
    piece = job / p.HV, head = job % p.HV;
    n = sequence_of_piece(p, piece);
    span = span_of(p.tokens, n);
    first_tile = first_tile_of(p.tokens, n);
    begin = static_cast<int>(piece - first_piece_of(p, n)) * p.segment;
    end = p.segment > 0 ? min(begin + p.segment, num_chunks()) : num_chunks();
    ahead = 0;
  }
  // A number may be none of a piece; a sequence without tokens has one.
  __device__ bool is_there() const { return begin == 0 || (begin > 0 && begin < end); }
  __device__ bool is_last() const { return end == num_chunks(); }
  __device__ int num_chunks() const {
    return static_cast<int>((span.length + kChunk - 1) / kChunk);
  }
  __device__ int count(int c) const {
    return static_cast<int>(min(int64_t{kChunk}, span.length - int64_t{kChunk} * c));
  }
  __device__ int64_t token(int c) const { return span.begin + int64_t{kChunk} * c; }
  // Of the first chunk's e_rest.
  __device__ int64_t sequence_item(const Params& p) const { return n * p.HV + head; }
  // Of the piece's, or another's of the sequence.
  __device__ int64_t piece_item(const Params& p, int further = 0) const {
    return (piece + further) * p.HV + head;
  }
  // Of a chunk's tiles in the workspace.
  __device__ int64_t item(const Params& p, int c) const { return (first_tile + c) * p.HV + head; }
};

// By the loading warp: what a chunk needs, on its way to a stage. Tiles of the workspace and rows
// of whole chunks go by themselves, sent by one lane; rows of a partial chunk with zeros behind
// them, and zeros of a tensor that is absent, are copies of all lanes. Every lane arrives at
// `full`.
template <class Tr>
struct ChunkLoad {
  const Params& p;
  const ChainItem<Tr>& at;
  uint64_t* full;
  const int lane, count, token;
  const int64_t item;
  bool has_copies = false;
  __device__ ChunkLoad(const Params& params, const ChainItem<Tr>& place, int c, uint64_t* barrier)
      : p(params),
        at(place),
        full(barrier),
        lane(thread_index() % 32),
        count(place.count(c)),
        token(static_cast<int>(place.token(c))),
        item(place.item(params, c)) {}
  __device__ bool goes_by_itself(const RowsMap& map) const {
    return count == kChunk && map.is_there;
  }
  // First: what goes by itself, in bytes of workspace and columns of rows.
  __device__ void expect(int bytes) const {
    if (lane == 0) barrier_expect(full, bytes);
  }
  __device__ int bytes_of(const RowsMap& map, int columns) const {
    return goes_by_itself(map) ? kChunk * columns * 2 : 0;
  }
  // A tile, or numbers, of the workspace; stride: bytes from one item's to the next one's.
  __device__ void image(void* to, const void* from, int bytes, int stride = 0) const {
    if (lane == 0) {
      bulk_load(to, static_cast<const char*>(from) + item * (stride > 0 ? stride : bytes), bytes,
                full);
    }
  }
  // Of the call's tensors, from the chunk's first token on.
  template <int kWidth>
  __device__ void rows(unsigned char* to, const RowsMap& map, const Rows& x, int64_t head,
                       int column) {
    if (goes_by_itself(map)) {
      if (lane == 0) {
#pragma unroll
        for (int part = 0; part < kWidth / 64; ++part) {
          tensor_load<kEvictNormal>(to + part * kChunk * 128, &map.map, column + 64 * part,
                                    static_cast<int>(head), token, static_cast<int>(at.span.batch),
                                    full);
        }
      }
      return;
    }
    has_copies = true;
    const auto* from =
        static_cast<const typename Tr::E*>(x.data) + offset(x, at.span.batch, token, head) + column;
    constexpr int kPieces = kWidth / 8;
#pragma unroll 1
    for (int i = lane; i < kChunk * kPieces; i += 32) {
      const int row = i / kPieces, c = i % kPieces * 8;
      copy_async_or_zero(to + place<64>(row, c), from + row * x.st + c, x.present && row < count);
    }
  }
  __device__ void keys(unsigned char* to, const RowsMap& map, const Rows& x) {
    rows<Tr::K>(to, map, x, key_head_of(p, at.head), 0);
  }
  __device__ void values(unsigned char* to, const RowsMap& map, const Rows& x) {
    rows<Tr::kColumns>(to, map, x, at.head, at.slice * Tr::kColumns);
  }
  // Decays and factors.
  __device__ void numbers(float* last, float* rows) const {
    image(last, p.work.last, Tr::K * 4);
    image(rows, p.work.rows, kChainKinds * kChunk * 4, kRowKinds * kChunk * 4);
  }
  // Last. Products do not see copies of lanes by themselves.
  __device__ void done() const {
    if (has_copies) {
      copies_commit();
      copies_wait<0>();
      fence_async_proxy();
    }
    __syncwarp();
    if (lane != 0) barrier_arrive(full);
  }
};

// What leaves a chain: a warp's sixteen rows of a state, then its columns of dv; rests of values.
template <class Tr>
struct ChainOut {
  alignas(128) unsigned char staging[Tr::kWarps][32 * Tr::K];
  unsigned char rests[Tr::kValueBytes];
};
// A ring of stages between the warp that loads and those that multiply: `full` by the lanes of the
// one and the bytes under way, `empty` by a thread of each warpgroup of the others. Where the CTA
// works is read again where it is wanted, else it would fill registers.
inline constexpr int kMostStages = 4, kCtaBytes = 232448;  // of shared memory
template <class Tr>
struct ChainHead {
  uint64_t full[kMostStages], empty[kMostStages];
  ChainItem<Tr> at;
  // Of transfers: chunks_ahead at the piece's two borders, of the state and of its gradient.
  int state_ahead[2], gradient_ahead[2];
  bool has_rest;  // of a job that two CTAs share: the last part is this one's
};
template <class Tr, class Stage>
struct ChainShared {
  static constexpr int kHeadBytes = 1024;  // stages are aligned to as much
  static_assert(sizeof(ChainHead<Tr>) <= kHeadBytes);
  static constexpr int kRoom =
      static_cast<int>((kCtaBytes - kHeadBytes - sizeof(ChainOut<Tr>)) / sizeof(Stage));
  static constexpr int kStages = kRoom < kMostStages ? kRoom : kMostStages;
  static_assert(kStages >= 2, "shared memory of a CTA");
  ChainHead<Tr> head;
  Stage stages[kStages];
  ChainOut<Tr> out;
};
// Before anything else; a barrier inside.
template <class Tr>
__device__ void begin_chain(const Params& p, unsigned job, unsigned slice, ChainHead<Tr>& s) {
  if (thread_index() == 0) {
    s.at = ChainItem<Tr>(p, job, slice);
    for (int i = 0; i < kMostStages; ++i) {
      barrier_init(&s.full[i], 32), barrier_init(&s.empty[i], Tr::kGroups);
    }
    fence_barrier_init();
  }
  __syncthreads();  // the place and barriers
}
// A place in the ring, and the turn of its barriers.
template <class Tr, class Stage>
struct RingPlace {
  using Shared = ChainShared<Tr, Stage>;
  int stage = 0;
  uint32_t turn = 0;
  __device__ void next() {
    if (++stage == Shared::kStages) stage = 0, turn ^= 1;
  }
  // By those that multiply: the stage has arrived.
  __device__ Stage& wait_full(Shared& s) const {
    barrier_wait(&s.head.full[stage], turn);
    return s.stages[stage];
  }
  // By all that multiply: the warpgroup is done with the stage before this one, and copies have
  // read it and what they took of ChainOut.
  __device__ void release_last(Shared& s) const {
    bulk_store_wait_read();
    const int group = thread_index() / kWarpgroup;
    named_sync(1 + group, kWarpgroup);
    if (thread_index() % kWarpgroup == 0) {
      barrier_arrive(&s.head.empty[(stage == 0 ? Shared::kStages : stage) - 1]);
    }
  }
  // By the loading warp, before it fills the stage again: it is free since the turn before.
  __device__ void wait_empty(Shared& s) const { barrier_wait(&s.head.empty[stage], turn ^ 1); }
};

// A state: [8 keys][4], as the matrix instruction lays out 16 values x 8 keys.
template <class Tr>
using State = float[Tr::K / 8][4];

// f(value, key, element) for the lane's elements; values count from the call's first column.
template <class Tr, class F>
__device__ void for_state(const ChainItem<Tr>& at, State<Tr>& S, F&& f) {
  const int warp = thread_index() / 32, lane = thread_index() % 32;
  const int value = at.slice * Tr::kColumns + 16 * warp + lane / 4, key = lane % 4 * 2;
#pragma unroll
  for (int n = 0; n < Tr::K / 8; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) f(value + e / 2 * 8, key + 8 * n + e % 2, S[n][e]);
  }
}
// A state from piece to piece, fp32: blocks of 64 value columns as threads have them.
template <class Tr>
__device__ float4* stash_of(const ChainItem<Tr>& at, float* states, int64_t item) {
  const int block = at.slice * Tr::kGroups + thread_index() / kWarpgroup;
  return reinterpret_cast<float4*>(states) + item * (Tr::V * Tr::K / 4) + block * (16 * Tr::K) +
         thread_index() % kWarpgroup;
}
template <class Tr>
__device__ void load_stash(const float4* from, State<Tr>& S) {
#pragma unroll
  for (int n = 0; n < Tr::K / 8; ++n) {
    const float4 x = from[n * kWarpgroup];
    S[n][0] = x.x, S[n][1] = x.y, S[n][2] = x.z, S[n][3] = x.w;
  }
}
template <class Tr>
__device__ void store_stash(float4* to, const State<Tr>& S) {
#pragma unroll
  for (int n = 0; n < Tr::K / 8; ++n) {
    to[n * kWarpgroup] = {S[n][0], S[n][1], S[n][2], S[n][3]};
  }
}
// A state of the call, any strides and dtype; absent: zeros.
template <class Tr>
__device__ void load_given(const ChainItem<Tr>& at, const States& x, State<Tr>& S) {
  const int64_t base = at.n * x.s_slot + at.head * x.s_head;
  for_state<Tr>(at, S, [&](int value, int key, float& y) {
    y = x.present ? load(x.data, x.dtype, base + key * x.s_k + value * x.s_v) : 0.0f;
  });
}
template <class Tr>
__device__ void store_given(const ChainItem<Tr>& at, const States& x, State<Tr>& S) {
  if (!x.present) return;
  const int64_t base = at.n * x.s_slot + at.head * x.s_head;
  for_state<Tr>(at, S, [&](int value, int key, float& y) {
    store(x.data, x.dtype, base + key * x.s_k + value * x.s_v, y);
  });
}

// A state as left operands.
template <class Tr>
__device__ void to_operands(const State<Tr>& S, uint32_t (&a)[Tr::K / 16][4]) {
#pragma unroll
  for (int k = 0; k < Tr::K / 16; ++k) to_left<typename Tr::E>(&S[2 * k], a[k]);
}
// They go to the workspace: [kRows][K] at `to`. staging: 32 K bytes of the warp's own, which are
// free; its first lane sends them.
template <class Tr, int kRows = Tr::V>
__device__ void send_operands(const ChainItem<Tr>& at, const uint32_t (&a)[Tr::K / 16][4],
                              unsigned char* staging, void* to) {
  const int warp = thread_index() / 32, lane = thread_index() % 32;
  const uint32_t place = smem_u32(staging) + block_place<16, false>(0, 0, lane);
#pragma unroll
  for (int k = 0; k < Tr::K / 16; ++k) stmatrix_x4(column_step<16>(place, k), a[k]);
  fence_async_proxy();
  __syncwarp();
  if (lane == 0) {
    auto* rows = static_cast<unsigned char*>(to) + (at.slice * Tr::kColumns + 16 * warp) * 128;
#pragma unroll
    for (int part = 0; part < Tr::K / 64; ++part) {
      bulk_store<kEvictNormal>(rows + part * kRows * 128, staging + part * 2048, 2048);
    }
  }
}

// What rounding left of a state, as operands in the place of the rounded ones.
template <class Tr>
__device__ void to_residuals(const State<Tr>& S, uint32_t (&a)[Tr::K / 16][4]) {
  using E = typename Tr::E;
#pragma unroll
  for (int k = 0; k < Tr::K / 16; ++k) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 x = unpack<E>(a[k][i]);
      const float(&y)[4] = S[2 * k + i / 2];
      a[k][i] = pack<E>(y[i % 2 * 2] - x.x, y[i % 2 * 2 + 1] - x.y);
    }
  }
}

// A warp's 16 columns of (value x token) accumulators into its columns of a tile [64][columns].
template <class Tr>
__device__ void put_values(unsigned char* tile, const float (&c)[8][4]) {
  const int warp = thread_index() / 32, lane = thread_index() % 32;
  const uint32_t place = smem_u32(tile) + block_place<64, true>(0, 16 * warp, lane);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    uint32_t r[4];
    to_left<typename Tr::E>(&c[2 * i], r);
    stmatrix_x4_trans(place + i * 2048, r);
  }
}
// Tiles that the warpgroup has put leave for the workspace, its 64 columns by one thread, behind
// fences of all: f(send) calls send(tile, its place in the workspace). The tiles are free after
// release_last.
template <class Tr, class F>
__device__ void send_values(const ChainItem<Tr>& at, F&& f) {
  const int group = thread_index() / kWarpgroup;
  named_sync(1 + group, kWarpgroup);
  if (thread_index() % kWarpgroup == 0) {
    constexpr int kBytes = kChunk * 128;
    f([&](const unsigned char* tile, void* to) {
      bulk_store<kEvictNormal>(
          static_cast<unsigned char*>(to) + at.slice * Tr::kValueBytes + group * kBytes,
          tile + group * kBytes, kBytes);
    });
  }
}

// Factors of the lane's tokens, two of eight: 8 n + 2 (lane % 4) and the next.
__device__ inline float2 factors_of(const float* rows, Row kind, int n, int lane) {
  return *reinterpret_cast<const float2*>(rows + kind * kChunk + 8 * n + lane % 4 * 2);
}
__device__ inline void scale_columns(float (&c)[4], float2 f) {
  c[0] *= f.x, c[1] *= f.y, c[2] *= f.x, c[3] *= f.y;
}

// S *= exp(G_last), by keys.
template <class Tr>
__device__ void decay_state(const float* last, State<Tr>& S) {
  const int lane = thread_index() % 32;
#pragma unroll
  for (int n = 0; n < Tr::K / 8; ++n) {
    scale_columns(S[n], *reinterpret_cast<const float2*>(last + 8 * n + lane % 4 * 2));
  }
}
// What rounding left of numbers, in their place.
template <class E>
__device__ void to_rests(float (&c)[8][4]) {
#pragma unroll
  for (int n = 0; n < 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      const float2 rounded = unpack<E>(pack<E>(c[n][i], c[n][i + 1]));
      c[n][i] -= rounded.x, c[n][i + 1] -= rounded.y;
    }
  }
}

// S += a x for a tile x of [64][K]; a: (value x token) operands.
template <class Tr>
__device__ void add_outer(uint32_t tile, const uint32_t (&a)[4][4], State<Tr>& S) {
  const uint64_t x = tile_desc(tile, kChunk * 128, 1024);
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    wgmma<typename Tr::E, Major::mn>(flat(S), a[k], desc_at(x, static_cast<uint32_t>(k * 2048)));
  }
}
// c = S x^T + (keep ? c : 0): (value x token) from a state's operands.
template <class Tr>
__device__ void multiply_keys(uint32_t tile, const uint32_t (&a)[Tr::K / 16][4], bool keep,
                              float (&c)[8][4]) {
  const uint64_t x = tile_desc(tile, 16, 1024);
#pragma unroll
  for (int k = 0; k < Tr::K / 16; ++k) {
    const int byte = k / 4 * kChunk * 128 + k % 4 * 32;
    wgmma<typename Tr::E, Major::k>(flat(c), a[k], desc_at(x, static_cast<uint32_t>(byte)),
                                    keep || k > 0);
  }
}
// A state that the call gave has more digits than an operand: in sequences of one chunk its
// rounding would be most of the error of dbeta, so it is multiplied as two operands. The second
// product, when the first is under way; a is overwritten.
template <class Tr>
__device__ void multiply_rest(uint32_t tile, const State<Tr>& S, uint32_t (&a)[Tr::K / 16][4],
                              float (&c)[8][4]) {
  end_product<0>(c);
  to_residuals<Tr>(S, a);
  begin_product(c);
  multiply_keys<Tr>(tile, a, true, c);
  wgmma_commit();
}
// c = a m + (keep ? c : 0) for a tile m of [64][64] as [token of a][token of c], or turned.
template <class Tr, Major kMajor>
__device__ void multiply_square(uint32_t tile, const uint32_t (&a)[4][4], bool keep,
                                float (&c)[8][4]) {
  const uint64_t m = tile_desc(tile, 16, 1024);
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    wgmma<typename Tr::E, kMajor>(
        flat(c), a[k], desc_at(m, static_cast<uint32_t>(k * (kMajor == Major::mn ? 2048 : 32))),
        keep || k > 0);
  }
}

}  // namespace deltic::gpu::gradient
