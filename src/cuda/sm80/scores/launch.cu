// The door of the kernel of scores: parameters, shared memory, and which instantiation runs.
#include <cuda_runtime.h>

#include <algorithm>

#include "cuda/device.h"
#include "cuda/set.h"
#include "cuda/sm80/scores/launch.h"
#include "cuda/sm80/scores/params.h"
#include "cuda/sm80/scores/traits.h"
#include "cuda/tile/grid.h"
#include "cuda/tile/vectors.cuh"

namespace deltic::gpu::scores {

template <class E, int kWidth, bool kPerChannel, bool kHasQ, bool kHasK>
void launch(const Params& p, unsigned ctas, cudaStream_t stream);

namespace {

template <class E, int kWidth, bool kPerChannel>
void launch_outputs(const Params& p, unsigned ctas, cudaStream_t stream) {
  if (p.kkt.present && p.scores.present) {
    return launch<E, kWidth, kPerChannel, true, true>(p, ctas, stream);
  }
  p.scores.present ? launch<E, kWidth, kPerChannel, true, false>(p, ctas, stream)
                   : launch<E, kWidth, kPerChannel, false, true>(p, ctas, stream);
}

// Which kernel a call runs: the type of rows in shared memory, K where it is known (0: any), decays
// per channel.
struct Instance {
  DType type;
  int width;
  bool per_channel;
};
Instance instance_of(const Problem& p) {
  // Rows of q and k are in their type if they have the same, else in fp32.
  const bool has_q = p.op != DELTIC_KKT, per_channel = p.gate == Gate::channel;
  const DType type = !has_q || p.q.dtype == p.k.dtype ? p.k.dtype : DType::f32;
  // K of 64 and 128 in vectors of two-byte elements: what models have.
  const bool vectors = type != DType::f32 && is_vectorizable(p.k, p.K) &&
                       (!has_q || is_vectorizable(p.q, p.K)) &&
                       (!per_channel || (p.g.dtype == DType::f32 && is_vectorizable(p.g, p.K)));
  return {type, vectors && (p.K == 64 || p.K == 128) ? static_cast<int>(p.K) : 0, per_channel};
}

template <class E, int kWidth>
void launch_gate(const Params& p, unsigned ctas, cudaStream_t stream) {
  p.gate == Gate::channel ? launch_outputs<E, kWidth, true>(p, ctas, stream)
                          : launch_outputs<E, kWidth, false>(p, ctas, stream);
}
template <class E>
void launch_width(int width, const Params& p, unsigned ctas, cudaStream_t stream) {
  if (width == 64) return launch_gate<E, 64>(p, ctas, stream);
  if (width == 128) return launch_gate<E, 128>(p, ctas, stream);
  launch_gate<E, 0>(p, ctas, stream);
}
void launch_instance(const Instance& i, const Params& p, unsigned ctas, cudaStream_t stream) {
  if constexpr (kFullSet) {
    if (i.type == DType::f32) return launch_gate<float, 0>(p, ctas, stream);
    const auto launch_type =
        i.type == DType::bf16 ? launch_width<__nv_bfloat16> : launch_width<__half>;
    launch_type(i.width, p, ctas, stream);
  } else if (i.type == DType::f32) {
    launch_outputs<float, 0, true>(p, ctas, stream);
  } else if (i.type == DType::bf16) {
    launch_outputs<__nv_bfloat16, 128, false>(p, ctas, stream);
  } else {
    launch_outputs<__half, 64, true>(p, ctas, stream);
  }
}

// Shared memory: rows of k, q and g, or the results in their place; numbers of rows last.
void lay_out(const Problem& p, DType type, bool has_kkt, bool has_scores, Params& x) {
  x.K = static_cast<int32_t>(p.K), x.width = (x.K + 15) / 16 * 16;
  x.row_bytes = row_bytes(x.width, static_cast<int>(size_of(type)));
  x.g_row_bytes = row_bytes(x.width, 4);
  x.q_at = kTileTokens * x.row_bytes;
  x.g_at = x.q_at + (has_scores ? kTileTokens * x.row_bytes : 0);
  const int32_t tiles = x.g_at + (p.gate == Gate::channel ? kTileTokens * x.g_row_bytes : 0);
  const int32_t results = (has_kkt + has_scores) * kTileTokens * kPitch * 4;
  x.rows_at = std::max(tiles, results);
  x.smem_bytes = x.rows_at + 2 * kTileTokens * 4;
}

void run(const Problem& p, const Rows& kkt, const Rows& scores, void* stream) {
  const int64_t num_items = num_tiles(p.packed, p.N, p.T) * p.HV;
  const unsigned ctas = num_ctas(p, num_items);
  if (ctas == 0) return;
  const Instance instance = instance_of(p);
  const DType type = instance.type;
  Params x{};
  x.tokens = tokens_of(p);
  x.heads = p.HV, x.group = static_cast<uint32_t>(p.HV / p.H), x.num_items = num_items;
  x.W = p.chunk;
  x.gate = p.gate, x.beta_kind = p.beta_kind, x.beta_form = p.beta_form, x.scale = p.scale;
  x.q = p.q, x.k = p.k, x.g = p.g, x.beta = p.beta, x.kkt = kkt, x.scores = scores;
  x.q_vectors = p.q.dtype == type && is_vectorizable(p.q, p.K);
  x.k_vectors = p.k.dtype == type && is_vectorizable(p.k, p.K);
  x.g_vectors = p.g.dtype == DType::f32 && is_vectorizable(p.g, p.K);
  x.kkt_vectors = is_vectorizable(kkt, p.chunk);
  x.scores_vectors = is_vectorizable(scores, p.chunk);
  lay_out(p, type, kkt.present, scores.present, x);
  launch_instance(instance, x, ctas, static_cast<cudaStream_t>(stream));
}

}  // namespace

const char* refuse(const Problem& p) {
  const Instance i = instance_of(p);
  const bool is_here = kFullSet || (i.type == DType::f32    ? i.per_channel
                                    : i.type == DType::bf16 ? i.width == 128 && !i.per_channel
                                                            : i.width == 64 && i.per_channel);
  if (!is_here) return kNotInThisBuild;
  Params x{};
  lay_out(p, i.type, p.op != DELTIC_SCORES, p.op != DELTIC_KKT, x);
  return refuse_shared_memory(p, static_cast<size_t>(x.smem_bytes));
}

void run(const Problem& p, void* stream) {
  p.op == DELTIC_KKT ? run(p, p.out, Rows{}, stream) : run(p, p.inverse, p.out, stream);
}

}  // namespace deltic::gpu::scores
