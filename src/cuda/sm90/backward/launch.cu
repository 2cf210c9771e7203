// Host side of the backward on Hopper: what it takes, its workspace, the order of launches.
#include <cuda_runtime.h>

#include <algorithm>
#include <span>
#include <string_view>
#include <vector>

#include "core/scratch.h"
#include "cuda/cuda.h"
#include "cuda/device.h"
#include "cuda/schedule/chains.h"
#include "cuda/schedule/explain.h"
#include "cuda/set.h"
#include "cuda/sm80/scores/traits.h"
#include "cuda/sm90/backward/instantiate.h"
#include "cuda/sm90/backward/launch.h"
#include "cuda/sm90/backward/rounds.h"
#include "cuda/tensor_map.h"
#include "cuda/tile/call.h"
#include "cuda/tile/launch.h"
#include "cuda/tile/vectors.cuh"

namespace deltic::gpu::gradient {
namespace {

constexpr const char* kName = "cuda.sm90.backward";
constexpr unsigned kThreads = 256;  // of the kernels beside the products

const char* refuse(const Problem& p) {
  if (const char* sentence = refuse_fp64(p)) return sentence;
  if (p.gv) return "a decay per value column has no gradient here";
  if (p.q.dtype != DType::bf16 && p.q.dtype != DType::f16) return "q, k and v are not bf16 or fp16";
  if ((p.K != 64 && p.K != 128) || (p.V != 64 && p.V != 128)) {
    return "K or V is neither 64 nor 128";
  }
  if (p.chunk != kChunk) return "the chunk length is not 64";
  if (p.beta_kind == BetaKind::value) return "beta is per value channel";
  const auto fits = [](const Rows& x, int64_t width) {
    return !x.present || is_vectorizable(x, width);
  };
  if (!fits(p.q, p.K) || !fits(p.k, p.K) || !fits(p.v, p.V) || !fits(p.d_o, p.V) ||
      !fits(p.dv, p.V)) {
    return "an address or a stride of q, k, v, d_o or dv is no multiple of 16 bytes";
  }
  if (!kFullSet && !(p.q.dtype == DType::bf16 && p.K == 128 && p.gate == Gate::channel)) {
    return kNotInThisBuild;
  }
  return refuse_before_sm90(p);
}

// Of the whole call, as it decides bits.
int segment_of(const Problem& p) { return schedule::chain_segment(p, num_sms(p)); }
int64_t tiles_of(const Problem& p) { return num_tiles(p.packed, p.N, p.T); }

// How the chains are dealt. Whole sequences as on an H200, since the workspace depends on it;
// segments have a CTA for each job.
schedule::ChainDeal deal_of(const Problem& p, int segment) {
  const schedule::ChainCosts& costs = schedule::chain_costs_of(schedule::kind_of(p));
  const int64_t jobs = checked_product(p.N, p.HV);
  // Far more than SMs, and maybe beyond 32 bits; or none.
  if (segment == 0 && (jobs > (1 << 20) || jobs == 0)) return {int(p.V), int(p.V), jobs, 0};
  const schedule::ChainWork work =
      schedule::chain_work_of(p, segment > 0 ? num_sms(p) : schedule::kRoundSms);
  if (segment == 0) return schedule::deal_chains(costs, work);
  const int n = (work.longest + segment - 1) / segment;
  const int columns = schedule::chain_time(costs, work, n, segment).columns;
  const int forward = columns > 64 || costs.is_mixed ? int(p.V) : columns;
  return {columns, forward, num_pieces(p.packed, p.N, p.T, segment) * p.HV * (p.V / forward), 0};
}

// Of a round, or of a call that is one.
Workspace lay_out(const Problem& p, int segment, std::byte* base, size_t& bytes) {
  deltic::Scratch scratch(base);
  const int64_t items = checked_product(tiles_of(p), p.HV);
  const bool per_channel = p.gate == Gate::channel;
  const auto tile = [&](int64_t rows, int64_t width) -> void* {
    return scratch.take<uint16_t>(items, rows, width);
  };
  Workspace w{};
  if (per_channel) w.kE = tile(kChunk, p.K), w.kR = tile(kChunk, p.K), w.qE = tile(kChunk, p.K);
  w.T = tile(kChunk, kChunk), w.P = tile(kChunk, kChunk);
  w.S = tile(p.V, p.K), w.dS = tile(p.V, p.K);
  w.e = tile(kChunk, p.V), w.dz = tile(kChunk, p.V);
  w.last = scratch.take<float>(items, p.K);
  w.rows = scratch.take<float>(items, kRowKinds * kChunk);
  w.e_rest = scratch.take<uint16_t>(p.dbeta.present ? p.N : 0, p.HV, kChunk, p.V);
  if (p.dbeta.present) w.dz_rest = tile(kChunk, p.V);
  w.group_sums = scratch.take<float>(p.HV > p.H ? kGradientCtas : 0, 2 * kChunk, p.K);
  w.sums = scratch.take<float>(wants_sums(p) ? items : 0, 1 + gate_width_of(p));
  if (segment > 0) {
    const int64_t pieces = checked_product(num_pieces(p.packed, p.N, p.T, segment), p.HV);
    w.bound = scratch.take<float>(items);
    w.M = scratch.take<uint16_t>(pieces, 2, p.K, p.K);
    w.after = scratch.take<float>(pieces, p.V, p.K);
    w.before = scratch.take<float>(pieces, p.V, p.K);
  }
  if (segment == 0) {
    const schedule::ChainDeal deal = deal_of(p, 0);
    if (deal.forward_ctas < p.N * p.HV * (p.V / deal.forward)) {  // they share jobs
      w.handed = scratch.take<uint32_t>(deal.forward_ctas);
      w.between = scratch.take<float>(deal.forward_ctas, p.V, p.K);
    }
  }
  bytes = scratch.used();
  return w;
}

int64_t bytes_of_heads(const Problem& p, int segment, int64_t heads) {
  Problem x = p;
  if (heads < p.H) x.H = heads, x.HV = p.HV / p.H * heads;
  size_t bytes = 0;
  lay_out(x, segment, nullptr, bytes);
  return static_cast<int64_t>(bytes);
}
int64_t rounds_of(const Problem& p, int segment) {
  const int64_t rounds = schedule::choose_rounds(
      p, segment, [&](int64_t heads) { return bytes_of_heads(p, segment, heads); });
  return rounds_of_params(p, rounds);
}

// Shared memory of prepare, gates per head or none: k and q, or their products in that place;
// numbers of rows; a head's matrix.
scores::Params scores_params(const Problem& p) {
  scores::Params x{};
  x.K = static_cast<int32_t>(p.K), x.width = x.K, x.W = kChunk;
  x.gate = p.gate, x.scale = p.scale;
  x.kkt.present = x.scores.present = true;
  x.row_bytes = scores::row_bytes(x.K, 2), x.g_row_bytes = scores::row_bytes(x.K, 4);
  x.q_at = kChunk * x.row_bytes, x.g_at = 2 * x.q_at;
  x.rows_at = std::max(x.g_at, 2 * kMatrixBytes);
  x.smem_bytes = x.rows_at + 2 * kChunk * 4 + kMatrixBytes;
  return x;
}

Params params_of(const Problem& p, int segment, const Workspace& work) {
  Params x{};
  set_call(p, x), set_gradients(p, x);
  x.scores = scores_params(p), x.num_tiles = tiles_of(p);
  x.N = static_cast<uint32_t>(p.N), x.V = static_cast<int32_t>(p.V);
  // Four CTAs fill an SM; with fewer than that the heads of a group wait for one another.
  x.prepare_heads = x.num_tiles * p.H >= 4 * int64_t{kGradientCtas} ? x.group : 1;
  x.dq_vectors = is_vectorizable(p.dq, p.K), x.dk_vectors = is_vectorizable(p.dk, p.K);
  x.dg_pairs = is_vectorizable(p.dg, p.K);
  const bool has_rows = p.gate == Gate::channel && is_vectorizable(p.g, p.K);
  x.g_bytes = has_rows ? static_cast<int32_t>(size_of(p.g.dtype)) : 0;
  x.segment = segment, x.num_pieces = num_pieces(p.packed, p.N, p.T, segment);
  const schedule::ChainDeal deal = deal_of(p, segment);
  x.back_columns = deal.back, x.forward_columns = deal.forward;
  x.forward_ctas = static_cast<uint32_t>(deal.forward_ctas);
  x.work = work;
  return x;
}

Maps maps_of(const Problem& p, void* fallback) {
  const auto map = [&](const Rows& x, int64_t heads, int64_t width, Box box) -> RowsMap {
    if (!x.present || !is_16_bytes(x, heads, p.T, p.B)) return {};
    return {make_map("backward", x, p.B, p.T, heads, width, fallback, box), true};
  };
  return {map(p.q, p.H, p.K, Box::wide), map(p.k, p.H, p.K, Box::wide),
          map(p.v, p.HV, p.V, Box::wide), map(p.d_o, p.HV, p.V, Box::wide),
          map(p.dv, p.HV, p.V, Box::narrow)};
}

// Zero in the gradients of rows that belong to no sequence.
__global__ void __launch_bounds__(kThreads) clear_padding(const __grid_constant__ Params p) {
  if (is_wrong(p.tokens)) return;
  const Rows* const outputs[] = {&p.dq, &p.dk, &p.dv, &p.dbeta, &p.dg};
  const int64_t heads[] = {p.H, p.H, p.HV, p.HV, p.HV};
  const int64_t widths[] = {p.scores.K, p.scores.K, p.V, 1, p.gate_width};
#pragma unroll
  for (int i = 0; i < 5; ++i) {
    zero_padding(p.tokens, *outputs[i], heads[i], widths[i], blockIdx.x, gridDim.x);
  }
}

// dA_log and ddt_bias: the chunks' sums, in order and in fp64, rounded once. A thread has a
// parameter.
__global__ void __launch_bounds__(kThreads) add_parameters(const __grid_constant__ Params p) {
  if (is_wrong(p.tokens)) return;
  const int64_t width = 1 + p.gate_width, index = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (index >= p.HV * width) return;
  const int64_t head = index / width, i = index % width;
  double sum = 0;
#pragma unroll 8
  for (int64_t tile = 0; tile < p.num_tiles; ++tile)
    sum += p.work.sums[tile * p.HV * width + index];
  const Param& to = i == 0 ? p.dA_log : p.ddt_bias;
  const int64_t element = i == 0 ? head : head * p.gate_width + i - 1;
  if (to.present) store(to.data, to.dtype, param_offset(to, element), static_cast<float>(sum));
}

template <class E>
void launch_instance(const Problem& p, const Params& x, const Maps& maps, cudaStream_t stream) {
  if constexpr (kFullSet) {
    if (p.gate == Gate::channel) {
      return p.K == 64 ? launch<E, 64, true>(x, maps, stream)
                       : launch<E, 128, true>(x, maps, stream);
    }
    p.K == 64 ? launch<E, 64, false>(x, maps, stream) : launch<E, 128, false>(x, maps, stream);
  } else {
    launch<__nv_bfloat16, 128, true>(x, maps, stream);
  }
}

// The most of a round: the first one has the most heads, those with one less may have more jobs
// that CTAs share.
size_t workspace_bytes(const Problem& p) {
  const int segment = segment_of(p);
  const int64_t rounds = rounds_of(p, segment);
  const auto bytes_of = [&](int64_t index) {
    return bytes_of_heads(p, segment, schedule::round_at(p.H, rounds, index).heads);
  };
  return static_cast<size_t>(std::max(bytes_of(0), bytes_of(rounds - 1)));
}

// All launches of a round. What it writes over in the workspace the round before has read: every
// kernel waits for the one before it (begin_launch) ahead of its first access.
void run_round(const Problem& p, int segment, std::span<std::byte> workspace, cudaStream_t stream) {
  size_t bytes = 0;
  const Params x = params_of(p, segment, lay_out(p, segment, workspace.data(), bytes));
  const Maps maps = maps_of(p, workspace.data());
  if (x.wants_sums) {  // tiles that are none leave theirs alone
    const size_t sums = static_cast<size_t>(x.num_tiles * p.HV * (1 + x.gate_width));
    if (sums > 0) {
      check_cuda(cudaMemsetAsync(x.work.sums, 0, sums * sizeof(float), stream),
                 "clearing the sums of parameters");
    }
  }
  p.q.dtype == DType::bf16 ? launch_instance<__nv_bfloat16>(p, x, maps, stream)
                           : launch_instance<__half>(p, x, maps, stream);
  if (x.wants_sums) {
    const int64_t parameters = p.HV * (1 + x.gate_width);
    const auto ctas = static_cast<unsigned>((parameters + kThreads - 1) / kThreads);
    check_cuda(gpu::launch(add_parameters, ctas, kThreads, 0, stream, x),
               "kernel that adds up gradients of parameters");
  }
}

void run(const Problem& p, std::span<std::byte> workspace, void* stream_) {
  const auto stream = static_cast<cudaStream_t>(stream_);
  const int segment = segment_of(p);
  const int64_t pieces = checked_product(num_pieces(p.packed, p.N, p.T, segment), 6);
  checked_ctas(checked_product(std::max(tiles_of(p), pieces), p.HV), kName);
  if (p.packed && p.T > 0) {  // of all heads
    check_cuda(
        gpu::launch(clear_padding, kPaddingCtas, kThreads, 0, stream, params_of(p, segment, {})),
        "kernel that clears padding");
  }
  const int64_t rounds = rounds_of(p, segment);
  if (rounds == 1) return run_round(p, segment, workspace, stream);
  for (int64_t i = 0; i < rounds; ++i) {
    run_round(round_of(p, rounds, i), segment, workspace, stream);
  }
}

std::vector<WorkDivision> divisions(const Problem& p, int sms) {
  // Neither this machine's GPU nor this build's set of kernels matters here.
  const char* sentence = refuse(p);
  const bool is_taken = sentence == nullptr || sentence == refuse_before_sm90(p) ||
                        std::string_view(sentence) == kNotInThisBuild;
  if (!is_taken || p.N == 0 || p.T == 0) return {};
  const int segment = schedule::chain_segment(p, sms);
  int64_t rounds = 1, bytes = 0;
  try {
    rounds = rounds_of(p, segment);
    bytes = bytes_of_heads(p, segment, schedule::round_at(p.H, rounds, 0).heads);
  } catch (const SizeOverflow&) {  // no workspace is that large: what the call would be told
  }
  return schedule::explain_chains(p, sms, rounds, bytes);
}

}  // namespace

const Implementation& implementation() {
  static const Implementation entry{kName, missing_sm90, refuse,   workspace_bytes,
                                    run,   false,        divisions};
  return entry;
}

}  // namespace deltic::gpu::gradient
