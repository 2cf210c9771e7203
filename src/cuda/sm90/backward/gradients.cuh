// The gradients of a chunk, all chunks at once: a CTA takes (chunk, q/k head) after (chunk, q/k
// head) and goes over the head's value heads, whose dq and dk it adds up.
#pragma once

#include "cuda/sm90/backward/stage_inputs.cuh"
#include "cuda/sm90/backward/stage_sums.cuh"

namespace deltic::gpu::gradient {

// The tile after this one, by one thread. Whether it gets its inputs ahead: if it has any, and this
// one works.
template <class Tr>
__device__ void find_next(const Params& p, GradientShared<Tr>& s) {
  if (s.has_next && s.is_last) {
    s.next_tile = find_tile(p.tokens, static_cast<unsigned>(s.next_item) / p.HV);
  }
  s.is_next_loaded = s.has_next && s.tile.length > 0 && s.next_tile.length > 0;
}

template <class Tr>
__device__ void store_dbeta(const Params& p, const GradientShared<Tr>& s, const TokenTile& tile) {
  const int t = thread_index();
  if (t >= tile.length || !p.dbeta.present) return;
  float sum = 0;
#pragma unroll
  for (int i = 0; i < Tr::V / 64; ++i) sum += s.dbeta_parts[i][t];
  store(p.dbeta.data, p.dbeta.dtype, offset(p.dbeta, tile.batch, tile.begin + t, s.head),
        beta_gradient(p.beta_form, s.rows_of(kRawBeta)[t], sum));
}

// Per channel: what pairs of tokens of different blocks give, level by level, and of a block's two
// halves.
template <class Tr>
__device__ void add_levels(GradientShared<Tr>& s, Fragment<Tr>& dk, Fragment<Tr>& dG) {
#pragma unroll 1
  for (int level = 0; level < 2; ++level) {
    const bool is_row = (thread_index() / 32 & (2 >> level)) != 0;  // of the warp's block
    LevelOperands<Tr> own;
    lay_level<Tr>(s, level, is_row, own);
    Part<Tr>().sync_quarter();  // operands of the pairs
    is_row ? add_level<Tr, true>(s, level, own, dk, dG)
           : add_level<Tr, false>(s, level, own, dk, dG);
    Part<Tr>().sync_quarter();  // they have been read
  }
  add_middle<Tr>(s, dk, dG);
}
// And pairs of eight neighbours, onto the sums of the warpgroup's channels.
template <class Tr>
__device__ void add_nearest(GradientShared<Tr>& s) {
  const Part<Tr> at;
  at.sync_quarter();                 // those sums
  constexpr int kPairs = Tr::K / 8;  // of channels
  if (const int i = thread_index() % 128; i < 8 * kPairs) {
    add_inside<Tr>(s, i / kPairs * 8, at.first_column() + i % kPairs * 2);
  }
}

// One value head of a chunk, which s says; phase: of its bulk copies. A barrier must follow.
template <class Tr>
__device__ void go_over_head(const Params& p, GradientShared<Tr>& s, uint32_t phase,
                             ChannelGates& gates) {
  const TokenTile& tile = s.tile;
  const bool has_form = Tr::kPerChannel && p.gate_form != DELTIC_GATE_LOG_DECAY;
  if (!s.is_loaded) {
    if (has_form) gates = ChannelGates(p, s.head, GatePlace<Tr>().channel);
    load_inputs<Tr>(p, s, tile, s.head, s.item, s.is_first, s.turn);
    copies_wait<0>();
    __syncthreads();  // inputs
  }
  barrier_wait(&s.full_inputs, phase);
  load_states<Tr>(p, s, s.item);
  Rest<Tr> rest = {};
  load_rest<Tr>(p, s, rest);
  const bool has_norms = s.is_first && p.l2norm;
  if (has_norms) normalize_rows<Tr>(s);
  if constexpr (Tr::kPerChannel) lay_gates<Tr>(p, s, tile, s.head, gates);
  gates = {};
  if (Tr::kPerChannel || has_norms) __syncthreads();  // rows with norms, G
  lay_pairs<Tr>(p, s);
  lay_dbeta<Tr>(p, s, rest);
  if (thread_index() >= 32 * (Tr::kWarps - 1)) {  // it has no block of pairs
    if (s.has_next) prefetch_tiles<Tr>(p, s.next_item);
    if (thread_index() % 32 == 0) find_next<Tr>(p, s);
  }
  barrier_wait(&s.full_states, phase);
  fence_async_proxy();  // what this thread wrote, or copied, of operands
  __syncthreads();      // dP, dM; the next tile
  Fragment<Tr> dq = {}, dk = {}, dG = {};
  begin_states<Tr>(s, dq, dk, dG);
  lay_last<Tr>(p, s, tile, s.head);
  end_states<Tr>(dq, dk, dG);
  apply_decays<Tr>(p, s, dq, dk, dG);
  __syncthreads();  // operands have been read
  if constexpr (Tr::kPerChannel) {
    if (s.is_next_loaded) prefetch_gates<Tr>(p, s);
    put_fragment<Tr>(s.x.sum.dq, dq);
    add_levels<Tr>(s, dk, dG);
    put_fragment<Tr>(s.x.sum.dG, dG);
  } else {
    GroupSums<Tr> sums;
    if (!s.is_first) load_sums<Tr>(p, sums);
    add_pairs<Tr>(s, dq, dk);
    if (!s.is_first) add_sums<Tr>(sums, dq, dk);
    s.is_last ? put_fragment<Tr>(s.x.sum.dq, dq) : store_sums<Tr>(p, dq, dk);
  }
  if (Tr::kPerChannel || s.is_last) put_fragment<Tr>(s.x.sum.dk, dk);
  if constexpr (Tr::kPerChannel) add_nearest<Tr>(s);
  // The next head's parameters of gates, and what is read again, before it is waited for. It stays
  // in registers: the place that raw gates had is taken. Zeros before it is read, as elsewhere:
  // what has no value on some path takes its registers all the way around.
  float g[kRun][2] = {};
  if (has_form) {
    const GatePlace<Tr> at;
    if (s.is_next_loaded) gates = ChannelGates(p, s.next_head, at.channel);
    load_gates(p, offset(p.g, tile.batch, tile.begin + at.first, s.head) + at.channel,
               at.is_there() ? tile.length - at.first : 0, g);
  }
  if (Tr::kPerChannel || s.is_last) {
    RawRows<Tr> raw = {};
    if (p.l2norm && s.is_last) raw.load(p, tile, key_head_of(p, s.head));
    __syncthreads();  // sums with all pairs
    store_rows<Tr>(p, s, tile, key_head_of(p, s.head), !Tr::kPerChannel || s.is_first, s.is_last,
                   raw);
    __syncthreads();  // rows have been read
  }
  if (s.is_next_loaded) {
    load_inputs<Tr>(p, s, s.next_tile, s.next_head, s.next_item, s.is_last, s.turn ^ 1);
  }
  if constexpr (Tr::kPerChannel) {
    store_channel_gates<Tr>(p, s, tile, s.head, s.item, g);
  } else {
    store_head_gates<Tr>(p, s, tile, s.head, s.item);
  }
  store_dbeta<Tr>(p, s, tile);
}

template <class Tr>
__global__ void __launch_bounds__(Tr::kThreads, 1)
    gradients_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) unsigned char smem[];
  auto& s = *reinterpret_cast<GradientShared<Tr>*>(smem);
  begin_launch();
  if (is_wrong(p.tokens)) return;
  const auto num_items = static_cast<unsigned>(p.num_tiles * p.H);
  uint32_t phase = 0;
  ChannelGates gates;  // of the head that comes, where its inputs do
  if (thread_index() == 0) {
    barrier_init(&s.full_inputs, 1), barrier_init(&s.full_states, 1), fence_barrier_init();
    s.next_tile = find_tile(p.tokens, blockIdx.x / p.H), s.is_next_loaded = false;
    s.turn = 0;
  }
  if constexpr (!Tr::kPerChannel) {  // blocks above the diagonals stay so
    auto* to = reinterpret_cast<uint4*>(s.dP);
    static_assert(sizeof(s.dP) + sizeof(s.dM) == 2 * Tr::kThreads * 16);
    to[thread_index()] = to[Tr::kThreads + thread_index()] = {0, 0, 0, 0};
  }
  for (unsigned index = blockIdx.x; index < num_items; index += gridDim.x) {
    for (unsigned i = 0; i < p.group; ++i) {
      if (thread_index() == 0) {
        const auto head_of = [&](unsigned n) { return n % p.H * p.group; };
        s.tile = s.next_tile, s.is_loaded = s.is_next_loaded, s.turn ^= 1;
        s.head = head_of(index) + i, s.item = int64_t{index / p.H} * p.HV + s.head;
        s.is_first = i == 0, s.is_last = i + 1 == p.group;
        const unsigned after = index + gridDim.x;
        s.has_next = !s.is_last || after < num_items;
        s.next_head = s.is_last ? head_of(after) : s.head + 1;
        s.next_item = s.is_last ? int64_t{after / p.H} * p.HV + s.next_head : s.item + 1;
      }
      copies_wait<0>();
      __syncthreads();  // where the CTA works; inputs that were under way
      if (s.tile.length > 0) {
        go_over_head<Tr>(p, s, phase, gates);
        phase ^= 1;
      } else if (thread_index() == 0) {
        find_next<Tr>(p, s);
      }
      __syncthreads();  // everything has been read
    }
  }
}

}  // namespace deltic::gpu::gradient
