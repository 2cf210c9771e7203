// The planning kernel: pieces of sequences, who does what, gates per head. One for all instances of
// the forward.
#include <algorithm>

#include "cuda/device.h"
#include "cuda/ptx/launch_order.cuh"
#include "cuda/sm90/forward/gates.cuh"
#include "cuda/sm90/forward/instantiate.h"
#include "cuda/sm90/forward/stage_attend.cuh"
#include "cuda/tile/search.cuh"
#include "cuda/tile/sequence.cuh"

namespace deltic::gpu::forward {
namespace {

using schedule::chunks_of, schedule::Costs;

// Sequence i as one piece, cut to the tensors. Offsets that decrease are told to the caller.
__device__ inline Piece sequence_at(const Params& p, int i, bool& is_ordered) {
  Piece s{};
  if (p.is_packed) {
    const int64_t t = p.num_tokens, begin = load_index(p.cu_seqlens, i);
    const int64_t end = load_index(p.cu_seqlens, i + 1);
    is_ordered = is_ordered && begin <= end;
    s.token = int(min(max(begin, int64_t(0)), t));
    s.length = int(min(max(end, int64_t(s.token)), t)) - s.token;
  } else {
    s.batch = i, s.length = p.num_tokens;
  }
  if (p.spans) s.length = int(min(int64_t(s.length), p.spans[i].length));
  const Slots<int> slots = find_slots<int>(p.slots, i);
  s.read_slot = slots.from, s.write_slot = slots.to;
  if (is_skipped(p.slots, i, s.length, slots)) s.zero = s.length, s.length = 0;
  s.is_last = true, s.end_stash = -1;
  return s;
}
// Log2 decay and beta of every token and head, so that a chunk's lie next to each other. A warp has
// 32 tokens and kRowHeads heads.
constexpr int kRowHeads = 8, kPlanThreads = kRoleThreads;
__device__ inline void make_head_rows(const Params& p, int cta, int ctas) {
  const int hv = p.num_value_heads, lane = threadIdx.x % 32, warps = blockDim.x / 32;
  const int64_t tokens = int64_t(p.num_batches) * p.num_tokens;
  const int groups = (hv + kRowHeads - 1) / kRowHeads;
  for (int64_t i = cta * warps + threadIdx.x / 32; i < (tokens + 31) / 32 * groups;
       i += int64_t(ctas) * warps) {
    const int64_t at = i / groups * 32 + lane;
    const int first = int(i % groups) * kRowHeads;
    if (at >= tokens) continue;
    const int64_t batch = at / p.num_tokens, token = at - batch * p.num_tokens;
    uint32_t g[kRowHeads], beta[kRowHeads];
#pragma unroll
    for (int j = 0; j < kRowHeads; j++) {
      const int head = min(first + j, hv - 1);
      auto load = [&](const Rows& v) {
        return v.data ? load_bits(v.data, v.dtype, batch * v.sb + token * v.st + head * v.sh) : 0;
      };
      g[j] = load(p.g_head), beta[j] = load(p.beta);
    }
#pragma unroll
    for (int j = 0; j < kRowHeads; j++)
      if (first + j < hv)
        p.head_rows[(first + j) * tokens + at] = make_float2(
            p.g_head.data ? head_decay(p, number_of(g[j], p.g_head.dtype), first + j) : 0.f,
            p.beta.data ? beta_value(p, number_of(beta[j], p.beta.dtype)) : 1.f);
  }
}
__device__ inline Piece nothing() {
  Piece s{};
  s.read_slot = s.write_slot = s.end_stash = -1;
  s.is_last = true;
  return s;
}

// A checkpoint: who keeps the state that it starts from, and the tokens from there on.
struct CheckpointPlace {
  int* holder;  // null: unused
  int slot, batch, token, tokens_left;
};
// After the pieces are known. Lists that make no sense give unused checkpoints.
__device__ inline CheckpointPlace checkpoint_at(const Params& p, int m) {
  CheckpointPlace at{};
  at.slot = int(named_slot(load_index(p.ckpt.slots, m), p.slots.null_slot, p.ckpt.num_slots));
  const auto [lo, hi] = list_of_entry(p.ckpt.cu, p.num_sequences, m);
  if (at.slot < 0 || hi == 0 || load_index(p.ckpt.cu, lo) > m || load_index(p.ckpt.cu, hi) <= m)
    return at;
  const int first = p.first_piece[lo], last = p.first_piece[lo + 1] - 1;
  const Piece begin = p.pieces[first], end = p.pieces[last];
  const int64_t length = end.token + end.length - begin.token;
  const int64_t count = load_index(p.ckpt.tokens, m);
  const bool is_left_out = is_skipped(p.slots, lo, 0, find_slots<int>(p.slots, lo));
  if (is_left_out || count < 0 || count > length) return at;
  at.batch = begin.batch;
  at.tokens_left = count < length ? int(count) % kChunk : 0;
  at.token = begin.token + int(count) - at.tokens_left;
  at.holder = count < length ? p.ckpt.chunk_stash + p.chunk_prefix[first] + int(count) / kChunk
                             : &p.pieces[last].end_stash;
  return at;
}
// All threads of the planning CTA: which states are kept, in the place of the last checkpoint that
// starts from them.
__device__ inline void plan_checkpoints(const Params& p, int num_chunks) {
  const int tid = threadIdx.x;
  for (int i = tid; i < num_chunks; i += kPlanThreads) p.ckpt.chunk_stash[i] = -1;
  __syncthreads();  // pieces are there, places empty
  for (int m = tid; m < p.ckpt.count; m += kPlanThreads)
    if (int* const holder = checkpoint_at(p, m).holder) atomicMax(holder, m);
  __syncthreads();  // every holder is known
  for (int m = tid; m < p.ckpt.count; m += kPlanThreads) {
    const CheckpointPlace at = checkpoint_at(p, m);
    p.ckpt.from[m] = at.holder ? *at.holder : -1;
    p.ckpt.to[m] = at.holder ? at.slot : -1;
    p.ckpt.spans[m] = {at.batch, at.token, at.tokens_left};
  }
}

// A thread has so many sequences in a row; where there are few, a warp has one, and each of its
// lanes pieces in a row. In either case threads in their order have pieces in theirs.
__device__ inline int lanes_of_sequence(int n) { return n <= kPlanThreads / 32 ? 32 : 1; }
// The thread's pieces, of n sequences; use(sequence, which of its pieces, piece, chunks of it that
// are to be done). Offsets that decrease anywhere make all sequences empty: those that overlap
// could be more chunks and pieces than there is room for. Numbers by reference: copies are computed
// from at other times. forgotten: bits of windows, null where transfers are whole.
template <class Use>
__device__ inline void for_pieces(const Params& params, const int& n, const int& cut,
                                  const int& per, const bool& is_wrong, const uint32_t* forgotten,
                                  bool& is_ordered, Use use) {
  const int lanes = lanes_of_sequence(n), tid = threadIdx.x / lanes, lane = threadIdx.x % lanes;
  for (int i = tid * per; i < min(n, (tid + 1) * per); i++) {
    Piece whole = is_wrong ? nothing() : sequence_at(params, i, is_ordered);
    if (!is_ordered) whole.length = whole.zero = 0;
    const int chunks = chunks_of(whole.length);
    const int count = schedule::num_pieces(chunks, cut);
    const int in_lane = (count + lanes - 1) / lanes;
    for (int j = lane * in_lane; j < min(count, (lane + 1) * in_lane); j++) {
      Piece piece = schedule::piece_at(whole, cut, count, j);
      if (forgotten && !piece.is_last) {
        const int w = schedule::window_of(piece.batch * params.num_tokens + piece.token, cut);
        if (forgotten[w / 32] >> (w % 32) & 1) piece = schedule::shortened(piece);
      }
      const bool has_work = !params.is_transfer || !piece.is_last;
      use(i, j, piece, has_work ? chunks_of(piece.length) : 0);
    }
  }
}
// All threads: a bit for each window at whose border all heads have forgotten the state.
__device__ inline void load_forgotten(const Params& params, uint32_t (&bits)[kMaxWindows / 32]) {
  const int stride = forgotten_stride(params.num_value_heads);
  const int windows =
      schedule::num_windows(params.num_batches * params.num_tokens, params.split_chunks);
  for (int i = threadIdx.x; i < kMaxWindows / 32; i += kPlanThreads) bits[i] = 0;
  __syncthreads();  // all are zero
  for (int w = threadIdx.x; w < windows; w += kPlanThreads) {
    const auto* heads = reinterpret_cast<const uint32_t*>(params.forgotten + int64_t(w) * stride);
    uint32_t all = 0x01010101u;
#pragma unroll 8
    for (int i = 0; i < stride / 4; i++) all &= heads[i];
    if (all == 0x01010101u) atomicOr(&bits[w / 32], 1u << (w % 32));
  }
  __syncthreads();  // every bit is there
}
// All threads: inclusive sums of two tables, by warps and then of the warps before.
__device__ inline void scan(int (&x)[kPlanThreads], int (&y)[kPlanThreads]) {
  constexpr int kWarps = kPlanThreads / 32;
  __shared__ int s_sums[2][kWarps];
  const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
  int sums[2] = {x[tid], y[tid]};
#pragma unroll
  for (int d = 1; d < 32; d *= 2)
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int before = __shfl_up_sync(~0u, sums[i], d);
      if (lane >= d) sums[i] += before;
    }
  if (lane == 31) s_sums[0][warp] = sums[0], s_sums[1][warp] = sums[1];
  __syncthreads();  // every warp's sum is there
#pragma unroll
  for (int i = 0; i < 2; i++)
    sums[i] += __reduce_add_sync(~0u, lane < warp && lane < kWarps ? s_sums[i][lane] : 0);
  x[tid] = sums[0], y[tid] = sums[1];
  __syncthreads();
}
// The first token that belongs to no sequence.
__device__ inline int padding_of(const Params& params, int n, bool is_wrong) {
  int padding = params.num_tokens;
  if (params.is_packed && !is_wrong) {
    const int64_t end = n > 0 ? load_index(params.cu_seqlens, n) : 0;
    padding = int(min(max(end, int64_t(0)), int64_t(params.num_tokens)));
  }
  return padding;
}

// The warp that zeroes the attendance: CTAs of the kernel sign in before this one is complete, so
// it has to see to it that they find zeros, while the first warp writes the plan.
constexpr int kDoorWarp = kPlanThreads / 32 - 1;
__device__ inline void zero_flags(const Params& params, int ctas) {
  const int tid = threadIdx.x;
  for (int i = tid; i < attendance_place(ctas) / 4; i += kPlanThreads)
    reinterpret_cast<uint4*>(params.flags)[i] = uint4{0, 0, 0, 0};
  if (tid / 32 == kDoorWarp)
    for (int i = tid % 32; i < ctas; i += 32) params.flags[attendance_place(ctas) + i] = 0;
}
// All threads. The kernel may start: its CTAs get SMs in an order that keeps those of a GPC
// together when all SMs are free, so not before this CTA has nothing left to do.
__device__ inline void open_door() {
  if (threadIdx.x / 32 == kDoorWarp) __threadfence();
  __syncthreads();  // the attendance is seen to be 0, the plan is written
  grid_release();
}

// All threads, after the pieces are written: the jobs of fused CTAs, none of which is drawn yet.
// keys: of no use to anybody behind a barrier.
__device__ inline void lay_tickets(const Params& params, const Plan& plan, int ctas,
                                   int (&keys)[kPlanThreads]) {
  static_assert(schedule::kSortedPieces <= kPlanThreads);
  const int tid = threadIdx.x, n = plan.num_pieces;
  schedule::Tickets& to = tickets_of(params, ctas);
  const bool is_sorted = schedule::are_sorted(n, plan.longest, plan.shortest, plan.has_empty);
  int pieces = n;
  if (is_sorted) {
    auto* const of = reinterpret_cast<uint32_t*>(keys);
    const int chunks = tid < n ? chunks_of(params.pieces[tid].length) : 0;
    __syncthreads();  // everybody has read what was there
    if (tid < n) of[tid] = schedule::sort_key(chunks, tid);
    pieces = __syncthreads_count(chunks > 0);  // every key is there
    if (chunks > 0) to.piece[schedule::place_among(of, n, tid)] = tid;
  }
  if (tid == 0)
    to.next = schedule::first_ticket(is_sorted, ctas), to.pieces = pieces, to.is_sorted = is_sorted;
}

// First CTA: pieces, chunk counts, roles or tickets, and flags back to zero. The others: gates per
// head.
__global__ void make_plan(const __grid_constant__ Params params, Costs costs, bool is_fused,
                          int ctas) {
  __shared__ int s_pieces[kPlanThreads], s_chunks[kPlanThreads], s_longest, s_shortest, s_short;
  __shared__ RoleSearch s_search;
  __shared__ uint32_t s_forgotten[kMaxWindows / 32];
  const int tid = threadIdx.x, n = params.num_sequences, cut = params.split_chunks;
  grid_wait();  // nobody reads the workspace any more
  if (blockIdx.x > 0) {
    make_head_rows(params, blockIdx.x - 1, gridDim.x - 1);
    grid_release();
    return;
  }
  zero_flags(params, ctas);
  if (tid == 0) s_longest = s_short = 0, s_shortest = 1 << 30;
  __syncthreads();
  bool is_ordered = true;
  // A call that the checks refuse: sequences without tokens or states, no padding.
  const bool is_wrong = params.record != nullptr && *params.record != ~0ull;
  const int per = (n * lanes_of_sequence(n) + kPlanThreads - 1) / kPlanThreads;
  const bool has_short = params.is_transfer && params.forgotten;
  if (has_short) load_forgotten(params, s_forgotten);
  const auto each_piece = [&](auto use) {
    for_pieces(params, n, cut, per, is_wrong, has_short ? s_forgotten : nullptr, is_ordered, use);
  };
  int pieces = 0, sum = 0, longest = 0, shortest = 1 << 30, num_short = 0;
  bool has_empty = false;
  auto count_pieces = [&] {
    pieces = sum = longest = 0, shortest = 1 << 30;
    each_piece([&](int, int, const Piece& piece, int chunks) {
      pieces++, sum += chunks, longest = max(longest, chunks);
      if (chunks > 0) shortest = min(shortest, chunks);
      has_empty |= piece.length == 0;
    });
  };
  count_pieces();
  is_ordered = __syncthreads_and(is_ordered);
  if (!is_ordered) count_pieces();
  s_pieces[tid] = pieces, s_chunks[tid] = sum;
  atomicMax(&s_longest, longest);
  atomicMin(&s_shortest, shortest);
  has_empty = __syncthreads_or(has_empty);
  scan(s_pieces, s_chunks);
  int at = s_pieces[tid] - pieces, before = s_chunks[tid] - sum;
  each_piece([&](int i, int j, const Piece& piece, int chunks) {
    if (j == 0) params.first_piece[i] = at;
    params.pieces[at] = piece, params.chunk_prefix[at] = before;
    at++, before += chunks;
    num_short += chunks > 0 && chunks < 2 * s_shortest;
  });
  atomicAdd(&s_short, num_short);
  __syncthreads();  // all numbers of the work are there
  const int hv = params.num_value_heads;
  Plan plan = {.total = s_chunks[kPlanThreads - 1] * hv,
               .num_pieces = s_pieces[kPlanThreads - 1],
               .has_empty = has_empty,
               .longest = s_longest,
               .shortest = s_shortest,
               .short_jobs = s_short * hv};
  const schedule::Work work = work_of(plan, num_states(params), num_rows(params), ctas);
  if (is_fused)
    lay_tickets(params, plan, ctas, s_pieces);
  else
    search_roles(costs, work, s_search);
  if (tid == 0) {
    params.first_piece[n] = plan.num_pieces;
    params.chunk_prefix[plan.num_pieces] = s_chunks[kPlanThreads - 1];
    plan.padding = padding_of(params, n, is_wrong);
    if (!is_fused) take_roles(plan, costs, work, s_search);
    *params.plan = plan;
  }
  if (params.ckpt.count > 0 && !params.is_transfer)
    plan_checkpoints(params, s_chunks[kPlanThreads - 1]);
  open_door();
}

}  // namespace

void launch_plan(const Params& params, GateKind gate, bool is_fused, int num_sms,
                 cudaStream_t stream) {
  unsigned row_ctas = 0;  // of a split forward the transfer has made them
  if (gate == GateKind::kHead && (params.is_transfer || params.split_chunks == 0)) {
    const int64_t items = (int64_t(params.num_batches) * params.num_tokens + 31) / 32 *
                          ((params.num_value_heads + kRowHeads - 1) / kRowHeads);
    const int64_t per_cta = kPlanThreads / 32;
    row_ctas = unsigned(std::min<int64_t>((items + per_cta - 1) / per_cta, num_sms));
  }
  check_cuda(launch_after(make_plan, dim3(1 + row_ctas), kPlanThreads, 0, stream, params,
                          schedule::costs_of(gate).shares, is_fused, num_sms),
             "forward: plan");
}

}  // namespace deltic::gpu::forward
