// Roles and order of work. Pure functions of the chunk counts and the number of CTAs.
//
// Jobs (piece, value head) stand in a row of `total` chunks. Carrier i owns positions
// [i steps, (i + 1) steps) and needs one packet per step. A job across a border is carried by two
// CTAs one after the other (wrap-around rule): its first chunks at the start of carrier i + 1, its
// last at the end of carrier i, so the parts never overlap in time because no job is longer than
// `steps`; the fp32 state goes over through global memory, which changes no bit.
#pragma once
#include "cuda/ptx/async.cuh"
#include "cuda/sm90/forward/params.h"
#include "cuda/tile/gates.cuh"
#include "cuda/tile/sequence.cuh"

namespace deltic::gpu::forward {

struct Costs {  // microseconds of one SM per chunk; carry_half: of 64 value columns
  float carry, carry_half, prepare;
  float part = 0.f;  // from one job to the next
};
// For sharing out the CTAs of one launch: not what a packet costs alone, but what gave the best
// times in the rows of docs/benchmarks/h200.md (a ring of eight packets per carrier keeps fewer
// preparers busy when carriers are few).
__host__ __device__ inline Costs costs_of(GateKind gate) {
  return gate == GateKind::kChannel ? Costs{2.5f, 2.5f, 5.f, 4.f} : Costs{2.1f, 1.7f, 1.5f};
}
// As measured, for choosing segments; changes of jobs are counted apart there (kPartUs).
__host__ __device__ inline Costs measured_costs(GateKind gate) {
  return gate == GateKind::kChannel ? Costs{2.2f, 2.2f, 5.2f} : Costs{2.2f, 1.75f, 2.6f};
}

__host__ __device__ inline int steps_of(int total, int longest, int carriers) {
  const int even = (total + carriers - 1) / carriers;
  return even > longest ? even : longest;
}
struct Roles {
  int carriers, parts;  // as in Plan
};
// What is to be divided: chunks of all jobs, of the longest, states of a carrier (transfer: 2),
// rows of a state (num_rows), CTAs; chunks of the shortest job, jobs that are about as short.
struct Work {
  int total, longest, states, rows, ctas;
  int shortest = 1, short_jobs = 0;
  __host__ __device__ int group(int parts) const { return states * parts; }
  __host__ __device__ int most_parts() const { return rows > kWidth / 2 ? 2 : 1; }
  // One CTA at least prepares.
  __host__ __device__ int most_carriers(int parts) const { return (ctas - 1) / group(parts); }
};
__host__ __device__ inline float step_time(Costs c, const Work& w, Roles r) {
  return r.parts == w.most_parts() ? c.carry_half : c.carry;
}
__host__ __device__ inline float carry_time(Costs c, const Work& w, Roles r) {
  // A carrier whose jobs are the shortest changes them most often.
  const int steps = steps_of(w.total, w.longest, r.carriers), many = steps / w.shortest;
  return step_time(c, w, r) * float(steps) +
         c.part * float(many < w.short_jobs ? many : w.short_jobs);
}
__host__ __device__ inline float prepare_time(Costs c, const Work& w, Roles r) {
  return c.prepare * float(w.total) / float(w.ctas - w.group(r.parts) * r.carriers);
}
// Time of a split of the CTAs, for choosing: the slower of the two roles.
__host__ __device__ inline float split_time(Costs c, const Work& w, Roles r) {
  if (r.carriers < 1 || r.carriers > w.most_carriers(r.parts) || r.parts > w.most_parts())
    return INFINITY;
  const float carry = carry_time(c, w, r), prepare = prepare_time(c, w, r);
  return carry > prepare ? carry : prepare;
}
// Fewest carriers among the best splits, whole states first.
__host__ __device__ inline Roles choose_roles(Costs c, const Work& w) {
  Roles best = {1, 1};
  float time = split_time(c, w, best);
  for (int parts = 1; parts <= w.most_parts(); parts++)
    for (int n = 1; n <= w.most_carriers(parts); n++) {
      const float t = split_time(c, w, {n, parts});
      if (t < time) time = t, best = {n, parts};
    }
  return best;
}

// a / b for 0 <= a / b < 2^22: a third of the instructions of an exact division.
__host__ __device__ inline int divide(int a, int b) {
#ifndef __CUDA_ARCH__
  return a / b;
#else
  int q = int(float(a) * __frcp_rn(float(b)));
  const int r = a - q * b;
  if (r < 0) q--;
  if (r >= b) q++;
  return q;
#endif
}

// table: of chunks before each piece, in shared or global memory.
__host__ __device__ inline Place locate(const Plan& plan, const int* table, int jobs_per_piece,
                                        int position) {
  const int q = divide(position, jobs_per_piece);
  int lo = 0, hi = plan.num_pieces;  // prefix[lo] <= q < prefix[hi]
  while (hi - lo > 1) {
    const int mid = (lo + hi) / 2;
    if (table[mid] <= q)
      lo = mid;
    else
      hi = mid;
  }
  Place p;
  p.piece = lo;
  const int first = table[lo], rel = position - jobs_per_piece * first;
  p.count = table[lo + 1] - first, p.first_chunk = first;
  const int job = divide(rel, p.count), off = rel - job * p.count;
  p.head = job;
  const int start = position - off, border = (divide(start, plan.steps) + 1) * plan.steps;
  const int here = min(p.count, border - start), later = p.count - here;
  if (off < here)
    p.begin = later, p.end = p.count, p.chunk = later + off;
  else
    p.begin = 0, p.end = later, p.chunk = off - here;
  return p;
}

__device__ inline Place place_of(const Params& params, const Plan& plan, int position) {
  return locate(plan, params.chunk_prefix, opaque(params.num_value_heads), position);
}

// Packets are prepared step by step, all carriers of a step in turn; the last carrier may have
// fewer steps than the others.
struct StepOf {
  int step, carrier;
};
__host__ __device__ inline StepOf item_at(const Plan& plan, int index) {
  const int full = divide(plan.total, plan.steps), more = plan.total - full * plan.steps;
  const int wide =
      more * (full + 1);  // packets of the steps in which the last carrier is there too
  const bool is_wide = index < wide;
  const int i = is_wide ? index : index - wide, n = is_wide ? full + 1 : full, step = divide(i, n);
  return {is_wide ? step : more + step, i - step * n};
}

// Of `preparers`, each takes every so many-th packet in this order.
__host__ __device__ inline int num_items_of(int total, int preparer, int preparers) {
  return (total - preparer + preparers - 1) / preparers;
}
__host__ __device__ inline int num_positions(const Plan& plan, int carrier) {
  const int left = plan.total - carrier * plan.steps;
  return left < 0 ? 0 : left < plan.steps ? left : plan.steps;
}

__device__ inline int64_t load_index(const IndexList& list, int64_t i) {
  return list.is64 ? __ldg(static_cast<const int64_t*>(list.data) + i * list.stride)
                   : __ldg(static_cast<const int*>(list.data) + i * list.stride);
}
__device__ inline int slot_of(const IndexList& list, int i, int slots) {
  if (!list.data) return i;
  const int64_t slot = load_index(list, i);
  return slot >= 0 && slot < slots ? int(slot) : -1;
}
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
  s.read_slot = p.state_in.data ? slot_of(p.read_index, i, p.num_read_slots) : -1;
  s.write_slot = p.state_out.data ? slot_of(p.write_index, i, p.num_write_slots) : -1;
  if (p.is_pool && s.read_slot < 0 && s.write_slot < 0) s.zero = s.length, s.length = 0;
  s.is_last = true, s.end_stash = -1;
  return s;
}
__device__ inline float beta_value(const Params& p, float x) {
  return p.has_sigmoid ? p.beta_scale * rcp_approx(1.f + exp2_approx(-x * kLog2e)) : x;
}
// log2 of a decay per head.
__device__ inline float head_decay(const Params& p, float x, int head) {
  const float rate = p.a_log.data ? gate_rate(load_number(p.a_log.data, p.a_log.type, head)) : 1.f;
  if (p.dt_bias.data) x += load_number(p.dt_bias.data, p.dt_bias.type, head);
  if (p.form == GateForm::kBounded) {
    x = p.lower_bound * kLog2e * rcp_approx(1.f + exp2_approx(-rate * kLog2e * x));
  } else {
    x *= kLog2e;
    if (p.form == GateForm::kSoftplus)
      x = -rate * (fmaxf(x, 0.f) + log2_approx(1.f + exp2_approx(-fabsf(x))));
  }
  return x < -151.f ? -151.f : x;  // 2^-151 is 0; the sums keep their precision; NaN stays
}
// Log2 decay and beta of every token and head, so that a chunk's lie next to each other. A warp has
// 32 tokens and kRowHeads heads.
constexpr int kRowHeads = 8;
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
      auto load = [&](const Values& v) {
        return v.data ? load_bits(v.data, v.type, batch * v.sb + token * v.st + head * v.sh) : 0;
      };
      g[j] = load(p.g_head), beta[j] = load(p.beta);
    }
#pragma unroll
    for (int j = 0; j < kRowHeads; j++)
      if (first + j < hv)
        p.head_rows[(first + j) * tokens + at] = make_float2(
            p.g_head.data ? head_decay(p, number_of(g[j], p.g_head.type), first + j) : 0.f,
            p.beta.data ? beta_value(p, number_of(beta[j], p.beta.type)) : 1.f);
  }
}
__device__ inline Piece nothing() {
  Piece s{};
  s.read_slot = s.write_slot = s.end_stash = -1;
  s.is_last = true;
  return s;
}
__device__ inline int chunks_of(int tokens) { return (tokens + kChunk - 1) / kChunk; }

// A checkpoint: who keeps the state that it starts from, and the tokens from there on.
struct CheckpointPlace {
  int* holder;  // null: unused
  int slot, batch, token, rest;
};
// After the pieces are known. Lists that make no sense give unused checkpoints.
__device__ inline CheckpointPlace checkpoint_at(const Params& p, int m) {
  CheckpointPlace at{};
  at.slot = slot_of(p.ckpt.slots, m, p.ckpt.num_slots);
  int lo = 0, hi = p.num_sequences;  // cu[lo] <= m < cu[hi]
  while (hi - lo > 1) {
    const int mid = (lo + hi) / 2;
    if (load_index(p.ckpt.cu, mid) <= m)
      lo = mid;
    else
      hi = mid;
  }
  if (at.slot < 0 || hi == 0 || load_index(p.ckpt.cu, lo) > m || load_index(p.ckpt.cu, hi) <= m)
    return at;
  const int first = p.first_piece[lo], last = p.first_piece[lo + 1] - 1;
  const Piece begin = p.pieces[first], end = p.pieces[last];
  const int64_t length = end.token + end.length - begin.token;
  const int64_t count = load_index(p.ckpt.tokens, m);
  const bool is_skipped = p.is_pool && begin.read_slot < 0 && begin.write_slot < 0;
  if (is_skipped || count < 0 || count > length) return at;
  at.batch = begin.batch;
  at.rest = count < length ? int(count) % kChunk : 0;
  at.token = begin.token + int(count) - at.rest;
  at.holder = count < length ? p.ckpt.chunk_stash + p.chunk_prefix[first] + int(count) / kChunk
                             : &p.pieces[last].end_stash;
  return at;
}
// All threads of the planning CTA: which states are kept, in the place of the last checkpoint that
// starts from them.
template <int kThreads>
__device__ inline void plan_checkpoints(const Params& p, int num_chunks) {
  const int tid = threadIdx.x;
  for (int i = tid; i < num_chunks; i += kThreads) p.ckpt.chunk_stash[i] = -1;
  __syncthreads();  // pieces are there, places empty
  for (int m = tid; m < p.ckpt.count; m += kThreads)
    if (int* const holder = checkpoint_at(p, m).holder) atomicMax(holder, m);
  __syncthreads();  // every holder is known
  for (int m = tid; m < p.ckpt.count; m += kThreads) {
    const CheckpointPlace at = checkpoint_at(p, m);
    p.ckpt.from[m] = at.holder ? *at.holder : -1;
    p.ckpt.to[m] = at.holder ? at.slot : -1;
    p.ckpt.spans[m] = {at.batch, at.token, at.rest};
  }
}

// First CTA: pieces, chunk counts, roles, and flags back to zero. The others: gates per head.
template <int kThreads>
__global__ void make_plan(const __grid_constant__ Params params, Costs costs, int ctas) {
  __shared__ int s_pieces[kThreads], s_chunks[kThreads], s_longest, s_shortest, s_short;
  __shared__ float s_time[kThreads / 32];
  __shared__ int s_best[kThreads / 32];
  const int tid = threadIdx.x, n = params.num_sequences, cut = params.segment_chunks;
  grid_wait();     // nobody reads the workspace any more
  grid_release();  // the launch of the kernel is under way meanwhile
  if (blockIdx.x > 0) {
    make_head_rows(params, blockIdx.x - 1, gridDim.x - 1);
    return;
  }
  for (int i = tid; i < flag_words(ctas) / 4; i += kThreads)
    reinterpret_cast<uint4*>(params.flags)[i] = uint4{0, 0, 0, 0};
  if (tid == 0) s_longest = s_short = 0, s_shortest = 1 << 30;
  __syncthreads();
  // Thread t has the sequences [t per, (t + 1) per); `use` gets every piece and its chunks. Offsets
  // that decrease anywhere make all sequences empty: those that overlap could be more chunks and
  // pieces than there is room for.
  bool is_ordered = true;
  // A call that the checks refuse: sequences without tokens or states, no padding.
  const bool is_wrong = params.record != nullptr && *params.record != ~0ull;
  const int per = (n + kThreads - 1) / kThreads;
  auto each_piece = [&](auto use) {
    for (int i = tid * per; i < min(n, (tid + 1) * per); i++) {
      Piece whole = is_wrong ? nothing() : sequence_at(params, i, is_ordered);
      if (!is_ordered) whole.length = whole.zero = 0;
      const int chunks = chunks_of(whole.length);
      const int count = cut > 0 && chunks > 0 ? (chunks + cut - 1) / cut : 1;
      for (int j = 0; j < count; j++) {
        Piece piece = whole;
        if (count > 1) {
          piece.token += j * cut * kChunk;
          piece.length = min(whole.length - j * cut * kChunk, cut * kChunk);
          piece.first_chunk = j * cut, piece.is_last = j + 1 == count;
        }
        const bool has_work = !params.is_transfer || !piece.is_last;
        use(i, j, piece, has_work ? chunks_of(piece.length) : 0);
      }
    }
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
  for (int d = 1; d < kThreads; d *= 2) {  // inclusive scans
    const int x = tid >= d ? s_pieces[tid - d] : 0, y = tid >= d ? s_chunks[tid - d] : 0;
    __syncthreads();
    s_pieces[tid] += x, s_chunks[tid] += y;
    __syncthreads();
  }
  int at = s_pieces[tid] - pieces, before = s_chunks[tid] - sum;
  each_piece([&](int i, int j, const Piece& piece, int chunks) {
    if (j == 0) params.first_piece[i] = at;
    params.pieces[at] = piece, params.chunk_prefix[at] = before;
    at++, before += chunks;
    num_short += chunks > 0 && chunks < 2 * s_shortest;
  });
  atomicAdd(&s_short, num_short);
  __syncthreads();
  const int hv = params.num_value_heads;
  const Work work = {s_chunks[kThreads - 1] * hv,
                     s_longest,
                     params.is_transfer ? 2 : 1,
                     num_rows(params),
                     ctas,
                     s_shortest,
                     s_short * hv};
  // As choose_roles, a thread for each; the first of the best.
  const auto roles_of = [](int i) { return Roles{i % (kThreads / 2), 1 + i / (kThreads / 2)}; };
  float time = split_time(costs, work, roles_of(tid));
  int best = tid;
  const auto reduce = [&] {
    for (int d = 16; d > 0; d /= 2) {
      const float t = __shfl_xor_sync(~0u, time, d);
      const int i = __shfl_xor_sync(~0u, best, d);
      if (t < time || (t == time && i < best)) time = t, best = i;
    }
  };
  reduce();
  if (tid % 32 == 0) s_time[tid / 32] = time, s_best[tid / 32] = best;
  __syncthreads();
  if (tid < 32) {
    time = tid < kThreads / 32 ? s_time[tid] : INFINITY;
    best = tid < kThreads / 32 ? s_best[tid] : kThreads;
    reduce();
  }
  if (tid == 0) {
    const int count = s_pieces[kThreads - 1];
    params.first_piece[n] = count;
    params.chunk_prefix[count] = s_chunks[kThreads - 1];
    const Roles roles = roles_of(max(best, 1));  // 0: no split at all would do
    int padding = params.num_tokens;
    if (params.is_packed && !is_wrong) {
      const int64_t end = n > 0 ? load_index(params.cu_seqlens, n) : 0;
      padding = int(min(max(end, int64_t(0)), int64_t(params.num_tokens)));
    }
    *params.plan = {work.total,  roles.carriers,
                    roles.parts, max(steps_of(work.total, s_longest, roles.carriers), 1),
                    count,       padding,
                    has_empty};
  }
  if (params.ckpt.count > 0 && !params.is_transfer)
    plan_checkpoints<kThreads>(params, s_chunks[kThreads - 1]);
}

}  // namespace deltic::gpu::forward
