// The door of the gated norm: what it takes, how rows are divided, and which kernels run.
#include <algorithm>

#include "core/sizes.h"
#include "cuda/device.h"
#include "cuda/set.h"
#include "cuda/sm80/norm/general.cuh"
#include "cuda/sm80/norm/kernels.h"
#include "cuda/sm80/norm/launch.h"
#include "cuda/tile/grid.h"
#include "cuda/tile/launch.h"

namespace deltic::gpu::norm {
namespace {

constexpr const char* kName = "cuda.norm";

const char* refuse(const Problem& p) {
  if (p.op != DELTIC_RMSNORM) return "it has the gated norm alone";
  if (const char* sentence = refuse_fp64(p)) return sentence;
  if (p.T > INT32_MAX || p.H > INT32_MAX || p.K > INT32_MAX) {
    return "more than 2^31 - 1 tokens, heads or numbers in a row, counted in 32 bits";
  }
  if (!kFullSet && p.x.dtype != DType::bf16) return kNotInThisBuild;
  return refuse_without_code(p);
}

// Runs of 16 bytes of a row; 0: some row has none, or there are more than a warp holds.
int64_t runs_of(const Problem& p) {
  constexpr int64_t kMost = 32 * 4;
  const int64_t n = 16 / size_of(p.x.dtype);
  if (p.K % n != 0 || p.K / n > kMost) return 0;
  for (const Rows* x : {&p.x, &p.z, &p.out, &p.d_out, &p.dx, &p.dz}) {
    if (!*x) continue;
    if (x->dtype != p.x.dtype) return 0;
    if (!has_runs(x->data, x->dtype, static_cast<int>(n), x->sb, x->st, x->sh)) return 0;
  }
  return p.K / n;
}

// From shapes and runs alone, so that the weight's gradient has the same bits on any share of a
// GPU: so many CTAs at most, eight for each of 132 SMs, five of the gradient's, and warps where
// rows go one by one.
struct Division {
  int64_t runs, num_rows, per_part, num_parts;
};
Division divide(const Problem& p, int64_t runs) {
  Division x;
  x.runs = runs;
  x.num_rows = p.T > 0 ? checked_product(p.packed ? 1 : p.B, p.T, p.H) : 0;
  const int64_t most = x.runs == 0 ? 4224 : p.is_gradient ? 660 : 1056;
  x.per_part = std::max<int64_t>((x.num_rows + most - 1) / most, 1);
  // Whole rounds of a CTA's groups.
  const int64_t lanes = x.runs <= 8 ? 8 : x.runs <= 16 ? 16 : 32;
  if (x.runs > 0) x.per_part = round_up(x.per_part, kThreads / lanes);
  x.num_parts = (x.num_rows + x.per_part - 1) / x.per_part;
  return x;
}

size_t workspace_bytes(const Problem& p) {
  if (!p.dweight) return 0;
  // A query comes without addresses: enough for rows that lie anywhere, which have the most parts.
  const int64_t num_parts = divide(p, 0).num_parts;
  return static_cast<size_t>(checked_product(num_parts, p.K, int64_t{sizeof(float)}));
}

// Whether rows of all tensors follow one another at a stride of their own.
bool is_flat(const Problem& p) {
  for (const Rows* x : {&p.x, &p.z, &p.out, &p.d_out, &p.dx, &p.dz}) {
    if (!*x) continue;
    const int64_t row = p.H > 1 ? x->sh : p.T > 1 ? x->st : x->sb;
    if (row != x->sh) return false;  // the kernel counts by the head stride
    if ((p.T > 1 && x->st != p.H * row) || (p.B > 1 && x->sb != p.T * p.H * row)) return false;
  }
  return true;
}

Params params_of(const Problem& p, const Division& x, float* sums) {
  Params params{};
  params.tokens = tokens_of(p);
  params.heads = static_cast<uint32_t>(p.H), params.width = static_cast<uint32_t>(p.K);
  params.num_rows = checked_ctas(x.num_rows, kName);
  params.num_parts = static_cast<uint32_t>(x.num_parts);
  params.per_part = static_cast<uint32_t>(x.per_part);
  params.is_flat = is_flat(p);
  params.has_weight_runs =
      p.weight && p.weight.contiguous &&
      has_runs(p.weight.data, p.weight.dtype, static_cast<int>(16 / size_of(p.x.dtype)));
  params.inverse_width = 1.0f / static_cast<float>(p.K);
  params.activation = p.activation, params.eps = p.eps;
  params.x = p.x, params.z = p.z, params.out = p.is_gradient ? Rows{} : p.out;
  params.weight = p.weight;
  params.d_out = p.d_out, params.dx = p.dx, params.dz = p.dz, params.dweight = p.dweight;
  params.sums = p.dweight ? sums : nullptr;
  return params;
}

template <class E>
void launch_of(int64_t runs, const Params& params, bool is_gradient, cudaStream_t stream) {
  const auto run = runs <= 8    ? launch<E, 8, 1>
                   : runs <= 16 ? launch<E, 16, 1>
                   : runs <= 32 ? launch<E, 32, 1>
                   : runs <= 64 ? launch<E, 32, 2>
                                : launch<E, 32, 4>;
  run(params, is_gradient, stream);
}

void run(const Problem& p, std::span<std::byte> workspace, void* stream_handle) {
  const auto stream = static_cast<cudaStream_t>(stream_handle);
  const Division x = divide(p, runs_of(p));
  const Params params = params_of(p, x, reinterpret_cast<float*>(workspace.data()));
  if (x.num_rows > 0 && x.runs == 0) {
    check_cuda(
        launch_after(general_kernel, dim3(params.num_parts), 32, 0, stream, params, p.is_gradient),
        "launch of the gated norm's kernel");
  } else if (x.num_rows > 0 && p.x.dtype == DType::bf16) {
    launch_of<__nv_bfloat16>(x.runs, params, p.is_gradient, stream);
  } else if (x.num_rows > 0) {
    if constexpr (kFullSet) {
      p.x.dtype == DType::f32 ? launch_of<float>(x.runs, params, p.is_gradient, stream)
                              : launch_of<__half>(x.runs, params, p.is_gradient, stream);
    }
  }
  if (!p.dweight) return;
  const unsigned ctas = (params.width + kSumColumns - 1) / kSumColumns;
  check_cuda(launch_after(sums_kernel, dim3(ctas), kSumThreads, 0, stream, params),
             "launch of the kernel that sums a norm's gradient");
}

}  // namespace

const Implementation& implementation() {
  static const Implementation entry{kName, missing_code, refuse, workspace_bytes, run};
  return entry;
}

}  // namespace deltic::gpu::norm
