// The door of the inverse.
#include <cuda_runtime.h>

#include "cuda/device.h"
#include "cuda/sm80/inverse/kernel.cuh"
#include "cuda/sm80/inverse/launch.h"
#include "cuda/tile/grid.h"

namespace deltic::gpu::inverse {
namespace {

template <int W, class E>
void launch(const Params& params, unsigned ctas, cudaStream_t stream) {
  inverse_kernel<W, E><<<ctas, 32 * kWarps<W>, 0, stream>>>(params);
  check_launch("inverse kernel");
}

template <int W>
void run_width(const Problem& p, cudaStream_t stream) {
  const int64_t num_items = num_tiles(p.packed, p.N, p.T) * p.HV;
  const int64_t num_item_ctas = (num_items + kWarps<W> - 1) / kWarps<W>;
  const unsigned ctas = num_ctas(p, num_item_ctas);
  if (ctas == 0) return;
  if (num_items > UINT32_MAX) {
    fail(DELTIC_UNSUPPORTED, "cuda.general: expected fewer than 2^32 tiles, got ", num_items);
  }
  const Params params{.tokens = tokens_of(p),
                      .heads = p.HV,
                      .num_items = num_items,
                      .num_item_ctas = num_item_ctas,
                      .a = p.a,
                      .out = p.out};
  const bool vectors =
      p.a.dtype == p.out.dtype && is_vectorizable(p.a, W) && is_vectorizable(p.out, W);
  const auto launch_type = !vectors                   ? launch<W, void>
                           : p.a.dtype == DType::bf16 ? launch<W, __nv_bfloat16>
                           : p.a.dtype == DType::f16  ? launch<W, __half>
                                                      : launch<W, float>;
  launch_type(params, ctas, stream);
}

}  // namespace

void run(const Problem& p, void* stream) {
  const auto of_width = p.chunk == 16   ? run_width<16>
                        : p.chunk == 32 ? run_width<32>
                                        : run_width<64>;
  of_width(p, static_cast<cudaStream_t>(stream));
}

}  // namespace deltic::gpu::inverse
