// The kernel of both chains: CTAs of the chain backward, a job each, then those of the one forward,
// which takes less time, so that they may be fewer than jobs (schedule/shares.cuh).
#pragma once

#include "cuda/ptx/flags.cuh"
#include "cuda/schedule/shares.cuh"
#include "cuda/sm90/backward/chain.cuh"

namespace deltic::gpu::gradient {

template <class Back, class Forward>
inline constexpr int kChainBytes = static_cast<int>(
    sizeof(ChainShared<Back, ChainStage<Back>>) > sizeof(ChainShared<Forward, StatesStage<Forward>>)
        ? sizeof(ChainShared<Back, ChainStage<Back>>)
        : sizeof(ChainShared<Forward, StatesStage<Forward>>));

// What leads up to a piece; a barrier of the CTA inside.
template <class Tr>
__device__ void look_ahead(const Params& p, ChainItem<Tr>& at, bool is_back) {
  if (thread_index() < 32) {
    const int ahead = chunks_ahead(p, at.first_tile, at.head, is_back ? at.end : at.begin,
                                   at.num_chunks(), is_back);
    if (thread_index() == 0) at.ahead = ahead;
  }
  __syncthreads();  // what leads up to the piece
}

template <class Tr>
__device__ void chain_back(const Params& p, const Maps& maps, ChainShared<Tr, ChainStage<Tr>>& s) {
  constexpr unsigned kSlices = Tr::V / Tr::kColumns;
  ChainItem<Tr>& at = s.head.at;
  begin_chain<Tr>(p, blockIdx.x / kSlices, blockIdx.x % kSlices, s.head);
  if (!at.is_there()) return;
  if (p.segment > 0) look_ahead<Tr>(p, at, true);
  if (thread_index() < 32 * Tr::kWarps) {
    more_registers<240>();
    State<Tr> S;
    at.ahead < 0 ? load_stash<Tr>(stash_of<Tr>(at, p.work.before, at.piece_item(p, 1)), S)
                 : begin_back<Tr>(p, at, S);
    go_back<Tr, false>(p, maps.dv, s, S);
    if (at.begin == 0) store_given<Tr>(at, p.d_initial, S);
    bulk_store_wait();
  } else {
    fewer_registers<24>();
    if (thread_index() < 32 * Tr::kWarps + 32) load_back<Tr>(p, maps, s);
  }
}

// A job that two CTAs share: what is written beside its state. Whoever comes second goes on with
// the last part, and nobody waits: the one that has it may find that the first part is not there,
// and leaves it to the other one.
enum Handed : uint32_t { kNobodyCame, kIsThere, kIsLeft };

// By those that multiply and the warp that loads, each in code of its own: all jobs of a CTA of the
// chain forward. f(between): the chunks [at.begin, at.end), and where the state is kept between the
// parts of a job that is cut; null: it is not.
template <class Tr, class F>
__device__ void for_jobs(const Params& p, unsigned index, const schedule::Share& share,
                         ChainHead<Tr>& s, F&& f) {
  constexpr unsigned kSlices = Tr::V / Tr::kColumns;
  constexpr int kAll = 32 * Tr::kWarps + 32, kBarrier = 1 + Tr::kGroups;
  const bool is_one = thread_index() == 0;
#pragma unroll 1
  for (unsigned job = share.first; job < share.end; ++job) {
    if (job > share.first) {
      named_sync(kBarrier, kAll);  // the job before is done
      if (is_one) s.at = ChainItem<Tr>(p, job / kSlices, job % kSlices);
      named_sync(kBarrier, kAll);  // the place
    }
    // Its last part is this CTA's, the first one the next CTA's; else the last is the one before's.
    const bool is_rest = job + 1 == share.end && share.after > 0;
    const unsigned later = is_rest ? share.after : job == share.first ? share.before : 0;
    const int chunks = s.at.num_chunks();
    const int cut = later > 0 ? schedule::first_chunks(chunks, later, p.forward_ctas) : chunks;
    if (cut == chunks) {
      if (!is_rest) f(nullptr);
      continue;
    }
    const unsigned place = is_rest ? index + 1 : index;
#pragma unroll 1
    for (int part = is_rest ? 1 : 0; part < 2; ++part) {
      named_sync(kBarrier, kAll);  // the place has been read, and the first part is done
      if (is_one && part == 0) s.at.end = cut;
      if (is_one && part == 1) {
        s.at.begin = cut, s.at.end = chunks;
        s.has_rest = is_rest ? exchange(p.work.handed + place, kIsLeft) == kIsThere
                             : exchange(p.work.handed + place, kIsThere) == kIsLeft;
      }
      named_sync(kBarrier, kAll);  // the part, and whether it is this CTA's
      if (part == 1 && !s.has_rest) break;
      f(p.work.between + place * (Tr::V * Tr::K));
    }
  }
}

template <class Tr>
__device__ void chains_forward(const Params& p, const Maps& maps, unsigned index,
                               ChainShared<Tr, StatesStage<Tr>>& s) {
  constexpr unsigned kSlices = Tr::V / Tr::kColumns;
  ChainItem<Tr>& at = s.head.at;
  const schedule::Share share = schedule::share_of(
      static_cast<unsigned>(p.num_pieces) * p.HV * kSlices, p.forward_ctas, index);
  begin_chain<Tr>(p, share.first / kSlices, share.first % kSlices, s.head);
  if (!at.is_there()) return;  // segments have a CTA each
  if (p.segment > 0) look_ahead<Tr>(p, at, false);
  RingPlace<Tr, StatesStage<Tr>> place;
  if (thread_index() < 32 * Tr::kWarps) {
    more_registers<240>();
    for_jobs<Tr>(p, index, share, s.head, [&](float* between) {
      State<Tr> S;
      if (between != nullptr && at.begin > 0) {
        load_stash<Tr>(stash_of<Tr>(at, between, 0), S);
      } else {
        at.ahead < 0 ? load_stash<Tr>(stash_of<Tr>(at, p.work.after, at.piece_item(p, -1)), S)
                     : begin_forward<Tr>(p, at, S);
      }
      go_forward<Tr, false>(p, s, true, S, place);
      if (between != nullptr && at.begin == 0) store_stash<Tr>(stash_of<Tr>(at, between, 0), S);
      if (first_chunk(at) < at.end) place.release_last(s);
    });
    bulk_store_wait();
  } else {
    fewer_registers<24>();
    if (thread_index() < 32 * Tr::kWarps + 32) {
      for_jobs<Tr>(p, index, share, s.head,
                   [&](float*) { load_forward<Tr>(p, maps, true, s, place); });
    }
  }
}

// CTAs of the chain backward, which takes longer, come first.
template <class Back, class Forward>
__global__ void __launch_bounds__(Back::kThreads, 1)
    chains_kernel(const __grid_constant__ Params p, const __grid_constant__ Maps maps) {
  extern __shared__ __align__(1024) unsigned char smem[];
  static_assert(kChainBytes<Back, Forward> <= kCtaBytes && Back::kThreads == Forward::kThreads);
  begin_launch();
  if (is_wrong(p.tokens)) return;
  const unsigned back = gridDim.x - p.forward_ctas;
  if (blockIdx.x < back) {
    chain_back<Back>(p, maps, *reinterpret_cast<ChainShared<Back, ChainStage<Back>>*>(smem));
  } else {
    chains_forward<Forward>(p, maps, blockIdx.x - back,
                            *reinterpret_cast<ChainShared<Forward, StatesStage<Forward>>*>(smem));
  }
}

}  // namespace deltic::gpu::gradient
