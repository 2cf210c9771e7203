// A thread's part of the state: kColumns columns, the channels of a piece. On its way in as it lies
// in memory, stepped over one token, and stored. Called by all threads of the CTA.
#pragma once

#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/vectors.cuh"
#include "cuda/sm80/decode/stage_tokens.cuh"

namespace deltic::gpu::decode {

// Which part a thread has.
struct Part {
  int piece, column;  // column: the first one within the tile
};

// One of the CTA's tiles; without columns where the last CTA of a head has fewer.
template <class Tr>
__device__ Slice tile_of(Slice at, int tile) {
  at.first += tile * Tr::kSlice;
  at.count = min(at.count - tile * Tr::kSlice, Tr::kSlice);
  return at;
}

template <class Tr>
__device__ Part part_of(int thread) {
  if constexpr (Tr::kMma) return {thread % 4, thread / 32 * 16 + thread % 32 / 4};
  return Tr::kVFirst ? Part{thread % Tr::kLanesK, thread / Tr::kLanesK * Tr::kColumns}
                     : Part{thread / Tr::kLanesV, thread % Tr::kLanesV * Tr::kColumns};
}

template <class Tr>
inline constexpr int kVectorSize = 16 / sizeof(typename Tr::E);
template <class Tr>
inline constexpr int kVectors = Tr::kSlice* Tr::kWidth / kVectorSize<Tr> / Tr::kThreads;
// Of a column, V-first.
template <class Tr>
inline constexpr int kOwnVectors = Tr::kOwnPieces* kChannels / kVectorSize<Tr>;
// A thread's part as it lies in memory.
template <class Tr>
using RawTile = uint4[kVectors<Tr>];

// Walks the thread's vectors of 16 bytes: f(index, address, whether it is there).
template <class Tr, class F>
__device__ void walk(const Slice& at, const Part& part, const States& x, int slot, F&& f) {
  using E = typename Tr::E;
  constexpr int kN = kVectorSize<Tr>;
  E* base = static_cast<E*>(x.data) + static_cast<int64_t>(slot) * x.s_slot + at.head * x.s_head;
  if constexpr (Tr::kMma) {
    // A request of a warp is whole rows, and the next one's follow.
    constexpr int kLanes = Tr::kPieces, kRows = 32 / kLanes;
    const int lane = threadIdx.x % 32, column = threadIdx.x / 32 * 16 + lane / kLanes;
    E* row = base + (at.first + column) * x.s_v + kChannels * (lane % kLanes);
#pragma unroll
    for (int i = 0; i < kVectors<Tr>; ++i) {
      f(i, row, column + i * kRows < at.count);
      row += kRows * x.s_v;
    }
  } else if constexpr (Tr::kVFirst) {
    // A column's vectors lie at constants from the first one, which is said so that the compiler
    // sees it: ten instructions of addresses for each of them became two.
    E* row = base + (at.first + part.column) * x.s_v + channel_of<Tr>(part.piece, 0);
#pragma unroll
    for (int c = 0; c < Tr::kColumns; ++c) {
#pragma unroll
      for (int j = 0; j < kOwnVectors<Tr>; ++j) {
        const int piece = j * kN / kChannels * Tr::kLanesK;
        f(c * kOwnVectors<Tr> + j, row + channel_of<Tr>(piece, j * kN % kChannels / 4),
          part.column + c < at.count);
      }
      row += x.s_v;
    }
  } else {
    static_assert(Tr::kColumns == kN);
    E* row = base + kChannels * part.piece * x.s_k + at.first + part.column;
#pragma unroll
    for (int i = 0; i < kChannels; ++i) {
      f(i, row, part.column < at.count);
      row += x.s_k;
    }
  }
}

// Element e of vector `index`: its column and channel of the thread's part.
template <class Tr>
__device__ constexpr int tile_column(int index, int e) {
  return Tr::kVFirst ? index / (kChannels / kVectorSize<Tr>) : e;
}
template <class Tr>
__device__ constexpr int tile_channel(int index, int e) {
  return Tr::kVFirst ? index % (kChannels / kVectorSize<Tr>)*kVectorSize<Tr> + e : index;
}

// Where vector i of a thread's requests, and vector i of the part that it works on, wait in shared
// memory. The same, but for kMma: requests are whole rows there, parts fragments of two columns,
// and odd rows have their halves of 128 bytes exchanged, so that eight lanes of a fragment's load,
// of two rows, meet no bank twice.
template <class Tr>
__device__ int request_place(int i) {
  if constexpr (!Tr::kMma) return i * Tr::kThreads + threadIdx.x;
  const int lane = threadIdx.x % 32, row = (32 * i + lane) / Tr::kPieces;
  return threadIdx.x / 32 * (16 * Tr::kPieces) + row * Tr::kPieces +
         (lane % Tr::kPieces ^ 4 * (row & 1));
}
template <class Tr>
__device__ int part_place(int i) {
  if constexpr (!Tr::kMma) return request_place<Tr>(i);
  constexpr int kBlocks = Tr::kWidth / 32;
  const int lane = threadIdx.x % 32, row = lane / 4 + i / kBlocks * 8;
  return threadIdx.x / 32 * (16 * Tr::kPieces) + row * Tr::kPieces +
         (4 * (i % kBlocks) + lane % 4 ^ 4 * (row & 1));
}

// All copies to the thread's own places in shared memory are under way when it returns; slot -1:
// zeros.
template <class Tr>
__device__ void request_state(const Params& p, const Slice& at, const Part& part, int slot,
                              int tile, Stage<Tr>& s) {
  const auto place = [&](int i) { return &s.state[tile][request_place<Tr>(i)]; };
  if constexpr (Tr::kVFirst) {
    walk<Tr>(at, part, p.state_in, max(slot, 0), [&](int i, const auto* from, bool is_there) {
      copy_async(place(i), from, slot >= 0 && is_there);
    });
    return;
  }
  // K-first a branch per vector takes fewer registers (bf16, gate per head: 48 bytes less spilled).
  if (slot < 0) {
#pragma unroll
    for (int i = 0; i < kVectors<Tr>; ++i) *place(i) = uint4{0, 0, 0, 0};
    return;
  }
  walk<Tr>(at, part, p.state_in, slot, [&](int i, const auto* from, bool is_there) {
    if (is_there) {
      copy_async(place(i), from);
    } else {
      *place(i) = uint4{0, 0, 0, 0};
    }
  });
}
// From there to registers and back.
template <class Tr>
__device__ void get_state(const Stage<Tr>& s, int tile, RawTile<Tr>& raw) {
#pragma unroll
  for (int i = 0; i < kVectors<Tr>; ++i) raw[i] = s.state[tile][part_place<Tr>(i)];
}
template <class Tr>
__device__ void put_state(const RawTile<Tr>& raw, int tile, Stage<Tr>& s) {
#pragma unroll
  for (int i = 0; i < kVectors<Tr>; ++i) s.state[tile][part_place<Tr>(i)] = raw[i];
}

template <class Tr>
__device__ void store_state(const Params& p, const Slice& at, const Part& part, int slot, int tile,
                            const RawTile<Tr>& raw, Stage<Tr>& s) {
  if constexpr (Tr::kMma) __syncwarp();  // whole rows are there
  walk<Tr>(at, part, p.state_out, slot, [&](int i, auto* to, bool is_there) {
    constexpr bool kFromShared = Tr::kMma || Tr::kGoesBack;
    if (is_there) store_vector(to, kFromShared ? s.state[tile][request_place<Tr>(i)] : raw[i]);
  });
  if constexpr (Tr::kMma) __syncwarp();  // they have been read
}

// The state as it came, of a sequence without tokens.
template <class Tr>
__device__ void keep_state(const Params& p, const Slice& at, const Part& part, int slot, int tile,
                           const Stage<Tr>& s) {
  walk<Tr>(at, part, p.state_out, slot, [&](int i, auto* to, bool is_there) {
    if (is_there) store_vector(to, s.state[tile][request_place<Tr>(i)]);
  });
}

// A tree's other branch: the state that a token starts from, where it is not the one that the token
// before it left. A thread reads what it has written itself, so that nothing needs to be ordered;
// by plain loads, since copies of the state behind the program's back might come before the store.
template <class Tr>
__device__ void load_branch(const Params& p, const Part& part, int token, int tile, Stage<Tr>& s,
                            RawTile<Tr>& raw) {
  const Slice at = tile_of<Tr>(load_work(s.work).slice, tile);
  const int parent = parent_of(p.slots, at.n, token);
  if (parent == token - 1) return;
  const auto from = jump_source(p.slots, at.n, parent);
  const States& states = from.is_start ? p.state_in : p.state_out;
  walk<Tr>(at, part, states, max(from.slot, 0), [&](int i, const auto* x, bool is_there) {
    uint4& vector = Tr::kStays ? s.state[tile][request_place<Tr>(i)] : raw[i];
    vector = uint4{0, 0, 0, 0};
    if (is_there && from.slot >= 0) vector = *reinterpret_cast<const uint4*>(x);
  });
  if constexpr (Tr::kMma) __syncwarp();  // of other lanes, too
}

// Sums of N values over the lanes whose numbers differ in the bits from kMask to kLast, downwards
// or upwards: with every step a lane keeps half of the values, the upper half if its bit is set,
// down to one.
template <int kMask, int kLast, int N>
__device__ void sum_halving(float (&x)[N], int lane) {
  constexpr int kNext = kMask == kLast ? 0 : kMask > kLast ? kMask / 2 : 2 * kMask;
  if constexpr (kMask > 0) {
    if constexpr (N == 1) {
      x[0] += __shfl_xor_sync(0xFFFFFFFFu, x[0], kMask);
      sum_halving<kNext, kLast>(x, lane);
    } else {
      float half[N / 2];
      const bool upper = (lane & kMask) != 0;
#pragma unroll
      for (int i = 0; i < N / 2; ++i) {
        half[i] = (upper ? x[N / 2 + i] : x[i]) +
                  __shfl_xor_sync(0xFFFFFFFFu, upper ? x[i] : x[N / 2 + i], kMask);
      }
      sum_halving<kNext, kLast>(half, lane);
#pragma unroll
      for (int i = 0; i < N / 2; ++i) x[i] = half[i];
    }
  }
}

// u of the thread's columns, and o, from its parts of S^T k and S^T q (x), both to be multiplied by
// `decay`. V-first: the kPieces lanes of a column have it all. row: of o; v: of the tile.
template <class Tr>
__device__ void solve_in_warp(const Params& p, const Slice& at, const Part& part, int64_t row,
                              const Stage<Tr>& s, int t, const float* v, float decay,
                              float (&x)[2 * Tr::kColumns], float (&u)[Tr::kColumns]) {
  constexpr int kC = Tr::kColumns, kP = Tr::kPieces;
  constexpr int kLeft = 2 * kC > kP ? 2 * kC / kP : 1;      // sums that a lane ends with
  constexpr int kStride = 2 * kC > kP ? 1 : kP / (2 * kC);  // lanes with the same ones
  sum_halving<kP / 2, 1>(x, part.piece);
  const bool has_q = part.piece >= kP / 2;
  const int column = part.column + part.piece % (kP / 2) / kStride * kLeft;
  const float beta = s.beta[t], kq = s.kq[t];
  float own[kLeft];
#pragma unroll
  for (int j = 0; j < kLeft; ++j) {
    const float sum = __fmul_rn(decay, x[j]);
    own[j] = __fmul_rn(beta, __fsub_rn(v[column + j], sum));  // of lanes with k
    const float other = __shfl_xor_sync(0xFFFFFFFFu, own[j], kP / 2);
    if (has_q && part.piece % kStride == 0 && column + j < at.count) {
      store(p.o.data, p.o.dtype, row + column + j, __fmaf_rn(kq, other, sum));
    }
  }
#pragma unroll
  for (int c = 0; c < kC; ++c) {
    u[c] = __shfl_sync(0xFFFFFFFFu, own[c % kLeft], c / kLeft * kStride, kP);
  }
}

// The same K-first, where pieces are over all warps: one exchange and one barrier per token. The
// two halves of s.sums take turns, so that the next token's cannot meet this one's. Pieces are
// added up by pairs of neighbours, pairs of pairs and so on, whoever has them: in this order the
// number of threads changes no bit.
template <class Tr>
__device__ void solve_in_cta(const Params& p, const Slice& at, const Part& part, int64_t row,
                             Stage<Tr>& s, int t, const float* v, float decay,
                             float (&x)[2 * Tr::kColumns], float (&u)[Tr::kColumns]) {
  constexpr int kC = Tr::kColumns, kLanes = Tr::kLanesV, kGroups = 32 / kLanes;
  constexpr int kLeft = 2 * kC / kGroups;  // sums that a lane ends with
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if constexpr (kGroups > 1) sum_halving<kLanes, 16>(x, lane);
  auto& sums = s.sums[t % 2];
  int first = 0;  // of the 2 kC sums
#pragma unroll
  for (int m = kLanes, n = kC; m < 32; m *= 2, n /= 2) first += (lane & m) != 0 ? n : 0;
#pragma unroll
  for (int j = 0; j < kLeft; ++j) {
    sums[warp][(first + j) / kC][part.column + (first + j) % kC] = x[j];
  }
  __syncthreads();  // the sums of all warps are there
  const auto total = [&](int which, int column) {
    float sum[Tr::kWarps];
#pragma unroll
    for (int w = 0; w < Tr::kWarps; ++w) sum[w] = sums[w][which][column];
#pragma unroll
    for (int n = Tr::kWarps / 2; n > 0; n /= 2) {
#pragma unroll
      for (int w = 0; w < n; ++w) sum[w] = sum[2 * w] + sum[2 * w + 1];
    }
    return __fmul_rn(decay, sum[0]);
  };
  const float beta = s.beta[t];
#pragma unroll
  for (int c = 0; c < kC; ++c) {
    u[c] = __fmul_rn(beta, __fsub_rn(v[part.column + c], total(0, part.column + c)));
  }
  static_assert(Tr::kSlice <= Tr::kThreads, "a thread has one output");
  if (const int column = threadIdx.x; column < at.count) {
    const float own = __fmul_rn(beta, __fsub_rn(v[column], total(0, column)));
    store(p.o.data, p.o.dtype, row + column, __fmaf_rn(s.kq[t], own, total(1, column)));
  }
}

// S_{t-1} -> S_t and o_t as below, the sums over channels by matrix instructions: 16 columns of the
// state as they are in memory, times k and q as three bf16 numbers each, which are all of their
// bits. Lanes 0 and 1 of four end with the sums of k of two columns, lanes 2 and 3 with those of q.
template <class Tr, class WorkOf>
__device__ void step_by_mma(const Params& p, const Part& part, WorkOf work_of, int token, int tile,
                            Stage<Tr>& s, int t) {
  using E = typename Tr::E;
  constexpr int kBlocks = Tr::kWidth / 32;
  // Columns 0 to 2 of the right factor are k, 4 to 6 q.
  const int n = threadIdx.x % 32 / 4;
  const uint32_t* parts = s.parts[t][min(n - n / 4, 5)] + 4 * part.piece;
  float sums[4] = {}, more[4] = {};  // two chains: one would wait for itself
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    uint4 x{0, 0, 0, 0};
    if (n % 4 != 3) x = *reinterpret_cast<const uint4*>(parts + 16 * b);
    const uint4 up = s.state[tile][part_place<Tr>(b)];
    const uint4 low = s.state[tile][part_place<Tr>(kBlocks + b)];
    mma_pairs<E>(sums, up.x, low.x, up.y, low.y, x.x, x.y);
    mma_pairs<E>(more, up.z, low.z, up.w, low.w, x.z, x.w);
  }
  const auto [slice, place, to] = work_of();
  const Slice at = tile_of<Tr>(slice, tile);
  const float* v = s.v[t] + tile * Tr::kSlice;
  const float beta = s.beta[t], head_decay = Tr::kPerChannel ? 1.0f : s.decay[t][0];
  float u[2];
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    float& sum = sums[c];
    sum = (sums[2 * c] + more[2 * c]) + (sums[2 * c + 1] + more[2 * c + 1]);
    sum = head_decay * (sum + __shfl_xor_sync(0xFFFFFFFFu, sum, 1));
    u[c] = beta * (v[part.column + 8 * c] - sum);
    const float other = __shfl_xor_sync(0xFFFFFFFFu, u[c], 2);
    if (part.piece >= 2) u[c] = other;
  }
  if (const int c = part.piece - 2; c >= 0 && part.column + 8 * c < at.count) {
    const int64_t row = offset(p.o, place.batch, place.begin + token, at.head) + at.first;
    store(p.o.data, p.o.dtype, row + part.column + 8 * c,
          (c == 0 ? sums[0] : sums[1]) + s.kq[t] * (c == 0 ? u[0] : u[1]));
  }
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    __syncwarp();  // as below: k of all blocks at once would not fit the registers
    float k[kChannels], decay[kChannels];
    read_run<Tr>(s.k[t], 4 * b + part.piece, 0, k);
    if constexpr (Tr::kPerChannel) read_run<Tr>(s.decay[t], 4 * b + part.piece, 0, decay);
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      float S[kChannels];
      uint4& vector = s.state[tile][part_place<Tr>(c * kBlocks + b)];
      unpack<E>(vector, S);
#pragma unroll
      for (int e = 0; e < kChannels; ++e) {
        S[e] = S[e] * (Tr::kPerChannel ? decay[e] : head_decay) + k[e] * u[c];
      }
      vector = pack<E>(S);
    }
  }
}

// What is drawn for vector i of the thread's part after a token.
template <class Tr>
__device__ Random128 draw_vector(const Params& p, const Part& part, int64_t position,
                                 const Slice& at, int i) {
  const int64_t column = at.first + part.column + (Tr::kVFirst ? tile_column<Tr>(i, 0) : 0);
  const int64_t channel = Tr::kVFirst ? channel_of<Tr>(part.piece, 0) + tile_channel<Tr>(i, 0)
                                      : kChannels * part.piece + i;
  const int64_t element = Tr::kVFirst ? column * Tr::kWidth + channel : channel * p.V + column;
  return draw_group(p.chance.seed, position, at.head, static_cast<uint32_t>(element / 8));
}

// S_{t-1} -> S_t and o_t. Both products with S' = decay S are reduced together: o = S'^T q +
// u (k, q). Two passes over the state as it lies in memory, four channels at a time: unpacked as a
// whole it would not fit the registers. Where a product is rounded is written out: kernels of other
// shapes must have the same bits. 16-bit states are rounded: a call of its own for the next
// token would find the same. work_of(): where the token lies.
template <class Tr, class WorkOf>
__device__ void step(const Params& p, const Part& part, WorkOf work_of, int token, int tile,
                     Stage<Tr>& s, int t, RawTile<Tr>& raw) {
  if constexpr (Tr::kMma) return step_by_mma<Tr>(p, part, work_of, token, tile, s, t);
  using E = typename Tr::E;
  constexpr int kN = kVectorSize<Tr>;
  // fp32 and decays per channel: the first pass leaves S' behind.
  constexpr bool kInPlace = Tr::kPerChannel && !Tr::kStays;
  const float head_decay = Tr::kPerChannel ? 1.0f : s.decay[t][0];
  float x[2 * Tr::kColumns] = {};
  // Channels at a time: what stays in shared memory is read once, vector by vector.
  constexpr int kRun = Tr::kStays && Tr::kVFirst ? kChannels : 4;
#pragma unroll
  for (int first = 0; first < kChannels; first += kRun) {
    float k[kRun], q[kRun], decay[kRun];
    read_run<Tr>(s.k[t], part.piece, first, k), read_run<Tr>(s.q[t], part.piece, first, q);
    if constexpr (Tr::kPerChannel) read_run<Tr>(s.decay[t], part.piece, first, decay);
#pragma unroll
    for (int i = 0; i < kVectors<Tr>; ++i) {
      float S[kN];
      unpack<E>(Tr::kStays ? s.state[tile][part_place<Tr>(i)] : raw[i], S);
#pragma unroll
      for (int e = 0; e < kN; ++e) {
        const int c = tile_column<Tr>(i, e), d = tile_channel<Tr>(i, e) - first;
        if (d < 0 || d >= kRun) continue;
        if constexpr (Tr::kPerChannel) S[e] = __fmul_rn(S[e], decay[d]);
        x[c] = __fmaf_rn(S[e], k[d], x[c]);
        x[Tr::kColumns + c] = __fmaf_rn(S[e], q[d], x[Tr::kColumns + c]);
      }
      if constexpr (kInPlace) raw[i] = pack<E>(S);
    }
  }
  float u[Tr::kColumns];
  const auto [slice, place, to] = work_of();
  const Slice at = tile_of<Tr>(slice, tile);
  const float* v = s.v[t] + tile * Tr::kSlice;
  const int64_t row = offset(p.o, place.batch, place.begin + token, at.head) + at.first;
  if constexpr (Tr::kVFirst) {
    solve_in_warp<Tr>(p, at, part, row, s, t, v, head_decay, x, u);
  } else {
    solve_in_cta<Tr>(p, at, part, row, s, t, v, head_decay, x, u);
  }
  // Orders nothing between threads: the compiler reads the state anew instead of holding it.
  if constexpr (Tr::kStays) __syncwarp();
  [[maybe_unused]] int64_t position = 0;
  if constexpr (Tr::kSeeded) position = position_of(p.chance, p.slots, at.n, token);
  float k[kChannels], decay[kChannels];
  read_run<Tr>(s.k[t], part.piece, 0, k);
  if constexpr (Tr::kPerChannel && !kInPlace) read_run<Tr>(s.decay[t], part.piece, 0, decay);
#pragma unroll
  for (int i = 0; i < kVectors<Tr>; ++i) {
    float S[kN];
    unpack<E>(Tr::kStays ? s.state[tile][part_place<Tr>(i)] : raw[i], S);
#pragma unroll
    for (int e = 0; e < kN; ++e) {
      const int c = tile_column<Tr>(i, e), d = tile_channel<Tr>(i, e);
      if constexpr (!kInPlace) S[e] = __fmul_rn(S[e], Tr::kPerChannel ? decay[d] : head_decay);
      S[e] = __fmaf_rn(k[d], u[c], S[e]);
    }
    uint4& vector = Tr::kGoesBack ? s.state[tile][part_place<Tr>(i)] : raw[i];
    if constexpr (Tr::kSeeded) {
      vector = pack_by_chance<E>(S, draw_vector<Tr>(p, part, position, at, i));
    } else {
      vector = pack<E>(S);
    }
  }
}

}  // namespace deltic::gpu::decode
