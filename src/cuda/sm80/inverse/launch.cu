// The door of the inverse.
#include <cuda_runtime.h>

#include "cuda/device.h"
#include "cuda/sm80/inverse/kernel.cuh"
#include "cuda/sm80/inverse/launch.h"
#include "cuda/tile/grid.h"

namespace deltic::gpu::inverse {
namespace {

template <int W>
void launch(const Params& params, unsigned ctas, cudaStream_t stream) {
  inverse_kernel<W><<<ctas, kThreads, 0, stream>>>(params);
  check_launch("inverse kernel");
}

}  // namespace

void run(const Problem& p, void* stream) {
  const int64_t num_items = num_tiles(p.packed, p.N, p.T) * p.HV;
  const unsigned ctas = num_ctas(p, num_items);
  if (ctas == 0) return;
  const Params params{.tokens = tokens_of(p),
                      .heads = p.HV,
                      .num_items = num_items,
                      .a = p.a,
                      .out = p.out,
                      .a_vectors = is_vectorizable(p.a, p.chunk),
                      .out_vectors = is_vectorizable(p.out, p.chunk)};
  const auto launch_width = p.chunk == 16 ? launch<16> : p.chunk == 32 ? launch<32> : launch<64>;
  launch_width(params, ctas, static_cast<cudaStream_t>(stream));
}

}  // namespace deltic::gpu::inverse
