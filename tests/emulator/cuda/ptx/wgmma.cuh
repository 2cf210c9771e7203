// Emulated: warpgroup products, 64 x N x 16. Each warp has its own sixteen rows; between the
// instruction and the wait they may be done at any time.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "cta.h"
#include "cuda/ptx/swizzle.cuh"

namespace deltic::gpu {

inline void wgmma_arrive() { __syncwarp(); }
inline void wgmma_commit() {
  char own = 0;
  emulator::together(~0u, own,
                     [](char**, uint32_t) { emulator::Cta::current().commit_products(); });
}
template <int kPending>
inline void wgmma_wait() {
  char own = 0;
  emulator::together(~0u, own,
                     [](char**, uint32_t) { emulator::Cta::current().wait_products(kPending); });
}
template <int N>
inline void fence_operands(float (&)[N]) {}

// a: four words of this lane, or null: then a_tile.
template <class Element, Major kMajorA, Major kMajorB, int R>
void add_product(float (&d)[R], const uint32_t* a, uint64_t a_tile, uint64_t b_tile, bool keep) {
  struct Own {
    float* d;
    const uint32_t* a;
    uint64_t a_tile, b_tile;
    bool keep;
  } own{d, a, a_tile, b_tile, keep};
  emulator::together(~0u, own, [](Own** lanes, uint32_t present) {
    if (present != ~0u) emulator::fault("wgmma without the whole warp");
    emulator::Product p{};
    p.registers = R, p.has_a = lanes[0]->a != nullptr;
    p.a_tile = lanes[0]->a_tile, p.b_tile = lanes[0]->b_tile, p.keeps = lanes[0]->keep;
    p.is_half = std::is_same_v<Element, __half>;
    p.is_a_turned = kMajorA == Major::mn, p.is_b_turned = kMajorB == Major::mn;
    p.warp = emulator::Cta::thread() / 32 % kWarpgroupWarps;
    for (size_t l = 0; l < 32; ++l) {
      if (lanes[l]->a_tile != p.a_tile || lanes[l]->b_tile != p.b_tile || lanes[l]->keep != p.keeps)
        emulator::fault("lanes of a warp give wgmma different operands");
      p.d[l] = lanes[l]->d;
      for (size_t i = 0; i < 4 && p.has_a; ++i) p.a[l][i] = lanes[l]->a[i];
    }
    emulator::Cta::current().add_product(p);
  });
}
template <class Element, Major kMajorB, int R>
inline void wgmma(float (&d)[R], const uint32_t* a, uint64_t b, bool keep = true) {
  static_assert(R == 16 || R == 32 || R == 64, "N of 32, 64 or 128");
  add_product<Element, Major::k, kMajorB>(d, a, 0, b, keep);
}
template <class Element, Major kMajorA, Major kMajorB, int R>
inline void wgmma(float (&d)[R], uint64_t a, uint64_t b, bool keep = true) {
  static_assert(R == 8 || R == 16 || R == 32 || R == 64, "N of 16, 32, 64 or 128");
  add_product<Element, kMajorA, kMajorB>(d, nullptr, a, b, keep);
}
template <int kRegisters>
inline void more_registers() {}
template <int kRegisters>
inline void fewer_registers() {}

}  // namespace deltic::gpu
