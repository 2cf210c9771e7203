// What a segment does to a state that enters it: S after it is M S + E of the S before it, and the
// gradient before it M^T dS + F of the one after it. E, F and M of the pieces whose borders the
// gates do not forget, then the states at the borders, along each sequence.
#pragma once

#include "cuda/sm90/backward/chains.cuh"

namespace deltic::gpu::gradient {

// The job of a CTA: F, M or E of a piece.
enum class Transfer { before, matrix, after };

// The chain forward from the identity leaves M; it goes out as operands [key that enters][key], and
// what rounding left of them.
template <class Tr>
__device__ void send_matrix(const Params& p, const ChainItem<Tr>& at, ChainOut<Tr>& out,
                            const State<Tr>& S) {
  using E = typename Tr::E;
  E* const to = static_cast<E*>(p.work.M) + at.piece_item(p) * (2 * Tr::K * Tr::K);
  unsigned char* const staging = out.staging[thread_index() / 32];
  uint32_t a[Tr::K / 16][4];
  to_operands<Tr>(S, a);
  send_operands<Tr, Tr::K>(at, a, staging, to);
  to_residuals<Tr>(S, a);
  bulk_store_wait_read();
  __syncwarp();  // the staging has been read
  send_operands<Tr, Tr::K>(at, a, staging, to + Tr::K * Tr::K);
}

// Jobs that no border needs end at once.
template <class Tr>
__global__ void __launch_bounds__(Tr::kThreads, 1)
    transfers_kernel(const __grid_constant__ Params p, const __grid_constant__ Maps maps) {
  extern __shared__ __align__(1024) unsigned char smem[];
  auto& back = *reinterpret_cast<ChainShared<Tr, ChainStage<Tr>>*>(smem);
  auto& forward = *reinterpret_cast<ChainShared<Tr, StatesStage<Tr>>*>(smem);
  auto& head = *reinterpret_cast<ChainHead<Tr>*>(smem);
  begin_launch();
  if (is_wrong(p.tokens)) return;
  constexpr unsigned kValues = Tr::V / Tr::kColumns, kKeys = Tr::K / Tr::kColumns;
  const unsigned jobs = gridDim.x / (2 * kValues + kKeys), part = blockIdx.x / jobs;
  const Transfer what = part < kValues           ? Transfer::before
                        : part < kValues + kKeys ? Transfer::matrix
                                                 : Transfer::after;
  const unsigned slice = what == Transfer::before   ? part
                         : what == Transfer::matrix ? part - kValues
                                                    : part - kValues - kKeys;
  begin_chain<Tr>(p, blockIdx.x % jobs, slice, head);
  const ChainItem<Tr>& at = head.at;
  if (!at.is_there()) return;
  if (const int warp = thread_index() / 32; warp < 4) {
    const int side = warp % 2;
    const int ahead = chunks_ahead(p, at.first_tile, at.head, side == 0 ? at.begin : at.end,
                                   at.num_chunks(), warp >= 2);
    if (thread_index() % 32 == 0) (warp < 2 ? head.state_ahead : head.gradient_ahead)[side] = ahead;
  }
  __syncthreads();  // what leads up to the borders
  const int state = head.state_ahead[0], gradient = head.gradient_ahead[1];
  const bool wants_after = !at.is_last() && head.state_ahead[1] < 0;
  const bool wants_before = at.begin > 0 && head.gradient_ahead[0] < 0;
  if (what == Transfer::after ? !wants_after
      : what == Transfer::before
          ? !wants_before
          : !((wants_after && state < 0) || (wants_before && gradient < 0))) {
    return;
  }
  if (thread_index() == 0) {
    head.at.ahead = what == Transfer::after ? state : what == Transfer::before ? gradient : 0;
  }
  __syncthreads();  // which chunks
  const bool is_matrix = what == Transfer::matrix;
  RingPlace<Tr, StatesStage<Tr>> place;
  if (thread_index() < 32 * Tr::kWarps) {
    more_registers<240>();
    State<Tr> S;
    if (what == Transfer::before) {
      begin_back<Tr>(p, at, S);
      go_back<Tr, true>(p, maps.dv, back, S);
      store_stash<Tr>(stash_of<Tr>(at, p.work.before, at.piece_item(p)), S);
    } else {
      if (is_matrix) {
        for_state<Tr>(at, S, [](int value, int key, float& y) { y = value == key ? 1.0f : 0.0f; });
      } else {
        begin_forward<Tr>(p, at, S);
      }
      go_forward<Tr, true>(p, forward, !is_matrix, S, place);
      if (is_matrix) {
        send_matrix<Tr>(p, at, forward.out, S);
      } else {
        store_stash<Tr>(stash_of<Tr>(at, p.work.after, at.piece_item(p)), S);
      }
    }
    bulk_store_wait();
  } else {
    fewer_registers<24>();
    if (thread_index() < 32 * Tr::kWarps + 32) {
      what == Transfer::before ? load_back<Tr>(p, maps, back)
                               : load_forward<Tr>(p, maps, !is_matrix, forward, place);
    }
  }
}

// The states at the borders of one sequence, of 64 value columns: a warpgroup goes along its
// pieces, in the chain's direction.
template <class E_, int K_, int V_>
struct MergeTraits : ChainTraits<E_, K_, V_, 64, false> {
  static constexpr int kSide = K_ * K_ * 2;  // bytes of M
};
inline constexpr int kBorders = 32;  // looked at together
template <class Tr>
struct MergeShared {
  alignas(1024) unsigned char M[2][2 * Tr::kSide];  // one is multiplied while the next arrives
  uint64_t full[2];
  int starts[kBorders];
};

// S += a M^T forwards, or a M: a tile of [key that enters][key].
template <class Tr, bool kBack>
__device__ void multiply_matrix(uint32_t tile, const uint32_t (&a)[Tr::K / 16][4], State<Tr>& S) {
  const uint64_t m = tile_desc(tile, kBack ? 16 : Tr::K * 128, 1024);
#pragma unroll
  for (int k = 0; k < Tr::K / 16; ++k) {
    const int byte = kBack ? k / 4 * Tr::K * 128 + k % 4 * 32 : k * 2048;
    wgmma<typename Tr::E, kBack ? Major::k : Major::mn>(flat(S), a[k],
                                                        desc_at(m, static_cast<uint32_t>(byte)));
  }
}
// E + M S, for S as two operands of 16 bits and M as well; S: in, and out in the place of E.
// load_next: while products are under way.
template <class Tr, bool kBack, class F>
__device__ void apply_matrix(const unsigned char* M, const State<Tr>& S, State<Tr>& E,
                             F&& load_next) {
  uint32_t a[Tr::K / 16][4], rest[Tr::K / 16][4];
  to_operands<Tr>(S, a), to_operands<Tr>(S, rest);
  to_residuals<Tr>(S, rest);
  begin_product(E);
  multiply_matrix<Tr, kBack>(smem_u32(M), a, E);
  multiply_matrix<Tr, kBack>(smem_u32(M), rest, E);
  multiply_matrix<Tr, kBack>(smem_u32(M) + Tr::kSide, a, E);
  wgmma_commit();
  load_next();
  end_product<0>(E);
}

template <class Tr, bool kBack>
__device__ void merge_sequence(const Params& p, int64_t n, int64_t head, int slice,
                               MergeShared<Tr>& s) {
  const int chunks = static_cast<int>((span_of(p.tokens, n).length + kChunk - 1) / kChunk);
  const int pieces = (chunks + p.segment - 1) / p.segment, thread = thread_index();
  const int64_t first_tile = first_tile_of(p.tokens, n);
  const int64_t first = first_piece_of(p, n);
  const auto piece = [&](int i) { return kBack ? pieces - 1 - i : i; };
  const auto item = [&](int i) { return (first + piece(i)) * p.HV + head; };
  const auto load = [&](int i, int turn) {  // by one thread
    barrier_expect(&s.full[turn % 2], 2 * Tr::kSide);
    bulk_load(s.M[turn % 2], static_cast<const char*>(p.work.M) + item(i) * (2 * Tr::kSide),
              2 * Tr::kSide, &s.full[turn % 2]);
  };
  const auto stash = [&](int i) {
    float* const states = kBack ? p.work.before : p.work.after;
    return reinterpret_cast<float4*>(states) + item(i) * (Tr::V * Tr::K / 4) +
           slice * (16 * Tr::K) + thread;
  };
  State<Tr> S, E;
  // Matrices so far; whether the matrix and E of this piece were asked for ahead. in, out: what the
  // states at the piece's two ends follow from; at first 0, as the sequence begins there.
  int turn = 0, in = 0;
  bool is_asked = false;
  for (int i = 0; i + 1 < pieces; ++i) {
    __syncthreads();  // starts and the matrix before have been read
    if (i % kBorders == 0) {
      for (int b = thread / 32; b < kBorders && i + b + 1 < pieces; b += kWarpgroupWarps) {
        const int border = min((piece(i + b) + (kBack ? 0 : 1)) * p.segment, chunks);
        const int ahead = chunks_ahead(p, first_tile, head, border, chunks, kBack);
        if (thread % 32 == 0) s.starts[b] = ahead;
      }
      __syncthreads();  // starts
    }
    const int out = s.starts[i % kBorders];
    if (out < 0 && in >= 0) {
      load_stash<Tr>(stash(i), S);
    } else if (out < 0) {
      const bool has_next =
          (i + 1) % kBorders != 0 && i + 2 < pieces && s.starts[(i + 1) % kBorders] < 0;
      if (thread == 0) {
        if (!is_asked) load(i, turn);
        if (has_next) load(i + 1, turn + 1);
      }
      if (!is_asked) load_stash<Tr>(stash(i), E);
      barrier_wait(&s.full[turn % 2], turn / 2 & 1);
      State<Tr> next;
      apply_matrix<Tr, kBack>(s.M[turn % 2], S, E, [&] {
        if (has_next) load_stash<Tr>(stash(i + 1), next);
      });
      store_stash<Tr>(stash(i), E);
#pragma unroll
      for (int n = 0; n < Tr::K / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) S[n][e] = E[n][e], E[n][e] = next[n][e];
      }
      is_asked = has_next, ++turn;
    }
    in = out;
  }
}

template <class Tr>
__global__ void __launch_bounds__(kWarpgroup, 1) merge_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) unsigned char smem[];
  auto& s = *reinterpret_cast<MergeShared<Tr>*>(smem);
  if (thread_index() == 0) {
    barrier_init(&s.full[0], 1), barrier_init(&s.full[1], 1);
    fence_barrier_init();
  }
  begin_launch();
  if (is_wrong(p.tokens)) return;
  const unsigned job = blockIdx.x / (2 * Tr::V / 64), part = blockIdx.x % (2 * Tr::V / 64);
  const int64_t n = job / p.HV, head = job % p.HV;
  const int slice = static_cast<int>(part / 2);
  part % 2 == 0 ? merge_sequence<Tr, true>(p, n, head, slice, s)
                : merge_sequence<Tr, false>(p, n, head, slice, s);
}

}  // namespace deltic::gpu::gradient
