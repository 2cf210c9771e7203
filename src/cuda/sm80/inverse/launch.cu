// The door of the inverse.
#include <cuda_runtime.h>

#include <type_traits>

#include "cuda/device.h"
#include "cuda/sm80/inverse/kernel.cuh"
#include "cuda/sm80/inverse/kernel_16.cuh"
#include "cuda/sm80/inverse/kernel_bf16.cuh"
#include "cuda/sm80/inverse/launch.h"
#include "cuda/tile/grid.h"
#include "cuda/tile/launch.h"

namespace deltic::gpu::inverse {
namespace {

// Which kernel has a call, and how a CTA of it divides the work.
template <int W, class E>
struct Choice {
  static constexpr bool kIs16 = W == 16 && !std::is_void_v<E>;
  static constexpr bool kIsBf16 = W > 16 && std::is_same_v<E, __nv_bfloat16>;
  static constexpr int kWarps = kIs16 || kIsBf16 ? 2 : inverse::kWarps<W>;
  // Matrices (tiles in the kernel of the rest) of a warp, and those of a tile and head.
  static constexpr int kPerWarp = kIs16 ? kMatrices16 : kIsBf16 ? 64 / W : 1;
  static constexpr int kPerTile = kIs16 || kIsBf16 ? kTileTokens / W : 1;

  static auto* kernel() {
    if constexpr (kIs16) {
      return inverse_16_kernel<E, kWarps>;
    } else if constexpr (kIsBf16) {
      return inverse_bf16_kernel<W, kWarps>;
    } else {
      return inverse_kernel<W, E>;
    }
  }
};

template <int W, class E>
void launch(const Problem& p, cudaStream_t stream) {
  using C = Choice<W, E>;
  constexpr int64_t kPerCta = C::kWarps * C::kPerWarp;
  const int64_t num_items = num_tiles(p.packed, p.N, p.T) * C::kPerTile * p.HV;
  if (num_items > UINT32_MAX - kPerCta) {
    fail(DELTIC_UNSUPPORTED, "cuda.general: expected fewer than 2^32 matrices, got ", num_items);
  }
  const int64_t num_item_ctas = (num_items + kPerCta - 1) / kPerCta;
  const unsigned ctas = num_ctas(p, num_item_ctas);
  if (ctas == 0) return;
  const Params params{.tokens = tokens_of(p),
                      .heads = p.HV,
                      .num_items = num_items,
                      .num_item_ctas = num_item_ctas,
                      .a = p.a,
                      .out = p.out};
  // 0.6 to 1 us less than one after the other, of 10 in the shortest row.
  check_cuda(launch_after(C::kernel(), dim3(ctas), 32 * C::kWarps, 0, stream, params),
             "inverse kernel");
}

// Rows in 16-byte vectors, and the bytes from one to the next are a number of 31 bits.
bool has_vectors(const Rows& x, int64_t width) {
  return is_vectorizable(x, width) && x.st >= 0 && x.st <= INT32_MAX / size_of(x.dtype);
}

template <int W>
void run_width(const Problem& p, cudaStream_t stream) {
  const bool vectors = p.a.dtype == p.out.dtype && has_vectors(p.a, W) && has_vectors(p.out, W);
  const auto launch_type = !vectors                   ? launch<W, void>
                           : p.a.dtype == DType::bf16 ? launch<W, __nv_bfloat16>
                           : p.a.dtype == DType::f16  ? launch<W, __half>
                                                      : launch<W, float>;
  launch_type(p, stream);
}

}  // namespace

void run(const Problem& p, void* stream) {
  const auto of_width = p.chunk == 16   ? run_width<16>
                        : p.chunk == 32 ? run_width<32>
                                        : run_width<64>;
  of_width(p, static_cast<cudaStream_t>(stream));
}

}  // namespace deltic::gpu::inverse
