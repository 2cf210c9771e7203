// The door of the kernel of scores: parameters, shared memory, and which instantiation runs.
#include <cuda_runtime.h>

#include <algorithm>

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

template <class E, int kWidth>
void launch_gate(const Params& p, unsigned ctas, cudaStream_t stream) {
  p.gate == Gate::channel ? launch_outputs<E, kWidth, true>(p, ctas, stream)
                          : launch_outputs<E, kWidth, false>(p, ctas, stream);
}

// K of 64 and 128 in vectors of two-byte elements: what models have.
template <class E>
void launch_width(const Params& p, unsigned ctas, cudaStream_t stream) {
  const bool vectors =
      p.k_vectors && (p.q_vectors || !p.scores.present) && (p.g_vectors || p.gate != Gate::channel);
  if (vectors && p.K == 64) return launch_gate<E, 64>(p, ctas, stream);
  if (vectors && p.K == 128) return launch_gate<E, 128>(p, ctas, stream);
  launch_gate<E, 0>(p, ctas, stream);
}

void run(const Problem& p, const Rows& kkt, const Rows& scores, void* stream) {
  const int64_t num_items = num_tiles(p.packed, p.N, p.T) * p.HV;
  const unsigned ctas = num_ctas(p, num_items);
  if (ctas == 0) return;
  // Rows of q and k in shared memory: in their type if they have the same, else in fp32.
  const DType type = !scores.present || p.q.dtype == p.k.dtype ? p.k.dtype : DType::f32;
  const int32_t element = static_cast<int32_t>(size_of(type));
  Params x{};
  x.tokens = tokens_of(p);
  x.heads = p.HV, x.group = static_cast<uint32_t>(p.HV / p.H), x.num_items = num_items;
  x.K = static_cast<int32_t>(p.K), x.width = (x.K + 15) / 16 * 16, x.W = p.chunk;
  x.gate = p.gate, x.beta_kind = p.beta_kind, x.beta_form = p.beta_form, x.scale = p.scale;
  x.q = p.q, x.k = p.k, x.g = p.g, x.beta = p.beta, x.kkt = kkt, x.scores = scores;
  x.q_vectors = p.q.dtype == type && is_vectorizable(p.q, p.K);
  x.k_vectors = p.k.dtype == type && is_vectorizable(p.k, p.K);
  x.g_vectors = p.g.dtype == DType::f32 && is_vectorizable(p.g, p.K);
  x.kkt_vectors = is_vectorizable(kkt, p.chunk);
  x.scores_vectors = is_vectorizable(scores, p.chunk);
  x.row_bytes = row_bytes(x.width, element), x.g_row_bytes = row_bytes(x.width, 4);
  x.q_at = kTile * x.row_bytes;
  x.g_at = x.q_at + (scores.present ? kTile * x.row_bytes : 0);
  const int32_t tiles = x.g_at + (p.gate == Gate::channel ? kTile * x.g_row_bytes : 0);
  const int32_t results = (kkt.present + scores.present) * kTile * kPitch * 4;
  x.rows_at = std::max(tiles, results);
  x.smem_bytes = x.rows_at + 2 * kTile * 4;
  const auto launch_type = type == DType::bf16  ? launch_width<__nv_bfloat16>
                           : type == DType::f16 ? launch_width<__half>
                                                : launch_gate<float, 0>;
  launch_type(x, ctas, static_cast<cudaStream_t>(stream));
}

}  // namespace

void run(const Problem& p, void* stream) {
  p.op == DELTIC_KKT ? run(p, p.out, Rows{}, stream) : run(p, p.inverse, p.out, stream);
}

}  // namespace deltic::gpu::scores
