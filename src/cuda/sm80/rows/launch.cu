// The door of the row-wise building blocks.
#include <cuda_runtime.h>

#include "cuda/device.h"
#include "cuda/sm80/rows/gates.cuh"
#include "cuda/sm80/rows/l2norm.cuh"
#include "cuda/sm80/rows/launch.h"
#include "cuda/tile/grid.h"
#include "cuda/tile/launch.h"

namespace deltic::gpu::rows {
namespace {

void run_gates(const Problem& p, cudaStream_t stream) {
  const int64_t width = p.gate == Gate::channel ? p.K : 1;
  const int64_t parts = (p.HV * width + kThreads - 1) / kThreads;
  const int64_t num_items = num_tiles(p.packed, p.N, p.T) * parts;
  const unsigned ctas = num_ctas(p, num_items);
  if (ctas == 0) return;
  const GateParams params{.tokens = tokens_of(p),
                          .heads = p.HV,
                          .width = width,
                          .num_parts = parts,
                          .num_items = num_items,
                          .W = p.chunk,
                          .sums = p.op == DELTIC_CUMSUM,
                          .reverse = p.op == DELTIC_CUMSUM && p.reverse,
                          .form = p.gate_form,
                          .scale = p.scale,
                          .lower_bound = p.lower_bound,
                          .g = p.g,
                          .out = p.out,
                          .A_log = p.A_log,
                          .dt_bias = p.dt_bias};
  check_cuda(launch(gates_kernel, ctas, kThreads, 0, stream, params), "gate kernel");
}

void run_norm(const Problem& p, cudaStream_t stream) {
  const int64_t rows = p.B * p.T * p.H;
  if (rows == 0) return;
  if (rows > UINT32_MAX) {
    fail(DELTIC_UNSUPPORTED, "cuda.general: expected fewer than 2^32 rows, got ", rows);
  }
  const NormParams params{.tokens = tokens_of(p),
                          .heads = p.H,
                          .width = p.K,
                          .num_rows = rows,
                          .x = p.x,
                          .out = p.out,
                          .rstd = p.rstd};
  const unsigned ctas = checked_ctas((rows + kNormWarps - 1) / kNormWarps);
  check_cuda(launch(l2norm_kernel, ctas, 32 * kNormWarps, 0, stream, params), "L2 norm kernel");
}

}  // namespace

void run(const Problem& p, void* stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  p.op == DELTIC_L2NORM ? run_norm(p, on) : run_gates(p, on);
}

}  // namespace deltic::gpu::rows
