// The door of the WY pair.
#include <cuda_runtime.h>

#include "cuda/device.h"
#include "cuda/sm80/wy/kernel.cuh"
#include "cuda/sm80/wy/launch.h"
#include "cuda/tile/grid.h"
#include "cuda/tile/launch.h"

namespace deltic::gpu::wy {

void run(const Problem& p, void* stream) {
  const int64_t num_items = num_tiles(p.packed, p.N, p.T) * p.HV;
  const unsigned ctas = num_ctas(p, num_items);
  if (ctas == 0) return;
  const Params params{.tokens = tokens_of(p),
                      .heads = p.HV,
                      .group = p.HV / p.H,
                      .num_items = num_items,
                      .K = p.K,
                      .V = p.V,
                      .W = p.chunk,
                      .gate = p.gate,
                      .beta_kind = p.beta_kind,
                      .beta_form = p.beta_form,
                      .q = p.q,
                      .k = p.k,
                      .v = p.v,
                      .g = p.g,
                      .beta = p.beta,
                      .a = p.a,
                      .w = p.w,
                      .u = p.u,
                      .kg = p.kg,
                      .qg = p.qg};
  check_cuda(launch(wy_kernel, ctas, kThreads, 0, static_cast<cudaStream_t>(stream), params),
             "WY kernel");
}

}  // namespace deltic::gpu::wy
