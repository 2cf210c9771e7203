// Roofs: small product kernels with operands in L1 for each instruction set, and a threaded copy.
#include "roofs.h"

#include <omp.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace deltic::cli {
namespace {

constexpr int kDepth = 128;     // length of the sums, as K and V in practice
constexpr int kRepeats = 4096;  // products per call

// C[Rows, 2 vectors] += A[Rows, kDepth] B[kDepth, 2 vectors], `kRepeats` times. Rows * 2
// accumulators must fit the register file beside two vectors of B and one of A.
template <class Vector, int Rows>
[[gnu::always_inline]] inline double product(const float* A, const float* B, float* C) {
  constexpr int kLanes = sizeof(Vector) / sizeof(float);
  Vector sums[Rows][2] = {};
  for (int repeat = 0; repeat < kRepeats; ++repeat) {
    const float* a = A;
    const float* b = B;
    asm volatile("" : "+r"(a), "+r"(b));  // the same product again, not once for all
    for (int d = 0; d < kDepth; ++d) {
      Vector b0, b1;
      std::memcpy(&b0, b + d * 2 * kLanes, sizeof b0);
      std::memcpy(&b1, b + d * 2 * kLanes + kLanes, sizeof b1);
#pragma GCC unroll 16
      for (int r = 0; r < Rows; ++r) {
        const Vector x = a[d * Rows + r] - Vector{};
        sums[r][0] += x * b0;
        sums[r][1] += x * b1;
      }
    }
  }
  std::memcpy(C, sums, sizeof sums);
  return 2.0 * Rows * 2 * kLanes * kDepth * kRepeats;
}

using Vector4 [[gnu::vector_size(16)]] = float;
double product_128(const float* A, const float* B, float* C) {
  return product<Vector4, 4>(A, B, C);
}

#if defined(__x86_64__)
using Vector8 [[gnu::vector_size(32)]] = float;
using Vector16 [[gnu::vector_size(64)]] = float;
[[gnu::target("avx2,fma")]] double product_256(const float* A, const float* B, float* C) {
  return product<Vector8, 6>(A, B, C);
}
[[gnu::target("avx512f,fma")]] double product_512(const float* A, const float* B, float* C) {
  return product<Vector16, 12>(A, B, C);
}

// Four accumulators of 16 x 16, two tiles of each operand: every load feeds two products.
[[gnu::target("amx-tile,amx-bf16")]] double product_tiles(const float* A, const float* B,
                                                          float* C) {
  struct alignas(64) Config {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  };
  constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr int kTileData = 18;
  syscall(SYS_arch_prctl, kRequestPermission, kTileData);
  const Config config;
  _tile_loadconfig(&config);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  constexpr int kSteps = kDepth / 32;  // a tile holds 32 bf16 per row
  for (int repeat = 0; repeat < kRepeats; ++repeat) {
    for (int step = 0; step < kSteps; ++step) {
      _tile_loadd(4, A + step * 512, 64);
      _tile_loadd(5, A + step * 512 + 256, 64);
      _tile_loadd(6, B + step * 512, 64);
      _tile_loadd(7, B + step * 512 + 256, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, C, 64);
  _tile_release();
  return 2.0 * 32 * 32 * kDepth * kRepeats;
}
#endif

using ProductKernel = double (*)(const float*, const float*, float*);

ProductKernel choose(const std::string& impl, std::string& kind) {
#if defined(__x86_64__)
  if (impl == "cpu.amx") {
    kind = "AMX bf16";
    return product_tiles;
  }
  if (__builtin_cpu_supports("avx512f") && impl != "cpu.avx2") {
    kind = "AVX-512 fp32";
    return product_512;
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    kind = "AVX2 fp32";
    return product_256;
  }
#else
  (void)impl;
#endif
  kind = "128-bit fp32";
  return product_128;
}

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

ProductRoof measure_product_roof(int threads, const std::string& impl) {
  ProductRoof roof;
  const ProductKernel kernel = choose(impl, roof.kind);
  double best = 0;
  for (int attempt = 0; attempt < 7; ++attempt) {  // the first one warms up; a roof is the best
    double flops = 0;
    double begin = 0;
#pragma omp parallel num_threads(threads) reduction(+ : flops)
    {
      struct alignas(64) Operands {
        float A[4096], B[4096], C[1024];
      };
      const auto operands = std::make_unique<Operands>();
      std::memset(operands.get(), 0, sizeof(Operands));
#pragma omp barrier
#pragma omp master
      begin = now();
#pragma omp barrier
      flops += kernel(operands->A, operands->B, operands->C);
    }
    best = std::max(best, flops / (now() - begin) * 1e-9);
  }
  roof.gflops = best;
  return roof;
}

CopyRoof::CopyRoof(size_t traffic, int threads)
    : half_(std::max<size_t>(traffic / 2, 64)),
      threads_(threads),
      from_(new std::byte[half_]),
      to_(new std::byte[half_]) {
  // Each thread touches its slice first, as it will copy it.
#pragma omp parallel num_threads(threads_)
  {
    const auto n = static_cast<size_t>(omp_get_num_threads()),
               i = static_cast<size_t>(omp_get_thread_num());
    const size_t begin = half_ * i / n, end = half_ * (i + 1) / n;
    std::memset(from_.get() + begin, 1, end - begin);
    std::memset(to_.get() + begin, 2, end - begin);
  }
}

void CopyRoof::run() {
#pragma omp parallel num_threads(threads_)
  {
    const auto n = static_cast<size_t>(omp_get_num_threads()),
               i = static_cast<size_t>(omp_get_thread_num());
    const size_t begin = half_ * i / n, end = half_ * (i + 1) / n;
    std::memcpy(to_.get() + begin, from_.get() + begin, end - begin);
  }
}

}  // namespace deltic::cli
