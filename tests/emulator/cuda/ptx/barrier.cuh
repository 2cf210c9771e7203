// Emulated: barriers of a CTA. Fences order nothing here: one thread runs at a time.
#pragma once

#include <cstdint>

#include "cuda/ptx/shared.cuh"

namespace deltic::gpu {

inline void barrier_init(uint64_t* b, int arrivals) {
  emulator::Cta::current().barrier_init(b, arrivals);
}
inline void barrier_arrive(uint64_t* b) { emulator::Cta::current().barrier_arrive(b, 0); }
inline void barrier_expect(uint64_t* b, int bytes) {
  emulator::Cta::current().barrier_arrive(b, bytes);
}
inline void barrier_wait(uint64_t* b, uint32_t parity) {
  emulator::Cta::current().barrier_wait(b, parity);
}
inline bool barrier_test(uint64_t* b, uint32_t parity) {
  emulator::Cta::current().poll();
  return emulator::Cta::current().is_over(b, parity);
}
inline void named_sync(int id, int threads) {
  __syncwarp();
  emulator::Cta::current().named_sync(id, threads, true);
}
template <int kThreads>
inline void named_sync_1_converged() {
  emulator::Cta::current().named_sync(1, kThreads, true);
}
inline void named_arrive(int id, int threads) {
  __syncwarp();
  emulator::Cta::current().named_sync(id, threads, false);
}
inline void fence_async_proxy() {}
inline void fence_async_proxy_global() {}
inline void fence_barrier_init() {}

}  // namespace deltic::gpu
