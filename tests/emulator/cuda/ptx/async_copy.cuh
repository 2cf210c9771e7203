// Emulated: copies of a few bytes per thread from global to shared memory that go by themselves.
#pragma once

#include <cstring>

#include "cuda/ptx/shared.cuh"

namespace deltic::gpu {

template <int kBytes>
void copy_run_async(void* to, const void* from, bool is_there = true) {
  if (reinterpret_cast<uintptr_t>(to) % kBytes != 0 ||
      (is_there && reinterpret_cast<uintptr_t>(from) % kBytes != 0))
    emulator::fault("cp.async of %d bytes at an odd address", kBytes);
  emulator::Cta::current().add_copy(
      emulator::Copy::Kind::small,
      [=](std::vector<std::byte>& bytes) {
        bytes.assign(kBytes, std::byte{0});
        if (is_there) std::memcpy(bytes.data(), from, kBytes);
      },
      [=](const std::vector<std::byte>& bytes) { std::memcpy(to, bytes.data(), kBytes); });
}
inline void copy_async(void* to, const void* from) { copy_run_async<16>(to, from); }
inline void copy_async(void* to, const void* from, bool is_there) {
  copy_run_async<16>(to, from, is_there);
}
inline void copy_async_or_zero(void* to, const void* from, bool is_there) {
  copy_run_async<16>(to, from, is_there);
}
inline void copies_commit() { emulator::Cta::current().commit_small_copies(); }
inline void copies_wait(int left) { emulator::Cta::current().wait_small_copies(left); }
template <int kLeft>
inline void copies_wait() {
  copies_wait(kLeft);
}

}  // namespace deltic::gpu
