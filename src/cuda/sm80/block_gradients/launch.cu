// The door of the building blocks' gradients: how a call is divided, scratch, and which kernels
// run.
#include <cuda_runtime.h>

#include <algorithm>

#include "core/scratch.h"
#include "cuda/device.h"
#include "cuda/sm80/block_gradients/channels.cuh"
#include "cuda/sm80/block_gradients/gates.cuh"
#include "cuda/sm80/block_gradients/inverse.cuh"
#include "cuda/sm80/block_gradients/l2norm.cuh"
#include "cuda/sm80/block_gradients/launch.h"
#include "cuda/sm80/block_gradients/pairs.cuh"
#include "cuda/sm80/block_gradients/wy.cuh"
#include "cuda/tile/call.h"
#include "cuda/tile/launch.h"

namespace deltic::gpu::block_gradients {
namespace {

// CTAs that sums over tokens are divided among, eight for each of 132 SMs: from shapes alone, so
// that they have the same bits on any share of a GPU.
constexpr int64_t kManyCtas = 1056;

int64_t slices_of(int64_t width) { return (width + kColumns - 1) / kColumns; }
int64_t tiles_of(const Problem& p) { return p.T > 0 ? num_tiles(p.packed, p.N, p.T) : 0; }
int64_t rows_of(const Problem& p) { return p.packed ? p.T : checked_product(p.B, p.T); }

// ---- cumsum and gate ----

struct GateDivision {
  int64_t width, columns, blocks, tiles, parts;
};
GateDivision divide_gates(const Problem& p) {
  GateDivision x;
  x.width = p.gate == Gate::channel ? p.K : 1;
  x.columns = checked_product(p.HV, x.width);
  x.blocks = (x.columns + kThreads - 1) / kThreads;
  x.tiles = tiles_of(p);
  x.parts = x.tiles;
  if (wants_sums(p)) x.parts = std::min(x.tiles, (kManyCtas + x.blocks - 1) / x.blocks);
  return x;
}

struct GateScratch {
  double *A_sums, *bias_sums;
  size_t bytes;
};
GateScratch lay_out_gates(const Problem& p, std::byte* base) {
  const GateDivision x = divide_gates(p);
  Scratch scratch(base);
  GateScratch s{};
  if (p.dA_log) s.A_sums = scratch.take<double>(x.parts, x.columns);
  if (p.ddt_bias) s.bias_sums = scratch.take<double>(x.parts, x.columns);
  s.bytes = scratch.used();
  return s;
}

void run_gates(const Problem& p, std::byte* workspace, cudaStream_t stream) {
  const GateDivision x = divide_gates(p);
  const GateScratch scratch = lay_out_gates(p, workspace);
  const GateParams params{.tokens = tokens_of(p),
                          .HV = p.HV,
                          .width = x.width,
                          .num_columns = x.columns,
                          .num_tiles = x.tiles,
                          .num_parts = checked_ctas(x.parts),
                          .W = p.chunk,
                          .sums = p.op == DELTIC_CUMSUM,
                          .reverse = p.op == DELTIC_CUMSUM && p.reverse,
                          .form = p.gate_form,
                          .scale = p.scale,
                          .lower_bound = p.lower_bound,
                          .g = p.g,
                          .d_out = p.d_out,
                          .dg = p.dg,
                          .A_log = p.A_log,
                          .dt_bias = p.dt_bias,
                          .dA_log = p.dA_log,
                          .ddt_bias = p.ddt_bias,
                          .A_sums = scratch.A_sums,
                          .bias_sums = scratch.bias_sums};
  const unsigned ctas = checked_ctas(checked_product(x.parts, x.blocks));
  if (ctas > 0) {
    check_cuda(gpu::launch(gate_gradients_kernel, ctas, kThreads, 0, stream, params),
               "kernel of the gates' gradients");
  }
  if (!wants_sums(p)) return;
  check_cuda(gpu::launch(gate_sums_kernel, checked_ctas(p.HV), kThreads, 0, stream, params),
             "kernel that sums the gates' gradients");
}

// ---- l2norm ----

void run_norm(const Problem& p, cudaStream_t stream) {
  const int64_t rows = checked_product(rows_of(p), p.H);
  if (rows == 0 || !p.dx) return;
  if (rows > UINT32_MAX) {
    fail(DELTIC_UNSUPPORTED, "cuda.general: expected fewer than 2^32 rows, got ", rows);
  }
  const NormParams params{.tokens = tokens_of(p),
                          .heads = p.H,
                          .width = p.K,
                          .num_rows = rows,
                          .x = p.x,
                          .d_out = p.d_out,
                          .dx = p.dx};
  const unsigned ctas = checked_ctas((rows + kNormWarps - 1) / kNormWarps);
  check_cuda(gpu::launch(norm_gradient_kernel, ctas, 32 * kNormWarps, 0, stream, params),
             "kernel of the L2 norm's gradient");
}

// ---- kkt, scores, inverse, wy ----

// dbeta of kkt with decays per channel is a sum over slices.
bool has_parts(const Problem& p) {
  return p.op == DELTIC_KKT && p.gate == Gate::channel && p.dbeta;
}
int64_t num_parts(const Problem& p) {
  return has_parts(p) ? checked_product(slices_of(p.K), rows_of(p), p.HV) : 0;
}

Params params_of(const Problem& p, std::byte* workspace) {
  Params x{};
  x.tokens = tokens_of(p);
  x.H = p.H, x.HV = p.HV, x.K = p.K, x.V = p.V;
  x.num_rows = rows_of(p);
  x.group = static_cast<uint32_t>(p.HV / p.H);
  x.key_slices = static_cast<uint32_t>(slices_of(p.K)), x.num_slices = 1;
  x.W = p.chunk;
  x.gate = p.gate;
  x.scale = p.scale;
  x.q = p.q, x.k = p.k, x.v = p.v, x.g = p.g, x.beta = p.beta, x.a = p.a, x.out = p.out;
  x.d_out = p.d_out, x.d_w = p.d_w, x.d_u = p.d_u, x.d_kg = p.d_kg, x.d_qg = p.d_qg;
  x.dq = p.dq, x.dk = p.dk, x.dv = p.dv, x.dg = p.dg, x.dbeta = p.dbeta, x.da = p.da, x.dx = p.dx;
  // An absent one is not multiplied.
  const auto is_short = [](const Rows& rows) { return !rows || size_of(rows.dtype) == 2; };
  x.short_keys = is_short(p.q) && is_short(p.k);
  x.short_w = is_short(p.d_w), x.short_u = is_short(p.d_u) && is_short(p.v);
  x.short_aw = is_short(p.a) && is_short(p.d_w), x.short_au = is_short(p.a) && is_short(p.d_u);
  x.parts = Scratch(workspace).take<float>(num_parts(p));
  return x;
}

// A CTA per tile, head and slice.
using Kernel = void (*)(Params);
void launch(Kernel kernel, const Problem& p, Params x, int64_t heads, int64_t slices,
            cudaStream_t stream, const char* what) {
  const unsigned ctas = checked_ctas(checked_product(tiles_of(p), heads, slices));
  if (ctas == 0) return;
  x.num_slices = static_cast<uint32_t>(slices);
  check_cuda(gpu::launch(kernel, ctas, kThreads, 0, stream, x), what);
}

void run_products(const Problem& p, const Params& x, cudaStream_t stream) {
  const bool is_scores = p.op == DELTIC_SCORES;
  if (p.gate != Gate::channel) {
    launch(is_scores ? pairs_kernel<true> : pairs_kernel<false>, p, x, p.H, 1, stream,
           "kernel of a product's gradients");
    return;
  }
  launch(is_scores ? channels_kernel<true> : channels_kernel<false>, p, x, p.H, x.key_slices,
         stream, "kernel of a product's gradients");
  if (!has_parts(p)) return;
  const unsigned ctas = checked_ctas((checked_product(x.num_rows, p.HV) + kThreads - 1) / kThreads);
  if (ctas == 0) return;
  check_cuda(gpu::launch(beta_kernel, ctas, kThreads, 0, stream, x), "kernel that sums dbeta");
}

void run_wy(const Problem& p, const Params& x, cudaStream_t stream) {
  if (p.da || p.dbeta || (p.dg && p.gate == Gate::head)) {
    launch(triangles_kernel, p, x, p.HV, 1, stream, "kernel of the WY pair's triangles");
  }
  const bool has_keys = p.dq || p.dk || (p.dg && p.gate == Gate::channel);
  Params columns = x;
  if (!has_keys) columns.key_slices = 0;
  const int64_t slices = columns.key_slices + (p.dv ? slices_of(p.V) : 0);
  launch(columns_kernel, p, columns, p.H, slices, stream, "kernel of the WY pair's columns");
}

// Zero in the gradients of rows that belong to no sequence.
__global__ void __launch_bounds__(kThreads)
    padding_kernel(const __grid_constant__ Params p, int64_t gate_width) {
  if (is_wrong(p.tokens)) return;
  const int64_t index = blockIdx.x, num = gridDim.x;
  zero_padding(p.tokens, p.dq, p.H, p.K, index, num);
  zero_padding(p.tokens, p.dk, p.H, p.K, index, num);
  zero_padding(p.tokens, p.dv, p.HV, p.V, index, num);
  zero_padding(p.tokens, p.dbeta, p.HV, 1, index, num);
  zero_padding(p.tokens, p.dg, p.HV, gate_width, index, num);
  zero_padding(p.tokens, p.da, p.HV, p.W, index, num);
}

}  // namespace

size_t workspace_bytes(const Problem& p) {
  switch (p.op) {
    case DELTIC_CUMSUM:
    case DELTIC_GATE:
      return lay_out_gates(p, nullptr).bytes;
    default: {
      Scratch scratch(nullptr);
      scratch.take<float>(num_parts(p));
      return scratch.used();
    }
  }
}

void run(const Problem& p, std::span<std::byte> workspace, void* stream_) {
  const auto stream = static_cast<cudaStream_t>(stream_);
  if (p.op == DELTIC_L2NORM) return run_norm(p, stream);
  const Params x = params_of(p, workspace.data());
  if (p.packed && p.T > 0) {
    check_cuda(gpu::launch(padding_kernel, kPaddingCtas, kThreads, 0, stream, x, gate_width_of(p)),
               "kernel that clears padding");
  }
  switch (p.op) {
    case DELTIC_CUMSUM:
    case DELTIC_GATE:
      return run_gates(p, workspace.data(), stream);
    case DELTIC_INVERSE:
      return launch(inverse_kernel, p, x, p.HV, 1, stream, "kernel of the inverse's gradient");
    case DELTIC_WY:
      return run_wy(p, x, stream);
    default:
      return run_products(p, x, stream);
  }
}

}  // namespace deltic::gpu::block_gradients
